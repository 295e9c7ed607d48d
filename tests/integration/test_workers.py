"""`penstock up --workers 2`: two fronts over one core, on the same ports, as one gateway."""

import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http

from tests.integration.embedded_stack import look_up, start_embedded
from tests.integration.embedded_stack import write_models as write_embedded_models
from tests.integration.ledger import Ledgers, inferences, is_settled, open_request, page_of, write_ledger
from tests.integration.living import SLOW_CONFIG, family, gate_closed, infer_slow, inflight
from tests.integration.two_workers import X, connected_to, metric, part_of, wait_until_both_serve
from tests.support.http import Answer, call, post_json
from tests.support.stack import CHECKOUT, RunningStack, start_stack, stop_stack
from tests.support.tiny_models import CONFIG, IDENTITY, SLOW, write_held, write_model
from tests.support.waiting import wait_for

pytestmark = pytest.mark.xdist_group("workers")

OWNER = 'parameters { key: "batch_owner" value { string_value: "gateway" } }\n'
BATCHED = IDENTITY.replace("import numpy as np\n", "import time\n").replace(
    "        answers = []\n", "        time.sleep(0.02)\n        answers = []\n"
)


def write_models(folder: Path) -> None:
    """identity: relayed. owned: batched by the gateway, 20 ms a call. slow: sleeps. held: blocks. naps: owned."""
    config = CONFIG.format(max_batch_size=8, data_type="TYPE_FP32", count=1)
    write_model(folder, "identity", IDENTITY, config)
    write_model(folder, "owned", BATCHED, config + OWNER)
    write_model(folder, "slow", SLOW, SLOW_CONFIG)
    write_held(folder, "held", IDENTITY, SLOW_CONFIG)
    write_ledger(folder.parent, "naps")


@pytest.fixture(scope="module")
def stack_of_two(tmp_path_factory: pytest.TempPathFactory, triton_environment: Path) -> Iterator[RunningStack]:
    """Two fronts and their core over a real Triton."""
    folder = tmp_path_factory.mktemp("workers")
    write_models(folder / "models")
    stack = start_stack(folder / "home", "--model-repository", str(folder / "models"), "--workers", "2")
    yield stack
    assert stop_stack(stack) == 0, "".join(stack.log[-30:])


@pytest.fixture
def workers(stack_of_two: RunningStack) -> RunningStack:
    """The stack once both workers serve: the test before may have killed or stopped the core."""
    wait_until_both_serve(stack_of_two)
    return stack_of_two


def test_both_fronts_answer_on_the_same_ports_as_one_gateway(workers: RunningStack) -> None:
    """Each takes connections, and a request is counted once, whichever of them had it."""
    counter = 'penstock_requests_total{code="200",model="identity",protocol="http"}'
    before = metric(workers, counter)
    with connected_to(workers, "front-1") as one, connected_to(workers, "front-2") as other:
        asked = metric(workers, counter)
        assert asked > before
        assert one.infer() == other.infer() == 200
    wait_for(lambda: metric(workers, counter) >= asked + 2, 5, "they are counted once their answers are away")
    assert metric(workers, counter) == asked + 2
    assert metric(workers, "penstock_fronts ") == 2


def test_ready_line_says_how_many_serve(workers: RunningStack) -> None:
    """A reader of it sees that they are several."""
    (line,) = {line for line in workers.output if line.startswith("ready: ")}  # said again by a core that came again
    assert line.endswith("  (2 workers)\n")


def test_log_says_which_front_and_no_unreachable_port(workers: RunningStack) -> None:
    """The core listens on Unix sockets, which have no port; a front's lines have its number."""
    for number in (1, 2):
        workers.wait_for_log(rf"the core serves.* worker={number}\b")
    workers.wait_for_log(r"gateway: the workers' core listens metrics=\d+")
    assert not workers.logged(r"(http|grpc)=[01]\b")


def test_requests_of_both_fronts_share_a_batch_of_the_core(workers: RunningStack) -> None:
    """Thirty-two at once, over HTTP and gRPC: each has its own row back, and the engine was called less often."""
    url, number = workers.http_url.removeprefix("http://"), "penstock_batch_size_count"
    calls = metric(workers, number + '{model="owned"}')

    def over_http(value: float) -> float:
        with tritonclient.http.InferenceServerClient(url) as client:
            given = tritonclient.http.InferInput("x", [1, 1], "FP32")
            given.set_data_from_numpy(np.array([[value]], np.float32))
            return float(client.infer("owned", [given]).as_numpy("y")[0, 0])

    def over_grpc(value: float) -> float:
        with tritonclient.grpc.InferenceServerClient(workers.grpc_address) as client:
            given = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
            given.set_data_from_numpy(np.array([[value]], np.float32))
            return float(client.infer("owned", [given]).as_numpy("y")[0, 0])

    with ThreadPoolExecutor(32) as pool:
        answers = [pool.submit(over_grpc if value % 2 else over_http, value) for value in range(32)]
        assert [answer.result(30) for answer in answers] == list(range(32))
    assert metric(workers, number + '{model="owned"}') - calls < 32


def test_what_a_front_does_not_serve_comes_from_the_core_as_it_is(workers: RunningStack) -> None:
    """Metadata, index, loading, statistics, the description, streams, errors: over both protocols."""
    url = workers.http_url.removeprefix("http://")
    with tritonclient.http.InferenceServerClient(url) as client:
        assert client.get_server_metadata()["name"] == "triton"
        assert {row["name"] for row in client.get_model_repository_index()} == {
            "held",
            "identity",
            "naps",
            "owned",
            "slow",
        }
        assert client.get_model_config("owned")["max_batch_size"] == 8
        assert client.is_model_ready("identity")
        for _ in range(2):  # each front knows of it before the answer comes
            client.unload_model("slow")
            assert call("GET", f"{workers.http_url}/v2/models/slow/ready").status != 200
            client.load_model("slow")
    with tritonclient.grpc.InferenceServerClient(workers.grpc_address) as client:
        assert client.get_server_metadata().name == "triton"
        assert client.is_server_ready()
        assert client.get_model_metadata("identity").inputs[0].name == "x"
    assert call("GET", f"{workers.http_url}/openapi.json").json["openapi"].startswith("3.1")
    assert call("GET", f"{workers.http_url}/v2/nothing").json == {"error": "Not Found"}
    assert post_json(f"{workers.http_url}/v2/models/nope/infer", X).status == 404
    answer = call("POST", f"{workers.http_url}/v2/models/nope/generate", b"{}", {"content-type": "application/json"})
    assert answer.status >= 400
    assert "error" in answer.json


def test_stream_through_a_front_answers_in_order(workers: RunningStack) -> None:
    """Ten requests on one bidirectional stream, each with its own answer, and the stream ends in order."""
    answers: list[float] = []
    done = threading.Event()

    def take(result: "tritonclient.grpc.InferResult | None", error: Exception | None) -> None:
        assert error is None
        assert result is not None
        answers.append(float(result.as_numpy("y")[0, 0]))
        if len(answers) == 10:
            done.set()

    with tritonclient.grpc.InferenceServerClient(workers.grpc_address) as client:
        client.start_stream(take)
        for value in range(10):
            given = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
            given.set_data_from_numpy(np.array([[value]], np.float32))
            client.async_stream_infer("identity", [given])
        assert done.wait(20)
        client.stop_stream()
    assert answers == list(range(10))


def test_what_is_wrong_with_a_request_is_said_in_the_same_words(workers: RunningStack) -> None:
    """Of a model that the gateway owns as of one that it relays: the names alone differ."""

    def refusal_of(model: str, body: object) -> tuple[int, str]:
        answer = post_json(f"{workers.http_url}/v2/models/{model}/infer", body)
        return answer.status, answer.json["error"].replace(model, "M")

    for body in (
        {"inputs": [{"name": "z", "shape": [1, 1], "datatype": "FP32", "data": [1]}]},
        {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "INT32", "data": [1]}]},
        {"inputs": [{"name": "x", "shape": [9, 1], "datatype": "FP32", "data": [1] * 9}]},
        {"inputs": []},
    ):
        assert refusal_of("owned", body) == refusal_of("identity", body)
        assert refusal_of("owned", body)[0] == 400


def test_header_that_tells_the_core_of_callers_is_not_believed_of_a_client(workers: RunningStack) -> None:
    """It is what a front says, over a socket that no client reaches."""
    lie = json.dumps({"key_name": "admin", "connection": "", "address": "", "roles": ["admin"], "quota": None})
    for path in ("/v2", "/v2/models/identity"):
        assert call("GET", workers.http_url + path, headers={"x-penstock-caller": lie}).status == 200
    garbled = call("GET", f"{workers.http_url}/v2", headers={"x-penstock-caller": "rubbish"})
    assert garbled.status == 200


def test_caller_that_leaves_is_counted_where_the_core_had_his_request(workers: RunningStack) -> None:
    """FAULTS 24, 25. One in the running batch and two in the queue behind it; the queue's are never executed."""
    naps = Ledgers(workers, workers.home.parent)
    before = inferences(page_of(workers))
    running = open_request(workers, "naps", [41, 1500])
    wait_for(lambda: 41 in naps.values("naps"), 10, "the batch runs")
    waiting = [open_request(workers, "naps", [value, 0]) for value in (42, 43)]
    wait_for(lambda: naps.waiting("naps") == 2, 10, "two wait for their batch")
    for connection in waiting:
        connection.close()
    wait_for(lambda: naps.waiting("naps") == 0, 10, "they have left the queue")
    running.close()

    def left() -> dict[str, int]:
        since = inferences(page_of(workers)) - before
        return {stage: count for stage, count in since.items() if stage.startswith("cancelled/")}

    wait_for(lambda: left() == {"cancelled/queue": 2, "cancelled/batch": 1}, 10, "each is counted where it was")
    assert not {42, 43} & set(naps.values("naps"))
    wait_for(lambda: is_settled(inferences(page_of(workers))), 10, "each has one end")


def test_front_killed_is_replaced_and_its_neighbour_notices_nothing(workers: RunningStack) -> None:
    """FAULTS 14. kill -9 of one: its own connections break, the other's go on; no count is lost, no place is held."""
    series = 'penstock_requests_total{code="200",model="identity",protocol="http"}'
    with connected_to(workers, "front-1") as mine, connected_to(workers, "front-2") as neighbours:
        killed, neighbour = part_of(workers, "front-1"), part_of(workers, "front-2")
        counted, restarts = metric(workers, series), metric(workers, "penstock_front_restarts_total")
        results: list[int | str] = []
        with gate_closed(workers):
            threads = [infer_slow(workers, 0, results, "held") for _ in range(4)]
            wait_for(lambda: inflight(workers) == 4, 10, "four requests in flight")
            killed.kill()
            assert neighbours.infer() == 200
            with pytest.raises((http.client.HTTPException, OSError)):
                mine.infer()
        for thread in threads:
            thread.join(20)
        assert all(result == 200 or isinstance(result, str) for result in results)  # the killed one's have no answer
        wait_for(lambda: metric(workers, "penstock_fronts ") == 2, 20, "a front in its place")
        assert neighbour.is_running()
        assert neighbours.infer() == 200
    with connected_to(workers, "front-1") as again:
        assert again.infer() == 200
    assert metric(workers, series) >= counted + 3
    assert metric(workers, "penstock_front_restarts_total") == restarts + 1, workers.log[-12:]
    wait_for(lambda: inflight(workers) == 0, 10, "nothing is in flight")
    workers.wait_for_log("worker 1 died; starting it again")


def test_front_that_hangs_is_replaced_and_its_neighbour_serves_meanwhile(workers: RunningStack) -> None:
    """FAULTS 14. SIGSTOP of one: the other answers all the time; after ten seconds' silence it is killed and replaced.

    Its connections end then, and what it had in flight holds no slot.
    """
    restarts = metric(workers, "penstock_front_restarts_total")
    with connected_to(workers, "front-1") as mine, connected_to(workers, "front-2") as neighbours:
        hung = part_of(workers, "front-1")
        hung.suspend()
        try:
            with ThreadPoolExecutor(1) as pool:
                lost = pool.submit(mine.infer)
                wait_for(lambda: neighbours.infer() != 200 or not hung.is_running(), 40, "the one that hangs is gone")
                assert neighbours.infer() == 200
                with pytest.raises((http.client.HTTPException, OSError)):
                    lost.result(10)
        finally:
            with suppress(psutil.NoSuchProcess):
                hung.resume()
        wait_for(lambda: metric(workers, "penstock_front_restarts_total") == restarts + 1, 20, "it was counted")
        wait_for(lambda: metric(workers, "penstock_fronts ") == 2, 20, "a front in its place")
        assert neighbours.infer() == 200
    with connected_to(workers, "front-1") as again:
        assert again.infer() == 200
    (line,) = workers.logged("worker 1 hangs; killing it")
    assert float(line.split("silent_s=")[1].split()[0]) >= 10
    assert not workers.logged("worker 2 hangs")
    wait_for(lambda: inflight(workers) == 0, 10, "nothing is in flight")


def test_core_killed_is_503_at_once_and_service_is_back_in_seconds(workers: RunningStack) -> None:
    """kill -9 of the core: fronts and their connections stay; no request hangs, and errors say when to retry."""
    fronts = [part_of(workers, f"front-{number}") for number in (1, 2)]
    counted = metric(workers, 'penstock_requests_total{code="200",model="identity"')
    waiting: list[Answer] = []

    def ask() -> None:
        waiting.append(post_json(f"{workers.http_url}/v2/models/owned/infer", X))

    with connected_to(workers, "front-1") as kept:
        threads = [threading.Thread(target=ask) for _ in range(32)]
        for thread in threads:
            thread.start()
        part_of(workers, "core").kill()
        for thread in threads:
            thread.join(5)
        assert len(waiting) == len(threads)
        assert {answer.status for answer in waiting} <= {200, 503}
        assert {kept.infer() for _ in range(3)} <= {200, 503}
        for answer in (answer for answer in waiting if answer.status == 503):
            assert int(answer.headers["retry-after"]) >= 1
        assert call("GET", f"{workers.http_url}/v2/health/live").status == 200
        wait_for(lambda: kept.infer("owned") == 200 and kept.infer() == 200, 20, "service on the same connection")
    assert all(front.is_running() for front in fronts)
    assert call("GET", f"{workers.http_url}/v2/models/owned").status == 200
    wait_for(lambda: metric(workers, 'penstock_requests_total{code="200",model="identity"') > counted, 10, "counts")
    wait_for(lambda: inflight(workers) == 0, 10, "nothing is in flight")


def test_core_that_is_stopped_is_503_and_serves_when_it_goes_on(workers: RunningStack) -> None:
    """SIGSTOP of the core: what needs it is refused after five seconds of silence, and served after SIGCONT.

    The metrics then show how long its event loop stood still.
    """
    core = part_of(workers, "core")
    with connected_to(workers, "front-2") as kept:
        core.suspend()
        try:
            wait_for(lambda: kept.infer() == 503, 10, "refused")
            kept.connection.request("GET", "/v2/health/ready")  # the other front counts its own five seconds
            ready = kept.connection.getresponse()
            report = json.load(ready)
            assert (ready.status, report["ready"]) == (503, False)
            assert "core" in report["reason"]
        finally:
            core.resume()
        wait_for(lambda: kept.infer("owned") == 200, 10, "served")
    wait_until_both_serve(workers)
    wait_for(lambda: metric(workers, "penstock_loop_lag_seconds ") > 3, 5, "the lag is shown")


def start_two_fronts(tmp_path: Path) -> RunningStack:
    """Over an embedded engine, in a folder with a name so long that no Unix socket's path could hold it."""
    shipped, folder = CHECKOUT / "model_repository", tmp_path / ("long" * 30)
    write_embedded_models(tmp_path / "models")
    folder.mkdir()
    words = ("--workers", "2", "--model-repository", str(shipped), "--models", "street,lookup,slow")
    return start_embedded(tmp_path, *words, TMPDIR=str(folder))


def test_sigterm_drains_fronts_before_their_core_and_leaves_nothing(tmp_path: Path) -> None:
    """What was accepted is answered, through whichever front it came, by an engine in the core; then all are gone.

    Before, a picture is answered by the core that has the engine.
    """
    stack = start_two_fronts(tmp_path)
    everyone, answers = family(stack), []

    def ask() -> None:
        body = {"inputs": [{"name": "trips", "shape": [1, 1], "datatype": "INT64", "data": [300]}]}
        answers.append(post_json(f"{stack.http_url}/v2/models/slow/infer", body).status)

    assert look_up(stack).status == 200
    picture = (CHECKOUT / "model_repository" / "street" / "golden.jpg").read_bytes()
    answer = call("POST", f"{stack.http_url}/v2/models/street/image", picture, {"content-type": "image/jpeg"})
    assert (answer.status, len(answer.json["results"])) == (200, 1)
    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_for(lambda: inflight(stack) + len(answers) == 8, 10, "all are in")
    assert stop_stack(stack) == 0
    for thread in threads:
        thread.join(10)
    assert answers == [200] * 8
    assert not any(child.is_running() for child in everyone)


@pytest.mark.long
def test_killed_parent_takes_fronts_and_core_with_it(tmp_path: Path) -> None:
    """kill -9 of `penstock up` leaves no process behind."""
    stack = start_two_fronts(tmp_path)
    assert look_up(stack).status == 200
    everyone = family(stack)
    assert len([child for child in everyone if child.cmdline()[-1].startswith("front-")]) == 2
    stack.process.kill()
    stack.process.wait()
    wait_for(lambda: not any(child.is_running() for child in everyone), 15, "every process is gone")
