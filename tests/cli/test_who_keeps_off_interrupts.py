"""Which programs leave the cores that a card's interrupts keep busy: the stack, the video program, decode processes."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from penstock.cli import up
from penstock.gateway.workers.interrupt_affinity import Interrupts
from penstock_video.cli import run as video_run
from penstock_video.errors import PipelineError
from penstock_video.sources import core_pinning, shared_child


class Keeping:
    """In the place of `kept_off_interrupts`. seen: what was done meanwhile."""

    def __init__(self) -> None:
        self.is_on = False
        self.seen: list[bool] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False

    def see(self) -> None:
        """Something is done."""
        self.seen.append(self.is_on)


def test_stack_runs_off_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its start to its end."""
    keeping = Keeping()

    class FakeStack:
        def __init__(self, *_: object, **__: object) -> None:
            keeping.see()

        async def run(self) -> int:
            keeping.see()
            return 3

    monkeypatch.setattr(up, "avoid_interrupted_cores", keeping)
    monkeypatch.setattr(up, "Stack", FakeStack)
    choice: Any = SimpleNamespace()
    assert asyncio.run(up._run(choice)) == 3
    assert (keeping.seen, keeping.is_on) == ([True, True], False)


def test_video_program_runs_off_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """However it ends."""
    keeping = Keeping()

    def fail(*_: object, **__: object) -> None:
        keeping.see()
        raise PipelineError("it broke")

    monkeypatch.setattr(video_run, "avoid_interrupted_cores", keeping)
    monkeypatch.setattr(video_run, "_run", fail)
    settings: Any = SimpleNamespace(sources=["one"])
    unused: Any = None
    with pytest.raises(typer.Exit):
        video_run.run_to_its_end(settings, unused, video_run.RunParts(unused, unused, unused), is_json=False)
    assert (keeping.seen, keeping.is_on) == ([True], False)


def test_decode_process_watches_the_core_that_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it has one."""
    watched: list[Interrupts] = []
    monkeypatch.setattr(core_pinning, "pin_to_own_core", lambda interrupts: SimpleNamespace(keep_off=watched.append))
    assert shared_child._own_core() is not None
    assert len(watched) == 1
    monkeypatch.setattr(core_pinning, "pin_to_own_core", lambda interrupts: None)
    assert shared_child._own_core() is None
    assert len(watched) == 1
