"""Profiles a model on this CPU: 8-bit instructions, interleaved speed measurements, fused operators."""

import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnxruntime as ort

from penstock.models.optimize.source import SourceModel, engine_options, open_model

CPUINFO = Path("/proc/cpuinfo")
_KNOWN = {"avx512_vnni": "AVX512-VNNI", "avx_vnni": "AVX-VNNI", "amx_int8": "AMX-INT8", "asimddp": "Arm dot product"}


def int8_instructions(cpuinfo: Path = CPUINFO) -> tuple[str, ...] | None:
    """The CPU's 8-bit instruction sets, or None if the system does not report CPU flags."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), None)
    return None if flags is None else tuple(name for flag, name in _KNOWN.items() if flag in flags)


def cpu_name() -> str:
    """The CPU's model name, or empty if unknown."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


ROUNDS = 5
WARM_UP_RUNS = 3
ROUND_S = 1.0
FEWEST_RUNS = 5

Run = Callable[[], object]
Clock = Callable[[], float]  # seconds, monotonic


@dataclass(frozen=True, slots=True)
class SpeedComparison:
    """Median milliseconds per run in each round; rounds of both models are interleaved."""

    batch_size: int
    float_ms: tuple[float, ...]
    int8_ms: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """Speed of INT8 relative to float, by round."""
        return tuple(one / other for one, other in zip(self.float_ms, self.int8_ms, strict=True))

    @property
    def ratio(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.ratios)


def compare_speed(
    batch_size: int, float_run: Run, int8_run: Run, *, rounds: int = ROUNDS, clock: Clock = time.perf_counter
) -> SpeedComparison:
    """Times both after a warm-up; their runs alternate."""
    for run in (float_run, int8_run):
        for _ in range(WARM_UP_RUNS):
            run()
    found = [_round((float_run, int8_run), clock) for _ in range(rounds)]
    return SpeedComparison(batch_size, tuple(one for one, _ in found), tuple(other for _, other in found))


def _round(runs: tuple[Run, Run], clock: Clock) -> tuple[float, float]:
    """Median milliseconds of each over ROUND_S; the order changes from pair to pair."""
    taken_s: tuple[list[float], list[float]] = ([], [])
    started = clock()
    while len(taken_s[0]) < FEWEST_RUNS or clock() - started < ROUND_S:
        turns = list(zip(runs, taken_s, strict=True))
        for run, into in turns if len(taken_s[0]) % 2 == 0 else reversed(turns):
            before = clock()
            run()
            into.append(clock() - before)
    return statistics.median(taken_s[0]) * 1000, statistics.median(taken_s[1]) * 1000


LEVELS = {
    "basic": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}
FILE = "file"
_BLOCKED = "com.microsoft.nchwc"  # domain of operators in ONNX Runtime's blocked layout
_CONVOLUTIONS = ("Conv", "FusedConv", "QLinearConv", "NhwcFusedConv")
_SUM_INPUT = 3  # input of a fused addition: data, weight, bias, sum


@dataclass(frozen=True, slots=True)
class Operators:
    """Nodes of a graph by operator."""

    level: str  # `file`, or ONNX Runtime's optimisation level
    counts: dict[str, int]
    has_relu: int  # convolutions with a fused ReLU
    has_sum: int  # of those, with a fused addition

    @property
    def total(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain of nodes of the float file, and the fused node that replaces it."""

    before: tuple[str, ...]
    float_after: str
    int8_after: str


@dataclass(frozen=True, slots=True)
class Fusion:
    """Operators of the file and of each optimisation level. engine_level: the engine's."""

    engine_level: str
    float_levels: tuple[Operators, ...]
    int8_levels: tuple[Operators, ...]
    example: Chain | None


def read_fusion(source: SourceModel, int8_file: Path) -> Fusion:
    """Optimises both files at every level, with the engine's other options."""
    level = engine_options(source).graph_optimization_level
    engine_level = next((name for name, known in LEVELS.items() if known == level), "none")
    float_graph = onnx.load(source.path, load_external_data=False).graph
    float_optimised = {name: _optimized_graph(source, source.path, name) for name in LEVELS}
    int8_optimised = {name: _optimized_graph(source, int8_file, name) for name in LEVELS}
    shown = engine_level if engine_level in LEVELS else "basic"
    return Fusion(
        engine_level,
        (_operators(FILE, float_graph), *(_operators(name, graph) for name, graph in float_optimised.items())),
        (
            _operators(FILE, onnx.load(int8_file).graph),
            *(_operators(name, graph) for name, graph in int8_optimised.items()),
        ),
        _example(float_graph, float_optimised[shown], int8_optimised[shown]),
    )


def _optimized_graph(source: SourceModel, file: Path, level: str) -> onnx.GraphProto:
    """The graph that a session of this level runs here."""
    options = engine_options(source)
    options.graph_optimization_level = LEVELS[level]
    with tempfile.TemporaryDirectory(prefix="penstock-optimize.") as folder:
        written = Path(folder) / "optimised.onnx"
        options.optimized_model_filepath = str(written)
        open_model(file, options)
        return onnx.load(written, load_external_data=False).graph  # the source's weights may be in another file


def _operators(level: str, graph: onnx.GraphProto) -> Operators:
    counts = Counter(label(node) for node in graph.node if node.op_type != "Constant")
    convolutions = [node for node in graph.node if node.op_type in _CONVOLUTIONS]
    return Operators(
        level,
        dict(counts.most_common()),
        has_relu=sum("Relu" in _inside(node) for node in convolutions),
        has_sum=sum("Add" in _inside(node) for node in convolutions),
    )


def label(node: onnx.NodeProto) -> str:
    """The operator, with its layout if it is ONNX Runtime's own."""
    return f"{node.op_type} (NCHWc)" if node.domain == _BLOCKED else str(node.op_type)


def _inside(node: onnx.NodeProto) -> tuple[str, ...]:
    """Operators fused into a convolution: Add, activation."""
    activation = next((item.s.decode() for item in node.attribute if item.name == "activation"), "")
    may_add = node.op_type == "FusedConv" or node.domain == _BLOCKED
    has_sum = may_add and len(node.input) > _SUM_INPUT and bool(node.input[_SUM_INPUT])
    return (*(("Add",) if has_sum else ()), *((activation,) if activation else ()))


def _example(before: onnx.GraphProto, float_after: onnx.GraphProto, int8_after: onnx.GraphProto) -> Chain | None:
    """The first convolution with the nodes after it, or None if not found in all graphs."""
    first = next((node for node in before.node if node.op_type == "Conv"), None)
    if first is None:
        return None
    chain = _followed(before, first)
    names = [name for node in chain for name in (node.name, *node.output, *node.input[1:]) if name]
    found = [_node_of(names, graph) for graph in (float_after, int8_after)]
    if found[0] is None or found[1] is None:
        return None
    return Chain(tuple(f"{node.op_type} {node.name}".strip() for node in chain), _text(found[0]), _text(found[1]))


def _followed(graph: onnx.GraphProto, node: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The node, and the BatchNormalization and ReLU that are its only readers."""
    chain = [node]
    while True:
        readers = [reader for reader in graph.node if chain[-1].output[0] in reader.input]
        if len(readers) != 1 or readers[0].op_type not in ("BatchNormalization", "Relu"):
            return chain
        chain.append(readers[0])


def _node_of(names: Sequence[str], graph: onnx.GraphProto) -> onnx.NodeProto | None:
    """The convolution with the longest of these names, because fusions preserve parts of the names."""
    convolutions = [node for node in graph.node if node.op_type in _CONVOLUTIONS]
    best = max(convolutions, key=lambda node: _longest(names, (node.name, *node.input, *node.output)), default=None)
    if best is None or not _longest(names, (best.name, *best.input, *best.output)):
        return None
    return best


def _longest(names: Sequence[str], carriers: Iterable[str]) -> int:
    return max((len(name) for carrier in carriers for name in names if name in carrier), default=0)


def _text(node: onnx.NodeProto) -> str:
    inside = _inside(node)
    return f"{label(node)} {node.name}" + (f" with {' and '.join(inside)} inside" if inside else "")
