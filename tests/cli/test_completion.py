"""Shell completion: what the scripts of `--install-completion` call."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.cli.main import commands
from tests.support.stack import CHECKOUT

PENSTOCK = Path(sys.executable).with_name("penstock")


def complete(line: str, shell: str = "bash") -> list[str]:
    """Candidates for the end of the line, as the shell's script asks for them."""
    words = line.split(" ")
    asked: Mapping[str, str] = {
        "_PENSTOCK_COMPLETE": f"complete_{shell}",
        **({"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)} if shell == "bash" else {}),
        **({"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"} if shell != "bash" else {}),
    }
    done = subprocess.run([PENSTOCK], env={**os.environ, **asked}, capture_output=True, text=True, cwd=CHECKOUT)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_commands_and_their_parts_are_completed() -> None:
    """Also those of the lazily imported modules, and of the other programs."""
    assert set(complete("penstock ")) == set(commands())
    assert complete("penstock mod") == ["models"]
    assert {"list", "pull", "add", "check"} <= set(complete("penstock models "))
    assert "--tracker" in complete("penstock video run --t")


def test_models_of_this_machine_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the home and the shipped ones, without a gateway; nothing, and no error, if the settings are invalid."""
    folder = tmp_path / "models" / "yolox-own"
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").touch()
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    assert complete("penstock infer yolo") == ["yolox-own"]
    assert {"people", "yolox-own"} <= set(complete("penstock infer "))
    monkeypatch.setenv("PENSTOCK_HTTP_PORT", "no port")
    assert not any(complete("penstock infer yolo"))


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_descriptions_are_one_line_each(shell: str) -> None:
    """`penstock up` has the most options, with brackets and paths in their descriptions."""
    lines = complete("penstock up --", shell)
    assert all("--" in line for line in lines)
    assert sum("--http-port" in line and "REST" in line for line in lines) == 1


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_script_completes_in_bash() -> None:
    """The script that is installed completes commands, and a command's parts before their first letter."""
    ask = "_penstock_completion penstock; echo ${COMPREPLY[@]}; "
    script = "source <(penstock --show-completion bash); complete -p penstock; "
    script += f"COMP_WORDS=(penstock stat); COMP_CWORD=1; {ask}"
    script += f"COMP_CWORD=2; COMP_WORDS=(penstock models ''); {ask} COMP_WORDS=(penstock video ''); {ask}"
    environment = {**os.environ, "PATH": f"{PENSTOCK.parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment)
    defined, command, models, video = done.stdout.splitlines()
    assert (defined, command) == ("complete -o default -F _penstock_completion penstock", "status")
    assert {"list", "pull", "add", "check"} <= set(models.split())
    assert {"run", "check", "events"} <= set(video.split())
