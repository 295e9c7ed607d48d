"""How the tests' shared stacks end."""

import subprocess
from pathlib import Path

import pytest

from tests.support.stack import RunningStack, await_stopped


def ended_with(code: int, home: Path) -> RunningStack:
    """A stack whose process ends with that code, and its log."""
    process = subprocess.Popen(["sh", "-c", f"exit {code}"], text=True)
    return RunningStack(process, home, log=[f"log of {code}"])


def test_stack_that_did_not_end_well_fails_the_run_with_its_log(tmp_path: Path) -> None:
    """Each of them is named, and those that ended well are not."""
    stacks = [ended_with(code, tmp_path / str(code)) for code in (0, 3, 4)]
    with pytest.raises(AssertionError) as failed:
        await_stopped(stacks)
    assert [f"{code} ended with {code}" in str(failed.value) for code in (0, 3, 4)] == [False, True, True]
    assert [f"log of {code}" in str(failed.value) for code in (0, 3, 4)] == [False, True, True]
    assert not stacks
