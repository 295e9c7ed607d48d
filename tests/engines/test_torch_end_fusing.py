"""What follows convolutions, fused: each pattern answers as before, on the CPU, by the operators of PyTorch."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is in none of the project's environments: `make gpu` adds it")

from torch.nn import functional  # noqa: E402  after the skip

from penstock.engines.torch_serving import compiling, program, trial  # noqa: E402
from penstock.engines.torch_serving.config import EngineSpec, engine_spec  # noqa: E402
from penstock.engines.torch_serving.end_fusing import end_convolutions, fuse_for_gpu  # noqa: E402
from penstock.engines.torch_serving.ending import end_convolution  # noqa: E402
from penstock.engines.torch_serving.fusing import fold_normalisation  # noqa: E402
from penstock.engines.torch_serving.program import prepared_module, read_program  # noqa: E402
from penstock.engines.torch_serving.trial import fused_where_right, reference_answers  # noqa: E402
from tests.engines.test_torch_serving import CPU, config, cudnn_on_cpu  # noqa: E402
from tests.engines.torch_programs import SmallDetector, images, save, small_resnet  # noqa: E402

Body = Callable[["Layers", Any], Any]


class Layers(torch.nn.Module):  # type: ignore[misc]
    """Convolutions of several kinds for a body of any pattern. head makes 16 channels of the image."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        convolution = torch.nn.Conv2d
        self.head, self.norm = convolution(3, 16, 3, padding=1, bias=False), torch.nn.BatchNorm2d(16)
        self.one, self.three = convolution(16, 16, 1), convolution(16, 16, 3, padding=1)
        self.deep, self.grouped = (
            convolution(16, 16, 5, padding="same", groups=16),
            convolution(16, 16, 3, 1, 1, groups=4),
        )
        self.up, self.plain = torch.nn.ConvTranspose2d(16, 16, 2, 2), convolution(16, 16, 1, bias=False)
        torch.nn.init.uniform_(self.norm.running_mean, -0.2, 0.2)
        torch.nn.init.uniform_(self.norm.running_var, 0.5, 1.5)
        self.body = body

    def forward(self, image: Any) -> Any:
        return self.body(self, image)


def fused(tmp_path: Path, body: Body) -> tuple[Any, int, list[str]]:
    """(module, replacements, names of its operators), checked against the program as it was exported."""
    network = Layers(body).eval()
    save(network, images(2), tmp_path / "model.pt2")
    module = read_program(tmp_path / "model.pt2").module(check_guards=False)
    fold_normalisation(module)
    count = fuse_for_gpu(module)
    with torch.no_grad(), cudnn_on_cpu(1.0):
        for rows in (1, 3):
            torch.testing.assert_close(module(images(rows)), network(images(rows)), rtol=1e-4, atol=1e-5)
    names = [getattr(node.target, "__name__", str(node.target)) for node in module.graph.nodes]
    return module, count, [name.partition(".")[0] for name, node in zip(names, module.graph.nodes, strict=True)
                           if node.op == "call_function"]  # fmt: skip


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "relu6": functional.relu6,
    "clip": lambda x: x.clamp(-0.1, 0.2),
    "leaky": lambda x: functional.leaky_relu(x, 0.1, inplace=True),
    "silu": functional.silu,
    "silu of ONNX": lambda x: x * x.sigmoid(),
    "hardswish": functional.hardswish,
    "hardswish of ONNX": lambda x: functional.hardsigmoid(x) * x,
    "sigmoid": torch.sigmoid,
    "mish": functional.mish,
    "gelu": functional.gelu,
    "hardsigmoid": functional.hardsigmoid,
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_after_a_convolution_is_one_call(tmp_path: Path, name: str) -> None:
    """With its bias, which is that of the folded normalisation."""
    _, count, names = fused(tmp_path, lambda net, image: ACTIVATIONS[name](net.norm(net.head(image))))
    assert (count, names) == (1, ["conv2d", "end_convolution"])


def of_head(body: Body) -> Body:
    """The body of 16 channels, of which another branch reads, too."""
    return lambda net, image: body(net, functional.silu(net.head(image)))


PATTERNS: dict[str, tuple[Body, list[str]]] = {
    "depthwise, ReLU": (lambda net, x: torch.relu(net.deep(x)), ["conv2d", "end_convolution"]),
    "grouped, ReLU": (lambda net, x: torch.relu(net.grouped(x)), ["conv2d", "end_convolution"]),
    "ReLU by cuDNN": (lambda net, x: torch.relu(net.three(x)), ["cudnn_convolution_relu"]),
    "sum, ReLU by cuDNN": (lambda net, x: torch.relu(x + net.three(x)), ["cudnn_convolution_add_relu"]),
    "bias alone": (lambda net, x: net.one(x), ["conv2d", "end_convolution"]),
    "neither bias nor activation": (lambda net, x: net.plain(x), ["conv2d"]),
    "sum without activation": (lambda net, x: x + net.one(x), ["conv2d", "end_convolution"]),
    "sum before": (lambda net, x: functional.silu(net.three(x) + x), ["conv2d", "end_convolution"]),
    "sum after": (lambda net, x: x + functional.silu(net.three(x)), ["conv2d", "end_convolution"]),
    "sum in place": (lambda net, x: functional.hardswish(net.one(x)).add_(x), ["conv2d", "end_convolution"]),
    "sum of two": (
        lambda net, x: functional.silu(net.one(x) + net.three(x)),
        ["conv2d", "conv2d", "end_convolution", "end_convolution"],
    ),
    "transposed": (lambda net, x: functional.silu(net.up(x)), ["conv_transpose2d", "end_convolution"]),
    "sum with one value a channel": (
        lambda net, x: net.one(x) + x.mean((2, 3), keepdim=True),
        ["conv2d", "end_convolution", "mean", "add"],
    ),
    "read twice": (
        lambda net, x: (lambda y: functional.silu(y) + y.mean((2, 3), keepdim=True))(net.one(x)),
        ["conv2d", "end_convolution", "silu", "mean", "add"],
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern_is_fused_and_answers_as_before(tmp_path: Path, name: str) -> None:
    """cuDNN's call where there is one; what other branches read too is computed on its own."""
    body, expected = PATTERNS[name]
    _, _, names = fused(tmp_path, of_head(body))
    assert sorted(names) == sorted(["conv2d", "end_convolution", *expected])


def test_parts_of_a_concatenation_are_written_into_it(tmp_path: Path) -> None:
    """By their convolutions; other parts, one that is read elsewhere and one that stands twice are copied."""

    def body(net: Layers, x: Any) -> Any:
        own, read = functional.silu(net.one(x)), functional.silu(net.three(x))
        pooled = functional.max_pool2d(read, 3, 1, 1)
        doubled = functional.interpolate(functional.max_pool2d(x, 2), scale_factor=2.0)
        return torch.cat([own, read, pooled, doubled, x[:, :5], pooled], 1)

    module, _, names = fused(tmp_path, of_head(body))
    assert "cat" not in names
    ends = [node for node in module.graph.nodes if node.target is end_convolution]
    into = [node for node in ends if len(node.args) == 6]
    assert [node.args[5][1] for node in into] == [0, 16, 32, 48, 64, 69]
    assert sum(node.args[1] is not None for node in into) == 1


def test_concatenation_without_such_parts_stays(tmp_path: Path) -> None:
    """As does one along another axis, or of a part that only it does not read."""
    body: Body = lambda net, x: torch.cat([x, functional.max_pool2d(x, 3, 1, 1)], 1)  # noqa: E731
    _, _, names = fused(tmp_path, of_head(body))
    assert names.count("cat") == 1
    rows: Body = lambda net, x: torch.cat([functional.silu(net.one(x)), x], 2)  # noqa: E731
    assert fused(tmp_path, of_head(rows))[2].count("cat") == 1


def test_pools_of_one_image_are_computed_from_one_another(tmp_path: Path) -> None:
    """As in SPP: the larger windows are those of 5x5; one that strides, or that comes first, stays as it is."""

    def body(net: Layers, x: Any) -> Any:
        pool = functional.max_pool2d
        first = pool(x, 13, 1, 6)
        chained = [pool(x, side, 1, side // 2) for side in (5, 9, 13)]
        return net.plain(x + first + sum(chained)), pool(x, 9, 2, 4)

    module, _, _ = fused(tmp_path, of_head(body))
    windows = [node.args[1] for node in module.graph.nodes if "max_pool2d" in str(node.target)]
    assert windows == [[13, 13], [5, 5], [5, 5], [5, 5], [9, 9]]


def test_biases_of_two_convolutions_in_a_sum_are_one(tmp_path: Path) -> None:
    """cuDNN adds it; the other convolution has none left, which PyTorch would add by itself."""
    module, _, names = fused(tmp_path, of_head(lambda net, x: torch.relu(net.one(x) + net.three(x))))
    assert names.count("end_convolution") == 1
    (plain,) = [
        node for node in module.graph.nodes if "conv2d" in str(node.target) and node.args[1].target == "one.weight"
    ]
    assert plain.args[2] is None


def test_program_without_convolutions_is_left_alone() -> None:
    """Nothing is replaced, and the graph is the same."""
    module = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SiLU()))
    assert end_convolutions(module) == 0


def spec_of(dims: list[int], **parameters: str) -> EngineSpec:
    """Of a program with an output of these dims, on the CPU in FP32."""
    output = [{"name": "y", "data_type": "TYPE_FP32", "dims": dims}]
    return engine_spec(config(parameters=parameters, output=output), is_gpu=False)


def test_rows_that_only_change_their_order_are_right_and_other_rows_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best rows of equal scores: the same precision without fusing is as far from FP32."""
    monkeypatch.setattr(trial, "_fill_free_memory", lambda *_: None)
    save(SmallDetector(has_top=True), images(2), tmp_path / "model.pt2")
    spec = spec_of([20, 6])
    module = prepared_module(tmp_path / "model.pt2", spec, CPU)
    truth = reference_answers(module, spec, CPU)
    turned: Any = lambda image: module(image).roll(1, 1)  # noqa: E731
    assert trial.why_not_right(turned, turned, spec, CPU, truth) == ""
    assert "otherwise" in trial.why_not_right(module, turned, spec, CPU, truth)
    other: Any = lambda image: turned(image) * 1.5  # noqa: E731
    assert "otherwise" in trial.why_not_right(turned, other, spec, CPU, truth)
    assert fused_where_right(module, spec, CPU, truth).is_fused


@pytest.mark.parametrize(
    ("factor", "remark"),
    [(1.0, ""), (1.5, "output 'y' in fp32 answers noise 50% otherwise than in FP32"), (float("nan"), "with NaN than")],
)
def test_precision_that_answers_far_from_fp32_is_remarked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, remark: str
) -> None:
    """It serves: noise is no picture."""
    monkeypatch.setattr(trial, "_fill_free_memory", lambda *_: None)
    save(small_resnet(), images(2), tmp_path / "model.pt2")
    spec = spec_of([10])
    module = prepared_module(tmp_path / "model.pt2", spec, CPU)
    found = trial.precision_remark(
        lambda image: module(image) * factor, spec, CPU, reference_answers(module, spec, CPU)
    )
    assert found.startswith(remark) if "noise" in remark else remark in found
    assert bool(found) is bool(remark)


@pytest.mark.parametrize(
    ("made", "why"),
    [(None, ""), (RuntimeError("no compiler\nadvice"), "no compiler"), (1.5, "they answer [0-9.]+% otherwise")],
)
def test_compiled_program_serves_where_it_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Any, why: str
) -> None:
    """Else the reason is said in one line, and what is fused serves."""
    monkeypatch.setattr(trial, "_fill_free_memory", lambda *_: None)
    save(small_resnet(), images(2), tmp_path / "model.pt2")
    spec = spec_of([10], compiler="aot-inductor")
    module = prepared_module(tmp_path / "model.pt2", spec, CPU)

    def compiled(*_: Any) -> Any:
        if isinstance(made, Exception):
            raise made
        return lambda image: [module(image) * (made or 1.0)]

    monkeypatch.setattr(compiling, "compiled_program", compiled)
    truth = reference_answers(module, spec, CPU)
    found = program._compiled(module, tmp_path / "model.pt2", spec, CPU, truth, print)
    assert found.is_fused is (not why)
    assert (found.module is module) is bool(why)
    assert re.fullmatch(f"compiler: aot-inductor is not used here: {why}" if why else "", found.note)
