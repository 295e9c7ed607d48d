"""KServe's own Python client, unmodified, asked of the gateway and of the bare Triton."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.stack import CHECKOUT, RunningStack

pytestmark = [pytest.mark.xdist_group("client-stack"), pytest.mark.timeout(240)]
PYTHON = CHECKOUT / ".venv-clients" / "bin" / "python"
PROGRAM = Path(__file__).with_name("kserve_calls.py")
# KServe's client needs a body in an answer about health; Triton's has none, and the client fails.
WHERE_TRITON_FAILS = {"rest live": True, "rest ready": True, "grpc ready": True}


@pytest.fixture(scope="module")
def program() -> Path:
    """The script, and the environment that it runs in."""
    if not PYTHON.is_file():
        pytest.skip("no KServe client here: `make .venv-clients/.ready` fetches it")
    return PROGRAM


def test_kserve_client_gets_from_the_gateway_what_triton_sends(client_stack: RunningStack, program: Path) -> None:
    """Its REST and gRPC clients: results, errors and texts; and health, which they cannot read of a bare Triton."""
    gateway = [client_stack.http_url, client_stack.grpc_address]
    through, bare = _reported(program, *gateway, client_stack.engine_http_url, client_stack.engine_grpc_address)
    assert through == bare | WHERE_TRITON_FAILS
    assert isinstance(bare["rest live"], list), "Triton's health can be read now: the difference is none any more"


def _reported(program: Path, *servers: str) -> list[dict[str, Any]]:
    done = subprocess.run([PYTHON, program, *servers], capture_output=True, check=True, timeout=120)
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers
