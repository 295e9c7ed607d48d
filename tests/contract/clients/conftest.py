"""One stack with a real Triton behind it; a client is given the gateway's address, then the bare Triton's."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.contract.clients.asking import KINDS, Asker, Reply, asking, reply
from tests.contract.clients.differences import Answer, comparable
from tests.contract.clients.models import write_models
from tests.contract.clients.tap import tapped
from tests.support.stack import ENGINE_PORTS, RunningStack, start_stack, stop_stack


@dataclass(frozen=True)
class Sides:
    """Where a client of one kind finds the gateway and the bare Triton behind it, as host:port."""

    kind: str
    gateway: str
    bare: str

    def ask(self, ask: Callable[[Asker], Reply]) -> tuple[Answer, Answer]:
        """The same asked of both, each by a client of its own: the gateway's answer, then Triton's."""
        return self._ask(self.gateway, ask), self._ask(self.bare, ask)

    def _ask(self, address: str, ask: Callable[[Asker], Reply]) -> Answer:
        with tapped(address) as tap:
            with asking(self.kind, tap.address) as asker:
                answer = reply(ask, asker)
            return comparable(answer, tap.http_heads() if asker.is_http else tap.grpc_heads())


@pytest.fixture(scope="session")
def client_stack(triton_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """The stack, ready."""
    folder = tmp_path_factory.mktemp("clients")
    write_models(folder / "models")
    running = start_stack(
        folder / "home",
        *("--model-repository", str(folder / "models"), "--allow-client-shm", "--allow-model-code", *ENGINE_PORTS),
    )
    yield running
    assert stop_stack(running) == 0, "".join(running.log[-30:])


@pytest.fixture(params=KINDS)
def sides(request: pytest.FixtureRequest, client_stack: RunningStack) -> Sides:
    """Each of tritonclient's clients in turn."""
    return sides_of(request.param, client_stack)


def sides_of(kind: str, stack: RunningStack) -> Sides:
    """The addresses that a client of this kind wants."""
    if kind.startswith("grpc"):
        return Sides(kind, stack.grpc_address, stack.engine_grpc_address)
    return Sides(kind, stack.http_url.removeprefix("http://"), stack.engine_http_url.removeprefix("http://"))
