"""Where a caller was that left: by the room that knows, at once or when it hears of it."""

import asyncio

from penstock.protocol.cancellation import (
    CancelStage,
    PendingStage,
    cancel_stage_of,
    note_cancel_stage,
    when_stage_known,
)


def test_first_room_to_know_is_believed() -> None:
    """The cancellation passes through the others, which would say less."""
    cancelled = asyncio.CancelledError()
    assert cancel_stage_of(cancelled) is None
    note_cancel_stage(cancelled, CancelStage.QUEUE)
    note_cancel_stage(cancelled, CancelStage.DECODE)
    assert cancel_stage_of(cancelled) is CancelStage.QUEUE


def test_stage_is_reported_once_when_it_is_known() -> None:
    """At once if the stage is known or absent; later if another process knows it."""
    stages: list[CancelStage] = []
    when_stage_known(asyncio.CancelledError(), CancelStage.ENGINE, stages.append)
    known = asyncio.CancelledError()
    note_cancel_stage(known, CancelStage.BATCH)
    when_stage_known(known, CancelStage.ENGINE, stages.append)
    assert stages == [CancelStage.ENGINE, CancelStage.BATCH]

    later, asked_first = PendingStage(), asyncio.CancelledError()
    note_cancel_stage(asked_first, later)
    when_stage_known(asked_first, CancelStage.ENGINE, stages.append)
    assert len(stages) == 2
    later.tell(CancelStage.QUEUE)
    later.tell(CancelStage.ENGINE)
    assert stages[2:] == [CancelStage.QUEUE]

    sooner, known_first = PendingStage(), asyncio.CancelledError()
    note_cancel_stage(known_first, sooner)
    sooner.tell(CancelStage.DECODE)
    when_stage_known(known_first, CancelStage.ENGINE, stages.append)
    assert stages[3:] == [CancelStage.DECODE]
