"""The data plane over a fake engine and real decoders: what is refused, what is counted, what is given back."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.protocol.call import HttpAnswer, HttpCall, InferHead
from penstock.protocol.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    ModelRefused,
    Overloaded,
    UndecodableImage,
)
from penstock.protocol.identity import ANONYMOUS, Identity, Verb
from penstock.protocol.inference import BatchOwner, Tensor
from penstock.protocol.request_checks import EncodedCall
from penstock.protocol.vision_results import Classes, Detections
from penstock.testing import FakeMode
from penstock.vision.decoder_process import PreparedImage
from penstock.vision.results import ImageRequest
from tests.gateway.rig import CALL, InlinePool, Rig, picture


@pytest.fixture
def pool() -> InlinePool:
    return InlinePool()


async def test_image_of_detector_answers_boxes_in_source_pixels(rig: Rig) -> None:
    """The box over everything is the picture's own size."""
    response = await rig.plane.infer_images(ImageRequest("boxes", "", (picture(9, 30, 40),), None))
    (result,) = response.results
    assert isinstance(result, Detections)
    np.testing.assert_allclose(result.xyxy, [[0, 0, 30, 40]])
    assert response.labels == ("thing",)
    assert response.timings.decode > 0
    assert response.total_s >= response.timings.infer


async def test_image_request_of_three_makes_two_calls_and_keeps_order(rig: Rig) -> None:
    """max_batch_size 2: rows 2 and 1, each picture with its own result."""
    before = len(rig.backend.calls)
    images = (picture(255), picture(0), picture(250))
    response = await rig.plane.infer_images(ImageRequest("classes", "", images, None))
    tops = [int(result.class_id[0]) for result in response.results if isinstance(result, Classes)]
    assert tops == [2, 0, 2]
    assert len(rig.backend.calls) - before == 2
    assert response.timings.batch_size == 2


@pytest.mark.parametrize("model", ["found", "found-untried"])
async def test_pictures_of_a_model_whose_rows_are_not_merged_are_each_a_call(rig: Rig, model: str) -> None:
    """If its rows do not follow its batch, or were not tried, five pictures are answered as if sent alone."""
    images = [picture(level) for level in (255, 0, 64, 128, 191)]
    alone = [await rig.plane.infer_images(ImageRequest(model, "", (one,), None)) for one in images]
    rig.backend.calls.clear()
    together = await rig.plane.infer_images(ImageRequest(model, "", tuple(images), None))
    found = [result for result in together.results if isinstance(result, Detections)]
    assert [len(result.xyxy) for result in found] == [4, 0, 1, 2, 3]
    for result, single in zip(found, (one.results[0] for one in alone), strict=True):
        assert isinstance(single, Detections)
        np.testing.assert_array_equal(result.xyxy, single.xyxy)
        np.testing.assert_array_equal(result.class_id, single.class_id)
    assert [call.inputs[0].shape[0] for call in rig.backend.calls] == [1] * 5
    assert together.timings.batch_size == 1


async def test_many_images_pass_in_waves_and_keep_their_order(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's arrays are bounded: five pictures of which two fit at once take three waves."""
    monkeypatch.setattr("penstock.vision.image_tasks.MAX_IMAGE_BYTES_IN_MEMORY", 2 * 3 * 8 * 8 * 4)
    before = len(rig.backend.calls)
    images = tuple(picture(level) for level in (255, 0, 250, 5, 0))
    response = await rig.plane.infer_images(ImageRequest("classes", "", images, None))
    tops = [int(result.class_id[0]) for result in response.results if isinstance(result, Classes)]
    assert tops == [2, 0, 2, 0, 0]
    assert [call.inputs[0].shape[0] for call in rig.backend.calls[before:]] == [2, 2, 1]
    with pytest.raises(UndecodableImage, match="image 4 of 4: "):
        await rig.ask("classes", picture(1), picture(1), picture(1), b"\x89PNG\r\n\x1a\n")


async def test_one_bad_image_of_several_is_named_by_its_number(rig: Rig) -> None:
    """The whole request is refused, and the message says which picture and why."""
    with pytest.raises(UndecodableImage, match="image 2 of 2: "):
        await rig.ask("boxes", picture(1), picture(1)[:40])
    assert b'penstock_decode_errors_total{codec="png",reason="undecodable_image"} 1.0' in rig.metrics.text()


async def test_image_for_unknown_model_is_not_found_and_asked_once(rig: Rig) -> None:
    """404 is not retried, and does not make the engine suspect."""
    with pytest.raises(ModelNotFound):
        await rig.ask("unknown", picture(1))
    assert rig.watch.is_up


async def test_image_for_model_without_card_says_what_is_missing(rig: Rig) -> None:
    """A tensor model cannot take pictures, and the sentence names the parameter."""
    with pytest.raises(InvalidRequest, match="network-type"):
        await rig.ask("plain", picture(1))


@pytest.mark.parametrize(("mode", "words"), [(FakeMode.NAN, "NaN"), (FakeMode.GARBAGE, "output")])
async def test_image_when_engine_answers_rubbish_fails_and_names_model(rig: Rig, mode: FakeMode, words: str) -> None:
    """The outputs' contract is checked before anybody computes on them."""
    rig.backend.mode = mode
    with pytest.raises(EngineFailed, match=f"boxes.*{words}"):
        await rig.ask("boxes", picture(1))


async def test_image_past_its_deadline_in_the_engine_is_ended_and_gives_its_place_back(rig: Rig) -> None:
    """A slow engine costs the caller its deadline and no more."""
    rig.backend.mode = FakeMode.SLOW
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        await rig.ask("boxes", picture(1), deadline=started + 0.3)
    assert 0.25 <= time.monotonic() - started < 5  # the engine would never answer


async def test_request_with_passed_deadline_never_reaches_the_engine(rig: Rig) -> None:
    """A request that is late already is not run."""
    before = len(rig.backend.http_calls)
    with pytest.raises(DeadlineExceeded):
        await rig.plane.relay(Verb.INFER, InferHead("plain"), CALL, deadline=time.monotonic() - 1)
    assert len(rig.backend.http_calls) == before


async def test_request_without_deadline_gets_the_models_slo(rig: Rig) -> None:
    """slo_p99_ms of the config is the default deadline."""
    rig.backend.mode = FakeMode.SLOW
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        await rig.plane.relay(Verb.INFER, InferHead("hasty"), CALL)
    assert time.monotonic() - started < 5  # the engine would never answer


async def test_model_whose_slo_is_no_number_is_not_served_and_says_so(rig: Rig) -> None:
    """A deadline that cannot be kept is rejected: tensors, pictures and streams."""
    why = "model 'odd': slo_p99_ms is 'fast' in config.pbtxt, and must be"
    head = InferHead("odd")
    with pytest.raises(ModelRefused, match=why):
        await rig.plane.relay(Verb.INFER, head, CALL)
    with pytest.raises(ModelRefused, match=why):
        await rig.ask("odd", picture(0))
    with pytest.raises(ModelRefused, match=why), rig.plane.stream_slot(head, ANONYMOUS, 1):
        pytest.fail("a refused model got a place")
    assert why in rig.watch.models["odd"].reason


async def test_load_of_a_model_that_is_refused_fails_with_the_reason(rig: Rig) -> None:
    """Who loads a model learns at once that it is not served, and why."""
    with pytest.raises(InvalidRequest, match="the model is loaded but not served: model 'odd': slo_p99_ms"):
        await rig.plane.relay(Verb.LOAD, InferHead("odd"), CALL)


async def test_relayed_request_is_informed_that_the_gateway_did_not_form_its_batch(rig: Rig) -> None:
    """Over REST in a header, over gRPC in the trailing metadata; other answers have neither."""
    head = InferHead("plain")
    asks = replace(CALL, headers=(*CALL.headers, (b"x-penstock-explain", b"1")))
    assert b"x-penstock-explain" not in dict((await rig.plane.relay(Verb.INFER, head, CALL)).headers)
    answer = await rig.plane.relay(Verb.INFER, head, asks)
    explanation = json.loads(dict(answer.headers)[b"x-penstock-explain"])
    assert (explanation["model"], explanation["owner"]) == ("plain", "off")
    assert "alone" in explanation["text"]
    unasked = await rig.plane.relay(Verb.READ, head, asks)
    assert b"x-penstock-explain" not in dict(unasked.headers)


async def test_page_of_a_model_that_the_gateway_does_not_batch_is_of_the_engines_statistics(rig: Rig) -> None:
    """What Triton counted is shown as the gateway shows its own, and an unknown model is none."""
    counted = {"count": 10, "ns": 10_000_000}
    batches = [{"batch_size": rows, "compute_infer": counted} for rows in (1, 2)]
    body = json.dumps({"model_stats": [{"name": "plain", "batch_stats": batches}]}).encode()
    rig.backend.http_answer = HttpAnswer(200, (), body)
    page = await rig.plane.explain_model("plain")
    assert (page.owner, page.queue, [(row.rows, row.batches) for row in page.batches]) == (
        BatchOwner.OFF,
        None,
        [(1, 10), (2, 10)],
    )
    assert page.misspelt == {"slo_p99ms": "slo_p99_ms"}
    with pytest.raises(ModelNotFound):
        await rig.plane.explain_model("unknown")
    with pytest.raises(ModelRefused, match="slo_p99_ms"):
        await rig.plane.explain_model("odd")


async def test_statistics_that_the_engine_does_not_give_are_no_page_without_batches(rig: Rig) -> None:
    """An engine's error is passed on with its status and message."""
    rig.backend.http_answer = HttpAnswer(500, (), b'{"error":"out of memory"}')
    with pytest.raises(EngineFailed, match=r"statistics of model 'plain': status 500: .*out of memory"):
        await rig.plane.explain_model("plain")


async def test_encoded_images_reach_the_engine_as_a_tensor_and_count_what_it_takes(rig: Rig) -> None:
    """In flight are the files and the tensor; the model's SLO is the deadline of all of it."""
    files = (picture(255), picture(0))
    made: list[Tensor] = []

    def with_tensors(tensors: Sequence[Tensor]) -> HttpCall:
        made.extend(tensors)
        seen.append(rig.admission.statistics().size_bytes)
        return CALL

    seen: list[int] = []
    reply = await rig.plane.relay(
        Verb.INFER, InferHead("classes"), EncodedCall(InferHead("classes"), files, with_tensors, 3 * 8 * 8 * 4)
    )
    assert reply.status == 200
    assert made[0].shape == (2, 3, 8, 8)
    assert seen == [sum(map(len, files)) + 2 * 3 * 8 * 8 * 4]
    rig.backend.mode = FakeMode.SLOW
    hasty = EncodedCall(InferHead("hasty-classes"), files, lambda _: CALL)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        await rig.plane.relay(Verb.INFER, hasty.head, hasty)
    assert time.monotonic() - started < 5.0


async def test_pictures_wait_for_decoders_in_their_callers_name(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for image bodies and image tensors, so no client's pictures delay another's."""
    clients: list[object] = []
    decode = rig.pool.prepare

    async def noted(*arguments: Any, **words: Any) -> PreparedImage:
        clients.append(words["client"])
        return await decode(*arguments, **words)

    monkeypatch.setattr(rig.pool, "prepare", noted)
    camera, other = Identity("camera"), Identity(address="10.0.0.1")
    await rig.plane.infer_images(ImageRequest("boxes", "", (picture(9),), None), camera)
    encoded = EncodedCall(InferHead("classes"), (picture(9),), lambda _: CALL)
    await rig.plane.relay(Verb.INFER, encoded.head, encoded, caller=other)
    assert clients == ["key camera", "address 10.0.0.1"]


async def test_cancelled_caller_gives_its_place_back(rig: Rig) -> None:
    """A client that leaves while the engine works is not counted as in flight any more."""
    rig.backend.mode = FakeMode.SLOW
    task = asyncio.create_task(rig.ask("boxes", picture(1)))
    async with asyncio.timeout(60):
        while rig.admission.statistics().requests == 0:
            await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.admission.statistics().requests == 0


async def test_requests_over_the_limit_are_refused_while_the_others_run(rig: Rig) -> None:
    """Four are in flight, the fifth is rejected at once, and the four are answered."""
    rig.backend.mode = FakeMode.SLOW
    tasks = [asyncio.create_task(rig.plane.relay(Verb.INFER, InferHead("plain"), CALL)) for _ in range(4)]
    async with asyncio.timeout(60):
        while rig.admission.statistics().requests < 4:
            await asyncio.sleep(0.005)
    with pytest.raises(Overloaded, match=r"4 requests in flight \(limit 4\)"):
        await rig.plane.relay(Verb.INFER, InferHead("plain"), CALL)
    rig.backend.release.set()
    assert [reply.status for reply in await asyncio.gather(*tasks)] == [200] * 4


async def test_unreachable_engine_is_unavailable_and_looked_at_again(rig: Rig) -> None:
    """The call fails as such, and the watch finds out by itself that the engine is down."""
    rig.backend.mode = FakeMode.UNAVAILABLE
    with pytest.raises(EngineUnavailable):
        await rig.plane.relay(Verb.INFER, InferHead("plain"), CALL)
    async with asyncio.timeout(60):
        while rig.watch.is_up:
            await asyncio.sleep(0.005)
    assert not rig.plane.readiness().is_ready
    with pytest.raises(EngineUnavailable, match="the engine is not ready"):
        await rig.plane.relay(Verb.READ, InferHead(""), CALL)


async def test_request_over_which_the_engine_falls_silent_is_unavailable(rig: Rig) -> None:
    """A hung engine does not hold a request without a deadline for ever; a client that left stays cancelled."""
    rig.backend.mode = FakeMode.SLOW
    stays = asyncio.create_task(rig.plane.relay(Verb.INFER, InferHead("plain"), CALL))
    sees = asyncio.create_task(rig.ask("boxes", picture(1)))
    leaves = asyncio.create_task(rig.plane.relay(Verb.INFER, InferHead("plain"), CALL))
    async with asyncio.timeout(60):
        while rig.admission.statistics().requests < 3 or len(rig.backend.calls) < 1:
            await asyncio.sleep(0.005)
        leaves.cancel()
        rig.plane._admission._running.cut("fell silent over this request: the engine does not answer")
        for task in (stays, sees):
            with pytest.raises(EngineUnavailable, match="fell silent over this request: the engine does not answer"):
                await task
        with pytest.raises(asyncio.CancelledError):
            await leaves


async def test_batch_of_no_rows_is_refused_where_there_is_a_batch(rig: Rig) -> None:
    """A Python model in Triton 2.51 never answers it; `boxes` has no batch dimension, so 0 is allowed there."""
    rowless = InferHead("plain", rowless_input="x")
    with pytest.raises(InvalidRequest, match="input 'x': its first dimension, the batch, is 0; send at least one row"):
        await rig.plane.relay(Verb.INFER, rowless, CALL)
    with pytest.raises(InvalidRequest, match="the batch, is 0"), rig.plane.stream_slot(rowless, ANONYMOUS, 1):
        pass
    assert (await rig.plane.relay(Verb.INFER, replace(rowless, model_name="boxes"), CALL)).status == 200


async def test_classification_of_bytes_output_is_refused_by_its_name(rig: Rig) -> None:
    """Only the combination that kills Triton 2.51 is refused."""
    await rig.plane.relay(Verb.INFER, InferHead("classes", classification_outputs=("p",)), CALL)
    with pytest.raises(InvalidRequest, match="output 'y' of model 'plain' is BYTES"):
        await rig.plane.relay(Verb.INFER, InferHead("plain", classification_outputs=("y",)), CALL)


async def test_stopping_plane_says_not_ready_and_serves_on(rig: Rig) -> None:
    """The load balancer sees it first; later requests are still answered."""
    rig.plane.announce_stop()
    assert not rig.plane.readiness().is_ready
    assert (await rig.plane.relay(Verb.INFER, InferHead("plain"), CALL)).status == 200


def test_model_label_of_strangers_is_one(rig: Rig) -> None:
    """Clients cannot grow the metrics with names of their own."""
    assert rig.plane.model_label("plain") == "plain"
    assert {rig.plane.model_label(f"x{number}") for number in range(9)} == {"unknown"}
