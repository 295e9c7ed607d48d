"""The process of `program-process: shared`: loads a program and runs it for all instances that are connected.

Rows that arrive during a run are merged into the next run, so that few runs with many rows keep a GPU busy. A run that
cannot get more rows is started while the previous one is computed.
"""

import gc
import mmap
import os
import selectors
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import EngineSpec, engine_spec
from .instance import PendingRun, Runner
from .parameters import TorchLoadError, without_torch
from .shared_program import DONE, MAX_MESSAGE_BYTES, QUESTION, Greeting, MemoryLayout, Typed, memory_layout

MAX_CLIENTS = 256
SLOTS = 2  # runs whose outputs the runner keeps: in flight, or computed and not answered
BROKEN_CONTEXT_EXIT = 70
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class ClientMemory:
    """Memory that is shared with one instance at a time. Reused, because it stays page-locked."""

    def __init__(self, layout: MemoryLayout, number: int, part: Callable[[Any], Any]) -> None:
        """number: unique, because page-locked regions are known by the file's name. part: see ServedProgram."""
        self.descriptor = os.memfd_create(f"penstock_program_{number}", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, layout.size_bytes)
        memory = mmap.mmap(self.descriptor, layout.size_bytes)
        inputs = layout.views(layout.inputs, memory)
        self.parts = [[part(rows[row : row + 1]) for row in range(layout.rows)] for rows in inputs]
        self.outputs = layout.views(layout.outputs, memory)


@dataclass(frozen=True, eq=False)
class ProgramClient:
    """A connected instance."""

    connection: socket.socket
    memory: ClientMemory


@dataclass(frozen=True)
class Question:
    """Rows of one instance that wait for a run."""

    client: ProgramClient
    rows: int
    is_alone: bool


def next_run(waiting: deque[Question], most_rows: int) -> list[Question]:
    """Removes and returns the questions of the next run: the oldest, and those behind it that fit in."""
    chosen: list[Question] = []
    rows = 0
    while waiting and rows + waiting[0].rows <= most_rows:
        if chosen and (waiting[0].is_alone or chosen[0].is_alone):
            break
        chosen.append(waiting.popleft())
        rows += chosen[-1].rows
    return chosen


def is_complete(waiting: Sequence[Question], most_rows: int, others: int) -> bool:
    """Whether the next run gets no more rows by waiting. others: instances that could still ask."""
    rows = sum(question.rows for question in waiting)
    return bool(waiting) and (others == 0 or rows >= most_rows or any(question.is_alone for question in waiting))


@dataclass(frozen=True)
class ServedProgram:
    """A loaded program. layout: of each instance's memory; its rows are the most of a run."""

    runner: Runner
    layout: MemoryLayout
    greeting: Greeting
    part: Callable[[Any], Any] = lambda row: row  # what the runner takes, from an array (1, *dims) in shared memory
    rows_of: Callable[[Any], Any] = lambda rows: rows  # an array, from what the runner returns
    is_broken: Callable[[Exception], bool] = lambda _: False  # after this error, the process can run nothing more


@dataclass(frozen=True)
class ProgramRun:
    """A run, and the instances whose rows it has, in order."""

    questions: Sequence[Question]
    pending: PendingRun


class ProgramServer:
    """Runs the program in the thread that calls `run`."""

    def __init__(self, listener: socket.socket, program: ServedProgram) -> None:
        self._listener = listener
        self._program = program
        self._layout = program.layout
        self._greeting = program.greeting.packed()
        self._selector = selectors.EpollSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._clients: set[ProgramClient] = set()
        self._unused: list[ClientMemory] = []
        self._memories = 0
        self._waiting: deque[Question] = deque()
        self._in_flight: deque[ProgramRun] = deque()  # at most SLOTS

    def run(self) -> bool:
        """Until no instance is connected any more. Returns False if the GPU can no longer be used."""
        try:
            return self._run()
        finally:
            for client in list(self._clients):
                self._remove(client)
            self._selector.close()

    def _run(self) -> bool:
        finished: ProgramRun | None = None  # computed; answered when the next run has begun
        while True:
            self._collect(is_waiting=finished is None and not self._waiting and not self._in_flight)
            if not self._clients and finished is None and not self._in_flight:
                return True
            errors = [] if self._in_flight else [self._begin()]
            if finished is not None:
                self._answer(finished)
                finished = None
            if len(self._in_flight) == 1 and self._is_next_complete():
                errors.append(self._begin())
            if self._in_flight:
                computed = self._in_flight.popleft()
                errors.append(self._wait(computed))
                if errors[-1] is None and self._in_flight:
                    self._answer(computed)
                elif errors[-1] is None:
                    finished = computed
            if any(error is not None and self._program.is_broken(error) for error in errors):
                return False

    def _is_next_complete(self) -> bool:
        asking = len(self._waiting) + sum(len(run.questions) for run in self._in_flight)
        return is_complete(self._waiting, self._layout.rows, len(self._clients) - asking)

    def _collect(self, *, is_waiting: bool) -> None:
        """Accepts instances and reads their questions."""
        for key, _ in self._selector.select(None if is_waiting else 0):
            if key.data is None:
                self._accept()
            else:
                self._read(key.data)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has left again
            return
        user = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
        if user != os.geteuid() or len(self._clients) >= MAX_CLIENTS:
            connection.close()
            return
        if not self._unused:
            self._memories += 1
            self._unused.append(ClientMemory(self._layout, self._memories, self._program.part))
        client = ProgramClient(connection, self._unused.pop())
        connection.setblocking(False)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, client)
        try:
            socket.send_fds(connection, [self._greeting], [client.memory.descriptor])
        except OSError:
            self._remove(client)

    def _read(self, client: ProgramClient) -> None:
        try:
            message = client.connection.recv(QUESTION.size + 1)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if len(message) != QUESTION.size:
            self._remove(client)
            return
        rows, is_alone = QUESTION.unpack(message)
        if not 0 < rows <= self._layout.rows:
            self._remove(client)
            return
        self._waiting.append(Question(client, rows, bool(is_alone)))

    def _remove(self, client: ProgramClient) -> None:
        if client not in self._clients:
            return
        self._clients.discard(client)
        self._selector.unregister(client.connection)
        client.connection.close()
        kept = [question for question in self._waiting if question.client is not client]
        self._waiting.clear()
        self._waiting.extend(kept)
        self._unused.append(client.memory)

    def _begin(self) -> Exception | None:
        questions = next_run(self._waiting, self._layout.rows)
        if not questions:
            return None
        columns = [
            [part for question in questions for part in question.client.memory.parts[number][: question.rows]]
            for number in range(len(self._layout.inputs))
        ]
        try:
            pending = self._program.runner.begin(columns, sum(question.rows for question in questions))
        except Exception as error:  # noqa: BLE001  root of a run: its instances get the error
            self._fail(questions, error)
            return error
        self._in_flight.append(ProgramRun(questions, pending))
        return None

    def _wait(self, run: ProgramRun) -> Exception | None:
        try:
            run.pending.outputs()
        except Exception as error:  # noqa: BLE001  root of a run: its instances get the error
            self._fail(run.questions, error)
            return error
        return None

    def _answer(self, run: ProgramRun) -> None:
        outputs = [self._program.rows_of(output) for output in run.pending.memory()]
        begin = 0
        for question in run.questions:
            end = begin + question.rows
            if question.client in self._clients:  # else another instance may have its memory by now
                for target, rows in zip(question.client.memory.outputs, outputs, strict=True):
                    target[: question.rows] = rows[begin:end]
                self._send(question.client, DONE)
            begin = end

    def _fail(self, questions: Sequence[Question], error: Exception) -> None:
        text = f"{type(error).__name__}: {error}".encode()[: MAX_MESSAGE_BYTES // 2]
        _log(f"a run failed: {error!r}")
        for question in questions:
            self._send(question.client, text)

    def _send(self, client: ProgramClient, message: bytes) -> None:
        if client in self._clients:
            try:
                client.connection.send(message)
            except OSError:
                self._remove(client)


def _log(line: str) -> None:
    """To the server's log: it has the standard error of its models' processes."""
    sys.stderr.write(f"torch program's process {os.getpid()}: {line}\n")
    sys.stderr.flush()


def main(job: Mapping[str, Any], listener_descriptor: int) -> None:
    """Serves until no instance is connected. job: file, config, device_id (-1 on the CPU)."""
    with socket.socket(fileno=listener_descriptor) as listener:
        try:
            server = _opened(job, listener)
        except TorchLoadError as error:
            _refuse(listener, str(error))
            return
        gc.collect()
        gc.freeze()
        is_well = server.run()
    if not is_well:
        _log("the CUDA context is lost, the process ends")
        os._exit(BROKEN_CONTEXT_EXIT)  # the driver may not answer


def _opened(job: Mapping[str, Any], listener: socket.socket) -> ProgramServer:
    """Loads the program. Raises TorchLoadError."""
    try:
        import torch

        from . import device
    except ImportError as error:
        raise without_torch(error) from error
    config, is_gpu = dict(job["config"], instance_group=[]), job["device_id"] >= 0
    spec = engine_spec(config, is_gpu=is_gpu)
    placement = device.InstanceDevice(is_gpu, job["device_id"], config)
    opened = device.open_runner(Path(job["file"]), spec, placement, slots=SLOTS)
    if not is_gpu:
        torch.set_num_threads(max(1, device.available_cores() - 1))  # the last one is for Triton and the instances
    outputs = _output_types(opened.runner, spec, torch)
    layout = memory_layout([(one.data_type, one.dims) for one in spec.inputs], outputs, spec.max_batch_size)
    program = ServedProgram(
        opened.runner,
        layout,
        Greeting(outputs, opened.facts, opened.note),
        part=torch.from_numpy,
        rows_of=lambda rows: rows.numpy(),
        is_broken=device.is_broken,
    )
    return ProgramServer(listener, program)


def _output_types(runner: Runner, spec: EngineSpec, torch: Any) -> list[Typed]:
    """Data types and dims of the outputs, by a run of one row of zeros."""
    from .dtypes import WIRE_TYPES

    zeros = [[torch.zeros((1, *one.dims), dtype=WIRE_TYPES[one.data_type])] for one in spec.inputs]
    found = runner.begin(zeros, 1).outputs()
    return [(one.data_type, tuple(rows.shape[1:])) for one, rows in zip(spec.outputs, found, strict=True)]


def _refuse(listener: socket.socket, why: str) -> None:
    """Sends the reason to the instances that are connected now; later ones start another process."""
    listener.setblocking(False)
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.send(Greeting(error=why).packed())
