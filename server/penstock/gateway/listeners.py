"""Opens the gateway's listeners: REST, gRPC and metrics."""

from dataclasses import dataclass
from pathlib import Path

from penstock.engines.watch import EngineWatch
from penstock.gateway import composition
from penstock.gateway.dataplane import DataPlane
from penstock.gateway.grpc.server import GrpcEndpoint, GrpcServer, ProcessRole, serve
from penstock.gateway.load.service import LoadTests, OwnAddress
from penstock.gateway.metrics import Metrics
from penstock.gateway.model_adder import ModelAdder
from penstock.gateway.model_check import ModelChecker
from penstock.gateway.model_command import ModelProcessOptions
from penstock.gateway.rest.app import CoreServices, create_app
from penstock.gateway.rest.limits import ConnectionLimits
from penstock.gateway.rest.listener import HttpListener
from penstock.gateway.rest.metrics_app import create_metrics_app
from penstock.gateway.rest.routes import ForwardedIdentity
from penstock.gateway.serving_parts import ServingParts
from penstock.gateway.settings import Settings
from penstock.gateway.system.model_reports import ModelReports
from penstock.gateway.system.reports import SystemReports
from penstock.gateway.workers.core_relay import GRPC_SOCKET
from penstock.gateway.workers.shared_counters import CounterPage
from penstock.logs import get_logger
from penstock.network import Sockets, addresses_of, connectable_host, host_and_port
from penstock.protocol.engine import Engine

log = get_logger("gateway")


@dataclass(frozen=True, slots=True)
class ServedParts:
    """Parts of a gateway that its listeners serve. engine: for its metrics. page: counters of workers, or None."""

    plane: DataPlane
    parts: ServingParts
    metrics: Metrics
    engine: Engine
    watch: EngineWatch
    page: CounterPage | None
    system: SystemReports
    models: ModelReports
    load: LoadTests


@dataclass(frozen=True, slots=True)
class Listeners:
    """Listeners of a gateway. metrics: for its metrics and the engine's."""

    rest: HttpListener
    grpc: GrpcServer
    metrics: HttpListener

    def tell(self, *, has_workers: bool) -> None:
        """Logs the ports. Workers connect over Unix sockets, which have no port."""
        if has_workers:
            log.info("the workers' core listens", metrics=self.metrics.port)
        else:
            log.info("listening", http=self.rest.port, grpc=self.grpc.port, metrics=self.metrics.port)


def own_address(settings: Settings) -> OwnAddress:
    """Where a load test reaches this gateway, also if it listens on every address."""
    host, scheme = connectable_host(settings.host), "https" if settings.tls_cert is not None else "http"
    url, grpc = f"{scheme}://{host_and_port(host, settings.http_port)}", host_and_port(host, settings.grpc_port)
    return OwnAddress(url, grpc, f"{scheme}://{host_and_port(host, settings.metrics_port)}/metrics")


async def open_listeners(
    settings: Settings, gateway: ServedParts, http_address: Sockets | Path, metrics_sockets: Sockets
) -> Listeners:
    """Listeners for clients; for workers if http_address is a path. Only gRPC listens already."""
    run_dir = http_address.parent if isinstance(http_address, Path) else None
    ports, certificates = composition.port_limits(settings), gateway.parts.certificates
    tls = certificates.context if certificates is not None else None
    checked = composition.compose_request_authentication(settings, gateway.parts.authenticator)
    gate = checked if run_dir is None else ForwardedIdentity(checked.open_to)
    adder = ModelAdder(gateway.plane, gateway.parts.uploads, ModelProcessOptions(allows_code=settings.allow_model_code))
    checker = ModelChecker(gateway.parts.uploads, own_address(settings).url, audit=gateway.parts.audit)
    services = CoreServices(adder, gateway.system, gateway.models, gateway.load, checker)
    app = create_app(gateway.plane, composition.rest_options(settings), gateway.metrics, gate=gate, services=services)
    rest = HttpListener(
        app,
        http_address,
        limits=composition.connection_limits(settings, ports) if run_dir is None else ConnectionLimits(),
        unread=gateway.parts.limiter,
        refused=gateway.metrics.rejected,
        tls=tls if run_dir is None else None,
    )
    door = gateway.parts.authenticator if settings.metrics_key_required else None
    metrics_gate = composition.compose_request_authentication(settings, door, needs_key=True)
    engine_text = gateway.engine.metrics
    pages = create_metrics_app(gateway.metrics.text, engine_text, lambda: gateway.watch.is_up, gate=metrics_gate)
    of_grpc = composition.grpc_limits(settings, ports if run_dir is None else None)
    share, endpoint = None, GrpcEndpoint(addresses_of(settings.host, settings.grpc_port), certificates)
    if run_dir is not None:
        share, endpoint = ProcessRole(core=None), GrpcEndpoint((f"unix:{run_dir / GRPC_SOCKET}",))
    grpc_server = await serve(
        gateway.plane, of_grpc, endpoint, gateway.metrics, door=gateway.parts.authenticator, share=share
    )
    for name, reader in composition.connection_readers(gateway.page, rest, grpc_server).items():
        gateway.metrics.read(name, reader)
    metrics = HttpListener(
        pages, metrics_sockets, limits=composition.metrics_limits(), refused=gateway.metrics.rejected, tls=tls
    )
    return Listeners(rest, grpc_server, metrics)
