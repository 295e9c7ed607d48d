"""Which cards are lost, decided from what NVML says: the rows of a table, and how a card comes back."""

import pytest

from penstock.gpu.telemetry.health import GONE, CardHealth, is_visible
from penstock.gpu.telemetry.messages import CardLoad, TelemetryMessage, Xid

WELL = CardLoad(0, "GPU-a"), CardLoad(1, "GPU-b")


def line(*cards: CardLoad, xids: tuple[Xid, ...] = (), why: str = "", has_nvml: bool = True) -> TelemetryMessage:
    """What NVML says at some moment."""
    return TelemetryMessage(1.0, 1.0, cards, xids, has_nvml, why)


@pytest.mark.parametrize(
    ("said", "reasons"),
    [
        (line(*WELL), {0: "", 1: ""}),
        (line(CardLoad(0, "GPU-a", lost="GPU is lost"), WELL[1]), {0: "GPU is lost", 1: ""}),
        (line(CardLoad(0, lost="Unknown Error"), WELL[1]), {0: "Unknown Error", 1: ""}),
        (line(WELL[1]), {0: GONE, 1: ""}),
        (line(why="NVML: Driver Not Loaded", has_nvml=False), dict.fromkeys((0, 1), "NVML: Driver Not Loaded")),
        (line(*WELL, xids=(Xid(1, 79),)), {0: "", 1: "Xid 79"}),
        (line(*WELL, xids=(Xid(1, 31),)), {0: "", 1: ""}),
    ],
    ids=["well", "lost", "without a uuid", "not there", "driver unloaded", "Xid of the card", "Xid of a program"],
)
def test_card_is_lost_or_well(said: TelemetryMessage, reasons: dict[int, str]) -> None:
    """After both were seen once; and whatever was the matter by NVML's silence, its next answer mends."""
    health = CardHealth()
    health.observe(line(*WELL))
    health.observe(said)
    assert health.cards == reasons
    health.observe(line(*WELL))
    assert health.cards == ({0: "", 1: "Xid 79"} if "Xid 79" in reasons.values() else {0: "", 1: ""})


def test_card_after_an_xid_that_wants_a_reset_is_well_once_it_was_away() -> None:
    """That it answers says nothing; that it went and came back says that it was reset."""
    health = CardHealth()
    for said in (line(*WELL), line(*WELL, xids=(Xid(0, 95),)), line(*WELL)):
        health.observe(said)
    assert health.cards[0] == "Xid 95"
    health.observe(line(WELL[1]))
    health.observe(line(*WELL))
    assert health.cards == {0: "", 1: ""}


def test_machine_without_a_card_has_lost_none() -> None:
    """What was never seen is not missed, by NVML or by an exporter's page alone."""
    health = CardHealth()
    health.observe(line(why="NVML: Driver Not Loaded", has_nvml=False))
    health.observe(line(CardLoad(0, "GPU-z"), has_nvml=False))
    assert (dict(health.cards), health.reason) == ({}, "")


def test_xids_are_counted_by_card_and_number() -> None:
    """Those of programs, too."""
    health = CardHealth()
    for _ in range(2):
        health.observe(line(*WELL, xids=(Xid(0, 31), Xid(1, 79))))
    assert health.xids == {(0, 31): 2, (1, 79): 2}


@pytest.mark.parametrize(
    ("visible", "is_said"), [(None, True), ("0", True), ("GPU-a", True), ("1", False), ("", False)]
)
def test_lost_card_counts_where_cuda_may_use_it(visible: str | None, is_said: bool) -> None:
    """One sentence with the card, the reason and what to do; nothing where models cannot be on it."""
    health = CardHealth(visible)
    health.observe(line(*WELL))
    health.observe(line(CardLoad(0, "GPU-a", lost="GPU is lost"), WELL[1]))
    assert health.reason.startswith("GPU 0 (GPU-a) is lost: GPU is lost; ") == is_said
    assert bool(health.reason) == is_said


@pytest.mark.parametrize(
    ("said", "is_seen"),
    [
        *((None, True), ("0,2", True), (" 1 , 0 ", True), ("GPU-ab", True), ("MIG-x", True)),
        *(("", False), ("-1", False), ("1", False), ("GPU-b", False), ("-1,0", False)),
    ],
)
def test_visible_cards_are_those_of_the_variable(said: str | None, is_seen: bool) -> None:
    """By number or the beginning of the UUID; what stands behind a wrong word does not count, as CUDA has it."""
    assert is_visible(0, "GPU-abc", said) == is_seen
