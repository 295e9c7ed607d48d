"""One contract for every decoder and kind of clip: all frames, in order, at rising times, each change reported.

The same promises for FFmpeg, for the stand-in of NVDEC, and on a card for NVDEC itself (tests/gpu).
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from penstock_video.decode.codec import MakeCodec, Painter, Pixels, upright
from penstock_video.decode.container import DecodeOptions
from penstock_video.decode.decoder import Decoder, Picture, StreamFacts
from penstock_video.decode.verification import nv12_of
from penstock_video.errors import DecodeError, NeedsCpu
from penstock_video.types import UPRIGHT, DecoderKind, DevicePicture
from tests.deepstream_pipeline.clips import (
    DISPLAY_MATRICES,
    DisplayMatrix,
    damaged,
    displayed,
    joined,
    number_of,
    timed_clip,
    truncated,
    with_display_matrix,
)
from tests.deepstream_pipeline.decode.broken_clips import (
    FRAMES,
    SIZE,
    is_full,
    joined_with_rubbish,
    plain_clip,
    timed,
    without,
)
from tests.deepstream_pipeline.decode.fake_nvcodec import frame_of


@dataclass(frozen=True)
class Kind:
    """Who makes the pictures. read: bytes at an address of a picture's memory, where that is not the host's own."""

    decoder: DecoderKind
    codecs: MakeCodec
    read: Callable[[int, int], bytes] = lambda address, size_bytes: b""

    def opened(self, path: Path, threads: int = 0, first_pts_s: float = 0.0) -> Decoder:
        """A decoder of a clip."""
        return Decoder(str(path), DecodeOptions(threads=threads), first_pts_s, self.codecs)

    def frame(self, picture: Picture) -> av.VideoFrame:
        """In host memory, as FFmpeg has it."""
        if isinstance(picture.frame, DevicePicture):
            return frame_of(picture.frame, self.read)
        return picture.frame

    def rgb(self, picture: Picture, painter: Painter) -> Pixels:
        """(H, W, 3), upright."""
        orientation = picture.frame.orientation if isinstance(picture.frame, DevicePicture) else UPRIGHT
        return upright(painter.rgb(self.frame(picture)), orientation)


@dataclass(frozen=True)
class Expected:
    """Where the kinds honestly differ. refused: clips that they leave to the CPU; repeats: pictures that may come of a
    damaged clip beyond those that it has."""

    refused: frozenset[str] = frozenset()
    repeats: int = 2


EXPECTED = {
    DecoderKind.CPU: Expected(),
    DecoderKind.NVDEC: Expected(
        refused=frozenset(
            {
                *("a.avi", "j.avi", "v.webm", "odd.mkv", "m.mpg", "mpeg2video"),  # codecs
                *("high.mp4", "laced.mp4"),  # 4:2:2 of ten bits, lines of two moments
                "small.mp4",  # H.264 of 48x16 at least (HEVC of 144x144)
            }
        )
    ),
}


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


def seen_of(kind: Kind, path: Path, threads: int = 0, first_pts_s: float = 0.0) -> tuple[StreamFacts, Seen]:
    """All of a clip."""
    decoder, painter, seen = kind.opened(path, threads, first_pts_s), Painter(), Seen()
    facts = decoder.facts
    try:
        for packet in decoder.packets():
            for picture in decoder.decode(packet):
                seen.add(picture, number_of(kind.rgb(picture, painter)), decoder.facts)
    finally:
        decoder.close()
    seen.bad_packets = decoder.bad_packets
    return facts, seen


CLIPS: list[tuple[str, str, dict[str, Any]]] = [
    ("a.mp4", "h264", {}),
    ("b.mp4", "h264", {"b_frames": 3, "fps": 30}),
    ("b.mkv", "h264", {"b_frames": 2, "size": (322, 182)}),
    ("a.ts", "h264", {"b_frames": 2}),
    ("a.flv", "h264", {"fps": 10}),
    ("a.h264", "h264", {}),
    ("b.h264", "h264", {"b_frames": 2, "size": (318, 178)}),
    ("full.mp4", "h264", {"pixel_format": "yuvj420p"}),
    ("a.avi", "mpeg4", {"codec": "mpeg4", "fps": 10}),
    ("j.avi", "mjpeg", {"codec": "mjpeg"}),
    ("h.mp4", "hevc", {"codec": "libx265", "b_frames": 2}),
    ("h.ts", "hevc", {"codec": "libx265", "size": (322, 182)}),
    ("h.mkv", "hevc", {"codec": "libx265", "b_frames": 3, "size": (170, 146)}),
    ("v.webm", "vp9", {"codec": "libvpx-vp9", "options": {"cpu-used": "8", "deadline": "realtime"}}),
    ("odd.mkv", "ffv1", {"codec": "ffv1", "size": (161, 97)}),  # neither H.264 nor HEVC can have an odd side in 4:2:0
    ("m.mpg", "mpeg2video", {"codec": "mpeg2video"}),
    ("small.mp4", "h264", {"size": (32, 32)}),
    ("high.mp4", "h264", {"pixel_format": "yuv422p10le"}),
    ("laced.mp4", "h264", {"options": {"flags": "+ildct+ilme", "x264-params": "tff=1:keyint=12"}}),
]
OPEN_GROUPS = {"x264-params": "open-gop=1:scenecut=0:keyint=12:min-keyint=1:b-adapt=0"}
HOW = {name: how for name, _, how in CLIPS}


class DecoderContract:
    """What is promised of every kind. Who inherits gives the fixture `kind`."""

    @pytest.mark.parametrize(
        ("name", "codec", "how", "threads"),
        [*((*clip, 0) for clip in CLIPS), *((*clip, 1) for clip in CLIPS[:4])],
        ids=[*(name for name, _, _ in CLIPS), *(f"{name} one thread" for name, _, _ in CLIPS[:4])],
    )
    def test_clip_of_any_kind_gives_every_frame_in_order(
        self, kind: Kind, tmp_path: Path, name: str, codec: str, how: dict[str, Any], threads: int
    ) -> None:
        """Every container and codec: each frame once, in the order of showing, at the clip's rate, clean; or it is left
        to the CPU before any frame of it was shown."""
        path = plain_clip(tmp_path / name, frames=FRAMES, **how)
        if name in EXPECTED[kind.decoder].refused:
            with pytest.raises(NeedsCpu, match="NVDEC"):
                seen_of(kind, path, threads)
            return
        facts, seen = seen_of(kind, path, threads)
        assert (facts.codec, facts.width, facts.height) == (codec, *how.get("size", SIZE))
        assert (facts.is_live, facts.decoder) == (False, kind.decoder)
        assert seen.numbers == list(range(FRAMES))
        assert (seen.corrupt, seen.dropped, seen.new, seen.bad_packets) == ([], [], [], 0)
        fps = how.get("fps", 25)
        assert facts.fps == pytest.approx(fps)
        assert seen.pts_s == pytest.approx([number / fps for number in range(FRAMES)], abs=0.002)
        seen.assert_rising()

    @pytest.mark.parametrize("name", ["a.mp4", "b.mkv", "b.h264", "full.mp4", "h.mp4", "h.ts", "h.mkv"])
    def test_pictures_are_ffmpegs_to_the_bit(self, kind: Kind, tmp_path: Path, name: str) -> None:
        """Brightness and colours of every picture, as NV12: no tolerance; and what is said of the colours."""
        path = plain_clip(tmp_path / name, frames=FRAMES, **HOW[name])
        with av.open(str(path)) as container:
            expected = [(nv12_of(one), one.colorspace, is_full(one)) for one in container.decode(video=0)]
        decoder, count = kind.opened(path), 0
        for packet in decoder.packets():
            for picture in decoder.decode(packet):
                frame = kind.frame(picture)
                pixels, matrix, has_full_range = expected[count]
                assert np.array_equal(nv12_of(frame), pixels)
                assert (frame.colorspace, is_full(frame)) == (matrix, has_full_range)
                count += 1
        decoder.close()
        assert count == FRAMES

    @pytest.mark.parametrize("matrix", DISPLAY_MATRICES)
    def test_picture_with_a_display_matrix_is_shown_upright(
        self, kind: Kind, tmp_path: Path, matrix: DisplayMatrix
    ) -> None:
        """Pictures of rotated and mirrored clips, and their sizes, are what the matrix makes of the stored ones.

        A quarter turn inverts the sample aspect ratio.
        """
        plain = plain_clip(tmp_path / "plain.mp4", frames=3, sample_aspect_ratio=Fraction(2))
        with av.open(str(plain)) as container:
            expected = [displayed(Painter().rgb(frame), matrix) for frame in container.decode(video=0)]
        decoder, painter = kind.opened(with_display_matrix(tmp_path / "shown.mp4", plain, matrix)), Painter()
        shown = [kind.rgb(one, painter) for packet in decoder.packets() for one in decoder.decode(packet)]
        assert (decoder.facts.height, decoder.facts.width) == expected[0].shape[:2]
        assert decoder.facts.sample_aspect_ratio == (2 if matrix[0] else Fraction(1, 2))
        decoder.close()
        assert np.array_equal(shown, expected)

    def test_first_frame_continues_where_the_parent_says(self, kind: Kind, tmp_path: Path) -> None:
        """After a reconnection the times go on."""
        _, seen = seen_of(kind, plain_clip(tmp_path / "a.ts", frames=20), first_pts_s=100.0)
        assert seen.pts_s[:3] == pytest.approx([100.0, 100.04, 100.08], abs=0.002)

    @pytest.mark.parametrize("how", [{}, {"b_frames": 2}, {"codec": "libx265"}], ids=["h264", "h264 b", "hevc"])
    def test_resolution_that_changes_is_reported_and_loses_nothing(
        self, kind: Kind, tmp_path: Path, how: dict[str, Any]
    ) -> None:
        """Two clips joined in one stream: the facts are reported again with the first frame that they hold for."""
        small = plain_clip(tmp_path / "small.ts", frames=FRAMES, **how)
        large = plain_clip(tmp_path / "large.ts", frames=FRAMES, size=(322, 190), **how)
        _, seen = seen_of(kind, joined(tmp_path / "both.ts", small, large, small))
        assert seen.numbers == [*range(FRAMES)] * 3
        assert [(place, facts.width, facts.height) for place, facts in seen.new] == [(40, 322, 190), (80, *SIZE)]
        assert seen.dropped == []
        seen.assert_rising()
        assert seen.pts_s[-1] == pytest.approx(120 / 25, abs=0.3)

    @pytest.mark.parametrize("codec", ["libx265", "mpeg2video"])
    def test_codec_that_changes_is_followed(self, kind: Kind, tmp_path: Path, codec: str) -> None:
        """From H.264 to another in one stream: reported, and decoded from its next keyframe on, or left to the CPU."""
        first = plain_clip(tmp_path / "first.ts", frames=FRAMES)
        second = plain_clip(tmp_path / "second.ts", frames=FRAMES, codec=codec, first=100, gop=10)
        path = joined(tmp_path / "both.ts", first, second)
        if codec in EXPECTED[kind.decoder].refused:
            with pytest.raises(NeedsCpu, match="NVDEC"):
                seen_of(kind, path)
            return
        _, seen = seen_of(kind, path)
        assert seen.numbers[:38] == list(range(38))
        assert seen.numbers[-20:] == list(range(120, 140))
        assert [facts.codec for _, facts in seen.new] == [{"libx265": "hevc"}.get(codec, codec)]
        seen.assert_rising()

    def test_rate_that_changes_is_kept(self, kind: Kind, tmp_path: Path) -> None:
        """From ten frames a second to thirty: the times say so."""
        slow = plain_clip(tmp_path / "slow.ts", frames=20, fps=10)
        fast = plain_clip(tmp_path / "fast.ts", frames=30, fps=30)
        _, seen = seen_of(kind, joined(tmp_path / "both.ts", slow, fast))
        steps = [after - before for before, after in itertools.pairwise(seen.pts_s)]
        assert steps[5] == pytest.approx(0.1, abs=0.001)
        assert steps[-5] == pytest.approx(1 / 30, abs=0.001)
        seen.assert_rising()

    @pytest.mark.parametrize(
        "pts_of",
        [
            pytest.param(lambda n: 2**33 - 30_000 + n * 3600, id="wraps around"),
            pytest.param(lambda n: n * 3600 + (n >= 20) * 90_000 * 2, id="a gap of two seconds"),
        ],
    )
    def test_times_of_a_stream_that_jump_are_made_to_rise(
        self, kind: Kind, tmp_path: Path, pts_of: Callable[[int], int]
    ) -> None:
        """A clock of 33 bits wraps around, an encoder restarts: the frames are all there, in order, at sane times."""
        _, seen = seen_of(kind, timed(tmp_path / "jumps.ts", pts_of))
        assert seen.numbers == list(range(FRAMES))
        seen.assert_rising()
        assert seen.pts_s[-1] == pytest.approx(39 * 0.04, abs=2.1)

    @pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.ts"])
    def test_times_of_a_time_lapse_are_the_files_to_its_last_frame(self, kind: Kind, tmp_path: Path, name: str) -> None:
        """Steps of a minute and an hour are exact, also for B-frames that the decoder returns at the end."""
        times_s = [0.0, 60.0, 120.0, 120.1, 3720.0, 3780.0, 3840.5, 90_000.0, 90_060.0, 90_120.0]
        seen = seen_of(kind, timed_clip(tmp_path / name, times_s))[1]
        assert seen.pts_s == pytest.approx(times_s, abs=0.002)

    def test_times_that_go_back_are_made_to_rise(self, kind: Kind, tmp_path: Path) -> None:
        """The second half begins at nought again, as after an encoder's restart."""
        part = plain_clip(tmp_path / "part.ts", frames=20)
        _, seen = seen_of(kind, joined(tmp_path / "twice.ts", part, part))
        assert seen.numbers == [*range(20)] * 2
        seen.assert_rising()
        assert seen.pts_s[-1] == pytest.approx(39 * 0.04, abs=0.2)

    @pytest.mark.parametrize(
        "how",
        [{"b_frames": 2}, {"b_frames": 3, "options": OPEN_GROUPS}, {"codec": "libx265", "b_frames": 2}],
        ids=["h264", "h264 open", "hevc"],
    )
    def test_stream_that_begins_in_the_middle_begins_at_a_keyframe(
        self, kind: Kind, tmp_path: Path, how: dict[str, Any]
    ) -> None:
        """As a camera is joined: what comes before its first keyframe is no one's failure, and not shown."""
        whole = plain_clip(tmp_path / "a.ts", frames=FRAMES, **how)
        _, seen = seen_of(kind, without(tmp_path / "middle.ts", whole, range(5)))
        assert seen.numbers == list(range(12, FRAMES))
        assert (seen.corrupt, seen.dropped, seen.bad_packets) == ([], [], 0)

    @pytest.mark.parametrize("name", ["a.mp4", "a.avi", "b.mkv", "a.ts", "j.avi", "h.mp4", "h.ts", "a.h264", "a.flv"])
    def test_damaged_bytes_cost_frames_but_no_crash(self, kind: Kind, tmp_path: Path, name: str) -> None:
        """Bits flipped anywhere: it ends in order or with an error of ours, never otherwise, and its times rise."""
        whole = plain_clip(tmp_path / name, frames=FRAMES, **HOW[name])
        for seed in range(8):
            path = damaged(tmp_path / f"{seed}{name}", whole, flips=2 + seed * 2, seed=seed, spare=0.0)
            try:
                _, seen = seen_of(kind, path)
            except (DecodeError, NeedsCpu):
                continue
            seen.assert_rising()
            assert len(seen.numbers) <= FRAMES + EXPECTED[kind.decoder].repeats

    @pytest.mark.parametrize("codec", ["libx264", "libx265"])
    def test_damaged_frames_are_marked_until_the_next_keyframe(self, kind: Kind, tmp_path: Path, codec: str) -> None:
        """What is shown without a mark is what the camera saw: every frame that is wrong is marked, or dropped."""
        whole = plain_clip(tmp_path / "a.ts", frames=120, gop=12, size=(320, 192), codec=codec)
        found = 0
        for seed in range(6):
            _, seen = seen_of(kind, damaged(tmp_path / f"{seed}.ts", whole, flips=3, seed=seed, spare=0.2))
            unmarked = set(range(len(seen.numbers))) - {*seen.corrupt, *seen.dropped}
            numbers = [seen.numbers[place] for place in sorted(unmarked)]
            assert numbers == sorted(set(numbers))
            assert set(numbers) <= set(range(120))
            assert seen.numbers[-1] == 119  # it recovers
            found += len(seen.corrupt) + len(seen.dropped)
        assert found > 6 or codec == "libx265"  # of which FFmpeg mends much without a word

    @pytest.mark.parametrize("codec", ["libx264", "libx265"])
    def test_stream_recovers_after_lost_packets_and_garbage(self, kind: Kind, tmp_path: Path, codec: str) -> None:
        """From the second keyframe after the damage all is there again, and clean, and before it nothing was missed."""
        whole = plain_clip(tmp_path / "a.ts", frames=60, gop=12, codec=codec)
        for path in (
            without(tmp_path / "lost.ts", whole, range(15, 20)),
            without(tmp_path / "garbage.ts", whole, range(15, 20), bytes(range(7, 107)) * 9),
        ):
            _, seen = seen_of(kind, path)
            unmarked = [n for i, n in enumerate(seen.numbers) if i not in {*seen.corrupt, *seen.dropped}]
            assert unmarked[:12] == list(range(12))
            assert unmarked[-24:] == list(range(36, 60))
            seen.assert_rising()

    @pytest.mark.parametrize("name", ["a.avi", "a.ts", "b.mkv", "a.flv", "h.ts"])
    def test_truncated_clip_gives_what_is_there(self, kind: Kind, tmp_path: Path, name: str) -> None:
        """A file that is cut off in the middle is read until there."""
        if name in EXPECTED[kind.decoder].refused:
            return
        whole = plain_clip(tmp_path / name, frames=FRAMES, **HOW[name])
        _, seen = seen_of(kind, truncated(tmp_path / f"cut-{name}", whole, 0.6))
        bad = {*seen.corrupt, *seen.dropped}
        whole_ones = [number for place, number in enumerate(seen.numbers) if place not in bad]
        assert whole_ones == list(range(len(whole_ones)))
        assert 5 < len(whole_ones) < FRAMES

    @pytest.mark.parametrize("name", ["a.mp4", "b.mkv", "a.avi", "a.ts", "a.h264", "h.mp4", "h.ts"])
    def test_clip_that_is_rewound_gives_every_frame_again(self, kind: Kind, tmp_path: Path, name: str) -> None:
        """Whether its container can seek or not: each loop has all frames, its first is_new, the times go on."""
        if name in EXPECTED[kind.decoder].refused:
            return
        how = {**HOW[name], "size": SIZE, "fps": 25}
        decoder = kind.opened(plain_clip(tmp_path / name, frames=20, **how))
        seen, painter = Seen(), Painter()
        for _ in range(3):
            for packet in decoder.packets():
                for picture in decoder.decode(packet):
                    seen.add(picture, number_of(kind.rgb(picture, painter)), decoder.facts)
            decoder.rewind()
        decoder.close()
        assert seen.numbers == [*range(20)] * 3
        assert [place for place, _ in seen.new] == [20, 40]
        assert (seen.corrupt, seen.dropped, decoder.bad_packets) == ([], [], 0)
        seen.assert_rising()
        assert seen.pts_s[-1] == pytest.approx(59 * 0.04, abs=0.05)

    @pytest.mark.parametrize("codec", ["libx264", "libx265"])
    def test_stream_that_is_rubbish_from_the_middle_on_ends(self, kind: Kind, tmp_path: Path, codec: str) -> None:
        """Packets of nothing do not keep a decoder busy for ever."""
        whole = plain_clip(tmp_path / "a.mp4", frames=20, codec=codec)
        path = joined_with_rubbish(tmp_path / "bad.mp4", whole, 260)
        with pytest.raises(DecodeError, match="packets in a row"):
            seen_of(kind, path)
