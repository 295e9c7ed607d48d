"""The torch backend's own parts on a card, in under a minute: `python -m loadtest.bench.gpu.engine`, with torch.

Three tables. Fused: the program as it was exported (`fuse` 0) and as the backend fuses it, its time to load and
images/s of CUDA graphs whose input is on the card. Copies: fused, with the input in the card's memory, in page-locked
shared memory, and in pageable memory. Served: one Triton, one model of one instance and one of four, batches of the
largest bucket from the system's and from the card's shared memory, to be read against the table of copies. The bench
proper, in rounds and under MPS, is `python -m loadtest.bench.gpu`.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import torch
from google.protobuf import json_format

from deploy.models.resnet50_torch import NAMES, Form, write
from loadtest.bench.gpu.closed import Lane
from loadtest.bench.gpu.folders import Variant, write_variant
from loadtest.bench.gpu.generators import Generators
from loadtest.bench.gpu.regions import CudaRegions, SystemRegions
from loadtest.bench.gpu.requests import face_of, read_config, tensor_request
from loadtest.bench.gpu.stretch import check_answers, figures_of
from loadtest.bench.gpu.tritons import BenchTriton
from loadtest.bench.wire import BadAnswer
from server.backends.torch_serving.config import EngineSpec, engine_spec
from server.backends.torch_serving.device import pinned_regions
from server.backends.torch_serving.dtypes import WIRE_TYPES
from server.backends.torch_serving.program import load_program
from server.backends.torch_serving.runners import GraphRunner
from server.backends.triton_runtime import find_triton

CALLERS = 2
LOAD_S = 60.0
NO_GPU = 2


def main() -> None:
    """The command line. Exits with 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", choices=("fp32", "uint8"), default="fp32")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64], metavar="N", help="buckets [1 8 64]")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each figure [0.5]")
    parser.add_argument("--instances", type=int, nargs="*", default=[1, 4], help="served; none: not served [1 4]")
    parser.add_argument("--engine-environment", type=Path, metavar="DIR", help="of Triton, as penstock up takes it")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("there is no GPU that PyTorch sees: this bench measures one\n")
        raise SystemExit(NO_GPU)
    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        form = Form(given.input, NAMES[given.input], max_batch_size=max(given.batch))
        source = write(form, Path(folder))
        compare_fused(source, given)
        compare_copies(source, given)
        if given.instances:
            serve(source, Path(folder), given)


def compare_fused(source: Path, given: argparse.Namespace) -> None:
    """The table of the program without and with what fusing does."""
    print(f"{'fuse':8} {'load s':>7} " + "".join(f"{f'batch {n}':>10}" for n in given.batch))
    for fuse in ("0", "1"):
        began_s = time.monotonic()
        with runner_of(source, given, fuse) as (runner, spec, told):
            load_s = time.monotonic() - began_s
            sample = sample_of(spec, max(given.batch)).cuda()
            found = [rate(runner, sample[:rows], given.seconds) for rows in given.batch]
        print(f"{fuse:8} {load_s:7.1f} " + "".join(f"{one:10,.0f}" for one in found) + f"  {told}")


def compare_copies(source: Path, given: argparse.Namespace) -> None:
    """The table of copies."""
    print(f"\n{'input in':24}" + "".join(f"{f'batch {n}':>10}" for n in given.batch))
    with runner_of(source, given, "1") as (runner, spec, _):
        sample = sample_of(spec, max(given.batch))
        with shared(sample) as in_shared_memory:
            places = {"the card's memory": sample.cuda(), "page-locked, shared": in_shared_memory}
            for name, tensor in places.items():
                figures = [rate(runner, tensor[:rows], given.seconds) for rows in given.batch]
                print(f"{name:24}" + "".join(f"{one:10,.0f}" for one in figures))
        figures = [rate(runner, sample[:rows], given.seconds) for rows in given.batch]
        print(f"{'pageable':24}" + "".join(f"{one:10,.0f}" for one in figures))


def serve(source: Path, work: Path, given: argparse.Namespace) -> None:
    """The table of what is served."""
    rows, face = max(given.batch), face_of(read_config(source))
    runtime = find_triton(environment=given.engine_environment)
    names = {f"of-{count}": count for count in given.instances}
    print(f"\n{'instances':>9} {'memory':>8} {'images/s':>10} {'p50 ms':>8} {'p99 ms':>8}   batches of {rows}")
    with ExitStack() as stack:
        for name, count in names.items():
            write_variant(source, work / "served", Variant(name, count, rows, buckets=tuple(given.batch)), is_gpu=True)
        triton = stack.enter_context(BenchTriton(runtime, work / "served", work / "triton"))
        triton.wait(list(names), time.monotonic() + LOAD_S)
        generators = stack.enter_context(Generators(2))
        callers = CALLERS * max(given.instances)
        system = stack.enter_context(SystemRegions(face, callers, rows))
        system.register(triton.port)
        regions = {"system": system.regions}
        try:
            cuda = stack.enter_context(CudaRegions(face, callers, rows))
            cuda.register(triton.port)
            regions["cuda"] = cuda.regions
        except BadAnswer as error:
            print(f"no CUDA shared memory: {error}")
        for name, count in names.items():
            for memory, places in regions.items():
                asked = [Lane(name, triton.port, tensor_request(name, face, one, rows), rows) for one in places]
                lanes = asked[: CALLERS * count]
                if memory == "system":
                    check_answers(lanes, system)
                lap = generators.closed(lanes, settle_s=0.5, seconds=max(1.0, given.seconds))()
                told = figures_of(lap, lanes)
                print(f"{count:9} {memory:>8} {told['rate']:10,.0f} {told['p50_ms']:8.1f} {told['p99_ms']:8.1f}")
        ready = [line for line in triton.log.read_text().splitlines() if "torch backend ready" in line]
        print("\n".join(["", *(line.partition("torch backend ready")[2] for line in ready[:1])]))


@contextmanager
def runner_of(source: Path, given: argparse.Namespace, fuse: str) -> Iterator[tuple[GraphRunner, EngineSpec, str]]:
    """(the program in graphs, its spec, how it was fused and what memory it took), as the backend makes it."""
    config: dict[str, Any] = json_format.MessageToDict(read_config(source), preserving_proto_field_name=True)
    words = {"fuse": fuse, "batch-buckets": ";".join(map(str, given.batch))}
    config["parameters"] = config["parameters"] | {key: {"string_value": value} for key, value in words.items()}
    spec = engine_spec(json.loads(json.dumps(config)), is_gpu=True)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    loaded = load_program(source / "1" / "model.pt2", spec, torch.device("cuda", 0))
    runner = GraphRunner(loaded.program, spec, torch.device("cuda", 0), pinned=pinned_regions(), slots=2)
    taken = (before - torch.cuda.mem_get_info()[0]) >> 20
    yield runner, spec, " ".join((loaded.fused, f"{taken} MiB", loaded.note))
    torch.cuda.synchronize()
    torch.cuda.set_stream(torch.cuda.default_stream())


def sample_of(spec: EngineSpec, rows: int) -> Any:
    """Noise for so many rows, as it travels, in the host's memory."""
    dtype = WIRE_TYPES[spec.inputs[0].data_type]
    shape = (rows, *spec.inputs[0].dims)
    return torch.rand(shape) if dtype.is_floating_point else torch.randint(0, 255, shape, dtype=dtype)


@contextmanager
def shared(sample: Any) -> Iterator[Any]:
    """The same numbers in shared memory, as Triton's Python backend hands them over."""
    size = sample.numel() * sample.element_size()
    region = SharedMemory(create=True, size=size)
    try:
        tensor = torch.frombuffer(region.buf, dtype=sample.dtype).reshape(sample.shape)
        tensor.copy_(sample)
        yield tensor
        del tensor
    finally:
        region.unlink()


def rate(runner: GraphRunner, rows: Any, seconds: float) -> float:
    """Images a second, two batches in flight."""
    begin: Callable[[], Any] = lambda: runner.begin([[rows]], len(rows))  # noqa: E731
    begin().outputs()
    count, began_s = 0, time.monotonic()
    pending = begin()
    while time.monotonic() - began_s < seconds:
        following = begin()
        pending.outputs()
        pending = following
        count += len(rows)
    pending.outputs()
    return (count + len(rows)) / (time.monotonic() - began_s)


if __name__ == "__main__":
    main()
