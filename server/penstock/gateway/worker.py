"""A worker, one of several processes that serve clients. It forwards other calls to the core (gateway/main.py)."""

import asyncio
import contextlib
import gc
import itertools
import signal
import socket
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import uvloop

from penstock.engines.dedicated_engines import RoutedEngine
from penstock.engines.replicas import Replicas
from penstock.gateway.composition import (
    ConnectedEngine,
    compose_engine,
    compose_request_authentication,
    connection_limits,
    grpc_limits,
    port_limits,
    rest_options,
    until_stopped,
)
from penstock.gateway.dataplane import DataPlane, PlaneParts
from penstock.gateway.grpc.server import GrpcEndpoint, GrpcServer, ProcessRole, serve
from penstock.gateway.metrics import METRIC_FILES, MetricFiles, Metrics
from penstock.gateway.model_restarts import core_backend
from penstock.gateway.rest.app import create_app
from penstock.gateway.rest.listener import HttpListener
from penstock.gateway.rest.streaming import CoreRoute
from penstock.gateway.serving_parts import ServingParts, SharedTables
from penstock.gateway.settings import Settings
from penstock.gateway.shared_memory.regions import SWITCHED_OFF, NoSharedMemory
from penstock.gateway.workers.client import CoreClient
from penstock.gateway.workers.connection import CoreState, WorkerHello
from penstock.gateway.workers.connection_sharing import ConnectionSharing
from penstock.gateway.workers.core_relay import CoreRelay
from penstock.gateway.workers.gateway_process import ControlConnection, GatewayServes, WorkerReady
from penstock.gateway.workers.picture_batches import PictureBatches
from penstock.gateway.workers.shared_counters import (
    PAGE_NAME,
    TABLE_NAME,
    CounterPage,
    CounterRow,
    QuotaTable,
    SharedCounts,
)
from penstock.gateway.workers.slab_sharing import ClientSlab
from penstock.logs import get_logger
from penstock.network import Sockets, addresses_of, bind_all
from penstock.port_policy import PortLimits
from penstock.process import MemoryTrimmer
from penstock.protocol.call import A, Call, InferHead
from penstock.protocol.identity import ANONYMOUS, Identity, Verb
from penstock.protocol.request_checks import EncodedCall, ImageInput


class WorkerDataPlane(DataPlane):
    """Forwards to the core: the repository, clients' shared memory, and an embedded engine (is_engine_in_core)."""

    def __init__(self, parts: PlaneParts, core: CoreRelay, *, is_engine_in_core: bool) -> None:
        super().__init__(parts)
        self._core, self._is_engine_in_core = core, is_engine_in_core

    async def relay(
        self,
        verb: Verb,
        head: InferHead,
        call: Call[A] | EncodedCall[A],
        *,
        caller: Identity = ANONYMOUS,
        deadline: float | None = None,
    ) -> A:
        if self._is_for_core(verb, head) and not isinstance(call, EncodedCall):
            self._admission.require_engine()
            return await self._core.send(call, caller, deadline=deadline)
        return await super().relay(verb, head, call, caller=caller, deadline=deadline)

    def image_input(self, model_name: str) -> ImageInput | None:
        """See DataPlane; the core decodes images for an embedded engine."""
        return None if self._is_engine_in_core else super().image_input(model_name)

    def _is_for_core(self, verb: Verb, head: InferHead) -> bool:
        return self._is_engine_in_core or bool(head.regions) or verb is not Verb.INFER


REPORT_INTERVAL_S = 0.25
CORE_CONNECTIONS = 256  # besides those of inferences
# Time for the core's first message before a worker listens without it. A core starts in seconds, later on busy
# machines. Then clients get 503 with the reason, rather than a refused connection.
CORE_TIMEOUT_S = 10.0

log = get_logger("worker")


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """index: 1 for the first worker. run_dir: where the core listens."""

    index: int
    run_dir: Path


class Worker:
    """A worker's parts. Create it inside the running loop."""

    def __init__(self, settings: Settings, options: WorkerOptions) -> None:
        self.settings = settings
        self.options = options
        self.page = CounterPage(options.run_dir / PAGE_NAME)
        self.page.clear(options.index)
        self.sharing = ConnectionSharing(options.run_dir, options.index, settings.worker_count, self.page)
        self.metrics = Metrics(MetricFiles(options.run_dir / METRIC_FILES, f"front-{options.index}"))
        self.core = CoreRelay(options.run_dir, max_connections=settings.max_inflight_requests + CORE_CONNECTIONS)
        engine = _engine_of(settings, options.run_dir)
        self.slab = _borrowed_slab(engine) if settings.slab_bytes else None
        self.link = CoreClient(
            options.run_dir, WorkerHello(options.index), max_asks=settings.max_inflight_requests, slab=self.slab
        )
        apart = core_backend(settings, options.run_dir)
        routed = RoutedEngine(engine.engine, lambda: self.link.apart, lambda _: apart)
        self.engine = replace(engine, engine=routed)
        quota_table = QuotaTable(options.run_dir / TABLE_NAME, options.index)
        quota_table.clear(options.index)
        if (replicas := engine.replicas) is not None and engine.cards.engines:
            self.link.when_state(partial(_follow, replicas))
        self.parts = ServingParts(
            settings,
            self.metrics,
            decoder_count=0 if settings.engine_is_embedded else settings.decoder_share,
            tables=SharedTables(SharedCounts(self.page, options.index), quota_table),
        )
        # The core has the regions: calls about them, or with tensors in them, are forwarded.
        memory = NoSharedMemory("" if settings.allow_client_shm else SWITCHED_OFF)
        self.pictures = PictureBatches(
            self.link,
            self.engine.engine,
            self.link,
            self.parts.options,
            workers=settings.worker_count,
            slab=self.slab,
            is_apart=lambda model: model in self.link.apart,
            formed=self.metrics.batch,
        )
        plane_parts = self.parts.plane_parts(
            self.engine.engine, self.link, self.link, self.slab, memory, pictures=self.pictures
        )
        self.plane = WorkerDataPlane(
            replace(plane_parts, is_apart=lambda model: model in self.link.apart),
            self.core,
            is_engine_in_core=settings.engine_is_embedded,
        )

    async def tell(self, listener: HttpListener, grpc_server: GrpcServer) -> None:
        """Writes heartbeats and metrics to the shared counters, and reports queues to the core, until cancelled."""
        column, write = self.options.index, self.page.write
        former_restarts = self.page.read(CounterRow.DECODER_RESTARTS, column)
        former_spans = self.page.read(CounterRow.SPANS_DROPPED, column)
        for beat in itertools.count(1):
            write(CounterRow.BEATS, column, beat)
            statistics = self.parts.pool.statistics()
            write(CounterRow.CONNECTIONS, column, listener.connection_count)
            write(CounterRow.GRPC_CONNECTIONS, column, grpc_server.connection_count)
            write(CounterRow.DECODES_WAITING, column, statistics.waiting)
            write(CounterRow.DECODER_RESTARTS, column, former_restarts + statistics.restarts)
            if self.parts.tracer is not None:
                write(CounterRow.SPANS_DROPPED, column, former_spans + self.parts.tracer.dropped_spans)
            self.metrics.flush()
            self.link.report_queues(self.pictures.statistics())
            await asyncio.sleep(REPORT_INTERVAL_S)

    async def aclose(self) -> None:
        """Stops all tasks and closes all connections."""
        self.metrics.flush()
        await self.pictures.aclose()
        await self.parts.aclose()
        await self.core.aclose()
        await self.engine.engine.aclose()


def _follow(replicas: Replicas, state: CoreState) -> None:
    """Calls go where the core's go."""
    replicas.set_lost(state.left_out)
    replicas.set_homes(state.homes)


def _borrowed_slab(engine: ConnectedEngine) -> ClientSlab:
    """The worker's part of the core's slab, which its own calls to Tritons name, too."""
    return ClientSlab(asyncio.get_running_loop().call_later, tuple(engine.tritons.values()))


def _engine_of(settings: Settings, run_dir: Path) -> ConnectedEngine:
    """The engine; if it is in the core's process, the core, which has an engine's API."""
    if not settings.engine_is_embedded:
        return compose_engine(settings.model_copy(update={"slab_bytes": 0}), run_dir)  # the core owns the slab
    core = core_backend(settings, run_dir)
    return ConnectedEngine(core, "embedded in the core")


async def _serve(settings: Settings, control: ControlConnection, options: WorkerOptions) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    front = Worker(settings, options)
    await front.parts.pool.start()
    tasks = [asyncio.create_task(front.link.run()), asyncio.create_task(_until_parent_is_gone(control, stop))]
    await _until_core_reports(front, stop)
    is_clean = stop.is_set() or await _serve_clients(front, control, stop, tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await front.aclose()
    return 0 if is_clean else 1


async def _until_core_reports(front: Worker, stop: asyncio.Event) -> None:
    """Returns when the core has reported the engine's state, or after CORE_TIMEOUT_S.

    A worker that listened earlier would answer 503 while other workers on the same port are ready.
    """
    waiting = [asyncio.create_task(front.link.first_state.wait()), asyncio.create_task(stop.wait())]
    done, pending = await asyncio.wait(waiting, timeout=CORE_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    if not done:
        log.warning("no message from the core yet; listening", worker=front.options.index, seconds=CORE_TIMEOUT_S)


async def _serve_clients(
    front: Worker, control: ControlConnection, stop: asyncio.Event, tasks: list[asyncio.Task[None]]
) -> bool:
    """Serves until stopped, then drains. Returns whether no request was cut. tasks: extended here."""
    settings = front.settings
    listeners = bind_all(settings.host, settings.http_port, flag="--http-port", is_shared=True)
    ports = port_limits(settings)
    rest = _rest(front, listeners, ports)
    endpoint = GrpcEndpoint(addresses_of(settings.host, settings.grpc_port), front.parts.certificates)
    share = ProcessRole(front.core)
    limits = grpc_limits(settings, ports)
    grpc_server = await serve(front.plane, limits, endpoint, front.metrics, door=front.parts.authenticator, share=share)
    rest.start()
    front.sharing.start(rest.take)
    control.send(GatewayServes(rest.port, grpc_server.port, 0))
    gc.collect()
    gc.freeze()  # objects that exist now are long-lived: collections skip them
    log.info("listening", worker=front.options.index, http=rest.port, grpc=grpc_server.port)
    tasks += [
        *([asyncio.create_task(front.parts.authenticator.run())] if front.parts.authenticator is not None else ()),
        asyncio.create_task(front.tell(rest, grpc_server)),
        asyncio.create_task(MemoryTrimmer().run()),
        asyncio.create_task(_report_ready(control, front)),
    ]
    await until_stopped(stop, tasks)
    return await _drain(front, rest, grpc_server)


def _rest(front: Worker, listeners: Sockets, ports: PortLimits) -> HttpListener:
    settings = front.settings
    core_route = CoreRoute(front.core, settings.engine_is_embedded, front.parts.uploads)
    gate = compose_request_authentication(settings, front.parts.authenticator)
    app = create_app(front.plane, rest_options(settings), front.metrics, gate=gate, core_route=core_route)
    return HttpListener(
        app,
        listeners,
        limits=connection_limits(settings, ports),
        unread=front.parts.limiter,
        refused=front.metrics.rejected,
        tls=front.parts.certificates.context if front.parts.certificates is not None else None,
        is_elsewhere=front.sharing.hand_over if front.parts.certificates is None else None,
    )


async def _until_parent_is_gone(control: ControlConnection, stop: asyncio.Event) -> None:
    async for _ in control.receive():
        pass
    log.warning("the parent process is gone; stopping")
    stop.set()


async def _report_ready(control: ControlConnection, front: Worker) -> None:
    """Reports once, when the core has reported that the engine is up."""
    await front.link.first_up.wait()
    control.send(WorkerReady(front.options.index))


async def _drain(front: Worker, rest: HttpListener, grpc_server: GrpcServer) -> bool:
    """Reports not ready, serves on for the delay, then lets requests end within the grace."""
    started, settings = time.monotonic(), front.settings
    front.plane.announce_stop()
    log.info("draining", worker=front.options.index, delay_s=settings.drain_delay_s)
    await asyncio.sleep(settings.drain_delay_s)
    front.sharing.close()
    is_clean = all(await asyncio.gather(rest.stop(settings.grace_s), grpc_server.stop(settings.grace_s)))
    seconds = round(time.monotonic() - started, 3)
    log.info("drained", worker=front.options.index, seconds=seconds, is_clean=is_clean)
    return is_clean


def run_worker(settings: Settings, control_end: socket.socket, options: WorkerOptions) -> int:
    """Serves until stopped. Returns the exit code. control_end: connection to the parent process."""

    async def main() -> int:
        with contextlib.closing(await ControlConnection.over(control_end)) as control:
            return await _serve(settings, control, options)

    code: int = uvloop.run(main())
    return code
