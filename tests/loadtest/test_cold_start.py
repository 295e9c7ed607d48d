"""Reloading a model: timed, refused, and put back whatever happens."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

import msgspec
import pytest

from penstock_load.clients.client import Answer, Endpoint, TargetError
from penstock_load.clients.control import ReloadPlan, reload_cycles
from penstock_load.results import Reload, Side, Status
from tests.support.web_server import serving


@dataclass
class Repository:
    """A server with one model. unloading: looks at the index for which an unloaded model is still on its way out."""

    state: str = "READY"
    unloading: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def post(self, path: str) -> tuple[int, object]:
        verb = path.rpartition("/")[2]
        self.asked.append(verb)
        if verb == "index":
            self.unloading -= 1
            state = "UNLOADING" if self.unloading >= 0 else self.state
            return 200, [{"name": "m", "version": "1", "state": state}, {"name": "other"}]
        if status := self.refusals.get(verb):
            return status, {"error": f"no {verb} here"}
        self.state = {"load": "READY", "unload": "UNAVAILABLE"}[verb]
        return 200, None

    @contextmanager
    def served(self) -> Iterator[Endpoint]:
        repository = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self._answer(*repository.post(self.path))

            def do_GET(self) -> None:
                assert self.path == "/v2/models/m/ready"
                self._answer(200 if repository.state == "READY" else 400, None)

            def _answer(self, status: int, content: object) -> None:
                body = msgspec.json.encode(content) if content else b""
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Says nothing."""

        with serving(Handler) as url:
            yield Endpoint(http_url=url, grpc_address="127.0.0.1:1")


class Asker:
    """A client of which every answer takes as many seconds as its number says, on the test's clock."""

    def __init__(self, repository: Repository, bad_from: int = 1000) -> None:
        self.now_s = 0.0
        self.sent: list[int] = []
        self.is_closed = False
        self._repository = repository
        self._bad_from = bad_from

    async def connect(self) -> "Asker":
        return self

    async def send(self, number: int) -> Answer:
        self.sent.append(number)
        self.now_s += number
        return Answer(Status.OK, "200") if len(self.sent) < self._bad_from else Answer(Status.FAILED, "500", "boom")

    async def aclose(self) -> None:
        self.is_closed = True

    def clock(self) -> float:
        return self.now_s

    def ticking(self) -> float:
        """A clock on which every look takes a second."""
        self.now_s += 1
        return self.now_s


async def test_reloads_time_load_and_the_first_two_answers() -> None:
    """Unloaded until it is really gone, loaded, asked twice; the times are the clock's."""
    repository = Repository(unloading=3)
    asker = Asker(repository)
    with repository.served() as endpoint:
        plan = ReloadPlan(cycles=2, round=2, side=Side.BESIDE)
        found = await reload_cycles(endpoint, "m", connect=asker.connect, plan=plan, clock=asker.clock)
    assert found == (Reload(2, Side.BESIDE, "m", 0.0, 0.0, 1000.0), Reload(2, Side.BESIDE, "m", 0.0, 2000.0, 3000.0))
    assert repository.asked == ["unload", *["index"] * 4, "load", "unload", "index", "load"]
    assert asker.is_closed


@pytest.mark.parametrize("status", [403, 404, 501])
async def test_target_that_does_not_let_models_be_unloaded_keeps_it(status: int) -> None:
    """One sentence with its own reason, and no load call either."""
    repository = Repository(refusals={"unload": status})
    asker = Asker(repository)
    with (
        repository.served() as endpoint,
        pytest.raises(TargetError, match=rf"does not unload m \({status}: no unload here\); reloads need a server"),
    ):
        await reload_cycles(endpoint, "m", connect=asker.connect, plan=ReloadPlan(cycles=1), clock=asker.clock)
    assert (repository.asked, asker.is_closed) == (["unload"], True)


@pytest.mark.parametrize(
    ("state", "bad_from", "complaint"),
    [("UNAVAILABLE", 1000, "m is not ready at http"), ("READY", 1, "no answer: failed 500 boom")],
)
async def test_model_that_cannot_be_asked_is_not_taken_away(state: str, bad_from: int, complaint: str) -> None:
    """It could not be brought back, or its answers would tell nothing."""
    repository = Repository(state)
    asker = Asker(repository, bad_from)
    with repository.served() as endpoint, pytest.raises(TargetError, match=complaint):
        await reload_cycles(endpoint, "m", connect=asker.connect, plan=ReloadPlan(cycles=1), clock=asker.clock)
    assert repository.asked == []


async def test_interrupted_reload_puts_the_model_back() -> None:
    """Ctrl-C while the model is on its way out: it is loaded before the interruption goes on."""
    repository = Repository(unloading=1_000_000)
    asker = Asker(repository)
    with repository.served() as endpoint:
        plan = ReloadPlan(cycles=1)
        run = asyncio.create_task(reload_cycles(endpoint, "m", connect=asker.connect, plan=plan, clock=asker.clock))
        while "index" not in repository.asked:
            await asyncio.sleep(0.001)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    assert (repository.state, repository.asked[-1], asker.is_closed) == ("READY", "load", True)


async def test_model_that_does_not_go_is_put_back_after_its_deadline() -> None:
    """Forty seconds of the test's clock."""
    repository = Repository(unloading=1_000_000)
    asker = Asker(repository)
    plan = ReloadPlan(cycles=1, timeout_s=40)
    with repository.served() as endpoint, pytest.raises(TargetError, match="m is not gone within 40 s"):
        await reload_cycles(endpoint, "m", connect=asker.connect, plan=plan, clock=asker.ticking)
    assert (repository.state, repository.asked[-1]) == ("READY", "load")


async def test_model_that_does_not_come_back_is_named_with_the_call_that_loads_it() -> None:
    """The last resort is a person's."""
    repository = Repository(refusals={"load": 500})
    asker = Asker(repository)
    with repository.served() as endpoint:
        called = rf"m is left unloaded \(.*no load here.*\); load it with POST {endpoint.http_url}/v2/repository/"
        with pytest.raises(TargetError, match=called):
            await reload_cycles(endpoint, "m", connect=asker.connect, plan=ReloadPlan(cycles=1), clock=asker.clock)
    assert repository.asked == ["unload", "index", "load", "load"]


async def test_bad_answer_after_a_load_ends_the_reloads_with_the_model_loaded() -> None:
    """A time to a failure is no time to an answer."""
    repository = Repository()
    asker = Asker(repository, bad_from=2)
    with repository.served() as endpoint, pytest.raises(TargetError, match="no answer: failed 500 boom"):
        await reload_cycles(endpoint, "m", connect=asker.connect, plan=ReloadPlan(cycles=3), clock=asker.clock)
    assert (repository.state, repository.asked) == ("READY", ["unload", "index", "load"])
