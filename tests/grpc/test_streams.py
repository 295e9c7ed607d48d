"""ModelStreamInfer at the front: order, refusals, windows, cancellation, deadlines, drain, and who does not read."""

import asyncio
import time

import grpc
import pytest
from tritonclient.grpc import service_pb2

from penstock.gateway.grpc.server import GrpcLimits
from penstock.gateway.grpc.stream import StreamLimits
from penstock.protocol.call import GrpcAnswer
from penstock.protocol.errors import DeadlineExceeded, EngineUnavailable, Overloaded
from penstock.testing import FakeMode
from tests.grpc.harness import Front, infer_message, serving
from tests.grpc.scripted import WAIT_S, ScriptedStream, streaming

Code = grpc.StatusCode
BAD_SHAPE = service_pb2.ModelInferRequest(model_name="double", id="bad")
BAD_SHAPE.inputs.add(name="x", datatype="FP32", shape=[1, 2**62])


@pytest.fixture
def engine(front: Front) -> ScriptedStream:
    """The engine's side of the front's next stream."""
    return _scripted(front)


@pytest.fixture
def decoupled(front: Front, engine: ScriptedStream) -> ScriptedStream:
    """The engine's other side, for decoupled models."""
    return _scripted(front)


def _scripted(front: Front) -> ScriptedStream:
    script = ScriptedStream()
    front.plane.scripts.append(script)
    return script


async def nothing_in_flight(front: Front) -> None:
    """Returns when every place is free."""
    async with asyncio.timeout(WAIT_S):
        while front.plane.admission.statistics().requests:
            await asyncio.sleep(0)


async def test_answers_pass_byte_by_byte_in_the_engines_order(front: Front, engine: ScriptedStream) -> None:
    """Whatever their order, the requests as they were sent; half-close reaches the engine, its end the client."""
    async with streaming(front) as client:
        await client.ask("double", "a")
        await client.ask("double", "b")
        await engine.has(2)
        said = [engine.say("b"), engine.say("a")]
        assert [await client.hear_bytes(), await client.hear_bytes()] == said
        await client.call.done_writing()
        await asyncio.wait_for(engine.is_half_closed.wait(), WAIT_S)
        engine.finish(GrpcAnswer(0, trailing_metadata=(("key", "value"),)))
        assert await client.status() == (Code.OK, "")
        assert ("key", "value") in tuple(await client.call.trailing_metadata())  # type: ignore[arg-type]

    assert [request.SerializeToString() for request in engine.sent] == [_asked("a"), _asked("b")]
    assert front.recorder.done == [("double", "grpc-stream", "OK")] * 2
    assert front.plane.admission.statistics().requests == 0


def _asked(request_id: str) -> bytes:
    request = service_pb2.ModelInferRequest(model_name="double", id=request_id)
    request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
    request.raw_input_contents.append(bytes(4))
    message: bytes = request.SerializeToString()
    return message


async def test_initial_metadata_comes_before_the_first_request(front: Front, engine: ScriptedStream) -> None:
    """A client that waits for it before it sends is not kept waiting."""
    async with streaming(front) as client, asyncio.timeout(WAIT_S):
        await client.call.initial_metadata()


async def test_metadata_reaches_the_engine(front: Front) -> None:
    """traceparent as it came."""
    traceparent = ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    async with streaming(front, metadata=(traceparent,)) as client:
        await client.ask("double", "a")
        await client.hear()

    assert traceparent in front.engine.streams[0]


async def test_refused_request_gets_its_error_in_order_and_the_stream_goes_on(
    front: Front, engine: ScriptedStream
) -> None:
    """A shape that kills the engine never reaches it; the error has the request's id, and waits for its turn."""
    async with streaming(front) as client:
        await client.ask("double", "first")
        await client.call.write(BAD_SHAPE.SerializeToString())
        await client.ask("double", "last")
        await engine.has(2)
        engine.say("first")
        engine.say("last")
        answers = [await client.hear() for _ in range(3)]

    assert [answer.infer_response.id for answer in answers] == ["first", "bad", "last"]
    assert "more than 2^40 elements" in answers[1].error_message
    assert [request.id for request in engine.sent] == ["first", "last"]
    assert front.recorder.reasons == ["invalid"]
    assert ("double", "grpc-stream", "INVALID_ARGUMENT") in front.recorder.done


async def test_stream_without_a_request_opens_none_to_the_engine(front: Front, engine: ScriptedStream) -> None:
    """Open streams without requests cost the engine nothing; the first request opens the engine's stream."""
    async with streaming(front) as client:
        await client.call.initial_metadata()
        assert front.plane.scripts == [engine]
        await client.ask("double", "a")
        await engine.has(1)
        assert not front.plane.scripts

    async with streaming(front) as client:
        await client.call.done_writing()
        assert await client.status() == (Code.OK, "")


async def test_bytes_that_are_no_request_are_refused(front: Front, engine: ScriptedStream) -> None:
    """With a sentence; the stream goes on."""
    async with streaming(front) as client:
        await client.call.write(b"\xff\xff\xff")
        assert "not a valid protobuf message" in (await client.hear()).error_message
        await client.ask("double", "a")
        await engine.has(1)


async def test_full_gateway_refuses_the_request_and_keeps_the_stream(front: Front, engine: ScriptedStream) -> None:
    """What admission says is the answer to that one request."""
    front.plane.refused["texts"] = Overloaded("512 requests in flight (limit 512); retry after 0.2 s")
    async with streaming(front) as client:
        await client.ask("texts", "a")
        answer = await client.hear()
        assert (answer.infer_response.id, answer.error_message) == ("a", front.plane.refused["texts"].args[0])
        await client.ask("double", "b")
        await engine.has(1)

    assert front.recorder.reasons == ["full"]


async def test_decoupled_request_holds_its_place_until_the_engine_says_it_is_done(front: Front) -> None:
    """The gateway requests the empty final response; it is relayed only to a client that requested it."""
    decoupled = _scripted(front)
    async with streaming(front) as client:
        await client.ask("repeat", "quiet")
        await client.ask("repeat", "explicit", triton_enable_empty_final_response=True)
        await decoupled.has(2)
        for request in decoupled.sent:
            assert request.parameters["triton_enable_empty_final_response"].bool_param
        said = [decoupled.say("quiet", model="repeat", is_final=False)]
        assert await client.hear_bytes() == said[0]
        assert front.plane.admission.statistics().requests == 2
        decoupled.say("quiet", model="repeat", is_empty=True)
        last = decoupled.say("explicit", model="repeat", is_empty=True)
        assert await client.hear_bytes() == last
        await nothing_in_flight(front)

    assert front.plane.answered == ["repeat", "repeat"]


async def test_decoupled_and_other_models_never_share_a_stream_of_the_engine(
    front: Front, engine: ScriptedStream, decoupled: ScriptedStream
) -> None:
    """Triton 2.51 dies of it; the client's one stream carries both, and ends when both of the engine's have ended."""
    async with streaming(front) as client:
        await client.ask("double", "b")
        await client.ask("repeat", "a")
        await engine.has(1)
        await decoupled.has(1)
        assert [request.id for request in (*engine.sent, *decoupled.sent)] == ["b", "a"]
        await client.call.done_writing()
        async with asyncio.timeout(WAIT_S):
            await engine.is_half_closed.wait()
            await decoupled.is_half_closed.wait()
        engine.say("b")
        engine.finish()
        assert (await client.hear()).infer_response.id == "b"
        decoupled.say("a", model="repeat", is_final=False)
        decoupled.say("a", model="repeat", is_empty=True)
        decoupled.finish()
        assert (await client.hear()).infer_response.id == "a"
        assert await client.status() == (Code.OK, "")


async def test_decoupled_request_does_not_hold_a_refusal_back(front: Front, decoupled: ScriptedStream) -> None:
    """As Triton: errors wait for the answers of models that answer once, and for no others."""
    async with streaming(front) as client:
        await client.ask("repeat", "long")
        await client.call.write(BAD_SHAPE.SerializeToString())
        assert (await client.hear()).infer_response.id == "bad"


async def test_errors_as_status_end_the_stream(front: Front, engine: ScriptedStream, decoupled: ScriptedStream) -> None:
    """With `triton_grpc_error: true`: an error of a model, not one before it; engine and places are let go."""
    async with streaming(front, metadata=(("triton_grpc_error", "true"),)) as client:
        await client.ask("nope", "a")
        await client.ask("repeat", "b")
        await engine.has(1)
        await decoupled.has(1)
        engine.fail("a", "Request for unknown model: 'nope' is not found")
        assert (await client.hear()).error_message.startswith("Request for unknown model")
        decoupled.fail("b", "gave up", model="repeat", is_final=False)
        assert await client.status() == (Code.INTERNAL, "gave up")

    async with asyncio.timeout(WAIT_S):
        await engine.is_cancelled.wait()
        await decoupled.is_cancelled.wait()
    assert front.plane.admission.statistics().requests == 0


async def test_window_keeps_further_requests_in_the_client() -> None:
    """Two in flight: the third reaches the engine when the first is answered."""
    async with serving(GrpcLimits(streams=StreamLimits(window=2))) as front:
        engine = _scripted(front)
        async with streaming(front) as client:
            for number in range(4):
                await client.ask("double", str(number))
            await engine.has(2)
            await client.call.initial_metadata()
            assert len(engine.sent) == 2
            engine.say("0")
            await engine.has(3)
            assert front.plane.admission.statistics().requests == 2


async def test_streams_are_limited_in_number() -> None:
    """One more than the limit is refused with a sentence; a closed one makes room."""
    async with serving(GrpcLimits(streams=StreamLimits(max_streams=1))) as front:
        async with streaming(front) as first:
            await first.ask("double", "a")
            await first.hear()
            async with streaming(front) as second:
                code, details = await second.status()
        assert (code, details) == (Code.UNAVAILABLE, "1 streams are open (limit 1); close one, or send by ModelInfer")
        async with asyncio.timeout(WAIT_S):
            while True:
                async with streaming(front) as third:
                    await third.call.done_writing()  # and no request: writing to a refused stream raises
                    if (await third.status())[0] is Code.OK:
                        break


async def test_client_that_leaves_cancels_the_engines_stream(
    front: Front, engine: ScriptedStream, decoupled: ScriptedStream
) -> None:
    """And gives back every place, as one whose work may still run there; counted as one that left."""
    async with streaming(front) as client:
        await client.ask("double", "a")
        await client.ask("repeat", "b")
        await engine.has(1)
        await decoupled.has(1)
    async with asyncio.timeout(WAIT_S):
        await engine.is_cancelled.wait()
        await decoupled.is_cancelled.wait()
        await front.recorder.gone.wait()
    await nothing_in_flight(front)
    assert front.recorder.left == ["grpc-stream"]
    assert front.plane.left_of == [asyncio.CancelledError, asyncio.CancelledError]


async def test_client_that_leaves_while_its_request_waits_for_a_slot_is_counted(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though no request of its stream has reached the engine; and the slot in flight is free again."""
    is_waiting = asyncio.Event()

    async def place(*_: object) -> None:
        is_waiting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(front.plane.slots, "place", place)
    async with streaming(front) as client:
        await client.ask("double", "a")
        await asyncio.wait_for(is_waiting.wait(), WAIT_S)
    await asyncio.wait_for(front.recorder.gone.wait(), WAIT_S)
    await nothing_in_flight(front)
    assert front.recorder.left == ["grpc-stream"]


async def test_deadline_of_the_stream_reaches_the_engine(front: Front) -> None:
    """The client reads DEADLINE_EXCEEDED, and the engine's work is cancelled."""
    front.engine.mode = FakeMode.SLOW
    async with streaming(front, timeout_s=0.3) as client:
        await client.ask("double", "a")
        assert (await client.status())[0] is Code.DEADLINE_EXCEEDED
    await nothing_in_flight(front)


async def test_engine_that_dies_ends_the_stream_as_unavailable(front: Front, engine: ScriptedStream) -> None:
    """At once, with what is in flight."""
    async with streaming(front) as client:
        await client.ask("double", "a")
        await engine.has(1)
        engine.finish(EngineUnavailable("the engine is gone"))
        assert await client.status() == (Code.UNAVAILABLE, "the engine is gone")

    assert front.recorder.done == [("double", "grpc-stream", "UNAVAILABLE")]
    assert front.plane.left_of == [EngineUnavailable]


async def test_engine_that_falls_silent_ends_the_stream() -> None:
    """The engine timeout ends a stream with requests in flight; an idle stream has no timeout."""
    async with serving(GrpcLimits(streams=StreamLimits(engine_timeout_s=0.2))) as front:
        engine = _scripted(front)
        async with streaming(front) as client:
            await client.call.initial_metadata()
            await asyncio.sleep(0.4)  # longer than the timeout, in real time
            await client.ask("double", "a")
            await engine.has(1)
            code, details = await client.status()
    assert code is Code.DEADLINE_EXCEEDED
    assert details == "the engine said nothing for 0.2 s while 1 requests were on the stream"
    assert front.plane.left_of == [DeadlineExceeded]


async def test_reader_that_does_not_read_is_cut_and_the_others_are_served() -> None:
    """After the reader timeout its slots are free and its work at the engine is cancelled."""
    async with serving(GrpcLimits(streams=StreamLimits(reader_timeout_s=0.3))) as front:
        async with streaming(front) as stuck:
            for _ in range(16):
                await stuck.call.write(infer_message(size=1 << 18))
            async with asyncio.timeout(WAIT_S):
                while "deadline" not in front.recorder.reasons:
                    await front.call("ModelInfer", infer_message())
            assert front.plane.admission.statistics().size_bytes == 0
            code, details = await stuck.status()
        assert (code, details.partition(";")[0]) == (Code.DEADLINE_EXCEEDED, "an answer waited 0.3 s for its reader")


async def test_drain_answers_what_came_and_ends_each_stream() -> None:
    """Requests that came are answered, then the stream ends as UNAVAILABLE with a sentence; the stop is clean."""
    async with serving() as front:
        engine = _scripted(front)
        async with streaming(front) as client:
            await client.ask("double", "a")
            await engine.has(1)
            stopping = asyncio.create_task(front.server.stop(WAIT_S))
            await asyncio.wait_for(engine.is_half_closed.wait(), WAIT_S)
            said = engine.say("a")
            engine.finish()
            assert await client.hear_bytes() == said
            code, details = await client.status()
        assert await stopping is True
    assert code is Code.UNAVAILABLE
    assert details == "this gateway stops and takes no more requests; open the stream to another one"


async def test_stop_cuts_streams_that_outlast_the_grace(capfd: pytest.CaptureFixture[str]) -> None:
    """UNAVAILABLE with a sentence, within the grace and a little, and no traceback."""
    async with serving() as front:
        engine = _scripted(front)
        async with streaming(front) as client:
            await client.ask("double", "a")
            await engine.has(1)
            started = time.monotonic()
            assert await front.server.stop(0.2) is False
            assert time.monotonic() - started < 5
            code, details = await client.status()
    assert (code, details) == (Code.UNAVAILABLE, "this gateway stopped before all answers came; send to another one")
    assert engine.is_cancelled.is_set()
    assert "Traceback" not in capfd.readouterr().err


async def test_message_over_the_limit_ends_the_stream_with_the_limit_named() -> None:
    """RESOURCE_EXHAUSTED, before the engine sees it."""
    async with serving(GrpcLimits(max_message_bytes=1 << 16)) as front:
        engine = _scripted(front)
        async with streaming(front) as client:
            await client.call.write(infer_message(size=1 << 15))
            code, details = await client.status()
    assert code is Code.RESOURCE_EXHAUSTED
    assert "65536" in details
    assert engine.sent == []
