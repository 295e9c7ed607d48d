"""TorchScript and .pt2: what is known without running them, and the trial with a permission."""

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.models.inspect import torch_file
from penstock.models.inspect.facts import FileFormat, UnreadableModel
from penstock.models.inspect.inspection import Hints, Inspection, Verdict, inspect_file
from penstock.models.inspect.onnx_file import read_facts
from penstock.protocol.inference import Datatype
from tests.models.inspect.torch_archives import (
    ULTRALYTICS,
    archive,
    meta,
    pickle_that_creates,
    program,
    pt2,
    stand_in_environment,
    torchscript,
    yolox,
)

YOLOX = Hints(layout="yolox", color="bgr")


@pytest.fixture
def with_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a stand-in for PyTorch whose programs behave as named."""

    def use(behaviour: str) -> None:
        environment = stand_in_environment(tmp_path / "environment", behaviour)
        monkeypatch.setenv("PENSTOCK_ENGINE_ENVIRONMENT", str(environment))

    return use


def inspected(path: Path, data: bytes, hints: Hints = YOLOX, *, allows_code: bool = True) -> Inspection:
    path.write_bytes(data)
    return inspect_file(path, hints, allows_code=allows_code)


def test_a_program_declares_inputs_outputs_and_operators(tmp_path: Path) -> None:
    """Symbols are free axes with their names; operators near the output have ONNX's names."""
    path = tmp_path / "m.pt2"
    path.write_bytes(pt2(yolox()))
    facts = read_facts(path)
    (image,), (rows,) = facts.inputs, facts.outputs
    assert (image.name, image.datatype, image.shape, image.axes[0]) == ("x", Datatype.FP32, (-1, 3, 64, 64), "s0")
    assert (rows.name, rows.shape, rows.axes) == ("rows", (-1, 84, 85), ("s0", "", ""))
    assert facts.tail["rows"] == ("view", "Sigmoid", "Conv")
    assert (facts.first_convolution_channels, facts.stem_kernel) == (3, 3)
    assert (facts.file_format, facts.producer) == (FileFormat.PT2, "PyTorch 2.11.0")


def test_a_program_is_recognised_but_not_run_without_permission(tmp_path: Path) -> None:
    """The layout is found from the shapes, and the sentence names the flag."""
    found = inspected(
        tmp_path / "m.pt2", pt2(program((1, 3, 128, 128), {"o": (1, 336, 85)})), Hints(), allows_code=False
    )
    assert (found.recognition.layout, found.verdict) == ("yolox", Verdict.UNSERVABLE)
    assert "--allow-model-code" in found.reason
    assert not found.trial.results


def test_metadata_of_torchscript_is_read_from_the_archive(tmp_path: Path) -> None:
    """Ultralytics' config.txt gives task, names and size."""
    found = inspected(tmp_path / "m.torchscript", torchscript(ULTRALYTICS), allows_code=False)
    assert found.facts.metadata["names"] == "{'0': 'cat', '1': 'dog'}"
    assert found.facts.inputs[0].shape == (-1, 3, 320, 320)
    assert found.recognition.input_size == (320, 320)


@pytest.mark.parametrize("allows_code", [False, True])
def test_pickles_of_an_archive_are_never_loaded(
    tmp_path: Path, with_torch: Callable[[str], None], *, allows_code: bool
) -> None:
    """Neither by the inspection nor by its process that runs the program: only PyTorch itself may."""
    with_torch("yolox")
    trap = tmp_path / "trap"
    evil = pickle_that_creates(trap)
    for data in (
        torchscript(ULTRALYTICS, **{"data.pkl": evil, "constants.pkl": evil, "traced_inputs.pkl": evil}),
        pt2(yolox(), **{"data/sample_inputs/model.pt": evil, "data/weights/weight_0": evil}),
    ):
        inspected(tmp_path / "m.pt", data, allows_code=allows_code)
    assert not trap.exists()


def test_without_pytorch_the_sentence_names_the_setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The permission alone is not enough."""
    monkeypatch.setenv("PENSTOCK_ENGINE_ENVIRONMENT", str(tmp_path))
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    from penstock.models.inspect.torch_session import why_not_run

    path = tmp_path / "m.pt2"
    path.write_bytes(pt2(yolox()))
    assert "run make gpu in a checkout (7 GB), else penstock setup triton --gpu" in why_not_run(
        read_facts(path), allows_code=True
    )


def test_a_program_that_may_run_is_tried_on_pictures(tmp_path: Path, with_torch: Callable[[str], None]) -> None:
    """Its outputs are decoded; what it prints does not matter."""
    with_torch("prints")
    found = inspected(tmp_path / "m.pt2", pt2(yolox()))
    assert found.verdict is Verdict.SERVABLE, found.reason
    assert len(found.trial.results) == 2


def test_a_run_shows_the_outputs_of_torchscript_which_is_not_served(
    tmp_path: Path, with_torch: Callable[[str], None]
) -> None:
    """The layout is recognised, and the reason says how such a model can be served."""
    with_torch("yolox")
    found = inspected(tmp_path / "m.pt", torchscript({**ULTRALYTICS, "imgsz": [64, 64]}))
    assert [output.shape for output in found.facts.outputs] == [(-1, 84, 85)]
    assert (found.recognition.layout, found.trial.is_decoded) == ("yolox", True)
    assert found.verdict is Verdict.UNSERVABLE
    assert "no engine here serves TorchScript" in found.reason
    assert "torch.export.save" in found.reason


def test_torchscript_without_metadata_needs_its_size(tmp_path: Path, with_torch: Callable[[str], None]) -> None:
    """No archive declares the shape of its input."""
    with_torch("yolox")
    found = inspected(tmp_path / "m.pt", torchscript())
    assert (found.verdict, "--input-size" in found.reason) == (Verdict.AMBIGUOUS, True)


@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        ("fails", "PyTorch 2.11.0 cannot run it: shape '[1, 2]' is invalid"),
        ("two outputs", "it declares 1 outputs, but returned 2"),
        ("text", "an output is a str, not a tensor"),
        ("huge", "an output has 2147483648 bytes for one picture"),
        ("ends", "the process that runs it ended with exit code 3"),
        ("missing", "PyTorch cannot open it"),
    ],
)
def test_a_program_that_misbehaves_is_one_sentence(
    tmp_path: Path, with_torch: Callable[[str], None], behaviour: str, sentence: str
) -> None:
    """The trial fails with the reason, for a .pt2 and for TorchScript."""
    with_torch(behaviour)
    found = inspected(tmp_path / "m.pt2", pt2(yolox()))
    assert found.verdict is Verdict.UNSERVABLE
    assert sentence in found.reason
    if behaviour != "two outputs":  # TorchScript declares none
        assert sentence in inspected(tmp_path / "m.pt", torchscript({**ULTRALYTICS, "imgsz": [64, 64]})).reason


def _changed(**signature: Any) -> bytes:
    found = yolox()
    found["graph_module"]["signature"] |= signature
    return pt2(found)


def _sized(*sides: int) -> bytes:
    found = yolox()
    found["graph_module"]["graph"]["tensor_values"]["x"] = meta(sides)
    return pt2(found)


def _cycle() -> bytes:
    found = yolox()
    found["graph_module"]["graph"]["nodes"][0]["inputs"][0]["arg"]["as_tensor"]["name"] = "rows"
    return pt2(found)


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "checkpoint": (lambda: archive({"data.pkl": b".", "version": b"3"}), "a PyTorch checkpoint"),
    "AOTInductor": (lambda: archive({"data/aotinductor/model/x.so": b""}), "AOTInductor"),
    "old export": (lambda: archive({"serialized_exported_program.json": b"{}"}), "before 2.8"),
    "other zip": (lambda: archive({"config.json": b"{}"}), "perhaps of Keras"),
    "cut": (lambda: pt2(yolox())[:200], "not a PyTorch archive, or is damaged"),
    "no JSON": (lambda: archive({"models/model.json": b"{"}), "JSON is malformed"),
    "wrong types": (lambda: pt2({"graph_module": 5}), "JSON is malformed"),
    "deep": (lambda: archive({"models/model.json": b'{"x":' * 100_000}), "JSON is malformed"),
    "surrogate": (
        lambda: archive({"models/model.json": json.dumps(yolox()).replace("rows", "\\ud800").encode()}),
        "JSON is malformed",
    ),
    "no input": (lambda: _changed(input_specs=[]), "has no inputs"),
    "no output": (lambda: _changed(output_specs=[]), "has no outputs"),
    "huge side": (lambda: _sized(1, 3, 1 << 70, 4), "damaged"),
    "many sides": (lambda: _sized(*range(1, 40)), "39 dimensions"),
    "cycle": (_cycle, "cycle"),
    "bomb": (lambda: pt2("0" * (torch_file.MAX_JSON_BYTES + 1), compression=zipfile.ZIP_DEFLATED), "more than"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_archive_is_one_sentence(tmp_path: Path, name: str) -> None:
    """With its path, on one line, from the bounded process."""
    make, sentence = BAD[name]
    path = tmp_path / "m.pt2"
    path.write_bytes(make())
    with pytest.raises(UnreadableModel, match=re.escape(sentence)) as raised:
        inspect_file(path, allows_code=True)
    assert str(path) in str(raised.value)
    assert not re.search(r"\n|Error:|ended with 1", str(raised.value))


@pytest.mark.parametrize("metadata", [b"[", b"[1]", b"{" * 200_000, b"\xff"])
def test_malformed_metadata_of_an_archive_is_ignored(tmp_path: Path, metadata: bytes) -> None:
    """The file is inspected as one without any."""
    path = tmp_path / "m.pt"
    path.write_bytes(torchscript(**{"extra/config.txt": metadata}))
    assert inspect_file(path).facts.metadata == {}
