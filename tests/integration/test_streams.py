"""ModelStreamInfer through the real stack: as the bare Triton answers, cancelled, flooded, and with a killed engine."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import grpc
import h2.events
import h2.settings
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tests.integration.living import SLOW_CONFIG, inflight, triton_of
from tests.integration.raw_http2 import CANCEL, RawHttp2
from tests.support.http import call
from tests.support.stack import ENGINE_PORTS, RunningStack, start_stack, stop_stack
from tests.support.tiny_models import CONFIG, IDENTITY, SLOW, write_model
from tests.support.waiting import wait_for

pytestmark = pytest.mark.xdist_group("streams")

SERVICE = "/inference.GRPCInferenceService/"
STREAM = f"{SERVICE}ModelStreamInfer"
WAIT_S = 30.0
REPEAT = '''"""x: how many answers, the pause before each in ms, whether an error ends them. LAST: cancelled."""
import time

import numpy as np
import triton_python_backend_utils as pb_utils

LAST = {last!r}


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            count, pause_ms, fails = pb_utils.get_input_tensor_by_name(request, "x").as_numpy().ravel()
            sender = request.get_response_sender()
            for number in range(int(count)):
                time.sleep(pause_ms / 1000)
                if request.is_cancelled():
                    with open(LAST, "w") as file:
                        file.write(str(int(count)))
                    break
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([number], np.float32))]))
            if fails:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("gave up")))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None
'''
DECOUPLED = "model_transaction_policy { decoupled: true }\n"


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file in which the decoupled model says that it was cancelled."""
    return tmp_path_factory.mktemp("last") / "said"


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory, last: Path, triton_environment: Path) -> Iterator[RunningStack]:
    """identity answers at once, slow after x ms, repeat any number of times."""
    folder = tmp_path_factory.mktemp("streams")
    identity = CONFIG.format(max_batch_size=0, data_type="TYPE_FP32", count=1)
    write_model(folder / "models", "identity", IDENTITY, identity)
    write_model(folder / "models", "slow", SLOW, SLOW_CONFIG)
    write_model(folder / "models", "repeat", REPEAT.format(last=str(last)), SLOW_CONFIG + DECOUPLED)
    stack = start_stack(folder / "home", "--model-repository", str(folder / "models"), *ENGINE_PORTS)
    yield stack
    assert stop_stack(stack) == 0, "".join(stack.log[-30:])


def message(model: str, values: Sequence[float], request_id: str = "", **parameters: bool | int) -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    request.inputs.add(name="x", datatype="FP32", shape=[len(values)])
    request.raw_input_contents.append(np.array(values, np.float32).tobytes())
    for name, value in parameters.items():
        field = "bool_param" if isinstance(value, bool) else "int64_param"
        setattr(request.parameters[name], field, value)
    serialised: bytes = request.SerializeToString()
    return serialised


@asynccontextmanager
async def channel_to(address: str) -> AsyncIterator[grpc.aio.Channel]:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    channel = grpc.aio.insecure_channel(address, options)
    try:
        yield channel
    finally:
        await channel.close(None)


async def answers_to(
    address: str, messages: Sequence[bytes], metadata: tuple[tuple[str, str], ...] = ()
) -> tuple[list[bytes], str, str]:
    """All messages sent at once, then half-closed: what came, code and details."""
    received: list[bytes] = []
    async with channel_to(address) as channel, asyncio.timeout(WAIT_S):
        stream = channel.stream_stream(STREAM, None, None)(None, None, metadata)
        for one in messages:
            await stream.write(one)
        await stream.done_writing()
        try:
            while isinstance(answer := await stream.read(), bytes):
                received.append(answer)
        except grpc.aio.AioRpcError:
            pass
        return received, (await stream.code()).name, await stream.details() or ""


async def ask(channel: grpc.aio.Channel) -> float:
    """Seconds that a small unary inference took."""
    started = time.monotonic()
    asking = channel.unary_unary(f"{SERVICE}ModelInfer", None, None)
    assert await asking(message("identity", [1.0]), timeout=WAIT_S)
    return time.monotonic() - started


def is_unharmed(stack: RunningStack, restarts: int) -> None:
    """Nothing is in flight, and the engine was not restarted."""
    wait_for(lambda: inflight(stack) == 0, 20, "every place is free")
    assert restarts_of(stack) == restarts


def restarts_of(stack: RunningStack) -> int:
    page = call("GET", f"{stack.metrics_url}/penstock").body.decode()
    return int(float(page.split("\npenstock_engine_restarts_total ")[1].split("\n")[0]))


SLOW_THEN_FAST = (message("slow", [150], "a"), message("slow", [1], "b"), message("identity", [1, 2], "c"))
DIALOGUES = {
    "in order": SLOW_THEN_FAST,
    "no ids": (message("slow", [50]), message("nope", [1]), message("identity", [1, 2])),
    "unknown model waits its turn": (message("slow", [100], "a"), message("nope", [1], "b")),
    "wrong input": (message("identity", [], "a"), b"\x0a\x08identity", message("identity", [1], "b")),
    "unknown parameter": (message("identity", [1], "a", triton_foo=True),),
    "empty": (),
    "empty request": (b"",),
    "decoupled": (message("repeat", [3, 20, 0], "r"),),
    "decoupled without an answer": (message("repeat", [0, 0, 0], "r"),),
    "decoupled, final": (message("repeat", [2, 20, 0], "r", triton_enable_empty_final_response=True),),
    "decoupled, no final": (message("repeat", [1, 0, 0], "r", triton_enable_empty_final_response=False),),
    "decoupled error": (message("repeat", [1, 0, 1], "r"),),
    "decoupled error, final": (message("repeat", [1, 0, 1], "r", triton_enable_empty_final_response=True),),
    "decoupled, wrong input": (message("repeat", [2, 5, 0], "r"), b"\x0a\x06repeat\x1a\x01b"),
    "final, once": (message("identity", [1], "a", triton_enable_empty_final_response=True),),
    "timeout": (message("slow", [50], "a", timeout=1_000_000),),
}


@pytest.mark.parametrize("name", DIALOGUES)
async def test_stream_is_answered_as_triton_answers_it(streamed: RunningStack, name: str) -> None:
    """Byte by byte, in its order, and with its status."""
    direct = await answers_to(streamed.engine_grpc_address, DIALOGUES[name])
    through = await answers_to(streamed.grpc_address, DIALOGUES[name])
    assert through == direct
    is_unharmed(streamed, 0)


async def test_errors_as_status_do_not_end_the_engine(streamed: RunningStack) -> None:
    """Triton 2.51 dies when a decoupled model fails on a stream with triton_grpc_error; here the stream ends alone."""
    for _ in range(5):
        received, code, details = await answers_to(
            streamed.grpc_address, (message("repeat", [1, 20, 1], "r"),), (("triton_grpc_error", "true"),)
        )
        assert (len(received), code, details) == (1, "INTERNAL", "gave up")
    async with channel_to(streamed.grpc_address) as channel:
        await ask(channel)
    is_unharmed(streamed, 0)


async def test_decoupled_beside_others_on_one_stream_does_not_end_the_engine(streamed: RunningStack) -> None:
    """The bare Triton 2.51 dies, or never answers again, within some dozen of these; each is answered in full here."""
    mixed = [message("repeat", [1, 0, 0], "r"), message("identity", [1], "i"), message("repeat", [2, 0, 1], "e")]
    for _ in range(8):
        for received, code, _ in await asyncio.gather(*(answers_to(streamed.grpc_address, mixed) for _ in range(8))):
            ids = sorted(service_pb2.ModelStreamInferResponse.FromString(one).infer_response.id for one in received)
            assert (ids, code) == (["e", "e", "e", "i", "r"], "OK")
    is_unharmed(streamed, 0)


async def test_cancelled_stream_is_cancelled_in_the_model(streamed: RunningStack, last: Path) -> None:
    """The decoupled model sees is_cancelled() while it still answers."""
    async with channel_to(streamed.grpc_address) as channel, asyncio.timeout(WAIT_S):
        stream = channel.stream_stream(STREAM, None, None)()
        await stream.write(message("repeat", [500, 20, 0], "r"))
        await stream.read()
        stream.cancel()
        await asyncio.to_thread(wait_for, lambda: _read(last) == "500", 10, "the model has seen it")
    is_unharmed(streamed, 0)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


async def test_cancelled_anywhere_nothing_is_left_behind(streamed: RunningStack) -> None:
    """A sweep: unary calls and streams cancelled at every moment, before, while and after the models work."""
    moments = random.Random(5)
    async with channel_to(streamed.grpc_address) as channel:

        async def leave(number: int) -> None:
            async with asyncio.timeout(WAIT_S):
                if number % 2:
                    asking = channel.unary_unary(f"{SERVICE}ModelInfer", None, None)(message("slow", [20]))
                    await asyncio.sleep(moments.random() * 0.06)
                    asking.cancel()
                    return
                stream = channel.stream_stream(STREAM, None, None)()
                writing = asyncio.create_task(_write_all(stream, number))
                await asyncio.sleep(moments.random() * 0.06)
                stream.cancel()
                writing.cancel()
                await asyncio.wait((writing,))

        for wave in range(6):
            await asyncio.gather(*(leave(wave * 16 + number) for number in range(16)))
        await ask(channel)
    is_unharmed(streamed, 0)


async def _write_all(stream: "grpc.aio.StreamStreamCall[bytes, bytes]", number: int) -> None:
    for model, values in (("repeat", [3, 5, number % 4]), ("slow", [10]), ("nope", [1]), ("identity", [1])):
        try:
            await stream.write(message(model, values))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return


async def test_hundreds_of_streams_do_not_stop_the_others(streamed: RunningStack) -> None:
    """Each was answered and stays open; small calls on another connection go on, and each is answered again."""
    async with channel_to(streamed.grpc_address) as channel, channel_to(streamed.grpc_address) as other:
        opening = channel.stream_stream(STREAM, None, None)
        streams = [opening() for _ in range(300)]

        async def ask_on(stream: "grpc.aio.StreamStreamCall[bytes, bytes]") -> bool:
            await stream.write(message("identity", [1]))
            return isinstance(await stream.read(), bytes)

        async with asyncio.timeout(2 * WAIT_S):
            for first in range(0, 300, 100):
                assert all(await asyncio.gather(*map(ask_on, streams[first : first + 100])))
            times = [await ask(other) for _ in range(20)]
            assert sorted(times)[10] < 1.0  # some milliseconds on a machine of its own
            for first in range(0, 300, 100):
                assert all(await asyncio.gather(*map(ask_on, streams[first : first + 100])))
        for stream in streams:
            stream.cancel()
    is_unharmed(streamed, 0)


def reset_by_client(raw: RawHttp2) -> None:
    raw.frames.reset_stream(raw.open_stream(), CANCEL)
    raw.flush()


def reset_by_server(raw: RawHttp2) -> None:
    raw.make_server_reset(raw.open_stream())
    raw.receive(0.001)  # without this, the streams stay open for h2


@pytest.mark.parametrize("reset_one", [reset_by_client, reset_by_server], ids=["rapid reset", "MadeYouReset"])
async def test_streams_that_are_opened_and_reset_do_not_stop_the_others(
    streamed: RunningStack, reset_one: Callable[[RawHttp2], None]
) -> None:
    """300 calls on one connection are opened and reset at once, by the client or by an error that it provokes."""

    def reset() -> None:
        with RawHttp2(streamed.grpc_address) as raw, suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(300):
                reset_one(raw)
            raw.receive(1.0)

    async with channel_to(streamed.grpc_address) as channel, asyncio.timeout(2 * WAIT_S):
        resetting = asyncio.create_task(asyncio.to_thread(reset))
        while not resetting.done():
            assert await ask(channel) < 10
        await resetting
    is_unharmed(streamed, 0)


async def test_half_open_streams_do_not_stop_the_others(streamed: RunningStack) -> None:
    """While 800 streams on four connections send nothing, small calls are served; the engine gets no stream."""

    def open_all(raw: RawHttp2) -> None:
        for _ in range(200):
            raw.open_stream()
        raw.flush()

    with ExitStack() as connections:
        raws = [connections.enter_context(RawHttp2(streamed.grpc_address)) for _ in range(4)]
        async with channel_to(streamed.grpc_address) as channel, asyncio.timeout(2 * WAIT_S):
            opening = asyncio.gather(*(asyncio.to_thread(open_all, raw) for raw in raws))
            times = [await ask(channel) for _ in range(30)]
            await opening
    assert max(times) < 3.0  # the deadline of such clients; the slowest took 0.2 s, formerly more than 3 s
    is_unharmed(streamed, 0)


async def test_connection_may_hold_no_more_than_its_streams(streamed: RunningStack) -> None:
    """The server announces its limit, and refuses what passes it; the streams of others are served."""

    def flood(raw: RawHttp2) -> list[h2.events.Event]:
        assert raw.frames.remote_settings.max_concurrent_streams == 1024
        raw.frames.remote_settings[h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS] = 10_000
        raw.frames.remote_settings.acknowledge()
        for _ in range(1200):
            raw.open_stream()
        raw.flush()
        return raw.receive(3.0)

    with RawHttp2(streamed.grpc_address) as raw:
        events = await asyncio.to_thread(flood, raw)
        refused = [event for event in events if isinstance(event, h2.events.StreamReset)]
        assert len(refused) >= 1200 - 1024 or raw.is_over
        async with channel_to(streamed.grpc_address) as channel:
            assert await ask(channel) < 10
    is_unharmed(streamed, 0)


async def test_pings_in_a_flood_end_their_connection_alone(streamed: RunningStack) -> None:
    """GOAWAY, too_many_pings; the others are served."""

    def flood() -> list[h2.events.Event]:
        with RawHttp2(streamed.grpc_address) as raw:
            events: list[h2.events.Event] = []
            for _ in range(100):
                if raw.is_over:
                    break
                raw.frames.ping(b"12345678")
                raw.flush()
                events += raw.receive(0.01)
            assert raw.is_over
            return events

    async with channel_to(streamed.grpc_address) as channel:
        events = await asyncio.to_thread(flood)
        assert any(isinstance(event, h2.events.ConnectionTerminated) for event in events)
        assert await ask(channel) < 10


async def test_streams_are_counted_by_model_and_protocol(streamed: RunningStack) -> None:
    """Each request on a stream, answered or refused."""
    await answers_to(streamed.grpc_address, (message("identity", [1], "a"), message("nope", [1], "b")))
    page = call("GET", f"{streamed.metrics_url}/penstock").body.decode()
    assert 'penstock_requests_total{code="OK",model="identity",protocol="grpc-stream"}' in page
    assert 'penstock_requests_total{code="UNKNOWN",model="unknown",protocol="grpc-stream"}' in page


async def test_killed_engine_ends_its_streams_at_once(tmp_path: Path, triton_environment: Path) -> None:
    """UNAVAILABLE within a second for all that was in flight; the next stream is served when the engine is back."""
    write_model(tmp_path / "models", "slow", SLOW, SLOW_CONFIG)
    stack = start_stack(tmp_path / "home", "--model-repository", str(tmp_path / "models"))
    try:
        running = [asyncio.create_task(answers_to(stack.grpc_address, (message("slow", [20_000]),))) for _ in range(3)]
        await asyncio.to_thread(wait_for, lambda: inflight(stack) == 3, 10, "three requests run")
        killed = time.monotonic()
        triton_of(stack).kill()
        ends = await asyncio.gather(*running)
        assert time.monotonic() - killed < 2.5  # a second is promised; the machine may be busy
        assert {code for _, code, _ in ends} == {"UNAVAILABLE"}
        wait_for(lambda: restarts_of(stack) == 1, 30, "the engine is started again")
        wait_for(lambda: call("GET", f"{stack.http_url}/v2/health/ready").status == 200, 60, "the engine is back")
        received, code, _ = await answers_to(stack.grpc_address, (message("slow", [1], "a"),))
        assert (len(received), code) == (1, "OK")
        assert inflight(stack) == 0
    finally:
        assert stop_stack(stack) == 0
