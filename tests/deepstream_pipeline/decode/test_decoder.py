"""One decoder, every kind of clip: all frames, in order, at rising times, and what changes is told."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import pytest

from deepstream_pipeline.decode.decoder import Decoder, Picture, StreamFacts
from deepstream_pipeline.decode.opening import DecodeOptions
from deepstream_pipeline.decode.pictures import Painter
from deepstream_pipeline.errors import DecodeError
from tests.deepstream_pipeline.clips import damaged, joined, number_of, truncated, write_clip

FRAMES = 40


@dataclass
class Seen:
    """What came of a source."""

    numbers: list[int] = field(default_factory=list)
    pts_s: list[float] = field(default_factory=list)
    corrupt: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    new: list[tuple[int, StreamFacts]] = field(default_factory=list)
    bad_packets: int = 0

    def add(self, picture: Picture, number: int, facts: StreamFacts) -> None:
        """The next one."""
        for places, is_so in ((self.corrupt, picture.is_corrupt), (self.dropped, picture.is_dropped)):
            places += [len(self.numbers)] * is_so
        if picture.is_new:
            self.new.append((len(self.numbers), facts))
        self.numbers.append(number)
        self.pts_s.append(picture.pts_s)

    def assert_rising(self) -> None:
        """No time twice, none backward."""
        assert all(before < after for before, after in itertools.pairwise(self.pts_s))


def seen_of(path: Path, threads: int = 0, first_pts_s: float = 0.0) -> tuple[StreamFacts, Seen]:
    """All of a clip."""
    decoder, painter, seen = Decoder(str(path), DecodeOptions(threads=threads), first_pts_s), Painter(), Seen()
    facts = decoder.facts
    for packet in decoder.packets():
        for picture in decoder.decode(packet):
            seen.add(picture, number_of(painter.rgb(picture.frame)), decoder.facts)
    seen.bad_packets = decoder.bad_packets
    decoder.close()
    return facts, seen


CLIPS: list[tuple[str, str, dict[str, Any]]] = [
    ("a.mp4", "h264", {}),
    ("b.mp4", "h264", {"b_frames": 3, "fps": 30}),
    ("b.mkv", "h264", {"b_frames": 2, "size": (322, 182)}),
    ("a.ts", "h264", {"b_frames": 2}),
    ("a.flv", "h264", {"fps": 10}),
    ("a.h264", "h264", {}),
    ("a.avi", "mpeg4", {"codec": "mpeg4", "fps": 10}),
    ("j.avi", "mjpeg", {"codec": "mjpeg"}),
    ("h.mp4", "hevc", {"codec": "libx265", "b_frames": 2}),
    ("v.webm", "vp9", {"codec": "libvpx-vp9", "options": {"cpu-used": "8", "deadline": "realtime"}}),
    ("odd.mkv", "ffv1", {"codec": "ffv1", "size": (161, 97)}),
    ("m.mpg", "mpeg2video", {"codec": "mpeg2video"}),
    ("small.mp4", "h264", {"size": (32, 32)}),
    ("high.mp4", "h264", {"pixel_format": "yuv422p10le"}),
]
HOW = {name: how for name, _, how in CLIPS}


@pytest.mark.parametrize(("name", "codec", "how"), CLIPS, ids=[name for name, _, _ in CLIPS])
@pytest.mark.parametrize("threads", [0, 1])
def test_clip_of_any_kind_gives_every_frame_in_order(
    tmp_path: Path, name: str, codec: str, how: dict[str, Any], threads: int
) -> None:
    """Every container and codec: each frame once, in the order of showing, at the clip's rate, clean."""
    facts, seen = seen_of(write_clip(tmp_path / name, frames=FRAMES, **how), threads)
    assert (facts.codec, facts.width, facts.height) == (codec, *how.get("size", (160, 96)))
    assert facts.is_live is False
    assert seen.numbers == list(range(FRAMES))
    assert (seen.corrupt, seen.dropped, seen.new, seen.bad_packets) == ([], [], [], 0)
    fps = how.get("fps", 25)
    assert facts.fps == pytest.approx(fps)
    assert seen.pts_s == pytest.approx([number / fps for number in range(FRAMES)], abs=0.002)
    seen.assert_rising()


def test_facts_of_a_file_tell_its_length(tmp_path: Path) -> None:
    """Where the container knows them: the number of frames and the seconds, for a progress bar."""
    facts, _ = seen_of(write_clip(tmp_path / "a.mp4", frames=FRAMES, fps=10))
    assert (facts.frames_total, facts.duration_s) == (FRAMES, pytest.approx(4.0))


def test_real_clip_is_decoded_whole(shared_dir: Path) -> None:
    """795 frames at ten a second."""
    decoder = Decoder(str(shared_dir / "media" / "vtest.avi"), DecodeOptions())
    pts_s = [picture.pts_s for packet in decoder.packets() for picture in decoder.decode(packet)]
    assert decoder.facts == StreamFacts(768, 576, 10.0, decoder.facts.codec, False, 795, 79.5)
    assert pts_s == pytest.approx([number / 10 for number in range(795)])
    decoder.close()


def test_first_frame_continues_where_the_parent_says(tmp_path: Path) -> None:
    """After a reconnection the times go on."""
    _, seen = seen_of(write_clip(tmp_path / "a.ts", frames=20), first_pts_s=100.0)
    assert seen.pts_s[:3] == pytest.approx([100.0, 100.04, 100.08], abs=0.002)


def test_resolution_that_changes_is_told_and_loses_nothing(tmp_path: Path) -> None:
    """Two clips joined in one stream: the facts are told again with the first frame that they hold for."""
    small = write_clip(tmp_path / "small.ts", frames=FRAMES)
    large = write_clip(tmp_path / "large.ts", frames=FRAMES, size=(320, 192))
    _, seen = seen_of(joined(tmp_path / "both.ts", small, large, small))
    assert seen.numbers == [*range(FRAMES)] * 3
    assert [(place, facts.width, facts.height) for place, facts in seen.new] == [(40, 320, 192), (80, 160, 96)]
    seen.assert_rising()
    assert seen.pts_s[-1] == pytest.approx(120 / 25, abs=0.3)


@pytest.mark.parametrize("codec", ["libx265", "mpeg2video"])
def test_codec_that_changes_is_followed(tmp_path: Path, codec: str) -> None:
    """From H.264 to another in one stream: told, and decoded from its next keyframe on."""
    first = write_clip(tmp_path / "first.ts", frames=FRAMES)
    second = write_clip(tmp_path / "second.ts", frames=FRAMES, codec=codec, first=100, gop=10)
    _, seen = seen_of(joined(tmp_path / "both.ts", first, second))
    assert seen.numbers[:38] == list(range(38))
    assert seen.numbers[-20:] == list(range(120, 140))
    assert [facts.codec for _, facts in seen.new] == [{"libx265": "hevc"}.get(codec, codec)]
    seen.assert_rising()


def test_rate_that_changes_is_kept(tmp_path: Path) -> None:
    """From ten frames a second to thirty: the times say so."""
    slow = write_clip(tmp_path / "slow.ts", frames=20, fps=10)
    fast = write_clip(tmp_path / "fast.ts", frames=30, fps=30)
    _, seen = seen_of(joined(tmp_path / "both.ts", slow, fast))
    steps = [after - before for before, after in itertools.pairwise(seen.pts_s)]
    assert steps[5] == pytest.approx(0.1, abs=0.001)
    assert steps[-5] == pytest.approx(1 / 30, abs=0.001)
    seen.assert_rising()


def timed(path: Path, pts_of: Callable[[int], int]) -> Path:
    """A transport stream whose packets say these times, in 90,000ths, of which it keeps 33 bits."""
    plain = write_clip(path.with_suffix(".h264"), frames=FRAMES)
    with av.open(str(plain)) as source, av.open(str(path), "w", format="mpegts") as container:
        stream = container.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(packet for packet in source.demux(video=0) if packet.size):
            packet.stream, packet.time_base = stream, Fraction(1, 90_000)
            packet.pts = packet.dts = pts_of(number)
            container.mux(packet)
    return path


@pytest.mark.parametrize(
    "pts_of",
    [
        pytest.param(lambda n: 2**33 - 30_000 + n * 3600, id="wraps around"),
        pytest.param(lambda n: n * 3600 + (n >= 20) * 90_000 * 4000, id="jumps forward"),
        pytest.param(lambda n: n * 3600 + (n >= 20) * 90_000 * 2, id="a gap of two seconds"),
    ],
)
def test_times_of_a_stream_that_jump_are_made_to_rise(tmp_path: Path, pts_of: Callable[[int], int]) -> None:
    """A clock of 33 bits wraps around, an encoder restarts: the frames are all there, in order, at sane times."""
    _, seen = seen_of(timed(tmp_path / "jumps.ts", pts_of))
    assert seen.numbers == list(range(FRAMES))
    seen.assert_rising()
    assert seen.pts_s[-1] == pytest.approx(39 * 0.04, abs=2.1)


def test_times_that_go_back_are_made_to_rise(tmp_path: Path) -> None:
    """The second half begins at nought again, as after an encoder's restart."""
    part = write_clip(tmp_path / "part.ts", frames=20)
    _, seen = seen_of(joined(tmp_path / "twice.ts", part, part))
    assert seen.numbers == [*range(20)] * 2
    seen.assert_rising()
    assert seen.pts_s[-1] == pytest.approx(39 * 0.04, abs=0.2)


@pytest.mark.parametrize("name", ["a.mp4", "a.avi", "b.mkv", "a.ts", "j.avi", "h.mp4", "a.h264", "a.flv"])
def test_damaged_bytes_cost_frames_but_no_crash(tmp_path: Path, name: str) -> None:
    """Bits flipped anywhere: it ends in order or with a DecodeError, never otherwise, and its times rise."""
    how = HOW[name]
    whole = write_clip(tmp_path / name, frames=FRAMES, **how)
    for seed in range(8):
        path = damaged(tmp_path / f"{seed}{name}", whole, flips=2 + seed * 2, seed=seed, spare=0.0)
        try:
            _, seen = seen_of(path)
        except DecodeError:
            continue
        seen.assert_rising()
        assert len(seen.numbers) <= FRAMES + 2


def test_damaged_frames_are_marked_until_the_next_keyframe(tmp_path: Path) -> None:
    """What is shown without a mark is what the camera saw: every frame that is wrong is marked, or dropped."""
    whole = write_clip(tmp_path / "a.ts", frames=120, gop=12, size=(320, 192))
    found = 0
    for seed in range(6):
        _, seen = seen_of(damaged(tmp_path / f"{seed}.ts", whole, flips=3, seed=seed, spare=0.2))
        unmarked = set(range(len(seen.numbers))) - {*seen.corrupt, *seen.dropped}
        numbers = [seen.numbers[place] for place in sorted(unmarked)]
        assert numbers == sorted(set(numbers))
        assert set(numbers) <= set(range(120))
        assert seen.numbers[-1] == 119  # it recovers
        found += len(seen.corrupt) + len(seen.dropped)
    assert found > 6


@pytest.mark.parametrize("name", ["a.avi", "a.ts", "b.mkv", "a.flv"])
def test_truncated_clip_gives_what_is_there(tmp_path: Path, name: str) -> None:
    """A file that is cut off in the middle is read until there."""
    how = HOW[name]
    whole = write_clip(tmp_path / name, frames=FRAMES, **how)
    _, seen = seen_of(truncated(tmp_path / f"cut-{name}", whole, 0.6))
    whole_ones = [number for place, number in enumerate(seen.numbers) if place not in {*seen.corrupt, *seen.dropped}]
    assert whole_ones == list(range(len(whole_ones)))
    assert 5 < len(whole_ones) < FRAMES


@pytest.mark.parametrize("name", ["a.mp4", "b.mkv", "a.avi", "a.ts", "a.h264", "h.mp4"])
def test_clip_that_is_rewound_gives_every_frame_again(tmp_path: Path, name: str) -> None:
    """Whether its container can seek or not: each loop has all frames, its first is_new, the times go on."""
    codec = {"a.avi": "mpeg4", "h.mp4": "libx265"}.get(name, "libx264")
    decoder = Decoder(str(write_clip(tmp_path / name, frames=20, codec=codec)), DecodeOptions())
    seen, painter = Seen(), Painter()
    for _ in range(3):
        for packet in decoder.packets():
            for picture in decoder.decode(packet):
                seen.add(picture, number_of(painter.rgb(picture.frame)), decoder.facts)
        decoder.rewind()
    decoder.close()
    assert seen.numbers == [*range(20)] * 3
    assert [place for place, _ in seen.new] == [20, 40]
    seen.assert_rising()
    assert seen.pts_s[-1] == pytest.approx(59 * 0.04, abs=0.05)


def test_stream_that_is_rubbish_from_the_middle_on_ends(tmp_path: Path) -> None:
    """A codec's bytes replaced by nothing do not keep a decoder busy for ever."""
    whole = write_clip(tmp_path / "a.avi", frames=400, codec="mjpeg", size=(64, 48))
    content = bytearray(whole.read_bytes())
    position = content.find(b"00dc", len(content) // 4)
    while 0 <= position < content.rfind(b"idx1"):
        size = int.from_bytes(content[position + 4 : position + 8], "little")
        content[position + 8 : position + 8 + size] = bytes(size)
        position = content.find(b"00dc", position + 8 + size)
    (tmp_path / "bad.avi").write_bytes(content)
    with pytest.raises(DecodeError, match="packets in a row"):
        seen_of(tmp_path / "bad.avi")
