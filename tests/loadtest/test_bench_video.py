"""How the video bench comes to its figures, and that it can be run."""

import itertools
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import av
import pytest

from loadtest.bench.stages import StageRun
from loadtest.bench.video.figures import ModelRounds, StreamRounds, model_result, overload_result, streams_result, table
from loadtest.bench.video.program import Memory, ProgramRun
from loadtest.bench.video.rounds import FPS, at_rate, frames_of
from penstock_load.measure.buckets import Buckets, jain_index, latency_in
from tests.deepstream_pipeline.clips import write_clip
from tests.support.stack import CHECKOUT, RunningStack

LATE = Buckets(((0.1, 0), (0.5, 30), (1.0, 90), (math.inf, 100)))


def stretch(*inferred: int, seconds: float = 1.0, latency: Buckets = LATE, **drops: int) -> ProgramRun:
    return ProgramRun(seconds, inferred, drops, latency, 2.0, 4.0, 6.0, 3.0)


def test_percentile_of_a_histogram_lies_between_its_bounds() -> None:
    """Spread evenly within a bucket; the last bound stands for all that is above it."""
    assert LATE.percentile_ms(0.3) == pytest.approx(500)
    assert LATE.percentile_ms(0.6) == pytest.approx(750)
    assert LATE.percentile_ms(0.99) == pytest.approx(1000)
    assert math.isnan(Buckets(()).percentile_ms(0.5))


def test_answers_within_a_bound_are_those_that_kept_it_for_sure() -> None:
    """A bound between two of the histogram's counts by the lower one."""
    assert (LATE.within(1.0), LATE.within(0.99), LATE.within(0.05), LATE.count) == (90, 30, 0, 100)


def test_histogram_since_an_earlier_look_has_what_came_after() -> None:
    """The counters of a metrics page only rise; what was there before is not this stretch's."""
    before = Buckets(((0.1, 0), (0.5, 10), (1.0, 10), (math.inf, 10)))
    assert LATE.since(before).upto == ((0.1, 0), (0.5, 20), (1.0, 80), (math.inf, 90))


def test_latency_of_a_page_is_of_all_its_sources() -> None:
    """Buckets of the same bound add up."""
    name = "penstock_video_glass_to_event_seconds"
    lines = [f"# TYPE {name} histogram"]
    for source in ("a", "b"):
        lines += [f'{name}_bucket{{source="{source}",le="{bound}"}} 2.0' for bound in ("0.5", "+Inf")]
        lines += [f'{name}_count{{source="{source}"}} 2.0', f'{name}_sum{{source="{source}"}} 0.2']
    assert latency_in("\n".join([*lines, ""])).upto == ((0.5, 4), (math.inf, 4))


@pytest.mark.parametrize(("shares", "index"), [((5, 5, 5, 5), 1.0), ((8, 0, 0, 0), 0.25), ((), 0.0)])
def test_jain_index_is_one_for_equal_shares(shares: tuple[int, ...], index: float) -> None:
    """And one by their number where one source gets all."""
    assert jain_index(shares) == pytest.approx(index)


def test_limit_and_peer_are_those_of_the_same_round() -> None:
    """A noisy machine moves all of a round together; the best setting of the peer is the one with the best median."""
    rounds = ModelRounds()
    for speed in (1.0, 0.5, 0.8):
        rounds.decode.append(StageRun(300 * speed, 6.0))
        rounds.prepare.append(StageRun(300 * speed, 6.0))
        rounds.engine.append(300 * speed)
        rounds.ours.append(stretch(round(900 * speed), seconds=10.0))
        for name, rate in (("plain", 40), ("ahead", 60)):
            rounds.peers.setdefault(name, []).append(StageRun(rate * speed, 10.0))
    result = model_result("m", "2 calls of 4 at once", rounds)
    assert (result["limit_share"].low, result["limit_share"].high) == (pytest.approx(0.9), pytest.approx(0.9))
    assert (result["peer"], result["peer_ratio"].median) == ("ahead", pytest.approx(1.5))
    assert "of the harmonic limit: 0.90 (0.90-0.90)" in table(result)


def test_aggregate_of_many_streams_is_held_against_the_best_of_its_round() -> None:
    """Whatever number of streams was the best then."""
    rounds = StreamRounds({1: [stretch(100), stretch(50)], 4: [stretch(*[24] * 4), stretch(*[12] * 4)]})
    rounds.memory += [Memory(400.0, 300.0, 5)] * 2
    result = streams_result("m", rounds)
    assert result["best_share"].median == pytest.approx(0.96)
    assert (result["jain"].low, result["best_shares"][1].high) == (pytest.approx(1.0), pytest.approx(1.0))
    assert "PSS 400 (400-400)" in table(result)


def test_goodput_counts_answers_that_kept_the_bound() -> None:
    """90 of the 100 answers of a second, where files of the same round reached 100."""
    files = stretch(50, 50)
    rounds = StreamRounds(capacity=[files], offered=[150.0], overload=[stretch(60, 40, too_old=50)])
    result = overload_result("m", 1.0, rounds)
    assert result["goodput_of_capacity"].median == pytest.approx(0.9)
    assert (result["least_share"].median, result["drops"]["too_old"].median) == (pytest.approx(0.8), 50.0)
    assert (result["capacity"].median, result["capacity_cpu_ms"].median) == (100.0, 12.0)
    assert "of the capacity: 0.90" in table(result)


def test_ceiling_of_an_overload_is_what_decoding_leaves() -> None:
    """Of 12 ms of CPU a frame 3 are decoding: half as many frames more take 1.5 of the 9 ms that the rest of a frame
    takes, and a decoder that takes nothing leaves all."""
    free = replace(stretch(50, 50), decoding_ms=0.0)
    for files, ceiling in ((stretch(50, 50), 1 - 1.5 / 9), (free, 1.0)):
        rounds = StreamRounds(capacity=[files], offered=[150.0], overload=[stretch(60, 40)])
        assert overload_result("m", 1.0, rounds)["ceiling"].median == pytest.approx(ceiling)


def test_clip_at_another_rate_has_the_same_pictures(tmp_path: Path) -> None:
    """Only their times are others."""
    clip, slow = tmp_path / "clip.mp4", tmp_path / "slow.mp4"
    write_clip(clip, frames=12, fps=FPS, size=(64, 48))
    at_rate(slow, clip, 12.5)
    assert frames_of(slow) == 12
    with av.open(str(slow)) as container:
        times = [frame.time for frame in container.decode(video=0)]
    steps = [after - before for before, after in itertools.pairwise(times)]
    assert steps == pytest.approx([0.08] * 11, abs=1e-3)


@pytest.mark.long  # the bench takes the newest stack of this user, which beside other tests may be anybody's
@pytest.mark.timeout(180)  # a dozen programs are started one after the other
def test_bench_measures_every_part(stack: RunningStack, tmp_path: Path) -> None:
    """A run of moments: every figure is there, whatever it is, and nothing of the bench is left."""
    clip, out = tmp_path / "clip.mp4", tmp_path / "video.json"
    write_clip(clip, frames=60, fps=FPS, size=(320, 240))
    short = ["--rounds", "1", "--seconds", "0.3", "--model", "street", "--streams", "2"]
    command = [sys.executable, "-m", "loadtest.bench.video", *short, "--clip", str(clip), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, cwd=CHECKOUT)
    assert done.returncode == 0, done.stderr
    one, streams, overload = json.loads(out.read_text())["results"]
    assert one["limit_share"]["median"] > 0
    assert one["peer_ratio"]["median"] > 0
    assert one["program_cpu_ms"]["median"] > 0
    assert set(streams["rates"]) == {"2"}
    assert streams["processes"] == 3
    assert streams["pss_mib"]["median"] > streams["uss_mib"]["median"] > 0
    assert overload["answered"]["median"] > 0
    assert overload["goodput_of_capacity"]["median"] >= 0
    assert "floor 0.98" in done.stdout
