"""One tritonserver process, from its start to the removal of its remains."""

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock.engines.run_directory import ENGINE_ID_VARIABLE, Reaped, reap
from penstock.engines.triton.launch import LIBRARY_PATH_VARIABLE
from penstock.engines.triton.log_parser import Emit, LogSink
from penstock.engines.triton.runtime import Launch

_LAUNCHER = Path(__file__).with_name("launch.py")
_NVIDIA_DEVICE = Path("/dev/nvidiactl")
_LOG_IDLE_S = 0.2
_LOG_END_S = 1.0
_KILL_S = 5.0
_PIPE_BYTES = 1024 * 1024
PRIVATE_UMASK = 0o077  # of Triton: its shared memory, created with mode 0666, contains clients' tensors


class TritonProcess:
    """A started tritonserver. Its output goes to our log until clean_up(), which must be awaited."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        output: tuple[asyncio.ReadTransport, asyncio.StreamReader],
        engine_id: str,
        emit: Emit,
    ) -> None:
        self.pid = process.pid
        self.exit = asyncio.create_task(process.wait())
        self._process = process
        self._engine_id = engine_id
        self._sink = LogSink(emit, has_gpu=_NVIDIA_DEVICE.exists())
        self._transport, reader = output
        self._drain = asyncio.create_task(_drain(reader, self._sink))

    @property
    def has_exited(self) -> bool:
        return self._process.returncode is not None

    def terminate(self) -> None:
        """Sends SIGTERM to Triton alone, because requests in flight need its models' stubs."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def _kill_group(self) -> None:
        """Kills processes that a model started without the variable for reap()."""
        if not self.has_exited:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def clean_up(self) -> Reaped:
        """Kills its processes, removes their remains, and reads the log to its end. Takes a few seconds at most."""
        left = await asyncio.to_thread(reap, self._engine_id, child_pid=self.pid)
        self._kill_group()
        await asyncio.wait({self.exit}, timeout=_KILL_S)
        await asyncio.wait({self._drain}, timeout=_LOG_END_S)
        self._drain.cancel()
        self._transport.close()
        return replace(left, killed=tuple(pid for pid in left.killed if pid != self.pid))

    def exit_reason(self) -> str:
        """How it ended, with its last errors after an exit."""
        code = self._process.returncode
        if code is None:
            return f"tritonserver (process {self.pid}) does not die"
        if code < 0:
            return f"tritonserver was killed by signal {-code} ({signal.strsignal(-code)})"
        errors = self._sink.last_errors()
        return f"tritonserver exited with code {code}" + (f": {errors}" if errors else "")


async def start_process(
    launch: Launch, arguments: Sequence[str], engine_id: str, emit: Emit, *, inherited: Sequence[int] = ()
) -> TritonProcess:
    """Starts Triton in its own session, unaffected by Ctrl-C. inherited: descriptors to pass. Raises OSError.

    Not with asyncio's pipe: Process.wait() would hang while a stub has it open.
    """
    transport, reader, write_end = await _open_pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid())),
            *launch.argv,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=write_end,
            stderr=write_end,
            env=_launcher_environment(launch, engine_id),
            cwd=launch.folder,
            start_new_session=True,
            umask=PRIVATE_UMASK,
            pass_fds=inherited,
        )
    except BaseException:
        transport.close()
        raise
    finally:
        os.close(write_end)
    return TritonProcess(process, (transport, reader), engine_id, emit)


async def _open_pipe() -> tuple[asyncio.ReadTransport, asyncio.StreamReader, int]:
    read_end, write_end = os.pipe()
    with contextlib.suppress(OSError):  # over the user's limit of pipe memory: the default size is enough, too
        fcntl.fcntl(read_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", 0)
    )
    return transport, reader, write_end


def _launcher_environment(launch: Launch, engine_id: str) -> dict[str, str]:
    """The launcher's Python must not load Triton's libraries, so their path has another name."""
    env = dict(launch.env) | {ENGINE_ID_VARIABLE: engine_id}
    library_path = env.pop("LD_LIBRARY_PATH", None)
    if library_path is not None:
        env[LIBRARY_PATH_VARIABLE] = library_path
    if "LD_LIBRARY_PATH" in os.environ:
        env["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    return env


async def _drain(output: asyncio.StreamReader, sink: LogSink) -> None:
    while True:
        try:
            async with asyncio.timeout(_LOG_IDLE_S if sink.is_pending else None):
                chunk = await output.read(_PIPE_BYTES)
        except TimeoutError:
            sink.flush(time.monotonic())
            continue
        if not chunk:
            break
        sink.feed(chunk, time.monotonic())
    sink.flush(time.monotonic())
