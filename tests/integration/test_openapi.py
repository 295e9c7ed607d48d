"""schemathesis asks the real stack everything that its description holds, and much that it forbids."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.http import call, post_json
from tests.support.stack import CHECKOUT, RunningStack, start_stack, stop_stack
from tests.support.tiny_models import write_tiny_repository

HOOKS = "tests.integration.api_hooks"
CHECKS = (
    "no_surprising_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
    "negative_data_rejection",
    "missing_required_header",
)


@pytest.fixture(scope="module")
def own_stack(tmp_path_factory: pytest.TempPathFactory, triton_environment: Path) -> Iterator[RunningStack]:
    """A stack of its own: its models come and go, its settings change."""
    home = tmp_path_factory.mktemp("home")
    write_tiny_repository(home / "models")
    running = start_stack(home, "--allow-client-shm")
    yield running
    stop_stack(running)


def ask_everything(
    stack: RunningStack, folder: Path, *, examples: int, seed: int, without: str = "", slow_calls_one_in: int = 1
) -> subprocess.CompletedProcess[str]:
    """schemathesis as a program; what it found is in its output.

    without: paths that it leaves out, a pattern. slow_calls_one_in: of calls that load a model or start a process.
    """
    arguments = ["run", f"{stack.http_url}/openapi.json", "--phases", "examples,coverage,fuzzing"]
    arguments += ["--checks", ",".join(CHECKS), "--max-examples", str(examples), "--seed", str(seed), "--no-color"]
    arguments += ["--continue-on-failure", "--warnings", "off", "--request-timeout", "20"]
    arguments += ["--exclude-path-regex", without] if without else []
    return subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", *arguments],
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": str(CHECKOUT), "SCHEMATHESIS_HOOKS": HOOKS, "PYTHONWARNINGS": "ignore"}
        | {"SLOW_CALLS_ONE_IN": str(slow_calls_one_in)},
        capture_output=True,
        text=True,
        timeout=1500,
    )


def assert_unharmed(stack: RunningStack) -> None:
    """The engine was not restarted, nothing is in flight, no bug of ours was logged, and the models serve again."""
    assert call("GET", f"{stack.http_url}/v2/health/ready").status == 200
    post_json(f"{stack.http_url}/v2/repository/models/identity_fp32/load", {})
    body = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
    assert post_json(f"{stack.http_url}/v2/models/identity_fp32/infer", body).status == 200
    text = call("GET", f"{stack.metrics_url}/penstock").body.decode()
    assert "\npenstock_inflight_requests 0.0" in text
    assert "penstock_engine_restarts_total 0.0" in text
    assert "penstock_gateway_restarts_total 0.0" in text
    assert not stack.logged("request failed|failed unexpectedly|Traceback")


def test_description_holds_what_the_extensions_promise(own_stack: RunningStack) -> None:
    """Shared memory, trace and log settings are on, and described; every operation has its role's security."""
    api = json.loads(call("GET", f"{own_stack.http_url}/openapi.json").body)
    paths = set(api["paths"])
    assert {"/v2/systemsharedmemory/region/{region}/register", "/v2/logging", "/v2/trace/setting"} <= paths
    assert {"/v2/models/{model}/generate_stream", "/v2/models/{model}/versions/{version}/infer"} <= paths
    assert all("security" in operation for path in api["paths"].values() for operation in path.values())


def test_schemathesis_finds_no_server_error_and_no_violation(own_stack: RunningStack, tmp_path: Path) -> None:
    """Whatever the description allows or forbids: statuses, types, headers and bodies are those that it tells of.

    Without the paths that name a version, which are the same operations once more, and with a sixth of the calls that
    load a model or inspect one; long/test_api has them all.
    """
    found = ask_everything(own_stack, tmp_path, examples=1, seed=7, without="/versions/", slow_calls_one_in=6)
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]
    assert int(re.search(r"(\d+) generated", found.stdout)[1]) > 300  # type: ignore[index]
    assert_unharmed(own_stack)
