"""Runs `penstock doctor` for the gateway, in a separate process with a deadline."""

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from penstock.protocol.errors import DeadlineExceeded, InferenceError
from penstock.protocol.system_reports import FindingReport

COMMAND = (sys.executable, "-P", "-m", "penstock.cli.doctor")
END_S = 2.0  # for a killed process
_MAX_REPLY_BYTES = 1 << 20


class _Reply(msgspec.Struct):
    findings: list[FindingReport]


@dataclass(frozen=True, slots=True)
class Examination:
    """A run of doctor. settings: the stack's settings as JSON, sent to its standard input."""

    settings: bytes
    command: Sequence[str] = COMMAND
    deadline_s: float = 45.0

    async def run(self) -> list[FindingReport]:
        """Findings on this machine. Raises DeadlineExceeded, InferenceError."""
        process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(self.deadline_s):
                reply, _ = await process.communicate(self.settings)
        except TimeoutError:
            raise DeadlineExceeded(
                f"doctor did not answer within {self.deadline_s:g} s; run `penstock doctor` on the gateway's host"
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with contextlib.suppress(TimeoutError):  # a process that hangs in the kernel ends later
                async with asyncio.timeout(END_S):
                    await process.wait()
        try:
            return msgspec.json.decode(reply[:_MAX_REPLY_BYTES], type=_Reply).findings
        except msgspec.DecodeError:
            text = f"doctor ended with exit code {process.returncode} and no findings"
            raise InferenceError(f"{text}; run `penstock doctor` on the gateway's host") from None
