"""A live HLS playlist, in files."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest

from penstock_video.errors import SinkFailed
from penstock_video.sinks.hls import RETRY_S, HlsOptions, HlsSink, Playlist, Segment
from penstock_video.sinks.osd import Osd
from tests.deepstream_pipeline.clips import number_of
from tests.deepstream_pipeline.sinks.disks import fill, small_disk
from tests.deepstream_pipeline.sinks.results import PLAIN, Clock, numbered, result
from tests.deepstream_pipeline.sinks.videos import read_video


def sink_in(folder: Path, *, list_size: int = 3) -> HlsSink:
    """A sink of one source, with a second a segment."""
    return HlsSink(HlsOptions(folder, segment_s=1.0, list_size=list_size), Osd(PLAIN), is_single=True)


def segments(index: Path) -> list[str]:
    """The segments that a playlist names."""
    return re.findall(r"^segment-\d+\.ts$", index.read_text(), re.MULTILINE)


def test_hls_ended_playlist_plays_every_frame(tmp_path: Path) -> None:
    """A source that is over leaves a playlist with an end, and every frame of its segments at its time."""
    sink = sink_in(tmp_path, list_size=10)
    for number in range(45):
        sink.write(numbered(number))
    sink.end_source("cam")
    index = tmp_path / "hls" / "index.m3u8"
    assert index.read_text().rstrip().endswith("#EXT-X-ENDLIST")
    assert len(segments(index)) == 5
    read = read_video(index)
    assert [number_of(picture) for picture in read.pictures] == list(range(45))
    steps = [b - a for a, b in zip(read.times, read.times[1:], strict=False)]
    assert steps == pytest.approx([0.1] * 44, abs=0.001)
    assert (read.codec, read.sizes) == ("h264", {(160, 96)})


def test_hls_live_playlist_slides_and_names_only_whole_segments(tmp_path: Path) -> None:
    """While it is live: as many segments as were asked for, each there and whole, old ones deleted, no end."""
    sink = sink_in(tmp_path)
    seen: list[str] = []
    for number in range(105):
        sink.write(numbered(number))
        index = tmp_path / "hls" / "index.m3u8"
        if index.exists():
            named = segments(index)
            assert len(named) <= 3
            assert "ENDLIST" not in index.read_text()
            assert all((tmp_path / "hls" / name).stat().st_size % 188 == 0 for name in named)
            seen += [name for name in named if name not in seen]
    assert len(seen) == 10
    assert len(list((tmp_path / "hls").glob("segment-*"))) <= 3 + 4
    last = read_video(tmp_path / "hls" / seen[-1])
    assert [number_of(picture) for picture in last.pictures] == list(range(90, 100))
    sink.close()


def test_hls_of_an_earlier_run_is_replaced(tmp_path: Path) -> None:
    """A new run's playlist names nothing of an earlier one, whose segments are gone; their numbers go on."""
    first = sink_in(tmp_path)
    for number in range(25):
        first.write(numbered(number))
    first.close()
    index = tmp_path / "hls" / "index.m3u8"
    before = segments(index)
    second = sink_in(tmp_path)
    second.write(numbered(0))
    second.close()
    after = segments(index)
    assert len(after) == 1
    assert {path.name for path in (tmp_path / "hls").iterdir()} == {"index.m3u8", *after}
    assert int(after[0][8:-3]) >= int(before[0][8:-3])


def test_hls_of_another_size_goes_on_behind_a_discontinuity(tmp_path: Path) -> None:
    """A camera that changes its resolution goes on at its own size; the playlist tells players."""
    sink = sink_in(tmp_path)
    for number in range(20):
        sink.write(numbered(number, size=(160, 96) if number < 10 else (321, 241)))
    sink.close()
    index = tmp_path / "hls" / "index.m3u8"
    assert index.read_text().count("#EXT-X-DISCONTINUITY\n") == 1
    first, second = (read_video(tmp_path / "hls" / name) for name in segments(index))
    assert ([number_of(one) for one in first.pictures], first.sizes) == (list(range(10)), {(160, 96)})
    assert ([number_of(one) for one in second.pictures], second.sizes) == (list(range(10, 20)), {(322, 242)})


def test_hls_of_a_camera_that_was_away_has_no_long_segment(tmp_path: Path) -> None:
    """A hole of an hour in a stream is a discontinuity, not a segment of an hour."""
    sink = sink_in(tmp_path)
    for number in [*range(15), *range(36_000, 36_015)]:
        sink.write(numbered(number))
    sink.close()
    text = (tmp_path / "hls" / "index.m3u8").read_text()
    durations = [float(one) for one in re.findall(r"#EXTINF:([\d.]+)", text)]
    assert durations == pytest.approx([0.5, 1.0, 0.5])
    assert "#EXT-X-TARGETDURATION:1\n" in text


def test_hls_playlist_counts_what_slid_out_of_it() -> None:
    """Sequence numbers tell players what is gone: segments, and discontinuities among them."""
    playlist = Playlist(segment_s=2.0, list_size=2)
    gone = [playlist.add(Segment(number, 2.0, "t", has_gap=number == 11)) for number in range(10, 17)]
    assert gone == [[], [], [], [], [], ["segment-10.ts"], ["segment-11.ts"]]  # 12 removed 2 from the list
    lines = playlist.text().splitlines()
    assert lines[2:5] == ["#EXT-X-TARGETDURATION:2", "#EXT-X-MEDIA-SEQUENCE:15", "#EXT-X-DISCONTINUITY-SEQUENCE:1"]
    assert lines[-1] == "segment-16.ts"
    assert playlist.text(is_over=True).splitlines()[-1] == "#EXT-X-ENDLIST"


def test_hls_segment_stays_on_disk_for_a_playlist_after_it_left() -> None:
    """A player with the old list can read its last segment for the time that RFC 8216 requires."""
    playlist = Playlist(segment_s=2.0, list_size=3)
    published_s, left_at_s, durations = 0.0, {}, {}
    for number in range(40):
        durations[f"segment-{number}.ts"] = duration_s = (0.5, 2.0, 1.0)[number % 3]
        published_s += duration_s
        deleted = playlist.add(Segment(number, duration_s, "t"))
        left_at_s[f"segment-{number - 3}.ts"] = published_s
        for name in deleted:
            assert published_s - left_at_s[name] >= 3.5 + durations[name]
    assert len(left_at_s) > 30


@pytest.mark.parametrize("steps_s", [(0.1,), (0.4,), (1.6,), (0.1, 0.1, 0.1, 1.3), (0.1,) * 40 + (2.4,) * 5])
def test_hls_target_duration_never_changes_and_holds(tmp_path: Path, steps_s: tuple[float, ...]) -> None:
    """In a live playlist the target is constant, and no segment is longer, for any distance of frames."""
    sink = sink_in(tmp_path)
    index = tmp_path / "hls" / "index.m3u8"
    targets, pts_s = set(), 0.0
    for number, step_s in zip(range(150), itertools.cycle(steps_s), strict=False):
        result = numbered(number)
        pts_s += step_s
        sink.write(replace(result, frame=replace(result.frame, pts_s=pts_s)))
        if index.exists():
            text = index.read_text()
            (target,) = re.findall(r"#EXT-X-TARGETDURATION:(\d+)\n", text)
            targets.add(int(target))
            assert all(round(float(one)) <= int(target) for one in re.findall(r"#EXTINF:([\d.]+)", text))
    sink.close()
    assert len(targets) == 1


def test_hls_viewer_that_reads_slowly_or_goes_does_not_matter(tmp_path: Path) -> None:
    """FAULTS 62: a viewer may hold a segment for long after it was deleted, and reads it to its end."""
    sink = sink_in(tmp_path)
    for number in range(25):
        sink.write(numbered(number))
    name = segments(tmp_path / "hls" / "index.m3u8")[0]
    with (tmp_path / "hls" / name).open("rb") as viewer:
        begin = viewer.read(188)
        for number in range(25, 150):
            sink.write(numbered(number))
        assert not (tmp_path / "hls" / name).exists()
        assert len(begin + viewer.read()) % 188 == 0
    sink.close()


def test_hls_on_a_full_disk_is_reported_once_and_begins_anew(tmp_path: Path) -> None:
    """FAULTS 59: a full disk is reported once, pictures are counted, and with room again a playlist plays."""
    clock = Clock()
    with small_disk(tmp_path / "disk") as disk:
        options = HlsOptions(disk, segment_s=1.0, list_size=3)
        sink = HlsSink(options, Osd(PLAIN), is_single=True, clock=clock)
        for number in range(15):
            sink.write(numbered(number))
        filler = fill(disk)
        reported = []
        for number in range(15, 400):
            clock.now += 0.1
            try:
                sink.write(numbered(number))
            except SinkFailed as failure:
                reported.append(failure.message)
        assert len(reported) == 1, reported
        assert re.search(r"disk/hls: .*; HLS is off", reported[0])
        assert sink.lost > 10
        filler.unlink()
        clock.now += RETRY_S
        for number in range(400, 415):
            sink.write(numbered(number))
        sink.close()
        read = read_video(disk / "hls" / "index.m3u8")
        assert [number_of(picture) for picture in read.pictures] == list(range(390, 415))


def test_hls_of_several_sources_lies_in_their_folders(tmp_path: Path) -> None:
    """Each of several sources has its playlist; a frame without a picture is not written."""
    sink = HlsSink(HlsOptions(tmp_path), Osd(PLAIN))
    for number in range(4):
        sink.write(numbered(number, source_id=f"cam{number % 2}"))
    sink.write(result(4, source_id="cam0", has_image=False))
    sink.close()
    for number in range(2):
        pictures = read_video(tmp_path / f"cam{number}" / "hls" / "index.m3u8").pictures
        assert [number_of(picture) for picture in pictures] == [number, number + 2]
