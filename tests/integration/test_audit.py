"""The audit log of a real stack: every admin action and every refusal is one line, by one process and by several."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2

from penstock.gateway.auth.api_keys import new_secret
from tests.integration.embedded_stack import start_embedded, write_models
from tests.support.http import Answer, call
from tests.support.stack import RunningStack, stop_stack

pytestmark = pytest.mark.xdist_group("audit")
SEGMENT = {"key": "no-such-segment", "byte_size": 64}


@dataclass
class Audited:
    """A stack with keys and an audit log, and the log's lines."""

    stack: RunningStack
    file: Path
    secrets: dict[str, str]
    read_lines: int = field(default=0)

    def http(self, target: str, body: object, key: str = "ops", **headers: str) -> Answer:
        headers = headers or ({"x-api-key": self.secrets[key]} if key else {})
        return call("POST", self.stack.http_url + target, json.dumps(body).encode(), headers)

    def grpc(self, method: str, request: Any, key: str = "ops") -> str:
        """The name of the call's status."""
        metadata = (("x-api-key", self.secrets[key]),) if key else ()
        client = triton.InferenceServerClient(self.stack.grpc_address)
        try:
            getattr(client._client_stub, method)(request, metadata=metadata, timeout=30)
        except grpc.RpcError as error:
            return str(error.code().name)
        finally:
            client.close()
        return "OK"

    def new_line(self) -> tuple[str | None, str, str, str]:
        """Waits for one new line; returns its client, action, target and outcome."""
        until = time.monotonic() + 20
        while len(lines := self.file.read_text().splitlines()) == self.read_lines and time.monotonic() < until:
            time.sleep(0.01)
        new, self.read_lines = lines[self.read_lines :], len(lines)
        (line,) = map(json.loads, new)
        assert line["address"] == "127.0.0.1"
        assert list(line) == ["time", "client", "address", "action", "target", "outcome"]
        return line["client"], line["action"], line["target"], line["outcome"]


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Audited]:
    """Two fronts (one process: test_tls)."""
    folder = tmp_path_factory.mktemp("audit")
    write_models(folder / "models")
    secrets = {name: new_secret() for name in ("ops", "viewer")}
    file = folder / "audit.jsonl"
    stack = start_embedded(
        folder,
        *("--audit-log", str(file), "--allow-client-shm", "--workers", "2", "--log-level", "debug"),
        *("--anonymous", "read", "--metrics-key-required"),
        PENSTOCK_API_KEYS=f"ops:infer+read+admin:{secrets['ops']},viewer:read:{secrets['viewer']}",
    )
    yield Audited(stack, file, secrets)
    assert stop_stack(stack) == 0, "".join(stack.log[-30:])
    for secret in secrets.values():
        assert secret not in file.read_text()


HTTP_ACTIONS = [
    ("/v2/repository/models/lookup/load", {}, 200, ("load", "lookup", "ok")),
    ("/v2/repository/models/lookup/unload", {}, 200, ("unload", "lookup", "ok")),
    ("/v2/repository/models/lookup/load", {}, 200, ("load", "lookup", "ok")),
    ("/v2/repository/models/absent/load", {}, 400, ("load", "absent", "engine_failed")),
    ("/v2/repository/models/a%20b/load", {}, 400, ("load", "a%20b", "invalid")),
    ("/v2/systemsharedmemory/region/r/register", SEGMENT, 400, ("share", "r", "invalid")),
    ("/v2/systemsharedmemory/region/r/unregister", {}, 200, ("unshare", "r", "ok")),
    ("/v2/systemsharedmemory/unregister", {}, 200, ("unshare", "", "ok")),
    ("/v2/trace/setting", {"trace_rate": "5"}, 501, ("configure", "", "engine_failed")),
    ("/v2/models/lookup/trace/setting", {"trace_rate": "5"}, 501, ("configure", "lookup", "engine_failed")),
    ("/v2/logging", {"log_info": True}, 501, ("configure", "", "engine_failed")),
]


def test_every_admin_action_over_http_is_one_line(audited: Audited) -> None:
    """The line has client, model or region, and outcome, whether the action succeeds or fails."""
    for target, body, status, line in HTTP_ACTIONS:
        answer = audited.http(target, body)
        assert (answer.status, audited.new_line()) == (status, ("ops", *line)), (target, answer.body)


GRPC_ACTIONS = [
    ("RepositoryModelLoad", service_pb2.RepositoryModelLoadRequest(model_name="lookup"), "load", "lookup"),
    ("RepositoryModelUnload", service_pb2.RepositoryModelUnloadRequest(model_name="lookup"), "unload", "lookup"),
    ("RepositoryModelLoad", service_pb2.RepositoryModelLoadRequest(model_name="lookup"), "load", "lookup"),
    ("RepositoryModelLoad", service_pb2.RepositoryModelLoadRequest(model_name="absent"), "load", "absent"),
    ("RepositoryModelLoad", service_pb2.RepositoryModelLoadRequest(model_name="a b"), "load", "a b"),
    ("SystemSharedMemoryRegister", service_pb2.SystemSharedMemoryRegisterRequest(name="r"), "share", "r"),
    ("SystemSharedMemoryUnregister", service_pb2.SystemSharedMemoryUnregisterRequest(name="r"), "unshare", "r"),
    ("SystemSharedMemoryUnregister", service_pb2.SystemSharedMemoryUnregisterRequest(), "unshare", ""),
    ("CudaSharedMemoryRegister", service_pb2.CudaSharedMemoryRegisterRequest(name="c"), "share", "c"),
    ("CudaSharedMemoryUnregister", service_pb2.CudaSharedMemoryUnregisterRequest(name="c"), "unshare", "c"),
    (
        "TraceSetting",
        service_pb2.TraceSettingRequest(
            settings={"trace_rate": service_pb2.TraceSettingRequest.SettingValue(value=["5"])}, model_name="lookup"
        ),
        *("configure", "lookup"),
    ),
    (
        "LogSettings",
        service_pb2.LogSettingsRequest(
            settings={"log_info": service_pb2.LogSettingsRequest.SettingValue(bool_param=True)}
        ),
        *("configure", ""),
    ),
]


def test_every_admin_action_over_grpc_is_one_line(audited: Audited) -> None:
    """As over HTTP; the outcome is `ok` only if the call ended with OK."""
    for method, request, action, target in GRPC_ACTIONS:
        code = audited.grpc(method, request)
        client, *line, outcome = audited.new_line()
        assert (client, line, outcome == "ok") == ("ops", [action, target], code == "OK"), (method, code, outcome)


def test_refused_authentication_is_one_line_and_reads_are_none(audited: Audited) -> None:
    """A missing key, a wrong key and a missing role write a line each; a read writes none."""
    load = "/v2/repository/models/lookup/load"
    assert audited.http(load, {}, key="").status == 401
    assert audited.new_line() == (None, "access", f"POST {load}", "unauthenticated")
    assert audited.http(load + "?x-api-key=secret", {}, authorization="Bearer wrong\tsecret").status == 401
    assert audited.new_line() == (None, "access", f"POST {load}", "unauthenticated")
    assert audited.http(load, {}, key="viewer").status == 403
    assert audited.new_line() == ("viewer", "access", f"POST {load}", "permission_denied")
    method, request = GRPC_ACTIONS[0][:2]
    assert audited.grpc(method, request, key="") == "UNAUTHENTICATED"
    assert audited.new_line() == (None, "access", f"/inference.GRPCInferenceService/{method}", "unauthenticated")
    assert audited.grpc(method, request, key="viewer") == "PERMISSION_DENIED"
    assert audited.new_line() == ("viewer", "access", f"/inference.GRPCInferenceService/{method}", "permission_denied")
    assert audited.http("/v2/repository/index", {}, key="viewer").status == 200
    assert audited.grpc("RepositoryIndex", service_pb2.RepositoryIndexRequest(), key="viewer") == "OK"
    assert audited.http(load, {}).status == 200
    assert audited.new_line() == ("ops", "load", "lookup", "ok")


def test_change_of_settings_without_the_role_is_one_line(audited: Audited) -> None:
    """gRPC has one method to read and change trace settings: the role read may call it, but not change settings."""
    method, request, *_ = GRPC_ACTIONS[-2]
    assert audited.grpc(method, request, key="viewer") == "PERMISSION_DENIED"
    assert audited.new_line() == ("viewer", "configure", "lookup", "permission_denied")


def test_metrics_that_require_a_key_refuse_who_may_read_without_one(audited: Audited) -> None:
    """They get 401 and an audit line; a key with the role read, sent like Prometheus does, gets the metrics."""
    bearer = {"authorization": f"Bearer {audited.secrets['viewer']}"}
    assert call("GET", audited.stack.metrics_url).status == 401
    assert audited.new_line() == (None, "access", "GET /metrics", "unauthenticated")
    assert b"penstock_build_info" in call("GET", audited.stack.metrics_url, headers=bearer).body
    assert call("GET", f"{audited.stack.http_url}/v2/models/lookup").status == 200


def test_rotated_log_goes_on_in_a_new_file(audited: Audited) -> None:
    """After a rename while the stack runs, the next line creates a file with mode 0600."""
    audited.file.rename(audited.file.with_suffix(".1"))
    audited.read_lines = 0
    assert audited.http("/v2/repository/models/lookup/load", {}, key="").status == 401
    assert audited.new_line()[1] == "access"
    assert audited.file.stat().st_mode & 0o777 == 0o600
