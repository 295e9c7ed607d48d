"""One GPU measured in one command: MPS and batching, Triton compared with raw execution, JPEG over HTTP."""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from loadtest.bench.gpu.chart import (
    BATCHED,
    CALLERS,
    FORMS,
    MODES,
    ChartPlan,
    EnginePlan,
    measure_charts,
    measure_engine,
)
from loadtest.bench.gpu.figures import RAW_AND_SERVED, PointLedger
from loadtest.bench.gpu.generators import Generators
from loadtest.bench.gpu.jpeg import JpegPlan, measure_jpeg
from loadtest.bench.gpu.programs import Export, export_all, python_with_torch, torch_version
from loadtest.bench.gpu.stretch import GpuBench, Plan
from loadtest.bench.gpu.tritons import Variant, write_variant
from loadtest.bench.report import chosen_of, conditions
from loadtest.bench.wire import BadAnswer
from penstock.engines.triton.runtime import TritonUnavailable, default_environment, find_triton
from penstock.gpu.mps.planner import MERGED_PROCESSES
from penstock.gpu.nvml import read_cards
from penstock.gpu.telemetry.sampler import Sampler, TelemetryUnavailable

CHARTS = {"chart": (), "plain-chart": (("fuse", "0"),)}  # with cuDNN's fused calls, and without
MEMORIES = ("cuda", "system")
DECODERS = ("engine", "engine-core", "gateway")
PARTS = (*CHARTS, "raw", "served", "jpeg")
_FORMS_HELP = f"of raw's and served's program: {', '.join(FORMS)} [fused]"
CLIENTS = (1, 2, 4, 8, 16, 32, 47)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options. Exits with a sentence if they make no sense."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.gpu", description=__doc__)
    add = parser.add_argument
    add("--only", type=chosen_of(PARTS), default=PARTS, metavar="PART,…", help=", ".join(PARTS))
    add("--json", type=Path, default=Path("gpu.json"), metavar="FILE", help="the figures [gpu.json]")
    add("--add", action="store_true", help="keep the file's parts that are not measured now")
    add("--rounds", type=int, default=3)
    add("--seconds", type=float, default=1.2, help="of each run [1.2]")
    add("--settle", type=float, default=0.2, help="seconds before each run that are left out [0.2]")
    add("--load-seconds", type=float, default=150.0, help="that models may take to load [150]")
    add("--clients", type=int, nargs="+", default=list(CLIENTS), metavar="N", help="of the charts")
    every = tuple(MODES)
    add("--modes", type=chosen_of(every), default=every, metavar="MODE,…", help=f"chart: {', '.join(every)} [all]")
    add("--plain-modes", type=chosen_of(every), default=every, metavar="MODE,…", help="modes of plain-chart [all]")
    add("--threads", type=int, default=0, metavar="PERCENT", help="of a limited client [0: the planner's]")
    add("--instances", type=int, default=MERGED_PROCESSES, metavar="N", help="of chart's batched model [%(default)s]")
    add("--batch-limit", type=int, default=64, metavar="N", help="rows of chart's batched model [64]")
    add("--delay-us", type=int, default=0, metavar="US", help="queue delay of chart's batched model [0]")
    add("--input", choices=("fp32", "uint8"), default="fp32", help="type of the model's input [fp32]")
    add("--processes", type=int, nargs="+", default=[4, 8], metavar="N", help="for raw and served [4 8]")
    add("--batch", type=int, nargs="+", default=[64, 128], metavar="N", help="batch sizes of raw and served [64 128]")
    add("--forms", type=chosen_of(tuple(FORMS)), default=("fused",), metavar="FORM,…", help=_FORMS_HELP)
    add("--memory", type=chosen_of(MEMORIES), default=MEMORIES, metavar="KIND,…", help="for their inputs [cuda,system]")
    add("--in-flight", type=int, choices=(1, 2, 3, 4), default=1, help="batches in flight of raw and served [1]")
    add("--callers", type=int, nargs="+", default=[CALLERS], metavar="N", help="callers of each process of served [2]")
    add("--slo-ms", type=float, default=15.0, help="bound of jpeg's p99 [15]")
    add("--jpeg-callers", type=int, default=192, metavar="N", help="callers of jpeg's closed loop [192]")
    add("--jpeg-instances", type=int, default=4, metavar="N", help="instances of jpeg's models [4]")
    who = "engine (batches by Triton), engine-core (by the core), gateway [all]"
    add("--jpeg-decoders", type=chosen_of(DECODERS), default=DECODERS, metavar="WHO,…", help=who)
    add("--up-flags", type=shlex.split, default=(), metavar="'FLAGS'", help="more, of jpeg's penstock up")
    add("--jpeg-seconds", type=float, default=2.5, help="of each rate tried [2.5]")
    add("--seed", type=int, default=1, help="of the order and the arrivals [1]")
    add("--source", type=Path, metavar="DIR", help="a model's folder instead of the exported ResNet-50")
    add("--no-gpu", dest="is_gpu", action="store_false", help="a miniature on the CPU, without MPS")
    environment = os.environ.get("PENSTOCK_ENGINE_ENVIRONMENT") or default_environment(Path(sys.prefix))
    add("--engine-environment", type=Path, default=Path(environment), metavar="DIR", help="of Triton and its models")
    add("--torch-python", metavar="FILE", help="an interpreter with torch [this one, else that of Triton's models]")
    add("--generators", type=int, default=4, metavar="N", help="processes that make the load [4]")
    add("--work", type=Path, metavar="DIR", help="for models, sockets and logs; kept [a temporary one]")
    chosen = parser.parse_args(arguments)
    if chosen.rounds < 1 or chosen.seconds <= 0 or min(chosen.clients) < 1 or max(chosen.clients) > max(CLIENTS):
        parser.error(f"--rounds and --seconds are above 0, --clients from 1 to {max(CLIENTS)}")
    counts = (chosen.instances, chosen.batch_limit, chosen.jpeg_instances, chosen.jpeg_callers, chosen.generators)
    if (
        min(*counts, *chosen.processes, *chosen.batch, *chosen.callers) < 1
        or not 0 <= chosen.threads <= 100
        or min(chosen.settle, chosen.delay_us) < 0
    ):
        parser.error(
            "--threads is up to 100, --settle and --delay-us not below 0, every number of instances, … above 0"
        )
    return chosen


NO_GPU = 2
MODELS = {"fp32": "resnet50-torch-random", "uint8": "resnet50-torch-uint8-random"}


def run(options: argparse.Namespace, stack: ExitStack) -> int:
    """0 when every part was measured; else 1, and what could be stands in the file."""
    bench = _bench(options, stack)
    failures = bench.ledger.failures
    for name, part in _parts(options, bench).items():
        began_s = time.monotonic()
        if why := _why_not_done(part):
            failures.append(f"{name}: {why}")
            print(f"gpu: {failures[-1]}", file=sys.stderr, flush=True)
        bench.ledger.facts[f"{name} took s"] = round(time.monotonic() - began_s, 1)
        bench.save()
        print(f"gpu: {name} done after {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    return 1 if failures else 0


def _why_not_done(part: Callable[[], None]) -> str:
    """Does the part; empty where all of it was measured."""
    try:
        part()
    except (BadAnswer, OSError, subprocess.SubprocessError) as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  the root of a part: the card is lent for minutes, the other parts go on
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return ""


def _parts(options: argparse.Namespace, bench: GpuBench) -> dict[str, Callable[[], None]]:
    """What is to be done, in order. raw and served are measured side by side. Raises BadAnswer."""
    plan, engine = bench.plan, tuple(part for part in ("raw", "served") if part in options.only)
    own, pictures = _exports(options, plan)
    source = options.source.resolve() if options.source else own.folder
    if not options.source:
        needs_own = set(options.only) - {"jpeg"}
        wanted = [*([own] if needs_own else []), *(pictures.values() if "jpeg" in options.only else ())]
        bench.tell("models are exported", lambda: export_all(wanted, plan.torch_python))
    found: dict[str, Callable[[], None]] = {}
    form = {"max_batch_size": options.batch_limit, "delay_us": options.delay_us}
    batched = Variant(BATCHED, options.instances, has_dynamic_batching=True, **form)
    modes = {"chart": options.modes, "plain-chart": options.plain_modes}
    charts = [
        ChartPlan(name, options.clients, batched, [MODES[mode] for mode in modes[name]], options.threads, parameters)
        for name, parameters in CHARTS.items()
        if name in options.only
    ]
    if charts:
        found[charts[0].part] = partial(measure_charts, bench, charts, source)
    if engine:
        counts = tuple(options.processes), tuple(options.batch)
        ways = options.forms, options.memory, options.in_flight, tuple(options.callers)
        raw = EnginePlan(*counts, engine, *ways)
        found[RAW_AND_SERVED] = lambda: measure_engine(bench, raw, source)
    if "jpeg" in options.only:
        found["jpeg"] = lambda: measure_jpeg(bench, _jpeg_plan(options, plan, pictures))
    return found


def _exports(options: argparse.Namespace, plan: Plan) -> tuple[Export, dict[str, Export]]:
    """(what all but jpeg measures, jpeg's by who decodes)."""
    home = plan.work / "jpeg"
    instances = ("--instances", str(options.jpeg_instances), "--max-batch", "64")
    core, triton = (*instances, "--batching", "gateway"), (*instances, "--batching", "triton")
    pictures = {
        "engine": Export(home, "resnet50-jpeg-random", ("--pictures", *triton)),
        "engine-core": Export(home, "resnet50-jpeg-core-random", ("--pictures", *core)),
        "gateway": Export(home, "resnet50-decoded-random", ("--input", "uint8", *core)),
    }
    chosen = {who: pictures[who] for who in options.jpeg_decoders}
    return Export(plan.work / "home", MODELS[options.input], ("--input", options.input)), chosen


def _jpeg_plan(options: argparse.Namespace, plan: Plan, pictures: Mapping[str, Export]) -> JpegPlan:
    """Two models from the same weights; with --source the given one, whose pictures the gateway decodes."""
    home = plan.work / "jpeg"
    models = {way: export.name for way, export in pictures.items()}
    if options.source:
        models = {"gateway": "given"}
        write_variant(options.source.resolve(), home / "models", Variant("given"), is_gpu=plan.is_gpu)
    return JpegPlan(
        home=home,
        environment=options.engine_environment,
        models=models,
        flags=(*(("--mps", "on") if plan.is_gpu else ()), *options.up_flags),
        slo_ms=options.slo_ms,
        seconds=options.jpeg_seconds,
        callers=options.jpeg_callers,
    )


def _bench(options: argparse.Namespace, stack: ExitStack) -> GpuBench:
    work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-gpu-")))
    work.mkdir(parents=True, exist_ok=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    torch_python = options.torch_python or python_with_torch(options.engine_environment)
    plan = Plan(
        work=work,
        runtime=find_triton(environment=options.engine_environment),
        torch_python=torch_python,
        is_gpu=options.is_gpu,
        rounds=options.rounds,
        seconds=options.seconds,
        settle_s=options.settle,
        load_s=options.load_seconds,
        seed=options.seed,
    )
    facts = conditions()
    reading = read_cards()
    driver = f"driver {reading.driver}" if reading.cards else "no driver"
    facts["gpu versions"] = f"{driver}, {torch_version(torch_python)}, Triton 2.51"
    facts["slo_p99_ms"] = f"{options.slo_ms:g}"
    model = options.source.name if options.source else MODELS[options.input]
    ledger = PointLedger(options.json, facts, model)
    if options.add and options.json.exists():
        ledger.take_over()
    sampler = stack.enter_context(Sampler()) if options.is_gpu else None
    return GpuBench(plan, ledger, stack.enter_context(Generators(options.generators)), sampler)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when everything was measured, 1 when something was not, 2 without a GPU."""
    options = parse_arguments(arguments)
    try:
        with ExitStack() as stack:
            return run(options, stack)
    except TelemetryUnavailable as error:
        print(f"gpu: no GPU to measure ({error}); --no-gpu tries the bench on the CPU", file=sys.stderr)
        return NO_GPU
    except (BadAnswer, TritonUnavailable) as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("gpu: stopped; what was measured is in the file, and nothing is left running", file=sys.stderr)
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended then, too
    raise SystemExit(main())
