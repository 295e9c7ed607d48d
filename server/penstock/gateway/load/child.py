"""Child processes of load tests: one that runs a scenario, and short ones that list scenarios or compare runs."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

COMMAND = (sys.executable, "-P", "-m", "penstock.cli.load_process")
SHORT_TIMEOUT_S = 60.0  # a short command's imports alone take seconds on a busy machine
MAX_SHORT_BYTES = 4 << 20
_INHERITED = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "SSL_CERT_FILE", "HOME")  # no secrets
_MAX_TEXT = 500


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """Limits of a child. memory_bytes: per process. file_bytes: per written file. stop_s: from SIGTERM to its end."""

    memory_bytes: int = 2 << 30
    file_bytes: int = 1 << 30
    stop_s: float = 20.0


class ChildError(Exception):
    """The command failed. The message is the last line of its standard error."""


class _Failure(msgspec.Struct):
    error: str = ""


class LoadChild:
    """The process of a run, in its own process group."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path, limits: LoadLimits) -> None:
        self._process, self._folder, self._limits = process, folder, limits

    @classmethod
    async def start(
        cls, arguments: Sequence[str], folder: Path, *, api_key: str, command: Sequence[str], limits: LoadLimits
    ) -> Self:
        """Starts `penstock load` with these arguments.

        api_key: passed in the environment, which other users cannot read with `ps`. Raises OSError.
        """
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as error:
            process = await asyncio.create_subprocess_exec(
                *_with_limits(command, limits),
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=error,
                env=_environment(folder.parent, api_key),
                start_new_session=True,
            )
        return cls(process, folder, limits)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self, limit_s: float) -> int:
        """The exit code; negative for a signal. Stops the process after limit_s; kills it if cancelled."""
        try:
            async with asyncio.timeout(limit_s):
                return await self._process.wait()
        except TimeoutError:
            return await self.stop()
        finally:
            if self._process.returncode is None:
                self._signal(signal.SIGKILL)
                await self._process.wait()

    async def stop(self, within_s: float | None = None) -> int:
        """Makes the process write its report and exit. Kills it after within_s (default: limits.stop_s)."""
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._limits.stop_s if within_s is None else within_s):
                return await self._process.wait()
        except TimeoutError:
            self._signal(signal.SIGKILL)
            return await self._process.wait()

    def error(self) -> str:
        """Why the run has no result: its JSON error, else the last line of standard error. Blocks."""
        with contextlib.suppress(msgspec.MsgspecError):
            if text := msgspec.json.decode(_end_of(self._folder / "stdout"), type=_Failure).error:
                return text[:_MAX_TEXT]
        lines = _end_of(self._folder / "stderr").decode("utf-8", "replace").strip().splitlines()
        return "".join(lines[-1:]).removeprefix("penstock: ")[:_MAX_TEXT]

    def _signal(self, number: signal.Signals) -> None:
        """Signals the process group. Driver processes have their own sessions and exit when this process does."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


async def short_output(
    arguments: Sequence[str], folder: Path, *, command: Sequence[str] = COMMAND, limits: LoadLimits | None = None
) -> bytes:
    """The standard output of a short `penstock load` command. folder: for its cache. Raises ChildError, OSError."""
    process = await asyncio.create_subprocess_exec(
        *_with_limits(command, limits or LoadLimits()),
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=_environment(folder, ""),
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(SHORT_TIMEOUT_S):
            out, error = await process.communicate()
    except TimeoutError:
        raise ChildError(f"`penstock load {arguments[0]}` did not end within {SHORT_TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode or len(out) > MAX_SHORT_BYTES:
        lines = error.decode("utf-8", "replace").strip().splitlines()
        last = "".join(lines[-1:]).removeprefix("penstock: ") or f"it exited with code {process.returncode}"
        raise ChildError(last[:_MAX_TEXT])
    return out


def _with_limits(command: Sequence[str], limits: LoadLimits) -> list[str]:
    return [*command, str(os.getpid()), str(limits.memory_bytes), str(limits.file_bytes)]


def _environment(cache: Path, api_key: str) -> dict[str, str]:
    """cache: folder for matplotlib's font cache, which takes seconds to build."""
    inherited = {name: value for name in _INHERITED if (value := os.environ.get(name)) is not None}
    own = {"MPLCONFIGDIR": str(cache / ".matplotlib")}
    return inherited | own | ({"PENSTOCK_API_KEY": api_key} if api_key else {})


def _end_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - (1 << 20)))
            return file.read(1 << 20)
    except OSError:
        return b""
