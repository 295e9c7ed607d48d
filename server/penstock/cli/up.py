"""`penstock up`: the whole stack in the foreground, until Ctrl-C."""

import asyncio
import os
import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.gateway_client import API_KEY_VARIABLE
from penstock.cli.terminal import fail
from penstock.gateway.settings import KEYS_VARIABLE, SHIPPED_MODELS, SettingsError, read_settings
from penstock.gateway.stack.stack import Announcement, Stack
from penstock.gateway.stack.startup import (
    CannotStart,
    EngineChoice,
    check_access,
    choose_engine,
    choose_mps,
    resolve_ports,
)
from penstock.gateway.workers.interrupt_affinity import avoid_interrupted_cores
from penstock.logs import LogFormat, configure_logs
from penstock.models.catalogue import DEFAULT_DETECTOR
from penstock.process import remove_working_directory

OPEN_FILES = 65_536  # a request in flight holds one or two; the usual soft limit of 1,024 is under the default's need

MIN_OPEN_FILES = 512  # libraries, pipes and the engine's connections take about 200

Engines = Annotated[
    str | None,
    typer.Option(
        help="auto, triton, embedded, a Triton's http:// address (several with commas), or module:Class [auto]"
    ),
]
EngineHeaders = Annotated[
    Path | None,
    typer.Option(
        help="file with headers (NAME: VALUE lines) for every call to that Triton, if its APIs are restricted [none]"
    ),
]
EngineHttpPort = Annotated[
    int | None,
    typer.Option(
        help="open the REST API of the stack's Triton on this port of 127.0.0.1, for every local program; not opened "
        "if there are API keys [none]"
    ),
]
EngineGrpc = Annotated[str | None, typer.Option(help="that Triton's gRPC address, or each one's [the next port]")]
Collector = Annotated[str | None, typer.Option(help="OpenTelemetry collector for traces, http://host:4318 [none]")]
Mps = Annotated[
    str | None,
    typer.Option(
        help="off, on, auto: share the GPU among the supervised Triton's model processes under CUDA's MPS [off]"
    ),
]
MpsDirectory = Annotated[
    Path | None, typer.Option(help="folder of the MPS daemon's pipes; one that listens there is used [one of our own]")
]
MpsThreads = Annotated[
    str | None,
    typer.Option(help="percent of a card's threads for an MPS client; 0 for all; auto: by the instances [0]"),
]
MpsMemory = Annotated[
    str | None, typer.Option(help="of a card's memory for an MPS client, 4G, or by card 0=4G,1=2G [all]")
]
Workers = Annotated[
    int | None,
    typer.Option(min=0, help="processes that serve requests, over one core; 0 goes by the cores: 1 below 8 [0]"),
]
Roles = Annotated[str | None, typer.Option(help="roles of a caller without a key: infer,read,admin, or none")]
Repositories = Annotated[
    list[Path] | None, typer.Option(help="folder of models, instead of the shipped one; may be repeated")
]
TraceFile = Annotated[
    Path | None, typer.Option(help="where the supervised Triton writes traces, once a client asks for them [none]")
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        help="off, auto, nsys, ncu, nvtx: start Triton under NVIDIA's profiler, its report in HOME/profiles; nvtx "
        "marks stages only [off]"
    ),
]
RequiredModels = Annotated[
    str | None,
    typer.Option(
        help="models that must serve for the gateway to be ready: names, comma-separated, or * for all loaded [any one]"
    ),
]
Batching = Annotated[
    list[str] | None,
    typer.Option(help="who forms a model's batches, MODEL=gateway, triton or off[,NAME=VALUE…]; may be repeated"),
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        help="name that clients without a key may use for this server (Host header) besides localhost and --host: "
        "a name, *.example.com, or * for any; may be repeated"
    ),
]
CorsOrigins = Annotated[
    list[str] | None,
    typer.Option(help="origin of web pages that may call it: https://console.example; may be repeated [its own]"),
]
SharesMemory = Annotated[
    bool | None,
    typer.Option(
        "--allow-client-shm",
        help="let clients of this machine share memory with the engine; off, since they then may have it read and "
        "write any segment that it may, and may end it by cutting one [off]",
    ),
]
AllowsModelCode = Annotated[
    bool | None,
    typer.Option(
        "--allow-model-code",
        help="allow clients with the role admin to load models that can run code here; without it, load requests may "
        "contain ONNX models only [off]",
    ),
]
ClientCa = Annotated[Path | None, typer.Option(help="PEM file of a CA: clients need a certificate signed by it [none]")]
AllowsOutbound = Annotated[
    list[str] | None,
    typer.Option(
        help="address or network (169.254.169.254) of a cloud's metadata service that jwks_url of the access file may "
        "use; may be repeated [none]"
    ),
]

MetricsKey = Annotated[
    bool | None, typer.Option("--metrics-key-required", help="port 8002 requires a key with the role read [off]")
]

Proxies = Annotated[
    str | None,
    typer.Option(help="proxies without a connection limit per address: addresses or networks, comma-separated [none]"),
]

EPILOG = """\
Every setting is also an environment variable, PENSTOCK_HTTP_PORT for --http-port. Flags override variables, and
variables override the file.

On loopback every client may do everything. To listen on other addresses, give API keys, or --anonymous with the roles
of clients without a key. `penstock keys new` creates a key in the file for --access-file. Without a file, give
api_keys (PENSTOCK_API_KEYS) as NAME:ROLE+ROLE:SECRET, comma-separated.

Batching options of a model: batch_owner, slo_p99_ms (deadline of requests without one), max_batch_size,
max_queue_delay_us, max_queue_size, max_queue_bytes. Set them as parameters in config.pbtxt, in the file as
[batching.MODEL], or as --batching street=gateway,slo_p99_ms=50; In PENSTOCK_BATCHING, separate models with ';'.

PENSTOCK_LAYOUTS, a variable only, allows output layouts of your own: module:function, comma-separated.

These settings have no flag: max_body_bytes [64 MiB], max_model_bytes [1 GiB, of a model file that is added over HTTP],
body_timeout_s [30], max_pixels [40000000], max_inflight_requests [1024], max_inflight_bytes [1 GiB], max_connections
[16384 to the REST port and 16384 to the gRPC port, each at most a quarter of the open files],
max_connections_per_address [4096, at most half of max_connections], grpc_max_connection_age_s [0: no limit; older
connections take no new calls, so that clients reconnect], head_timeout_s [10], write_timeout_s [30], decoders [one per
core], decode_timeout_s [5], slab_bytes [256 MiB of memory shared with the engine; 0: none], client_shm_lease_s [3600,
of an idle region], canary_interval_s [5], canary_failures [3], execution_timeout_s [30; a model that answers nothing
for this time hangs], gpu_metrics [auto: GPU activity by NVML; off; or a dcgm-exporter's http://host:9400/metrics].
"""


def up(
    config: Annotated[Path | None, typer.Option(help="TOML file of settings")] = None,
    host: Annotated[str | None, typer.Option(help="address to listen on [127.0.0.1 and ::1]")] = None,
    http_port: Annotated[int | None, typer.Option(help="REST [8000]; 0 picks a free one")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC [8001]")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Prometheus metrics [8002]")] = None,
    allowed_host: AllowedHosts = None,
    cors_origin: CorsOrigins = None,
    engine: Engines = None,
    engine_grpc: EngineGrpc = None,
    engine_header_file: EngineHeaders = None,
    engine_http_port: EngineHttpPort = None,
    engine_grpc_port: Annotated[int | None, typer.Option(help="the same for its gRPC API [none]")] = None,
    engine_metrics_port: Annotated[int | None, typer.Option(help="the same for its metrics [none]")] = None,
    engine_environment: Annotated[Path | None, typer.Option(help="environment that holds Triton's wheel")] = None,
    mps: Mps = None,
    mps_directory: MpsDirectory = None,
    mps_active_thread_percentage: MpsThreads = None,
    mps_pinned_memory: MpsMemory = None,
    model_repository: Repositories = None,
    models: Annotated[str | None, typer.Option(help="names to load, with commas [all]")] = None,
    required_models: RequiredModels = None,
    batching: Batching = None,
    home: Annotated[Path | None, typer.Option(help="where pulled models are [~/.penstock]")] = None,
    access_file: Annotated[Path | None, typer.Option(help="TOML file of API keys, their roles and rates")] = None,
    anonymous: Roles = None,
    metrics_key_required: MetricsKey = None,
    audit_log: Annotated[
        Path | None, typer.Option(help="audit log: JSON lines of admin actions and refused authentications [none]")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM certificate chain; turns on TLS for every port [none]")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="the certificate's key, PEM without a password")] = None,
    tls_client_ca: ClientCa = None,
    allow_client_shm: SharesMemory = None,
    allow_model_code: AllowsModelCode = None,
    allow_outbound: AllowsOutbound = None,
    trusted_proxy: Proxies = None,
    otlp_endpoint: Collector = None,
    trace_file: TraceFile = None,
    profile: ProfileOption = None,
    workers: Workers = None,
    grace_s: Annotated[float | None, typer.Option(help="seconds that running requests get at the end [30]")] = None,
    drain_delay_s: Annotated[float | None, typer.Option(help="seconds not ready but serving before it [0]")] = None,
    log_format: Annotated[LogFormat | None, typer.Option(help="text or json [text]")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning, error [info]")] = None,
) -> None:
    """Start the engine and the gateway and stay in the foreground; Ctrl-C drains and stops both.

    The engine is Triton where it can run, else ONNX Runtime embedded in the gateway, which serves ONNX models only;
    --engine triton, embedded, a URL or module:Class of your own says which.
    """
    flags: dict[str, Any] = {name: value for name, value in locals().items() if name != "config"}
    try:
        code = _serve(flags, config)
    except (SettingsError, CannotStart) as error:
        fail(str(error))
    raise typer.Exit(code)


def _serve(flags: dict[str, Any], config: Path | None) -> int:
    """The exit code. flags: as they were given. Raises SettingsError, CannotStart."""
    for name in ("models", "required_models", "anonymous", "trusted_proxy"):
        flags[name] = tuple(filter(None, flags[name].split(","))) if flags.get(name) is not None else None
    for name in ("batching", "model_repository", "allowed_host", "cors_origin", "allow_outbound"):
        flags[name] = tuple(flags.get(name) or ()) or None
    settings = read_settings(flags, file=config)
    configure_logs(settings.log_format, settings.log_level)
    for secret in (KEYS_VARIABLE, API_KEY_VARIABLE):
        os.environ.pop(secret, None)  # no child needs it, and models can read theirs
    check_access(settings)
    allow_open_files()
    remove_working_directory()
    choice = choose_mps(choose_engine(settings))
    return asyncio.run(_run(replace(choice, settings=resolve_ports(choice.settings))))


def allow_open_files() -> None:
    """Raises the soft limit of open files to OPEN_FILES, or to the hard limit if that is lower. Never lowers it.

    Raises SettingsError if the hard limit is below MIN_OPEN_FILES.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if hard != resource.RLIM_INFINITY and hard < MIN_OPEN_FILES:
        raise SettingsError(
            f"the limit of open files is {hard}, at least {MIN_OPEN_FILES} are needed; raise it with ulimit -n, or "
            "docker run --ulimit nofile=65536"
        )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _run(choice: EngineChoice) -> int:
    with avoid_interrupted_cores():
        return await Stack(choice, announce=announce).run()


def announce(ready: Announcement) -> None:
    """Print the summary: unavailable models with their reasons, the engine, the models that serve, the URLs.

    If only shipped models serve, it offers the default detector.
    """
    lines = [
        f"cannot serve {name}: {reason.removeprefix(f'model {name!r} cannot be loaded: ')}"
        for name, reason in sorted(ready.unavailable.items())
    ]
    lines.append(f"engine: {ready.engine}")
    nothing = "no model: see the reasons above" if ready.unavailable else "no model yet"
    lines.append(f"serving {', '.join(ready.models) or nothing}")
    if {*ready.models, *ready.unavailable} <= {path.name for path in SHIPPED_MODELS.iterdir()}:
        lines.append(f"for a detector of 80 classes: penstock models pull {DEFAULT_DETECTOR}")
    lines.append("Ctrl-C drains and stops")
    workers = f"  ({ready.workers} workers)" if ready.workers > 1 else ""
    if ready.not_ready:
        lines.append(f"health checks fail: {ready.not_ready}")
    state = "not ready" if ready.not_ready else "ready"
    lines.append(f"{state}: REST {ready.http_url}  gRPC {ready.grpc_address}  metrics {ready.metrics_url}{workers}")
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
