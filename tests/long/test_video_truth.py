"""All of vtest.avi against the plain reference program, whose first frames are held in tests/integration."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deepstream_pipeline.reference import PAVEMENT_LINE, reference
from tests.integration.video_runs import Place, lines, new_place, put_model, start_stack_at
from tests.integration.video_truth import expect_annotated, expect_same_counts, expect_same_tracks, run_of
from tests.support.stack import stop_stack

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
FRAMES = 795


@pytest.fixture
def place(tmp_path: Path, shared_dir: Path, triton_environment: Path) -> Iterator[Place]:
    """Where a stack runs that serves fastestdet."""
    (tmp_path / "v").mkdir()
    place = new_place(tmp_path / "v")
    put_model(place, shared_dir)
    stack = start_stack_at(place, "--models", "fastestdet")
    try:
        yield place
    finally:
        assert stop_stack(stack) == 0, "".join(stack.log[-30:])


def test_whole_clip_is_the_reference_programs(
    place: Place, shared_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every box, every identity, the counts after every frame, and an annotated clip with each of its frames."""
    clip, model = shared_dir / "media" / "vtest.avi", shared_dir / "models" / "FastestDet.onnx"
    began = time.monotonic()
    ended = run_of(place, clip, tmp_path / "out", timeout_s=600.0)
    took_s = time.monotonic() - began
    assert ended.code == 0, ended.err
    assert f"{FRAMES} frames in " in ended.out
    seen = reference(clip, model, PAVEMENT_LINE)
    objects, events = (lines(tmp_path / "out" / name) for name in ("objects.jsonl", "events.jsonl"))
    assert len(objects) == len(seen) == FRAMES
    apart = expect_same_tracks(objects, seen)
    right, left = expect_same_counts(objects, events, seen)
    expect_annotated(tmp_path / "out" / "annotated.mp4", clip, FRAMES)
    with capsys.disabled():
        print(f"{FRAMES} frames in {took_s:.1f} s; boxes {apart:.6f} px apart at most; {right} right, {left} left")  # noqa: T201
