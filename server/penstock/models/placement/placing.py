"""Places a model that is being added: tries it where a GPU is, and writes the choice into its folder."""

from collections.abc import Callable, Sequence
from pathlib import Path

import onnxruntime as ort

from penstock.engines.config_pbtxt import read_proto
from penstock.engines.ort_probe import installed_packages
from penstock.engines.ort_serving.placement import Precision, has_nvidia_driver, why_no_cuda
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

BATCH_OWNER, BATCH_ROWS = "batch_owner", "max_batch_size"  # parameters of config.pbtxt
NO_CARD = "there is no NVIDIA GPU here"
Try = Callable[[Path, Sequence[ModelPlacement], Sequence[Path], int], list[PlacementTrial]]


def why_no_gpu() -> str:
    """Why no model of ONNX Runtime runs on a GPU here; empty if one can."""
    if not has_nvidia_driver():
        return NO_CARD
    return why_no_cuda(ort.get_available_providers(), installed_packages())


def place(
    folder: Path, wish: PlacementWish, *, pictures: Sequence[Path], rows: int, no_gpu: str, try_there: Try | None = None
) -> PlacementChoice | None:
    """Chooses where the model runs, and writes that into config.pbtxt and MODEL.md. None without a GPU and a wish.

    Where ONNX Runtime cannot use the GPU, the choice has the reason and nothing is written. folder: of the model,
    complete. rows: pictures a call on the CPU. no_gpu: of why_no_gpu. try_there: see try_placements. Blocks for the
    trial. Raises CannotPlace.
    """
    if why := unfulfillable(wish):
        raise CannotPlace(why)
    if no_gpu and wish in (PlacementWish(), PlacementWish(precision=Precision.FP32)):
        why = f"not tried on the GPU: {no_gpu}"
        return None if no_gpu == NO_CARD else PlacementChoice(device=Device.CPU, precision=Precision.FP32, why=why)
    if wish.device is Device.CPU:
        choice = PlacementChoice(device=Device.CPU, precision=Precision.FP32, why="runs on the CPU, as demanded")
    elif no_gpu:
        raise CannotPlace(f"{demanded(wish)} is not possible: {no_gpu}")
    else:
        choice = choose((try_there or _try)(folder, placements_to_try(wish), pictures, rows), wish)
    _write(folder, choice)
    return choice


def _try(
    folder: Path, placements: Sequence[ModelPlacement], pictures: Sequence[Path], rows: int
) -> list[PlacementTrial]:
    return try_placements(folder, placements, pictures=pictures, rows=rows)


def _write(folder: Path, choice: PlacementChoice) -> None:
    file = folder / "config.pbtxt"
    config = placed_config(read_proto(file), choice.placement)
    if choice.device is Device.CPU:
        del config.parameters[PRECISION]
    elif config.parameters[BATCH_OWNER].string_value == "gateway":
        config.parameters[BATCH_ROWS].string_value = str(choice.best_rows)
    if not choice.is_checked:
        config.parameters[CHECKS].string_value = "0"
    file.write_text(proto_text(config), encoding="utf-8")
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
    return "\n".join(["", "| tried | pictures/s by pictures per call | results by those of the CPU |", "|---|---|---|",
                      *rows, ""])  # fmt: skip
