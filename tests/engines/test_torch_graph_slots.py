"""The slots of a runner of CUDA graphs, with CUDA played on the CPU: what is in flight is not overwritten."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from penstock.engines.torch_serving.config import engine_spec
from penstock.engines.torch_serving.staging import PinnedRegions

torch = pytest.importorskip("torch", reason="torch is in none of the project's environments: `make gpu` adds it")

from penstock.engines.torch_serving import runners  # noqa: E402  after the skip

CPU = torch.device("cpu")


class PlayedEvent:
    """Counts the waits for it. log: replays and waits, in order."""

    waits = 0
    log: ClassVar[list[str]] = []

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, _: Any) -> None:
        pass

    def synchronize(self) -> None:
        PlayedEvent.waits += 1
        PlayedEvent.log.append("wait")


class PlayedStream:
    """Everything runs at once."""

    def __init__(self, _: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        pass

    def wait_event(self, _: Any) -> None:
        pass


class PlayedGraph:
    """The program, once more, on what its capture was given."""

    def __init__(self) -> None:
        self.replay: Any = None


class Doubling:
    """The program. captured: what it was given last, where the graph reads."""

    def __init__(self) -> None:
        self.captured: Sequence[Any] = ()

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        self.captured = inputs
        return [inputs[0] * 2]


class OnDevice(torch.Tensor):  # type: ignore[misc]
    """A tensor that says that it is a GPU's."""

    is_cuda = True


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> runners.GraphRunner:
    """Two slots of at most four rows."""
    program, made = Doubling(), []

    @contextmanager
    def capturing(graph: PlayedGraph, **_: Any) -> Iterator[None]:
        yield
        inputs = program.captured

        def replay() -> None:
            PlayedEvent.log.append("replay")
            made[0]._outputs[0][: len(inputs[0])].copy_(inputs[0] * 2)

        graph.replay = replay

    names = ("synchronize", "empty_cache", "set_stream", "current_stream", "graph_pool_handle")
    cuda = SimpleNamespace(Stream=PlayedStream, Event=PlayedEvent, CUDAGraph=PlayedGraph, graph=capturing)
    cuda.__dict__.update({name: lambda *_: None for name in names}, stream=lambda _: nullcontext())
    cuda.current_stream = lambda _: SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch, "cuda", cuda)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, pin_memory=False, **rest: empty(shape, **rest))
    monkeypatch.setattr(PlayedEvent, "waits", 0)
    monkeypatch.setattr(PlayedEvent, "log", [])
    model = {
        "name": "doubled",
        "max_batch_size": 4,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [3]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [3]}],
        "parameters": {"precision": {"string_value": "fp32"}},
    }
    pinned = PinnedRegions(lambda *_: True, lambda *_: None, read=lambda: [])
    spec = engine_spec(model, is_gpu=True)
    made.append(runners.GraphRunner(program, spec, CPU, pinned=pinned, slots=2, is_lent=True))  # type: ignore[arg-type]
    return made[0]


def rows(*numbers: float) -> Any:
    """One row of three a number."""
    return torch.tensor(numbers)[:, None].repeat(1, 3)


def test_two_batches_in_flight_keep_their_answers(runner: runners.GraphRunner) -> None:
    """Each lies in the memory of its own slot, until the next but one begins."""
    first, second = runner.begin([[rows(1.0), rows(2.0)]], 2), runner.begin([[rows(3.0)]], 1)
    assert first.outputs()[0][:, 0].tolist() == [2.0, 4.0]
    assert second.outputs()[0][:, 0].tolist() == [6.0]


def test_batch_that_cannot_begin_leaves_the_answers_in_flight_alone(runner: runners.GraphRunner) -> None:
    """It uses no slot up: the next takes the free one, and not that of the batch before."""
    first = runner.begin([[rows(1.0)]], 1)
    with pytest.raises(RuntimeError, match="size"):
        runner.begin([[torch.zeros(1, 5)]], 1)
    following = runner.begin([[rows(7.0)]], 1)
    assert first.outputs()[0][:, 0].tolist() == [2.0]
    assert following.outputs()[0][:, 0].tolist() == [14.0]


def test_device_memory_is_read_before_begin_returns(runner: runners.GraphRunner) -> None:
    """Triton takes it back then; what lies in host memory is the request's until it is answered.

    The wait comes after the launch, so that the GPU does not wait for it.
    """
    runner.begin([[rows(1.0)]], 1)
    assert PlayedEvent.log == ["replay"]
    pending = runner.begin([[rows(4.0).as_subclass(OnDevice), rows(5.0)]], 2)
    assert PlayedEvent.log == ["replay", "replay", "wait"]
    assert pending.outputs()[0][:, 0].tolist() == [8.0, 10.0]


def test_device_memory_that_stays_is_not_waited_for(runner: runners.GraphRunner) -> None:
    """The raw program's own, and what lies there until execute returns: it is cast from where it lies."""
    runner._is_lent = False
    pending = runner.begin([[rows(4.0).as_subclass(OnDevice), rows(5.0).as_subclass(OnDevice)]], 2)
    assert PlayedEvent.waits == 0
    assert pending.outputs()[0][:, 0].tolist() == [8.0, 10.0]
