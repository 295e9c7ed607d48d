"""What of a damaged stream is shown."""

from penstock_video.decode.timeline import MOST_DROPPED, Damage, Verdict

CLEAN, CORRUPT, DROPPED = Verdict.CLEAN, Verdict.CORRUPT, Verdict.DROPPED


def judged(damage: Damage, *frames: str) -> list[Verdict]:
    """Verdicts of frames: K a keyframe, P another, ! one that was mended."""
    return [damage.judge(is_key="K" in frame, is_corrupt="!" in frame) for frame in frames]


def test_whole_stream_is_clean() -> None:
    """Nothing is marked where nothing is wrong, not even before the first keyframe."""
    assert judged(Damage(), "P", "K", "P") == [CLEAN] * 3


def test_mended_frame_taints_what_builds_on_it() -> None:
    """It is shown and marked, and so are the frames after it until the next keyframe."""
    assert judged(Damage(), "K", "P!", "P", "K", "P") == [CLEAN, CORRUPT, CORRUPT, CLEAN, CLEAN]


def test_mended_keyframe_taints_its_group() -> None:
    """A keyframe that was mended helps no one: all until the next are marked."""
    assert judged(Damage(), "K!", "P", "K", "P") == [CORRUPT, CORRUPT, CLEAN, CLEAN]


def test_lost_packet_drops_until_the_next_keyframe() -> None:
    """What builds on nothing is not shown."""
    damage = Damage()
    assert judged(damage, "K") == [CLEAN]
    damage.packet_failed()
    damage.packet_failed()
    assert judged(damage, "P", "P!", "K", "P") == [DROPPED, DROPPED, CLEAN, CLEAN]
    assert damage.bad_packets == 2


def test_stream_without_keyframes_is_shown_again_some_time() -> None:
    """A camera that refreshes bit by bit is not dark for ever."""
    damage = Damage()
    damage.packet_failed()
    assert judged(damage, *["P"] * MOST_DROPPED) == [DROPPED] * MOST_DROPPED
    assert judged(damage, "P", "P", "K") == [CORRUPT, CORRUPT, CLEAN]


def test_stream_that_begins_anew_is_clean() -> None:
    """What was wrong with the last loop is over."""
    damage = Damage()
    damage.packet_failed()
    damage.begin()
    assert judged(damage, "P") == [CLEAN]
