"""An MPS daemon in the background, for programs that outlive the command which starts it."""

import asyncio
import contextlib
import time
from collections.abc import Mapping

from server.gpu.mps.control import Control
from server.gpu.mps.daemon import LEFT_BEHIND, limit_commands, make_room
from server.gpu.mps.errors import MpsError
from server.gpu.mps.options import MpsOptions

_LOOK_S = 0.05
_END_S = 5.0


async def start_background(options: MpsOptions, program: str, environ: Mapping[str, str], card_count: int) -> None:
    """Starts it, waits until it answers and tells it the limits. Raises MpsError; nothing of it runs then."""
    control = Control(options.directory, program=program, environ=environ)
    if control.listens:
        raise MpsError(f"an MPS daemon runs in {options.directory} already; penstock mps status shows it")
    make_room(options.directory)
    said = options.directory / "logs" / "start.log"  # a pipe would stay open for as long as the daemon lives
    with said.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(program, "-d"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env=options.daemon_environ(environ),
            start_new_session=True,
        )
        code = await _end_of(process, options.start_s)
    if code is None:
        raise MpsError(f"{program} -d does not return within {options.start_s:g} s: the driver hangs, see dmesg")
    if code:
        raise MpsError(f"{program} -d failed: {said.read_text(errors='replace').strip() or code}")
    await _until_it_answers(control, options.start_s)
    try:
        for command in limit_commands(options, card_count):
            await control.ask(command)
    except MpsError:
        await stop_background(control, quit_s=0)
        raise


async def _end_of(process: asyncio.subprocess.Process, patience_s: float) -> int | None:
    """Its exit code; None where it had to be killed, which not even ends one that hangs in the driver."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            return await process.wait()
    process.kill()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_S):
            await process.wait()
    return None


async def stop_background(control: Control, *, quit_s: int) -> None:
    """Asks it to quit, with that much time for its clients. Returns when it has gone. Raises MpsError."""
    patient = Control(control.directory, program=control.program, answer_s=quit_s + _END_S)
    await patient.ask(f"quit -t {quit_s}")
    until = time.monotonic() + _END_S
    while control.listens:
        if time.monotonic() >= until:
            raise MpsError(f"the MPS daemon in {control.directory} was told to quit and still listens; kill it")
        await asyncio.sleep(_LOOK_S)
    for name in LEFT_BEHIND:
        with contextlib.suppress(OSError):
            (control.directory / name).unlink()


async def _until_it_answers(control: Control, start_s: float) -> None:
    for _ in range(round(start_s / _LOOK_S)):
        if control.listens:
            await control.threads()
            return
        await asyncio.sleep(_LOOK_S)
    raise MpsError(f"the MPS daemon does not listen in {control.directory} within {start_s:g} s; its logs say why")
