"""GoogLeNet as a PyTorch program of pixels: the folder, and, where PyTorch is, its answers beside the ONNX graph's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from deploy.models.googlenet import googlenet
from deploy.models.googlenet_torch import GOOGLENET, NAME, export, run
from deploy.models.torch_folder import Form

MOST_OFF = 1e-4  # of a share, on the CPU
MOST_OFF_HALF = 0.02  # of the largest share


@pytest.mark.parametrize(
    "words", [["--instances", "0"], ["--instances", "-1"], ["--max-batch", "0"], ["--max-batch", "x"]]
)
def test_number_that_makes_no_model_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is exported, with the option and what was said."""
    with pytest.raises(SystemExit, match="2"):
        run(words)
    assert f"argument {words[0]}: {words[1]!r} is not a whole number above 0" in capsys.readouterr().err


def test_name_that_hides_random_weights_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The model's name says that its answers have no meaning."""
    with pytest.raises(SystemExit, match="2"):
        run(["--name", "googlenet"])
    assert "must have -random in it" in capsys.readouterr().err


def test_config_is_one_that_triton_reads() -> None:
    """Pixels in, shares out; instances, batching and the largest batch as they were asked for."""
    config = text_format.Parse(
        GOOGLENET.config_text(Form(NAME, instances=3, batching="off", max_batch_size=16)), ModelConfig()
    )
    assert (config.name, config.max_batch_size, config.instance_group[0].count) == (NAME, 16, 3)
    assert not config.HasField("dynamic_batching")
    assert text_format.Parse(GOOGLENET.config_text(Form(NAME)), ModelConfig()).HasField("dynamic_batching")
    assert list(config.output[0].dims) == [1000]
    assert config.parameters["apply-softmax"].string_value == "0"


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_program_answers_as_the_onnx_graph_does() -> None:
    """Of the same seed, before it is exported."""
    torch = pytest.importorskip("torch")
    from deploy.models.googlenet_network import GoogLeNet
    from deploy.models.resnet50_network import OfPixels

    pixels = _pixels()[:1]
    with torch.no_grad():
        answer = OfPixels(GoogLeNet(0)).eval()(torch.from_numpy(pixels)).numpy()
    np.testing.assert_allclose(answer, _by_onnx(pixels), atol=MOST_OFF)


@pytest.mark.long  # a CPU takes minutes for half precision
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_exported_program_answers_as_the_onnx_graph_does(tmp_path: Path) -> None:
    """At several batch sizes; in half precision within what 11 bits leave of it."""
    torch = pytest.importorskip("torch")
    from penstock.engines.torch_serving.program import move_program

    export(0, tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2")
    pixels = _pixels()
    wanted = _by_onnx(pixels)
    module = program.module(check_guards=False)
    with torch.no_grad():
        for count in (1, len(pixels)):
            answer = module(torch.from_numpy(pixels[:count])).numpy()
            np.testing.assert_allclose(answer, wanted[:count], atol=MOST_OFF)
        halves = move_program(module, torch.float16, torch.device("cpu"))(torch.from_numpy(pixels)).numpy()
    np.testing.assert_allclose(halves, wanted, atol=MOST_OFF_HALF * float(wanted.max()))


@pytest.mark.parametrize("largest", [1.0, 300.0, 20_000.0])
def test_response_normalisation_holds_large_numbers_in_half_precision(largest: float) -> None:
    """PyTorch's own squares first, which FP16 holds to 255 only."""
    torch = pytest.importorskip("torch")
    from deploy.models.googlenet_network import ResponseNorm

    x = torch.from_numpy(np.random.default_rng(1).uniform(-largest, largest, (1, 64, 8, 8)).astype(np.float32))
    wanted = torch.nn.functional.local_response_norm(x, 5, alpha=1e-4, beta=0.75, k=1.0)
    torch.testing.assert_close(ResponseNorm(64)(x), wanted, rtol=1e-5, atol=1e-6 * largest)
    halves = ResponseNorm(64).half()(x.half()).float()
    assert float((halves - wanted).abs().max() / wanted.abs().max()) < 0.005


def _pixels() -> Any:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3, 224, 224), dtype=np.uint8)
    pixels[1] = np.arange(224, dtype=np.uint8)  # a slope
    pixels[2, :, 60:160, 60:160] = 255
    return pixels


def _by_onnx(pixels: Any) -> Any:
    import onnxruntime

    from deploy.models.resnet50_network import DEVIATION, MEAN

    session = onnxruntime.InferenceSession(googlenet(0)[0].SerializeToString(), providers=["CPUExecutionProvider"])
    mean, deviation = (np.array(one, np.float32).reshape(1, 3, 1, 1) for one in (MEAN, DEVIATION))
    return session.run(None, {"image": (pixels.astype(np.float32) - mean) / deviation})[0]
