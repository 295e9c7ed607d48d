"""OpenNMT's translator in its two forms against the network's formulas, written down once more as simply as can be."""

import dataclasses
import hashlib
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest

from deploy.models import opennmt
from deploy.models.opennmt_onnx import translator
from deploy.models.opennmt_weights import Cell, Size, Weights, draw
from penstock.engines.config_pbtxt import read_config
from penstock.vision.card import card_from_config

OPENNMT_PRINTS = 84_822_004  # "number of parameters" of its default model, in its own quick start
TINY = Size(vocabulary=301, width=20, source_length=7, target_length=9)
SEED = 3
Array = npt.NDArray[np.float32]
Words = npt.NDArray[np.int64]


def sentences() -> Words:
    """Full ones, short ones, a single word, a blank within, nothing but blanks, numbers that are no words."""
    words = np.random.default_rng(1).integers(4, TINY.vocabulary, (9, TINY.source_length))
    for row, length in ((2, 4), (3, 1), (4, 0), (8, 6)):
        words[row, length:] = 0
    words[5, 2], words[6, 0], words[7, 3] = 0, -5, TINY.vocabulary
    return words


def lstm(cell: Cell, x: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
    """One step of one layer for one sentence."""
    gates = cell.input @ x + cell.input_bias + cell.state @ state[0] + cell.state_bias
    write, forget, candidate, show = np.split(gates, 4)
    memory = state[1] / (1 + np.exp(-forget)) + np.tanh(candidate) / (1 + np.exp(-write))
    return np.tanh(memory) / (1 + np.exp(-show)), memory


def translate(weights: Weights, words: Words, count: int) -> list[int]:
    """One sentence without padding: attention over its own words only, each matrix where the paper has it."""
    zeros = np.zeros(weights.attention_in.shape[0], np.float32)
    below, states = [weights.source_words[word] for word in words], []
    for cell in weights.encoder:
        steps = [(zeros, zeros)]
        for x in below:
            steps.append(lstm(cell, x, steps[-1]))
        below = [state for state, _ in steps[1:]]
        states.append(steps[-1])
    memory, fed, word, answer = np.stack(below), zeros, 2, []
    for _ in range(count):
        x = np.concatenate([weights.target_words[word], fed])
        for layer, cell in enumerate(weights.decoder):
            states[layer] = lstm(cell, x, states[layer])
            x = states[layer][0]
        scores = np.exp(memory @ (weights.attention_in @ x))
        context = scores @ memory / scores.sum()
        fed = np.tanh(weights.attention_out @ np.concatenate([context, x]))
        word = int(np.argmax(weights.generator @ fed + weights.generator_bias))
        answer.append(word)
    return answer


def expected(weights: Weights) -> Words:
    """What each of the sentences is answered."""
    rows = []
    for row in sentences():
        known = np.where((row >= 0) & (row < TINY.vocabulary), row, 1)
        length = max([place + 1 for place, word in enumerate(row) if word], default=1)
        rows.append(translate(weights, known[:length], TINY.target_length))
    return np.array(rows)


def test_opennmt_of_the_default_size_has_the_parameters_that_opennmt_prints() -> None:
    """To the last one; the formula counts what is drawn."""
    weights = draw(TINY, SEED)
    arrays = [getattr(weights, field.name) for field in dataclasses.fields(weights)]
    flat = [array for array in arrays if isinstance(array, np.ndarray)]
    cells = [cell for layers in (weights.encoder, weights.decoder) for cell in layers]
    flat += [getattr(cell, field.name) for cell in cells for field in dataclasses.fields(cell)]
    assert sum(array.size for array in flat) == TINY.parameter_count
    assert Size().parameter_count == OPENNMT_PRINTS


def test_opennmt_in_onnx_answers_as_the_formulas_do() -> None:
    """Sentences of any length, together and alone; and different sentences are answered differently."""
    weights = draw(TINY, SEED)
    session = ort.InferenceSession(translator(TINY, weights).SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = expected(weights)
    (together,) = session.run(["target"], {"source": sentences()})
    alone = [session.run(["target"], {"source": row[None]})[0][0] for row in sentences()]
    np.testing.assert_array_equal(together, wanted)
    np.testing.assert_array_equal(alone, wanted)
    assert len({tuple(row) for row in wanted.tolist()}) >= len(wanted) - 1


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_opennmt_in_torch_answers_as_the_formulas_do(tmp_path: Path) -> None:
    """The exported program, at every batch size, and its padded widths change nothing."""
    torch = pytest.importorskip("torch")
    from deploy.models.opennmt_torch import export

    weights = draw(TINY, SEED)
    export(TINY, weights, tmp_path / "model.pt2", max_batch_size=64)
    program = torch.export.load(tmp_path / "model.pt2")
    assert "cpu" not in str(program.graph), "a device stands in the program"
    module, words, wanted = program.module(), torch.from_numpy(sentences()), expected(weights)
    with torch.no_grad():
        for count in (1, len(wanted)):
            np.testing.assert_array_equal(module(words[:count]).numpy(), wanted[:count])


def test_opennmt_of_a_seed_is_one_file() -> None:
    """The same seed gives the same bytes, another seed others."""
    first, again, other = (
        translator(TINY, draw(TINY, seed)).SerializeToString(deterministic=True) for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other


def test_opennmt_written_is_a_complete_folder(tmp_path: Path) -> None:
    """Name, first line and config say that the weights are random; the gateway owns the batches; the hash is right."""
    folder = opennmt.write(opennmt.Order(size=TINY), tmp_path)
    config = read_config(folder / "config.pbtxt")
    facts = (folder / "MODEL.md").read_text()
    assert (config.name, config.max_batch_size, config.has_dynamic_batching) == ("opennmt-random", 64, False)
    assert (config.parameters["batch_owner"], config.parameters["weights"]) == ("gateway", "random")
    assert [tensor.shape for tensor in (*config.inputs, *config.outputs)] == [(7,), (9,)]
    assert card_from_config(config) is None
    assert "RANDOM WEIGHTS" in facts.splitlines()[0]
    assert hashlib.sha256((folder / "1" / "model.onnx").read_bytes()).hexdigest() in facts
    assert sorted(item.name for item in folder.iterdir()) == ["1", "MODEL.md", "config.pbtxt"]


@pytest.mark.parametrize(("precision", "name"), opennmt.TORCH_NAMES.items())
def test_opennmt_for_a_gpu_is_described_for_the_torch_backend(precision: str, name: str) -> None:
    """Its config names the backend, the program's file and the precision."""
    order = opennmt.Order(precision)
    text = opennmt.config_text(order)
    assert f'name: "{name}"' in text
    assert 'backend: "torch"\ndefault_model_filename: "model.pt2"' in text
    assert f'key: "precision" value {{ string_value: "{precision}" }}' in text
    assert "KIND_GPU" in text


def test_opennmt_for_a_gpu_without_pytorch_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence, exit code 1, and nothing is left in the repository."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "deploy.models.opennmt_torch", raising=False)
    monkeypatch.setattr(opennmt, "Size", lambda: TINY)
    monkeypatch.setattr(opennmt, "draw", lambda size, seed: draw(TINY, seed))
    with pytest.raises(SystemExit) as ended:
        opennmt.run(["--torch", "--home", str(tmp_path)])
    assert ended.value.code == 1
    assert "PyTorch" in (said := capsys.readouterr().err)
    assert said.count("\n") == 1
    assert list((tmp_path / "models").iterdir()) == []
