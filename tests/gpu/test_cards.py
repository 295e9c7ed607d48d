"""Which cards serve, by --gpus and CUDA_VISIBLE_DEVICES."""

import json
from pathlib import Path

import pytest

from penstock.gpu.cards import Card, GpusRefused, checked_gpus, choose_cards
from penstock.gpu.nvml import GpuDevice, NvmlOutcome, NvmlReading, read_cards

FAKE_NVML = Path(__file__).parent / "fake_nvml"
THREE = NvmlReading(
    NvmlOutcome.ANSWERED,
    cards=tuple(
        GpuDevice(index, "H200", (9, 0), 1 << 37, 0, uuid=f"GPU-{letter}{index}", sm_count=132)
        for index, letter in enumerate("abb")
    ),
)


@pytest.mark.parametrize(
    ("gpus", "visible", "chosen"),
    [
        *(("all", None, ["GPU 0", "GPU 1", "GPU 2"]), ("all", "2,0", ["GPU 2", "GPU 0"]), ("all", "", [])),
        *(("all", "1,7,0", ["GPU 1"]), ("all", "GPU-a,GPU-b2", ["GPU 0", "GPU 2"]), ("all", "GPU-b", [])),
        *(("all", "1,1,0", ["GPU 1"]), ("all", "0,GPU-a0,1", ["GPU 0"]), ("all", "MIG-1,MIG-1", ["MIG-1"])),
        *(("all", "\u0660,1", []), ("all", "MIG-\x1b[31m", []), ("all", "-1", []), ("all", "all", [])),
        *(("2,0", None, ["GPU 2", "GPU 0"]), ("GPU-b1", None, ["GPU 1"]), ("1", "0,1", ["GPU 1"])),
        *(("all", "MIG-1,MIG-2", ["MIG-1", "MIG-2"]), ("MIG-1", None, ["MIG-1"])),
    ],
)
def test_cards_are_chosen_by_number_and_uuid_among_the_visible_ones(
    gpus: str, visible: str | None, chosen: list[str]
) -> None:
    """In the given order; CUDA stops at the first entry that it does not know or that repeats a card."""
    assert [card.label for card in choose_cards(gpus, THREE, visible)] == chosen


@pytest.mark.parametrize(
    ("gpus", "visible", "reason"),
    [
        ("3", None, r"has '3', and this machine has the GPUs 0 \(GPU-a0\), 1 \(GPU-b1\), 2 \(GPU-b2\)"),
        ("GPU-b", None, "has 'GPU-b', and this machine has"),
        ("1", "0", "which CUDA_VISIBLE_DEVICES=0 hides"),
        ("0,GPU-a", None, "names a GPU twice"),
    ],
)
def test_cards_that_cannot_be_had_are_refused_in_a_sentence(gpus: str, visible: str | None, reason: str) -> None:
    """It names the entry and what there is."""
    with pytest.raises(GpusRefused, match=reason):
        choose_cards(gpus, THREE, visible)


def test_machine_without_a_card_refuses_a_card_and_has_none() -> None:
    """The reason is NVML's."""
    none = NvmlReading(NvmlOutcome.NO_LIBRARY)
    assert choose_cards("all", none, None) == ()
    with pytest.raises(GpusRefused, match=r"no NVIDIA GPU is here \(libnvidia-ml"):
        choose_cards("0", none, None)


@pytest.mark.parametrize(
    "text",
    [
        *("", "0,", "first", "0,0", "all,0", "-1", "GPU-", "MIG-", "gpu-6f", "0;1", "9" * 5, "\u0663", "\uff10"),
        *("GPU-6f\n0", "GPU-6f\x1b[31m", "MIG-6f\0", "MIG-../../etc", "GPU-6f=x", "GPU-" + "a" * 97),
    ],
)
def test_setting_that_names_no_cards_is_refused(text: str) -> None:
    """At start, before NVML is read: an entry gets into file names, variables and logs."""
    with pytest.raises(ValueError, match=r"it takes all, or numbers|names a GPU twice"):
        checked_gpus(text)
    assert checked_gpus(" 0, GPU-6f ") == "0,GPU-6f"
    assert checked_gpus("MIG-GPU-6f/1/0") == "MIG-GPU-6f/1/0"


def test_setting_that_names_thousands_of_cards_is_refused() -> None:
    """The message has the limit, not the text."""
    with pytest.raises(ValueError, match=r"^it names 5000 GPUs \(limit 64\)$"):
        checked_gpus(",".join(map(str, range(5000))))


def test_card_that_does_not_answer_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that has fallen off the bus before the start is named, and the others are read with UUID and SMs."""
    state = tmp_path / "nvml.json"
    state.write_text(json.dumps({"cards": [{"uuid": "GPU-a", "open_error": 15}, {"uuid": "GPU-b", "total": 1 << 37}]}))
    monkeypatch.setenv("FAKE_NVML", str(state))
    monkeypatch.setenv("PYTHONPATH", str(FAKE_NVML))
    reading = read_cards()
    assert reading.detail == "GPU 0 does not answer: GPU is lost"
    assert choose_cards("all", reading, None) == (Card("GPU-b", 1, "NVIDIA H200", 1 << 37, 132),)
