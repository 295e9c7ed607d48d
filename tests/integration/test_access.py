"""API keys on the real stack: roles and quotas over both protocols, and no key is disclosed."""

import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from penstock.gateway.auth.api_keys import new_secret
from tests.auth.signers import shared_token
from tests.integration.guarded import EVERY_KEY, TOKENS, Guarded
from tests.support.http import Answer, call
from tests.support.stack import CHECKOUT

pytestmark = pytest.mark.xdist_group("access")


def test_each_key_may_do_what_its_roles_say(guarded: Guarded) -> None:
    """Over HTTP: 200, 401 for strangers, 403 for the wrong role; health and metrics need none."""
    url = guarded.stack.http_url
    asked = {
        name: (
            guarded.infer(name).status,
            call("GET", f"{url}/v2/models/identity", headers=guarded.headers(name)).status,
            call("POST", f"{url}/v2/repository/index", b"", guarded.headers(name)).status,
            call("POST", f"{url}/v2/repository/models/identity/load", b"", guarded.headers(name)).status,
        )
        for name in ("", "camera", "viewer", "ops")
    }
    assert asked == {
        "": (401, 401, 401, 401),
        "camera": (200, 403, 403, 403),
        "viewer": (403, 200, 200, 403),
        "ops": (200, 200, 200, 200),
    }
    assert call("GET", f"{url}/v2/health/ready").status == 200
    assert call("GET", guarded.stack.metrics_url).status == 200


def test_tokens_are_believed_beside_keys(guarded: Guarded) -> None:
    """By the shared secret of the file; an expired token is refused with the reason."""
    good, old = shared_token(), shared_token(exp=time.time() - 3600)
    guarded.secrets |= {"good token": good, "old token": old}
    assert guarded.infer("good token").json["outputs"][0]["data"] == [7]
    refused = guarded.infer("old token")
    assert (refused.status, refused.json) == (401, {"error": "the token has expired; get a new one"})


def test_tritons_http_client_shows_its_key_as_a_header(guarded: Guarded) -> None:
    """tritonclient.http, unmodified."""
    with tritonclient.http.InferenceServerClient(guarded.stack.http_url.removeprefix("http://")) as client:
        asked = tritonclient.http.InferInput("x", [1, 1], "FP32")
        asked.set_data_from_numpy(np.array([[3]], np.float32))
        answer = client.infer("identity", [asked], headers=guarded.headers("camera"))
        assert answer is not None
        assert answer.as_numpy("y").tolist() == [[3]]
        with pytest.raises(InferenceServerException, match="this needs an API key with the role infer"):
            client.infer("identity", [asked])
        assert client.is_server_live()


def grpc_input() -> tritonclient.grpc.InferInput:
    asked = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
    asked.set_data_from_numpy(np.array([[3]], np.float32))
    return asked


def test_tritons_grpc_client_shows_its_key_as_metadata(guarded: Guarded) -> None:
    """tritonclient.grpc, unmodified; trace settings are read by one role and changed by another."""
    with tritonclient.grpc.InferenceServerClient(guarded.stack.grpc_address) as client:
        answer = client.infer("identity", [grpc_input()], headers=guarded.headers("camera"))
        assert answer is not None
        with pytest.raises(InferenceServerException, match="UNAUTHENTICATED"):
            client.infer("identity", [grpc_input()])
        with pytest.raises(InferenceServerException, match="PERMISSION_DENIED"):
            client.get_model_metadata("identity", headers=guarded.headers("camera"))
        assert client.is_server_ready()
        client.get_log_settings(headers=guarded.headers("viewer"))
        with pytest.raises(InferenceServerException, match="PERMISSION_DENIED"):
            client.update_log_settings({"log_verbose_level": 0}, headers=guarded.headers("viewer"))
        client.update_log_settings({"log_verbose_level": 0}, headers=guarded.headers("ops"))


def test_stream_needs_a_key_too(guarded: Guarded) -> None:
    """Of the role infer, shown when the stream is opened; without it the stream ends before its first request."""
    answers: Queue[tuple[Any, Any]] = Queue()
    for name, is_served in (("camera", True), ("viewer", False)):
        with tritonclient.grpc.InferenceServerClient(guarded.stack.grpc_address) as client:
            client.start_stream(lambda result, error: answers.put((result, error)), headers=guarded.headers(name))
            if is_served:
                client.async_stream_infer("identity", [grpc_input()])
            result, error = answers.get(timeout=20)
            assert (result is not None) == is_served, (name, error)
            assert is_served or "PERMISSION_DENIED" in str(error)
            client.stop_stream(cancel_requests=not is_served)


def test_flood_of_one_key_leaves_another_its_share(guarded: Guarded) -> None:
    """Sixteen at once, for eight places: the flooder has its half and 429 beyond; the other is always served."""

    def flood(_: int) -> list[Answer]:
        return [guarded.infer("flooder", "slow") for _ in range(4)]

    with ThreadPoolExecutor(16) as pool:
        flooding = [pool.submit(flood, number) for number in range(16)]
        others = [guarded.infer("camera", "slow") for _ in range(6)]
        answers = [answer for done in flooding for answer in done.result()]
    counts = Counter(answer.status for answer in answers)
    assert [(answer.status, answer.body) for answer in others if answer.status != 200] == []
    assert set(counts) == {200, 429}
    refused = next(answer for answer in answers if answer.status == 429)
    assert refused.headers["retry-after"] == "1"
    assert "the key 'flooder' has 4 requests in flight (its share is 4)" in refused.json["error"]
    text = call("GET", guarded.stack.metrics_url).body.decode()
    assert 'penstock_rejected_total{reason="quota"}' in text
    assert "penstock_inflight_requests 0.0" in text


def test_commands_show_the_key_of_their_environment(guarded: Guarded) -> None:
    """`penstock models load` with PENSTOCK_API_KEY works; without, it says what is missing."""
    command = [sys.executable, "-m", "penstock.cli.main", "models", "load", "identity", "--url", guarded.stack.http_url]
    environ = os.environ | {"PENSTOCK_HOME": str(guarded.stack.home)}
    keyed = environ | {"PENSTOCK_API_KEY": guarded.secrets["ops"]}
    done = subprocess.run(command, cwd=CHECKOUT, env=keyed, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"identity is loaded at {guarded.stack.http_url}\n")
    refused = subprocess.run(
        command, cwd=CHECKOUT, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert refused.returncode == 1
    assert "requires an API key: give a valid key with --api-key or PENSTOCK_API_KEY" in refused.stderr


def test_file_that_changes_counts_and_one_that_breaks_does_not(guarded: Guarded) -> None:
    """A key that is taken out is 401 within seconds; a broken file keeps the keys, and is logged."""
    guarded.write("camera", "viewer", more=TOKENS)
    guarded.wait_for_status("flooder", 401)
    assert guarded.infer("camera").status == 200
    guarded.file.write_text("[keys")
    guarded.stack.wait_for_log("access file not reloaded.*not valid TOML.*the previous keys stay")
    assert guarded.infer("camera").status == 200
    assert "penstock_access_failed_reads_total 1.0" in call("GET", guarded.stack.metrics_url).body.decode()
    guarded.write(*EVERY_KEY, more=TOKENS)
    guarded.wait_for_status("flooder", 200)


def test_no_key_is_disclosed(guarded: Guarded) -> None:
    """Good ones and wrong ones, shown every way: in no log at debug level, metric, file, or child's environment.

    The parent's own environment is its user's business.
    """
    wrong = new_secret()
    guarded.secrets["wrong"] = wrong
    shown = [guarded.infer("", **{"x-api-key": wrong}), guarded.infer("wrong"), guarded.infer("camera")]
    shown.append(guarded.infer("", authorization=f"Basic {wrong}"))
    shown.append(guarded.infer("", **{"x-api-key": guarded.secrets["ops"], "authorization": f"Bearer {wrong}"}))
    shown.append(call("GET", f"{guarded.stack.http_url}/v3", headers={"x-api-key": wrong}))
    texts = [answer.body.decode() + str(answer.headers) for answer in shown]
    texts += guarded.stack.log + guarded.stack.output
    texts.append(call("GET", guarded.stack.metrics_url).body.decode())
    for child in psutil.Process(guarded.stack.process.pid).children(recursive=True):
        texts += [str(child.environ()), *child.cmdline()]
        for path in child.cmdline():
            if path.endswith("settings.json"):
                texts.append(Path(path).read_text())
    found = [name for name, secret in guarded.secrets.items() if any(secret in text for text in texts)]
    assert found == []
    assert any("PENSTOCK_ENGINE_ID" in text for text in texts), "the children's environments were read"
    assert any('"api_keys":["ops:' in text for text in texts), "the gateway's settings were read"
