"""Sentences a second of OpenNMT's translator, one by one and batched."""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from deploy.models.opennmt import FP16, FP32, ONNX_NAME, TORCH_NAMES
from loadtest.bench.child import CHECKOUT
from loadtest.bench.closed_loop import Repetition, make_repetition
from loadtest.bench.gpu.callers import CallerLane
from loadtest.bench.gpu.generators import Generators
from loadtest.bench.gpu.programs import PenstockUp
from loadtest.bench.gpu.tritons import as_sent, ask
from loadtest.bench.report import format_table, present, spread, write_json
from loadtest.bench.wire import BadAnswer, http_infer
from penstock.engines.triton.runtime import default_environment
from penstock.protocol.inference import tensor_from_numpy
from penstock_load.targets import read_targets

ONNX = "onnx"
NAMES = {ONNX: ONNX_NAME, **TORCH_NAMES}
_LOAD_S = 180.0


@contextmanager
def stack_of(forms: Sequence[str], *, environment: Path, torch_python: str) -> Iterator[int]:
    """The REST port of a gateway with these forms (keys of NAMES). environment: of Triton. Raises BadAnswer."""
    with tempfile.TemporaryDirectory(prefix="penstock-nmt-") as folder:
        home = Path(folder)
        for form in forms:
            _write(form, home, torch_python)
        with PenstockUp(home, [NAMES[form] for form in forms], environment=environment) as up:
            up.wait(time.monotonic() + _LOAD_S)
            yield up.port


def _write(form: str, home: Path, torch_python: str) -> None:
    """By an interpreter of its own: what exports for a GPU is not in ours."""
    is_torch = form in (FP16, FP32)
    python, flags = (torch_python, ("--torch", "--precision", form)) if is_torch else (sys.executable, ())
    command = [python, "-m", "deploy.models.opennmt", "--home", str(home), *flags]
    environ = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT, env=environ)
    if done.returncode:
        raise BadAnswer(f"{' '.join(command[1:])} made no model: {done.stderr.strip()[-500:]}")


PREFIX, INPUT, OUTPUT = "opennmt-", "source", "target"
TOKENS, FIRST_TOKEN, VOCABULARY = 25, 4, 50_004
COMPARED = 8  # sentences that are asked alone, and at once with others
BATCH = 64
LOAD_S = 300.0
REFERENCES = ("opennmt-v100-before", "opennmt-v100")  # rows of targets.toml
HEAD = ("model, callers × sentences a request", "sentences/s", "p50 ms", "p99 ms", "generator busy")
Sentences = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Case:
    """So many callers, each with requests of so many sentences."""

    callers: int
    sentences: int


# alone · as the framework of 2017 · one each, batched by the batcher · batched by the caller already
CASES = (Case(1, 1), Case(1, 4), Case(BATCH, 1), Case(2, BATCH))


def random_sentences(count: int, seed: int) -> Sentences:
    """(count, WORDS), full ones."""
    return np.random.default_rng(seed).integers(FIRST_TOKEN, VOCABULARY, (count, TOKENS))


def http_bytes(model: str, words: Sentences) -> bytes:
    """A whole HTTP/1.1 request, the numbers as binary data both ways."""
    return as_sent(http_infer(model, tensor_from_numpy(INPUT, words)))


def translate(port: int, model: str, words: Sentences) -> Sentences:
    """The server's answer, outside every measured stretch. Raises BadAnswer."""
    tensor = {"name": INPUT, "datatype": "INT64", "shape": list(words.shape), "data": words.ravel().tolist()}
    answer = json.loads(ask(port, f"/v2/models/{model}/infer", {"inputs": [tensor]}))
    (output,) = [output for output in answer["outputs"] if output["name"] == OUTPUT]
    return np.array(output["data"], np.int64).reshape(output["shape"])


def prepare(port: int, wanted: Sequence[str]) -> list[str]:
    """The models, loaded. wanted: none for all that are there. Raises BadAnswer."""
    index = json.loads(ask(port, "/v2/repository/index", {}))
    here = sorted({model["name"] for model in index if model["name"].startswith(PREFIX)})
    models = list(wanted) or here
    if not models:
        raise BadAnswer(f"no model {PREFIX}* in the server's repository: python -m deploy.models.opennmt writes one")
    ready = {model["name"] for model in index if model.get("state") == "READY"}
    for model in models:
        if model not in ready:
            ask(port, f"/v2/repository/models/{model}/load", {}, timeout_s=LOAD_S)
    return models


def agreements(port: int, models: Sequence[str]) -> list[dict[str, Any]]:
    """Shares of words that batches, precisions and engines answer alike; a rounding error changes all words after it.

    together: the same in a batch with 63 others as alone. with_first: the same as the first model's.
    """
    words = random_sentences(BATCH, 7)
    alone = {model: np.concatenate([translate(port, model, row[None]) for row in words[:COMPARED]]) for model in models}
    return [
        {
            "model": model,
            "together": float((_at_once(port, model, words)[:COMPARED] == own).mean()),
            "with_first": float((alone[models[0]] == own).mean()),
        }
        for model, own in alone.items()
    ]


def _at_once(port: int, model: str, words: Sentences) -> Sentences:
    """A caller for each sentence, so that some of the batches are made by the batcher."""
    with ThreadPoolExecutor(len(words)) as callers:
        return np.concatenate(list(callers.map(lambda row: translate(port, model, row[None]), words)))


def lanes_of(port: int, model: str, case: Case) -> list[CallerLane]:
    """Every caller with sentences of its own."""
    words = random_sentences(case.callers * case.sentences, 1).reshape(case.callers, case.sentences, TOKENS)
    return [CallerLane(model, port, http_bytes(model, own), case.sentences) for own in words]


def measure(
    port: int, models: Sequence[str], generators: Generators, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The cases of every model, interleaved. Raises BadAnswer for a request that failed."""
    repetitions: dict[tuple[str, Case], list[tuple[Repetition, float]]] = {(m, c): [] for m in models for c in CASES}
    for _ in range(options.rounds):
        for model, case in random.sample(list(repetitions), len(repetitions)):
            repetitions[model, case].append(_run_once(lanes_of(port, model, case), generators, options))
            print(".", end="", file=sys.stderr, flush=True)
    return [_result(model, case, own) for (model, case), own in repetitions.items()]


def _run_once(
    lanes: Sequence[CallerLane], generators: Generators, options: argparse.Namespace
) -> tuple[Repetition, float]:
    """(the repetition, how busy the generator was).

    The rate is the callers' by the mean time of an answer: what counting gives in a closed loop, without the edges of a
    repetition that holds a few large batches only.
    """
    run = generators.closed(lanes, settle_s=options.seconds / 4, seconds=options.seconds)()
    failed = next((one.failure for one in run.asks if one.failure), "")
    if failed or not run.asks:
        raise BadAnswer(f"{lanes[0].name}: {failed or 'no answer in time; make --seconds longer'}")
    busy = run.cpu_s / run.seconds / min(options.processes, len(lanes))
    times_s = [one.latency_ms / 1000 for one in run.asks]
    return make_repetition(times_s, statistics.fmean(times_s) * len(run.asks) / len(lanes)), busy


def _result(model: str, case: Case, repetitions: Sequence[tuple[Repetition, float]]) -> dict[str, Any]:
    """Over the rounds. generator_busy: a share of its processes."""
    return {
        "model": model,
        "callers": case.callers,
        "sentences": case.sentences,
        "sentences_per_s": spread([one.rate * case.sentences for one, _ in repetitions]),
        "p50_ms": spread([one.p50_ms for one, _ in repetitions]),
        "p99_ms": spread([one.p99_ms for one, _ in repetitions]),
        "generator_busy": spread([busy for _, busy in repetitions]),
    }


def references() -> list[str]:
    """What the figures stand beside, a sentence each."""
    rows = {target.id: target for target in read_targets()}
    return [
        f"{row.title}: {row.figure:g} {row.unit} ({row.conditions})"
        for row in (rows[name] for name in REFERENCES if name in rows)
    ]


def row_of(result: dict[str, Any]) -> Sequence[object]:
    """A line of the table."""
    return (
        f"{result['model']} {result['callers']} × {result['sentences']}",
        result["sentences_per_s"],
        *(f"{result[name].median:.2f}" for name in ("p50_ms", "p99_ms")),
        f"{result['generator_busy'].median:.0%}",
    )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.bench.gpu.sentences",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", default="http://127.0.0.1:8000", help="the gateway's, or a Triton's, on this machine")
    where.add_argument("--up", nargs="+", choices=sorted(NAMES), metavar="FORM", help=", ".join(sorted(NAMES)))
    environment = os.environ.get("PENSTOCK_ENGINE_ENVIRONMENT") or default_environment(Path(sys.prefix))
    parser.add_argument("--engine-environment", type=Path, default=Path(environment), help="of Triton, with --up")
    parser.add_argument("--torch-python", metavar="FILE", help="an interpreter with torch [that of Triton's models]")
    parser.add_argument("--model", nargs="+", default=[], metavar="NAME", help=f"all {PREFIX}* without it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.8, help="of each repetition [0.8; a CPU wants 4]")
    parser.add_argument("--processes", type=int, default=2, help="of the load generator")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, too")
    return parser.parse_args(arguments)


Found = tuple[list[dict[str, Any]], list[dict[str, Any]]]


def run(options: argparse.Namespace) -> Found:
    """(figures, how far the answers agree). Raises BadAnswer."""
    if not options.up:
        return _ask_all(urlsplit(options.url).port or 80, options)
    torch_python = options.torch_python or str(options.engine_environment / "bin" / "python")
    with stack_of(options.up, environment=options.engine_environment, torch_python=torch_python) as port:
        return _ask_all(port, options)


def _ask_all(port: int, options: argparse.Namespace) -> Found:
    models = prepare(port, options.model)
    alike = agreements(port, models)
    with Generators(options.processes) as generators:
        return measure(port, models, generators, options), alike


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when everything was measured."""
    options = parse_arguments(arguments)
    try:
        results, alike = run(options)
    except BadAnswer as error:
        print(f"sentences: {error}", file=sys.stderr)
        return 1
    agreeing = [
        f"{one['model']}: {one['together']:.1%} of the words are the same alone and in batches of {BATCH}, "
        f"{one['with_first']:.1%} the same as {alike[0]['model']}'s"
        for one in alike
    ]
    note = f"{options.rounds} interleaved rounds of {options.seconds:g} s: median (lowest-highest)"
    table = format_table(HEAD, [row_of(result) for result in results])
    present(results, note, "\n".join([table, "", *agreeing, "", *references()]), None)
    if options.json:
        write_json(options.json, results, agreement=alike)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
