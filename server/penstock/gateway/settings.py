"""All settings of the gateway, with their defaults and checks. settings_sources.py reads them."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from penstock.gateway.settings_checks import (
    checked_load_targets,
    listed,
    networks,
    require_addresses,
    require_keys_for_metrics,
    require_known_user,
    require_loaded,
    require_tls_pair,
    require_trace_folder,
    require_tracing,
    require_video,
    require_web_addresses,
)
from penstock.gpu.cards import ALL, checked_gpus
from penstock.gpu.mps.limits import memory_limit_error, read_percentage
from penstock.gpu.profiling import ProfilerMode
from penstock.gpu.telemetry.reader import checked_source, has_driver
from penstock.logs import LogFormat
from penstock.network import is_loopback
from penstock.outbound import OutboundPolicy
from penstock.port_policy import checked_host, checked_origin
from penstock.protocol.extensions import is_extension_name
from penstock.protocol.identity import ALL_ROLES, Role

PREFIX = "PENSTOCK_"
SHIPPED_MODELS = (Path(__file__).parents[1] / "models" / "shipped").resolve()  # a link to model_repository
MAX_WORKERS, MAX_DEFAULT_WORKERS, MAX_GPU_WORKERS, CORES_FOR_WORKERS = 64, 8, 16, 8
MAX_CONNECTION_AGE_S = 7 * 86_400.0


def port_of_engine(port: int | None, index: int) -> int | None:
    """The port of one of several Tritons, of which the first has this one. Each has three: HTTP, gRPC, metrics."""
    return port and port + 3 * index


class Settings(BaseSettings):
    """Every setting with its default. Ports may be 0: the system picks one."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    http_port: int = Field(8000, ge=0, le=65535)
    grpc_port: int = Field(8001, ge=0, le=65535)
    metrics_port: int = Field(8002, ge=0, le=65535)

    console: Literal["on", "off"] = "on"
    console_port: int = Field(8003, ge=0, le=65535)
    console_url: str = ""  # the console's URL for browsers, if not console_port of the same host
    video_url: str = "http://127.0.0.1:8010"  # video program whose streams the console shows
    video: bool = False  # whether the stack runs its own video program
    video_config: Path | None = None  # settings file of the video program; None for video.yaml in home
    video_port: int = Field(8010, ge=0, le=65535)

    allowed_host: tuple[str, ...] = ()  # names in Host headers of clients without a key, besides localhost and host
    cors_origin: tuple[str, ...] = ()  # of web pages that may call the server, such as https://console.example
    # addresses of a cloud's metadata service from which token keys may be fetched
    allow_outbound: Annotated[tuple[str, ...], AfterValidator(lambda given: OutboundPolicy(given).allowed)] = ()

    engine: str = "auto"
    engine_grpc: str = ""
    engine_header_file: Path | None = None  # NAME: VALUE lines for a Triton given by URL
    engine_http_port: int | None = Field(None, ge=0, le=65535)  # None: a Unix socket that only this user can connect to
    engine_grpc_port: int | None = Field(None, ge=0, le=65535)
    engine_metrics_port: int | None = Field(None, ge=0, le=65535)
    engine_environment: Path | None = None

    # cards of the engine that is started here: all (visible to CUDA), or numbers and UUIDs, comma-separated
    gpus: Annotated[str, AfterValidator(checked_gpus)] = ALL

    mps: Literal["off", "on", "auto"] = "off"  # CUDA's Multi-Process Service, for the Triton that is started here
    mps_directory: Path | None = None
    mps_active_thread_percentage: Annotated[float | Literal["auto"], BeforeValidator(read_percentage)] = 0
    mps_pinned_memory: str = ""  # GPU memory of a client: 4G, or by GPU 0=4G,1=2G

    gpu_metrics: Annotated[str, AfterValidator(checked_source)] = "auto"  # NVML; off; or a dcgm-exporter's URL
    profile: ProfilerMode = ProfilerMode.OFF  # of the Triton that is started here

    access_file: Path | None = None
    api_keys: tuple[str, ...] = Field((), repr=False)  # NAME:ROLES:SHA-256; the secrets are in the environment only
    anonymous: tuple[Role, ...] | None = None

    metrics_key_required: bool = False  # with the role read
    audit_log: Path | None = None  # JSON lines of admin actions and refused authentications

    tls_cert: Path | None = None  # PEM files; reloaded when they change
    tls_key: Path | None = None
    tls_client_ca: Path | None = None

    home: Path = Path("~/.penstock")
    model_repository: tuple[Path, ...] = (SHIPPED_MODELS,)
    models: tuple[str, ...] | None = None
    batching: dict[str, dict[str, str]] = Field(default_factory=dict)  # by model, see penstock.gateway.batching.options

    workers: int = Field(0, ge=0, le=MAX_WORKERS)

    max_body_bytes: int = Field(64 << 20, ge=1 << 10, le=(1 << 31) - 1)
    max_model_bytes: int = Field(1 << 30, ge=1 << 10, le=(1 << 31) - 1)  # of a model file that is added over HTTP
    body_timeout_s: float = Field(30.0, gt=0)
    max_pixels: int = Field(40_000_000, ge=1)
    max_inflight_requests: int = Field(1024, ge=1)
    max_inflight_bytes: int = Field(1 << 30, ge=1 << 20)
    max_connections: int = Field(16_384, ge=1)  # to the REST port and to the gRPC port, each
    max_connections_per_address: int = Field(4_096, ge=1)
    trusted_proxy: tuple[str, ...] = ()  # addresses or networks that forward many clients: no limit per address
    grpc_max_connection_age_s: float = Field(0.0, ge=0, le=MAX_CONNECTION_AGE_S)  # 0 for none
    head_timeout_s: float = Field(10.0, gt=0)
    write_timeout_s: float = Field(30.0, gt=0)
    decoders: int = Field(0, ge=0, le=256)
    decode_timeout_s: float = Field(5.0, gt=0)
    slab_bytes: int = Field(256 << 20, ge=0, le=64 << 30)  # memory shared with the engine; 0 for none

    # further servers that admins may run load tests against
    load_target: Annotated[tuple[str, ...], AfterValidator(checked_load_targets)] = ()

    allow_client_shm: bool = False
    allow_model_code: bool = False  # models with code in load requests; repositories are always trusted
    client_shm_lease_s: float = Field(3600.0, ge=1)

    canary_interval_s: float = Field(5.0, gt=0)
    canary_failures: int = Field(3, ge=1)
    execution_timeout_s: float = Field(30.0, gt=0)  # of a model without execution_timeout_ms
    required_models: tuple[str, ...] | None = None
    drain_delay_s: float = Field(0.0, ge=0)
    grace_s: float = Field(30.0, gt=0)

    otlp_endpoint: str = ""
    trace_file: Path | None = None

    log_format: LogFormat = LogFormat.TEXT
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("anonymous", mode="before")
    @classmethod
    def _none_is_no_role(cls, roles: object) -> object:
        return () if roles in (("none",), ["none"], "none") else roles

    @field_validator("trusted_proxy")
    @classmethod
    def _proxies_are_networks(cls, proxies: tuple[str, ...]) -> tuple[str, ...]:
        networks(proxies)
        return proxies

    @field_validator("allowed_host")
    @classmethod
    def _hosts_are_names(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(checked_host, hosts))

    @field_validator("cors_origin")
    @classmethod
    def _origins_are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            checked_origin(origin)
        return origins

    @model_validator(mode="after")
    def _check_pairs(self) -> "Settings":
        if self.engine not in ("auto", "triton", "embedded") and not (self.engine_is_external or self.engine_class):
            raise ValueError(
                f"engine is {self.engine!r}; it takes auto, triton, embedded, the http:// address of a Triton, or "
                "module:Class of your own"
            )
        require_addresses(self.engine_urls, self.engine_grpcs, self.engine_header_file)
        require_web_addresses(self.console_url, self.video_url)
        require_video(self.video_config, has_video=self.video)
        video_port = self.video_port if self.video else None
        served = (self.http_port, self.grpc_port, self.metrics_port, self.served_console_port, video_port)
        ports = [p for p in served if p]
        if self.engine_has_process:
            ports += [p for p in self.engine_ports if p]
        twice = {port for port in ports if ports.count(port) > 1}
        if twice:
            raise ValueError(f"port {min(twice)} is given twice; every listener needs its own")
        for path in (self.home, *self.model_repository):
            require_known_user(path)
        require_loaded(self.required_models, self.models)
        if self.allow_client_shm and self.grpc_max_connection_age_s and not self.has_keys:
            raise ValueError(
                "allow_client_shm with grpc_max_connection_age_s: a client without a key loses its regions with its "
                "connection; leave one of them out, or give clients keys"
            )
        require_tls_pair(self.tls_cert, self.tls_key, self.tls_client_ca)
        require_keys_for_metrics(is_required=self.metrics_key_required, has_keys=self.has_keys)
        if self.otlp_endpoint:
            require_tracing(self.otlp_endpoint)
        if self.trace_file is not None:
            require_trace_folder(self.trace_file, has_triton=self.engine_has_process)
        if self.mps == "on" and not self.engine_has_process:
            raise ValueError(
                "mps is for a Triton that is started here; leave it out, or use --engine triton (a Triton elsewhere "
                "becomes a client by its own CUDA_MPS_PIPE_DIRECTORY)"
            )
        if mistake := memory_limit_error(self.mps_pinned_memory):
            raise ValueError(f"mps_pinned_memory {mistake}")
        return self

    @property
    def engine_is_external(self) -> bool:
        """Whether the engine is given by URL."""
        return self.engine.startswith(("http://", "https://"))

    @property
    def engine_urls(self) -> tuple[str, ...]:
        """URLs of external Tritons; several of them serve the same models."""
        return listed(self.engine) if self.engine_is_external else ()

    @property
    def engine_grpcs(self) -> tuple[str, ...]:
        """Their gRPC addresses, in the same order, if given."""
        return listed(self.engine_grpc)

    @property
    def engine_ports(self) -> tuple[int | None, int | None, int | None]:
        """The ports of the stack's Triton: HTTP, gRPC, metrics."""
        return self.engine_ports_of(0)

    def engine_ports_of(self, index: int) -> tuple[int | None, int | None, int | None]:
        """Of the Triton of one of several cards, by its position."""
        http, grpc, metrics = self.engine_http_port, self.engine_grpc_port, self.engine_metrics_port
        return port_of_engine(http, index), port_of_engine(grpc, index), port_of_engine(metrics, index)

    @property
    def engine_is_embedded(self) -> bool:
        """Whether the engine runs in the gateway's process: ONNX Runtime, or a user's."""
        return self.engine == "embedded" or bool(self.engine_class)

    @property
    def engine_class(self) -> str:
        """`module:Class` of a user's engine; empty for ours."""
        return self.engine if is_extension_name(self.engine) else ""

    @property
    def engine_has_process(self) -> bool:
        """Whether the engine is, or with `auto` may be, our own process with its own ports."""
        return not self.engine_is_external and not self.engine_is_embedded

    @property
    def engine_has_files(self) -> bool:
        """Whether its models are those of the model repositories."""
        return not self.engine_is_external and not self.engine_class

    @property
    def served_console_port(self) -> int | None:
        """The console's port; None without a console."""
        return self.console_port if self.console == "on" else None

    @property
    def has_keys(self) -> bool:
        """Whether clients have API keys or tokens."""
        return self.access_file is not None or bool(self.api_keys)

    @property
    def anonymous_roles(self) -> frozenset[Role]:
        """Roles of a client without a key: as set, otherwise none if there are keys, and all if not."""
        if self.anonymous is not None:
            return frozenset(self.anonymous)
        return frozenset() if self.has_keys else ALL_ROLES

    @property
    def restricts_access(self) -> bool:
        """Whether some requests are refused: there are keys, or anonymous clients lack a role."""
        return self.has_keys or self.anonymous_roles != ALL_ROLES

    @property
    def is_exposed(self) -> bool:
        """Whether other machines may connect and access was not configured."""
        return not is_loopback(self.host) and not self.has_keys and self.anonymous is None

    @property
    def home_path(self) -> Path:
        return self.home.expanduser()

    @property
    def repositories(self) -> tuple[Path, ...]:
        """Shipped (or given) repositories, then the one that `penstock models pull` fills; each once."""
        return tuple(dict.fromkeys((*(path.expanduser() for path in self.model_repository), self.home_path / "models")))

    @property
    def decoder_count(self) -> int:
        """Decoder processes; by default one per core."""
        return self.decoders or len(os.sched_getaffinity(0))

    @property
    def worker_count(self) -> int:
        """Processes that serve requests; by default see default_workers."""
        return self.workers or default_workers(len(os.sched_getaffinity(0)), has_gpu=has_driver())

    @property
    def decoder_share(self) -> int:
        """Decoder processes of each process that serves requests."""
        return max(1, self.decoder_count // self.worker_count)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # read_settings merges the sources itself, to report the line of a mistake


def default_workers(core_count: int, *, has_gpu: bool) -> int:
    """The default number of processes that serve requests: one (the whole gateway) below CORES_FOR_WORKERS.

    A worker per four cores, because models run on the others; with a GPU two per three: beside an H200, a picture takes
    a worker 0.7 ms.
    """
    if core_count < CORES_FOR_WORKERS:
        return 1
    return min(MAX_GPU_WORKERS, -(-core_count * 2 // 3)) if has_gpu else min(MAX_DEFAULT_WORKERS, core_count // 4)
