"""The stack starts, or says in one line why not."""

import os
import re
import socket
from pathlib import Path

import pytest

from tests.integration.living import ANY_PORTS, SLOW_CONFIG, fails_to_start, is_serving
from tests.integration.replicas import BareTriton
from tests.support.http import call
from tests.support.stack import RunningStack, start_stack, stop_stack
from tests.support.tiny_models import write_model
from tests.support.waiting import wait_for


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port", "--metrics-port"])
def test_port_in_use_is_one_line_with_the_flag(tmp_path: Path, flag: str) -> None:
    """Which port, and which flag chooses another; nothing was started."""
    assert_taken_port_is_one_line(tmp_path, flag, engine="embedded")


def test_port_in_use_of_the_engine_is_one_line_with_the_flag(tmp_path: Path, triton_environment: Path) -> None:
    """Triton's own ports are tried as well."""
    assert_taken_port_is_one_line(tmp_path, "--engine-grpc-port", engine="triton")


def assert_taken_port_is_one_line(tmp_path: Path, flag: str, *, engine: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, text = fails_to_start(tmp_path, "--engine", engine, *ANY_PORTS, flag, str(port))
    assert code != 0
    assert len(text.splitlines()) == 1
    assert f"127.0.0.1:{port}" in text
    assert flag in text


def test_unknown_setting_is_one_line_with_a_suggestion(tmp_path: Path) -> None:
    """A typo in a variable does not start the stack."""
    code, text = fails_to_start(tmp_path, environ={"PENSTOCK_HTPP_PORT": "1"})
    assert code != 0
    assert len(text.splitlines()) == 1
    assert "did you mean PENSTOCK_HTTP_PORT?" in text


def test_no_triton_binary_is_one_line_with_the_fix(tmp_path: Path) -> None:
    """A start that needs Triton where there is none says what to do."""
    environ = {"PATH": "/nonexistent", "PENSTOCK_ENGINE_ENVIRONMENT": str(tmp_path / "none")}
    code, text = fails_to_start(tmp_path, "--engine", "triton", *ANY_PORTS, environ=environ)
    assert code != 0
    assert len(text.splitlines()) == 1
    assert "no tritonserver on PATH" in text
    assert "`penstock setup triton` installs it, or use --engine embedded" in text


def test_missing_repository_is_one_line(tmp_path: Path, triton_environment: Path) -> None:
    """A model repository that is not there is named."""
    code, text = fails_to_start(tmp_path, *ANY_PORTS, "--model-repository", str(tmp_path / "nowhere"))
    assert code != 0
    assert f"{tmp_path / 'nowhere'} cannot be read" in text
    assert "Traceback" not in text


def test_model_whose_name_a_shell_would_split_is_one_line(tmp_path: Path, triton_environment: Path) -> None:
    """Triton would wait for such a model for ever: the folder is named, with the fix."""
    (tmp_path / "home" / "models" / "my model").mkdir(parents=True)
    code, text = fails_to_start(tmp_path, *ANY_PORTS)
    assert code != 0
    assert len(text.splitlines()) == 1
    assert f"'my model', as the one in {tmp_path / 'home' / 'models'}; rename it" in text


def test_home_that_cannot_be_written_still_serves_shipped_models(tmp_path: Path, repository: Path) -> None:
    """PENSTOCK_HOME under a file, a space in the repository's path and a broken model: each is reported, the rest is
    served, and a model that --models leaves out is not missed."""
    spaced = repository.rename(tmp_path / "my models")
    write_model(spaced, "broken", "raise ValueError('broken on purpose')\n", SLOW_CONFIG)
    (tmp_path / "file").write_text("")
    home, words = tmp_path / "file" / "home", ("--model-repository", str(spaced), "--models", "identity,broken")
    stack = start_stack(home, *words)
    try:
        assert is_serving(stack)
        stack.wait_for_log("no folder for pulled models")
        assert "serving identity\n" in stack.output
        (said,) = [line for line in stack.output if line.startswith("cannot serve")]
        assert said.startswith("cannot serve broken: ")
        assert "broken on purpose" in said
        assert "cannot be loaded" not in said  # said already
        assert call("GET", f"{stack.http_url}/v2/health/ready").status == 200
    finally:
        stop_stack(stack)


def test_folder_for_run_files_that_cannot_be_written_is_one_line(tmp_path: Path, triton_environment: Path) -> None:
    """No place for temporary files: one sentence with the fix."""
    (tmp_path / f"penstock-{os.getuid()}").write_text("a file where the folder should be")
    code, text = fails_to_start(tmp_path, *ANY_PORTS, environ={"TMPDIR": str(tmp_path)})
    assert code != 0
    assert len(text.splitlines()) == 1
    assert "TMPDIR" in text


def test_gateway_before_its_engine_becomes_ready_when_the_engine_comes(
    tmp_path: Path, triton_environment: Path
) -> None:
    """An engine given by URL that is not there yet: live 200, ready 503 with the reason; ready once it comes."""
    triton = BareTriton(tmp_path / "engine")
    url, engine_grpc = triton.addresses
    words = ("--engine", url, "--engine-grpc", engine_grpc, "--models", "brightness")
    late = start_stack(tmp_path / "late", *words, wait=False)
    try:
        port = late.wait_for_log("listening").split("http=")[1].split()[0]
        assert wait_for_answer(f"http://127.0.0.1:{port}/v2/health/ready") == 503
        late.wait_for_log(rf"waiting for the engine engine=.*{url} \(gRPC {engine_grpc}\).* reason=")
        assert call("GET", f"http://127.0.0.1:{port}/v2/health/live").status == 200
        triton.begin()
        wait_until_ready_at(late, f"http://127.0.0.1:{port}")
        wait_for(lambda: any(line.startswith("engine: triton ") for line in late.output), 5, "the engine's name")
        assert [line for line in late.output if re.fullmatch(rf"engine: triton \d+\.\d+\.\d+ at {url}\n", line)]
    finally:
        assert stop_stack(late) == 0
        triton.clean_up()


def wait_for_answer(url: str) -> int:
    wait_for(lambda: status_of(url) is not None, 15, f"an answer of {url}")
    return status_of(url) or 0


def status_of(url: str) -> int | None:
    try:
        return call("GET", url).status
    except OSError:
        return None


def wait_until_ready_at(stack: RunningStack, url: str) -> None:
    wait_for(lambda: status_of(f"{url}/v2/health/ready") == 200, 30, "ready")
