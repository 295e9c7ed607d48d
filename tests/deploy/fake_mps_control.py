"""Stands in for nvidia-cuda-mps-control: what our programs can see of it, as it was seen on an H200.

`-f` is the daemon: it binds `control` in CUDA_MPS_PIPE_DIRECTORY, leaves it there when it is killed, ends on SIGTERM
or `quit`, and tells of each command on standard output; for the tests also in the file `said`. `-d` leaves such a one
in the background. Without arguments it hands the lines of standard input to the daemon and prints the answers.

Clients are the living processes whose ids stand in the file `clients` of its directory; with the first of them there
is a server. The word in the file `state` is that server's; FAULT goes when the last client has. FAKE_MPS_SICK names
what is wrong: deaf (SIGTERM and quit do nothing), slow (it starts late), dead (it ends at once), mute (no answer ever
comes), foreign (it speaks another protocol), listless (it refuses a list of no servers). So many callers as the file
`busy` says are turned away, as by a daemon that answers another one.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PIPES = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
SICK = os.environ.get("FAKE_MPS_SICK", "")
FILES = ("control_lock", "control_privileged", "log", "nvidia-cuda-mps-control.pid")


def tell(words: str) -> None:
    sys.stdout.write(f"[Control {os.getpid()}] {words}\n")
    sys.stdout.flush()


def lives(pid: str) -> bool:
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def clients() -> list[str]:
    file = PIPES / "clients"
    return [pid for pid in file.read_text().split() if lives(pid)] if file.exists() else []


def state() -> str:
    file = PIPES / "state"
    if file.exists() and not clients():
        file.unlink()
    return file.read_text().strip() if file.exists() else "ACTIVE"


def answer_about_clients(words: list[str]) -> str | None:
    """The server is the daemon itself, under its own number."""
    if words[0] == "get_server_list":
        return str(os.getpid()) if (PIPES / "clients").exists() else ""
    if words[0] == "get_server_status":
        return state()
    if words[0] == "get_client_list":
        return "\n".join(clients())
    return None


def daemon() -> int:
    if SICK == "dead":
        return 3
    if SICK == "slow":
        time.sleep(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if SICK == "deaf" else lambda *_: sys.exit(0))
    log = Path(os.environ["CUDA_MPS_LOG_DIRECTORY"], "said")
    limits = {name: os.environ[name] for name in os.environ if name.endswith(("_PERCENTAGE", "_MEM_LIMIT"))}
    log.write_text(f"environment {limits}\n")
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.bind(str(PIPES / "control"))  # fails over a stale one
    for name in FILES:
        (PIPES / name).write_text(str(os.getpid()))
    door.listen()
    tell(f"Starting control daemon using socket {PIPES}/control")
    threads = 100.0
    while True:
        caller, _ = door.accept()
        with caller:
            words = caller.recv(4096).decode().split()
            if not words:  # a check that it listens
                continue
            if SICK == "mute":
                time.sleep(60)
            with log.open("a") as lines:
                lines.write(" ".join(words) + "\n")
            tell(f"Cmd:{' '.join(words)}")
            if words[0] == "quit" and SICK != "deaf":
                caller.send(b"0 ")
                return 0
            if words[0] == "stumble":  # as its server's lines come among its own
                tell("Fatal GPU exception on a device of 2 clients")
            if words[0] == "set_default_active_thread_percentage":
                threads = float(words[1])
            refused = words[0] == "set_default_device_pinned_mem_limit" and words[1] == "7"
            refused |= SICK == "listless" and words[0] == "get_server_list"
            answer = answer_about_clients(words)
            answer = answer if answer is not None else "no such command" if SICK == "foreign" else f"{threads}"
            caller.send(b"1 no such device" if refused else f"0 {answer}".encode())


def is_turned_away() -> bool:
    file = PIPES / "busy"
    left = int(file.read_text()) if file.exists() else 0
    if left:
        file.write_text(str(left - 1))
    return left > 0


def client() -> int:
    code = 0
    for line in sys.stdin:
        if is_turned_away():
            sys.stdout.write("Cannot send command to MPS control daemon process\n")
            return 1
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as call:
                call.connect(str(PIPES / "control"))
                call.send(line.encode())
                status, _, text = call.recv(4096).decode().partition(" ")
        except OSError:
            status, text = "1", "Cannot find MPS control daemon process"
        sys.stdout.write(f"{text}\n")
        code = int(status or 1)
    return code


def background() -> int:
    subprocess.Popen(
        [sys.executable, "-S", "-I", __file__, "-f"], start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return 0


if "-d" in sys.argv:
    sys.exit(background())
sys.exit(daemon() if "-f" in sys.argv else client())
