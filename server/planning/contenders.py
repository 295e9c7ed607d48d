"""Who races: each policy with every setting of its knobs that is tried for it."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from math import ceil, inf

from server.batching.options import DEFAULT_MAX_QUEUE_SIZE, BatchOptions
from server.batching.queue import BatchQueue
from server.core.batching import Owner
from server.planning.bounds import capacity
from server.planning.engine import EngineModel
from server.planning.policy import Policy
from server.planning.rivals import Aimd, Deferred, Nexus, Triton

DELAYS = (0.0, 0.1, 0.25, 0.4)  # shares of the SLO
PATIENCES = (0.6, 0.5, 0.7, 0.8, 1.0, 0.4, 0.3, inf)  # likely ones first: others then cost one look
TARGETS = (0.5, 0.6, 0.7, 0.4)
WINDOWS = (1.2, 1.1, 1.0, 1.3, 1.45, 0.85, 1.6, 0.7, 2.0)  # of the batch that Nexus' bound allows


class Contender(StrEnum):
    """A way to form batches."""

    OURS = "penstock"
    TRITON = "triton"
    AIMD = "aimd"
    CLIPPER = "clipper"
    BATCH_1 = "batch 1"
    NEXUS = "nexus"
    DEFERRED = "deferred"


@dataclass(frozen=True, slots=True)
class Setting:
    """One choice of a policy's knobs, in words, and a fresh policy that has it."""

    words: str
    make: Callable[[], Policy]


@dataclass(frozen=True, slots=True)
class Problem:
    """The engine and the SLO, in seconds, that all contenders meet."""

    engine: EngineModel
    slo_s: float

    @property
    def max_batch_size(self) -> int:
        """Rows of one call at most."""
        return self.engine.profile.max_batch_size

    @property
    def slots(self) -> tuple[int, ...]:
        """Calls in flight that are worth trying: one more than instances where the way to the engine takes time."""
        instances = self.engine.instances
        is_way = self.engine.before_s + self.engine.after_s > 0
        return (instances, instances + 1) if is_way else (instances,)

    @property
    def nexus_batch(self) -> int:
        """The largest batch with 2 t(b) <= SLO, at least 1."""
        return max(self.engine.profile.largest_within(self.slo_s / 2), 1)


def settings_of(contender: Contender, problem: Problem) -> list[Setting]:
    """All that are tried for it; ours has one, its defaults."""
    return list(_GRIDS[contender](problem))


def _ours(problem: Problem) -> Iterator[Setting]:
    """The defaults; room for more requests where the engine could answer more of them inside the SLO."""
    engine = problem.engine
    room = ceil(capacity(engine.profile, problem.slo_s, instances=engine.instances) * problem.slo_s)
    options = BatchOptions(
        owner=Owner.GATEWAY,
        max_batch_size=problem.max_batch_size,
        instances=engine.instances,
        slo_s=problem.slo_s,
        max_queue_size=max(room, DEFAULT_MAX_QUEUE_SIZE),
    )
    words = "defaults" if options.max_queue_size == DEFAULT_MAX_QUEUE_SIZE else f"max_queue_size {room}"
    yield Setting(words, partial(BatchQueue, "model", options))


def _triton(problem: Problem) -> Iterator[Setting]:
    slo_s = problem.slo_s
    caps = _distinct(problem, 1.0, 1.5)
    for slots, delay, patience, cap in itertools.product(problem.slots, DELAYS, PATIENCES, caps):
        for preferred in ((), (min(problem.nexus_batch, cap),)) if delay else ((),):
            words = f"delay {delay * slo_s * 1e3:g} ms, {_patience(patience, slo_s)}, max batch {cap}"
            words += f", preferred {preferred[0]}" if preferred else ""
            yield Setting(
                words,
                partial(Triton, cap, slots, patience_s=patience * slo_s, delay_s=delay * slo_s, preferred=preferred),
            )


def _aimd(problem: Problem) -> Iterator[Setting]:
    yield from _adaptive(problem, (0.0,))


def _clipper(problem: Problem) -> Iterator[Setting]:
    yield from _adaptive(problem, DELAYS[1:])


def _adaptive(problem: Problem, delays: tuple[float, ...]) -> Iterator[Setting]:
    slo_s, most = problem.slo_s, problem.max_batch_size
    steps = (1.0,) if delays[-1] else (1.0, 4.0)  # with a delay the step showed no difference
    knobs = itertools.product(problem.slots, delays, PATIENCES[:-1], TARGETS, steps)
    for slots, delay, patience, target, step in knobs:
        words = f"call {target * slo_s * 1e3:g} ms, {_patience(patience, slo_s)}, step {step:g}"
        words += f", delay {delay * slo_s * 1e3:g} ms" if delay else ""
        yield Setting(
            words,
            partial(
                Aimd,
                most,
                slots,
                patience_s=patience * slo_s,
                target_s=target * slo_s,
                step=step,
                delay_s=delay * slo_s,
            ),
        )


def _batch_1(problem: Problem) -> Iterator[Setting]:
    for slots, patience in itertools.product(problem.slots, PATIENCES):
        yield Setting(
            _patience(patience, problem.slo_s),
            partial(Triton, 1, slots, patience_s=patience * problem.slo_s),
        )


def _nexus(problem: Problem) -> Iterator[Setting]:
    for slots, window in itertools.product(problem.slots, _distinct(problem, *WINDOWS)):
        yield Setting(
            f"window {window}, profile known",
            partial(Nexus, problem.max_batch_size, slots, seconds=problem.engine.profile.seconds, window=window),
        )


def _deferred(problem: Problem) -> Iterator[Setting]:
    windows = _distinct(problem, *WINDOWS)
    for slots, window, margin in itertools.product(problem.slots, windows, (0.0, 0.1, 0.25)):
        yield Setting(
            f"window {window}, margin {margin * problem.slo_s * 1e3:g} ms, profile known",
            partial(
                Deferred,
                problem.max_batch_size,
                slots,
                seconds=problem.engine.profile.seconds,
                window=window,
                margin_s=margin * problem.slo_s,
            ),
        )


_GRIDS: dict[Contender, Callable[[Problem], Iterator[Setting]]] = {
    Contender.OURS: _ours,
    Contender.TRITON: _triton,
    Contender.AIMD: _aimd,
    Contender.CLIPPER: _clipper,
    Contender.BATCH_1: _batch_1,
    Contender.NEXUS: _nexus,
    Contender.DEFERRED: _deferred,
}


def _distinct(problem: Problem, *shares: float) -> list[int]:
    """Batch sizes by shares of Nexus' batch, and the largest possible one."""
    most = problem.max_batch_size
    return list(dict.fromkeys([*(min(max(int(share * problem.nexus_batch), 1), most) for share in shares), most]))


def _patience(share: float, slo_s: float) -> str:
    return "no timeout" if share == inf else f"timeout {share * slo_s * 1e3:g} ms"
