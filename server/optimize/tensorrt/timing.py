"""How long an engine takes, without the copies: as NVIDIA's trtexec tells of a GPU's own time."""

import time
from collections.abc import Callable

from server.optimize.tensorrt.cuda import Cuda
from server.optimize.tensorrt.engine import Engine
from server.optimize.tensorrt.report import EngineTiming
from server.optimize.timing import median_round

ROUNDS = 5


def time_engine(
    engine: Engine, cuda: Cuda, batch_size: int, *, rounds: int = ROUNDS, clock: Callable[[], float] = time.perf_counter
) -> EngineTiming:
    """Of what was loaded into the engine: a run, then the wait for it, again and again, a second a round."""

    def run() -> None:
        engine.enqueue()
        cuda.wait()

    return EngineTiming(batch_size, tuple(median_round(run, clock) for _ in range(rounds)))
