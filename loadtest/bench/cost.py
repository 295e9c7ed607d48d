"""A lap with what it cost: the CPU time that gateway, Triton and the load generator itself used for it."""

import time
from dataclasses import dataclass

from loadtest.bench.closed_loop import Call, Lap, run_closed_loop
from loadtest.witness.process_cpu import CpuMeter


@dataclass(frozen=True, slots=True)
class Measured:
    """One lap and what it cost, in milliseconds of CPU an answer; gateway_ms is about 0 where it was not asked."""

    lap: Lap
    gateway_ms: float
    triton_ms: float
    client_ms: float


@dataclass(frozen=True, slots=True)
class Meters:
    """Whose CPU time is read."""

    gateway: CpuMeter
    triton: CpuMeter

    async def measure(self, call: Call, *, concurrency: int, seconds: float) -> Measured:
        """A lap, with what each program used for an answer of it."""
        before = (self.gateway.read_s(), self.triton.read_s(), time.process_time())
        lap = await run_closed_loop(call, concurrency=concurrency, seconds=seconds)
        after = (self.gateway.read_s(), self.triton.read_s(), time.process_time())
        gateway, triton, client = ((b - a) * 1000 / max(lap.count, 1) for a, b in zip(before, after, strict=True))
        return Measured(lap, gateway, triton, client)
