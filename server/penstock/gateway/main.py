"""The gateway: creates and connects all parts, serves, drains."""

import asyncio
import contextlib
import gc
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path

import uvloop

from penstock.engines.model_health import KnownModel
from penstock.engines.replica_routing import ReplicaState
from penstock.engines.watch import LOADING, EngineWatch
from penstock.gateway import composition
from penstock.gateway.audit import AuditLog
from penstock.gateway.batching.batch_report import queue_readers
from penstock.gateway.batching.batcher import BatcherPool, log_and_get_refusal
from penstock.gateway.batching.options import BatchOptions
from penstock.gateway.batching.queue import QueueStatistics
from penstock.gateway.card_copies import CardCopies
from penstock.gateway.card_losses import CardLosses
from penstock.gateway.dataplane import DataPlane
from penstock.gateway.grpc.server import GrpcServer
from penstock.gateway.grpc.status_codes import code_name_of
from penstock.gateway.image_flow import ImageFlow
from penstock.gateway.listeners import ServedParts, open_listeners, own_address
from penstock.gateway.load.service import LoadOptions, LoadTests
from penstock.gateway.metrics import METRIC_FILES, MetricFiles, Metrics
from penstock.gateway.model_needs import read_needs
from penstock.gateway.model_restarts import model_restarter, with_own_engines
from penstock.gateway.readiness import watch_readers
from penstock.gateway.rest.listener import HttpListener
from penstock.gateway.serving_parts import ServingParts, SharedTables
from penstock.gateway.settings import Settings
from penstock.gateway.settings_report import read_origins, setting_rows
from penstock.gateway.shared_memory.regions import SharedMemory
from penstock.gateway.system.model_reports import ModelReports
from penstock.gateway.system.reports import SystemReports
from penstock.gateway.system_sources import GatewayView, model_sources, system_sources
from penstock.gateway.telemetry_parts import compose_telemetry, constant_readers
from penstock.gateway.workers.core_relay import HTTP_SOCKET
from penstock.gateway.workers.core_server import CoreServer
from penstock.gateway.workers.gateway_process import (
    SICK_GRACE_S,
    ControlConnection,
    EngineStatusMessage,
    GatewayReady,
    GatewayServes,
    RestartEngine,
)
from penstock.gateway.workers.inference_calls import ClientProcessCalls
from penstock.gateway.workers.shared_counters import PAGE_NAME, CounterPage, CounterRow, core_counts, core_quota_table
from penstock.gateway.workers.slab_sharing import SlabPartitions, client_slab_part_bytes, client_slab_parts
from penstock.gpu.telemetry.reader import telemetry_metrics
from penstock.logs import get_logger
from penstock.network import bind_all
from penstock.process import MemoryTrimmer

log = get_logger("gateway")
WAIT_LOG_INTERVALS_S = (5.0, 10.0, 15.0, 30.0)  # between log lines while the engine starts; the last one repeats


@dataclass(frozen=True, slots=True)
class CoreOptions:
    """run_dir: the stack's, with the core's sockets. has_workers: worker processes serve the clients."""

    run_dir: Path
    has_workers: bool

    @property
    def workers_dir(self) -> Path | None:
        return self.run_dir if self.has_workers else None


class Gateway:
    """The gateway's parts, connected."""

    def __init__(self, settings: Settings, control: ControlConnection | None, place: CoreOptions) -> None:
        run_dir = place.workers_dir
        self._settings, self._control, self.is_sick, self._run_dir = settings, control, False, place.run_dir
        self._engine_name = ""
        self._news = EngineStatusMessage(settings.engine_is_external, "the engine is starting", 0)
        self.metrics = Metrics(None if run_dir is None else MetricFiles(run_dir / METRIC_FILES, "core"))
        main = composition.compose_engine(settings, place.run_dir, self._restart_card)
        self.engine, self.own = with_own_engines(settings, main, control)
        self.page = None if run_dir is None else CounterPage(run_dir / PAGE_NAME)
        self.parts = ServingParts(
            settings,
            self.metrics,
            decoder_count=settings.decoder_count if run_dir is None else settings.decoder_share,
            tables=SharedTables()
            if run_dir is None or self.page is None
            else SharedTables(core_counts(self.page), core_quota_table(run_dir)),
        )
        options = self.parts.options
        self.watch = EngineWatch(
            self.engine.engine,
            composition.watch_options(settings, options, self.engine, lambda *trial: plane_parts.images.trial(*trial)),
            ask_restart=self._ask_restart,
            restart_model=model_restarter(settings, main, self.own, control, lambda: self._news.model_generations),
            refuse=partial(log_and_get_refusal, options),
        )
        self.batching = BatcherPool(
            self.engine.engine, self._options_of, slab=self.engine.slab, formed=self.metrics.batch
        )
        self.memory = composition.compose_memory(settings, self.engine.engine, self.watch)
        self.registration = composition.compose_registration(settings, main, self.watch, place.run_dir)
        plane_parts = self.parts.plane_parts(
            self.engine.engine, self.watch, self.batching, self.engine.slab, self.memory
        )
        slab_partitions = self._slab_partitions()
        self.plane = DataPlane(
            replace(
                plane_parts,
                queue_statistics=self._queues,
                is_apart=self.own.has if self.own is not None else plane_parts.is_apart,
                spread=lambda: self.core.spread(),  # the core is constructed below, as it needs the plane
            )
        )
        self.core = CoreServer(
            self.watch,
            self.engine.engine,
            self.batching,
            slab_partitions=slab_partitions,
            client_calls=ClientProcessCalls(
                self.plane, self.engine.engine, self.metrics, code_name_of, slab_partitions
            ),
            apart=self.own.names if self.own is not None else tuple,
        )
        self.copies: CardCopies | None = None
        self._follow_cards()
        self.load = _load_tests(settings, self.parts.audit, lambda: self.plane.is_stopping)
        self.watch.when_silent(self.core.cut)
        self._read_metrics()
        self.system, self.models = self._reports(plane_parts.images)

    def _queues(self) -> Mapping[str, QueueStatistics]:
        """Statistics by model of the queues of the core and of all workers."""
        return self.core.reported.joined(self.batching.statistics())

    def _slab_partitions(self) -> SlabPartitions | None:
        slab, settings = self.engine.slab, self._settings
        if slab is None:
            return None
        part_bytes = settings.slab_bytes // (settings.worker_count + 1)
        client_part_bytes, client_parts = (
            client_slab_part_bytes(settings.slab_bytes),
            client_slab_parts(len(self.engine.tritons)),
        )
        return SlabPartitions(slab, part_bytes, client_part_bytes, client_parts)

    def _read_metrics(self) -> None:
        read = self.metrics.read
        read("inflight_requests", lambda: self.parts.limiter.statistics().requests)
        read("inflight_bytes", lambda: self.parts.limiter.statistics().size_bytes)
        read("receiving_bytes", lambda: self.parts.limiter.statistics().receiving_bytes)
        page_total = self.page.total if self.page is not None else lambda _: 0
        read(
            "queue_depth",
            lambda: {("decode",): self.parts.pool.statistics().waiting + page_total(CounterRow.DECODES_WAITING)},
        )
        for name, queued in queue_readers(self._queues).items():
            read(name, queued)
        read(
            "decoder_restarts_total",
            lambda: self.parts.pool.statistics().restarts + page_total(CounterRow.DECODER_RESTARTS),
        )
        read("fronts", lambda: self.core.front_count)
        read("guests", lambda: self.core.client_process_count)  # plain-english: ok
        if (budget := self.engine.budget) is not None:
            read("engine_retries_total", lambda: budget.taken)
        if (replicas := self.engine.replicas) is not None:
            read(
                "replica_up",
                lambda: {(row.name,): int(row.standing is ReplicaState.UP) for row in replicas.statistics()},
            )
            read("replica_ejections_total", lambda: {(row.name,): row.ejections for row in replicas.statistics()})
        read("ready", lambda: int(self.plane.readiness().is_ready))
        if isinstance(memory := self.memory, SharedMemory):
            read("shared_memory_regions", lambda: memory.count())
            read("shared_memory_bytes", lambda: memory.size_bytes())
            read("shared_memory_expired_total", lambda: memory.lost())
        if (slab := self.engine.slab) is not None:
            read("slab_leased_bytes", lambda: slab.statistics().leased_bytes)
        if (door := self.parts.authenticator) is not None:
            read("access_keys", lambda: door.key_count)
            read("access_failed_reads_total", lambda: door.failed_reads)
            read("key_inflight_requests", lambda: door.in_flight())
        if (tracer := self.parts.tracer) is not None:
            read("spans_dropped_total", lambda: tracer.dropped_spans + page_total(CounterRow.SPANS_DROPPED))
        parents = EngineStatusMessage.readers(lambda: self._news, has_mps=self._settings.mps == "on")
        standing = constant_readers(self._settings, self.parts.certificates, cards=self.engine.cards)
        standing |= telemetry_metrics(self.telemetry)
        for name, reader in (watch_readers(self.watch) | parents | standing).items():
            read(name, reader)

    def _follow_cards(self) -> None:
        """With an engine for each card: a lost card's engine gets no calls, and is started when the card is back."""
        cards, replicas, control = self.engine.cards, self.engine.replicas, self._control
        self.telemetry = compose_telemetry(self._settings, self.watch, cards=cards)
        if not cards.engines or replicas is None or control is None:
            return
        self.watch.who_is_left_out = replicas.left_out
        needs = partial(read_needs, self._settings.repositories, self._settings.models)
        self.copies = CardCopies(cards, replicas, self.engine.tritons, needs=needs, spread=self.core.spread)
        if self.telemetry is not None:
            health, losses = self.telemetry.health, CardLosses(cards, replicas, self.watch, control.send)
            self.telemetry.observed = lambda: losses.observe(health.lost)

    def _options_of(self, model_name: str) -> BatchOptions | None:
        """Batching options of a model that is served, or was served until it became unavailable."""
        known = self.watch.models.get(model_name)
        if known is None or not (known.is_ready or known.unavailable) or known.config is None:
            return None
        options, replicas = self.parts.options.of(known.config), self.engine.replicas
        if replicas is None or not self.engine.cards.engines:
            return options
        return replace(options, instances=max(1, round(options.instances * replicas.live_share(model_name))))

    def _reports(self, images: ImageFlow) -> tuple[SystemReports, ModelReports]:
        """Reports on this gateway and its stack, and on its models."""
        settings, run_dir = self._settings, self._run_dir
        view = GatewayView(
            engine=self.engine,
            watch=self.watch,
            telemetry=self.telemetry,
            engine_name=lambda: self._engine_name,
            readiness=lambda: self.plane.readiness().reason,
            in_flight=lambda: self.parts.limiter.statistics().requests,
            queues=self._queues,
            parent=lambda: self._news,
            settings=lambda: setting_rows(settings, read_origins(run_dir)),
            placements=self.copies.placements if self.copies is not None else {},
        )
        sources = model_sources(view, self.plane, self.parts, images)
        return SystemReports(system_sources(settings, view)), ModelReports(sources)

    @property
    def served(self) -> ServedParts:
        """What the listeners serve."""
        return ServedParts(
            plane=self.plane,
            parts=self.parts,
            metrics=self.metrics,
            engine=self.engine.engine,
            watch=self.watch,
            page=self.page,
            system=self.system,
            models=self.models,
            load=self.load,
        )

    @property
    def outlived_by_engine(self) -> bool:
        """Whether the engine is external and continues when this gateway ends."""
        return self._settings.engine_is_external

    def _restart_card(self, label: str, reason: str) -> None:
        if self._control is not None:
            self._control.send(RestartEngine(reason, label))

    def _ask_restart(self, reason: str) -> None:
        self.is_sick = self._settings.engine_is_embedded
        if self._control is not None:
            self._control.send(RestartEngine(reason))

    async def listen_to_parent(self, stop: Callable[[], None]) -> None:
        """Receives the engine's state from the parent process; stops when the parent is gone."""
        if self._control is None:
            return
        async for message in self._control.receive():
            if isinstance(message, EngineStatusMessage):
                self._news = message
                self.watch.note_generations(message.model_generations)
                if self.own is not None:
                    self.own.assign(message.own_engines)
                if message.is_running:
                    self.watch.suspect()
                else:
                    self.watch.mark_down(message.reason)
        log.warning("the parent process is gone; stopping")
        stop()

    async def report_ready(self) -> None:
        """Reports once that requests are served; until then logs what it waits for."""
        for pause_s in chain(WAIT_LOG_INTERVALS_S, repeat(WAIT_LOG_INTERVALS_S[-1])):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self.watch.first_ready.wait()
                break
            if self.watch.reason != LOADING:  # otherwise the engine's own log shows its progress
                log.warning("waiting for the engine", engine=self.engine.place, reason=self.watch.reason)
        models = sorted(name for name, known in self.watch.models.items() if known.is_ready)
        unavailable = {name: known.reason for name, known in self.watch.models.items() if self._is_missed(known)}
        self._engine_name = await composition.describe_engine(self._settings, self.engine.engine)
        if self._control is not None:
            self._control.send(GatewayReady(self._engine_name, models, unavailable, self.plane.readiness().reason))

    def _is_missed(self, known: KnownModel) -> bool:
        """Whether it should serve and does not. Models excluded by --models or an external Triton do not count."""
        if known.is_refused or known.is_ready:
            return known.is_refused
        models = self._settings.models
        return known.name in models if models is not None else not self._settings.engine_is_external


def _load_tests(settings: Settings, audit: AuditLog, is_draining: Callable[[], bool]) -> LoadTests:
    """Load tests against this gateway's ports and the allowed targets."""
    options = LoadOptions(settings.home_path, own_address(settings), settings.load_target)
    return LoadTests(options, audit=audit, is_draining=is_draining)


async def _serve(settings: Settings, control: ControlConnection | None, place: CoreOptions) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    run_dir = place.workers_dir
    http_address = (
        bind_all(settings.host, settings.http_port, flag="--http-port") if run_dir is None else run_dir / HTTP_SOCKET
    )
    metrics_sockets = bind_all(settings.host, settings.metrics_port, flag="--metrics-port")
    gateway = Gateway(settings, control, place)
    await gateway.parts.pool.start()
    listeners = await open_listeners(settings, gateway.served, http_address, metrics_sockets)
    listeners.rest.start()
    listeners.metrics.start()
    if control is not None:
        control.send(GatewayServes(listeners.rest.port, listeners.grpc.port, listeners.metrics.port))
    gc.collect()
    gc.freeze()  # later collections skip the objects that exist now
    listeners.tell(has_workers=place.has_workers)
    tasks = [
        *(asyncio.create_task(one.run()) for one in (gateway.watch, gateway.metrics.loop_lag, MemoryTrimmer())),
        *([asyncio.create_task(gateway.parts.authenticator.run())] if gateway.parts.authenticator is not None else ()),
        *([asyncio.create_task(gateway.memory.run())] if isinstance(gateway.memory, SharedMemory) else ()),
        *([asyncio.create_task(gateway.registration.run())] if gateway.registration is not None else ()),
        *([asyncio.create_task(gateway.copies.run())] if gateway.copies is not None else ()),
        asyncio.create_task(gateway.core.run(place.run_dir)),
        asyncio.create_task(gateway.models.run()),
        *([asyncio.create_task(gateway.telemetry.run())] if gateway.telemetry is not None else ()),
        asyncio.create_task(gateway.listen_to_parent(stop.set)),
        asyncio.create_task(gateway.report_ready()),
    ]
    await composition.until_stopped(stop, tasks)
    is_clean = await _drain(settings, gateway, listeners.rest, listeners.grpc)
    await _close(tasks, gateway)
    await listeners.metrics.stop(1.0)
    return 0 if is_clean else 1


async def _drain(settings: Settings, gateway: Gateway, rest: HttpListener, grpc_server: GrpcServer) -> bool:
    """Serves on for the delay, then lets requests end within the grace; both are short for a sick engine."""
    started = time.monotonic()
    grace_s = min(settings.grace_s, SICK_GRACE_S) if gateway.is_sick else settings.grace_s
    delay_s = 0.0 if gateway.is_sick or gateway.page is not None else settings.drain_delay_s
    gateway.plane.announce_stop()
    log.info("draining", inflight=gateway.parts.limiter.statistics().requests, delay_s=delay_s)
    await asyncio.sleep(delay_s)
    await gateway.load.aclose()
    is_clean = all(await asyncio.gather(rest.stop(grace_s), grpc_server.stop(grace_s), gateway.core.drain(grace_s)))
    log.info("drained", seconds=round(time.monotonic() - started, 3), is_clean=is_clean)
    return is_clean


async def _close(tasks: list[asyncio.Task[None]], gateway: Gateway) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await gateway.batching.aclose()
    await gateway.parts.aclose()
    if gateway.registration is not None and gateway.outlived_by_engine:
        await gateway.registration.aclose()
    await gateway.engine.engine.aclose()


def run_gateway(settings: Settings, control_end: socket.socket | None, place: CoreOptions) -> int:
    """Serves until stopped. Returns the exit code. control_end: connection to the parent process, or None."""

    async def main() -> int:
        control = await ControlConnection.over(control_end) if control_end is not None else None
        return await _serve(settings, control, place)

    return int(uvloop.run(main()))
