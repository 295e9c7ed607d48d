"""`penstock models` against a stack that runs here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CHECKOUT, RunningStack

pytestmark = pytest.mark.xdist_group("stack")


def penstock(stack: RunningStack, *words: str) -> str:
    """What the command prints; its exit code must be 0."""
    environ = os.environ | {"PENSTOCK_HOME": str(stack.home)}
    command = [sys.executable, "-m", "server.cli", *words, "--url", stack.http_url]
    done = subprocess.run(command, cwd=CHECKOUT, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def state_of(stack: RunningStack, model_name: str) -> str:
    rows = json.loads(penstock(stack, "models", "list", "--json"))
    return next(str(row["state"]) for row in rows if row["name"] == model_name)


def test_pull_loads_the_model_into_the_running_stack(stack: RunningStack, shared_dir: Path) -> None:
    """A model that is pulled while the stack runs serves at once."""
    penstock(stack, "models", "unload", "fastestdet")
    assert state_of(stack, "fastestdet") != "READY"
    told = penstock(stack, "models", "pull", "fastestdet", "--from", str(shared_dir / "models"))
    assert "loaded" in told
    assert state_of(stack, "fastestdet") == "READY"


def test_list_shows_the_broken_model_with_its_reason(stack: RunningStack) -> None:
    """Who asks what is served also sees what is not, and why."""
    rows = json.loads(penstock(stack, "models", "list", "--json"))
    (broken,) = [row for row in rows if row["name"] == "broken"]
    assert broken["state"] != "READY"
    assert "broken on purpose" in broken["reason"]
