"""Streams on replicas: each on exactly one, and few move when one more comes."""

from collections import Counter

import pytest

from penstock_video.source_ids import ALONE, Shard, owner, shard_here, shard_of

CAMERAS = [f"camera-{number}" for number in range(4000)]


def test_owner_of_any_camera_is_one_replica_only() -> None:
    """Every camera belongs to exactly one of the replicas, on every replica."""
    shards = [Shard(index, 5) for index in range(5)]
    assert all(sum(shard.has(camera) for shard in shards) == 1 for camera in CAMERAS)


def test_owner_over_many_cameras_is_even() -> None:
    """No replica has a tenth more or less than its share."""
    counts = Counter(owner(camera, 5) for camera in CAMERAS)
    assert all(abs(counts[index] - 800) < 80 for index in range(5)), counts


@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_owner_with_one_replica_more_moves_only_its_share(count: int) -> None:
    """About 1/(n+1) of the cameras move, all of them to the new replica."""
    moved = [camera for camera in CAMERAS if owner(camera, count) != owner(camera, count + 1)]
    assert all(owner(camera, count + 1) == count for camera in moved)
    assert abs(len(moved) / len(CAMERAS) - 1 / (count + 1)) < 0.03


def test_owner_is_the_same_for_ever() -> None:
    """A release must not move cameras: these were said once and hold."""
    assert [owner(name, 7) for name in ("entrance", "yard", "gate", "lobby", "é")] == [6, 5, 5, 3, 4]


HERE = [
    ({}, "video-3", ALONE),
    ({"PENSTOCK_SHARD": "1/3"}, "host", Shard(1, 3)),
    ({"PENSTOCK_SHARD": "1", "PENSTOCK_SHARDS": "3"}, "host", Shard(1, 3)),
    ({"PENSTOCK_SHARD": "1/3", "PENSTOCK_SHARDS": "9"}, "video-7", Shard(1, 3)),
    ({"PENSTOCK_SHARDS": "4"}, "video-3", Shard(3, 4)),
    ({"PENSTOCK_SHARDS": "4"}, "video-0.video.default.svc", Shard(0, 4)),
    ({"PENSTOCK_SHARDS": "1"}, "laptop", ALONE),
]


@pytest.mark.parametrize(("environ", "hostname", "shard"), HERE)
def test_shard_here_goes_by_the_environment(environ: dict[str, str], hostname: str, shard: Shard) -> None:
    """PENSTOCK_SHARD says it outright, PENSTOCK_SHARDS with a StatefulSet's host name; nothing: the only one."""
    assert shard_here(environ, hostname) == shard


WRONG = [
    ({"PENSTOCK_SHARD": "3/3"}, "h", "PENSTOCK_SHARD: shard 3/3"),
    ({"PENSTOCK_SHARD": "one"}, "h", "PENSTOCK_SHARD: 'one': i/n is needed"),
    ({"PENSTOCK_SHARDS": "3"}, "laptop", "ends in no ordinal"),
    ({"PENSTOCK_SHARDS": "3"}, "video-3", "PENSTOCK_SHARDS: shard 3/3"),
    ({"PENSTOCK_SHARDS": "many"}, "video-3", "PENSTOCK_SHARDS: '3/many'"),
]


@pytest.mark.parametrize(("environ", "hostname", "text"), WRONG)
def test_shard_here_that_cannot_be_meant_is_refused(environ: dict[str, str], hostname: str, text: str) -> None:
    """With the variable's name and what is allowed: a wrong shard would leave cameras unwatched."""
    with pytest.raises(ValueError, match=r"needed|ordinal") as refused:
        shard_here(environ, hostname)
    assert text in str(refused.value)


def test_shard_of_text_reads_and_writes_alike() -> None:
    """i/n, both ways."""
    assert str(shard_of("2/5")) == "2/5"
