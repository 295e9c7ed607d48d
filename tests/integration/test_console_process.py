"""The console as a process of a real stack: over TLS, killed, and with its port taken."""

import http.client
import json
import os
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.auth.authorities import Authority
from tests.integration.embedded_stack import start_embedded, write_models
from tests.integration.living import fails_to_start
from tests.support.stack import RunningStack, stop_stack

OURS = Authority("ours")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """A stack with TLS, whose certificate no CA of this system signed."""
    folder = tmp_path_factory.mktemp("console")
    write_models(folder / "models")
    certificate, key = OURS.sign(folder, "server")
    words = ("--console", "on", "--console-port", "0", "--tls-cert", str(certificate), "--tls-key", str(key))
    running = start_embedded(folder, *words)
    processes = [console_of(running)]
    yield running
    processes.append(console_of(running))
    assert stop_stack(running) == 0
    assert not any(each.is_running() for each in processes)


def console_of(stack: RunningStack) -> psutil.Process:
    """The console's process."""
    children = psutil.Process(stack.process.pid).children(recursive=True)
    (found,) = (each for each in children if "console" in each.cmdline())
    return found


def ask(url: str) -> tuple[int, dict[str, object]]:
    """Status and JSON of a GET over TLS, with any certificate."""
    parts = urlsplit(url)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=10, context=context)
    try:
        connection.request("GET", parts.path)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_console_calls_a_gateway_whose_certificate_the_system_does_not_know(stack: RunningStack) -> None:
    """It trusts the certificate that its own stack serves, and no other."""
    assert stack.console_url.startswith("https://")
    status, identity = ask(f"{stack.console_url}gateway/v1/identity")
    assert (status, identity["client"]) == (200, None)


def test_console_that_is_killed_is_back_on_its_port_and_the_gateway_does_not_notice(stack: RunningStack) -> None:
    """The address stays reserved: calls meanwhile wait, and are answered by the next process."""
    killed = console_of(stack)
    os.kill(killed.pid, signal.SIGKILL)
    assert ask(f"{stack.console_url}health/live") == (200, {"live": True})
    assert console_of(stack).pid != killed.pid
    assert len(stack.logged("the console exited; restarting it")) == 1


def test_port_of_the_console_that_is_taken_is_named_with_both_ways_out(tmp_path: Path) -> None:
    """Exit code 2, the flag for another port, and the flag for no console."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, text = fails_to_start(tmp_path, "--engine", "embedded", "--console", "on", "--console-port", port)
    assert code == 2
    assert f":{port} (Address already in use)" in text
    assert "--console-port, or leave the console out with --console off" in text
