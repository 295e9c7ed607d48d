"""A program whose engine is slow, and one whose sources come and go. FAULTS 51 and 53 in a running program."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.video_chaos import (
    FPS,
    SPOT_CONFIG,
    counts_of,
    engine_at,
    program_at,
    rates,
    settings_of,
    spot_clip,
)
from tests.integration.video_cycles import come_and_go, cycling, expect_same, held_by, settled
from tests.integration.video_runs import Place, new_place, start_stack_at
from tests.support.stack import stop_stack
from tests.support.tiny_models import write_model
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.xdist_group("video-chaos"), pytest.mark.timeout(300), pytest.mark.long]

SLOW_S = 0.5
NO_CANARY = 'parameters { key: "canary" value { string_value: "off" } }\n'  # which would take its half a second, too
SLOW = f'''"""A detector that takes {SLOW_S} s a picture, and none of the CPU."""
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            rows = len(pb_utils.get_input_tensor_by_name(request, "images").as_numpy())
            time.sleep({SLOW_S} * rows)
            shapes = {{"heatmap": (rows, 1, 12, 20), "distances": (rows, 4, 12, 20)}}
            tensors = [pb_utils.Tensor(name, np.full(shape, -9, np.float32)) for name, shape in shapes.items()]
            answers.append(pb_utils.InferenceResponse(tensors))
        return answers
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Where the programs of this file run, with one engine."""
    with engine_at(tmp_path_factory.mktemp("e")) as place:
        yield place


def test_engine_of_two_frames_a_second_bounds_the_latency_and_counts_the_rest(
    tmp_path: Path, triton_environment: Path
) -> None:
    """Cameras bring ten times what it can: it is kept busy, what is too old is never inferred, and every frame is
    either in the results or among the drops."""
    place = new_place(tmp_path)
    config = SPOT_CONFIG.replace("onnxruntime", "python").replace("max_batch_size: 16", "max_batch_size: 1") + NO_CANARY
    write_model(place.home / "models", "slow_spot", SLOW, config)
    clip = spot_clip(tmp_path / "spot.mp4")
    sources = [{"uri": str(clip), "camera_id": name, "loop": True, "realtime": True} for name in ("a", "b")]
    sinks = [{"type": "jsonl", "folder": str(tmp_path / "out")}]
    stack = start_stack_at(place, "--models", "slow_spot")
    try:
        settings = settings_of(sources, model="slow_spot", sink=sinks)
        with program_at(place, tmp_path / "run", settings) as program:
            program.wait_for_states({"a": "running", "b": "running"})
            wait_for(lambda: all(row["inferred"] for row in program.streams().values()), 30.0, program.streams)
            began, memory = counts_of(program, ("a", "b")), held_by(program).memory_bytes
            time.sleep(12.0)
            answered = rates(began, counts_of(program, ("a", "b")))
            rows = program.streams()
            grown = held_by(program).memory_bytes - memory
            within = program.metric("glass_to_event_seconds_bucket", le="1.0")
            count = program.metric("glass_to_event_seconds_count")
            program.stop()
    finally:
        code = stop_stack(stack)
    assert sum(answered.values()) >= 0.8 / SLOW_S, (answered, rows)
    assert min(answered.values()) >= 0.3 / SLOW_S, "each gets its share"
    assert within >= 0.9 * count, "answers come after the bound"
    for row in rows.values():
        lost = sum(row["drops"].values())
        assert row["frames"] - 12 <= row["inferred"] + lost <= row["frames"], row
        assert lost > 60
    assert grown < 8 << 20
    assert code == 0


def test_sources_added_and_removed_twenty_times_leave_nothing_and_stall_none(place: Place, tmp_path: Path) -> None:
    """Files, cameras that refuse and servers that talk rubbish, taken out in whatever state they are: threads,
    descriptors, processes, rings and metrics are what they were, and another source keeps its rate."""
    with cycling(place, tmp_path) as (program, uris):
        come_and_go(program, uris, 10, stays="stays")
        before, began = settled(program), counts_of(program, ["stays"])
        come_and_go(program, uris, 20, stays="stays")
        rate = rates(began, counts_of(program, ["stays"]))["stays"]
        expect_same(program, before)
        assert rate >= 0.95 * FPS
        assert program.stream("stays")["restarts"] == 0
        program.stop()
    assert "Traceback" not in program.text
