"""Which folders are taken, which are refused, and which pictures are used."""

from pathlib import Path

import pytest

from penstock.models.optimize.source import (
    MOST_CALIBRATING,
    OptimizeError,
    SourceModel,
    engine_options,
    read_source,
    split_pictures,
)
from tests.models.optimize.conftest import RANDOM, write_model, write_pictures


def nothing() -> None:
    """Progress that is not shown."""


def test_read_source_takes_the_newest_version_and_the_engines_threads(tmp_path: Path) -> None:
    """Version 10 is newer than 9, and the session gets the threads that the config names."""
    folder = write_model(tmp_path, "small")
    for version in ("9", "10"):
        (folder / version).mkdir()
        (folder / version / "model.onnx").write_bytes((folder / "1" / "model.onnx").read_bytes())
    (folder / "99999999999999999999").mkdir()
    source = read_source(folder)
    assert source.path == folder / "10" / "model.onnx"
    assert engine_options(source).intra_op_num_threads == 1
    assert (source.batch_sizes, source.has_random_weights) == ((1, 8), False)


def test_read_source_sees_random_weights(tmp_path: Path) -> None:
    """By the parameter of config.pbtxt, not by the name."""
    assert read_source(write_model(tmp_path, "small", more=RANDOM)).has_random_weights


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (('backend: "onnxruntime"', 'backend: "python"'), "is of backend 'python': only models of backend onnxruntime"),
        (('key: "network-type"', 'key: "kind"'), "does not say how it sees pictures"),
        (("TYPE_FP32 dims: [ 3,", "TYPE_FP16 dims: [ 3,"), "is not a float32 model"),
        (('key: "net-scale-factor" value { string_value: "0.0078125"', 'key: "precision" value { string_value: "int8"'),
         "is not a float32 model: start from the float32 original"),
        (("max_batch_size: 16", "max_batch_size: x"), "config.pbtxt:4"),
    ],
)  # fmt: skip
def test_read_source_of_an_unsuitable_model_says_why(tmp_path: Path, change: tuple[str, str], sentence: str) -> None:
    """One sentence that names the model and the reason."""
    folder = write_model(tmp_path, "small")
    config = (folder / "config.pbtxt").read_text()
    assert change[0] in config
    (folder / "config.pbtxt").write_text(config.replace(*change))
    with pytest.raises(OptimizeError) as refused:
        read_source(folder)
    assert sentence in str(refused.value)


def test_read_source_without_a_file_says_where_it_is_missed(tmp_path: Path) -> None:
    """An empty version, and no version at all."""
    folder = write_model(tmp_path, "small")
    (folder / "1" / "model.onnx").unlink()
    with pytest.raises(OptimizeError, match=r"there is no file .*model\.onnx"):
        read_source(folder)
    (folder / "1").rmdir()
    with pytest.raises(OptimizeError, match="holds no numbered folder"):
        read_source(folder)


def test_split_pictures_keeps_every_second_to_judge(source: SourceModel, pictures: list[Path]) -> None:
    """No picture does both, and none is lost."""
    split = split_pictures(pictures, source, nothing)
    assert split.calibrating == tuple(pictures[::2])
    assert split.held_out == tuple(pictures[1::2])


def test_split_pictures_of_many_calibrates_with_a_few(source: SourceModel, tmp_path: Path) -> None:
    """Above twice the most, the others all judge."""
    paths = write_pictures(tmp_path / "many", 2 * MOST_CALIBRATING + 22)
    split = split_pictures(paths, source, nothing)
    assert len(split.calibrating) == 50  # every third of 150
    assert len(split.held_out) == 100


def test_split_pictures_leaves_out_what_cannot_be_read(source: SourceModel, pictures: list[Path]) -> None:
    """The broken one is named with the reason, the others go on."""
    pictures[3].write_bytes(b"\xff\xd8\xff rubbish")
    split = split_pictures(pictures, source, nothing)
    assert len(split.calibrating) + len(split.held_out) == 19
    assert split.unreadable[0].startswith("003.jpg: ")


def test_split_pictures_of_too_few_says_how_many_it_takes(source: SourceModel, pictures: list[Path]) -> None:
    """And names the first that could not be read, which may be the reason."""
    pictures[0].write_text("not a picture")
    with pytest.raises(OptimizeError, match=r"6 readable pictures are too few .*at least 8.*; 1 cannot be read.*000"):
        split_pictures(pictures[:7], source, nothing)
