"""How a program that the launcher starts may change file modes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.engines.triton import launch as triton_launch

CHANGES = """
import json, os, sys
modes, handle = {}, os.open(sys.argv[1], os.O_CREAT | os.O_RDWR, 0o600)
for mode in (0o644, 0o666, 0o640, 0o400, 0o600):
    os.fchmod(handle, mode)
    modes[oct(mode)] = oct(os.fstat(handle).st_mode & 0o777)
print(json.dumps(modes))
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the filter is written for x86-64, as Triton's wheel is")
def test_program_of_the_launcher_cannot_open_its_files_to_other_users_by_fchmod(tmp_path: Path) -> None:
    """As for Triton's shared memory: the call succeeds without effect; private modes are set."""
    launcher = triton_launch.__file__
    ran = subprocess.run(
        [sys.executable, "-I", "-S", launcher, str(os.getpid()), sys.executable, "-c", CHANGES, str(tmp_path / "file")],
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert ran.stderr == b""
    assert json.loads(ran.stdout) == {
        "0o644": "0o600",
        "0o666": "0o600",
        "0o640": "0o600",
        "0o400": "0o400",
        "0o600": "0o600",
    }
