"""Clips, models, folders and gateways that a run cannot use as they are: what comes of it, and what a user reads."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.deepstream_pipeline.clips import Picture, joined, write_clip
from tests.deepstream_pipeline.sinks.disks import fill, small_disk
from tests.integration.video_runs import (
    COLOURS,
    Place,
    lines,
    one_sentence,
    pictures_of,
    run,
    tracked,
    video_unheard,
    write_street,
)

pytestmark = pytest.mark.xdist_group("video")


def coloured(number: int, width: int, height: int) -> Picture:
    """Ten pictures of red, ten of green, ten of blue."""
    picture = np.full((height, width, 3), 30, np.uint8)
    picture[..., number // 10 % 3] = 200
    return picture


def test_clip_that_changes_its_size_is_run_through(video_place: Place, tmp_path: Path) -> None:
    """Every frame of both sizes, a segment each, with times that rise; an annotated file for each size."""
    parts = [write_clip(tmp_path / f"{size[0]}.ts", frames=12, fps=10, size=size) for size in ((320, 192), (256, 144))]
    clip = joined(tmp_path / "both.ts", *parts)
    ended = run(video_place, "--source", clip, "--model", "street", "--out", tmp_path / "out")
    assert ended.code == 0, ended.err
    objects = lines(tmp_path / "out" / "objects.jsonl")
    sizes = [(line["width"], line["height"], line["segment"]) for line in objects]
    assert set(sizes) == {(320, 192, 0), (256, 144, 1)}
    assert sizes.count((320, 192, 0)) == sizes.count((256, 144, 1)) == 12
    times = [line["pts_s"] for line in objects]
    assert times == sorted(set(times))
    files = [pictures_of(tmp_path / "out" / name) for name in ("annotated.mp4", "annotated-2.mp4")]
    assert [(len(pictures), pictures[0].shape) for pictures in files] == [(12, (192, 320, 3)), (12, (144, 256, 3))]


def test_classifier_says_what_each_picture_is(video_place: Place, tmp_path: Path) -> None:
    """As primary model: a class a frame, no objects."""
    clip = write_clip(tmp_path / "clip.mp4", frames=30, fps=10, picture=coloured)
    ended = run(video_place, "--source", clip, "--model", "colour", "--sink", "jsonl", "--out", tmp_path / "out")
    assert ended.code == 0, ended.err
    objects = lines(tmp_path / "out" / "objects.jsonl")
    assert [line["classes"][0]["label"] for line in objects] == [name for name in COLOURS for _ in range(10)]
    assert not any(line["objects"] for line in objects)
    assert all(line["is_inferred"] and line["classes"][0]["model"] == "colour" for line in objects)


def test_secondary_model_says_what_each_object_is(video_place: Place, tmp_path: Path) -> None:
    """Of every object of the chosen classes, of two sources whose crops share batches; of others nothing."""
    for name in ("red", "blue"):
        write_street(tmp_path / f"{name}.mp4", 33, 5.0, 6.0, strongest=name)
    (tmp_path / "run.yaml").write_text(
        "source: [{uri: red.mp4}, {uri: blue.mp4}]\nprimary-gie: {model: street}\n"
        "secondary-gie: [{model: colour, operate-on-class-ids: [person, car]}]\n"
    )
    ended = run(video_place, tmp_path / "run.yaml", "--sink", "jsonl", "--out", tmp_path / "out")
    assert ended.code == 0, ended.err
    seen = [
        (line["source_id"], row["label"], [(one["model"], one["label"]) for one in row["attributes"]])
        for line in lines(tmp_path / "out" / "objects.jsonl")
        for row in tracked(line)
    ]
    assert {label for _, label, _ in seen} == {"person", "bicycle", "car"}
    assert all(said == ([] if label == "bicycle" else [("colour", source)]) for source, label, said in seen)
    assert min(sum(source == name for source, _, _ in seen) for name in ("red", "blue")) > 50


FAILURES = {
    "nothing answers at http://127.0.0.1:9": (
        1,
        ("--source", "clip.mp4", "--model", "street", "--url", "http://127.0.0.1:9"),
    ),
    "rules.yaml:1:47: analytics.line-crossing[0].class-id: 'persn': the model has no such class; did you mean": (
        2,
        ("--source", "clip.mp4", "--model", "street", "--rules", "rules.yaml"),
    ),
}


@pytest.mark.parametrize("sentence", FAILURES)
def test_run_that_cannot_begin_says_why_in_one_sentence(video_place: Place, tmp_path: Path, sentence: str) -> None:
    """With the exit code that says whose fault it is, and without a file."""
    code, words = FAILURES[sentence]
    write_clip(tmp_path / "clip.mp4")
    (tmp_path / "rules.yaml").write_text("line-crossing: [{name: Door, line: 0;0;99;99, class-id: persn}]\n")
    placed = [tmp_path / word if word.endswith((".mp4", ".yaml")) else word for word in words]
    ended = run(video_place, *placed, "--out", tmp_path / "out")
    assert ended.code == code
    assert one_sentence(ended), ended.err
    assert sentence in ended.err.splitlines()[-1]
    assert not list((tmp_path / "out").glob("*"))


def test_text_that_is_called_a_clip_fails_alone(video_place: Place, tmp_path: Path) -> None:
    """The clip beside it is run to its end; the summary says which failed and why; exit code 1."""
    (tmp_path / "text.mp4").write_text("no picture in here\n" * 100)
    clip = write_clip(tmp_path / "clip.mp4")
    words = ("--source", clip, "--source", tmp_path / "text.mp4", "--model", "street", "--out", tmp_path / "out")
    ended = run(video_place, *words)
    assert ended.code == 1
    assert f"text failed: {tmp_path / 'text.mp4'} cannot be read as video" in ended.out
    assert len(pictures_of(tmp_path / "out" / "clip" / "annotated.mp4")) == 30
    assert "Traceback" not in ended.err


def test_disk_that_is_full_stops_no_run(video_place: Place, tmp_path: Path) -> None:
    """All frames are inferred to the end; the log says once what could not be written, and the end how much."""
    clip = write_clip(tmp_path / "clip.mp4", frames=60)
    with small_disk(tmp_path / "disk") as disk:
        fill(disk, leave_kib=8)
        ended = run(video_place, "--source", clip, "--model", "street", "--out", disk)
    assert ended.code == 1, ended.err
    assert "60 frames in " in ended.out
    assert re.search(r"sink annotated failed: .*disk full.*\(\d+ results lost\)", ended.out), ended.out
    assert "disk full" in ended.err or "No space left" in ended.err
    assert ended.err.count("disk full") < 5
    assert "Traceback" not in ended.err


def test_run_whose_reader_left_ends_soon_with_whole_files(video_place: Place, tmp_path: Path) -> None:
    """As of `penstock video run … | head -1`: the reader is gone, so it ends, and what is written plays."""
    clip = write_clip(tmp_path / "clip.mp4", frames=60)
    words = ("--source", clip, "--model", "street", "--no-api", "--out", tmp_path / "out")
    assert video_unheard(video_place, "run", *words, timeout_s=40) != 0
    objects = lines(tmp_path / "out" / "objects.jsonl")
    assert not objects or len(pictures_of(tmp_path / "out" / "annotated.mp4")) == len(objects)
