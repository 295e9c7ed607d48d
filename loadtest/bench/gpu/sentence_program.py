"""What OpenNMT's translator does on this GPU without a server: the ceiling of loadtest.bench.gpu.sentences.

    PYTHONPATH=. python -m loadtest.bench.gpu.sentence_program [--precision fp16 fp32] [--batch 1 4 64]

Needs a card, PyTorch and numpy, nothing else of the project's environment. The program is the exported one, with the
weights of seed 0, in a CUDA graph a batch size, as the `torch` backend runs it; FP32 without TF32. Rounds are
interleaved. Words are compared with those that float32 gives on the CPU. Half a minute, most of it exporting.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deploy.models.opennmt_weights import Size, draw
from loadtest.bench.report import BenchSpread, format_table, spread

FIRST_TOKEN = 4
COMPARED = 8  # sentences that the CPU translates, too
WARM_UP = 3  # runs before a capture, as CUDA graphs want
HEAD = ("precision, batch", "sentences/s", "ms a batch", "words as on the CPU")
NO_GPU = 2
TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """Of one precision and batch size, over the rounds. agreement: share of words, of the first sentences."""

    precision: str
    batch: int
    sentences_per_s: BenchSpread
    batch_ms: BenchSpread
    agreement: float


def export_program(size: Size, path: Path, largest: int) -> None:
    """The exported program of seed 0."""
    from deploy.models.opennmt_torch import export

    export(size, draw(size, 0), path, max_batch_size=largest)


class Captured:
    """The program in a CUDA graph for one batch size; its input stays where it is."""

    def __init__(self, torch: Any, module: Any, words: TokenIds) -> None:
        self._torch = torch
        self._input = torch.from_numpy(words).cuda()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                module(self._input)
        stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = module(self._input)

    def words(self) -> TokenIds:
        """The answer."""
        self._graph.replay()
        answer: TokenIds = self._output.cpu().numpy()
        return answer

    def seconds(self, at_least_s: float) -> float:
        """Of one run, over runs of that long together, each waited for, as a server must."""
        count, begun = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begun) < at_least_s:
            self._graph.replay()
            self._torch.cuda.synchronize()
            count += 1
        return elapsed / count


def measure(torch: Any, size: Size, options: argparse.Namespace) -> list[ProgramResult]:
    """Every precision and batch size, their order drawn anew each round."""
    words = np.random.default_rng(1).integers(FIRST_TOKEN, size.vocabulary, (max(options.batch), size.source_length))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "model.pt2"
        export_program(size, path, max(*options.batch, COMPARED))
        module = torch.export.load(path).module()
        wanted = module(torch.from_numpy(words[:COMPARED])).numpy()
        casts: dict[str, Callable[[Any], Any]] = {"fp32": lambda it: it.float(), "fp16": lambda it: it.half()}
        captured: dict[tuple[str, int], Captured] = {}
        for precision in options.precision:
            own = casts[precision](torch.export.load(path).module()).cuda()
            captured |= {(precision, n): Captured(torch, own, words[:n]) for n in options.batch}
        agreement = {key: float((one.words()[:COMPARED] == wanted[: key[1]]).mean()) for key, one in captured.items()}
        times: dict[tuple[str, int], list[float]] = {key: [] for key in captured}
        for _ in range(options.rounds):
            for key in random.sample(list(captured), len(captured)):
                times[key].append(captured[key].seconds(options.seconds))
    return [
        ProgramResult(
            precision,
            batch,
            sentences_per_s=spread([batch / one for one in own]),
            batch_ms=spread([one * 1000 for one in own]),
            agreement=agreement[precision, batch],
        )
        for (precision, batch), own in times.items()
    ]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench.gpu.sentence_program",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--precision", nargs="+", choices=("fp16", "fp32"), default=["fp16", "fp32"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 64], metavar="N")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each stretch")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when everything was measured, 2 where there is no GPU."""
    options = parse_arguments(arguments)
    try:
        import torch
    except ImportError:
        print("sentence_program: PyTorch is not here; install torch 2.11 for CUDA", file=sys.stderr)
        return NO_GPU
    if not torch.cuda.is_available():
        print("sentence_program: no GPU that PyTorch can use here; run it on a machine that has one", file=sys.stderr)
        return NO_GPU
    results = measure(torch, Size(), options)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    print(f"{options.rounds} interleaved rounds of {options.seconds:g} s: median (lowest-highest)\n")
    rows = [(f"{r.precision} {r.batch}", r.sentences_per_s, r.batch_ms, f"{r.agreement:.1%}") for r in results]
    print(format_table(HEAD, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
