"""The Dockerfile and the compose file, against what they stand for. `make check` lints them; this reads them."""

import fnmatch
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from server.settings import Settings

CHECKOUT = Path(__file__).resolve().parents[2]
DOCKERFILE = CHECKOUT / "deploy" / "docker" / "Dockerfile"


def instructions(word: str) -> list[str]:
    """The arguments of every such instruction, continued lines joined, comments left out."""
    text = "\n".join(line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#"))
    joined = text.replace("\\\n", " ")
    return [line.removeprefix(word).strip() for line in joined.splitlines() if line.startswith(f"{word} ")]


def compose() -> dict[str, Any]:
    """The compose file's services."""
    document: dict[str, Any] = YAML(typ="safe").load((CHECKOUT / "compose.yaml").read_text())
    return document["services"]


def context_holds(path: str) -> bool:
    """Whether .dockerignore lets the file or folder into the build: the last rule that matches decides."""
    is_in = True
    for rule in (CHECKOUT / ".dockerignore").read_text().splitlines():
        pattern = rule.lstrip("!")
        if rule and not rule.startswith("#") and (path == pattern or fnmatch.fnmatch(path.split("/")[0], pattern)):
            is_in = rule.startswith("!")
    return is_in


def test_dockerfile_copies_only_what_is_there() -> None:
    """Every file that the build copies exists and is part of its context."""
    sources = [source for words in instructions("COPY") if "--from" not in words for source in words.split()[:-1]]
    assert sources
    for source in sources:
        assert (CHECKOUT / source).exists(), source
        assert context_holds(source), source


@pytest.mark.parametrize("path", [".venv", ".git", "tests", "out", "compose.yaml", ".venv-triton/bin/python"])
def test_build_context_leaves_out_what_no_image_needs(path: str) -> None:
    """Environments, history and tests are not sent to the builder."""
    assert not context_holds(path)


def test_dockerfile_installs_nothing_without_hashes() -> None:
    """Every Python package comes from a lock, by hash."""
    assert any("UV_REQUIRE_HASHES=1" in words for words in instructions("ENV"))
    commands = [command for words in instructions("RUN") for command in words.split("&&") if " install " in command]
    for command in commands:
        if "pip" in command:
            assert re.search(r"-r requirements/[\w-]+\.txt", command), command
            assert "uv pip" in command or "--require-hashes" in command, command


def test_image_serves_the_ports_of_the_settings_as_nobody_in_particular() -> None:
    """It exposes the gateway's ports, listens beyond loopback, and runs without root."""
    defaults = Settings()
    ports = [defaults.http_port, defaults.grpc_port, defaults.metrics_port]
    assert instructions("EXPOSE") == [" ".join(map(str, ports))]
    assert set(instructions("USER")) == {"10001:10001"}
    assert json.loads(instructions("ENTRYPOINT")[-1]) == ["tini", "--", "penstock", "up", "--host", "0.0.0.0"]


def test_entrypoint_is_understood_by_the_command() -> None:
    """`penstock up` knows every flag that the image passes."""
    flags = [word for word in json.loads(instructions("ENTRYPOINT")[-1]) if re.match(r"--\w", word)]
    command = [sys.executable, "-m", "server.cli", "up", "--help"]
    environment = {"COLUMNS": "200", "PATH": "/usr/bin:/bin", "NO_COLOR": "1"}
    shown = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=True).stdout
    assert [flag for flag in flags if flag not in shown] == []


def test_compose_binds_loopback_only_and_each_port_of_the_image() -> None:
    """Nothing is reachable from outside the host unless its user says so."""
    ports = compose()["penstock"]["ports"]
    assert [port.rsplit(":", 1)[1] for port in ports] == instructions("EXPOSE")[0].split()
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_compose_services_build_stages_that_exist_and_stay_confined() -> None:
    """Each service names a stage of the Dockerfile, is read-only, and holds no capability."""
    stages = {words.split(" AS ")[1] for words in instructions("FROM")}
    for name, service in compose().items():
        assert service["build"]["target"] in stages, name
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"]), name
    assert compose()["load"]["profiles"] == ["load"]


def test_compose_waits_longer_than_the_gateway_drains() -> None:
    """The engine of containers kills only what has had its grace."""
    seconds = int(compose()["penstock"]["stop_grace_period"].removesuffix("s"))
    assert seconds > Settings().drain_delay_s + Settings().grace_s


@pytest.fixture(params=[200, 503])
def answering(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """(status, port) of a server that answers everything with that status."""
    status: int = request.param

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/v2/health/ready" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield status, server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_health_check_tells_ready_from_not(answering: tuple[int, int]) -> None:
    """The image's own health check succeeds on 200 and fails on 503."""
    status, port = answering
    (words,) = instructions("HEALTHCHECK")
    program, *arguments = json.loads(words[words.index("[") :])
    assert program == "python"
    there = [argument.replace(":8000/", f":{port}/") for argument in arguments]
    answer = subprocess.run([sys.executable, *there], capture_output=True, timeout=20, check=False)
    assert (answer.returncode == 0) == (status == 200), answer.stderr
