"""Stands in for nvidia-cuda-mps-control: what deploy/mps's scripts can see of it, as it was seen on an H200.

`-f` is the daemon: it binds `control` in CUDA_MPS_PIPE_DIRECTORY, leaves it there when it is killed, ends on SIGTERM
or `quit`, and tells of each command on standard output; for the tests also in the file `said`. Without arguments it
hands the lines of standard input to the daemon and prints the answers. FAKE_MPS_SICK names what is wrong with it: deaf
(SIGTERM and quit do nothing), slow (it starts late), dead (it ends at once).
"""

import os
import signal
import socket
import sys
import time
from pathlib import Path

PIPES = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
SICK = os.environ.get("FAKE_MPS_SICK", "")
FILES = ("control_lock", "control_privileged", "log", "nvidia-cuda-mps-control.pid")


def tell(words: str) -> None:
    sys.stdout.write(f"[Control {os.getpid()}] {words}\n")
    sys.stdout.flush()


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
            with log.open("a") as lines:
                lines.write(" ".join(words) + "\n")
            tell(f"Cmd:{' '.join(words)}")
            if words[0] == "quit" and SICK != "deaf":
                caller.send(b"0 ")
                return 0
            if words[0] == "set_default_active_thread_percentage":
                threads = float(words[1])
            refused = words[0] == "set_default_device_pinned_mem_limit" and words[1] == "7"
            caller.send(b"1 no such device" if refused else f"0 {threads}".encode())


def client() -> int:
    code = 0
    for line in sys.stdin:
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


sys.exit(daemon() if "-f" in sys.argv else client())
