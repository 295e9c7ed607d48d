"""Parts that main.py and worker.py create alike from the settings: engine, shared memory, authentication, limits."""

import asyncio
import os
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tritonclient.grpc import service_pb2

from penstock.engines.call_options import EngineHeaders, RetryBudget, read_header_file
from penstock.engines.ort_serving.placement import EngineFacts
from penstock.engines.probes import LoadTrial, RowChecks, TryImage, try_rows
from penstock.engines.replica import CardReplicas
from penstock.engines.replicas import Replicas
from penstock.engines.segments import open_segment, shared_memory_shortage
from penstock.engines.torch_serving.slab_pictures import FILE_NAME
from penstock.engines.triton.client import DiskLoads, SupervisedTriton, TritonEngine
from penstock.engines.triton.endpoints import TritonListeners
from penstock.engines.triton.http_client import parse_engine_url
from penstock.engines.watch import EngineWatch, WatchOptions
from penstock.gateway.audit import NO_AUDIT, AuditLog
from penstock.gateway.auth.api_keys import key_of_hashed
from penstock.gateway.auth.authenticator import Authenticator, AuthOptions
from penstock.gateway.auth.rate_limiter import QuotaStore, RateLimiter
from penstock.gateway.batching.options import DeclaredOptions
from penstock.gateway.card_engines import NO_CARDS, CardEngines, read_card_engines
from penstock.gateway.grpc.server import GrpcLimits, GrpcServer
from penstock.gateway.rest.home_page import HomePage
from penstock.gateway.rest.limits import ConnectionLimits, RestOptions
from penstock.gateway.rest.listener import HttpListener
from penstock.gateway.rest.routes import RequestAuthentication
from penstock.gateway.settings import Settings
from penstock.gateway.settings_checks import networks
from penstock.gateway.shared_memory.regions import (
    REMOTE_ENGINE,
    SEVERAL_ENGINES,
    EngineTraits,
    NoSharedMemory,
    SharedMemory,
)
from penstock.gateway.shared_memory.registry import RegistryLimits
from penstock.gateway.workers.running_stacks import reachable_folder
from penstock.gateway.workers.shared_counters import CounterPage, CounterRow
from penstock.gateway.workers.slab import SharedSlab, anonymous_memory
from penstock.gateway.workers.slab_registration import SlabEngine, SlabRegistration
from penstock.gateway.workers.slab_sharing import slab_bytes_with_client_parts
from penstock.logs import get_logger
from penstock.network import host_and_port, is_loopback
from penstock.port_policy import BrowserPolicy, PortLimits
from penstock.protocol.call import GrpcCall
from penstock.protocol.engine import Engine, ModelConfig, Relay
from penstock.protocol.errors import InferenceError
from penstock.protocol.extensions import ExtensionError
from penstock.protocol.grpc_messages import parsed

if TYPE_CHECKING:
    from penstock.gateway.otel import OtelTracer


log = get_logger("gateway")

MERGING_BACKENDS = ("onnxruntime", "torch")  # ours: they merge the requests that Triton's dynamic batcher groups
METADATA_TIMEOUT_S, METRICS_PORT_CONNECTIONS = 2.0, 64
MAX_PARALLEL_LOADS = 8  # models; Triton loads each in its own thread


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Addresses of one engine. metrics_url: None if unknown."""

    http_url: str
    grpc_address: str
    metrics_url: str | None


def engine_addresses(settings: Settings, run_dir: Path) -> tuple[EngineAddress, ...]:
    """Addresses of the stack's Triton, or of those given by URL; gRPC is on the next port unless given."""
    if not settings.engine_is_external:
        own = TritonListeners(run_dir, *settings.engine_ports)
        return (EngineAddress(own.http_url, own.grpc_address, own.metrics_url),)
    said = settings.engine_grpcs or ("",) * len(settings.engine_urls)
    return tuple(_address(url, grpc) for url, grpc in zip(settings.engine_urls, said, strict=True))


def _address(url: str, grpc_address: str) -> EngineAddress:
    origin = parse_engine_url(url)
    metrics_url = f"http://{host_and_port(origin.host, origin.port + 2)}/metrics"
    return EngineAddress(url.rstrip("/"), grpc_address or host_and_port(origin.host, origin.port + 1), metrics_url)


@dataclass(frozen=True, slots=True)
class ConnectedEngine:
    """A connected engine. place: its address, for the log. slab: shared memory that it reads tensors from.

    budget: of retried calls, None for no retries. replicas: None for a single engine. cards: the replicas' cards, if
    each has one. tritons: by replica, or the only one. facts: how the embedded engine runs a model; raises
    InferenceError for one that is not loaded.
    """

    engine: Engine
    place: str
    slab: SharedSlab | None = None
    budget: RetryBudget | None = None
    replicas: Replicas | None = None
    cards: CardEngines = NO_CARDS
    tritons: Mapping[str, TritonEngine] = field(default_factory=dict)
    facts: Callable[[str], EngineFacts] | None = None


def compose_engine(
    settings: Settings, run_dir: Path, restart: Callable[[str, str], None] | None = None
) -> ConnectedEngine:
    """The engine of the settings. Call it inside the running loop. run_dir: the stack's. restart: see CardReplicas."""
    if settings.engine_is_embedded:
        return _embedded_engine(settings)
    budget = RetryBudget()
    cards = read_card_engines(run_dir)
    if cards.engines:
        engines: dict[str, TritonEngine] = {
            each.label: _own_triton(settings, Path(each.folder), budget, index)
            for index, each in enumerate(cards.engines)
        }
        place, rules = ", ".join(engines), CardReplicas(cards.homes, restart)
    else:
        addresses = engine_addresses(settings, run_dir)
        engines = {address.http_url: _triton(settings, address, budget, run_dir) for address in addresses}
        place = ", ".join(f"{address.http_url} (gRPC {address.grpc_address})" for address in addresses)
        rules = None
    has_slab = settings.slab_bytes and is_on_this_host(settings)
    slab = SharedSlab(asyncio.get_running_loop().call_later) if has_slab else None
    if len(engines) == 1:
        (triton,) = engines.values()
        return ConnectedEngine(triton, place, slab, budget, tritons=engines)
    replicas = Replicas(engines, budget=budget, cards=rules)
    return ConnectedEngine(replicas, place, slab, budget, replicas, cards, engines)


def _own_triton(settings: Settings, run_dir: Path, budget: RetryBudget, index: int | None = None) -> SupervisedTriton:
    """index: of its card, among several."""
    listeners = TritonListeners(reachable_folder(run_dir), *settings.engine_ports_of(index or 0))
    return SupervisedTriton(
        http_url=listeners.http_url,
        grpc_address=listeners.grpc_address,
        metrics_url=listeners.metrics_url,
        max_connections=settings.max_inflight_requests,
        budget=budget,
        disk=DiskLoads(settings.repositories, run_dir / "labels", has_one_card=index is not None),
    )


def _triton(settings: Settings, address: EngineAddress, budget: RetryBudget, run_dir: Path) -> TritonEngine:
    if not settings.engine_is_external:
        return _own_triton(settings, run_dir, budget)
    return TritonEngine(
        http_url=address.http_url,
        grpc_address=address.grpc_address,
        metrics_url=address.metrics_url,
        max_connections=settings.max_inflight_requests,
        budget=budget,
        headers=EngineHeaders(read_header_file(file)) if (file := settings.engine_header_file) is not None else None,
    )


def compose_registration(
    settings: Settings, engine: ConnectedEngine, watch: EngineWatch, run_dir: Path
) -> SlabRegistration | None:
    """Registers the slab at each Triton; None without a slab, or for an engine that needs no registration."""
    if engine.slab is None or not engine.tritons:
        return None
    replicas = engine.replicas
    return SlabRegistration(
        engine.slab,
        [
            SlabEngine(
                triton, triton, (lambda: watch.generation) if replicas is None else partial(replicas.generation, name)
            )
            for name, triton in engine.tritons.items()
        ],
        size_bytes=slab_bytes_with_client_parts(settings.slab_bytes, len(engine.tritons)),
        published=None if settings.engine_is_external else run_dir / FILE_NAME,
    )


def is_on_this_host(settings: Settings) -> bool:
    """Whether every engine is on this host."""
    return all(is_loopback(urlsplit(url).hostname or "") for url in settings.engine_urls)


def _embedded_engine(settings: Settings) -> ConnectedEngine:
    engine = _user_engine(settings) if settings.engine_class else _onnx_engine(settings)
    slab = SharedSlab(asyncio.get_running_loop().call_later) if settings.slab_bytes else None
    if slab is not None:
        slab.renew(anonymous_memory(slab_bytes_with_client_parts(settings.slab_bytes)))
    return ConnectedEngine(engine, settings.engine, slab, facts=getattr(engine, "facts", None))


def _onnx_engine(settings: Settings) -> Engine:
    from penstock.engines.embedded.engine import EmbeddedEngine  # here because it loads ONNX Runtime

    repositories = tuple(path for path in settings.repositories if path.is_dir())
    return EmbeddedEngine(
        repositories, max_waiting=settings.max_inflight_requests, max_body_bytes=settings.max_body_bytes
    )


def _user_engine(settings: Settings) -> Engine:
    from penstock.engines.embedded.user_engine import CustomEngine

    try:
        return CustomEngine(settings.engine_class, max_body_bytes=settings.max_body_bytes)
    except ExtensionError as error:
        raise ExtensionError(f"engine {settings.engine_class}: {error}") from error


def compose_memory(settings: Settings, relay: Relay, watch: EngineWatch) -> SharedMemory | NoSharedMemory:
    """Shared memory of clients and the engine, or a NoSharedMemory with the reason.

    While the shared memory of the stack's Triton is nearly full, the watch reports the engine as down.
    """
    if settings.engine_has_process:
        watch.hindrance = shared_memory_shortage
    if not settings.allow_client_shm:
        return NoSharedMemory()
    if isinstance(relay, Replicas):
        return NoSharedMemory(SEVERAL_ENGINES)
    if not is_on_this_host(settings):
        return NoSharedMemory(REMOTE_ENGINE)
    is_embedded = settings.engine_is_embedded
    traits = EngineTraits(not settings.engine_is_external, takes_offsets=is_embedded, has_cuda=not is_embedded)
    limits = RegistryLimits(lease_s=settings.client_shm_lease_s)
    return SharedMemory(relay, traits, limits=limits, open_segment=open_segment, generation=lambda: watch.generation)


async def describe_engine(settings: Settings, relay: Relay) -> str:
    """The engine's name and version, for display."""
    if settings.engine_class:
        return f"{settings.engine_class} in the gateway's process"
    if settings.engine_is_embedded:
        import onnxruntime

        return f"embedded (ONNX Runtime {onnxruntime.__version__} on the {onnxruntime.get_device()})"
    place = f" at {', '.join(settings.engine_urls)}" if settings.engine_is_external else ""
    question = GrpcCall("/inference.GRPCInferenceService/ServerMetadata", b"")
    try:
        answer = await relay.send(question, deadline=time.monotonic() + METADATA_TIMEOUT_S)
        metadata = parsed(service_pb2.ServerMetadataResponse, answer.message)  # empty if it was rejected
    except InferenceError:
        return f"triton{place}"
    return f"{metadata.name or 'triton'} {metadata.version}".rstrip() + place


def declared_options(settings: Settings) -> DeclaredOptions:
    """Batching options of every model, from its config and the settings."""
    return DeclaredOptions(
        settings.batching,
        engine_batches=not settings.engine_is_embedded,
        execution_timeout_s=settings.execution_timeout_s,
        merging_backends=MERGING_BACKENDS if settings.engine_has_process else (),
    )


def watch_options(settings: Settings, options: DeclaredOptions, engine: ConnectedEngine, see: TryImage) -> WatchOptions:
    """The watch's options. see: see LoadTrial."""

    def timeout_s(config: ModelConfig) -> float:
        return options.of(config).execution_timeout_s

    rows = RowChecks(engine.engine, settings.repositories if settings.engine_has_files else (), timeout_s)
    trial = partial(try_rows, rows, wants=options.wants_trial)
    return WatchOptions(
        wanted=settings.models,
        loads=not settings.engine_is_external or settings.models is not None,
        canary_interval_s=settings.canary_interval_s,
        canary_failures=settings.canary_failures,
        execution_timeout_s=timeout_s,
        try_model=LoadTrial(engine.engine, see=see, try_rows=trial, execution_timeout_s=timeout_s),
        loads_at_once=1 if settings.engine_is_embedded else min(MAX_PARALLEL_LOADS, len(os.sched_getaffinity(0))),
    )


def compose_authenticator(
    settings: Settings, board: QuotaStore | None = None, audit: AuditLog = NO_AUDIT
) -> Authenticator | None:
    """Checks keys and roles; None if every client has all roles. board: quotas shared by processes."""
    if not settings.restricts_access:
        return None
    keys, allowed = tuple(map(key_of_hashed, settings.api_keys)), settings.allow_outbound
    quotas = RateLimiter(
        max_requests=settings.max_inflight_requests, max_bytes=settings.max_inflight_bytes, board=board
    )
    return Authenticator(
        AuthOptions(settings.access_file, keys, settings.anonymous_roles, allowed), quotas, audit=audit
    )


def compose_request_authentication(
    settings: Settings, door: Authenticator | None, *, needs_key: bool = False
) -> RequestAuthentication:
    """Checks API keys, and origin and host of browsers. needs_key: see Authenticator.admit."""
    return RequestAuthentication(
        door, BrowserPolicy(settings.host, settings.allowed_host, settings.cors_origin), needs_key=needs_key
    )


def rest_options(settings: Settings) -> RestOptions:
    """Limits of a REST request's body, and what / answers."""
    console = HomePage(settings.console_url, settings.served_console_port)
    most = settings.max_body_bytes, settings.body_timeout_s
    return RestOptions(*most, max_model_bytes=settings.max_model_bytes, home_page=console)


def port_limits(settings: Settings, *, open_files: int | None = None) -> PortLimits:
    """Connection limits of the REST port and the gRPC port. open_files: overrides RLIMIT_NOFILE; -1 for none.

    Each port gets at most a quarter of the open files; the rest is for the engine, images and metrics. One address gets
    at most half of a port. Worker processes share equally, as the system spreads connections evenly.
    """
    if open_files is None:
        open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    total = max(2, settings.max_connections // settings.worker_count)
    if open_files >= 0:
        total = min(total, max(2, open_files // 4))
    return PortLimits(
        max_connections=total,
        max_per_address=max(1, min(settings.max_connections_per_address // settings.worker_count, total // 2)),
        trusted_proxies=networks(settings.trusted_proxy),
    )


def connection_limits(settings: Settings, ports: PortLimits) -> ConnectionLimits:
    """Connection limits of the REST port."""
    return ConnectionLimits(
        max_connections=ports.max_connections,
        max_per_address=ports.max_per_address,
        trusted_proxies=ports.trusted_proxies,
        head_timeout_s=settings.head_timeout_s,
        write_timeout_s=settings.write_timeout_s,
    )


def metrics_limits() -> ConnectionLimits:
    """Connection limits of the metrics port: few, so that it never uses up the other ports' descriptors."""
    return ConnectionLimits(max_connections=METRICS_PORT_CONNECTIONS, max_per_address=METRICS_PORT_CONNECTIONS // 2)


def grpc_limits(settings: Settings, ports: PortLimits | None) -> GrpcLimits:
    """Limits of the gRPC port. ports: None for the core of several workers, whose only clients are the workers."""
    return GrpcLimits(
        max_message_bytes=settings.max_body_bytes,
        max_connection_age_s=settings.grpc_max_connection_age_s if ports is not None else 0.0,
        connections=ports,
    )


def connection_readers(
    page: CounterPage | None, rest: HttpListener, grpc_server: GrpcServer
) -> dict[str, Callable[[], int]]:
    """Client connections by metric. page: the workers' counts, None without workers."""
    if page is not None:
        return {
            "http_connections": partial(page.total, CounterRow.CONNECTIONS),
            "grpc_connections": partial(page.total, CounterRow.GRPC_CONNECTIONS),
        }
    return {"http_connections": lambda: rest.connection_count, "grpc_connections": lambda: grpc_server.connection_count}


def compose_tracer(endpoint: str) -> "OtelTracer | None":
    """Exports traces to the collector at this address; None if it is empty."""
    if not endpoint:
        return None
    from penstock.gateway.otel import OtelTracer  # here, since it is an extra

    log.info("tracing", collector=endpoint)
    return OtelTracer(endpoint, _log_collector)


def _log_collector(why_lost: str) -> None:
    if why_lost:
        log.warning("the collector of traces is lost; spans are dropped and counted until it is back", reason=why_lost)
    else:
        log.info("the collector of traces is back")


async def until_stopped(stop: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
    """Returns when stopped. Raises if a task fails; tasks run until cancelled."""
    stopped = asyncio.create_task(stop.wait())
    pending: set[asyncio.Task[object]] = {stopped, *tasks}
    while not stopped.done():
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
