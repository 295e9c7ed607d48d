"""OpenNMT's translator as an ONNX file for a CPU: `python -m deploy.models.opennmt` writes it.

The encoder is two LSTM operators that stop at each sentence's own length, the decoder one Loop of 25 rounds, so that
every matrix is in the file, and packed by the runtime, once. The answers are those of opennmt_torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto

from deploy.models.graph import Attribute, Graph, Value
from deploy.models.opennmt_weights import BEGIN, BLANK, GATES, SOURCE, TARGET, UNKNOWN, Cell, FloatArray, Size, Weights

FAR = -1e4  # a score that the softmax makes 0 of
_ONNX_ORDER = (0, 3, 1, 2)  # input, output, forget, candidate
_INT64, _INT32, _BOOL = TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL


@dataclass(frozen=True, slots=True)
class _Memory:
    """What the encoder leaves: keys and values (N, S, H), mask (N, S, 1), of every layer its state (1, N, H) twice."""

    keys: Value
    values: Value
    mask: Value
    states: tuple[Value, ...]


def translator(size: Size, weights: Weights) -> onnx.ModelProto:
    """`source` (N, source_length) int64, padded with 0, → `target` (N, target_length) int64.

    A number that is no word's is `<unk>`; a sentence of blanks is one blank.
    """
    graph = Graph("opennmt")
    source = graph.take(Value(SOURCE, (size.source_length,), _INT64))
    memory = _encode(graph, size, weights, source)
    first = _first(graph, size, source)
    body, carried = _step(size, weights, memory)
    last = [Value(f"{value.name}.last", value.shape, value.datatype, value.batch_axis) for value in carried]
    words = Value("words", (size.target_length,), _INT64, 1)
    rounds = graph.constant("rounds", np.array(size.target_length))
    graph.nodes("Loop", [rounds, "", *first, *memory.states], [*last, words], body=body)
    graph.output(_one(graph, "Transpose", [words], Value(TARGET, (size.target_length,), _INT64), perm=[1, 0]))
    return graph.model()


def _encode(graph: Graph, size: Size, weights: Weights, source: Value) -> _Memory:
    steps, width = size.source_length, size.width
    length = _length(graph, size, source)
    lengths = _one(graph, "Squeeze", [length, _axis(graph, 1)], Value("lengths", (), _INT64))
    limits = _one(graph, "Cast", [lengths], Value("lengths.int32", (), _INT32), to=_INT32)
    words = _one(graph, "Gather", _embedding(graph, size, weights, source), Value("source.words", (steps, width)))
    x = _one(graph, "Transpose", [words], Value("source.steps", (steps, width), batch_axis=1), perm=[1, 0, 2])
    states: list[Value] = []
    for layer, cell in enumerate(weights.encoder):
        name = f"encoder.{layer}"
        outputs = [Value(f"{name}.all", (steps, 1, width), batch_axis=2), *_states(name, width)]
        every, *own = _lstm(graph, cell, [x, limits], outputs)
        x = _one(graph, "Squeeze", [every, _axis(graph, 1)], Value(f"{name}.steps", (steps, width), batch_axis=1))
        states += own
    memory = _one(graph, "Transpose", [x], Value("memory", (steps, width)), perm=[1, 0, 2])
    context = np.split(weights.attention_out, 2, axis=1)[0]
    keys, values = (
        graph.node("MatMul", [memory, graph.constant(f"{name}.weight", matrix)], (steps, width), name=name)
        for name, matrix in (("keys", weights.attention_in), ("values", context.T))
    )
    return _Memory(keys, values, _mask(graph, size, length), tuple(states))


def _embedding(graph: Graph, size: Size, weights: Weights, source: Value) -> list[Value | str]:
    """The table, and the numbers of its rows: what is no word's is `<unk>`'s."""
    zero, end = graph.constant("no.word", np.array(0)), graph.constant("vocabulary", np.array(size.vocabulary))
    shape = source.shape
    known = _one(
        graph,
        "And",
        [
            _one(graph, "GreaterOrEqual", [source, zero], Value("source.from", shape, _BOOL)),
            _one(graph, "Less", [source, end], Value("source.to", shape, _BOOL)),
        ],
        Value("source.known", shape, _BOOL),
    )
    unknown = graph.constant("unknown", np.array(UNKNOWN))
    numbers = _one(graph, "Where", [known, source, unknown], Value("source.numbers", shape, _INT64))
    return [graph.constant("source.table", weights.source_words), numbers]


def _length(graph: Graph, size: Size, source: Value) -> Value:
    """(N, 1): the place of the last word that is no blank, 1 where there is none."""
    places = graph.constant("places", np.arange(1, size.source_length + 1)[None])
    blank, one = graph.constant("blank", np.array(BLANK)), graph.constant("one", np.array(1))
    is_blank = _one(graph, "Equal", [source, blank], Value("source.blank", source.shape, _BOOL))
    words = _one(graph, "Where", [is_blank, one, places], Value("source.places", source.shape, _INT64))
    return _one(graph, "ReduceMax", [words], Value("length", (1,), _INT64), axes=[1], keepdims=1)


def _mask(graph: Graph, size: Size, length: Value) -> Value:
    """(N, S, 1), to be added to scores."""
    shape = (size.source_length,)
    beyond = _one(graph, "Greater", ["places", length], Value("beyond", shape, _BOOL))
    far, near = graph.constant("far", np.array(FAR, np.float32)), graph.constant("near", np.array(0, np.float32))
    flat = graph.node("Where", [beyond, far, near], shape, name="mask.flat")
    return graph.node("Unsqueeze", [flat, _axis(graph, 2)], (*shape, 1), name="mask")


def _first(graph: Graph, size: Size, source: Value) -> list[Value]:
    """What the decoder begins with, a row a sentence: the sign, and attention's answer of zeros."""
    sign, rest = (
        graph.constant("begin", np.array([BEGIN])),
        graph.constant("rest", np.zeros((1, size.width), np.float32)),
    )
    rows = _one(graph, "Shape", [source], Value("rows", (1,), _INT64, None), end=1)
    shape = _one(graph, "Concat", [rows, _axis(graph, 1)], Value("rows.one", (2,), _INT64, None), axis=0)
    return [
        _one(graph, "Expand", [sign, rows], Value("word.first", (), _INT64)),
        graph.node("Expand", [rest, shape], (size.width,), name="fed.first"),
    ]


def _step(size: Size, weights: Weights, memory: _Memory) -> tuple[onnx.GraphProto, list[Value]]:
    """The loop's body, and what goes from round to round: the word, attention's answer, every layer's state."""
    body, width = Graph("step"), size.width
    body.take(Value("round", (), _INT64, None))
    goes_on = body.take(Value("goes_on", (), _BOOL, None))
    word, fed = body.take(Value("word", (), _INT64)), body.take(Value("fed", (width,)))
    before = [body.take(value) for layer in range(size.layers) for value in _states(f"before.{layer}", width)]
    words = body.constant("target.table", weights.target_words)
    written = body.node("Gather", [words, word], (width,), name="target.words")
    below = body.concat([written, fed], name="below")
    x = _one(body, "Unsqueeze", [below, _axis(body, 0)], Value("below.step", (1, 2 * width), batch_axis=1))
    after: list[Value] = []
    for layer, cell in enumerate(weights.decoder):
        outputs = [Value("", ()), *_states(f"decoder.{layer}", width)]
        _, *own = _lstm(body, cell, [x, "", *before[2 * layer : 2 * layer + 2]], outputs)
        x = own[0]
        after += own
    answer = _attend(body, size, weights, memory, x)
    scores = body.gemm(answer, weights.generator, weights.generator_bias, name="scores")
    chosen = _one(body, "ArgMax", [scores], Value("chosen", (), _INT64), axis=1, keepdims=0)
    carried = [chosen, answer, *after]
    body.output(_one(body, "Identity", [goes_on], Value("goes_on.still", (), _BOOL, None)))
    for value in carried:
        body.output(value)
    body.output(_one(body, "Identity", [chosen], Value("written", (), _INT64)))
    return body.graph(), carried


def _attend(body: Graph, size: Size, weights: Weights, memory: _Memory, top: Value) -> Value:
    """tanh(context + own), (N, H). top: (1, N, H). The memory is the outer graph's."""
    steps, width = size.source_length, size.width
    state = body.node("Squeeze", [top, _axis(body, 0)], (width,), name="state")
    column = body.node("Unsqueeze", [state, _axis(body, 2)], (width, 1), name="state.column")
    score = body.node("MatMul", [memory.keys, column], (steps, 1), name="score")
    shares = body.softmax(body.add(score, memory.mask, name="score.masked"), name="shares")
    row = body.node("Transpose", [shares], (1, steps), name="shares.row", perm=[0, 2, 1])
    context = body.node("MatMul", [row, memory.values], (1, width), name="context.row")
    context = body.node("Squeeze", [context, _axis(body, 1)], (width,), name="context")
    matrix = body.constant("own.weight", np.split(weights.attention_out, 2, axis=1)[1])
    both = body.node("Gemm", [state, matrix, context], (width,), name="answer.both", transB=1)
    return body.node("Tanh", [both], (width,), name="answer")


def _lstm(graph: Graph, cell: Cell, operands: Sequence[Value | str], outputs: Sequence[Value]) -> Sequence[Value]:
    """operands: steps (T, N, in), lengths, first states. outputs: all states (T, 1, N, H), the last two (1, N, H)."""
    name, width = outputs[-1].name, cell.state.shape[1]
    bias = np.concatenate([_ordered(cell.input_bias), _ordered(cell.state_bias)])
    matrices = [
        graph.constant(f"{name}.{part}", array[None])
        for part, array in (("input", _ordered(cell.input)), ("state", _ordered(cell.state)), ("bias", bias))
    ]
    return graph.nodes("LSTM", [operands[0], *matrices, *operands[1:]], outputs, hidden_size=width)


def _ordered(array: FloatArray) -> FloatArray:
    """Gates as ONNX wants them."""
    gates = np.split(array, GATES)
    return np.concatenate([gates[gate] for gate in _ONNX_ORDER])


def _states(name: str, width: int) -> list[Value]:
    return [Value(f"{name}.{part}", (1, width), batch_axis=1) for part in ("state", "memory")]


def _axis(graph: Graph, axis: int) -> str:
    """The name of a constant [axis]."""
    name = f"{graph.name}.axis.{axis}"
    return name if graph.has_constant(name) else graph.constant(name, np.array([axis]))


def _one(graph: Graph, op_type: str, operands: Sequence[Value | str], output: Value, **attributes: Attribute) -> Value:
    return graph.nodes(op_type, operands, [output], **attributes)[0]
