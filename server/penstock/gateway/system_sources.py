"""Connects the system and model reports to the parts of a gateway."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from penstock.engines.ort_serving.placement import EngineFacts
from penstock.engines.watch import EngineWatch
from penstock.gateway.batching.queue import QueueStatistics
from penstock.gateway.composition import ConnectedEngine
from penstock.gateway.dataplane import DataPlane
from penstock.gateway.image_flow import ImageFlow
from penstock.gateway.serving_parts import ServingParts
from penstock.gateway.settings import Settings
from penstock.gateway.system.examination import Examination
from penstock.gateway.system.model_reports import ModelSources
from penstock.gateway.system.reports import SystemSources
from penstock.gateway.workers.gateway_process import EngineStatusMessage
from penstock.gpu.telemetry.reader import TelemetryReader
from penstock.logs import stack_log_folder
from penstock.protocol.errors import InferenceError
from penstock.protocol.system_reports import EngineSummary, MpsSummary, ReplicaSummary, SettingReport


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayView:
    """Parts of a gateway, and functions that read their state in the event loop. parent: last message of the parent.
    placements: each model's cards, and why."""

    engine: ConnectedEngine
    watch: EngineWatch
    telemetry: TelemetryReader | None
    engine_name: Callable[[], str]
    readiness: Callable[[], str]
    in_flight: Callable[[], int]
    queues: Callable[[], Mapping[str, QueueStatistics]]
    parent: Callable[[], EngineStatusMessage]
    settings: Callable[[], list[SettingReport]]
    placements: Mapping[str, str]


def system_sources(settings: Settings, view: GatewayView) -> SystemSources:
    """Sources of the reports of this gateway."""
    telemetry = view.telemetry
    return SystemSources(
        workers=settings.worker_count,
        readiness=view.readiness,
        in_flight=view.in_flight,
        engine=lambda: _engine(settings, view),
        models=lambda: view.watch.models,
        is_left_out=view.watch.is_left_out,
        queues=view.queues,
        gpus=telemetry.loads if telemetry is not None else tuple,
        lost_gpus=(lambda: telemetry.health.cards) if telemetry is not None else dict,
        mps=lambda: _mps(settings, view.parent()),
        settings=view.settings,
        examination=Examination(settings.model_dump_json().encode()),
        log_folder=stack_log_folder(),
        audit_log=settings.audit_log,
    )


def model_sources(view: GatewayView, plane: DataPlane, parts: ServingParts, images: ImageFlow) -> ModelSources:
    """Sources of the reports on the models."""
    return ModelSources(
        models=lambda: view.watch.models,
        is_left_out=view.watch.is_left_out,
        index=view.engine.engine.repository_index,
        card=images.card,
        options=plane.batch_options,
        queues=view.queues,
        counts=parts.metrics.request_counts,
        counts_block=parts.metrics.is_shared,
        is_removable=parts.uploads.has_added,
        facts=partial(_facts, view),
    )


def _facts(view: GatewayView, model_name: str) -> tuple[EngineFacts, ...]:
    """Of the embedded engine, else of our Triton, which the parent reads from its log."""
    facts = view.engine.facts
    if facts is None:
        return view.parent().facts.get(model_name, ())
    with suppress(InferenceError):
        return (facts(model_name),)
    return ()


def _engine(settings: Settings, view: GatewayView) -> EngineSummary:
    replicas = view.engine.replicas.statistics() if view.engine.replicas is not None else []
    return EngineSummary(
        kind="external" if settings.engine_is_external else settings.engine,
        name=view.engine_name(),
        is_up=view.watch.is_up,
        reason=view.watch.reason,
        restarts=view.parent().restarts,
        replicas=[ReplicaSummary(row.name, row.standing.value, row.in_flight, row.ejections) for row in replicas],
        placements=dict(view.placements),
    )


def _mps(settings: Settings, parent: EngineStatusMessage) -> MpsSummary | None:
    if settings.mps != "on":
        return None
    return MpsSummary(
        parent.mps_clients,
        parent.mps_beside,
        parent.mps_restarts,
        parent.mps_recovery_s,
        settings.mps_active_thread_percentage,
        settings.mps_pinned_memory,
    )
