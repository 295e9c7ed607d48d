"""The instances' side of `program-process: shared`: one process runs the program and merges the instances' batches.

An instance writes its rows into memory that it shares with that process, and waits for the answer. It needs neither
torch nor CUDA. The first instance starts the process, which ends when no instance is connected.
"""

import array
import hashlib
import json
import math
import mmap
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any

import numpy as np

from .config import EngineSpec
from .instance import Instance, PendingRun, TorchRequest
from .parameters import Config, TorchLoadError, TorchRequestError

NUMPY_TYPES = {
    "BOOL": "?",
    "UINT8": "u1",
    "INT8": "i1",
    "INT16": "i2",
    "INT32": "i4",
    "INT64": "i8",
    "FP16": "f2",
    "FP32": "f4",
    "FP64": "f8",
}
QUESTION = struct.Struct("<IB")  # rows of the run, and whether it must not be merged with others
DONE = b"\0"  # the answer of a run; else the text of its error
MAX_MESSAGE_BYTES = 1 << 16
_ALIGNMENT = 4096
_LOAD_TIMEOUT_S = 600  # compiling takes minutes
_RUN_TIMEOUT_S = 60
_BACKLOG = 256
_TRIES = 3  # the process may end between the connection and its first message
_SOCKET = socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC


class ProgramLost(RuntimeError):
    """The program's process ended or did not answer in time. The next run starts it again."""


@dataclass(frozen=True)
class SharedTensor:
    """An input or output in shared memory. dims: of one row. offset: of its first row, bytes."""

    data_type: str
    dims: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class MemoryLayout:
    """Memory of one instance: its inputs' rows, then its outputs' rows."""

    inputs: tuple[SharedTensor, ...]
    outputs: tuple[SharedTensor, ...]
    rows: int
    size_bytes: int

    def views(self, tensors: Sequence[SharedTensor], memory: mmap.mmap) -> tuple[Any, ...]:
        """Writable arrays (rows, *dims) of these tensors."""
        return tuple(self._view(tensor, memory) for tensor in tensors)

    def _view(self, tensor: SharedTensor, memory: mmap.mmap) -> Any:
        shape = (self.rows, *tensor.dims)
        found = np.frombuffer(memory, NUMPY_TYPES[tensor.data_type], math.prod(shape), tensor.offset)
        return found.reshape(shape)


Typed = tuple[str, Sequence[int]]  # data type and dims of a row


def memory_layout(inputs: Sequence[Typed], outputs: Sequence[Typed], rows: int) -> MemoryLayout:
    """The layout for so many rows. Each tensor begins on a page."""
    placed, offset = [], 0
    for data_type, dims in (*inputs, *outputs):
        placed.append(SharedTensor(data_type, tuple(dims), offset))
        size_bytes = rows * math.prod(dims) * np.dtype(NUMPY_TYPES[data_type]).itemsize
        offset += -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
    return MemoryLayout(tuple(placed[: len(inputs)]), tuple(placed[len(inputs) :]), rows, offset)


@dataclass(frozen=True)
class Greeting:
    """First message of the program's process. error: why there is no program; the rest is then empty."""

    outputs: Sequence[Typed] = ()
    facts: str = ""
    note: str = ""
    error: str = ""

    def packed(self) -> bytes:
        return json.dumps([self.outputs, self.facts, self.note, self.error]).encode()[:MAX_MESSAGE_BYTES]

    @classmethod
    def unpacked(cls, message: bytes) -> "Greeting":
        return cls(*json.loads(message))


class ProgramConnection:
    """One instance's connection: its memory, and a socket. One run at a time."""

    def __init__(self, connection: socket.socket, layout: MemoryLayout, memory: mmap.mmap, greeting: Greeting) -> None:
        self._socket = connection
        self._inputs = layout.views(layout.inputs, memory)
        self._outputs = layout.views(layout.outputs, memory)
        self.greeting = greeting
        _set_timeout(connection, _RUN_TIMEOUT_S)

    def ask(self, columns: Sequence[Sequence[Any]], rows: int, *, is_alone: bool) -> None:
        """Writes the rows and starts their run. Raises OSError if the process has ended."""
        for target, parts in zip(self._inputs, columns, strict=True):
            begin = 0
            for part in parts:
                target[begin : begin + len(part)] = part
                begin += len(part)
        self._socket.send(QUESTION.pack(rows, is_alone))

    def answer(self, rows: int) -> tuple[Any, ...]:
        """The outputs' rows in shared memory, which the next `ask` overwrites. Raises ProgramLost, RuntimeError."""
        try:
            message = self._socket.recv(MAX_MESSAGE_BYTES)
        except OSError as error:
            raise ProgramLost(f"the program's process did not answer: {error}") from error
        if not message:
            raise ProgramLost("the program's process has ended")
        if message != DONE:
            raise RuntimeError(message.decode(errors="replace"))
        return tuple(output[:rows] for output in self._outputs)

    def close(self) -> None:
        self._socket.close()


def _set_timeout(connection: socket.socket, seconds: int) -> None:
    """For a blocking socket: cheaper than settimeout, which polls before each call."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", seconds, 0))


class SharedRunner:
    """Runner of an instance. may_merge: whether its rows may share a run with those of other instances."""

    def __init__(self, connect: Callable[[], ProgramConnection]) -> None:
        """connect: starts the process if it does not run. Raises TorchLoadError."""
        self._connect = connect
        self._connection: ProgramConnection | None = connect()
        self.greeting = self._connection.greeting
        self.may_merge = False

    def begin(self, columns: Sequence[Sequence[Any]], rows: int) -> PendingRun:
        """See Runner. Connects again if the process has ended since the last run. Raises TorchLoadError, OSError."""
        if self._connection is not None:
            try:
                self._connection.ask(columns, rows, is_alone=not self.may_merge)
                return _SharedRun(self, self._connection, rows)
            except OSError:
                self.drop()
        self._connection = connection = self._connect()
        connection.ask(columns, rows, is_alone=not self.may_merge)
        return _SharedRun(self, connection, rows)

    def drop(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None


@dataclass(frozen=True)
class _SharedRun:
    runner: SharedRunner
    connection: ProgramConnection
    rows: int

    def outputs(self) -> tuple[Any, ...]:
        try:
            return self.connection.answer(self.rows)
        except ProgramLost:
            self.runner.drop()
            raise

    def memory(self) -> tuple[Any, ...]:
        return self.outputs()


@dataclass(frozen=True)
class ProgramFile:
    """What a process runs. Instances with equal values share a process. device_id: -1 on the CPU."""

    path: Path
    config: Config
    device_id: int

    def key(self) -> str:
        """Name of the process. It changes with the file and the configuration."""
        found = self.path.stat()
        config = self.config | {"instance_group": []}
        what = [str(self.path), found.st_ino, found.st_size, found.st_mtime_ns, self.device_id, config]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:24]


_MAIN = "import json,sys; job=json.load(sys.stdin); sys.path[:]=job['path']; "


def start_process(program: ProgramFile, listener: int) -> "subprocess.Popen[bytes]":
    """Starts the process, which inherits the listening socket: its descriptor. Raises OSError."""
    job = {"path": sys.path, "file": str(program.path), "config": program.config, "device_id": program.device_id}
    code = f"{_MAIN}from {__package__}.program_process import main; main(job, {listener})"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, pass_fds=(listener,), start_new_session=True
    )
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(json.dumps(job).encode())
    return process


class ProgramConnector:
    """Connects an instance to its program's process, and starts the process if there is none."""

    def __init__(
        self,
        program: ProgramFile,
        spec: EngineSpec,
        folder: Path,
        start: Callable[[ProgramFile, int], "subprocess.Popen[bytes] | None"] = start_process,
    ) -> None:
        """folder: for sockets; only this user can read it. start: gets the descriptor of the listening socket."""
        self._program = program
        self._spec = spec
        self._folder = folder
        self._start = start
        self._process: subprocess.Popen[bytes] | None = None

    def connect(self) -> ProgramConnection:
        """A new connection; waits while the program is loaded. Raises TorchLoadError."""
        for _ in range(_TRIES):
            try:
                connection = self._reach()
            except (OSError, subprocess.SubprocessError) as error:
                raise TorchLoadError(f"the program's process cannot be started: {error}") from error
            try:
                if opened := self._opened(connection):
                    return opened
            except BaseException:
                connection.close()
                raise
            connection.close()
        raise TorchLoadError("the program's process ended while it was loading; see the server's log")

    def _opened(self, connection: socket.socket) -> ProgramConnection | None:
        """None if the process has ended meanwhile. Raises TorchLoadError."""
        _set_timeout(connection, _LOAD_TIMEOUT_S)
        try:
            message, descriptors = _received(connection)
        except BlockingIOError:
            raise TorchLoadError(f"the program was not loaded within {_LOAD_TIMEOUT_S} s") from None
        try:
            if not message:
                return None
            greeting = Greeting.unpacked(message)
            if greeting.error or len(descriptors) != 1:
                raise TorchLoadError(greeting.error or "the program's process sent no shared memory")
            inputs = [(spec.data_type, spec.dims) for spec in self._spec.inputs]
            layout = memory_layout(inputs, greeting.outputs, self._spec.max_batch_size)
            memory = mmap.mmap(descriptors[0], layout.size_bytes)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return ProgramConnection(connection, layout, memory, greeting)

    def _reach(self) -> socket.socket:
        """A connection to the running process, or to one that is started now. Raises OSError."""
        if self._process is not None:
            self._process.poll()  # reaps it if it has ended
        key = self._program.key()
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            flock(folder, LOCK_EX)  # released with the descriptor; others have it for milliseconds
            path = f"/proc/self/fd/{folder}/{key}"  # a socket's path is limited to 107 bytes
            with suppress(FileNotFoundError, ConnectionRefusedError):
                return _connected(path)
            with socket.socket(*_SOCKET) as listener:
                with suppress(FileNotFoundError):
                    os.unlink(path)
                listener.bind(path)
                listener.listen(_BACKLOG)
                self._process = self._start(self._program, listener.fileno())
                return _connected(path)
        finally:
            os.close(folder)


def _connected(path: str) -> socket.socket:
    connection = socket.socket(*_SOCKET)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def _received(connection: socket.socket) -> tuple[bytes, Sequence[int]]:
    """A message and the descriptors that came with it; b"" at the end. Raises OSError."""
    descriptors = array.array("i")
    try:
        message, ancillary, _, _ = connection.recvmsg(MAX_MESSAGE_BYTES, socket.CMSG_SPACE(descriptors.itemsize))
    except ConnectionResetError:
        return b"", ()
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content)
    return message, descriptors.tolist()


def socket_folder(beside: str | None) -> Path:
    """A folder that only this user can use. beside: a file in the stack's run directory, if there is one.

    Raises TorchLoadError.
    """
    name = "programs" if beside else f"penstock-programs-{os.geteuid()}"
    folder = (Path(beside).parent if beside else Path(tempfile.gettempdir())) / name
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise TorchLoadError(f"{folder} cannot be used for the program's process: {error.strerror}") from error
    if found.st_uid != os.geteuid() or found.st_mode & 0o077 or not folder.is_dir():
        raise TorchLoadError(f"{folder} is not a folder of this user alone; remove it")
    return folder


@dataclass(frozen=True)
class SharedInstance:
    """An instance whose program runs in another process."""

    instance: Instance
    runner: SharedRunner


def open_shared_instance(program: ProgramFile, spec: EngineSpec, folder: Path) -> SharedInstance:
    """Connects to the program's process. Raises TorchLoadError."""
    if not program.path.is_file():
        raise TorchLoadError(f"there is no {program.path.name} in {program.path.parent}: export one first")
    runner = SharedRunner(ProgramConnector(program, spec, folder).connect)
    return SharedInstance(Instance(spec, runner), runner)


def numpy_runner(instance: Instance, spec: EngineSpec) -> Callable[[Mapping[str, Any]], dict[str, Any] | str]:
    """A function from inputs by name to outputs by name, or to the reason of a failure."""

    def run(inputs: Mapping[str, Any]) -> dict[str, Any] | str:
        tensors = tuple(inputs[one.name].astype(NUMPY_TYPES[one.data_type]) for one in spec.inputs)
        try:
            (outcome,) = instance.answer([TorchRequest(tensors)])
        except (RuntimeError, ValueError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        if isinstance(outcome, TorchRequestError):
            return str(outcome)
        return {one.name: rows.copy() for one, rows in zip(spec.outputs, outcome, strict=True)}

    return run
