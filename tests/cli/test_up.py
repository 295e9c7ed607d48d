"""`penstock up` before it starts anything."""

import os
import subprocess
import sys

import pytest

from penstock.cli import up
from penstock.cli.up import announce
from penstock.gateway.stack.stack import Announcement
from penstock.gateway.stack.startup import CannotStart
from tests.support.stack import CHECKOUT

RAISES = """
import resource, sys
from penstock.cli.up import allow_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
allow_open_files()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def limits_after(soft: int, hard: int) -> list[str]:
    """The limits of open files of a process that began with these and allowed itself more."""
    done = subprocess.run(
        [sys.executable, "-c", RAISES, str(soft), str(hard)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.split()


def test_open_files_of_a_usual_shell_are_raised_to_the_hard_limit() -> None:
    """1,024 requests in flight hold more than the 1,024 files that most shells start with."""
    assert limits_after(1024, 4096) == ["4096", "4096"]


@pytest.mark.parametrize(("workers", "suffix"), [(1, ""), (2, "  (2 workers)")])
def test_ready_line_says_how_many_workers_serve_where_there_is_more_than_one(
    capsys: pytest.CaptureFixture[str], workers: int, suffix: str
) -> None:
    """The last line that a person reads, behind the addresses that a program reads."""
    announce(Announcement("Triton 2.58", "http://a:1", "a:2", "http://a:3/metrics", ("m",), {}, workers))
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == f"ready: REST http://a:1  gRPC a:2  metrics http://a:3/metrics{suffix}"
    )


def test_gateway_whose_required_models_do_not_serve_is_not_called_ready(capsys: pytest.CaptureFixture[str]) -> None:
    """The reason is on a separate line."""
    announce(Announcement("Triton", "http://a:1", "a:2", "http://a:3/metrics", ("m",), {}, not_ready="model 'n'"))
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "health checks fail: model 'n'",
        "not ready: REST http://a:1  gRPC a:2  metrics http://a:3/metrics",
    ]


def test_keys_of_the_environment_are_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the gateway's nor the one with which commands beside it ask: Triton's Python models could read them."""

    def stop(*_: object) -> None:
        raise CannotStart("here")

    monkeypatch.setenv("PENSTOCK_API_KEYS", "ops:admin:" + "x" * 20)
    monkeypatch.setenv("PENSTOCK_API_KEY", "x" * 20)
    monkeypatch.setattr(up, "check_access", stop)
    monkeypatch.setattr(up, "configure_logs", lambda *_: None)
    with pytest.raises(CannotStart):
        up._serve(dict.fromkeys(("models", "required_models", "anonymous", "batching", "model_repository")), None)
    assert not [name for name in os.environ if name.startswith("PENSTOCK_API_KEY")]
