"""What CI runs: the contributor's own commands, and an honest exit code."""

import os
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPT = CHECKOUT / ".ci" / "run"


def run_with(tmp_path: Path, **programs: str) -> tuple[int, list[str], str]:
    """Runs a copy of the script with stand-ins for the named programs; (exit code, the calls of these, stderr).

    Each stand-in writes its name and arguments down, then runs the given line of shell.
    """
    (tmp_path / "bin").mkdir()
    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci" / "run"
    script.write_text(SCRIPT.read_text().replace("/usr/sbin/policy-rc.d", str(tmp_path / "policy-rc.d")))
    script.chmod(0o755)
    for name, line in programs.items():
        program = tmp_path / "bin" / name.replace("_", "-")
        program.write_text(f'#!/bin/bash\necho "$(basename $0) $*" >>"{tmp_path}/calls"\n{line}\n')
        program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    answer = subprocess.run([script], env=environment, capture_output=True, text=True, timeout=60, check=False)
    calls = tmp_path / "calls"
    return answer.returncode, calls.read_text().splitlines() if calls.exists() else [], answer.stderr


INSTALLED = {"dpkg_query": "echo -n installed"}
MISSING = {"dpkg_query": "echo -n not-installed", "apt_get": ":"}


def test_ci_runs_the_contributors_commands_in_order(tmp_path: Path) -> None:
    """`make check`, then `make test`; on a machine that has everything, nothing is installed."""
    code, calls, _ = run_with(tmp_path, make=":", apt_get="exit 9", **INSTALLED)
    assert code == 0
    assert [call for call in calls if not call.startswith("dpkg-query")] == ["make check", "make test"]


@pytest.mark.parametrize("target", ["check", "test"])
def test_ci_with_a_failing_target_fails(tmp_path: Path, target: str) -> None:
    """The exit code is that of what failed."""
    code, _, _ = run_with(tmp_path, make=f"[[ $1 != {target} ]] || exit 3", apt_get=":", **INSTALLED)
    assert code == 3


def test_ci_with_a_failing_installation_fails(tmp_path: Path) -> None:
    """A package that cannot be had is no reason to go on as if it were there."""
    code, calls, _ = run_with(tmp_path, make=":", id="echo 0", dpkg_query="echo -n no", apt_get="exit 100")
    assert code == 100
    assert "make check" not in calls


def test_ci_as_root_installs_what_is_missing_and_starts_no_service(tmp_path: Path) -> None:
    """promtool's package is installed, while a policy forbids services to start; the policy does not stay."""
    policy = tmp_path / "policy-rc.d"
    apt = f'[[ $* != *" install "* ]] || grep -q "exit 101" {policy}'
    code, calls, stderr = run_with(tmp_path, make=":", id="echo 0", dpkg_query="echo -n no", apt_get=apt)
    assert code == 0, stderr
    (install, *_) = [call for call in calls if " install " in call]
    assert {"make", "git", "curl", "procps", "prometheus"} <= set(install.split())
    assert "--no-install-recommends" in install
    assert not policy.exists()


def test_ci_without_root_says_what_is_missing_and_goes_on(tmp_path: Path) -> None:
    """A developer's machine is not asked for its password."""
    code, calls, stderr = run_with(tmp_path, make=":", id="echo 1000", **MISSING)
    assert code == 0
    assert "not root" in stderr
    assert "prometheus" in stderr
    assert not [call for call in calls if call.startswith("apt-get")]
