"""The built site, which the tests of the documentation look at."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.stack import CHECKOUT


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A strict build fails for a link or an anchor that leads nowhere."""
    folder = tmp_path_factory.mktemp("site")
    command = [Path(sys.executable).parent / "mkdocs", "build", "-q", "-d", folder]
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=CHECKOUT, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder
