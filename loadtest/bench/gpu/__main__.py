"""One H200 (or what is here), measured in one command: the chart of MPS and batching, served against raw, JPEG, faults.

    python -m loadtest.bench.gpu --json gpu.json                  # all of it: about eight minutes
    python -m loadtest.bench.gpu --only chart --clients 1 8 --seconds 1 --rounds 1
    python -m loadtest.bench.gpu.report gpu.json                  # report.md and plots beside it, on any machine

Every part starts what it asks and ends it: Tritons of its own, MPS daemons, `penstock up`. Each lap comes once a round,
in an order drawn anew. The file is written after every round, so that a run that is cut still tells what it had.
--no-gpu runs the same on a CPU, without MPS, with any model of one input (--source): for trying the bench itself.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from loadtest.bench.gpu.chart import ChartPlan, measure_chart
from loadtest.bench.gpu.generators import Generators
from loadtest.bench.gpu.laps import Ledger
from loadtest.bench.gpu.options import parse_arguments
from loadtest.bench.gpu.served import EnginePlan, measure_engine
from loadtest.bench.gpu.stretch import Bench, Plan
from loadtest.bench.report import conditions
from loadtest.bench.wire import BadAnswer
from loadtest.hardware import describe, read_machine
from server.backends.triton_runtime import TritonUnavailable, default_environment, find_triton
from server.gpu.telemetry import NoTelemetry, Sampler

NO_GPU = 2


def run(options: argparse.Namespace, stack: ExitStack) -> int:
    """0 when every part was measured; else 1, and what could be stands in the file."""
    bench = _bench(options, stack)
    failures: list[str] = []
    for name, part in _parts(options, bench).items():
        began_s = time.monotonic()
        try:
            part()
        except (BadAnswer, OSError, subprocess.SubprocessError) as error:
            failures.append(f"{name}: {error}")
            print(f"gpu: {failures[-1]}", file=sys.stderr, flush=True)
        bench.ledger.facts[f"{name} took s"] = round(time.monotonic() - began_s, 1)
        bench.ledger.facts["failures"] = failures
        bench.save()
        print(f"gpu: {name} done after {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
    return 1 if failures else 0


def _parts(options: argparse.Namespace, bench: Bench) -> dict[str, Callable[[], None]]:
    """What is to be done, in order. raw and served are measured side by side."""
    engine = tuple(part for part in ("raw", "served") if part in options.only)
    source = _source(options, bench.plan)
    found: dict[str, Callable[[], None]] = {}
    if "chart" in options.only:
        chart = ChartPlan(tuple(options.clients), options.instances)
        found["chart"] = lambda: measure_chart(bench, chart, source)
    if engine:
        raw = EnginePlan(tuple(options.processes), tuple(options.batch), engine)
        found[" and ".join(engine)] = lambda: measure_engine(bench, raw, source)
    return found


def _source(options: argparse.Namespace, plan: Plan) -> Path:
    """The folder of the model that everything is measured with, exported where none is given. Raises BadAnswer."""
    if options.source:
        return Path(options.source).resolve()
    return export(plan, *(("--input", "uint8") if options.input == "uint8" else ()))


def export(plan: Plan, *arguments: str) -> Path:
    """A model of deploy.models.resnet50_torch in the plan's home. Raises BadAnswer."""
    command = [plan.torch_python, "-m", "deploy.models.resnet50_torch", "--home", str(plan.home), *arguments]
    before = set((plan.home / "models").glob("*"))
    done = subprocess.run(command, capture_output=True, text=True)
    made = set((plan.home / "models").glob("*")) - before
    if done.returncode or len(made) != 1:
        raise BadAnswer(f"{' '.join(command[1:])} made no model: {done.stderr[-500:]}")
    return made.pop()


def _bench(options: argparse.Namespace, stack: ExitStack) -> Bench:
    work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-gpu-")))
    work.mkdir(parents=True, exist_ok=True)
    environment = options.engine_environment or default_environment(Path(sys.prefix))
    machine = read_machine()
    plan = Plan(
        work=work,
        home=work / "home",
        runtime=find_triton(environment=environment),
        torch_python=options.torch_python,
        is_gpu=options.is_gpu,
        rounds=options.rounds,
        seconds=options.seconds,
        settle_s=options.settle,
        load_s=options.load_seconds,
        seed=options.seed,
    )
    told = conditions() | {"machine": describe(machine), "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())}
    ledger = Ledger(options.json, told, "resnet50-torch-random")
    sampler = stack.enter_context(Sampler()) if options.is_gpu else None
    return Bench(plan, ledger, stack.enter_context(Generators(options.generators)), sampler)


def main() -> int:
    """0 when everything was measured, 1 when something was not, 2 without a GPU."""
    options = parse_arguments(__doc__)
    try:
        with ExitStack() as stack:
            return run(options, stack)
    except NoTelemetry as error:
        print(f"gpu: no GPU to measure ({error}); --no-gpu tries the bench on the CPU", file=sys.stderr)
        return NO_GPU
    except (BadAnswer, TritonUnavailable) as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("gpu: stopped; what was measured is in the file, and nothing is left running", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
