"""On a real card: the kernel that ends convolutions, and whole programs by it and by AOTInductor."""

from pathlib import Path
from typing import Any

import pytest

from penstock.engines.torch_serving.config import engine_spec
from tests.engines.test_torch_settings import config

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
TOLERANCES = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5}


@pytest.fixture(scope="module")
def torch() -> Any:
    module = pytest.importorskip("torch", reason="needs torch")
    if not module.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return module


def rows_of(torch: Any, shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    """Channels last, from -4 to 4, on the card."""
    made = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 8 - 4
    return made.to("cuda", getattr(torch, dtype), memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("channels", [1, 7, 16, 40])
def test_kernel_answers_what_the_operators_answer(torch: Any, dtype: str, channels: int) -> None:
    """Every activation, with and without each operand, in place and into a target; whatever the channels' number."""
    from penstock.engines.torch_serving.ending import Activation, _can_be_launched, empty_concatenation, end_convolution

    shape = (3, channels, 5, 9)
    bias = rows_of(torch, (1, channels, 1, 1), dtype, 1).reshape(-1)
    other, scalar = rows_of(torch, shape, dtype, 2), rows_of(torch, (3, channels, 1, 1), dtype, 3)
    parameters = {Activation.CLAMP: (-1.0, 2.0), Activation.LEAKY_RELU: (0.1, 0.0)}
    for activation in Activation:
        words = (int(activation), *parameters.get(activation, (0.0, 0.0)))
        for operands in (
            (bias, None, None),
            (None, other, None),
            (bias, None, scalar),
            (bias, other.contiguous(), other),
        ):
            x = rows_of(torch, shape, dtype, 4)
            slow = [None if one is None else one.double().cpu() for one in operands]
            right = end_convolution(x.double().cpu(), slow[0], words, *slow[1:])
            target = empty_concatenation(x, 2 * channels + 3).zero_()
            assert _can_be_launched(x, operands[0], target[:, channels : 2 * channels])
            placed = end_convolution(x, operands[0], words, *operands[1:], (target, channels))
            answer = end_convolution(x, operands[0], words, *operands[1:])
            assert answer.data_ptr() == x.data_ptr()
            for got in (answer, placed):
                torch.testing.assert_close(got.double().cpu(), right, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
            assert not target[:, :channels].any()
            assert not target[:, 2 * channels :].any()


@pytest.mark.parametrize("name", ["small", "end2end"])
def test_program_with_silu_and_concatenations_is_fused(torch: Any, tmp_path: Path, name: str) -> None:
    """The trial at load finds it right, and all convolutions end by the kernel."""
    from penstock.engines.torch_serving.ending import end_convolution
    from penstock.engines.torch_serving.program import load_program
    from tests.engines import torch_programs

    network = torch_programs.SmallDetector(has_top=name == "end2end").eval()
    torch_programs.save(network, torch_programs.images(2), tmp_path / "model.pt2")
    output = [{"name": "y", "data_type": "TYPE_FP32", "dims": [20, 6] if name == "end2end" else [64, 6]}]
    spec = engine_spec(config({"precision": "fp16"}, output=output), is_gpu=True)
    loaded = load_program(tmp_path / "model.pt2", spec, torch.device("cuda", 0))
    assert (loaded.fused, loaded.note) == ("cudnn", "")
    nodes = loaded.program.module.graph.nodes  # type: ignore[attr-defined]
    assert sum(node.target is end_convolution for node in nodes) >= 5


@pytest.mark.parametrize("fused", ["cudnn", "aot-inductor"])
def test_graphs_of_every_bucket_answer_what_the_cpu_answers(
    torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fused: str
) -> None:
    """By the kernel, and by one compiled file for all buckets, which the second load takes from the cache."""
    from penstock.engines.torch_serving.device import pinned_regions
    from penstock.engines.torch_serving.program import load_program
    from penstock.engines.torch_serving.runners import GraphRunner
    from tests.engines import torch_programs

    monkeypatch.setenv("PENSTOCK_COMPILED_PROGRAMS", str(tmp_path / "compiled"))
    network = torch_programs.SmallDetector().eval()
    torch_programs.save(network, torch_programs.images(2), tmp_path / "model.pt2")
    output = [{"name": "y", "data_type": "TYPE_FP32", "dims": [64, 6]}]
    parameters = {"precision": "fp16"} | ({"compiler": fused} if fused != "cudnn" else {})
    spec, device = engine_spec(config(parameters, output=output), is_gpu=True), torch.device("cuda", 0)
    lines: list[str] = []
    loaded = [load_program(tmp_path / "model.pt2", spec, device, lines.append) for _ in range(2)]
    assert [(one.fused, one.note) for one in loaded] == [(fused, "")] * 2
    assert len(lines) == (fused == "aot-inductor")
    runner = GraphRunner(loaded[1].program, spec, device, pinned=pinned_regions(), slots=1)
    for rows in range(1, 9):
        images = torch_programs.images(rows, seed=rows)
        (answer,) = runner.begin([[images]], rows).outputs()
        with torch.no_grad():
            right = network(images)
        assert float((answer - right).abs().max()) <= 0.02 * float(right.abs().max())
