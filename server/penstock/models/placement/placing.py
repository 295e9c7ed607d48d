"""Places a model that is being added: tries it where a GPU is, and writes the choice into its folder."""

from collections.abc import Callable, Sequence
from pathlib import Path

import onnxruntime as ort

from penstock.engines.config_pbtxt import read_proto
from penstock.engines.ort_probe import installed_packages
from penstock.engines.ort_serving.placement import Precision, has_nvidia_driver, why_no_cuda
from penstock.gateway.batching.options import MAX_BATCH_SIZE, MEASURED_ON, OWNER
from penstock.models.added_folder import proto_text
from penstock.models.placement.choice import (
    CannotPlace,
    Device,
    ModelPlacement,
    PlacementChoice,
    PlacementTrial,
    PlacementWish,
    choose,
    demanded,
    placements_to_try,
    unfulfillable,
)
from penstock.models.placement.placed_model import CHECKS, PRECISION, placed_config
from penstock.models.placement.trial import try_placements
from penstock.protocol.inference import BatchOwner

NO_CARD = "there is no NVIDIA GPU here"
Try = Callable[[Path, Sequence[ModelPlacement], Sequence[Path], int], list[PlacementTrial]]


def why_no_gpu() -> str:
    """Why no model of ONNX Runtime runs on a GPU here; empty if one can."""
    if not has_nvidia_driver():
        return NO_CARD
    return why_no_cuda(ort.get_available_providers(), installed_packages())


def why_not_here(wish: PlacementWish, no_gpu: str) -> str:
    """Why this machine cannot do what is demanded; empty if it can. no_gpu: of why_no_gpu."""
    if why := unfulfillable(wish):
        return why
    if not no_gpu or wish.device is Device.CPU or (wish.device is None and wish.precision in (None, Precision.FP32)):
        return ""
    return f"{demanded(wish)} is not possible: {no_gpu}; run this command on the GPU machine"


def place(
    folder: Path, wish: PlacementWish, *, pictures: Sequence[Path], rows: int, no_gpu: str, try_there: Try | None = None
) -> PlacementChoice:
    """Chooses where the model runs, and writes that into config.pbtxt and MODEL.md.

    Without a usable GPU and a wish, config.pbtxt stays as it is, so that the model uses a GPU of another machine.
    folder: of the model, complete. rows: pictures a call on the CPU. no_gpu: of why_no_gpu. try_there: see
    try_placements. Blocks for the trial. Raises CannotPlace.
    """
    if why := why_not_here(wish, no_gpu):
        raise CannotPlace(why)
    if wish.device is Device.CPU:
        choice = PlacementChoice(device=Device.CPU, precision=Precision.FP32, why="runs on the CPU, as demanded")
    elif no_gpu:
        why = _untried(no_gpu, rows)
        choice = PlacementChoice(device=Device.CPU, precision=Precision.FP32, why=why, best_rows=rows)
        _write_page(folder, choice)
        return choice
    else:
        choice = choose((try_there or _try)(folder, placements_to_try(wish), pictures, rows), wish)
    _write(folder, choice)
    return choice


def _untried(no_gpu: str, rows: int) -> str:
    per_call = "1 picture" if rows == 1 else f"{rows} pictures"
    return (
        f"runs on the CPU, {per_call} per call; a GPU was not tried: {no_gpu}. Run `penstock models add --replace` on "
        "the GPU machine: it chooses precision and batch size there"
    )


def _try(
    folder: Path, placements: Sequence[ModelPlacement], pictures: Sequence[Path], rows: int
) -> list[PlacementTrial]:
    return try_placements(folder, placements, pictures=pictures, rows=rows)


def _write(folder: Path, choice: PlacementChoice) -> None:
    file = folder / "config.pbtxt"
    config = placed_config(read_proto(file), choice.placement)
    if choice.device is Device.CPU:
        del config.parameters[PRECISION]
    elif config.parameters[OWNER].string_value == BatchOwner.GATEWAY:
        config.parameters[MAX_BATCH_SIZE].string_value = str(choice.best_rows)
        config.parameters.pop(MEASURED_ON, None)
    if not choice.is_checked:
        config.parameters[CHECKS].string_value = "0"
    file.write_text(proto_text(config), encoding="utf-8")
    _write_page(folder, choice)


def _write_page(folder: Path, choice: PlacementChoice) -> None:
    with (folder / "MODEL.md").open("a", encoding="utf-8") as page:
        page.write(f"\n## Where it runs\n\nIt {choice.why}.\n{_table(choice.trials)}")


def _table(trials: Sequence[PlacementTrial]) -> str:
    if not trials:
        return ""
    rows = [
        f"| {one.placement} | {one.problem or ', '.join(f'{rate:.0f}/s with {rows}' for rows, rate in one.rows_per_s)} "
        f"| {one.disagreement or one.agreement} |"
        for one in trials
    ]
    return "\n".join(["", "| tried | pictures/s by pictures per call | compared with the CPU |", "|---|---|---|",
                      *rows, ""])  # fmt: skip
