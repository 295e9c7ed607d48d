"""The Dockerfile against what it stands for. `make check` lints it; this reads it."""

import fnmatch
import json
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.main import build_app
from penstock.gateway.settings import Settings
from penstock.gpu.triton_images import advise
from penstock_video.api.options import ApiOptions

CHECKOUT = Path(__file__).resolve().parents[2]
DOCKERFILE = CHECKOUT / "deploy" / "docker" / "Dockerfile"


def instructions(word: str) -> list[str]:
    """The arguments of every such instruction, continued lines joined, comments left out."""
    text = "\n".join(line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#"))
    joined = text.replace("\\\n", " ")
    return [line.removeprefix(word).strip() for line in joined.splitlines() if line.startswith(f"{word} ")]


def stages() -> dict[str, dict[str, list[str]]]:
    """Of each stage its own instructions, by word; `FROM` has its base."""
    found: dict[str, dict[str, list[str]]] = {}
    current: dict[str, list[str]] = {}
    text = "\n".join(line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#"))
    for line in filter(str.strip, text.replace("\\\n", " ").splitlines()):
        word, _, arguments = line.partition(" ")
        if word == "FROM":
            base, _, name = arguments.partition(" AS ")
            current = found.setdefault(name, {"FROM": [base]})
        else:
            current.setdefault(word, []).append(arguments.strip())
    return found


def inherited(target: str, word: str) -> list[str]:
    """What the target has of such instructions, its bases' first."""
    stage = stages()[target]
    base = stage["FROM"][0]
    return (inherited(base, word) if base in stages() else []) + stage.get(word, [])


def context_holds(path: str) -> bool:
    """Whether .dockerignore lets the file or folder into the build: the last rule that matches it, or a folder that it
    is in, decides."""
    places = [path, *map(str, Path(path).parents)][:-1]
    is_in = True
    for rule in (CHECKOUT / ".dockerignore").read_text().splitlines():
        pattern = rule.lstrip("!")
        if rule and not rule.startswith("#") and any(_matches(place, pattern) for place in places):
            is_in = rule.startswith("!")
    return is_in


def _matches(path: str, pattern: str) -> bool:
    """A star stands for no slash there."""
    return path.count("/") == pattern.count("/") and fnmatch.fnmatch(path, pattern)


def test_dockerfile_copies_only_what_is_there() -> None:
    """Every file that the build copies exists and is part of its context."""
    sources = [source for words in instructions("COPY") if "--from" not in words for source in words.split()[:-1]]
    assert sources
    for source in sources:
        assert (CHECKOUT / source).exists(), source
        assert context_holds(source), source


def test_build_context_leaves_out_what_no_image_needs() -> None:
    """Environments, history and tests are not sent to the builder."""
    left_out = (".venv", ".git", "tests", "out", "compose.yaml", ".venv-triton/bin/python", "deploy/helm")
    assert [path for path in left_out if context_holds(path)] == []


def test_stack_is_the_last_stage_and_alone_has_triton() -> None:
    """`docker build` without a target makes the image of the README's first line; the others are slim."""
    assert list(stages())[-1] == "stack"
    assert [name for name in stages() if ".venv-triton" in " ".join(inherited(name, "COPY"))] == ["stack"]


def test_dockerfile_installs_nothing_without_hashes() -> None:
    """Every Python package comes from a lock, by hash."""
    for name, stage in stages().items():
        if "uv pip install" in " ".join(stage.get("RUN", [])):
            assert "UV_REQUIRE_HASHES=1" in " ".join(inherited(name, "ENV")), name
    commands = [command for words in instructions("RUN") for command in words.split("&&") if " install " in command]
    for command in commands:
        if "pip" in command:
            assert re.search(r"-r requirements/[\w-]+\.txt", command), command
            assert "uv pip" in command or "--require-hashes" in command, command


PROGRAMS = {
    "gateway": ["penstock", "up", "--host", "0.0.0.0"],
    "stack": ["penstock", "up", "--host", "0.0.0.0"],
    "video": ["penstock", "video", "run"],
    "triton": ["/opt/penstock/serve_triton.sh"],
    "load": ["locust", "-f", "loadtest/penstock_load/locustfile.py"],
}


@pytest.mark.parametrize("target", PROGRAMS)
def test_image_runs_its_program_under_tini_without_a_named_user(target: str) -> None:
    """Signals reach the program, what it leaves is reaped, and it has no root."""
    assert json.loads(inherited(target, "ENTRYPOINT")[-1]) == ["tini", "--", *PROGRAMS[target]]
    assert inherited(target, "USER")[-1] == "10001:10001"


@pytest.mark.parametrize("target", PROGRAMS)
def test_image_says_what_it_is_and_how_it_is(target: str) -> None:
    """OCI's labels with the version of this checkout, and a health check, or that there is none to ask."""
    labels = " ".join(inherited(target, "LABEL"))
    for name in ("title", "description", "licenses", "version", "revision", "created"):
        assert f'org.opencontainers.image.{name}="' in labels, name
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    assert f"VERSION={project['version']}" in inherited(target, "ARG")
    assert inherited(target, "HEALTHCHECK")


def test_images_expose_the_ports_of_their_programs() -> None:
    """The gateway's, by its settings; the control API's; and Triton's, which are the same by nature."""
    defaults = Settings()
    triton = f"{defaults.http_port} {defaults.grpc_port} {defaults.metrics_port}"
    gateway = f"{triton} {defaults.console_port}"
    for target, ports in {"stack": gateway, "gateway": gateway, "triton": triton, "video": "8010"}.items():
        assert inherited(target, "EXPOSE") == [ports], target
    assert ApiOptions().port == 8010


def test_bases_are_arguments_with_the_newest_image_that_doctor_advises() -> None:
    """Both may be given by digest; without, Triton's is the one for cards since Turing."""
    defaults = dict(words.split("=", 1) for words in instructions("ARG") if "=" in words)
    assert defaults["TRITON_BASE"] == advise((7, 5), None).image
    for name, stage in stages().items():
        (base,) = stage["FROM"]
        assert base in ("${BASE}", "${TRITON_BASE}") or base in stages(), name


@pytest.mark.parametrize("target", ["gateway", "video"])
def test_entrypoint_is_understood_by_the_command(target: str) -> None:
    """The command knows every flag that the image passes."""
    _, *words = PROGRAMS[target]
    flags = [word for word in words if word.startswith("--")]
    named = words[: words.index(flags[0]) if flags else None]
    shown = CliRunner().invoke(build_app(named), [*named, "--help"], env={"COLUMNS": "200"})
    assert (shown.exit_code, [flag for flag in flags if flag not in shown.stdout]) == (0, [])


@pytest.mark.parametrize(("help_text", "passes"), [("", False), ("  --allow-client-shm <boolean>", True)])
def test_triton_gets_the_shared_memory_flag_only_if_it_knows_it(tmp_path: Path, help_text: str, passes: bool) -> None:
    """Releases before 26.04 end at once where they are given a flag of later ones."""
    triton = tmp_path / "tritonserver"
    triton.write_text(f'#!/bin/sh\nif [ "$1" = --help ]; then echo "{help_text}" >&2; exit 1; fi\nprintf "<%s>" "$@"\n')
    triton.chmod(0o755)
    words = ["--http-port=9000", "--allow-client-shm=true", "--id=a b"]
    started = subprocess.run(
        [CHECKOUT / "deploy" / "docker" / "serve_triton.sh", *words],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=True, timeout=20,
    )  # fmt: skip
    expected = words if passes else [words[0], words[2]]
    assert sorted(started.stdout) == sorted("".join(f"<{word}>" for word in expected))
    assert "<--id=a b>" in started.stdout


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
    (words,) = inherited("stack", "HEALTHCHECK")
    program, *arguments = json.loads(words[words.index("[") :])
    assert program == "python"
    there = [argument.replace(":8000/", f":{port}/") for argument in arguments]
    answer = subprocess.run([sys.executable, *there], capture_output=True, timeout=20, check=False)
    assert (answer.returncode == 0) == (status == 200), answer.stderr
