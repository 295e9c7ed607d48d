"""The torch backend's pure parts: its parameters, buckets, groups, and which memory is page-locked."""

import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest

from penstock.engines.torch_serving.config import (
    EngineSpec,
    Precision,
    bucket_for,
    default_buckets,
    engine_spec,
    thread_percentage,
)
from penstock.engines.torch_serving.instance import RunGroup, group_requests
from penstock.engines.torch_serving.parameters import TorchLoadError
from penstock.engines.torch_serving.picture_spec import PictureFit, PictureSpec
from penstock.engines.torch_serving.staging import Mapping, PinnedRegions, PitchedRows, shared_mappings
from tests.support.stack import CHECKOUT

REGION = "/dev/shm/triton_python_backend_shm_region_1"
ENCODED = {"image-decoder": "engine", "infer-dims": "3;224;160"}
ENCODED_INPUT = [{"name": "image", "data_type": "TYPE_STRING", "dims": [1]}]


def config(parameters: dict[str, str] | None = None, **changed: Any) -> dict[str, Any]:
    """What Triton hands over of a model of images."""
    model = {
        "name": "small",
        "max_batch_size": 8,
        "input": [{"name": "image", "data_type": "TYPE_FP32", "dims": [3, 32, 32]}],
        "output": [{"name": "logits", "data_type": "TYPE_FP32", "dims": [10]}],
    }
    values = {key: {"string_value": value} for key, value in (parameters or {}).items()}
    return model | {"parameters": values} | changed


def on_gpu(parameters: dict[str, str] | None = None, **changed: Any) -> EngineSpec:
    """The record of an instance on a GPU."""
    return engine_spec(config(parameters, **changed), is_gpu=True)


def test_spec_without_parameters_is_that_of_the_device() -> None:
    """On a GPU FP16 by CUDA graphs, channels last, six buckets; on a CPU FP32 and no graphs."""
    spec = on_gpu()
    assert (spec.precision, spec.has_cuda_graphs, spec.is_channels_last) == (Precision.FP16, True, True)
    assert spec.buckets == (1, 2, 3, 4, 6, 8)
    assert (spec.is_fused, spec.is_compiled, spec.file_name) == (True, False, "model.pt2")
    assert on_gpu({"compiler": "aot-inductor"}).is_compiled
    on_cpu = engine_spec(config(), is_gpu=False)
    assert (on_cpu.precision, on_cpu.has_cuda_graphs) == (Precision.FP32, False)


def test_spec_of_words_is_not_channels_last() -> None:
    """Only inputs of three dimensions beside the batch's are images."""
    words = [{"name": "words", "data_type": "TYPE_INT64", "dims": [25]}]
    assert not on_gpu(input=words).is_channels_last


def test_spec_of_free_dimensions_has_no_graphs() -> None:
    """A graph is of fixed shapes: a model that takes any runs eagerly."""
    words = [{"name": "words", "data_type": "TYPE_INT64", "dims": [-1]}]
    assert not on_gpu(input=words).has_cuda_graphs


@pytest.mark.parametrize(("said", "blocks"), [("", True), ("block", True), ("spin", False)])
def test_wait_is_asleep_unless_set_to_spin(said: str, blocks: bool) -> None:
    """An instance that spins takes a core while the GPU works, and other processes may share the cores."""
    assert on_gpu({"event-wait": said} if said else {}).waits_blocking is blocks


@pytest.mark.parametrize(
    ("own", "chosen", "percentage"),
    [
        ("", "", None),
        ("", "other=25 small=12", 12),
        ("", "other=25", None),
        ("50", "small=12", 50),
        ("", "small=x", None),
    ],
)
def test_threads_under_mps_are_the_models_own_setting_or_the_stacks(
    own: str, chosen: str, percentage: int | None
) -> None:
    """The stack names the models that it limits."""
    spec = on_gpu({"active-thread-percentage": own} if own else {})
    assert thread_percentage(spec, {"PENSTOCK_MPS_THREADS": chosen}) == percentage


@pytest.mark.parametrize(
    ("said", "buckets"), [("4;1;4", (1, 4, 8)), ("8", (8,)), (" 2 ; 8 ", (2, 8)), ("", (1, 2, 3, 4, 6, 8))]
)
def test_buckets_are_ascending_and_hold_the_largest_batch(said: str, buckets: tuple[int, ...]) -> None:
    """In any order and twice; max_batch_size is always one."""
    assert on_gpu({"batch-buckets": said}).buckets == buckets


def test_default_buckets_end_with_the_largest_batch() -> None:
    """Also where it is no power of two, and without a batch dimension."""
    assert default_buckets(47) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 47)
    assert default_buckets(0) == (1,)


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (2, 4), (4, 4), (5, 8), (8, 8)])
def test_bucket_is_the_smallest_that_holds_the_rows(rows: int, bucket: int) -> None:
    """One more row than a bucket takes the next."""
    assert bucket_for(rows, (1, 4, 8)) == bucket


def test_bucket_for_more_than_the_largest_is_an_error() -> None:
    """Triton never sends it; a caller that does gets an error."""
    with pytest.raises(ValueError, match="9 rows are more than the largest bucket, 8"):
        bucket_for(9, (1, 8))


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("precison", "precision"),
        ("presicion", "precision"),
        ("fuze", "fuse"),
        ("Batches_In_Flight", "batches-in-flight"),
        ("batch_buckets", "batch-buckets"),
        ("cuda-graph", "cuda-graphs"),
        ("active-thread-percent", "active-thread-percentage"),
    ],
)
def test_parameter_that_is_nearly_one_of_ours_is_refused(slip: str, meant: str) -> None:
    """It would be ignored, silently; parameters of others' are left alone."""
    with pytest.raises(TorchLoadError, match=f"^there is no parameter '{slip}': did you mean {meant}\\?$"):
        on_gpu({slip: "1"})
    others = (
        "labels",
        "batch_owner",
        "infer-width",
        "weights",
        "max-side",
        "network-type",
        "model-color-format",
        "foo",
    )
    assert on_gpu(dict.fromkeys(others, "gateway"))


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"precision": "int4"}, "parameter precision is 'int4': say one of fp16, bf16, fp32"),
        ({"cuda-graphs": "maybe"}, "parameter cuda-graphs is 'maybe': say 1 or 0"),
        ({"batch-buckets": "1;x"}, "parameter batch-buckets is '1;x': say whole numbers above 0"),
        ({"batch-buckets": "9" * 5000}, "say whole numbers above 0"),
        ({"active-thread-percentage": "9" * 5000}, "say a whole number from 1 to 100"),
        ({"batch-buckets": "16"}, "16 is more than max_batch_size 8"),
        ({"fuse": "kernel"}, "parameter fuse is 'kernel': say 1 or 0"),
        ({"compiler": "tvm"}, "parameter compiler is 'tvm': say one of none, aot-inductor"),
        ({"compiler": "aot-inductor", "fuse": "0"}, "parameter compiler is 'aot-inductor', and fuse is 0"),
        ({"active-thread-percentage": "0"}, "is '0': say a whole number from 1 to 100"),
        ({"active-thread-percentage": "half"}, "is 'half': say a whole number from 1 to 100"),
        ({"batches-in-flight": "5"}, "parameter batches-in-flight is '5': say one of 1, 2, 3, 4"),
        ({"program-process": "none"}, "parameter program-process is 'none': say one of own, shared"),
        ({"program-process": "shared", "batches-in-flight": "2"}, "not possible if batches-in-flight is more than 1"),
        ({"image-decoder": "magic"}, "parameter image-decoder is 'magic': say gateway or engine"),
        ({"image-decoder": "engine"}, "needs exactly one input, of TYPE_STRING"),
    ],
)
def test_parameter_that_means_nothing_is_refused(parameters: dict[str, str], sentence: str) -> None:
    """With its value, and what may be said instead."""
    with pytest.raises(TorchLoadError, match=sentence):
        on_gpu(parameters)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"input": []}, "names no input"),
        ({"output": []}, "names no output"),
        ({"input": ENCODED_INPUT}, "say the parameter image-decoder: engine"),
        ({"sequence_batching": {"max_sequence_idle_microseconds": 1}}, "does not have sequence_batching"),
        ({"model_transaction_policy": {"decoupled": True}}, "does not have the decoupled transaction policy"),
    ],
)
def test_configuration_that_cannot_be_served_is_refused(changed: dict[str, Any], sentence: str) -> None:
    """In one sentence, when it is loaded."""
    with pytest.raises(TorchLoadError, match=sentence):
        on_gpu(**changed)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"max_batch_size": 0}, "max_batch_size is 0"),
        ({"input": [{"name": "x", "data_type": "TYPE_BF16", "dims": [3]}]}, "'x' is BF16"),
        ({"output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}]}, "'y' has variable dims"),
    ],
)
def test_model_whose_program_cannot_be_shared_is_refused(changed: dict[str, Any], sentence: str) -> None:
    """Its tensors must have a fixed place in shared memory."""
    with pytest.raises(TorchLoadError, match=f"program-process is 'shared', which is not possible if {sentence}"):
        on_gpu({"program-process": "shared"}, **changed)


def test_shared_program_spins_by_default() -> None:
    """It is one process for all instances: one core, not one an instance."""
    assert not on_gpu({"program-process": "shared"}).waits_blocking
    assert on_gpu({"program-process": "shared", "event-wait": "block"}).waits_blocking
    assert on_gpu().waits_blocking


def test_spec_of_encoded_pictures_has_the_networks_own_input() -> None:
    """The wire carries strings, the program floats; nvinfer's words become the record."""
    words = {"net-scale-factor": "0.5", "offsets": "1;2;3", "model-color-format": "BGR", "resize-shorter-side": "256"}
    spec = on_gpu(ENCODED | words, input=ENCODED_INPUT)
    assert (spec.inputs[0].data_type, spec.inputs[0].dims) == ("FP32", (3, 224, 160))
    assert spec.pictures == PictureSpec(160, 224, "BGR", PictureFit.CROP, 256, 0.5, (1.0, 2.0, 3.0), (1.0, 1.0, 1.0))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"infer-dims": "224;224"}, "parameter infer-dims is '224;224': say the network's channels, height and width"),
        ({"infer-dims": "1;224;160"}, "parameter infer-dims"),
        *(({"infer-dims": f"3;{side};160"}, "parameter infer-dims") for side in ("\u00b2", "9" * 5000, "16385", "0")),
        ({"resize-shorter-side": "\u00b2"}, "say a number from 224 to 896"),
        ({"offsets": "1;2"}, "parameter offsets is '1;2': say 3 numbers"),
        ({"scaling-filter": "area"}, "the engine resizes by bilinear alone"),
        ({"resize-shorter-side": "100"}, "say a number from 224 to 896"),
        ({"resize-shorter-side": "256", "maintain-aspect-ratio": "1"}, "does not go with maintain-aspect-ratio"),
    ],
)
def test_word_about_encoded_pictures_that_means_nothing_is_refused(words: dict[str, str], sentence: str) -> None:
    """With its value, and what may be said instead."""
    with pytest.raises(TorchLoadError, match=sentence):
        on_gpu(ENCODED | words, input=ENCODED_INPUT)


def test_requests_of_one_shape_share_a_run_up_to_the_largest_batch() -> None:
    """In their order; what no longer fits begins another."""
    shapes = [((3, 5),), ((2, 5),), ((4, 5),), ((1, 5),)]
    assert group_requests(shapes, 8) == [RunGroup((0, 1), (3, 2)), RunGroup((2, 3), (4, 1))]
    assert group_requests([((9, 5),), ((1, 5),)], 8) == [RunGroup((0,), (9,)), RunGroup((1,), (1,))]


def test_requests_of_unlike_shapes_run_apart() -> None:
    """All dimensions but the first must agree."""
    assert group_requests([((1, 5),), ((1, 6),), ((2, 5),)], 8) == [RunGroup((0, 2), (1, 2)), RunGroup((1,), (1,))]


def test_requests_without_a_batch_dimension_run_alone() -> None:
    """Each is one row, whatever its shape."""
    assert group_requests([((5,),), ((5,),)], 0) == [RunGroup((0,), (1,)), RunGroup((1,), (1,))]


def lines(*regions: tuple[int, int, str], rights: str = "rw-s") -> list[str]:
    """As /proc/PID/maps has them."""
    return [f"{begin:x}-{end:x} {rights} 00000000 00:19 77    {path}" for begin, end, path in regions]


def test_shared_mappings_are_those_of_dev_shm_that_may_be_written() -> None:
    """Libraries, anonymous memory and what may only be read are none."""
    others = ["7f00-7f10 r-xp 00000000 08:01 12 /usr/lib/libc.so.6", "7f20-7f30 rw-p 00000000 00:00 0"]
    maps = [*others, *lines((0x1000, 0x2000, "/dev/shm/b"), rights="r--s"), *lines((0x5000, 0x6000, REGION))]
    assert shared_mappings(maps) == [Mapping(0x5000, 0x6000, REGION)]


class Driver:
    """Counts the regions that it page-locks."""

    def __init__(self, *maps: list[str], refuses: bool = False) -> None:
        self.locked: list[tuple[int, int]] = []
        self.asked, self.read = 0, 0
        self._maps, self._refuses = list(maps), refuses

    def lock(self, address: int, size: int) -> bool:
        self.asked += 1
        if self._refuses:
            return False
        self.locked.append((address, size))
        return True

    def unlock(self, address: int, size: int) -> None:
        self.locked.remove((address, size))

    def maps(self) -> Iterable[str]:
        self.read += 1
        return self._maps[min(self.read, len(self._maps)) - 1]


def test_region_is_page_locked_once_however_many_tensors_lie_in_it() -> None:
    """The maps are read for the first of them only."""
    driver = Driver(lines((0x1000, 0x9000, REGION)))
    regions = PinnedRegions(driver.lock, driver.unlock, driver.maps)
    assert [regions.pin(address) for address in (0x1000, 0x5000, 0x8FFF)] == [True, True, True]
    assert (driver.locked, driver.read) == ([(0x1000, 0x8000)], 1)


def test_region_that_has_grown_is_page_locked_anew_and_its_old_mapping_no_more() -> None:
    """Triton's backend maps it again elsewhere: the same pages need not be locked twice."""
    first = lines((0x1000, 0x2000, REGION))
    driver = Driver(first, [*first, *lines((0x10000, 0x14000, REGION))])
    regions = PinnedRegions(driver.lock, driver.unlock, driver.maps)
    assert regions.pin(0x1800)
    assert regions.pin(0x13000)
    assert driver.locked == [(0x10000, 0x4000)]


def test_region_that_the_driver_refuses_is_not_asked_for_again() -> None:
    """Copies from it are slower, and right."""
    driver = Driver(lines((0x1000, 0x2000, REGION)), refuses=True)
    regions = PinnedRegions(driver.lock, driver.unlock, driver.maps)
    assert [regions.pin(0x1000), regions.pin(0x1001)] == [False, False]
    assert driver.asked == 1


def gathered(driver: Driver, addresses: list[int], width: int = 0x100) -> list[PitchedRows]:
    """The copies of one gather of such blocks; empty if they are to be copied one by one."""
    copies: list[PitchedRows] = []

    def copy(target: int, rows: PitchedRows, stream: int) -> bool:
        assert (target, stream) == (7 + width * sum(before.count for before in copies), 8)
        copies.append(rows)
        return True

    regions = PinnedRegions(driver.lock, driver.unlock, driver.maps, copy=copy)
    assert regions.gather(7, addresses, width, 8) is bool(copies)
    return copies


def test_tensors_at_equal_distances_in_one_region_are_copied_at_once() -> None:
    """As Triton's backend lays a batch out: between them stand its own records."""
    region = Driver(lines((0x1000, 0x9000, REGION)))
    assert gathered(region, [0x1100, 0x1220, 0x1340]) == [PitchedRows(0x1100, 0x120, 0x100, 3)]
    assert gathered(region, [0x1100, 0x1200]) == [PitchedRows(0x1100, 0x100, 0x100, 2)]


@pytest.mark.parametrize(
    ("addresses", "counts"),
    [
        ([0x1100, 0x1220, 0x1350], [2, 1]),
        ([0x1220, 0x1100], [1, 1]),
        ([0x1100, 0x1180], [1, 1]),
        ([0x1100, 0x1100, 0x1200], [1, 2]),
        ([0x1100, 0x9100, 0x9200], [1, 2]),
    ],
)
def test_tensors_that_lie_otherwise_are_copied_in_several_parts(addresses: list[int], counts: list[int]) -> None:
    """Unequal distances, descending, overlapping, one tensor twice, two regions: one after the other, without gaps."""
    maps = lines((0x1000, 0x9000, REGION), (0x9000, 0xA000, f"{REGION}_2"))
    copies = gathered(Driver(maps), addresses)
    assert [copy.count for copy in copies] == counts
    assert [copy.address + row * copy.pitch for copy in copies for row in range(copy.count)] == addresses


def test_tensors_outside_of_page_locked_memory_are_not_gathered() -> None:
    """If one tensor is outside of it, none is copied together."""
    maps = lines((0x1000, 0x9000, REGION))
    assert gathered(Driver(maps, refuses=True), [0x1100, 0x1220]) == []
    assert gathered(Driver(maps), [0x1100, 0xA00]) == []


def test_memory_in_no_shared_region_is_left_alone() -> None:
    """A process's own memory is not page-locked."""
    driver = Driver(lines((0x1000, 0x2000, REGION)))
    assert not PinnedRegions(driver.lock, driver.unlock, driver.maps).pin(0x9000)
    assert driver.locked == []


def test_addresses_outside_of_shared_memory_cost_one_look_at_the_mappings_a_pause() -> None:
    """Reading the mappings takes milliseconds, and a gateway's tensors may lie in its own memory."""
    driver = Driver(lines((0x1000, 0x2000, REGION)))
    regions = PinnedRegions(driver.lock, driver.unlock, driver.maps, pause_s=3600)
    assert [regions.pin(0x9000), regions.pin(0xA000)] == [False, False]
    assert driver.read == 1


def test_process_that_only_looks_at_a_configuration_does_not_import_torch() -> None:
    """Triton starts one for each model, and PyTorch takes seconds."""
    asked = "import sys, penstock.engines.torch_serving.instance as _; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], cwd=CHECKOUT, timeout=60, check=False).returncode == 0
