"""Clips that are cut out of a source's packets."""

import os
import re
import resource
from pathlib import Path
from typing import Any

import av
import pytest

from penstock_video.decode import recording
from penstock_video.decode.container import DecodeOptions
from penstock_video.decode.decoder import Decoder
from penstock_video.decode.recording import MOST_RECORDINGS, ClipRequest, FinishedClip, PacketRecorder
from tests.deepstream_pipeline.clips import joined, number_of, write_clip


def numbers_of(path: Path) -> list[int]:
    """Of the pictures of a clip."""
    with av.open(str(path)) as container:
        return [number_of(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]


class Run:
    """A source that is read to its end, with recordings begun at given packets."""

    def __init__(self, clip: Path, cache_s: float = 1.0, **options: Any) -> None:
        self.finished: list[tuple[str, str]] = []
        self.reported: list[FinishedClip] = []
        self._decoder = Decoder(str(clip), DecodeOptions())
        self.recorder = PacketRecorder(cache_s, self._note, **options)
        self.recorder.begin(self._decoder.stream, is_live=False)

    def _note(self, over: FinishedClip) -> None:
        self.finished.append((over.path, over.error))
        self.reported.append(over)

    def read(self, cuts: dict[int, tuple[Path, float, float]], loops: int = 1) -> None:
        """cuts: by packet, what is begun before it: path, before_s, after_s."""
        count = 0
        for loop in range(loops):
            if loop:
                self._decoder.rewind()
            for packet in self._decoder.packets():
                if count in cuts:
                    path, before_s, after_s = cuts[count]
                    self.recorder.cut(ClipRequest(str(path), before_s, after_s), count / 25)
                self.recorder.push(packet)
                if any(picture.is_new for picture in self._decoder.decode(packet)) and loop == 0:
                    self.recorder.begin(self._decoder.stream, is_live=False)
                count += 1
        self.recorder.close("the source is over")
        self._decoder.close()


CLIPS: list[tuple[str, dict[str, Any]]] = [
    ("a.mp4", {}),
    ("b.mkv", {"b_frames": 2}),
    ("a.ts", {"b_frames": 2}),
    ("a.h264", {}),
    ("a.flv", {}),
    ("a.avi", {"codec": "mpeg4"}),
    ("j.avi", {"codec": "mjpeg"}),
    ("h.mp4", {"codec": "libx265"}),
]


@pytest.mark.parametrize(("name", "how"), CLIPS, ids=[name for name, _ in CLIPS])
def test_recording_holds_what_was_asked_for(tmp_path: Path, name: str, how: dict[str, Any]) -> None:
    """From the keyframe before the moment to its end, of every codec, playable, under its own name only when whole."""
    clip = write_clip(tmp_path / name, frames=60, **how)
    run, path = Run(clip), tmp_path / "cut.mp4"
    run.read({40: (path, 0.5, 0.4)})
    assert run.finished == [(str(path), "")]
    numbers = numbers_of(path)
    whole = [number for number in range(60) if number in numbers]
    assert numbers == sorted(numbers)
    assert 24 <= whole[0] <= 28  # the keyframe at 24, half a second before 40; all of MJPEG are keyframes
    assert 47 <= whole[-1] <= 54  # four tenths of a second after 40, in the order of the packets
    assert len(whole) >= whole[-1] - whole[0] - 3  # whose last ones may want pictures that come after the end
    assert not (tmp_path / "cut.mp4.part").exists()


def test_recording_of_a_loop_goes_on(tmp_path: Path) -> None:
    """Over a file's end into its next loop; the times of the recording rise."""
    run, path = Run(write_clip(tmp_path / "a.mp4", frames=30)), tmp_path / "cut.mp4"
    run.read({26: (path, 0.0, 0.6)}, loops=2)
    assert run.finished == [(str(path), "")]
    assert numbers_of(path) == [24, 25, 26, 27, 28, 29, *range(11)]


def test_recording_ends_where_the_pictures_change(tmp_path: Path) -> None:
    """What comes in another size cannot stand in the same file: it ends, whole, with what there is."""
    small = write_clip(tmp_path / "small.ts", frames=40)
    large = write_clip(tmp_path / "large.ts", frames=40, size=(320, 192))
    run, path = Run(joined(tmp_path / "both.ts", small, large)), tmp_path / "cut.mp4"
    run.read({30: (path, 0.1, 60.0)})
    [(_, why)] = run.finished
    assert re.fullmatch("0.[34567] s after its moment, not 60: the pictures changed their size or codec", why)
    assert numbers_of(path)[:14] == list(range(24, 38))


def test_cache_is_bounded_in_time_and_bytes(tmp_path: Path) -> None:
    """It reaches back as far as it should, to a keyframe, and never holds more bytes than it may."""
    clip = write_clip(tmp_path / "a.ts", frames=100, gop=10)
    run, path = Run(clip, cache_s=1.0), tmp_path / "cut.mp4"
    run.read({99: (path, 60.0, 0.0)})
    assert 99 - 25 - 10 <= numbers_of(path)[0] <= 99 - 25
    small = Run(clip, cache_s=60.0, most_bytes=3_000)
    small.read({99: (path, 60.0, 0.0)})
    assert numbers_of(path)[0] >= 50
    assert small.recorder.cached_bytes <= 3_000


def test_recording_without_a_cache_begins_with_the_next_keyframe(tmp_path: Path) -> None:
    """Nothing is kept for a source that is to have no past."""
    run, path = Run(write_clip(tmp_path / "a.mp4", frames=60), cache_s=0.0), tmp_path / "cut.mp4"
    run.read({30: (path, 5.0, 0.8)})
    assert numbers_of(path)[0] == 36
    assert run.recorder.cached_bytes == 0


def test_recording_that_cannot_be_written_is_reported_once(tmp_path: Path) -> None:
    """A folder that is not there, and one that is a file: an error, no exception, and nothing is left."""
    run = Run(write_clip(tmp_path / "a.mp4", frames=60))
    (tmp_path / "file").touch()
    lost, blocked = tmp_path / "lost" / "cut.mp4", tmp_path / "file" / "cut.mp4"
    run.read({30: (lost, 0.5, 0.5), 31: (blocked, 0.5, 0.5)})
    assert [path for path, _ in run.finished] == [str(lost), str(blocked)]
    assert all(error.startswith("the recording cannot be written") for _, error in run.finished)
    assert not lost.parent.exists()


def test_recording_of_packets_that_mp4_cannot_hold_names_them(tmp_path: Path) -> None:
    """An old AVI's codec is no fault of the disk; nothing is left of the try."""
    run = Run(write_clip(tmp_path / "old.avi", frames=60, codec="msmpeg4v2"))
    run.read({30: (tmp_path / "cut.mp4", 0.5, 0.5)})
    [(_, error)] = run.finished
    assert error == "the recording cannot be written: packets of msmpeg4v2 do not fit into MP4"
    assert run.reported[0].is_unwritable
    assert sorted(os.listdir(tmp_path)) == ["old.avi"]


def test_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path) -> None:
    """Writing fails in the middle: the recording says so, leaves nothing, and the reading goes on."""
    clip = write_clip(tmp_path / "a.avi", frames=200, codec="mjpeg", size=(320, 240))
    run, path = Run(clip), tmp_path / "cut.mp4"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        run.read({10: (path, 0.1, 60.0)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    [(reported, error)] = run.finished
    assert reported == str(path)
    assert error
    assert sorted(os.listdir(tmp_path)) == ["a.avi"]


def test_silent_source_does_not_keep_a_recording_open(tmp_path: Path) -> None:
    """Its end comes with the clock, where no packets do."""
    run, path = Run(write_clip(tmp_path / "a.mp4", frames=60)), tmp_path / "cut.mp4"
    run.read({})
    run.finished.clear()
    again = Run(tmp_path / "a.mp4")
    for number, packet in enumerate(again._decoder.packets()):
        again.recorder.push(packet)
        if number == 30:
            again.recorder.cut(ClipRequest(str(path), 0.5, 1.0), 10.0)
            break
    again.recorder.look(11.0)
    assert not again.finished
    again.recorder.look(11.0 + recording._SILENCE_TIMEOUT_S)
    assert again.finished == [(str(path), "0.0 s after its moment, not 1: no packets came any more")]
    assert numbers_of(path)[-1] == 30


def test_recordings_at_once_are_bounded(tmp_path: Path) -> None:
    """One more than may be is refused in words, and the others are made."""
    run = Run(write_clip(tmp_path / "a.mp4", frames=60))
    run.read({20 + n: (tmp_path / f"{n}.mp4", 0.5, 0.8) for n in range(MOST_RECORDINGS + 1)})
    errors = {Path(path).name: error for path, error in run.finished}
    assert [name for name, error in errors.items() if error] == [f"{MOST_RECORDINGS}.mp4"]
    assert all(numbers_of(tmp_path / name) for name, error in errors.items() if not error)


def test_recording_tells_the_seconds_that_are_in_it(tmp_path: Path) -> None:
    """Not those that were asked for: what the cache had, and what came until the end, with why there is no more."""
    clip = write_clip(tmp_path / "a.ts", frames=100, gop=5)
    run, path = Run(clip, cache_s=1.0), tmp_path / "cut.mp4"
    run.read({75: (path, 30.0, 60.0), 12: (tmp_path / "early.mp4", 0.9, 0.4), 50: (tmp_path / "whole.mp4", 0.9, 0.4)})
    early, whole, short = sorted(run.reported, key=lambda over: over.before_s + over.after_s)
    assert (early.error, whole.error) == ("0.4 s before its moment, not 0.9: the source was opened only then", "")
    assert "1.2 s before its moment, not 30: smart-rec-cache is 1 s; " in short.error
    assert "1.0 s after its moment, not 60: the source is over" in short.error
    for over in run.reported:
        shown_s = len(numbers_of(Path(over.path))) / 25
        assert over.before_s + over.after_s == pytest.approx(shown_s, abs=0.05)


def test_recording_is_cut_around_its_moment_not_around_what_was_read_since(tmp_path: Path) -> None:
    """A file's packets are read before an event of theirs is reported: the cache reaches back from the frames that are
    on their way, and a clip whose time is read already is whole at once."""
    run, path = Run(write_clip(tmp_path / "a.ts", frames=200, gop=10), cache_s=1.0), tmp_path / "cut.mp4"
    moment_s = None
    for number, packet in enumerate(run._decoder.packets()):
        run.recorder.push(packet, moment_s)
        if number == 50:
            moment_s = run.recorder.moment_of(float(packet.pts * packet.time_base))
        if number == 180:
            run.recorder.cut(ClipRequest(str(path), 1.0, 2.0, moment_s), 0.0)
            break
    [over] = run.reported
    assert over.error == ""
    assert over.after_s == pytest.approx(2.0, abs=0.1)
    assert 20 <= numbers_of(path)[0] <= 25
    assert numbers_of(path)[-1] in range(98, 102)
    run.recorder.push(packet, None)
    assert run.recorder._kept[0].dts_s > 2.0  # no one wants it any more


def test_recording_is_not_refused_where_its_packets_fit(tmp_path: Path) -> None:
    """What a source's packets can be written to is known once it is open."""
    for name, codec, fits in (("a.mp4", "libx264", True), ("old.avi", "msmpeg4v2", False)):
        decoder = Decoder(str(write_clip(tmp_path / name, frames=5, codec=codec)), DecodeOptions())
        assert recording.fits_mp4(decoder.stream) is fits
        decoder.close()
