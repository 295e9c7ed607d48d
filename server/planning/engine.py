"""An engine under the manual clock: instances that take calls in the order in which they come."""

import heapq
import random
from dataclasses import dataclass

from server.planning.profile import Profile


@dataclass(frozen=True, slots=True)
class Slowdown:
    """From that second on everything takes so many times as long, until the end."""

    from_s: float
    times: float
    until_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class EngineModel:
    """What is replayed.

    instances: calls that run at once; a further one waits at the engine's door, as in Triton. before_s: from the
    batch's forming until the engine has it; after_s: from the engine's end until the gateway knows; while another call
    runs, neither costs the engine anything. noise: standard deviation of a call's time, of its logarithm; one call in
    outlier_every takes 100 times as long (0: none).
    """

    profile: Profile
    instances: int = 1
    before_s: float = 0.0
    after_s: float = 0.0
    noise: float = 0.0
    outlier_every: int = 0
    slowdowns: tuple[Slowdown, ...] = ()
    seed: int = 0


OUTLIER_TIMES = 100.0


class Engine:
    """The calls of one run: when each ends. busy_s: what all instances worked together."""

    def __init__(self, model: EngineModel) -> None:
        self.busy_s = 0.0
        self._model = model
        self._seconds = model.profile.seconds
        self._free_at = [0.0] * model.instances
        self._random = random.Random(model.seed)
        self._is_plain = not (model.noise or model.outlier_every or model.slowdowns)

    def start(self, rows: int, now: float) -> float:
        """When the gateway knows the answer of a call that it sends now."""
        begin = max(now + self._model.before_s, self._free_at[0])
        took_s = self._seconds(rows)
        if not self._is_plain:
            took_s *= self._factor(begin)
        heapq.heapreplace(self._free_at, begin + took_s)
        self.busy_s += took_s
        return begin + took_s + self._model.after_s

    def _factor(self, begin: float) -> float:
        model = self._model
        factor = self._random.lognormvariate(0.0, model.noise) if model.noise else 1.0
        if model.outlier_every and self._random.randrange(model.outlier_every) == 0:
            factor *= OUTLIER_TIMES
        for slow in model.slowdowns:
            if slow.from_s <= begin < slow.until_s:
                factor *= slow.times
        return factor
