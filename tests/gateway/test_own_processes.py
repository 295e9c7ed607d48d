"""Engine processes of models that hung: one for each model, restarted by a further hang only, ended by the stop."""

import asyncio
from pathlib import Path

from penstock.engines.run_directory import claim_run_directory
from penstock.gateway.stack.model_processes import Changed, ModelProcesses
from tests.support.waiting import until


class FalseProcess:
    """Starts on command; a hang ends it, and it starts again."""

    def __init__(self, changed: Changed) -> None:
        self.changed = changed
        self.hangs: list[str] = []
        self.stopped = asyncio.Event()

    async def run(self) -> None:
        self.changed(True)
        await self.stopped.wait()

    def end_hang(self, reason: str) -> None:
        self.hangs.append(reason)
        self.changed(False)

    async def stop(self, grace_s: float) -> None:
        self.stopped.set()


async def test_each_model_has_one_process_that_a_further_hang_ends(tmp_path: Path) -> None:
    """Two reports of one hang end it once; other models' processes continue; the stop ends all."""
    made: dict[str, FalseProcess] = {}
    reported: list[dict[str, str]] = []
    processes = ModelProcesses(
        lambda model, _, changed: made.setdefault(model, FalseProcess(changed)),
        lambda: claim_run_directory(tmp_path)[0],
        lambda: reported.append(processes.folders),
    )
    for model in ("a", "b"):
        processes.restart(model, "it hangs")
    await until(lambda: all(processes.folders.values()))
    assert reported[0] == {"a": ""}
    folders = [Path(folder) for folder in processes.folders.values()]
    assert len({folder for folder in folders if folder.is_dir()}) == 2
    for _ in range(2):
        processes.restart("a", "it hangs again")
    assert (made["a"].hangs, made["b"].hangs) == (["it hangs again"], [])
    assert (processes.folders["a"], processes.folders["b"]) == ("", str(folders[1]))
    await processes.stop(1.0)
    assert not any(folder.exists() for folder in folders)
    processes.restart("c", "too late")
    assert "c" not in processes.folders
