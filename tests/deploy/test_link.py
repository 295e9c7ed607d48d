"""The command that `make` puts into the environment."""

import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
SAYS_ITS_ARGUMENTS = "import sys\n\ndef main():\n    print(sys.argv[1:])\n    return 3\n"


@pytest.mark.parametrize("folder", ["plain", "my projects", "deep" * 40])
def test_command_runs_wherever_the_checkout_lies(tmp_path: Path, folder: str) -> None:
    """A path that no #! line could hold is fine too; arguments and exit code pass unchanged."""
    checkout = tmp_path / folder
    for name in ("requirements", "server"):
        (checkout / name).mkdir(parents=True)
    (checkout / "requirements" / "link.py").write_text((CHECKOUT / "requirements" / "link.py").read_text())
    (checkout / "server" / "cli.py").write_text(SAYS_ITS_ARGUMENTS)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", checkout / ".venv"], check=True, timeout=60)
    subprocess.run([checkout / ".venv/bin/python", checkout / "requirements/link.py"], check=True, timeout=60)
    done = subprocess.run(
        [checkout / ".venv/bin/penstock", "infer", "a b.jpg"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (3, "['infer', 'a b.jpg']\n"), done.stderr
