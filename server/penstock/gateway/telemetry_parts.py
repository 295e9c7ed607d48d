"""GPU telemetry, and metrics that do not change or that are read from the machine, created from the settings."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from penstock import VERSION
from penstock.engines.watch import EngineWatch
from penstock.gateway.card_engines import NO_CARDS, CardEngines
from penstock.gateway.composition import is_on_this_host
from penstock.gateway.settings import Settings
from penstock.gpu.mps.control import PIPE_DIRECTORY, DaemonPresence
from penstock.gpu.telemetry.health import CardHealth
from penstock.gpu.telemetry.reader import AUTO, OFF, TelemetryOptions, TelemetryReader, has_driver
from penstock.metric_table import Readings
from penstock.tls import Certificates


def compose_telemetry(
    settings: Settings, watch: EngineWatch, environment: Mapping[str, str] = os.environ, cards: CardEngines = NO_CARDS
) -> TelemetryReader | None:
    """GPU telemetry, or None. The engine counts as down while a model on a GPU has lost it, or each of its cards."""
    said = settings.gpu_metrics
    dcgm_url = "" if said in (AUTO, OFF) else said
    is_here = is_on_this_host(settings)
    if said == OFF or not (dcgm_url or (is_here and has_driver())):
        return None
    telemetry = TelemetryReader(
        TelemetryOptions(dcgm_url=dcgm_url), CardHealth(environment.get("CUDA_VISIBLE_DEVICES"))
    )
    if is_here:
        otherwise = watch.hindrance

        def reason() -> str:
            lost = telemetry.health.lost
            is_whole = any(each.uuid not in lost for each in cards.engines)
            return "" if is_whole or not watch.has_model_on_gpu else next(iter(lost.values()), "")

        watch.hindrance = lambda: reason() or otherwise()
    return telemetry


def constant_readers(
    settings: Settings,
    certificates: Certificates | None = None,
    environment: Mapping[str, str] = os.environ,
    cards: CardEngines = NO_CARDS,
) -> dict[str, Callable[[], float | Readings]]:
    """Readers by metric: build, limits, expiry of the certificate, and whether every MPS daemon listens, if any."""
    readers: dict[str, Callable[[], float | Readings]] = {
        "build_info": lambda: {(VERSION,): 1.0},
        "max_inflight_requests": lambda: settings.max_inflight_requests,
        "max_inflight_bytes": lambda: settings.max_inflight_bytes,
    }
    if certificates is not None:
        readers["tls_certificate_expires_timestamp_seconds"] = lambda: certificates.expires_at
        readers["tls_failed_reads_total"] = lambda: certificates.failed_reads
    own = [each.mps_directory for each in cards.engines if each.mps_directory]
    if settings.mps == "on" and settings.mps_directory is not None and not cards.engines:
        own = [str(settings.mps_directory)]
    if folders := own or list(filter(None, [environment.get(PIPE_DIRECTORY)])):
        daemons = [DaemonPresence(Path(folder)) for folder in folders]
        readers["mps_up"] = lambda: all(daemon.is_up() for daemon in daemons)
    return readers
