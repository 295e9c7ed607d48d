"""What the trial of rows on the card decides by: which row, how much memory, which answers are the same."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from penstock.protocol.engine import TensorSpec
from penstock.protocol.inference import Datatype, Tensor, tensor_from_numpy
from penstock_video.infer.calls import refusal_of
from penstock_video.infer.gpu_trial import LEAST_BYTES, MOST_BYTES, difference, memory_for, row_of_noise, why_not
from penstock_video.infer.network import Network, network_from
from penstock_video.infer.options import EngineAddress
from penstock_video.sources.child_link import row_bytes_of
from tests.deepstream_pipeline.infer.fake_core import CLASSIFIER, classifier, one_box

LOCAL = EngineAddress(None, "http://127.0.0.1:8000", "127.0.0.1:8001")
PICTURE = np.linspace(-3, 100, 64, dtype=np.float32).reshape(1, 64)


def of(array: npt.ArrayLike, name: str = "y", dtype: npt.DTypeLike = np.float32) -> Tensor:
    return tensor_from_numpy(name, np.asarray(array, dtype))


def pixels(layout: str, shape: tuple[int, ...]) -> Network:
    parameters = CLASSIFIER | {"network-input-order": layout}
    inputs = (TensorSpec("x", Datatype.UINT8, shape),)
    return network_from(replace(classifier("m", 4), inputs=inputs, parameters=parameters))


@pytest.mark.parametrize(
    ("network", "shape"),
    [
        (network_from(classifier("m", 4)), (3, 64, 64)),
        (network_from(classifier("m", 0, (1, 3, 64, 64))), (3, 64, 64)),
        (pixels("0", (3, 40, 60)), (3, 40, 60)),
        (pixels("1", (40, 60, 3)), (40, 60, 3)),
        (network_from(one_box()), (256, 256, 3)),
        (pixels("0", (3, 48, -1)), (3, 48, 256)),
    ],
)
def test_row_of_noise_is_a_row_of_the_network_and_always_the_same(network: Network, shape: tuple[int, ...]) -> None:
    """Of its type, layout and size; a place read wrongly holds another."""
    row = row_of_noise(network)
    assert (row.shape, row.dtype, refusal_of(network, row)) == (shape, network.row_dtype, "")
    assert np.array_equal(row, row_of_noise(network))
    assert len(np.unique(row[0])) > 30


def test_rows_of_a_network_that_keeps_sizes_have_a_largest() -> None:
    """max-side, or its default, bounds a row after rounding to size-multiple."""
    line = network_from(replace(classifier("m", 4, (3, 48, -1)), parameters=CLASSIFIER | {"max-side": "320"}))
    assert line.row_bytes == 3 * 48 * 320 * 4
    assert network_from(classifier("m", 4, (3, 48, -1))).row_bytes > 3 * 48 * 320 * 4
    multiple = CLASSIFIER | {"max-side": "100", "size-multiple": "32"}
    network = network_from(replace(classifier("m", 4, (3, -1, -1)), parameters=multiple))
    spec = network.prepare_spec
    most = max(row_bytes_of(100 + width, 100 + height, spec) for width in range(40) for height in range(40))
    assert most <= network.row_bytes


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ([of(PICTURE)], [of(PICTURE)], True),
        ([of(PICTURE)], [of(PICTURE + 0.9)], True),
        ([of(PICTURE)], [of(PICTURE + 1.1)], False),
        ([of(PICTURE)], [of(PICTURE.reshape(64, 1))], False),
        ([of(PICTURE)], [of(PICTURE, dtype=np.float16)], False),
        ([of([np.nan, np.inf, 1])], [of([np.nan, np.inf, 1])], True),
        ([of([np.nan, 1])], [of([1, 1])], False),
        ([of([np.inf, 1])], [of([-np.inf, 1])], False),
        ([of([0, 0])], [of([0, 0])], True),
        ([of([0, 0])], [of([0, 1e-3])], False),
        ([of(np.empty((0, 4)))], [of(np.empty((0, 4)))], True),
        ([of([7, 8], dtype=np.int64)], [of([7, 8], dtype=np.int64)], True),
        ([of([700, 800], dtype=np.int64)], [of([700, 801], dtype=np.int64)], False),
        ([of([1], "a"), of([2], "b")], [of([2], "b"), of([1], "a")], True),
        ([of([1], "a"), of([2], "b")], [of([1], "a")], False),
    ],
)
def test_answers_are_the_same_but_for_a_hundredth_of_the_largest_number(
    one: list[Tensor], other: list[Tensor], is_same: bool
) -> None:
    """Floats may be rounded otherwise in another batch; whole numbers, shapes and names may not differ."""
    assert (difference(one, other) == "") is is_same


@pytest.mark.parametrize(
    ("place", "word"),
    [
        (LOCAL, ""),
        (replace(LOCAL, grpc_address="localhost:8001"), ""),
        (replace(LOCAL, grpc_address="[::1]:8001"), ""),
        (replace(LOCAL, grpc_address="192.0.2.1:8001"), "the gateway at 192.0.2.1:8001 is on another host"),
        (replace(LOCAL, grpc_address="192.0.2.1:8001", run_dir=Path("/run")), ""),
    ],
)
def test_gateway_of_another_host_is_ruled_out(place: EngineAddress, word: str) -> None:
    """A stack of this host may listen at any address of it."""
    reason = why_not(place, network_from(classifier("m", 4)))
    assert reason.startswith(word) if word else not reason


def test_memory_has_room_for_several_of_the_largest_calls_and_is_bounded() -> None:
    """A card has other uses for it."""
    small, large = network_from(classifier("m", 4)), replace(network_from(classifier("m", 256)), row_bytes=3 << 20)
    assert (memory_for(small), memory_for(large)) == (LEAST_BYTES, MOST_BYTES)
    assert memory_for(replace(small, row_bytes=4 << 20)) == 16 * 4 * (4 << 20)
