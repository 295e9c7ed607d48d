"""A limited process's answers held to the CPU's at load. Played on the CPU, where torch is installed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engines.torch_serving.config import engine_spec
from penstock.engines.torch_serving.parameters import TorchLoadError

torch = pytest.importorskip("torch", reason="torch is in none of the project's environments: `make gpu` adds it")

from penstock.engines.torch_serving import program, trial  # noqa: E402  after the skip
from penstock.engines.torch_serving.program import Loaded, load_program  # noqa: E402
from penstock.engines.torch_serving.trial import FusionResult, drawn_rows, largest_difference, sample_of  # noqa: E402
from tests.engines.test_torch_serving import CPU, config  # noqa: E402
from tests.engines.torch_programs import images, save, small_resnet  # noqa: E402


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small network, exported."""
    path: Path = tmp_path_factory.mktemp("programs") / "model.pt2"
    save(small_resnet(), images(2), path)
    return path


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Any:
    """load_program on the CPU as if that were a card of which MPS leaves 22 of 132 SMs; called with what its answer is
    made of (default: left as it is) for batches of how many rows.
    """
    monkeypatch.setattr(trial, "_fill_free_memory", lambda *_: None)
    card, prepared = SimpleNamespace(type="cuda"), program._prepared

    def load(
        path: Path, model: dict[str, Any], wrong: Any = None, rows: int = 0, sms: tuple[int, int] = (22, 132)
    ) -> Loaded:
        monkeypatch.setattr(program, "own_and_all", lambda _: sms)

        def erring(module: Any, spec: Any, _: Any) -> Any:
            module = prepared(module, spec, CPU)

            def answer(image: Any) -> Any:
                result = module(image).clone()
                return wrong(result) if wrong is not None and len(image) == rows else result

            return answer

        monkeypatch.setattr(program, "_prepared", erring)
        monkeypatch.setattr(program, "fused_where_right", lambda module, *_: FusionResult(module))
        monkeypatch.setattr(trial, "sample_of", lambda spec, _, drawn, rows: sample_of(spec, CPU, drawn, rows))
        return load_program(path, engine_spec(model, is_gpu=False), card)

    return load


def one_wrong(value: float) -> Any:
    """The last number of the last row."""

    def changed(answer: Any) -> Any:
        answer[-1, -1] = value
        return answer

    return changed


NAN, FAR_OFF = one_wrong(float("nan")), one_wrong(1e3)


@pytest.mark.parametrize(
    ("wrong", "how", "rows"),
    [*((NAN, "with NaN", rows) for rows in (1, 4, 8)), *((FAR_OFF, r"\d+% off", rows) for rows in (1, 8))],
)
def test_limited_program_that_answers_otherwise_than_the_cpu_is_refused(
    limited: Any, saved: Path, wrong: Any, how: str, rows: int
) -> None:
    """Of one batch size alone, too; the sentence says how many SMs and what to do."""
    sentence = rf"with 22 of the GPU's 132 SMs.* {rows} row\(s\) {how} .*--mps-active-thread-percentage"
    with pytest.raises(TorchLoadError, match=sentence):
        limited(saved, config(), wrong, rows)
    unchecked = config(parameters={"check-answers": "0"})
    assert "not tried: check-answers is 0" in limited(saved, unchecked, wrong, rows).trial
    assert limited(saved, config(), wrong, rows, (132, 132)).trial == "all 132 SMs"
    with pytest.raises(TorchLoadError, match=r"with 22 SMs, this process"):
        limited(saved, config(), wrong, rows, (22, 0))


def test_limited_program_that_answers_as_the_cpu_is_taken(limited: Any, saved: Path) -> None:
    """The log says so."""
    assert limited(saved, config()).trial == "22 of 132 SMs, answers as on the CPU"


def test_limited_program_of_one_row_is_tried_with_one(limited: Any, tmp_path: Path) -> None:
    """Exported with a batch of one, it takes no other."""
    exported = torch.export.export(small_resnet(), (images(1),))
    torch.export.save(exported, tmp_path / "model.pt2")
    model = config(max_batch_size=1)
    assert limited(tmp_path / "model.pt2", model).trial == "22 of 132 SMs, answers as on the CPU"
    with pytest.raises(TorchLoadError, match="with NaN"):
        limited(tmp_path / "model.pt2", model, NAN, 1)


def test_limited_program_without_floats_is_not_judged(limited: Any, tmp_path: Path) -> None:
    """Of two scores that are nearly equal half precision may well take the other."""

    class Best(torch.nn.Module):  # type: ignore[misc]
        def forward(self, image: Any) -> Any:
            return image.flatten(1).argmax(1, keepdim=True)

    save(Best(), images(2), tmp_path / "model.pt2")
    model = config(output=[{"name": "y", "data_type": "TYPE_INT64", "dims": [1]}])
    assert limited(tmp_path / "model.pt2", model, lambda answer: answer + 5, 8).trial.endswith("not tried: no floats")


def test_numbers_that_are_none_on_the_cpu_are_not_held_against_the_gpu() -> None:
    """Masked scores are endless; where the CPU has a number and the GPU has none, it is wrong."""
    endless, none = float("inf"), float("nan")
    assert largest_difference(torch.tensor([[-endless, 1.0]]), torch.tensor([[-endless, 1.0]])) == 0.0
    assert largest_difference(torch.tensor([[-endless, 1.0]]), torch.tensor([[3.0, 1.0]])) == endless
    assert largest_difference(torch.tensor([[none, 1.0]]), torch.tensor([[3.0, 1.0]])) == 0.0
    assert str(largest_difference(torch.tensor([[2.0, 1.0]]), torch.tensor([[none, 1.0]]))) == "nan"
    assert largest_difference(torch.tensor([[2.0, 1.0]]), torch.tensor([[endless, 1.0]])) == endless
    assert largest_difference(torch.zeros(1, 2), torch.full((1, 2), 1e-8)) < 0.001  # type: ignore[operator]
    assert largest_difference(torch.zeros(1, 2), torch.zeros(2, 2)) is None
    assert largest_difference(torch.zeros(0, 2), torch.zeros(0, 2)) is None


def test_pixels_to_compare_by_are_no_empty_picture() -> None:
    """UINT8 images are noise; other whole numbers are zeros, which any table has a row for. No two rows are alike."""
    word = {"name": "word", "data_type": "TYPE_UINT8", "dims": [5]}
    pixels = {"name": "image", "data_type": "TYPE_UINT8", "dims": [3, 32, 32]}
    spec = engine_spec(config(input=[pixels, word]), is_gpu=False)
    image, words = sample_of(spec, CPU, drawn_rows(spec, 8), 8)
    assert (image.dtype, image.shape, words.shape) == (torch.uint8, (8, 3, 32, 32), (8, 5))
    assert image.float().std() > 50
    assert len({bytes(row.numpy().tobytes()) for row in image}) == 8
    assert not words.any()
