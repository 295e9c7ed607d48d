"""What a relayed picture costs the gateway: CPU of core, fronts, Triton and the model's processes, by /proc.

    python -m loadtest.bench.relayed --callers 96 --call-ms 20

A stack of its own, with a model of Triton's python backend that takes encoded pictures, sleeps for a call's time and
answers the same 1,000 scores for each row without a look at them. A closed loop asks; its rate is not the point, and
on few cores it is the load generator's. What a picture costs falls with the rows of a call, so these are told, too.
"""

import argparse
import asyncio
import itertools
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import aiohttp
import psutil

from loadtest.bench.closed_loop import run_closed_loop
from loadtest.bench.gpu.penstock_up import STUB, TRITON, PenstockUp
from loadtest.bench.gpu.pictures import photos
from loadtest.bench.gpu.raw import CHECKOUT
from loadtest.bench.report import Spread, conditions, format_table, spread
from loadtest.bench.wire import BadAnswer, HttpPort, HttpRequest

NAME = "answers-at-once"
START_S, WARM_UP_S = 60.0, 2.0
PARTS = ("core", "fronts", "triton", "model")
_MODEL = '''"""Scores of nothing, after a while."""
import time

import numpy as np
import triton_python_backend_utils as pb_utils

SCORES = np.tile(np.random.default_rng(0).random(1000, np.float32), (256, 1))


class TritonPythonModel:
    def execute(self, requests):
        time.sleep({call_s})
        rows = [pb_utils.get_input_tensor_by_name(request, "picture").shape()[0] for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("probabilities", SCORES[:count])]) for count in rows]
'''
_CONFIG = """backend: "python"
max_batch_size: 64
input [ { name: "picture" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "probabilities" data_type: TYPE_FP32 dims: [ 1000 ] } ]
instance_group [ { kind: KIND_CPU count: 2 } ]
"""
_WORDS = {
    "network-type": "1",
    "image-decoder": "engine",
    "infer-dims": "3;224;224",
    "resize-shorter-side": "256",
    "labels": ";".join(f"class {number}" for number in range(1000)),
    "batch_owner": "gateway",
}


def write_model(repository: Path, *, call_s: float) -> None:
    """The model's folder."""
    version = repository / NAME / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(_MODEL.format(call_s=call_s))
    words = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in _WORDS.items()]
    (version.parent / "config.pbtxt").write_text(_CONFIG + "".join(words))


def part_of(name: str, words: Sequence[str]) -> str:
    """Which of PARTS a process of the stack is, by its name and command line; empty for any other."""
    if name.startswith(TRITON):
        return "triton"
    if name and STUB.startswith(name):
        return "model"
    if list(words[1:3]) != ["-m", "server"]:
        return ""
    return "fronts" if words[-1].startswith("front") else "core"


def cpu_of_parts(up: PenstockUp) -> dict[str, float]:
    """Seconds so far, by part."""
    found: dict[str, float] = defaultdict(float)
    for process in up.processes():
        with suppress(psutil.Error):
            times = process.cpu_times()
            found[part_of(process.name(), process.cmdline())] += times.user + times.system
    return found


async def measure(up: PenstockUp, options: argparse.Namespace) -> list[dict[str, float]]:
    """Of each round: the rate, rows a call, and microseconds a picture of each part. Raises BadAnswer."""
    path, kind = f"/v2/models/{NAME}/image", {"content-type": "image/jpeg"}
    requests = [HttpRequest(path, kind, picture) for picture in photos(32)]
    rows: list[int] = []
    async with HttpPort(f"http://127.0.0.1:{up.port}") as port:

        async def ask(number: int) -> None:
            answer = await port.post(requests[number % len(requests)])
            if found := re.search(rb'"batch_size":([0-9]+)', answer):
                rows.append(int(found[1]))

        await run_closed_loop(ask, concurrency=options.callers, seconds=WARM_UP_S)
        told = []
        for _ in range(options.rounds):
            rows.clear()
            before = cpu_of_parts(up)
            lap = await run_closed_loop(ask, concurrency=options.callers, seconds=options.seconds)
            used = cpu_of_parts(up)
            costs = {part: (used[part] - before[part]) / lap.count * 1e6 for part in PARTS}
            told.append({"pictures/s": lap.rate, "rows a call": len(rows) / sum(1 / row for row in rows), **costs})
    return told


def run(options: argparse.Namespace) -> dict[str, Spread]:
    """Each figure over the rounds. Raises BadAnswer, aiohttp.ClientError."""
    with tempfile.TemporaryDirectory(prefix="relayed") as folder:
        write_model(Path(folder) / "models", call_s=options.call_ms / 1000)
        flags = ("--workers", str(options.workers))
        with PenstockUp(Path(folder), [NAME], *flags, environment=options.environment) as up:
            up.wait(time.monotonic() + START_S)
            rounds = asyncio.run(measure(up, options))
    return {name: spread([one[name] for one in rounds]) for name in rounds[0]}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--callers", type=int, default=96)
    parser.add_argument("--call-ms", type=float, default=20.0, help="what a call of the model takes")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="fronts")
    parser.add_argument("--environment", type=Path, default=CHECKOUT / ".venv-triton", help="of Triton")
    return parser.parse_args(arguments)


def main() -> int:
    """The program; its exit code."""
    options = parse_arguments()
    try:
        found = run(options)
    except (BadAnswer, aiohttp.ClientError, OSError) as error:
        print(f"relayed: {error}")
        return 1
    print("\n".join(itertools.starmap("{}: {}".format, conditions().items())))
    print(f"{options.workers} fronts, {options.callers} callers, a call of {options.call_ms:g} ms")
    print(f"{options.rounds} rounds of {options.seconds:g} s: median (lowest-highest); the parts in CPU us a picture\n")
    print(format_table(("figure", "value"), [(name, str(value)) for name, value in found.items()]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
