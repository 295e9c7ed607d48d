"""The composer of the gateway: makes every part, wires them, serves, drains. Settings stop here."""

import asyncio
import contextlib
import gc
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from pathlib import Path

import uvloop

from server.access.audit import AuditLog
from server.access.certificates import Certificates
from server.admission import Admission, AdmissionLimits
from server.backends.core_relay import GRPC_SOCKET, HTTP_SOCKET
from server.backends.known_model import KnownModel
from server.backends.model_loads import LoadPolicy
from server.backends.replicas import Standing
from server.backends.watch import LOADING, EngineWatch
from server.batch_flow import BatchFlow
from server.batching.batcher import BatcherPool
from server.batching.options import BatchOptions
from server.batching.readings import queue_readers
from server.batching.verdict import judged
from server.dataplane import DataPlane
from server.engines import (
    compose_door,
    compose_engine,
    compose_gate,
    compose_memory,
    compose_registration,
    compose_telemetry,
    compose_tracer,
    connection_limits,
    connection_readers,
    declared_options,
    describe_engine,
    grpc_limits,
    metrics_limits,
    port_limits,
    rest_limits,
    standing_readers,
    until_stopped,
    watch_options,
)
from server.freed_memory import FreedMemory
from server.gpu.telemetry.readings import telemetry_readers
from server.grpc.errors import code_name_of
from server.grpc.server import Endpoint, GrpcServer, Share, serve
from server.image_flow import ImageFlow
from server.local.control import SICK_GRACE_S, ControlLine, EngineNews, GatewayReady, GatewayServes, RestartEngine
from server.local.core_server import CoreServer
from server.local.guest_calls import GuestCalls
from server.local.guests import guest_room
from server.local.lent_slab import Lender
from server.local.limits_page import PAGE_NAME, LimitsPage, Row, core_counts
from server.local.quota_table import core_board
from server.logs import get_logger
from server.loopback import addresses_of
from server.metrics import METRIC_FILES, Metrics, SharedFiles
from server.model_restarts import model_restarter, with_own_engines
from server.readiness import watch_readers
from server.rest.app import create_app
from server.rest.exposition import create_metrics_app
from server.rest.gate import FrontGate
from server.rest.limits import ConnectionLimits
from server.rest.listener import HttpListener, Sockets, bind_all
from server.settings import Settings
from server.shared_memory.keeper import SharedMemory
from server.tracing.relay import TracedRelay
from server.vision.pool import DecodePool

log = get_logger("gateway")
SPANS_GRACE_S = 1.0
WAITS_TOLD_S = (5.0, 10.0, 15.0, 30.0)  # pauses between the words on an engine that is awaited; the last one goes on


@dataclass(frozen=True, slots=True)
class Place:
    """The stack's run directory, with the Unix sockets on which other local processes reach this one.

    has_fronts: they serve the clients, and this is their core. Else it serves clients itself, and guests there.
    """

    run_dir: Path
    has_fronts: bool

    @property
    def fronts_dir(self) -> Path | None:
        """The folder where there are fronts, None where there are none."""
        return self.run_dir if self.has_fronts else None


class Gateway:
    """The gateway's parts, wired."""

    def __init__(self, settings: Settings, control: ControlLine | None, place: Place) -> None:
        run_dir = place.fronts_dir
        self._settings, self._control, self.is_sick = settings, control, False
        self._news = EngineNews(is_running=settings.engine_is_external, reason="the engine is starting", restarts=0)
        self.metrics = Metrics(None if run_dir is None else SharedFiles(run_dir / METRIC_FILES, "core"))
        main = compose_engine(settings, place.run_dir)
        self.engine, self.own = with_own_engines(settings, main, control)
        self.options = declared_options(settings)
        self.watch = EngineWatch(
            self.engine.backend,
            watch_options(settings, self.options, self.engine, lambda *trial: self.images.trial(*trial)),
            ask_restart=self._ask_restart,
            restart_model=model_restarter(settings, main, self.own, control, lambda: self._news.model_generations),
            refuse=partial(judged, self.options),
        )
        self.pool = DecodePool(
            workers=settings.decoder_count if run_dir is None else settings.decoder_share,
            job_timeout_s=settings.decode_timeout_s,
            max_waiting=settings.max_inflight_requests,
            max_pixels=settings.max_pixels,
        )
        limits = AdmissionLimits(settings.max_inflight_requests, settings.max_inflight_bytes)
        self.page = None if run_dir is None else LimitsPage(run_dir / PAGE_NAME)
        self.admission = Admission(limits, None if self.page is None else core_counts(self.page))
        self.batching = BatcherPool(
            self.engine.backend, self._options_of, slab=self.engine.slab, formed=self.metrics.batch
        )
        audit = AuditLog(settings.audit_log)
        self.door = compose_door(settings, None if run_dir is None else core_board(run_dir), audit)
        self.certificates = Certificates.of(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        self.tracer = compose_tracer(settings.otlp_endpoint)
        self.images = self._compose_images()
        self.plane = DataPlane(
            relay=TracedRelay(self.engine.relay) if self.tracer is not None else self.engine.relay,
            watch=self.watch,
            images=self.images,
            admission=self.admission,
            metrics=self.metrics,
            quotas=self.door.quotas if self.door is not None else None,
        )
        self.plane.tracer, self.plane.options = self.tracer, self.options
        self.plane.loads = LoadPolicy(allows_code=settings.allow_model_code)
        self.plane.required_models, self.plane.turns.engines = settings.required_models, len(settings.engine_urls) or 1
        self.plane.statistics_of_queues = self.batching.statistics
        self.plane.batches = BatchFlow(
            batching=self.batching,
            relay=self.engine.relay,
            watch=self.watch,
            max_rows_of=lambda config: self.options.of(config).max_batch_size,
            max_body_bytes=settings.max_body_bytes,
            turns=self.plane.turns,
        )
        self.memory = compose_memory(settings, self.engine.relay, self.watch)
        self.plane.share(self.memory)
        self.plane.audit_to(audit)
        self.registration = compose_registration(settings, main, self.watch)
        self.core = self._compose_core(place.run_dir)
        self._read_metrics()

    def _compose_images(self) -> ImageFlow:
        return ImageFlow(
            backend=self.engine.backend,
            watch=self.watch,
            pool=self.pool,
            metrics=self.metrics,
            batching=self.batching,
            slab=self.engine.slab,
        )

    def _compose_core(self, run_dir: Path) -> CoreServer:
        slab, settings = self.engine.slab, self._settings
        part_bytes = settings.slab_bytes // (settings.worker_count + 1)
        lender = None if slab is None else Lender(slab, part_bytes, guest_room(settings.slab_bytes))
        core = CoreServer(run_dir, self.watch, self.engine.backend, self.batching, lender=lender)
        core.guests = GuestCalls(self.plane, self.engine.backend, self.metrics, code_name_of, lender)
        core.queues = self.batching
        if self.own is not None:
            core.apart, self.plane.is_apart = self.own.names, self.own.has
        self.watch.when_silent(core.cut)
        self.plane.spread = core.spread
        return core

    def _read_metrics(self) -> None:
        read = self.metrics.read
        read("inflight_requests", lambda: self.admission.statistics().requests)
        read("inflight_bytes", lambda: self.admission.statistics().size_bytes)
        read("receiving_bytes", lambda: self.admission.statistics().receiving_bytes)
        page_total = self.page.total if self.page is not None else lambda _: 0
        read("queue_depth", lambda: {("decode",): self.pool.statistics().waiting + page_total(Row.DECODES_WAITING)})
        for name, queued in queue_readers(self.batching.statistics).items():
            read(name, queued)
        read("decoder_restarts_total", lambda: self.pool.statistics().restarts + page_total(Row.DECODER_RESTARTS))
        read("fronts", lambda: self.core.front_count)
        read("guests", lambda: self.core.guest_count)
        if (budget := self.engine.budget) is not None:
            read("engine_retries_total", lambda: budget.taken)
        if (replicas := self.engine.replicas) is not None:
            read("replica_up", lambda: {(row.name,): int(row.standing is Standing.UP) for row in replicas.statistics()})
            read("replica_ejections_total", lambda: {(row.name,): row.ejections for row in replicas.statistics()})
        read("ready", lambda: int(self.plane.readiness().is_ready))
        if isinstance(memory := self.memory, SharedMemory):
            read("shared_memory_regions", lambda: memory.count())
            read("shared_memory_bytes", lambda: memory.size_bytes())
            read("shared_memory_expired_total", lambda: memory.lost())
        if (slab := self.engine.slab) is not None:
            read("slab_leased_bytes", lambda: slab.statistics().leased_bytes)
        if (door := self.door) is not None:
            read("access_keys", lambda: door.key_count)
            read("access_failed_reads_total", lambda: door.failed_reads)
            read("key_inflight_requests", lambda: door.in_flight())
        if (tracer := self.tracer) is not None:
            read("spans_dropped_total", lambda: tracer.dropped_spans + page_total(Row.SPANS_DROPPED))
        self.telemetry = compose_telemetry(self._settings, self.watch)
        parents = EngineNews.readers(lambda: self._news, has_mps=self._settings.mps == "on")
        standing = standing_readers(self._settings, self.certificates) | telemetry_readers(self.telemetry)
        for name, reader in (watch_readers(self.watch) | parents | standing).items():
            read(name, reader)

    def _options_of(self, model_name: str) -> BatchOptions | None:
        """Batching options of a model that is served, or was served until it became unavailable."""
        known = self.watch.models.get(model_name)
        if known is None or not (known.is_ready or known.unavailable) or known.config is None:
            return None
        return self.options.of(known.config)

    @property
    def outlived_by_engine(self) -> bool:
        """Whether somebody else's engine runs on when this gateway ends."""
        return self._settings.engine_is_external

    def _ask_restart(self, reason: str) -> None:
        self.is_sick = self._settings.engine_is_embedded
        if self._control is not None:
            self._control.send(RestartEngine(reason))

    async def listen_to_parent(self, stop: Callable[[], None]) -> None:
        """Believe what the parent says of the engine; when the parent is gone, stop."""
        if self._control is None:
            return
        async for news in self._control.receive():
            if isinstance(news, EngineNews):
                self._news = news
                self.watch.note_generations(news.model_generations)
                if self.own is not None:
                    self.own.assign(news.own_engines)
                if news.is_running:
                    self.watch.suspect()
                else:
                    self.watch.mark_down(news.reason)
        log.warning("the parent process is gone; stopping")
        stop()

    async def tell_ready(self) -> None:
        """Say once, when it is so, that requests will be served; until then, now and then, what is waited for."""
        for pause_s in chain(WAITS_TOLD_S, repeat(WAITS_TOLD_S[-1])):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self.watch.first_ready.wait()
                break
            if self.watch.reason != LOADING:  # the engine's own log tells of that
                log.warning("waiting for the engine", engine=self.engine.place, reason=self.watch.reason)
        models = sorted(name for name, known in self.watch.models.items() if known.is_ready)
        unavailable = {name: known.reason for name, known in self.watch.models.items() if self._is_missed(known)}
        if self._control is not None:
            engine = await describe_engine(self._settings, self.engine.relay)
            self._control.send(GatewayReady(engine, models, unavailable, self.plane.readiness().reason))

    def _is_missed(self, known: KnownModel) -> bool:
        """Whether it should serve and does not: what --models or somebody else's Triton leaves out is no loss."""
        if known.is_refused or known.is_ready:
            return known.is_refused
        models = self._settings.models
        return known.name in models if models is not None else not self._settings.engine_is_external


@dataclass(frozen=True, slots=True)
class _Doors:
    """What a gateway listens on. metrics: the page of both its and the engine's."""

    rest: HttpListener
    grpc: GrpcServer
    metrics: HttpListener

    def tell(self, *, has_fronts: bool) -> None:
        """The log. Fronts come over Unix sockets, which have no port."""
        if has_fronts:
            log.info("the fronts' core listens", metrics=self.metrics.port)
        else:
            log.info("listening", http=self.rest.port, grpc=self.grpc.port, metrics=self.metrics.port)


async def _serve(settings: Settings, control: ControlLine | None, place: Place) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    run_dir = place.fronts_dir
    http_place = (
        bind_all(settings.host, settings.http_port, flag="--http-port") if run_dir is None else run_dir / HTTP_SOCKET
    )
    metrics_sockets = bind_all(settings.host, settings.metrics_port, flag="--metrics-port")
    gateway = Gateway(settings, control, place)
    await gateway.pool.start()
    doors = await _open_doors(settings, gateway, http_place, metrics_sockets)
    doors.rest.start()
    doors.metrics.start()
    if control is not None:
        control.send(GatewayServes(doors.rest.port, doors.grpc.port, doors.metrics.port))
    gc.collect()
    gc.freeze()  # what lives now lives on: no collection searches it again, in the middle of requests
    doors.tell(has_fronts=place.has_fronts)
    tasks = [
        *(asyncio.create_task(one.run()) for one in (gateway.watch, gateway.metrics.loop_lag, FreedMemory())),
        *([asyncio.create_task(gateway.door.run())] if gateway.door is not None else ()),
        *([asyncio.create_task(gateway.memory.run())] if isinstance(gateway.memory, SharedMemory) else ()),
        *([asyncio.create_task(gateway.registration.run())] if gateway.registration is not None else ()),
        asyncio.create_task(gateway.core.run()),
        *([asyncio.create_task(gateway.telemetry.run())] if gateway.telemetry is not None else ()),
        asyncio.create_task(gateway.listen_to_parent(stop.set)),
        asyncio.create_task(gateway.tell_ready()),
    ]
    await until_stopped(stop, tasks)
    is_clean = await _drain(settings, gateway, doors.rest, doors.grpc)
    await _close(tasks, gateway)
    await doors.metrics.stop(1.0)
    return 0 if is_clean else 1


async def _open_doors(
    settings: Settings, gateway: Gateway, http_place: Sockets | Path, metrics_sockets: Sockets
) -> _Doors:
    """Listeners for clients; for fronts if http_place is a Unix socket's path. Only gRPC listens already."""
    run_dir = http_place.parent if isinstance(http_place, Path) else None
    ports, certificates = port_limits(settings), gateway.certificates
    tls = certificates.context if certificates is not None else None
    gate = compose_gate(settings, gateway.door) if run_dir is None else FrontGate()
    rest = HttpListener(
        create_app(gateway.plane, rest_limits(settings), gateway.metrics, gate=gate),
        http_place,
        limits=connection_limits(settings, ports) if run_dir is None else ConnectionLimits(),
        unread=gateway.admission,
        refused=gateway.metrics.rejected,
        tls=tls if run_dir is None else None,
    )
    door = gateway.door if settings.metrics_key_required else None
    engine_text, metrics_gate = gateway.engine.backend.metrics, compose_gate(settings, door, needs_key=True)
    pages = create_metrics_app(gateway.metrics.text, engine_text, lambda: gateway.watch.is_up, gate=metrics_gate)
    of_grpc = grpc_limits(settings, ports if run_dir is None else None)
    share, endpoint = None, Endpoint(addresses_of(settings.host, settings.grpc_port), certificates)
    if run_dir is not None:
        share, endpoint = Share(core=None), Endpoint((f"unix:{run_dir / GRPC_SOCKET}",))
    grpc_server = await serve(gateway.plane, of_grpc, endpoint, gateway.metrics, door=gateway.door, share=share)
    for name, reader in connection_readers(gateway.page, rest, grpc_server).items():
        gateway.metrics.read(name, reader)
    metrics = HttpListener(pages, metrics_sockets, limits=metrics_limits(), refused=gateway.metrics.rejected, tls=tls)
    return _Doors(rest, grpc_server, metrics)


async def _drain(settings: Settings, gateway: Gateway, rest: HttpListener, grpc_server: GrpcServer) -> bool:
    """Not ready at once; serve on for the delay; then take nothing new and let what runs end within the grace.

    With a sick engine in this process: no delay, and a short grace. Whether nothing was cut.
    """
    started = time.monotonic()
    grace_s = min(settings.grace_s, SICK_GRACE_S) if gateway.is_sick else settings.grace_s
    delay_s = 0.0 if gateway.is_sick or gateway.page is not None else settings.drain_delay_s
    gateway.plane.announce_stop()
    log.info("draining", inflight=gateway.admission.statistics().requests, delay_s=delay_s)
    await asyncio.sleep(delay_s)
    is_clean = all(await asyncio.gather(rest.stop(grace_s), grpc_server.stop(grace_s), gateway.core.drain(grace_s)))
    log.info("drained", seconds=round(time.monotonic() - started, 3), is_clean=is_clean)
    return is_clean


async def _close(tasks: list[asyncio.Task[None]], gateway: Gateway) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    if gateway.door is not None:
        await gateway.door.aclose()
    if gateway.tracer is not None:
        await asyncio.to_thread(gateway.tracer.stop, SPANS_GRACE_S)
    await gateway.batching.aclose()
    await gateway.pool.aclose()
    if gateway.registration is not None and gateway.outlived_by_engine:
        await gateway.registration.aclose()
    await gateway.engine.backend.aclose()


def run_gateway(settings: Settings, control_end: socket.socket | None, place: Place) -> int:
    """Serve until told to stop; the exit code. control_end: the line to the parent process, None without one."""

    async def main() -> int:
        control = await ControlLine.over(control_end) if control_end is not None else None
        return await _serve(settings, control, place)

    code: int = uvloop.run(main())
    return code
