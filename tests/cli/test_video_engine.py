"""Who infers for `penstock video`: a gateway, the stack that runs here, or an engine of its own that leaves nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from structlog.testing import capture_logs

from penstock.cli.gateway_client import GatewayClient
from penstock.gateway.workers import running_stacks
from penstock.gateway.workers.running_stacks import UP_CHILD, RunningStack
from penstock_video.cli import engine as video_engine
from penstock_video.cli.engine import (
    EngineUnavailable,
    ModelUnknown,
    engine_for,
    grpc_beside,
    joinable,
    may_share_card,
    own_engine_command,
    require_installed,
    require_models,
    share_card,
)
from penstock_video.infer.options import EngineAddress, RowMemory
from penstock_video.settings.models import (
    EngineChoice,
    EngineSettings,
    GpuSettings,
    PrimarySettings,
    SourceSettings,
    VideoSettings,
)
from penstock_video.types import DecoderKind, SourceConfig
from tests.cli.conftest import StandIn
from tests.support.stack import CHECKOUT

PEOPLE = {"name": "people", "version": "1", "state": "READY", "reason": ""}
BROKEN = {"name": "street", "version": "1", "state": "UNAVAILABLE", "reason": "no such file"}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No stack of this machine is seen; own engines have their run directories here."""
    monkeypatch.setattr(video_engine, "running_stacks", lambda: ())
    monkeypatch.setenv("TMPDIR", str(tmp_path))


MISSING = {
    "street": "street is not loaded at {url} (no such file): load it with `penstock models load street --url {url}`",
    "fastestdet": "there is no model 'fastestdet' at {url}: fetch it with `penstock models pull fastestdet`",
    "peoples": "there is no model 'peoples' at {url}: did you mean people?",
    "zebra": "there is no model 'zebra' at {url}; `penstock models list --url {url}` shows what there is",
}


@pytest.mark.parametrize(("name", "message"), MISSING.items())
def test_model_that_a_gateway_does_not_serve_is_a_sentence(stand_in: StandIn, name: str, message: str) -> None:
    """With what to do, before anything is decoded."""
    stand_in.index = [PEOPLE, BROKEN]
    require_models(GatewayClient(stand_in.url), ["people"])
    with pytest.raises(EngineUnavailable) as refused:
        require_models(GatewayClient(stand_in.url), ["people", name])
    assert str(refused.value) == message.format(url=stand_in.url)


def test_model_that_is_not_on_this_machine_is_a_sentence() -> None:
    """The own engine pulls nothing by itself."""
    require_installed(["people", "street"])
    for name, message in (("fastestdet", "penstock models pull fastestdet"), ("peple", "did you mean people?")):
        with pytest.raises(EngineUnavailable, match=message):
            require_installed([name])


def test_gateway_elsewhere_is_asked_with_the_key_of_the_variable(stand_in: StandIn) -> None:
    """Its gRPC is one port on, where nothing else is said; no stack of this host is joined."""
    stand_in.index = [PEOPLE]
    settings = EngineSettings(gateway=stand_in.url, api_key_variable="GPU_KEY")
    with engine_for(settings, ["people"], {"GPU_KEY": "k-1"}, print) as place:
        assert place == EngineAddress(None, stand_in.url, grpc_beside(stand_in.url), "k-1")
    assert stand_in.asked[0].headers["x-api-key"] == "k-1"
    assert "k-1" not in repr(place)


def test_gateway_that_does_not_answer_is_a_sentence() -> None:
    """Not a traceback."""
    with (
        pytest.raises(EngineUnavailable, match=r"nothing answers at .* its address with --url"),
        engine_for(EngineSettings(gateway="http://127.0.0.1:9"), ["m"], {}, print),
    ):
        pass


PORTS = {"http://h:8000": "h:8001", "https://h": "h:444", "http://[::1]:8000": "[::1]:8001"}


@pytest.mark.parametrize(("url", "address"), PORTS.items())
def test_grpc_of_a_gateway_is_one_port_on(url: str, address: str) -> None:
    """As Triton's clients expect it."""
    assert grpc_beside(url) == address


def test_stack_that_runs_here_is_joined(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By its run directory; one of our own is started only where that is asked for."""
    stand_in.index = [PEOPLE]
    stack = RunningStack(tmp_path, stand_in.url, "127.0.0.1:1", os.getpid())
    monkeypatch.setattr(running_stacks, "running_stacks", lambda: (stack,))
    with engine_for(EngineSettings(), ["people"], {}, print) as place:
        assert place == EngineAddress(tmp_path, stand_in.url, "127.0.0.1:1")


def test_of_several_stacks_the_one_that_is_used_is_named(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A warning names the newest that serves the models, which is used, the others, and the flag to choose one."""
    stand_in.index = [PEOPLE]
    gone = "http://127.0.0.1:9"
    stacks = [RunningStack(tmp_path, url, "127.0.0.1:1", os.getpid()) for url in (gone, stand_in.url, gone)]
    monkeypatch.setattr(running_stacks, "running_stacks", lambda: stacks)
    with capture_logs() as lines, engine_for(EngineSettings(), ["people"], {}, print) as place:
        assert place.http_url == stand_in.url
    said = [line["event"] for line in lines]
    assert said == [f"3 stacks run here: {stand_in.url} is used; others are {gone}, {gone}"]
    assert "--url" in lines[0]["choose_by"]


def test_port_of_the_settings_chooses_the_stack(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PENSTOCK_HTTP_PORT, as for the other commands; on a port without a stack, no stack of another port is used."""
    stand_in.index = [PEOPLE]
    stacks = [RunningStack(tmp_path, url, "127.0.0.1:1", os.getpid()) for url in ("http://127.0.0.1:9", stand_in.url)]
    monkeypatch.setattr(running_stacks, "running_stacks", lambda: stacks)
    monkeypatch.setenv("PENSTOCK_HTTP_PORT", stand_in.url.rpartition(":")[2])
    with capture_logs() as lines, engine_for(EngineSettings(), ["people"], {}, print) as place:
        assert place.http_url == stand_in.url
    assert lines == []
    monkeypatch.setenv("PENSTOCK_HTTP_PORT", "8")
    with pytest.raises(ModelUnknown, match="on this machine"), engine_for(EngineSettings(), ["absent"], {}, print):
        pass


def test_where_no_stack_serves_the_model_the_newest_says_why(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It says how to load the model there."""
    stand_in.index = [BROKEN]
    stacks = [RunningStack(tmp_path, url, "127.0.0.1:1", os.getpid()) for url in (stand_in.url, "http://127.0.0.1:9")]
    monkeypatch.setattr(running_stacks, "running_stacks", lambda: stacks)
    with (
        pytest.raises(EngineUnavailable, match=f"there is no model 'people' at {stand_in.url}"),
        engine_for(EngineSettings(), ["people"], {}, print),
    ):
        pass


def test_variable_chooses_the_gateway_where_nothing_else_does(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PENSTOCK_GATEWAY_URL overrides stacks on this host; the flag and the file override it."""
    stand_in.index = [PEOPLE]
    stack = RunningStack(tmp_path, "http://127.0.0.1:9", "127.0.0.1:1", os.getpid())
    monkeypatch.setattr(running_stacks, "running_stacks", lambda: (stack,))
    with engine_for(EngineSettings(), ["people"], {"PENSTOCK_GATEWAY_URL": stand_in.url}, print) as place:
        assert (place.http_url, place.run_dir) == (stand_in.url, None)
    named = EngineSettings(gateway=stand_in.url)
    with engine_for(named, ["people"], {"PENSTOCK_GATEWAY_URL": "http://127.0.0.1:9"}, print) as place:
        assert place.http_url == stand_in.url
    wrong = engine_for(EngineSettings(), ["people"], {"PENSTOCK_GATEWAY_URL": "here"}, print)
    with pytest.raises(EngineUnavailable, match="PENSTOCK_GATEWAY_URL: a gateway's address is needed"), wrong:
        pass


def test_program_on_the_engines_gpu_is_a_client_of_its_mps_daemon() -> None:
    """An MPS daemon renumbers the GPUs that it sees, so CUDA_VISIBLE_DEVICES is unset; a configured daemon stays."""
    place = EngineAddress(None, "http://127.0.0.1:8000", "127.0.0.1:8001", mps_directory="/run/mps")
    environ = {"HOME": "/root", "CUDA_VISIBLE_DEVICES": "1"}
    share_card(place, environ)
    assert environ["CUDA_MPS_PIPE_DIRECTORY"] == "/run/mps"
    assert "CUDA_VISIBLE_DEVICES" not in environ
    own = {"CUDA_MPS_PIPE_DIRECTORY": "/mine"}
    share_card(place, own)
    assert own == {"CUDA_MPS_PIPE_DIRECTORY": "/mine"}
    alone: dict[str, str] = {}
    share_card(EngineAddress(None, "http://127.0.0.1:8000", "127.0.0.1:8001"), alone)
    assert alone == {}


def test_stack_of_another_command_is_not_joined(tmp_path: Path) -> None:
    """It would end with that command, in the middle of our frames."""
    sleeping = [sys.executable, "-c", "print(flush=True); input()", UP_CHILD]
    with subprocess.Popen(sleeping, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()  # its command line is there to be read
        bound = RunningStack(tmp_path, "http://a", "a", other.pid)
        free = RunningStack(tmp_path, "http://b", "b", os.getpid())
        assert joinable([bound, free]) == free
        assert joinable([bound]) is None
        other.kill()


def test_own_engine_is_announced_and_shows_its_last_words_if_it_cannot_start() -> None:
    """Half a minute without a word looks like a hang; the error is one sentence with the engine's lines."""
    said: list[str] = []
    wrong = os.environ | {"PENSTOCK_HTPP_PORT": "1"}
    with pytest.raises(EngineUnavailable) as refused, engine_for(EngineSettings(), ["street"], wrong, said.append):
        pass
    assert str(refused.value) == "the engine ended at once, with code 2; it said:"
    assert "PENSTOCK_HTPP_PORT: unknown setting" in refused.value.lines[-1]
    assert said == ["no stack runs here: an engine of this run's own starts, with street, which takes a while"]


def test_own_engine_listens_on_loopback_with_the_models_asked_for() -> None:
    """On free ports, without a console, whatever the environment says of hosts; no key is in its command line."""
    command = own_engine_command(EngineChoice.AUTO, ["a", "b"])
    assert command[-4:] == ["--engine", "auto", "--models", "a,b"]
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command.count("0") == 6
    assert command[command.index("--console") + 1] == "off"
    assert own_engine_command(EngineChoice.AUTO, ["a"], shares_memory=True)[-3:] == [
        "--models",
        "a",
        "--allow-client-shm",
    ]


CAMERA = SourceSettings(SourceConfig("rtsp://cam", "cam"))
BY_CPU = SourceSettings(SourceConfig("rtsp://cam", "cam", decoder=DecoderKind.CPU))
WISHES = [
    ((CAMERA,), RowMemory.AUTO, True, True),
    ((CAMERA, BY_CPU), RowMemory.DEVICE, True, True),
    ((), RowMemory.AUTO, True, True),  # the API may add one
    ((CAMERA,), RowMemory.HOST, True, False),
    ((BY_CPU,), RowMemory.AUTO, True, False),
    ((CAMERA,), RowMemory.AUTO, False, False),
]


@pytest.mark.parametrize(("sources", "hand_over", "has_driver", "is_shared"), WISHES)
def test_own_engine_shares_memory_only_where_a_card_may_use_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sources: tuple[SourceSettings, ...],
    hand_over: RowMemory,
    has_driver: bool,
    is_shared: bool,
) -> None:
    """What shares memory with its clients trusts them: no engine does where nothing would come of it."""
    monkeypatch.setattr(video_engine, "_DRIVER", tmp_path if has_driver else tmp_path / "nvidiactl")
    settings = VideoSettings(sources, PrimarySettings("m"), gpu=GpuSettings(hand_over=hand_over))
    assert may_share_card(settings) is is_shared


HOLD = """
import os, time
from penstock_video.settings.models import EngineChoice
from penstock_video.cli.engine import OwnEngine
with OwnEngine(EngineChoice.EMBEDDED, ["street"], os.environ) as own:
    print(own.stack.process_id, own.stack.run_dir, own.stack.http_url, flush=True)
    time.sleep(100)
"""


@pytest.mark.parametrize("how", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGKILL])
def test_own_engine_leaves_nothing_however_its_command_ends(how: signal.Signals) -> None:
    """No process, no run directory; after a SIGKILL of the command, too."""
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as held:
        assert held.stdout is not None
        process_id, run_dir, url = held.stdout.readline().split()
        own = psutil.Process(int(process_id))
        family = [own, *own.children(recursive=True)]
        require_models(GatewayClient(url), ["street"])
        held.send_signal(how)
        held.wait(60)
    _, left = psutil.wait_procs(family, timeout=30)
    assert left == []
    assert not Path(run_dir).exists()
