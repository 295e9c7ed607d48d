"""Other local users cannot reach a stack's engine: it has no TCP port, and its sockets are private."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.integration.guarded import Guarded
from tests.integration.living import family, triton_of
from tests.support.http import call
from tests.support.stack import RunningStack

pytestmark = pytest.mark.xdist_group("access")
UNPRIVILEGED_UID = 65_534

# Run as another user. What it can read of the stack's processes, and which sockets and folders it can enter.
INTRUDER = """
import ctypes, json, os, socket, sys
user, run_dir, *pids = sys.argv[1:]
os.setgroups([]); os.setgid(int(user)); os.setuid(int(user))
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: as a process that this user started
def attempt(act, *arguments):
    try:
        return act(*arguments)
    except OSError as error:
        return type(error).__name__
def connect(path):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
    return "connected"
def read(path):
    with open(path, "rb") as file:
        return file.read().decode("latin-1")
names = ("triton-http.sock", "triton-grpc.sock:8001", "triton-metrics.sock")
print(json.dumps({
    "list": attempt(os.listdir, run_dir),
    "sockets": {name: attempt(connect, f"{run_dir}/{name}") for name in names},
    "through proc": {
        pid: [attempt(connect, f"/proc/{pid}/root{run_dir}/{names[0]}"), attempt(os.listdir, f"/proc/{pid}/fd")]
        for pid in pids
    },
    "cmdline": {pid: attempt(read, f"/proc/{pid}/cmdline") for pid in pids},
    "environ": {pid: attempt(read, f"/proc/{pid}/environ") for pid in pids},
}))
"""


def run_dir_of(stack: RunningStack) -> Path:
    return Path(stack.engine_http_url.removeprefix("unix://")).parent


def test_engine_of_a_stack_with_keys_listens_on_no_port(guarded: Guarded) -> None:
    """The ports are not opened although they were set; a warning says so, and clients with the key are served."""
    listening = [one for one in triton_of(guarded.stack).net_connections("inet") if one.status == psutil.CONN_LISTEN]
    assert listening == []
    assert len(guarded.stack.logged("--engine-http-port, --engine-grpc-port, --engine-metrics-port: not opened")) == 1
    assert (guarded.infer("").status, guarded.infer("ops").status) == (401, 200)
    assert b"nv_inference_request_success" in call("GET", f"{guarded.stack.metrics_url}/engine").body


def test_run_directory_of_a_stack_is_its_users_alone(guarded: Guarded) -> None:
    """The folder has mode 0700, which also protects the sockets in it."""
    assert stat.S_IMODE(run_dir_of(guarded.stack).stat().st_mode) == 0o700
    assert {path.name for path in run_dir_of(guarded.stack).iterdir() if path.is_socket()} >= {
        *("triton-http.sock", "triton-grpc.sock:8001", "triton-metrics.sock")
    }


def test_other_user_finds_no_way_to_the_engine_and_no_secret(guarded: Guarded) -> None:
    """Another local user cannot connect to the engine's sockets, nor read a key from any process of the stack."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    pids = [str(process.pid) for process in family(guarded.stack)]
    command = [sys.executable, "-I", "-c", INTRUDER, str(UNPRIVILEGED_UID), str(run_dir_of(guarded.stack)), *pids]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert found["list"] == "PermissionError"
    assert set(found["sockets"].values()) == {"PermissionError"}
    assert all(way == ["PermissionError", "PermissionError"] for way in found["through proc"].values())
    assert set(found["environ"].values()) == {"PermissionError"}
    assert len(found["cmdline"]) == len(pids) > 2
    assert guarded.secrets["ops"] not in "".join(found["cmdline"].values())
