"""Measures what fusing and compiling gain: one program in four forms, with CUDA graphs, without a server.

    python -m loadtest.bench.gpu.engine_table FOLDER [--json engine_table.json] [--batch 1 8 16 64] [--rounds 3]

FOLDER is a model's. plain runs the program as it was exported, which was the engine before; folded folds batch
normalisations; fused is the default of the backend `torch`; compiled is its parameter compiler: aot-inductor. Points
are measured in a random order in each round. The interpreter must have torch.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from google.protobuf import json_format

from loadtest.bench.gpu.tritons import read_config
from penstock.engines.torch_serving.config import EngineSpec, engine_spec
from penstock.engines.torch_serving.program import Program, load_program, move_program, prepared_module, read_program
from penstock.engines.torch_serving.trial import answers_of, drawn_rows, largest_difference, sample_of

FORMS = ("plain", "folded", "fused", "compiled")
_WARM_UP_RUNS = 3
_COMPARED_ROWS = 3


@dataclass
class Form:
    """One form of the program. how: as the backend's log names it. off: relative difference from FP32."""

    name: str
    how: str
    note: str
    ready_s: float
    off: float | None
    graphs: dict[int, Any] = field(default_factory=dict)
    rates: dict[int, list[float]] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """For the file. rates: rows a second, by batch, of each round."""
        return {
            "form": self.name, "how": self.how, "note": self.note, "ready_s": round(self.ready_s, 1), "off": self.off,
            "rates": {str(batch): [round(rate, 1) for rate in rates] for batch, rates in self.rates.items()},
        }  # fmt: skip


def open_form(name: str, path: Path, spec: EngineSpec, device: Any, truth: list[Any]) -> Form:
    """The form, ready to run, with a graph of each bucket. truth: FP32 answers of the drawn rows."""
    began_s = time.monotonic()
    chosen = replace(spec, is_fused=name != "plain", is_compiled=name == "compiled")
    if name == "folded":
        module = prepared_module(path, chosen, device)
        program: Program = lambda inputs: module(*inputs)  # noqa: E731
        how, note = "fold", ""
    else:
        loaded = load_program(path, chosen, device, report=_say)
        program, how, note = loaded.program, loaded.fused, loaded.note
    ready_s = time.monotonic() - began_s
    answers = answers_of(lambda *inputs: program(inputs), _sample(spec, device, _COMPARED_ROWS))
    offs = [largest_difference(right, answer) for right, answer in zip(truth, answers, strict=True)]
    form = Form(name, how, note, ready_s, max((off for off in offs if off is not None), default=None))
    pool = torch.cuda.graph_pool_handle()
    for batch in reversed(spec.buckets):
        form.graphs[batch] = _capture(program, _sample(spec, device, batch), pool)
    return form


def _sample(spec: EngineSpec, device: Any, rows: int) -> list[Any]:
    return sample_of(spec, device, drawn_rows(spec, _COMPARED_ROWS), rows)


def _capture(program: Program, inputs: list[Any], pool: Any) -> Any:
    """A graph that keeps its inputs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(stream):
        for _ in range(_WARM_UP_RUNS):
            program(inputs)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            kept = program(inputs)
    return graph, inputs, kept


def measure(forms: Sequence[Form], batches: Sequence[int], rounds: int, seconds: float) -> None:
    """Adds a rate to every form and batch in each round."""
    points = [(form, batch) for form in forms for batch in batches]
    for number in range(rounds):
        random.Random(number).shuffle(points)
        for form, batch in points:
            form.rates.setdefault(batch, []).append(_rate(form.graphs[batch][0], batch, seconds))


def _rate(graph: Any, batch: int, seconds: float) -> float:
    """Rows a second, timed by the GPU."""
    each_s = _timed_s(graph, _WARM_UP_RUNS) / _WARM_UP_RUNS
    count = max(_WARM_UP_RUNS, int(seconds / each_s))
    return batch * count / _timed_s(graph, count)


def _timed_s(graph: Any, count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def table(forms: Sequence[Form], batches: Sequence[int]) -> str:
    """Medians, and the spread of the rounds as a share of them."""
    lines = [f"{'form':<10}{'ready s':>8}{'off':>10}" + "".join(f"{f'batch {batch}':>16}" for batch in batches)]
    for form in forms:
        cells = []
        for batch in batches:
            rates = form.rates[batch]
            middle = statistics.median(rates)
            cells.append(f"{f'{middle:,.0f} ±{(max(rates) - min(rates)) / middle / 2:.1%}':>16}")
        off = "-" if form.off is None else f"{form.off:.1e}"
        lines.append(f"{form.name:<10}{form.ready_s:>8.1f}{off:>10}{''.join(cells)}  {form.how} {form.note}")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """What is written to the file."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    config = json_format.MessageToDict(read_config(options.folder), preserving_proto_field_name=True)
    batches = tuple(sorted(options.batch))
    spec = replace(engine_spec(config, is_gpu=True), buckets=batches, max_batch_size=batches[-1])
    path = options.folder / "1" / spec.file_name
    exact = move_program(read_program(path).module(check_guards=False), torch.float32, device)
    drawn = [one.to(device) for one in drawn_rows(spec, _COMPARED_ROWS)]
    truth = [one.cpu() for one in answers_of(exact, drawn)]
    del exact
    forms = []
    for name in options.forms:
        _say(f"opens {name}")
        forms.append(open_form(name, path, spec, device, truth))
    measure(forms, batches, options.rounds, options.seconds)
    print(table(forms, batches), flush=True)
    card = torch.cuda.get_device_name(device)
    return {
        "model": options.folder.name, "card": card, "torch": torch.__version__, "precision": spec.precision.value,
        "rounds": options.rounds, "seconds": options.seconds, "forms": [form.facts() for form in forms],
    }  # fmt: skip


def _say(line: str) -> None:
    print(f"engine_table: {line}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.gpu.engine_table", description=__doc__)
    parser.add_argument("folder", type=Path, help="the model's, with config.pbtxt and 1/")
    parser.add_argument("--json", type=Path, default=Path("engine_table.json"), metavar="FILE")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16, 64], metavar="N")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.3, help="of each point and round [0.3]")
    options = parser.parse_args(arguments)
    if min(*options.batch, options.rounds) < 1 or options.seconds <= 0:
        parser.error("--batch, --rounds and --seconds must be above 0")
    if not torch.cuda.is_available():
        _say("no GPU to measure")
        return 2
    options.json.write_text(json.dumps(run(options), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
