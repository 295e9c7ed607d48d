"""The peers' environments: .venv-peers/NAME from requirements/peers/NAME.txt, hashes checked."""

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from loadtest.bench.peers.model import CHECKOUT

LOCKS = CHECKOUT / "requirements" / "peers"
ENVIRONMENTS = CHECKOUT / ".venv-peers"
UV = Path(sys.executable).parent / "uv"
BUILD_TIMEOUT_S = 900.0


class NotPrepared(Exception):
    """An environment is not there, or could not be built; the message is a sentence."""


def python_of(name: str) -> Path:
    """The environment's python. Raises NotPrepared where it was not built from today's lock."""
    if not _is_ready(name):
        raise NotPrepared(
            f"{name} has no environment yet, or its lock has changed: python -m loadtest.bench.peers prepare {name}"
        )
    return ENVIRONMENTS / name / "bin" / "python"


def prepare(name: str, say: Callable[[str], None]) -> None:
    """Builds the environment where it is missing or older than its lock. Raises NotPrepared."""
    if _is_ready(name):
        say(f"{name}: ready")
        return
    say(f"{name}: building {ENVIRONMENTS.name}/{name} from {_lock(name).relative_to(CHECKOUT)}")
    folder = ENVIRONMENTS / name
    _run(name, [UV, "venv", "--quiet", "--clear", "--python", sys.executable, folder])
    install: list[str | Path] = [UV, "pip", "install", "--quiet", "--require-hashes", "-r", _lock(name)]
    _run(name, [*install, "--python", folder / "bin" / "python"])
    _mark(name).write_text(_digest(name))
    say(f"{name}: ready")


def version_of(name: str, package: str) -> str:
    """The package's version in the environment, or ? where it cannot be told."""
    found = sorted((ENVIRONMENTS / name).glob(f"lib/python3*/site-packages/{package}-*.dist-info"))
    return found[0].name.removeprefix(f"{package}-").removesuffix(".dist-info") if found else "?"


def _is_ready(name: str) -> bool:
    mark = _mark(name)
    return mark.is_file() and mark.read_text() == _digest(name)


def _run(name: str, command: list[str | Path]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except OSError as error:
        raise NotPrepared(f"{name}: {UV} cannot be run ({error.strerror}): make check builds {UV.parent}") from error
    except subprocess.TimeoutExpired as error:
        raise NotPrepared(f"{name}: {command[1]} did not end within {BUILD_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        reason = " ".join(done.stderr.split())[-600:]
        raise NotPrepared(f"{name}: its environment cannot be built here: {reason}")


def _lock(name: str) -> Path:
    return LOCKS / f"{name}.txt"


def _mark(name: str) -> Path:
    return ENVIRONMENTS / name / ".ready"


def _digest(name: str) -> str:
    return hashlib.sha256(_lock(name).read_bytes()).hexdigest()
