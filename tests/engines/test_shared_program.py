"""`program-process: shared`: instances share one process, which merges their runs. Nothing needs torch."""

import os
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from penstock.engines.torch_serving.config import EngineSpec, engine_spec
from penstock.engines.torch_serving.instance import Instance, TorchRequest
from penstock.engines.torch_serving.parameters import TorchLoadError
from penstock.engines.torch_serving.program_process import (
    ClientMemory,
    ProgramClient,
    ProgramServer,
    Question,
    ServedProgram,
    is_complete,
    next_run,
)
from penstock.engines.torch_serving.shared_program import (
    Greeting,
    ProgramConnector,
    ProgramFile,
    ProgramLost,
    SharedRunner,
    memory_layout,
    numpy_runner,
    open_shared_instance,
    socket_folder,
)

TIMEOUT_S = 20.0
ROWS = 4
BROKEN, LOST, KILLED = -1.0, -2.0, -3.0  # values of a row: its run fails; the GPU is lost; the process ends
CONFIG: dict[str, Any] = {
    "name": "doubled",
    "max_batch_size": ROWS,
    "dynamic_batching": {},
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [2]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [2]}],
    "parameters": {"program-process": {"string_value": "shared"}},
}
TYPES = [("FP32", (2,))]


class Doubling:
    """Runner that doubles rows. It waits in each run until `may_run` is set."""

    def __init__(self) -> None:
        self.runs: list[list[float]] = []
        self.log: list[str] = []
        self.has_begun = threading.Event()
        self.may_run = threading.Event()
        self.may_run.set()

    def begin(self, columns: Sequence[Sequence[Any]], rows: int) -> Any:
        found = np.concatenate(columns[0])
        assert len(found) == rows
        self.runs.append(found[:, 0].tolist())
        self.log.append(f"begin {found[0, 0]:g}")
        self.has_begun.set()
        if found.min() == KILLED:
            raise SystemExit
        return SimpleNamespace(outputs=lambda: self._outputs(found), memory=lambda: (found * 2,))

    def _outputs(self, found: Any) -> tuple[Any, ...]:
        self.log.append(f"wait {found[0, 0]:g}")
        assert self.may_run.wait(TIMEOUT_S)
        if found.min() < 0:
            raise RuntimeError("lost" if found.min() == LOST else "broken")
        return (found * 2,)


class Process:
    """A program's process as a thread. starts: how often it was started."""

    def __init__(self, folder: Path) -> None:
        self.runner = Doubling()
        self.error = ""
        self.starts = 0
        self.threads: list[threading.Thread] = []
        self.runners: list[SharedRunner] = []
        self.is_well: list[bool] = []
        (folder / "model.pt2").write_bytes(b"program")
        self.file = ProgramFile(folder / "model.pt2", CONFIG, -1)
        self.folder = socket_folder(str(folder / "beside"))
        self.spec: EngineSpec = engine_spec(CONFIG, is_gpu=False)

    def start(self, _: ProgramFile, descriptor: int) -> "subprocess.Popen[bytes] | None":
        self.starts += 1
        listener = socket.socket(fileno=os.dup(descriptor))
        layout = memory_layout(TYPES, TYPES, ROWS)
        greeting = Greeting(TYPES, "facts", error=self.error)
        program = ServedProgram(cast(Any, self.runner), layout, greeting, is_broken=lambda error: str(error) == "lost")
        self.threads.append(threading.Thread(target=self._run, args=(listener, program), daemon=True))
        self.threads[-1].start()
        return None

    def _run(self, listener: socket.socket, program: ServedProgram) -> None:
        with listener, suppress(SystemExit):
            self.is_well.append(ProgramServer(listener, program).run())

    def connector(self) -> ProgramConnector:
        return ProgramConnector(self.file, self.spec, self.folder, self.start)

    def runner_of_instance(self, *, may_merge: bool = True) -> SharedRunner:
        runner = SharedRunner(self.connector().connect)
        runner.may_merge = may_merge
        self.runners.append(runner)
        return runner


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    """Ends when its instances have left."""
    process = Process(tmp_path)
    yield process
    process.runner.may_run.set()
    for runner in process.runners:
        runner.drop()
    for thread in process.threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def row(*numbers: float) -> Any:
    """A row of two values for each number."""
    return np.repeat(np.array(numbers, np.float32)[:, None], 2, axis=1)


def ask(runner: SharedRunner, *numbers: float) -> Callable[[], list[float]]:
    """Starts a run; returns a function that waits for its outputs."""
    pending = runner.begin([[row(*numbers)]], len(numbers))
    return lambda: [float(number) for number in pending.outputs()[0][:, 0]]


def question(rows: int, *, is_alone: bool = False) -> Question:
    return Question(cast(ProgramClient, None), rows, is_alone)


@pytest.mark.parametrize(
    ("waiting", "chosen"),
    [
        ([], []),
        ([(1, False), (1, False), (2, False)], [1, 1, 2]),
        ([(3, False), (2, False), (1, False)], [3]),  # order is kept: the last does not overtake the second
        ([(1, True), (1, False)], [1]),
        ([(1, False), (1, True), (1, False)], [1]),
        ([(4, False), (1, False)], [4]),
    ],
)
def test_next_run_has_the_oldest_rows_that_may_share_it(waiting: list[tuple[int, bool]], chosen: list[int]) -> None:
    """Up to the largest batch, in order; rows that must not be merged run alone."""
    left = deque(question(rows, is_alone=is_alone) for rows, is_alone in waiting)
    assert [one.rows for one in next_run(left, ROWS)] == chosen
    assert len(left) == len(waiting) - len(chosen)


def test_tensors_of_a_layout_begin_on_pages_and_do_not_overlap() -> None:
    """The memory is page-locked, and each tensor has room for all rows."""
    layout = memory_layout([("UINT8", (3, 100)), ("INT64", (2,))], [("FP16", (5,))], 8)
    assert [tensor.offset for tensor in (*layout.inputs, *layout.outputs)] == [0, 4096, 8192]
    assert layout.size_bytes == 12288
    memory = ClientMemory(layout, 1, lambda row: row)
    assert [part.shape for part in memory.parts[0]] == [(1, 3, 100)] * 8
    assert [rows.shape for rows in memory.outputs] == [(8, 5)]


def test_instances_share_one_process_and_get_their_own_rows(process: Process) -> None:
    """Rows that wait during a run go together into the next one."""
    first, second, third = (process.runner_of_instance() for _ in range(3))
    process.runner.may_run.clear()
    outputs = [ask(first, 1.0)]
    assert process.runner.has_begun.wait(TIMEOUT_S)
    outputs += [ask(second, 2.0, 3.0), ask(third, 4.0)]
    process.runner.may_run.set()
    assert [one() for one in outputs] == [[2.0], [4.0, 6.0], [8.0]]
    assert (process.starts, process.runner.runs) == (1, [[1.0], [2.0, 3.0, 4.0]])


def test_rows_that_must_not_be_merged_run_alone(process: Process) -> None:
    """Until its trial has passed, an instance may not share runs."""
    first, third = process.runner_of_instance(), process.runner_of_instance()
    second = process.runner_of_instance(may_merge=False)
    process.runner.may_run.clear()
    outputs = [ask(first, 1.0)]
    assert process.runner.has_begun.wait(TIMEOUT_S)
    outputs += [ask(second, 2.0), ask(third, 3.0)]
    process.runner.may_run.set()
    assert [one() for one in outputs] == [[2.0], [4.0], [6.0]]
    assert process.runner.runs == [[1.0], [2.0], [3.0]]


@pytest.mark.parametrize(
    ("waiting", "others", "complete"),
    [
        ([], 0, False),
        ([(1, False)], 1, False),
        ([(1, False)], 0, True),  # every instance waits or is in flight
        ([(1, False), (3, False)], 2, True),
        ([(1, True)], 2, True),
        ([(1, False), (1, True)], 2, True),
    ],
)
def test_run_is_complete_if_waiting_adds_no_rows(
    waiting: list[tuple[int, bool]], others: int, *, complete: bool
) -> None:
    """It starts if it is full, if its rows may not be merged, or if no other instance could send rows."""
    asked = [question(rows, is_alone=is_alone) for rows, is_alone in waiting]
    assert is_complete(asked, ROWS, others) is complete


@pytest.mark.parametrize("has_others", [False, True])
def test_complete_run_begins_while_the_one_before_is_computed(process: Process, *, has_others: bool) -> None:
    """So that the GPU is not idle in between; rows that others may join wait for it."""
    runners = [process.runner_of_instance(may_merge=has_others) for _ in range(4)]
    process.runner.may_run.clear()
    outputs = [ask(runners[0], 1.0)]
    assert process.runner.has_begun.wait(TIMEOUT_S)
    outputs += [ask(runner, number) for runner, number in ((runners[1], 2.0), (runners[2], 3.0))]
    process.runner.may_run.set()
    assert [one() for one in outputs] == [[2.0], [4.0], [6.0]]
    alone = ["begin 1", "wait 1", "begin 2", "begin 3", "wait 2", "wait 3"]
    assert process.runner.log == (["begin 1", "wait 1", "begin 2", "wait 2"] if has_others else alone)


def test_error_of_one_of_two_runs_in_flight_is_its_own(process: Process) -> None:
    """The other is answered, whichever was first."""
    runners = [process.runner_of_instance(may_merge=False) for _ in range(4)]
    process.runner.may_run.clear()
    outputs = [ask(runners[0], 1.0)]
    assert process.runner.has_begun.wait(TIMEOUT_S)
    outputs += [ask(runner, number) for runner, number in zip(runners[1:], (BROKEN, 3.0, BROKEN), strict=True)]
    process.runner.may_run.set()
    assert (outputs[0](), outputs[2]()) == ([2.0], [6.0])
    for broken in (outputs[1], outputs[3]):
        with pytest.raises(RuntimeError, match="RuntimeError: broken"):
            broken()
    assert ask(runners[3], 5.0)() == [10.0]


def test_failed_run_is_an_error_for_its_instances_only(process: Process) -> None:
    """The process goes on with the next run."""
    runner = process.runner_of_instance()
    with pytest.raises(RuntimeError, match="RuntimeError: broken"):
        ask(runner, BROKEN)()
    assert ask(runner, 5.0)() == [10.0]
    assert process.starts == 1


def test_process_without_its_gpu_ends_and_the_next_run_starts_it_again(process: Process) -> None:
    """Also for an instance that had no run in flight: only the faulty run fails."""
    first, second = process.runner_of_instance(), process.runner_of_instance()
    with pytest.raises(RuntimeError, match="RuntimeError: lost"):
        ask(first, LOST)()
    process.threads[0].join(TIMEOUT_S)
    assert process.is_well == [False]
    assert ask(second, 2.0)() == [4.0]
    assert ask(first, 3.0)() == [6.0]
    assert process.starts == 2


def test_run_in_flight_fails_when_the_process_ends(process: Process) -> None:
    """The instance connects again for its next run."""
    runner = process.runner_of_instance()
    with pytest.raises(ProgramLost, match="has ended"):
        ask(runner, KILLED)()
    assert ask(runner, 2.0)() == [4.0]
    assert process.starts == 2


def test_process_ends_when_no_instance_is_connected(process: Process) -> None:
    """Nothing is left behind when a model is unloaded."""
    runners = [process.runner_of_instance() for _ in range(2)]
    for runner in runners:
        runner.drop()
    process.threads[0].join(TIMEOUT_S)
    assert process.is_well == [True]


def test_message_that_is_no_question_closes_only_that_connection(process: Process) -> None:
    """Too many rows, none, or other bytes: the process does not read beyond the shared memory."""
    good = process.runner_of_instance()
    for message in (b"", b"x", bytes((ROWS + 1, 0, 0, 0, 0)), bytes(5), bytes(9)):
        connection = process.connector()._reach()
        connection.settimeout(TIMEOUT_S)
        connection.recv(1 << 16)
        connection.send(message)
        assert connection.recv(1) == b""
        connection.close()
    assert ask(good, 6.0)() == [12.0]


def test_program_that_cannot_be_loaded_is_one_sentence(process: Process) -> None:
    """The instance raises the sentence that the process sent."""
    process.error = "model.pt2 is not a program of torch.export.save"
    with pytest.raises(TorchLoadError, match=r"^model.pt2 is not a program of torch.export.save$"):
        process.connector().connect()


def test_process_that_ends_while_loading_is_an_error(process: Process) -> None:
    """After a few tries, so that a broken program is not started for ever."""
    starts: list[int] = []

    def start(_: ProgramFile, descriptor: int) -> None:
        starts.append(descriptor)

    connector = ProgramConnector(process.file, process.spec, process.folder, start)
    with pytest.raises(TorchLoadError, match="ended while it was loading; see the server's log"):
        connector.connect()
    assert len(starts) == 3


def test_instance_answers_requests_by_the_shared_process(process: Process) -> None:
    """As an instance with a program of its own, also for requests that cannot share a run."""
    instance = Instance(process.spec, process.runner_of_instance())
    outcomes = instance.answer([TorchRequest((row(1.0, 2.0, 3.0),)), TorchRequest((row(4.0, 5.0),))])
    assert [cast(Any, outcome)[0][:, 0].tolist() for outcome in outcomes] == [[2.0, 4.0, 6.0], [8.0, 10.0]]
    run = numpy_runner(instance, process.spec)
    assert cast(Any, run({"x": row(7.0)}))["y"].tolist() == [[14.0, 14.0]]
    assert run({"x": row(BROKEN)}) == "RuntimeError: RuntimeError: broken"


def test_changed_file_or_configuration_has_a_process_of_its_own(tmp_path: Path) -> None:
    """A reloaded model never uses the previous program; the number of instances makes no difference."""
    path = tmp_path / "model.pt2"
    path.write_bytes(b"one")
    program = ProgramFile(path, CONFIG, 0)
    keys = [program.key(), ProgramFile(path, CONFIG | {"instance_group": [{"count": 9}]}, 0).key()]
    assert keys[0] == keys[1]
    keys += [ProgramFile(path, CONFIG, 1).key(), ProgramFile(path, CONFIG | {"max_batch_size": 9}, 0).key()]
    path.write_bytes(b"other")
    assert len({*keys, program.key()}) == 4


def test_folder_that_others_may_use_is_refused(tmp_path: Path) -> None:
    """A client that connects could read and replace other clients' rows."""
    assert socket_folder(str(tmp_path / "slab")).stat().st_mode & 0o777 == 0o700
    (tmp_path / "programs").chmod(0o755)
    with pytest.raises(TorchLoadError, match="is not a folder of this user alone; remove it"):
        socket_folder(str(tmp_path / "slab"))


def test_missing_program_is_one_sentence(process: Process) -> None:
    """No process is started without the program's file."""
    missing = ProgramFile(process.file.path.with_name("none.pt2"), CONFIG, -1)
    with pytest.raises(TorchLoadError, match=r"^there is no none.pt2 in .*: export one first$"):
        open_shared_instance(missing, process.spec, process.folder)
