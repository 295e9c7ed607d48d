"""What golden.json keeps, the inputs that are made for it, and the comparison with what comes back."""

import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.models.check.compare import (
    classes_in,
    compare_outputs,
    compare_picture,
    expected_of_record,
    expected_of_tensor,
    picture_record,
    record_of_tensor,
    sample_indexes,
    tolerance_for,
)
from penstock.models.check.golden import (
    Golden,
    GoldenError,
    InputPattern,
    OutputRecord,
    PictureRecord,
    PictureTolerance,
    SeenClass,
    TensorRecord,
    Tolerance,
    generate_input,
    pattern_for,
    read_golden,
    write_golden,
)
from penstock.protocol.engine import TensorSpec
from penstock.protocol.inference import Array, Datatype, Tensor, tensor_from_bytes, tensor_from_numpy
from penstock.protocol.vision_results import Classes, Detections

RIGHT = np.random.default_rng(7).normal(0, 2, (1, 40, 9)).astype(np.float32)


def spoilt(index: tuple[int, ...], value: float) -> Array:
    array = RIGHT.copy()
    array[index] = value
    return array


def problem_with(array: Array, name: str = "y", *, tensor: Tensor | None = None) -> tuple[str, str]:
    """What is said of it against the recorded sample, and against the whole reference."""
    right = tensor_from_numpy("y", RIGHT)
    tolerance = tolerance_for(right)
    expectations = (expected_of_record(record_of_tensor(right, tolerance)), expected_of_tensor(right, tolerance))
    got = tensor or tensor_from_numpy(name, array)
    recorded, whole = (compare_outputs([expected], [got])[0].problem for expected in expectations)
    return recorded, whole


def plain_pattern(name: str, count: int) -> list[int]:
    """The pattern's numbers in plain Python: a Weyl sequence and the finaliser of splitmix32."""
    numbers = []
    for place in range(1, count + 1):
        z = (zlib.crc32(name.encode()) + place * 0x9E3779B9) % 2**32
        z = (z ^ (z >> 16)) * 0x21F0AAAD % 2**32
        z = (z ^ (z >> 15)) * 0x735A2D97 % 2**32
        numbers.append(z ^ (z >> 15))
    return numbers


@pytest.mark.parametrize(
    ("datatype", "of_number"),
    [
        (Datatype.FP64, lambda z: z / 2**32),
        (Datatype.FP32, lambda z: float(np.float32(z / 2**32))),
        (Datatype.FP16, lambda z: float(np.float16(z / 2**32))),
        (Datatype.UINT8, lambda z: z >> 24),
        (Datatype.INT8, lambda z: (z >> 24) - 128),
        (Datatype.INT64, lambda z: z >> 31),
        (Datatype.BOOL, lambda z: z >> 31 == 1),
        (Datatype.BYTES, lambda z: b"%d" % z),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_made_input_is_the_same_everywhere(datatype: Datatype, of_number: Callable[[int], object]) -> None:
    """A golden answer is worth nothing where the question is another: the numbers are plain integer arithmetic's."""
    tensor = generate_input(pattern_for(TensorSpec("x", datatype, (-1, 3, 5)), {}))
    assert (tensor.datatype, tensor.shape) == (datatype, (1, 3, 5))
    assert tensor.to_numpy().ravel().tolist() == [of_number(z) for z in plain_pattern("x", 15)]


def test_made_input_of_bf16_is_its_float_cut_off() -> None:
    """The upper half of the FP32, whatever numpy has no type for."""
    halves, floats = (
        generate_input(InputPattern("x", datatype, (9,), 1.0, 2.0)) for datatype in (Datatype.BF16, Datatype.FP32)
    )
    assert bytes(halves.data) == b"".join(bytes(floats.data[place + 2 : place + 4]) for place in range(0, 36, 4))


def test_made_input_fills_its_range_and_differs_by_name() -> None:
    """Numbers all over [low, high), and two inputs of one model are not each other's copy."""
    array, other = (
        generate_input(InputPattern(name, Datatype.FP32, (64, 64), -2.0, 6.0)).to_numpy() for name in ("a", "b")
    )
    assert -2 <= array.min() < -1.9
    assert 5.9 < array.max() <= 6
    assert abs(array.mean() - 2) < 0.1
    assert abs(np.corrcoef(array.ravel(), other.ravel())[0, 1]) < 0.05


@pytest.mark.parametrize("shape", [(1, -3), (1 << 13, 1 << 14), (10**30,)])
def test_made_input_of_an_absurd_shape_is_refused(shape: tuple[int, ...]) -> None:
    """A golden.json edited wrongly, or --shape, does not take the machine's memory."""
    with pytest.raises(GoldenError, match=r"is not made here: give sizes of 0 and more, at most 67,108,864 elements"):
        generate_input(InputPattern("x", Datatype.FP32, shape, 0.0, 1.0))


@pytest.mark.parametrize(
    ("declared", "given", "shape"),
    [
        ((-1, 3, 8, 8), {}, (1, 3, 8, 8)),
        ((3, 8), {}, (3, 8)),
        ((-1, -1, 3), {"x": (4, 5, 3)}, (4, 5, 3)),
        ((-1, -1, 3), {"y": (4, 5, 3)}, "--shape x:N,N,3"),
        ((-1,), {}, "--shape x:N"),
        ((-1, 3), {"x": (1, 4)}, r"--shape x is \[1, 4\]; the model declares \[-1, 3\]"),
        ((-1, 3), {"x": (1, 3, 3)}, "the model declares"),
    ],
)
def test_shape_of_a_made_input_is_the_models_or_the_given_one(
    declared: tuple[int, ...], given: dict[str, tuple[int, ...]], shape: tuple[int, ...] | str
) -> None:
    """One row where only the batch varies; anything else that varies is asked for, never guessed."""
    spec = TensorSpec("x", Datatype.FP32, declared)
    if isinstance(shape, str):
        with pytest.raises(GoldenError, match=shape):
            pattern_for(spec, given)
    else:
        assert pattern_for(spec, given).shape == shape


def test_answer_that_is_right_is_said_to_be(tmp_path: Path) -> None:
    """Itself, and itself with another kernel's rounding."""
    rounding = np.random.default_rng(1).uniform(-2e-4, 2e-4, RIGHT.shape).astype(np.float32)
    for array in (RIGHT, RIGHT + rounding, RIGHT * np.float32(1.0003)):
        assert problem_with(array) == ("", "")


@pytest.mark.parametrize(
    ("array", "recorded", "whole"),
    [
        (
            spoilt((0, 0, 0), 3.5),
            "differs at [0, 0, 0]: got 3.5, expected 0.002",
            "3.5 apart where 0.0018 is allowed (1 of 360 values differ)",
        ),
        (spoilt((0, 39, 8), np.nan), "at [0, 39, 8]: got nan, expected", "at [0, 39, 8]: got nan"),
        (
            spoilt((0, 20, 1), np.inf),
            "1 of 360 values are not finite, the first at [0, 20, 1]; expected 0",
            "at [0, 20, 1]: got inf",
        ),
        (spoilt((0, 20, 1), 100.0), "its mean is", "at [0, 20, 1]: got 100, expected"),
        (RIGHT * np.float32(1.1), "apart where ", "apart where "),
        (RIGHT[:, ::-1], "apart where ", "apart where "),
        (np.zeros_like(RIGHT), "apart where ", "apart where "),
        (RIGHT[:, :, :8], "has shape [1, 40, 8]; expected [1, 40, 9]", "has shape [1, 40, 8]"),
        (RIGHT.astype(np.float64), "is FP64; expected FP32", "is FP64; expected FP32"),
    ],
    ids=["one value", "nan", "inf between", "mean", "scale", "order", "zeros", "shape", "datatype"],
)
def test_wrong_output_is_located(array: Array, recorded: str, whole: str) -> None:
    """The message has the worst element with both values, or the statistic that differs."""
    of_sample, of_all = problem_with(array)
    assert recorded in of_sample
    assert whole in of_all


def test_answer_that_is_missing_or_truncated_is_said() -> None:
    """An output under another name, and one whose bytes do not fill its shape."""
    assert problem_with(RIGHT, "z")[0] == "is not among the outputs that came ('z')"
    short = Tensor("y", Datatype.FP32, RIGHT.shape, memoryview(RIGHT.tobytes()[:-4]))
    assert "is truncated or damaged: tensor 'y' has 1436 bytes" in problem_with(RIGHT, tensor=short)[0]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (np.array([1, 2, 2**62 + 1]), np.array([1, 2, 2**62])),
        (np.array([1, 2, 255], np.uint8), np.array([1, 2, 254], np.uint8)),
        (np.array([True, False]), np.array([True, True])),
        (np.array([b"cat", b"d\xffg"], object), np.array([b"cat", b"dog"], object)),
        (np.array([1.0, np.nan]), np.array([1.0, 2.0])),
        (np.zeros(3, np.float32), np.array([0, 0, 1e-6], np.float32)),
    ],
    ids=["int64", "uint8", "bool", "bytes", "no number", "nothing but zeros"],
)
def test_answer_of_another_kind_must_be_equal(right: Array, wrong: Array, tmp_path: Path) -> None:
    """Classes, masks, texts and places without a number: equal through the file and back, and no less."""
    tensor = tensor_from_numpy("y", right)
    record = record_of_tensor(tensor, tolerance_for(tensor))
    write_golden(tmp_path, Golden("x", "1/model.onnx", "0" * 64, TensorRecord((), (record,))))
    golden = read_golden(tmp_path)
    assert golden is not None
    assert golden.tensors is not None
    expected = expected_of_record(golden.tensors.outputs[0])
    assert compare_outputs([expected], [tensor])[0].problem == ""
    assert compare_outputs([expected], [tensor_from_numpy("y", wrong)])[0].problem != ""


def test_answer_without_elements_is_compared_by_its_shape() -> None:
    """A detector that found nothing answers [0, 4]: equal to itself, another for one box."""
    nothing = tensor_from_numpy("boxes", np.zeros((0, 4), np.float32))
    expected = expected_of_record(record_of_tensor(nothing, tolerance_for(nothing)))
    assert compare_outputs([expected], [nothing])[0].problem == ""
    one = tensor_from_numpy("boxes", np.zeros((1, 4), np.float32))
    assert compare_outputs([expected], [one])[0].problem == "has shape [1, 4]; expected [0, 4]"


def test_tolerance_widens_by_what_two_ways_differ_and_no_further() -> None:
    """INT8 kernels differ by steps; but a way that is wrong on this machine must not make everything right."""
    right = tensor_from_numpy("y", RIGHT)
    narrow = tolerance_for(right).absolute
    assert narrow == pytest.approx(0.002, rel=0.1)
    reduced = tolerance_for(right, is_reduced=True)
    assert (reduced.relative, reduced.absolute) == (0.02, pytest.approx(20 * narrow, rel=0.01))
    stepped = tolerance_for(right, tensor_from_numpy("y", RIGHT + np.float32(0.01))).absolute
    assert stepped == pytest.approx(0.08, rel=0.1)
    assert tolerance_for(right, tensor_from_numpy("y", RIGHT + np.float32(50))).absolute == pytest.approx(0.2, rel=0.1)
    whole = tensor_from_numpy("y", np.array([1, 200], np.uint8))
    assert tolerance_for(whole) == Tolerance()
    assert tolerance_for(whole, tensor_from_numpy("y", np.array([1, 201], np.uint8))).absolute == 8.0
    assert tolerance_for(tensor_from_bytes("y", [b"x"])) == Tolerance()


@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65, 360, 41_140])
def test_sample_spreads_from_the_first_to_the_last_element(count: int) -> None:
    """At most 64 places, each once, the two ends among them."""
    places = sample_indexes(count).tolist()
    assert len(set(places)) == len(places) == min(count, 64)
    assert places == sorted(places)
    assert count == 0 or (places[0], places[-1]) == (0, count - 1)


def test_golden_file_is_read_as_it_was_written_and_never_overwritten(tmp_path: Path) -> None:
    """Every member survives; a second recording is refused and leaves the first."""
    record = record_of_tensor(tensor_from_numpy("y", RIGHT), Tolerance(0.5, 0.25))
    picture = PictureRecord("1" * 64, (SeenClass(3, 0.5),), PictureTolerance(0.1, 0.9, 0.2))
    inputs = (InputPattern("x", Datatype.FP32, (1, 3), 0.0, 1.0),)
    golden = Golden("ONNX Runtime 1", "1/model.onnx", "0" * 64, TensorRecord(inputs, (record,)), picture)
    path = write_golden(tmp_path, golden)
    assert read_golden(tmp_path) == golden
    with pytest.raises(GoldenError, match="is there already: remove it"):
        write_golden(tmp_path, golden)
    assert [item.name for item in tmp_path.iterdir()] == [path.name]
    assert max(len(line) for line in path.read_text().splitlines()) > 300, "a sample stands on one line"


@pytest.mark.parametrize("text", ["", "{", '{"file": 1}', '{"recorded_with": "x", "file": "", "sha256": "", "x": 1}'])
def test_golden_file_that_is_none_is_refused_with_its_path(tmp_path: Path, text: str) -> None:
    """The message for an invalid file names the file and the problem."""
    (tmp_path / "golden.json").write_text(text)
    with pytest.raises(GoldenError, match=r"golden\.json is none that .*: remove it and record it anew"):
        read_golden(tmp_path)


def test_golden_record_whose_sample_does_not_fit_is_refused() -> None:
    """A sample cut by hand would be compared with other places than it was taken from."""
    record = OutputRecord("y", Datatype.FP32, (4,), Tolerance(), 4, 0.0, 0.0, (0.0,))
    with pytest.raises(ValueError, match="1 values"):
        expected_of_record(record)


SEEN = Detections(
    np.array([[10, 10, 50, 90], [60, 10, 100, 90], [200, 0, 240, 80]], np.float32),
    np.array([0.9, 0.8, 0.655], np.float32),
    np.array([0, 0, 2]),
)


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({}, ""),
        ({"xyxy": SEEN.xyxy + np.float32(0.8)}, ""),
        ({"score": SEEN.score + np.float32(0.005)}, ""),
        ({"rows": [1, 0, 2]}, ""),
        ({"rows": [0, 1]}, ""),  # the third is as near to the threshold as a score may differ
        ({"rows": [0, 2]}, "class 0 at [60, 10, 100, 90], score 0.800, is not seen any more"),
        (
            {"xyxy": SEEN.xyxy + np.float32(20)},
            "is not seen any more (the nearest of its class is at [30, 30, 70, 110])",
        ),
        ({"score": SEEN.score - np.float32(0.1)}, "has score 0.800 now, 0.01 apart is allowed"),
        ({"class_id": np.array([1, 0, 2])}, "class 0 at [10, 10, 50, 90], score 0.900, is not seen any more"),
        ({"rows": [0, 1, 1]}, "class 0 at [60, 10, 100, 90], score 0.800, is seen now, and was not"),
    ],
)
def test_picture_is_seen_again_or_the_difference_is_reported(
    change: dict[str, Array | list[int]], reported: str
) -> None:
    """The same objects in any order, within tolerance, are equal; other objects are reported by class and box."""
    record = picture_record(classes_in(SEEN), sha256="0" * 64, threshold=0.65)
    rows = change.pop("rows", [0, 1, 2])
    now = Detections(
        np.asarray(change.get("xyxy", SEEN.xyxy), np.float32)[rows],
        np.asarray(change.get("score", SEEN.score), np.float32)[rows],
        np.asarray(change.get("class_id", SEEN.class_id), np.int64)[rows],
    )
    difference = compare_picture(record, classes_in(now))
    assert reported in difference
    assert bool(reported) == bool(difference)


def test_picture_of_classes_may_swap_its_last_and_nothing_else() -> None:
    """Which class is the fifth likeliest is chance where two are as likely; which is the first is not."""
    seen = Classes(np.array([0.6, 0.2, 0.1], np.float32), np.array([7, 3, 1]))
    record = picture_record(classes_in(seen), sha256="0" * 64, threshold=0.0)
    assert compare_picture(record, classes_in(Classes(seen.score, np.array([7, 3, 9])))) == ""
    assert "class 7, score 0.600, is not seen" in compare_picture(
        record, classes_in(Classes(seen.score, np.array([8, 3, 1])))
    )
