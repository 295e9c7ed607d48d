"""The torch backend's programs on the CPU: folded, fused, in other precisions, in batches. Where torch is installed."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.engines.torch_serving.config import engine_spec
from penstock.engines.torch_serving.parameters import TorchLoadError, TorchRequestError

torch = pytest.importorskip("torch", reason="torch is in none of the project's environments: `make gpu` adds it")

from penstock.engines.row_trial import FULL_PRECISION, InputSpec, row_trial, run_trial  # noqa: E402
from penstock.engines.torch_serving import trial  # noqa: E402  after the skip
from penstock.engines.torch_serving.device import array_runner  # noqa: E402
from penstock.engines.torch_serving.fusing import fold_normalisation, fuse_for_cudnn  # noqa: E402
from penstock.engines.torch_serving.instance import Instance, PictureInput, TorchRequest  # noqa: E402
from penstock.engines.torch_serving.program import load_program, move_program, prepared_module, read_program  # noqa: E402
from penstock.engines.torch_serving.runners import EagerRunner  # noqa: E402
from penstock.engines.torch_serving.shared_program import (  # noqa: E402
    ProgramConnector,
    ProgramFile,
    SharedRunner,
    socket_folder,
    start_process,
)
from penstock.engines.torch_serving.trial import fused_where_right  # noqa: E402
from tests.engines import torch_programs  # noqa: E402
from tests.engines.torch_programs import CLASSES, OfPixels, images, save, small_resnet  # noqa: E402

CPU = torch.device("cpu")


def config(**changed: Any) -> dict[str, Any]:
    """What Triton hands over of a model of images; changed: its keys, parameters among them as plain strings."""
    parameters = {key: {"string_value": value} for key, value in changed.pop("parameters", {}).items()}
    model = {
        "name": "small",
        "max_batch_size": 8,
        "input": [{"name": "image", "data_type": "TYPE_FP32", "dims": [3, 32, 32]}],
        "output": [{"name": "logits", "data_type": "TYPE_FP32", "dims": [CLASSES]}],
    }
    return model | {"parameters": parameters} | changed


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small network, exported."""
    path: Path = tmp_path_factory.mktemp("programs") / "model.pt2"
    save(small_resnet(), images(2), path)
    return path


def instance_of(path: Path, model: dict[str, Any]) -> Instance:
    """As the backend opens it on a CPU."""
    spec = engine_spec(model, is_gpu=False)
    return Instance(spec, EagerRunner(load_program(path, spec, CPU).program, spec, CPU))


def expected(batch: Any) -> Any:
    """What PyTorch answers."""
    with torch.no_grad():
        return small_resnet()(batch)


def test_normalisation_folded_answers_as_before(saved: Path) -> None:
    """Every normalisation goes into its convolution, and the answer stays: but for rounding."""
    module = read_program(saved).module(check_guards=False)
    assert fold_normalisation(module) == 4
    assert not any("batch_norm" in str(node.target) for node in module.graph.nodes)
    torch.testing.assert_close(module(images(3)), expected(images(3)), rtol=1e-4, atol=1e-5)


def test_normalisation_of_what_others_read_too_is_left_alone(tmp_path: Path) -> None:
    """A convolution whose output another branch reads before the normalisation keeps its weights."""

    class Twice(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.norm = torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4)

        def forward(self, image: Any) -> Any:
            x = self.convolution(image)
            return self.norm(x) + x

    save(Twice(), images(2), tmp_path / "model.pt2")
    module = read_program(tmp_path / "model.pt2").module(check_guards=False)
    assert fold_normalisation(module) == 0


@contextmanager
def cudnn_on_cpu(factor: float, relu_factors: dict[int, float] | None = None) -> Iterator[None]:
    """cuDNN's two fused calls by PyTorch's plain ones on the CPU, their answers times factor.

    relu_factors: of the call without a sum, by how many rows there are.
    """

    def relu(image: Any, weight: Any, bias: Any, *geometry: Any) -> Any:
        mine = factor if relu_factors is None else relu_factors.get(len(image), 1.0)
        return torch.relu(torch.conv2d(image, weight, bias, *geometry)) * mine

    def add_relu(image: Any, weight: Any, other: Any, alpha: Any, bias: Any, *geometry: Any) -> Any:
        return torch.relu(torch.conv2d(image, weight, bias, *geometry) + alpha * other) * factor

    library = torch.library.Library("aten", "IMPL")
    library.impl("cudnn_convolution_relu", relu, "CPU")
    library.impl("cudnn_convolution_add_relu", add_relu, "CPU")
    try:
        yield
    finally:
        library._destroy()


def test_fusing_for_cudnn_answers_as_before(saved: Path) -> None:
    """Convolution, bias and ReLU are one call, and so they are with the sum of another branch."""
    module = read_program(saved).module(check_guards=False)
    fold_normalisation(module)
    assert fuse_for_cudnn(module) == 2  # x.add_ changes what is read again: that sum stays
    names = [str(node.target) for node in module.graph.nodes]
    assert names.count("aten.cudnn_convolution_relu.default") == 1
    assert names.count("aten.cudnn_convolution_add_relu.default") == 1
    with cudnn_on_cpu(1.0):
        torch.testing.assert_close(module(images(3)), expected(images(3)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("factor", "why"),
    [(1.0, None), (1.5, "they answer [0-9.]+% otherwise"), (float("nan"), "NaN is in an answer"), (None, "cudnn_conv")],
)
def test_fused_calls_are_used_where_they_answer_right(
    saved: Path, monkeypatch: pytest.MonkeyPatch, factor: float | None, why: str | None
) -> None:
    """Ones that answer otherwise, or NaN, or that cannot run at all (None: there is no cuDNN here) are reported."""
    monkeypatch.setattr(trial, "_fill_free_memory", lambda *_: None)
    spec = engine_spec(config(), is_gpu=False)
    with nullcontext() if factor is None else cudnn_on_cpu(factor):
        compared = fused_where_right(prepared_module(saved, spec, CPU), spec, CPU, None)
        torch.testing.assert_close(compared.module(images(3)), expected(images(3)), rtol=1e-4, atol=1e-5)
    assert compared.is_fused is (why is None)
    assert re.search(f"^cuDNN's fused convolutions are not used here: .*{why}" if why else "^$", compared.note)


@pytest.mark.parametrize(
    ("wrong", "why"), [(1.5, "they answer [0-9.]+% otherwise"), (float("nan"), "NaN is in an answer")]
)
def test_fused_calls_that_are_wrong_for_one_batch_size_are_not_used(
    saved: Path, monkeypatch: pytest.MonkeyPatch, wrong: float, why: str
) -> None:
    """cuDNN picks a kernel for each batch size: one that errs at two rows is found, the largest batch is right."""
    monkeypatch.setattr(trial, "_fill_free_memory", lambda *_: None)
    spec = engine_spec(config(), is_gpu=False)
    with cudnn_on_cpu(1.0, {2: wrong}):
        compared = fused_where_right(prepared_module(saved, spec, CPU), spec, CPU, None)
    assert not compared.is_fused
    assert re.search(why, compared.note)


def test_fused_calls_are_not_used_where_nothing_or_another_class_is_answered() -> None:
    """Without them NaN, too; counts and indices are held against one another as numbers are."""
    number, none = torch.tensor([[1.0]]), torch.tensor([[float("nan")]])
    assert trial._fused_error(number, number) == ""
    assert trial._fused_error(none, number) == trial._fused_error(number, none) == "NaN is in an answer"
    assert trial._fused_error(none, none) == "NaN is in an answer"
    assert trial._fused_error(torch.tensor([[7]]), torch.tensor([[9]])).startswith("they answer 28.6% otherwise")
    assert trial._fused_error(number, number[0]) == "they answer another shape"


def test_program_that_is_not_to_be_fused_keeps_its_normalisations(saved: Path) -> None:
    """`fuse` 0 runs the program as it was exported."""
    spec = engine_spec(config(parameters={"fuse": "0"}), is_gpu=False)
    loaded = load_program(saved, spec, CPU)
    assert loaded.fused == "off"
    module = prepared_module(saved, spec, CPU)
    assert sum("batch_norm" in str(node.target) for node in module.graph.nodes) == 4


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_program_in_each_precision_answers_within_its_rounding(saved: Path, precision: str) -> None:
    """The floats of the program become what the parameter says; the wire stays FP32."""
    (answer,) = instance_of(saved, config(parameters={"precision": precision})).answer([TorchRequest((images(3),))])
    assert not isinstance(answer, TorchRequestError)
    assert answer[0].dtype is torch.float32
    torch.testing.assert_close(answer[0], expected(images(3)), rtol=0.05, atol=1e-4 if precision == "fp32" else 0.05)


def test_program_of_pixels_runs_in_half_precision(tmp_path: Path) -> None:
    """The cast to float32 that its graph spells out becomes one to the program's precision."""
    pixels = torch.randint(0, 255, (3, 3, 32, 32), dtype=torch.uint8)
    save(OfPixels(), pixels, tmp_path / "model.pt2")
    model = config(input=[{"name": "image", "data_type": "TYPE_UINT8", "dims": [3, 32, 32]}])
    (answer,) = instance_of(tmp_path / "model.pt2", model | config(parameters={"precision": "bf16"}) | model).answer(
        [TorchRequest((pixels,))]
    )
    assert not isinstance(answer, TorchRequestError)
    torch.testing.assert_close(answer[0], expected(pixels.float() / 255), rtol=0.05, atol=0.05)


def test_constants_and_new_tensors_of_a_program_follow_its_precision(tmp_path: Path) -> None:
    """What a program makes in float32, a constant of its own or a tensor that it fills, becomes of its precision."""

    class Shifted(torch.nn.Module):  # type: ignore[misc]
        def forward(self, image: Any) -> Any:
            constant = torch.tensor([1.0, 2.0, 3.0]).reshape(1, 3, 1, 1)
            ones = torch.ones((1, 3, 1, 1), dtype=torch.float32, device="cpu")
            return ((image + constant) * ones).mean((2, 3))

    save(Shifted(), images(2), tmp_path / "model.pt2")
    module = move_program(
        read_program(tmp_path / "model.pt2").module(check_guards=False), torch.bfloat16, torch.device("meta")
    )
    assert module(images(2).to("meta", torch.bfloat16)).dtype is torch.bfloat16
    model = config(output=[{"name": "y", "data_type": "TYPE_FP32", "dims": [3]}], parameters={"precision": "bf16"})
    (answer,) = instance_of(tmp_path / "model.pt2", model).answer([TorchRequest((images(2),))])
    assert not isinstance(answer, TorchRequestError)
    torch.testing.assert_close(answer[0], Shifted()(images(2)), rtol=0.05, atol=0.05)


def test_requests_of_one_batch_get_their_own_rows(saved: Path) -> None:
    """Three requests of one, two and three rows run together, and each answer is what it would be alone."""
    asks = [TorchRequest((images(rows, seed=rows),)) for rows in (1, 2, 3)]
    outcomes = instance_of(saved, config()).answer(asks)
    for rows, outcome in zip((1, 2, 3), outcomes, strict=True):
        assert not isinstance(outcome, TorchRequestError)
        torch.testing.assert_close(outcome[0], expected(images(rows, seed=rows)), rtol=1e-4, atol=1e-5)


def test_requests_of_unlike_shapes_keep_their_answers(saved: Path) -> None:
    """They run one after the other in memory that each run overwrites, and every one gets its own rows."""
    host = torch.zeros(8, 1)

    class Sums:
        def begin(self, columns: Any, rows: int) -> Any:
            host[:rows] = torch.cat(list(columns[0])).sum(1, keepdim=True)
            return SimpleNamespace(outputs=lambda: (host[:rows],))

    spec = engine_spec(config(input=[{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}]), is_gpu=False)
    asks = [TorchRequest((torch.ones(rows, columns),)) for rows, columns in ((2, 3), (1, 5), (1, 3))]
    answers = [outcome[0].flatten().tolist() for outcome in Instance(spec, cast(Any, Sums())).answer(asks)]  # type: ignore[index]
    assert answers == [[3.0, 3.0], [5.0], [3.0]]


@pytest.mark.parametrize("mixes", [False, True])
def test_rows_of_an_instance_are_tried(saved: Path, mixes: bool) -> None:
    """A program whose rows follow its batch passes; one that mixes them fails, and its requests then run alone."""
    spec = engine_spec(config(), is_gpu=False)
    runner = EagerRunner(load_program(saved, spec, CPU).program, spec, CPU)
    run = runner.begin

    def mixed(columns: Any, rows: int) -> Any:
        answered = run(columns, rows).outputs()[0]
        return SimpleNamespace(outputs=lambda: (answered.flip(0),))

    if mixes:
        runner.begin = mixed  # type: ignore[method-assign]
    instance = Instance(spec, runner)
    trial = row_trial([InputSpec(one.name, one.data_type, one.dims) for one in spec.inputs], FULL_PRECISION)
    why = run_trial(trial, array_runner(instance, spec))
    assert why == ("row 1 of output 'logits' differs between a batch of 2 and a request alone" if mixes else "")
    if mixes:
        instance.merge_nothing()
        asks = [TorchRequest((images(1, seed=number),)) for number in range(3)]
        for number, outcome in enumerate(instance.answer(asks)):
            torch.testing.assert_close(outcome[0], expected(images(1, seed=number)), rtol=1e-4, atol=1e-5)


def test_bad_picture_is_its_own_requests_error(saved: Path) -> None:
    """A request with a picture that cannot be decoded is refused with its sentence; its batch-mates are answered."""

    class Reader:
        def prepare(self, encoded: list[bytes], out: Any) -> list[str | None]:
            for number, picture in enumerate(encoded):
                out[number] = picture[0] / 255
            return ["the picture is none" if picture == b"\x00" else None for picture in encoded]

    words = {"image-decoder": "engine", "infer-dims": "3;32;32"}
    model = config(parameters=words, input=[{"name": "image", "data_type": "TYPE_STRING", "dims": [1]}])
    spec = engine_spec(model, is_gpu=False)
    runner = EagerRunner(load_program(saved, spec, CPU).program, spec, CPU)
    instance = Instance(spec, runner, PictureInput(Reader(), runner))
    good, bad, last = instance.answer(
        [
            TorchRequest(pictures=(b"\x07", b"\x08")),
            TorchRequest(pictures=(b"\x00",)),
            TorchRequest(pictures=(b"\x09",)),
        ]
    )
    assert isinstance(bad, TorchRequestError)
    assert str(bad) == "the picture is none"
    (several,) = instance.answer([TorchRequest(pictures=(b"\x00", b"\x07", b"\x00"))])
    assert str(several) == "rows 0, 2 of 3: the picture is none"
    for outcome, levels in ((good, (7, 8)), (last, (9,))):
        assert not isinstance(outcome, TorchRequestError)
        batch = torch.stack([torch.full((3, 32, 32), level / 255) for level in levels])
        torch.testing.assert_close(outcome[0], expected(batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (config(output=[*config()["output"]] * 2), "returns 1 tensors and config.pbtxt names 2"),
        (config(input=[*config()["input"]] * 2), "takes 1 inputs and config.pbtxt names 2"),
        (config(output=[{"name": "y", "data_type": "TYPE_FP32", "dims": [9]}]), r"has shape \[1, 10\] for 1 rows"),
    ],
)
def test_program_that_does_not_fit_its_configuration_is_refused(
    saved: Path, model: dict[str, Any], sentence: str
) -> None:
    """The sentence says what the program has and what config.pbtxt says."""
    with pytest.raises(TorchLoadError, match=sentence):
        instance_of(saved, model)


def test_file_that_is_no_program_is_refused(tmp_path: Path) -> None:
    """An absent file and one of something else, each in one sentence."""
    spec = engine_spec(config(), is_gpu=False)
    with pytest.raises(TorchLoadError, match=r"there is no model\.pt2"):
        load_program(tmp_path / "model.pt2", spec, CPU)
    (tmp_path / "model.pt2").write_bytes(b"no archive")
    with pytest.raises(TorchLoadError, match=r"is not a program of torch\.export\.save"):
        load_program(tmp_path / "model.pt2", spec, CPU)


def test_torch_programs_of_the_tests_answer_what_they_say() -> None:
    """The lookup that the tests of a GPU's faults use answers a row of its table."""
    lookup = torch_programs.Lookup()
    torch.testing.assert_close(lookup(torch.tensor([[3]])), lookup.words.weight[3:4])


def test_instances_of_a_shared_program_answer_what_pytorch_answers(saved: Path, tmp_path: Path) -> None:
    """The process is a real one: it loads the program once, and ends when both instances have left."""
    model = config(parameters={"program-process": "shared"}, dynamic_batching={})
    spec = engine_spec(model, is_gpu=False)
    processes = []

    def start(program: ProgramFile, descriptor: int) -> Any:
        processes.append(start_process(program, descriptor))
        return processes[-1]

    def runner_of(file: Path) -> SharedRunner:
        folder = socket_folder(str(tmp_path / "slab"))
        return SharedRunner(ProgramConnector(ProgramFile(file, model, -1), spec, folder, start).connect)

    runners = [runner_of(saved), runner_of(saved)]
    for runner, rows in zip((*runners, runners[0]), (1, 5, 8), strict=True):
        runner.may_merge = True
        batch = images(rows, seed=rows)
        (outcome,) = Instance(spec, runner).answer([TorchRequest((batch.numpy(),))])
        answer = torch.from_numpy(cast(Any, outcome)[0])
        torch.testing.assert_close(answer, expected(batch), rtol=1e-4, atol=1e-4)
    assert "run=eager" in runners[0].greeting.facts
    for runner in runners:
        runner.drop()
    broken = tmp_path / "model.pt2"
    broken.write_bytes(b"nothing")
    with pytest.raises(TorchLoadError, match=r"is not a program of torch\.export\.save"):
        runner_of(broken)
    assert [process.wait(60) for process in processes] == [0, 0]
