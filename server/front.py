"""The composer of a front: one of the processes that parse HTTP and gRPC, decode images and encode answers.

What it does not serve itself goes to the core, the process that holds queues, limits and the engine (server.main).
"""

import asyncio
import contextlib
import gc
import itertools
import signal
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

from server.access.audit import AuditLog
from server.access.certificates import Certificates
from server.admission import Admission, AdmissionLimits
from server.backends.core_relay import CoreRelay
from server.backends.own_engines import RoutedEngine
from server.backends.triton import TritonBackend
from server.batch_flow import BatchFlow
from server.core.connections import PortLimits
from server.engines import (
    Engine,
    compose_door,
    compose_engine,
    compose_gate,
    compose_tracer,
    connection_limits,
    declared_options,
    grpc_limits,
    port_limits,
    rest_limits,
    until_stopped,
)
from server.freed_memory import FreedMemory
from server.grpc.server import Endpoint, GrpcServer, Share, serve
from server.image_flow import ImageFlow
from server.local.control import ControlLine, FrontReady, GatewayServes
from server.local.core_link import CoreLink
from server.local.front_plane import FrontPlane
from server.local.lent_slab import BorrowedSlab
from server.local.limits_page import PAGE_NAME, LimitsPage, Row, SharedCounts
from server.local.messages import Hello
from server.local.quota_table import TABLE_NAME, QuotaTable
from server.logs import get_logger
from server.loopback import addresses_of
from server.metrics import METRIC_FILES, Metrics, SharedFiles
from server.model_restarts import core_backend
from server.rest.app import create_app
from server.rest.listener import HttpListener, Sockets, bind_all
from server.rest.passed_on import WayToCore
from server.settings import Settings
from server.shared_memory.absent import SWITCHED_OFF, NoSharedMemory
from server.tracing.relay import TracedRelay
from server.vision.pool import DecodePool

TOLD_EVERY_S = 0.25
SPANS_GRACE_S = 1.0
CORE_CONNECTIONS = 256  # beyond those of inferences
# For the core's first word, before a front listens without it. A core takes a few seconds to start, more where all
# cores are busy; who asks for longer is better told why nothing is served (503, and live) than refused a connection.
CORE_PATIENCE_S = 10.0

log = get_logger("front")


@dataclass(frozen=True, slots=True)
class Seat:
    """Which front this is. index: 1 for the first. run_dir: where the core listens."""

    index: int
    run_dir: Path


class Front:
    """A front's parts, wired. Make it inside the running loop."""

    def __init__(self, settings: Settings, seat: Seat) -> None:
        self.settings = settings
        self.seat = seat
        self.page = LimitsPage(seat.run_dir / PAGE_NAME)
        self.page.clear(seat.index)
        self.metrics = Metrics(SharedFiles(seat.run_dir / METRIC_FILES, f"front-{seat.index}"))
        self.core = CoreRelay(seat.run_dir, max_connections=settings.max_inflight_requests + CORE_CONNECTIONS)
        engine = _engine_of(settings, seat.run_dir)
        self.slab = _borrowed_slab(settings, engine) if settings.slab_bytes else None
        self.link = CoreLink(seat.run_dir, Hello(seat.index), max_asks=settings.max_inflight_requests, slab=self.slab)
        apart = core_backend(settings, seat.run_dir)
        routed = RoutedEngine(engine.backend, engine.relay, lambda: self.link.apart, lambda _: apart)
        self.engine = replace(engine, backend=routed, relay=routed)
        self.pool = DecodePool(
            workers=0 if settings.engine_is_embedded else settings.decoder_share,
            job_timeout_s=settings.decode_timeout_s,
            max_waiting=settings.max_inflight_requests,
            max_pixels=settings.max_pixels,
        )
        limits = AdmissionLimits(settings.max_inflight_requests, settings.max_inflight_bytes)
        self.admission = Admission(limits, SharedCounts(self.page, seat.index))
        board = QuotaTable(seat.run_dir / TABLE_NAME, seat.index)
        board.clear(seat.index)
        self.door = compose_door(settings, board, AuditLog(settings.audit_log))
        self.certificates = Certificates.of(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        self.tracer = compose_tracer(settings.otlp_endpoint)
        self.plane = self._compose_plane(settings)

    def _compose_plane(self, settings: Settings) -> FrontPlane:
        options = declared_options(settings)
        plane = FrontPlane(
            relay=TracedRelay(self.engine.relay) if self.tracer is not None else self.engine.relay,
            watch=self.link,
            images=ImageFlow(
                backend=self.engine.backend,
                watch=self.link,
                pool=self.pool,
                metrics=self.metrics,
                batching=self.link,
                slab=self.slab,
            ),
            admission=self.admission,
            metrics=self.metrics,
            quotas=self.door.quotas if self.door is not None else None,
        )
        plane.core = self.core
        plane.tracer = self.tracer
        plane.is_engine_in_core = settings.engine_is_embedded
        plane.is_apart = lambda model: model in self.link.apart
        plane.options = options
        plane.required_models = settings.required_models
        plane.turns.engines = len(settings.engine_urls) or 1
        plane.batches = BatchFlow(
            batching=self.link,
            relay=self.engine.relay,
            watch=self.link,
            max_rows_of=lambda config: options.of(config).max_batch_size,
            max_body_bytes=settings.max_body_bytes,
            turns=plane.turns,
        )
        # Regions are the core's: what is about them, or stands in them, goes there.
        plane.share(NoSharedMemory("" if settings.allow_client_shm else SWITCHED_OFF))
        return plane

    async def tell(self, listener: HttpListener, grpc_server: GrpcServer) -> None:
        """The core's page, and files, of what is read at a scrape, now and then, and that this loop turns; for ever."""
        column, write = self.seat.index, self.page.write
        former_restarts = self.page.read(Row.DECODER_RESTARTS, column)
        former_spans = self.page.read(Row.SPANS_DROPPED, column)
        for beat in itertools.count(1):
            write(Row.BEATS, column, beat)
            statistics = self.pool.statistics()
            write(Row.CONNECTIONS, column, listener.connection_count)
            write(Row.GRPC_CONNECTIONS, column, grpc_server.connection_count)
            write(Row.DECODES_WAITING, column, statistics.waiting)
            write(Row.DECODER_RESTARTS, column, former_restarts + statistics.restarts)
            if self.tracer is not None:
                write(Row.SPANS_DROPPED, column, former_spans + self.tracer.dropped_spans)
            self.metrics.flush()
            await asyncio.sleep(TOLD_EVERY_S)

    async def aclose(self) -> None:
        """End what runs and close what is open."""
        self.metrics.flush()
        if self.door is not None:
            await self.door.aclose()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.stop, SPANS_GRACE_S)
        await self.pool.aclose()
        await self.core.aclose()
        await self.engine.backend.aclose()


def _borrowed_slab(settings: Settings, engine: Engine) -> BorrowedSlab:
    """What the core lends; the front's own calls to a Triton name it, too."""
    backend, call_later = engine.backend, asyncio.get_running_loop().call_later
    if isinstance(backend, TritonBackend) and not settings.engine_is_embedded:
        return BorrowedSlab(call_later, backend)
    return BorrowedSlab(call_later)


def _engine_of(settings: Settings, run_dir: Path) -> Engine:
    """The engine, or, where it lives in the core's process, the core, which speaks as an engine does."""
    if not settings.engine_is_embedded:
        return compose_engine(settings.model_copy(update={"slab_bytes": 0}), run_dir)  # the core owns the slab
    core = core_backend(settings, run_dir)
    return Engine(core, core, "embedded in the core")


async def _serve(settings: Settings, control: ControlLine, seat: Seat) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    front = Front(settings, seat)
    await front.pool.start()
    tasks = [
        asyncio.create_task(front.link.run()),
        asyncio.create_task(_until_parent_is_gone(control, stop)),
    ]
    await _until_told(front, stop)
    is_clean = stop.is_set() or await _serve_clients(front, control, stop, tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await front.aclose()
    return 0 if is_clean else 1


async def _until_told(front: Front, stop: asyncio.Event) -> None:
    """Until the core has said how the engine is, somebody says stop, or the core has been silent for too long.

    Who listened before would answer 503 where its neighbours on the same port answer that they are ready.
    """
    waiting = [asyncio.create_task(front.link.first_state.wait()), asyncio.create_task(stop.wait())]
    done, pending = await asyncio.wait(waiting, timeout=CORE_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    if not done:
        log.warning("the core has said nothing yet; listening", front=front.seat.index, seconds=CORE_PATIENCE_S)


async def _serve_clients(
    front: Front, control: ControlLine, stop: asyncio.Event, tasks: list[asyncio.Task[None]]
) -> bool:
    """Listen until somebody says stop, then drain; whether nothing was cut. tasks: what runs, and is added to."""
    settings = front.settings
    listeners = bind_all(settings.host, settings.http_port, flag="--http-port", is_shared=True)
    ports = port_limits(settings)
    rest = _rest(front, listeners, ports)
    endpoint = Endpoint(addresses_of(settings.host, settings.grpc_port), front.certificates)
    share = Share(front.core)
    limits = grpc_limits(settings, ports)
    grpc_server = await serve(front.plane, limits, endpoint, front.metrics, door=front.door, share=share)
    rest.start()
    control.send(GatewayServes(rest.port, grpc_server.port, 0))
    gc.collect()
    gc.freeze()  # what lives now lives on: no collection searches it again, in the middle of requests
    log.info("listening", front=front.seat.index, http=rest.port, grpc=grpc_server.port)
    tasks += [
        *([asyncio.create_task(front.door.run())] if front.door is not None else ()),
        asyncio.create_task(front.tell(rest, grpc_server)),
        asyncio.create_task(FreedMemory().run()),
        asyncio.create_task(_tell_ready(control, front)),
    ]
    await until_stopped(stop, tasks)
    return await _drain(front, rest, grpc_server)


def _rest(front: Front, listeners: Sockets, ports: PortLimits) -> HttpListener:
    settings = front.settings
    way = WayToCore(front.core, has_engine=settings.engine_is_embedded)
    gate = compose_gate(settings, front.door)
    app = create_app(front.plane, rest_limits(settings), front.metrics, gate=gate, way=way)
    return HttpListener(
        app,
        listeners,
        limits=connection_limits(settings, ports),
        unread=front.admission,
        refused=front.metrics.rejected,
        tls=front.certificates.context if front.certificates is not None else None,
    )


async def _until_parent_is_gone(control: ControlLine, stop: asyncio.Event) -> None:
    async for _ in control.receive():
        pass
    log.warning("the parent process is gone; stopping")
    stop.set()


async def _tell_ready(control: ControlLine, front: Front) -> None:
    """Once, when the core has said that the engine is up."""
    await front.link.first_up.wait()
    control.send(FrontReady(front.seat.index))


async def _drain(front: Front, rest: HttpListener, grpc_server: GrpcServer) -> bool:
    """Not ready at once; serve on for the delay; then take nothing new and let what runs end within the grace."""
    started, settings = time.monotonic(), front.settings
    front.plane.announce_stop()
    log.info("draining", front=front.seat.index, delay_s=settings.drain_delay_s)
    await asyncio.sleep(settings.drain_delay_s)
    is_clean = all(await asyncio.gather(rest.stop(settings.grace_s), grpc_server.stop(settings.grace_s)))
    seconds = round(time.monotonic() - started, 3)
    log.info("drained", front=front.seat.index, seconds=seconds, is_clean=is_clean)
    return is_clean


def run_front(settings: Settings, control_end: socket.socket, seat: Seat) -> int:
    """Serve until told to stop; the exit code. control_end: the line to the parent process."""

    async def main() -> int:
        with contextlib.closing(await ControlLine.over(control_end)) as control:
            return await _serve(settings, control, seat)

    code: int = uvloop.run(main())
    return code
