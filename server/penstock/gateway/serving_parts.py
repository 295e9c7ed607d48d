"""Parts of every process that serves clients, gateway or worker: decoders, limits, keys, the data plane."""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.engines.load_policy import LoadPolicy
from penstock.engines.model_health import EngineView
from penstock.gateway import composition
from penstock.gateway.admission import AdmissionControl
from penstock.gateway.audit import AuditLog
from penstock.gateway.auth.authenticator import Authenticator
from penstock.gateway.auth.rate_limiter import QuotaStore
from penstock.gateway.batch_flow import BatchFlow
from penstock.gateway.batching.options import DeclaredOptions
from penstock.gateway.dataplane import PlaneParts
from penstock.gateway.engine_slots import EngineSlots
from penstock.gateway.image_flow import ImageFlow
from penstock.gateway.in_flight import InFlightCounts, InFlightLimiter, InFlightLimits
from penstock.gateway.metrics import Metrics
from penstock.gateway.model_uploads import ModelUploads
from penstock.gateway.settings import Settings
from penstock.gateway.shared_memory.regions import NoSharedMemory, SharedMemory
from penstock.gateway.tracing import TracedRelay
from penstock.protocol.engine import Engine
from penstock.protocol.inference import Batcher
from penstock.protocol.shared_memory import Slab
from penstock.tls import Certificates
from penstock.vision.decode_pool import DecodePool

if TYPE_CHECKING:
    from penstock.gateway.otel import OtelTracer

SPANS_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class SharedTables:
    """Counters that processes share; None in a single process. counts: in flight. quotas: by client."""

    counts: InFlightCounts | None = None
    quotas: QuotaStore | None = None


class ServingParts:
    """Create it inside the running loop; start the pool, and close it with aclose."""

    def __init__(self, settings: Settings, metrics: Metrics, *, decoder_count: int, tables: SharedTables) -> None:
        self.settings, self.metrics = settings, metrics
        self.options: DeclaredOptions = composition.declared_options(settings)
        self.pool = DecodePool(
            workers=decoder_count,
            job_timeout_s=settings.decode_timeout_s,
            max_waiting=settings.max_inflight_requests,
            max_pixels=settings.max_pixels,
        )
        limits = InFlightLimits(settings.max_inflight_requests, settings.max_inflight_bytes)
        self.limiter = InFlightLimiter(limits, tables.counts)
        self.audit = AuditLog(settings.audit_log)
        self.authenticator: Authenticator | None = composition.compose_authenticator(
            settings, tables.quotas, self.audit
        )
        self.certificates = Certificates.of(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        refusal = "the engine of this gateway has a repository of its own; add the model there"
        self.uploads = ModelUploads(
            settings.home_path, settings.repositories, refusal="" if settings.engine_has_files else refusal
        )
        self.tracer: OtelTracer | None = composition.compose_tracer(settings.otlp_endpoint)

    def plane_parts(
        self,
        engine: Engine,
        watch: EngineView,
        batching: Batcher,
        slab: Slab | None,
        memory: SharedMemory | NoSharedMemory,
        *,
        pictures: Batcher | None = None,
    ) -> "PlaneParts":
        """The parts of the data plane. slab: where images are written for the engine. pictures: of the image endpoint,
        if it has a batcher of its own.
        """
        settings, options = self.settings, self.options
        relay = TracedRelay(engine) if self.tracer is not None else engine
        slots = EngineSlots(relay, watch, len(settings.engine_urls) or 1)
        images = ImageFlow(
            backend=engine,
            watch=watch,
            pool=self.pool,
            metrics=self.metrics,
            batching=pictures or batching,
            slab=slab,
            slots=slots,
        )
        batches = BatchFlow(
            batching=batching,
            relay=engine,
            watch=watch,
            max_rows_of=lambda config: options.of(config).max_batch_size,
            max_body_bytes=settings.max_body_bytes,
            turns=slots,
        )
        admission = AdmissionControl(
            watch=watch,
            admission=self.limiter,
            metrics=self.metrics,
            quotas=self.authenticator.quotas if self.authenticator is not None else None,
            memory=memory,
            audit=self.audit,
        )
        return PlaneParts(
            relay=relay,
            watch=watch,
            images=images,
            admission=admission,
            metrics=self.metrics,
            slots=slots,
            batches=batches,
            options=options,
            loads=LoadPolicy(allows_code=settings.allow_model_code),
            required_models=settings.required_models,
            tracer=self.tracer,
        )

    async def aclose(self) -> None:
        self.uploads.close()
        if self.authenticator is not None:
            await self.authenticator.aclose()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.stop, SPANS_GRACE_S)
        await self.pool.aclose()
