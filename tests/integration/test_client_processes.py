"""The video program's engine at real stacks: as a local client process, and by their ports."""

import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cv2
import numpy as np
import psutil
import pytest

from penstock.gateway.auth.api_keys import new_secret
from penstock.gateway.workers.connection import SOCKET_NAME, ClientHello, Infer, SyncDone
from penstock.protocol.inference import InferRequest
from penstock_video.errors import InferFailed, InferRefused
from penstock_video.infer.calls import classes_of, detections_of
from penstock_video.infer.engine import Engine
from penstock_video.infer.options import EngineAddress
from tests.deepstream_pipeline.infer.fake_core import engine_at, submit
from tests.integration.client_processes import (
    DOZING,
    NOT_SLOW,
    client_process,
    figures,
    figures_at_rest,
    found,
    grown,
    in_flight,
    killed,
    local,
    png,
    remote,
    row_of,
)
from tests.integration.embedded_stack import NO_TRITON
from tests.integration.living import gate_closed, triton_of
from tests.integration.pictures import Picture, frames
from tests.integration.test_slab import BRIGHTNESS, BRIGHTNESS_CONFIG, brightness_of
from tests.integration.two_workers import part_of
from tests.support.http import call
from tests.support.stack import RunningStack, start_stack, stop_stack
from tests.support.tiny_models import write_model
from tests.support.waiting import wait_for
from tests.workers.test_invalid_peers import framed

pytestmark = pytest.mark.xdist_group("stack")
WAYS = pytest.mark.parametrize("way", [local, remote])
Way = Callable[[RunningStack], EngineAddress]


@pytest.fixture(scope="module")
def pictures(shared_dir: Path) -> tuple[Picture, ...]:
    return frames(shared_dir / "media" / "vtest.avi")


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningStack, str]]:
    """The embedded engine with the shipped models, behind a key."""
    key = new_secret()
    environ = NO_TRITON | {"PENSTOCK_API_KEYS": f"camera:infer+read:{key}"}
    stack = start_stack(tmp_path_factory.mktemp("home"), "--engine", "embedded", environ=environ)
    yield stack, key
    assert stop_stack(stack) == 0, "".join(stack.log[-30:])


def detections_by_http(stack: RunningStack, model: str, picture: Picture, **headers: str) -> list[dict[str, object]]:
    url = f"{stack.http_url}/v2/models/{model}/image"
    answer = call("POST", url, png(picture), {"content-type": "image/png"} | headers)
    assert answer.status == 200, answer.body
    boxes: list[dict[str, object]] = answer.json["results"][0]["detections"]
    return boxes


def assert_same_as_http(
    engine: Engine, model: str, asked: tuple[Picture, ...], expected: list[list[dict[str, object]]]
) -> None:
    """All pictures in one submission."""
    network = engine.network(model, 20)
    answer = submit(engine, network, [row_of(network, picture) for picture in asked]).answer(60)
    assert answer.error is None
    for index, (picture, boxes) in enumerate(zip(asked, expected, strict=True)):
        seen = detections_of(network, answer, index, picture.shape[1], picture.shape[0])
        assert len(seen) == len(boxes)
        assert seen.class_id.tolist() == [box["class_id"] for box in boxes]
        assert seen.score.tolist() == pytest.approx([box["score"] for box in boxes], abs=1e-5)
        xyxy = np.array([box["xyxy"] for box in boxes], np.float32).reshape(-1, 4)
        assert np.allclose(seen.xyxy, xyxy, atol=0.01)


@pytest.mark.parametrize("model", ["street", "people", "fastestdet"])
def test_rows_are_answered_as_the_image_endpoint_answers_the_picture(
    stack: RunningStack, pictures: tuple[Picture, ...], model: str
) -> None:
    """With a batch axis, at the picture's own size, and one call a row; by the slab and by gRPC."""
    sizes = (pictures[0], pictures[1], pictures[2][:400, :600])
    expected = [detections_by_http(stack, model, picture) for picture in sizes]
    assert sum(map(len, expected)) > 0
    for way in (local, remote):
        with engine_at(way(stack)) as engine:
            assert_same_as_http(engine, model, sizes, expected)


@WAYS
def test_row_whose_deadline_is_hopeless_is_refused(fronts: RunningStack, way: Way) -> None:
    """At the door, in the queue, or where one was let through to learn from: soon, and as a refusal."""
    with engine_at(way(fronts)) as engine:
        network = engine.network("held", 20)
        rows = [np.zeros((3, 128, 128), np.float32)] * 16
        assert submit(engine, network, rows).answer(60).error is None
        with gate_closed(fronts):
            answer = submit(engine, network, rows, within_s=0.02).answer(10)
        assert isinstance(answer.error, InferRefused), answer.error
        assert submit(engine, network, rows[:1]).answer(60).error is None


def test_embedded_engine_answers_a_local_client_as_it_answers_the_image_endpoint(
    keyed: tuple[RunningStack, str], pictures: tuple[Picture, ...]
) -> None:
    """A client process of this user needs no key: the run directory is the user's alone."""
    stack, key = keyed
    expected = [detections_by_http(stack, "street", picture, **{"x-api-key": key}) for picture in pictures[:2]]
    with engine_at(local(stack)) as engine:
        assert_same_as_http(engine, "street", pictures[:2], expected)
    assert found(stack).run_dir.stat().st_mode & 0o077 == 0


def test_remote_gateway_gets_the_key_and_refuses_a_wrong_one(keyed: tuple[RunningStack, str]) -> None:
    """Without the key the model cannot even be asked for."""
    stack, key = keyed
    with engine_at(remote(stack, key)) as engine:
        network = engine.network("street", 20)
        rows = [np.zeros((3, 288, 512), np.float32)]
        assert submit(engine, network, rows).answer(60).error is None
    for wrong in ("", new_secret()):
        with engine_at(remote(stack, wrong)) as engine:
            with pytest.raises(InferFailed, match="does not let us in"):
                engine.network("street", 5)
            answer = submit(engine, network, rows).answer(20)
            assert "does not let us in" in str(answer.error)
            assert wrong not in str(answer.error) or not wrong


def test_client_of_the_embedded_engine_that_is_killed_leaves_nothing_in_flight(keyed: tuple[RunningStack, str]) -> None:
    """No place, no lease, no count by key; everything accepted has its end."""
    stack, _ = keyed
    before = figures_at_rest(stack)
    kill_one_in_the_middle(stack, "street", "3,288,512")
    wait_for(lambda: not in_flight(stack), 20, "nothing is in flight")
    more = grown(stack, before)
    assert more["inferences_accepted_total",] > 0
    with engine_at(local(stack)) as engine:
        assert (
            submit(engine, engine.network("street", 20), [np.zeros((3, 288, 512), np.float32)]).answer(30).error is None
        )


def metric(stack: RunningStack, name: str) -> float:
    text = call("GET", f"{stack.metrics_url}/penstock").body.decode()
    return float(text.split(f"\npenstock_{name} ")[1].split("\n")[0])


def brightness(engine: Engine, level: float) -> float:
    """The score for rows of that level, or -1 if the request fails."""
    network = engine.network("brightness", 20)
    rows = [np.full((3, 128, 128), level, np.float32)] * 2
    answer = submit(engine, network, rows).answer(30)
    if answer.error is not None:
        return -1.0
    return {one.label: one.score for one in classes_of(network, answer, 1)}["bright"]


def slab_of(engine: Engine) -> int:
    """The generation of its part; 0 for none."""
    generation: int = engine._life.line.slab.generation  # type: ignore[union-attr]
    return generation


def test_client_beside_two_fronts_is_no_front(fronts: RunningStack) -> None:
    """It is answered through its part of the slab; the fronts are two, and serve as ever."""
    with engine_at(local(fronts)) as engine:
        wait_for(lambda: slab_of(engine), 10, "a part of the slab is lent")
        assert brightness(engine, 0.25) == pytest.approx(0.25, abs=1e-5)
        assert brightness_of(fronts, 51) == pytest.approx(0.2, abs=1e-5)
        assert (metric(fronts, "fronts"), metric(fronts, "guests")) == (2, 1)  # plain-english: ok
    wait_for(lambda: metric(fronts, "guests") == 0, 5, "the client is gone")  # plain-english: ok


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_client_that_dies_or_hangs_in_the_middle_costs_the_gateway_nothing(
    fronts: RunningStack, number: signal.Signals
) -> None:
    """What a dead one asked for is given up, and its part comes back; others are served all the while."""
    process = client_process(found(fronts).run_dir, "dozing")
    try:
        process.send_signal(number)
        assert brightness_of(fronts, 102) == pytest.approx(0.4, abs=1e-5)
        with engine_at(local(fronts)) as engine:
            wait_for(lambda: slab_of(engine), 10, "another client has its part")
            assert brightness(engine, 0.5) == pytest.approx(0.5, abs=1e-5)
    finally:
        killed(process)
    wait_for(lambda: metric(fronts, "guests") == 0, 10, "the client is gone")  # plain-english: ok
    wait_for(lambda: metric(fronts, "slab_leased_bytes") == 0, 10, "no lease is left")


@WAYS
def test_local_clients_are_counted_in_the_metrics_as_grpc_clients(fronts: RunningStack, way: Way) -> None:
    """Of a model that the gateway batches and of one that it relays: answers, refusals, and the place in flight."""
    protocol = "guest" if way is local else "grpc"  # plain-english: ok
    with engine_at(way(fronts)) as engine:
        network, held = engine.network("brightness", 20), engine.network("held", 20)
        rows = [np.full((3, 128, 128), 0.5, np.float32)] * 2
        before = figures_at_rest(fronts)
        for _ in range(3):
            assert submit(engine, network, rows).answer(30).error is None
        with gate_closed(fronts):
            waiting = submit(engine, held, rows)
            wait_for(lambda: metric(fronts, "inflight_requests") == 1, 10, "it has a place in flight")
        assert waiting.answer(30).error is None
        with gate_closed(fronts):
            asked = [submit(engine, held, rows, within_s=2.0) for _ in range(2)]  # time enough to come to the core
            late = [one.answer(30).error for one in asked]
        assert all(isinstance(error, InferRefused) for error in late), late
        more = grown(fronts, before)
    assert more["requests_total", "OK", "brightness", protocol] == 3
    assert more["request_seconds_count", "brightness", protocol] == 3
    assert more["requests_total", "OK", "held", protocol] == 1
    ends = {name[1]: value for name, value in more.items() if name[0] == "requests_total" and name[2] == "held"}
    assert sum(ends.values()) + more.get(("cancelled_total", protocol), 0) == 3
    assert more["inferences_accepted_total",] >= 4
    answered = more["inferences_answered_total",]
    assert 4 <= answered <= (4 if way is local else 6), more  # over gRPC the engine may answer who has gone
    assert more["infer_seconds_count", "brightness"] == 3
    assert sum(value for name, value in more.items() if name[0] == "rejected_total") >= ends.get("DEADLINE_EXCEEDED", 0)


def kill_one_in_the_middle(stack: RunningStack, model: str, shape: str = "3,128,128") -> None:
    """Kills a client process while its requests are in flight."""
    accepted = metric(stack, "inferences_accepted_total")
    process = client_process(found(stack).run_dir, model, shape)
    wait_for(lambda: metric(stack, "inferences_accepted_total") > accepted, 10, "something of it was accepted")
    if model == "dozing":
        wait_for(lambda: metric(stack, "inflight_requests") >= 4, 10, "the core has what it asked for")
    killed(process)


def test_clients_that_are_killed_in_the_middle_leave_nothing_in_flight(fronts: RunningStack) -> None:
    """Whatever they had where: places, queues, leases; all that was accepted has its end, and the core's files too."""
    core = core_of(fronts)
    kill_one_in_the_middle(fronts, "dozing")  # what the core keeps open towards the engine is open from here on
    wait_for(lambda: not in_flight(fronts), 20, "nothing is in flight")
    before, files = figures_at_rest(fronts), core.num_fds()
    for _ in range(3):
        kill_one_in_the_middle(fronts, "dozing")
    wait_for(lambda: not in_flight(fronts), 20, "nothing is in flight")
    more = grown(fronts, before)
    assert more["inferences_accepted_total",] > 0
    assert more["cancelled_total", "guest"] >= 3  # plain-english: ok
    wait_for(lambda: core.num_fds() <= files + 2, 10, "the core has as many files as before")
    assert brightness_of(fronts, 51) == pytest.approx(0.2, abs=1e-5)


def test_out_of_order_messages_at_a_real_core_disturb_no_other_client(fronts: RunningStack) -> None:
    """One log line each; a local client and HTTP clients are answered all the while."""
    visit, known, ask = (
        framed(ClientHello("odd")),
        framed(SyncDone(3)),
        framed(Infer(1, InferRequest("brightness", ()), "c", 0)),
    )
    restarts, traces = figures(fronts)["gateway_restarts_total",], len(fronts.logged("Traceback"))
    with engine_at(local(fronts)) as engine:
        for said, why in [
            (known, "the first message is no hello"),
            (visit + visit, "second hello message"),
            (visit + ask + ask, "two running requests"),
            (visit + b"\x03\0\0\0abc", "Invalid value|truncated|Expected"),
            (visit + b"\xff" * 4, "has [0-9]+ bytes \\(limit"),
        ]:
            logged = len(fronts.logged(why))
            with socket.socket(socket.AF_UNIX) as peer:
                peer.settimeout(10)
                peer.connect(str(found(fronts).run_dir / SOCKET_NAME))
                peer.sendall(said)
                while peer.recv(1 << 16):
                    pass
            wait_for(lambda why=why, logged=logged: len(fronts.logged(why)) > logged, 5, "the log has it")
            assert len(fronts.logged(why)) == logged + 1
            assert brightness(engine, 0.25) == pytest.approx(0.25, abs=1e-5)
        assert metric(fronts, "guests") == 1  # plain-english: ok
    assert brightness_of(fronts, 51) == pytest.approx(0.2, abs=1e-5)
    assert len(fronts.logged("Traceback")) == traces
    assert figures(fronts)["gateway_restarts_total",] == restarts


def test_client_that_floods_a_model_does_not_keep_http_callers_from_it(fronts: RunningStack) -> None:
    """It is one client to the queue; a caller beside it is answered in a fraction of what waits."""
    with engine_at(local(fronts)) as engine:
        network = engine.network("lazy", 20)
        rows = [np.zeros((3, 128, 128), np.float32)]
        began = time.monotonic()
        asked = [submit(engine, network, rows, within_s=60) for _ in range(28)]
        wait_for(lambda: all("taken" in one.calls for one in asked), 10, "the rows are on their way")
        started = time.monotonic()
        is_written, encoded = cv2.imencode(".png", np.zeros((90, 160, 3), np.uint8))
        assert is_written
        url = f"{fronts.http_url}/v2/models/lazy/image"
        assert call("POST", url, encoded.tobytes(), {"content-type": "image/png"}).status == 200
        http_s = time.monotonic() - started
        assert all(one.answer(60).error is None for one in asked)
        assert http_s < (time.monotonic() - began) / 2


def core_of(stack: RunningStack) -> psutil.Process:
    return part_of(stack, "core")


@pytest.mark.parametrize("victim", [pytest.param(triton_of, marks=pytest.mark.long), core_of])
def test_engine_or_core_that_dies_fails_what_it_had_at_once_and_serves_again(
    fronts: RunningStack, victim: Callable[[RunningStack], psutil.Process]
) -> None:
    """Long before the rows' deadline, for local and gRPC clients; the engine joins by itself again."""
    with engine_at(local(fronts)) as here, engine_at(remote(fronts)) as elsewhere:
        engines = (here, elsewhere)
        rows = [np.zeros((3, 128, 128), np.float32)] * 4
        asked = [[submit(one, one.network("dozing", 20), rows, within_s=60) for _ in range(3)] for one in engines]
        wait_for(lambda: all("taken" in one.calls for own in asked for one in own), 10, "the rows are on their way")
        started = time.monotonic()
        victim(fronts).kill()
        failed = [sum(one.answer(30).error is not None for one in own) for own in asked]
        assert time.monotonic() - started < 15
        assert sum(failed) >= 3, failed
        assert min(failed) >= 1, failed
        for engine in engines:
            wait_for(lambda e=engine: brightness(e, 0.75) == pytest.approx(0.75, abs=1e-5), 60, "it is answered again")
            wait_for(lambda e=engine: e.is_up, 10, "it is up")


@pytest.mark.long
def test_stack_that_stops_answers_what_it_has_accepted_and_is_found_no_more(
    tmp_path: Path, triton_environment: Path
) -> None:
    """For local and gRPC clients; the stack, of one process here, ends in order.

    Before, a local client has the same limit of places in flight as an HTTP client; requests beyond it are refused.
    """
    write_model(tmp_path / "models", "brightness", BRIGHTNESS, BRIGHTNESS_CONFIG)
    write_model(tmp_path / "models", "dozing", DOZING, NOT_SLOW)
    words = ("--model-repository", str(tmp_path / "models"), "--workers", "1")
    stack = start_stack(tmp_path / "home", *words, environ={"PENSTOCK_MAX_INFLIGHT_REQUESTS": "4"})
    try:
        with engine_at(local(stack)) as here, engine_at(remote(stack)) as elsewhere:
            expect_shared_places(stack, here)
            rows = [np.zeros((3, 128, 128), np.float32)] * 4
            network = here.network("dozing", 20)
            asked = [submit(one, one.network("dozing", 20), rows, within_s=60) for one in (here, elsewhere) * 2]
            run_dir = found(stack).run_dir
            wait_for(lambda: metric(stack, "inflight_requests") == 4, 10, "the gateway has them all")
            assert stop_stack(stack) == 0, "".join(stack.log[-30:])
            assert [one.answer(20).error for one in asked] == [None] * 4
            wait_for(lambda: not here.is_up, 10, "it knows that the stack is gone")
            wait_for(lambda: not elsewhere.is_up, 10, "so does the other")
            assert not run_dir.exists()
            assert str(submit(here, network, rows, within_s=60).answer(5).error)
    finally:
        stack.process.kill()  # takes everything with it, where the test failed


def expect_shared_places(stack: RunningStack, engine: Engine) -> None:
    """Four places, all of which the local client has: its fifth and sixth request and a picture are refused."""
    rows = [np.zeros((3, 128, 128), np.float32)] * 2
    asked = [submit(engine, engine.network("dozing", 20), rows, within_s=60) for _ in range(6)]
    wait_for(lambda: metric(stack, "inflight_requests") == 4, 10, "every place is taken")
    assert brightness_of(stack, 51) == -1
    assert sum(isinstance(one.answer(30).error, InferRefused) for one in asked) == 2
    assert brightness_of(stack, 51) == pytest.approx(0.2, abs=1e-5)
    assert figures(stack)["requests_total", "UNAVAILABLE", "dozing", "guest"] == 2  # plain-english: ok
    wait_for(lambda: metric(stack, "inflight_requests") == 0, 10, "nothing is in flight")
