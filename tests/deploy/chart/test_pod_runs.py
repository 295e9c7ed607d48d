"""The rendered containers of a sidecar's pod run as processes here: the real Triton (2.51, of 24.10), the real gateway.

Not a container, a kubelet or a cluster: commands, arguments, variables, probes and the order of the end are its own.
"""

import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.engines.triton.endpoints import pick_free_ports
from penstock.engines.triton.runtime import find_triton
from tests.deploy.chart.objects import component, variables
from tests.deploy.chart.pod_security import Spec
from tests.deploy.chart.rendering import Values, render
from tests.engines.fake_triton import Mode
from tests.integration.test_external_engines import Fakes
from tests.support.stack import CHECKOUT, RunningStack, start_stack, stop_stack
from tests.support.waiting import wait_for

ENTRY_POINT = CHECKOUT / "deploy" / "docker" / "serve_triton.sh"
REPOSITORY = "/opt/penstock/model_repository"
START_S = 60.0
VALUES: Values = {
    "topology": "sidecar",
    "gpu": {"generation": "volta"},  # of the release that the bundled Triton is of
    "triton": {"acceptKnownVulnerabilities": True},
    "gateway": {
        "models": ["street", "identity_fp32"],
        "batching": {"street": "gateway,slo_p99_ms=5000"},
        "settings": {"max_body_bytes": 16777216, "canary_interval_s": 0.2},
        "drain": {"preStopSeconds": 0, "delaySeconds": 1, "graceSeconds": 20},
    },
}

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here, which the probes are")


class Sidecar:
    """Triton's container: its command and probes, with ports of this test's in place of the chart's."""

    def __init__(self, container: Spec, folder: Path, environment: Path) -> None:
        self.ports = dict(zip(("9000", "9001", "9002"), map(str, pick_free_ports("127.0.0.1", 3)), strict=True))
        self._container = container
        self._folder = folder
        self._launch = find_triton(environment=environment, search_path="").prepare(folder)
        program = folder / "tritonserver"
        program.write_text(f'#!/bin/sh\nexec {" ".join(self._launch.argv)} "$@"\n')
        program.chmod(0o755)

    @contextmanager
    def running(self) -> Iterator["subprocess.Popen[bytes]"]:
        """Started, and as live as its own startup probe says."""
        assert "command" not in self._container, "the image's own entry point is what follows tini there"
        env = {**self._launch.env, "PATH": f"{self._folder}:{self._launch.env['PATH']}"}
        with (self._folder / "log").open("ab") as log:
            process = subprocess.Popen(
                ["sh", str(ENTRY_POINT), *map(self.here, self._container["args"])], stdout=log, stderr=log, env=env
            )
        try:
            wait_for(lambda: process.poll() is not None or self.passes("startupProbe"), START_S, "Triton lives")
            assert process.poll() is None, (self._folder / "log").read_text()[-4000:]
            yield process
        finally:
            process.kill()
            process.wait()

    def passes(self, probe: str, gateway_url: str = "http://127.0.0.1:9") -> bool:
        """Whether the probe's command says so."""
        command = [
            self.here(word).replace("http://127.0.0.1:8000", gateway_url)
            for word in self._container[probe]["exec"]["command"]
        ]
        return subprocess.run(command, check=False, timeout=20).returncode == 0

    @property
    def engine(self) -> tuple[str, str, str]:
        """Where it listens, for --engine. In a pod gRPC is on the next port."""
        return f"http://127.0.0.1:{self.ports['9000']}", "--engine-grpc", f"127.0.0.1:{self.ports['9001']}"

    def here(self, word: str) -> str:
        """A word of the chart's, with this machine's ports and folder."""
        here = re.sub("900[012]", lambda found: self.ports[found[0]], word)
        return here.replace(REPOSITORY, str(CHECKOUT / "model_repository"))


def status(url: str, body: bytes | None = None) -> int:
    """What is answered."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, body, {"content-type": "image/png"}), timeout=20
        ) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@contextmanager
def running_gateway(home: Path, *engine: str, without: str = "") -> Iterator[RunningStack]:
    """The gateway with the variables of the chart, but the one named. It ends well, if it has not yet."""
    environment = variables(component(render(VALUES), "gateway").container("gateway"))
    for name in ("PENSTOCK_ENGINE", "PENSTOCK_HOME", without):
        environment.pop(name, None)
    gateway = start_stack(home, "--engine", *engine, environ=environment)
    try:
        yield gateway
        assert stop_stack(gateway) == 0
    finally:
        gateway.process.kill()


@needs_curl
@pytest.mark.long
def test_sidecars_pod_serves_recovers_and_drains_in_the_charts_order(tmp_path: Path, triton_environment: Path) -> None:
    """Triton takes its arguments and loads; the gateway takes its variables and serves; a Triton that dies comes back
    with its models; at the end the gateway drains first, and both fit into the pod's grace period."""
    pods = component(render(VALUES), "gateway")
    sidecar = Sidecar(pods.container("triton"), tmp_path, triton_environment)
    left_behind = Path("/dev/shm/triton_python_backend_shm_region_of_one_that_was_killed")
    left_behind.touch()
    with sidecar.running() as killed, running_gateway(tmp_path, *sidecar.engine) as gateway:
        assert not left_behind.exists()
        ready, live = f"{gateway.http_url}/v2/health/ready", f"{gateway.http_url}/v2/health/live"
        assert (status(ready), status(f"{gateway.http_url}/v2/repository/models/street/unload", b"")) == (200, 403)
        assert sidecar.passes("livenessProbe", gateway.http_url)
        killed.kill()
        wait_for(lambda: status(ready) == 503, 10, "not ready without its engine")
        assert status(live) == 200
        killed.wait()
        with sidecar.running() as triton:
            wait_for(lambda: status(ready) == 200, START_S, "ready with the next one")
            began = time.monotonic()
            gateway.process.terminate()
            wait_for(lambda: status(ready) == 503, 2, "not ready while it drains")
            assert status(f"{gateway.http_url}/v2/models/identity_fp32") == 200, "it serves on while it drains"
            assert gateway.process.wait(30) == 0
            triton.terminate()
            assert triton.wait(30) == 0
            assert time.monotonic() - began < pods.spec["terminationGracePeriodSeconds"]


@needs_curl
def test_triton_that_lives_and_cannot_infer_fails_its_liveness_probe(tmp_path: Path) -> None:
    """What the gateway's canaries find ends the container; a gateway that is away, or slow to start, does not."""
    *shell, script = component(render(VALUES), "gateway").container("triton")["livenessProbe"]["exec"]["command"]

    def is_well(gateway_url: str) -> bool:
        here = script.replace("http://127.0.0.1:9000", fake.http_url).replace("http://127.0.0.1:8000", gateway_url)
        return subprocess.run([*shell, here], check=False, timeout=20).returncode == 0

    with Fakes(1) as fakes:
        (fake,) = fakes.all
        assert is_well("http://127.0.0.1:9"), "no gateway listens at its port yet"
        engine = (fake.http_url, "--engine-grpc", fake.grpc_address)
        with running_gateway(tmp_path, *engine, without="PENSTOCK_MODELS") as gateway:
            assert is_well(gateway.http_url)
            fakes.become(Mode.OUT_OF_MEMORY)  # of inferences; it says that it lives
            wait_for(lambda: not is_well(gateway.http_url), 20, "the probe fails")
            fakes.become(Mode.NORMAL)
            wait_for(lambda: is_well(gateway.http_url), 20, "the probe passes again")


def git(folder: Path, *arguments: str) -> str:
    """What git says in the folder, by its own defaults."""
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "init.defaultBranch=main")
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    asked = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, env=env, capture_output=True, text=True, check=True
    )
    return asked.stdout.strip()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A git repository with a model in it, of which any commit may be asked for."""
    folder = tmp_path / "source"
    (folder / "vision" / "street" / "1").mkdir(parents=True)
    (folder / "vision" / "street" / "config.pbtxt").write_text('name: "street"\n')
    git(folder, "init", "--quiet")
    git(folder, "config", "uploadpack.allowAnySHA1InWant", "true")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "a model")
    git(folder, "tag", "v1")
    return folder


def fetched(models: Path, repository: str, ref: str, path: str) -> "subprocess.CompletedProcess[str]":
    """The init container's script, run over a folder of this test's. Files may be fetched from files here, too."""
    git_values = {"repository": "https://git.example.com/m.git", "ref": "v1", "image": "git"}
    values = {**VALUES, "models": {"source": "git", "git": git_values}, "networkPolicy": {"enabled": False}}
    container = component(render(values), "gateway").container("models")
    (script,) = container["args"]
    environment = {"GIT_REPOSITORY": repository, "GIT_REF": ref, "GIT_PATH": path, "GIT_ALLOW_PROTOCOL": "file"}
    env = {"PATH": os.environ["PATH"], "HOME": str(models), "GIT_TERMINAL_PROMPT": "0", **environment}
    command = [*container["command"], script.replace("/models/", f"{models}/")]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("path", ["vision", ""])
def test_git_source_leaves_the_folder_of_the_commit_and_nothing_else(source: Path, tmp_path: Path, path: str) -> None:
    """A tag and a commit give the same models, without git's own folder; a second run, after a restart, too."""
    models = tmp_path / "models"
    models.mkdir()
    for ref in ("v1", git(source, "rev-parse", "HEAD")):
        assert fetched(models, f"file://{source}", ref, path).returncode == 0
        config = models / "repository" / ("" if path else "vision") / "street" / "config.pbtxt"
        assert config.read_text() == 'name: "street"\n'
        assert [each.name for each in models.iterdir()] == ["repository"]
        assert not list(models.rglob(".git"))


def test_git_source_runs_nothing_that_its_values_say(source: Path, tmp_path: Path) -> None:
    """Values reach the shell as variables: they are no commands, and no options of git; what is not there ends it."""
    models, witness = tmp_path / "models", tmp_path / "witness"
    models.mkdir()
    touch = f"touch {witness}"
    assert fetched(models, f"ext::sh -c {touch.replace(' ', '% ')}", "v1", "").returncode != 0
    assert fetched(models, f"file://{source}", f"$({touch})", "").returncode != 0
    assert fetched(models, f"file://{source}", f"--upload-pack={touch}", "").returncode != 0
    assert fetched(models, f"file://{source}", "v1", f"vision; {touch}").returncode != 0
    assert fetched(models, f"file://{source}", "v1", "absent").returncode != 0
    assert not witness.exists()
