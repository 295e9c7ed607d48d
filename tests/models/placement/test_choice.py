"""Device and precision by what the trials measured."""

import pytest

from penstock.engines.ort_serving.placement import Precision
from penstock.models.placement.choice import (
    CannotPlace,
    Device,
    PlacementTrial,
    PlacementWish,
    choose,
    placements_to_try,
    unfulfillable,
)

FP32, TF32, FP16 = Precision.FP32, Precision.TF32, Precision.FP16
CPU = PlacementTrial(device=Device.CPU, precision=FP32, rows_per_s=((1, 100.0),), is_compared=True)
NO_CUDA = "onnxruntime-gpu is not installed here"


def gpu(rate: float, precision: Precision = FP32, **changes: object) -> PlacementTrial:
    """A trial on the GPU whose answers agree."""
    usual: dict[str, object] = {"agreement": "9 boxes overlap at least 0.994", "is_compared": True}
    given = {"rows_per_s": ((1, rate),), **usual, **changes}
    return PlacementTrial(device=Device.GPU, precision=precision, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("trials", "chosen", "why"),
    [
        ([gpu(300), gpu(910, FP16)], (Device.GPU, FP16),
         "runs on the GPU in FP16: 9.1 times the CPU's rate; 9 boxes overlap at least 0.994"),
        ([gpu(300), gpu(310, FP16)], (Device.GPU, FP32),
         "runs on the GPU in FP32: 3.0 times the CPU's rate; 9 boxes overlap at least 0.994"),
        ([gpu(300), gpu(910, FP16, disagreement="2 of 9 boxes are missing or new")], (Device.GPU, FP32),
         "runs on the GPU in FP32: 3.0 times the CPU's rate; 9 boxes overlap at least 0.994; not in FP16, because 2 of "
         "9 boxes are missing or new"),
        ([gpu(300), gpu(910, FP16, is_compared=False, agreement="")], (Device.GPU, FP32),
         "runs on the GPU in FP32: 3.0 times the CPU's rate; 9 boxes overlap at least 0.994; not in FP16, because the "
         "trial pictures gave no result to compare"),
        ([gpu(300, is_compared=False, agreement="")], (Device.GPU, FP32),
         "runs on the GPU in FP32: 3.0 times the CPU's rate"),
        ([gpu(80), gpu(105, FP16)], (Device.CPU, FP32),
         "runs on the CPU: the GPU in FP16: 1.1 times the CPU's rate; the GPU in FP32: 0.8 times the CPU's rate"),
        ([gpu(0, problem=NO_CUDA, rows_per_s=()), gpu(0, FP16, problem=NO_CUDA, rows_per_s=())], (Device.CPU, FP32),
         f"runs on the CPU: {NO_CUDA}"),
        ([], (Device.CPU, FP32), "runs on the CPU"),
    ],
    ids=["fp16", "fp16-gains-little", "fp16-differs", "nothing-found", "no-result", "slow-gpu", "no-cuda", "cpu"],
)  # fmt: skip
def test_fastest_placement_with_the_same_answers_is_chosen(
    trials: list[PlacementTrial], chosen: tuple[Device, Precision], why: str
) -> None:
    """The GPU and FP16 must each be faster by a tenth and agree with the CPU, and the sentence says why."""
    choice = choose([CPU, *trials])
    assert (choice.device, choice.precision) == chosen
    assert choice.why == why


def test_demanded_precision_goes_before_agreement() -> None:
    """With --precision fp16 a disagreement is said and FP16 is used."""
    choice = choose([CPU, gpu(910, FP16, disagreement="boxes overlap 0.9")], PlacementWish(precision=FP16))
    assert choice.placement.precision is FP16
    assert choice.why.endswith("as demanded, although boxes overlap 0.9")


def test_demanded_gpu_goes_before_speed() -> None:
    """With --on gpu a slow GPU is used, in the faster precision that agrees."""
    choice = choose([CPU, gpu(50), gpu(90, FP16)], PlacementWish(Device.GPU))
    assert (choice.device, choice.precision) == (Device.GPU, FP16)


def test_demand_that_did_not_run_is_refused_with_the_reason() -> None:
    """A demanded GPU that does not run the model ends the command; the CPU is not used in its place."""
    with pytest.raises(CannotPlace, match=f"the GPU in FP32 does not run it: {NO_CUDA}"):
        choose([CPU, gpu(0, problem=NO_CUDA)], PlacementWish(Device.GPU))
    failed = PlacementTrial(device=Device.CPU, precision=FP32, problem="it needs more memory")
    with pytest.raises(CannotPlace, match="--on gpu was not tried: it needs more memory"):
        choose([failed], PlacementWish(Device.GPU))


@pytest.mark.parametrize(
    ("rates", "rows"),
    [(((1, 100.0), (2, 190.0), (4, 300.0), (8, 310.0)), 4), (((1, 100.0), (2, 105.0), (4, 900.0)), 1), ((), 1)],
)
def test_larger_batch_must_be_faster_by_a_tenth(rates: tuple[tuple[int, float], ...], rows: int) -> None:
    """The best batch size is the last one that gained a tenth over the one before."""
    trial = gpu(1, rows_per_s=rates)
    assert (trial.best_rows, trial.rate) == (rows, dict(rates).get(rows, 0.0))


def test_placements_to_try_follow_the_wish() -> None:
    """FP32 and FP16 are tried by default, TF32 only if it is demanded, and nothing for --on cpu."""
    assert [one.precision for one in placements_to_try(PlacementWish())] == [FP32, FP16]
    assert [one.precision for one in placements_to_try(PlacementWish(precision=TF32))] == [TF32]
    assert placements_to_try(PlacementWish(Device.CPU)) == ()
    assert unfulfillable(PlacementWish(Device.CPU, FP16)) == "the CPU computes in fp32: --precision fp16 needs --on gpu"
    assert not unfulfillable(PlacementWish(Device.CPU, FP32))
    assert "penstock models optimize makes INT8 ones" in unfulfillable(PlacementWish(precision=Precision.INT8))
