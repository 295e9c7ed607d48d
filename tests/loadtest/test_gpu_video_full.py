"""The bench of video on a card that makes no more decoders: who waits gives up; the search goes to what there is."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadtest.bench.gpu.video import fleet as fleets
from loadtest.bench.gpu.video import fleet as timeouts
from loadtest.bench.gpu.video import parts
from loadtest.bench.gpu.video.fleet import (
    DECODERS_FULL,
    FULL_STILL_S,
    STILL_S,
    WAITS,
    WARM_FRAMES,
    Fleet,
    FleetSetup,
    Look,
    NotAllThere,
    StartTimeout,
    all_full,
    not_all_there,
    progressed,
)
from loadtest.bench.gpu.video.plan import BenchPiece, Folder, parse_arguments
from loadtest.bench.gpu.video.report import JSON_FILE, PAGE, main
from loadtest.bench.gpu.video.results import NAME, cpu_by_part, decoders_limit
from loadtest.bench.gpu.video.usage import CardMeter
from loadtest.bench.gpu.video.verdict import MetricsPage, SustainedSearch, below
from penstock_load.committed import read_bench
from penstock_load.results import State
from penstock_load.targets import read_targets
from penstock_video.sources.lifecycle import WAITS_FOR_CARD
from tests.loadtest.gpu_video_pieces import CONDITIONS, window
from tests.support.stack import CHECKOUT

REASON = f"the GPU {DECODERS_FULL} (CUDA's error 2)"
CAMERA = "h264-720p"


def test_reason_of_a_full_card_is_the_decoders_own() -> None:
    """The words by which the bench knows it stand where the decoder says them; so do those of one that waits."""
    assert DECODERS_FULL in (CHECKOUT / "deepstream_pipeline/penstock_video/decode/nvcodec.py").read_text()
    assert WAITS in WAITS_FOR_CARD


@pytest.mark.parametrize(
    ("seen", "at_s", "is_full", "is_over"),
    [
        ([], STILL_S + 1, False, False),  # nothing is there yet: programs still start
        ([], 61.0, False, True),
        ([(1.0, 8)], 1.0 + STILL_S - 0.1, False, False),
        ([(1.0, 8)], 1.0 + STILL_S + 0.1, False, True),
        ([(1.0, 8), (5.0, 8)], 1.0 + STILL_S + 0.1, False, True),  # the same is no progress
        ([(1.0, 8), (5.0, 9)], 1.0 + STILL_S + 0.1, False, False),
        ([(1.0, 8)], 1.0 + FULL_STILL_S - 0.1, True, False),
        ([(1.0, 8)], 1.0 + FULL_STILL_S + 0.1, True, True),
        ([], FULL_STILL_S + 0.1, True, True),  # others have all of the card's decoders
    ],
)
def test_waiting_ends_if_no_stream_gets_further(
    seen: list[tuple[float, int]], at_s: float, is_full: bool, is_over: bool
) -> None:
    """Sooner where all of them say why; later where nothing has begun."""
    waiting = StartTimeout(0.0, timeout_s=60.0)
    for now, progress in seen:
        waiting.see(now, progress)
    assert waiting.is_over(at_s, is_full=is_full) is is_over


def test_complaint_has_the_most_frequent_reason_with_its_count() -> None:
    """Of 290 streams 23; a long reason is cut; without a reason there is nothing to say."""
    cold = [f"cam{number}" for number in range(23)]
    said = dict.fromkeys(cold, REASON)
    found = not_all_there(cold, 290, said | {"cam0": "it hung up"}, 30.0)
    assert found is not None
    assert str(found) == f'23 of 290 streams have no answers: 22 × "{REASON}"'
    assert (found.answered, found.is_full) == (267, True)
    assert all_full(cold, said)
    assert not all_full(cold, said | {"cam0": "it hung up"})
    other = not_all_there(cold, 290, dict.fromkeys(cold, "x" * 999), 30.0)
    assert other is not None
    assert (other.is_full, len(str(other)) < 300) == (False, True)
    assert not_all_there(cold, 290, {"warm": REASON}, 30.0) is None


def test_card_is_full_for_those_who_wait_for_their_turn_to_find_it() -> None:
    """Of 348 streams 86: nine found no decoder, the others have not asked yet; both reasons are reported. If no stream
    found that, the card is only slow; who asks again has found it."""
    cold = [f"cam{number}" for number in range(86)]
    waiting = dict.fromkeys(cold, WAITS_FOR_CARD)
    said = waiting | dict.fromkeys(cold[:9], REASON)
    found = not_all_there(cold, 348, said, 55.0)
    assert found is not None
    assert str(found) == f'86 of 348 streams have no answers: 77 × {WAITS_FOR_CARD!r}, 9 × "{REASON}"'
    assert (found.answered, found.is_full, all_full(cold, said)) == (262, True, True)
    assert not all_full(cold, waiting)
    assert not all_full([], said)
    slow = not_all_there(cold, 348, waiting, 55.0)
    assert slow is not None
    assert (slow.is_full, str(slow)) == (False, f"86 of 348 streams have no answers: 86 × {WAITS_FOR_CARD!r}")
    assert progressed(said, waiting) == said
    assert progressed(waiting, dict.fromkeys(cold[:9], REASON)) == said
    assert progressed(said, {"cam0": "it hung up"}) == said | {"cam0": "it hung up"}
    mostly_other = not_all_there(cold, 348, dict.fromkeys(cold, "it hung up") | {"cam0": REASON}, 55.0)
    assert mostly_other is not None
    assert not mostly_other.is_full


def test_search_goes_to_what_the_card_has_decoders_for() -> None:
    """Two numbers are tried, not five: the named one, and the one just below those that had answers."""
    finding = SustainedSearch([348, 315, 366], 377, tries=6)
    assert finding.next_count() == 348
    finding.record(348, is_held=False, full_at=267)
    assert finding.next_count() == 265
    finding.record(265, is_held=True)
    assert finding.next_count() is None
    assert finding.held == 265


def test_search_skips_numbers_that_a_missed_one_rules_out() -> None:
    """What was answered of 400 streams says where to look: what is named above that is not tried, what is below is."""
    finding = SustainedSearch([400, 390, 240], 420, tries=6)
    assert finding.next_count() == 400
    finding.record(400, is_held=False, played=0.7)
    assert finding.next_count() == 240
    finding.record(240, is_held=False)
    assert finding.next_count() == 220, "8 % below"


def test_number_below_is_a_multiple_of_five_where_there_is_one() -> None:
    """Never the number itself, never none."""
    assert [below(full_at) for full_at in (288, 267, 265, 6, 5, 2, 1)] == [285, 265, 260, 5, 4, 1, 1]


class _Card:
    """A card with so many decoders, and the programs that share it: a stream has one or says that there is none."""

    def __init__(self, room: int) -> None:
        self.room, self.held, self.asked = room, list[str](), list[str]()
        self.reason_of: Callable[[str, int], str] = lambda _, look: REASON  # of a stream without one, at a look

    def program(self, setup: FleetSetup, work: Path, number: int) -> "_Program":
        return _Program(self)

    def open(self, source_id: str) -> None:
        if len(self.held) < self.room:
            self.held.append(source_id)


class _Program:
    """Stands in for `penstock video run`."""

    class process:
        pid = 1

    def __init__(self, card: _Card) -> None:
        self.ids: list[str] = []
        self._card, self._looks = card, 0

    def start(self) -> None:
        for source_id in self.ids:
            self._card.open(source_id)

    def look(self, *, is_patient: bool) -> Look:
        return Look(0.0, MetricsPage(answered={one: WARM_FRAMES for one in self.ids if one in self._card.held}))

    def add(self, source_id: str, uri: Path) -> None:
        self._card.open(source_id)

    def ask(self, method: str, path: str) -> str:
        if method == "DELETE":
            source_id = path.rpartition("/")[2]
            self._card.asked.append(source_id)
            if source_id in self._card.held:
                self._card.held.remove(source_id)
            return ""
        self._looks += 1
        states = {one: "running" if one in self._card.held else "reconnecting" for one in self.ids}
        listed = [
            {
                "source_id": one,
                "state": state,
                "reason": "" if state == "running" else self._card.reason_of(one, self._looks),
            }
            for one, state in states.items()
        ]
        return json.dumps({"streams": listed})

    def last_words(self) -> str:
        return ""

    def tell_to_end(self) -> None:
        self._card.held.clear()

    def wait_for_end(self) -> None: ...


@pytest.fixture
def full_card(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], _Card]:
    """Makes one with so many decoders, for all fleets from then on; waits are short."""

    def make(room: int) -> _Card:
        card = _Card(room)
        monkeypatch.setattr(fleets, "_Program", card.program)
        return card

    monkeypatch.setattr(timeouts, "FULL_STILL_S", 0.0)
    monkeypatch.setattr(fleets, "LOOK_S", 0.001)
    return make


def test_streams_without_a_decoder_are_taken_out_first(tmp_path: Path, full_card: Callable[[int], _Card]) -> None:
    """Streams that wait for a decoder go before those that have one; the programs are evenly filled again."""
    card = full_card(10)
    with Fleet(FleetSetup("m", tmp_path / "c.mp4", "nvdec", 2), tmp_path, 16) as fleet:
        with pytest.raises(
            NotAllThere, match=r"6 of 16 streams have no answers: 6 × .*makes no more decoders"
        ) as failed:
            fleet.wait(60.0)
        assert (failed.value.is_full, failed.value.answered) == (True, 10)
        cold = set(fleet.ids) - set(card.held)
        fleet.resize(9)
        assert cold < set(card.asked)
        assert sorted(fleet.ids) == sorted(card.held)
        assert len(set(fleet.ids)) == 9
        fleet.wait(60.0)


def test_stream_that_waits_to_ask_a_full_card_again_is_one_without_a_decoder(
    tmp_path: Path, full_card: Callable[[int], _Card]
) -> None:
    """Some found none, and since then all wait for their turn: the card is full, and both are reported."""
    card = full_card(10)
    card.reason_of = lambda one, look: WAITS_FOR_CARD if look > 1 else REASON if int(one[3:]) % 2 else ""
    setup = FleetSetup("m", tmp_path / "c.mp4", "nvdec", 2)
    with Fleet(setup, tmp_path, 16) as fleet, pytest.raises(NotAllThere) as error:
        fleet.wait(2.0)
    assert (error.value.is_full, error.value.answered) == (True, 10)
    assert "waits for its turn" in str(error.value)
    assert DECODERS_FULL in str(error.value)


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ((), 283),
        (("--decoders", "267"), 265),
        (("--decoders", "0"), 283),
        (("--decoder", "cpu", "--decoders", "267"), 283),
    ],
)
def test_load_of_other_parts_is_one_that_the_card_has_decoders_for(
    tmp_path: Path, more: tuple[str, ...], wanted: int
) -> None:
    """Where nothing was held yet, of the target; by the CPU as many as there are."""
    with CardMeter(is_gpu=False) as card:
        bench = parts.GpuVideoBench(parse_arguments("", more), tmp_path, Folder(tmp_path / "out"), card, tmp_path)
        assert bench._load(BenchPiece("hand-over", CAMERA, 1), parts.HAND_OVER_SHARE) == wanted


def test_later_search_begins_below_what_the_first_one_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_card: Callable[[int], _Card]
) -> None:
    """The first begins with what the target asks for; the next round has one try, unless the command knows better. Of
    a full card nothing is measured: its decoders are the whole reason."""
    full_card(267)
    monkeypatch.setattr(parts, "measure", lambda fleet, *_: window(len(fleet.ids)))
    monkeypatch.setattr(parts.GpuVideoBench, "_stack", lambda _: None)
    folder = Folder(tmp_path / "out")

    def found_of(number: int, *more: str) -> tuple[dict[str, Any], list[int]]:
        options = parse_arguments("", ["--settle", "0", *more])
        with CardMeter(is_gpu=False) as card:
            bench = parts.GpuVideoBench(options, tmp_path, folder, card, tmp_path)
            found = bench.measure(piece := BenchPiece("streams", CAMERA, number))
        folder.write(piece, found, CONDITIONS)
        assert bench.in_words(piece, found).startswith("265 streams held")
        return found, [one["streams"] for one in found["tries"]]

    first, tried = found_of(1)
    assert (tried, first["missed"], first["full_at"], first["decoders"]) == ([315, 265], 315, 267, 0)
    assert "p99_ms" not in first["tries"][0]
    later, tried = found_of(2)
    assert (tried, later["missed"], later["full_at"], later["decoders"]) == ([265], 0, 0, 267)
    again, tried = found_of(3, "--decoders", "0")
    assert (tried, again["missed"], again["full_at"]) == ([265, 315], 315, 267)
    named, tried = found_of(3, "--streams", "300", "--decoders", "267")
    assert (tried, named["missed"], named["decoders"]) == ([265], 0, 267), "what the command says bounds what it names"
    named, tried = found_of(3, "--streams", "265", "--most", "300", "--tries", "2")
    assert (named["decoders"], max(tried) > 267) == (0, True), "of another search nothing is taken then"
    assert decoders_limit({"found": later}) == 267
    assert decoders_limit({"found": first}) == 267


def _write(folder: Path, found: dict[str, Any], number: int = 1) -> None:
    settings = {"decoder": "nvdec", "alone_per_s": 366.0 * 30, "took_s": 60.0}
    Folder(folder).write(BenchPiece("streams", CAMERA, number), settings | found, CONDITIONS)


def test_report_says_that_the_decoders_are_the_limit(tmp_path: Path) -> None:
    """Explained in words, with the number; the result of another search counts; a miss stays one."""
    why = f"81 of 348 streams have no answers: 81 × '{REASON}'"
    full = {"streams": 348, "complaint": why, "waited_s": 25.0, "full_at": 267}
    _write(tmp_path, {"held": 265, "missed": 348, "full_at": 267, "decoders": 0, "tries": [full, window(265)]})
    met = {"held": 265, "missed": 0, "full_at": 0, "decoders": 267, "tries": [window(265)]}
    _write(tmp_path, met, number=2)
    assert main([str(tmp_path)]) == 0
    page = (tmp_path / PAGE).read_text()
    assert "The card was full at **267 decoders**." in page
    assert "the driver's decoders are the limit: 267 at once (NVDEC 90 %" in page
    assert "More than 267 were not tried" in page
    assert "Of 348 streams 267 had answers: 81 of 348" in page
    assert (
        "| 720p30 H.264 | 315 | 265 (265 to 265) | 348 (348 to 348), in 1 of 2 rounds | 267 (267 to 267) | 366 |"
        in page
    )
    assert (tmp_path / NAME).is_file()
    judged = read_bench(tmp_path / JSON_FILE, read_targets())
    assert judged is not None
    states = {verdict.target_id: verdict.state for verdict in judged.verdicts}
    assert (states["h200-video-720p"], states["h200-nvdec"]) == (State.FAIL, State.FAIL)


def test_full_card_is_not_the_limit_where_fewer_streams_were_missed(tmp_path: Path) -> None:
    """By latency, say; but it is where the number that found no decoder is the lowest that was missed."""
    full = {"streams": 348, "complaint": "81 of 348 streams have no answers", "full_at": 267}
    late = [full, window(265, "p99 150 ms"), window(240)]
    assert decoders_limit({"found": {"held": 240, "missed": 265, "decoders": 0, "tries": late}}) == 0
    assert decoders_limit({"found": {"held": 265, "missed": 348, "decoders": 0, "tries": [full, window(265)]}}) == 267
    below_it = {"held": 140, "missed": 0, "decoders": 267, "tries": [window(140)]}
    assert decoders_limit({"found": below_it}) == 0
    _write(tmp_path, {"held": 240, "missed": 265, "full_at": 267, "decoders": 0, "tries": late})
    assert main([str(tmp_path)]) == 0
    assert "decoders are the limit" not in (tmp_path / PAGE).read_text()


def test_cpu_of_a_frame_is_listed_by_part(tmp_path: Path) -> None:
    """Decode processes, video programs, gateway, engine; what has no process of its own is empty."""
    spent = {"machine": 3.0, "decode process": 1.25, "video program": 0.5, "video helper": 0.1, "triton": 0.25}
    gateway = {"gateway: penstock.gateway.worker": 0.2, "gateway: penstock.protocol": 0.15, "telemetry": 0.01}
    parts = cpu_by_part({"cpu_ms_a_frame": spent | gateway | {"model instance": 0.125}})
    wanted = {"decode processes": 1.25, "video programs": 0.6, "gateway": 0.35, "engine": 0.375}
    assert parts == pytest.approx(wanted)
    _write(tmp_path, {"held": 9, "missed": 0, "tries": [window(9) | {"cpu_ms_a_frame": spent}]})
    assert main([str(tmp_path)]) == 0
    page = (tmp_path / PAGE).read_text()
    assert "| camera | streams | decode processes | video programs | gateway | engine |" in page
    assert "| 720p30 H.264, streams | 9 (9 to 9) | 1.25 (1.25 to 1.25) | 0.6 (0.6 to 0.6) |  | 0.25 (" in page
