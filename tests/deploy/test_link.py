"""The command that `make` puts into the environment."""

import signal
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
SAYS_ITS_ARGUMENTS = "import sys\n\ndef main():\n    print(sys.argv[1:])\n    return 3\n"


IMPORTS_FOR_LONG = "import time\n\nprint('importing', flush=True)\ntime.sleep(60)\n"


def linked_command(checkout: Path, cli: str) -> Path:
    """The command of a checkout whose server/penstock/cli/main.py is the given text, in an environment of its own."""
    for name in ("requirements", "server/penstock/cli"):
        (checkout / name).mkdir(parents=True)
    for name in ("requirements/link.py", "pyproject.toml"):
        (checkout / name).write_text((CHECKOUT / name).read_text())
    (checkout / "server" / "penstock" / "cli" / "main.py").write_text(cli)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", checkout / ".venv"], check=True, timeout=60)
    subprocess.run([checkout / ".venv/bin/python", checkout / "requirements/link.py"], check=True, timeout=60)
    return checkout / ".venv/bin/penstock"


@pytest.mark.parametrize("folder", ["my projects", "deep" * 40])
def test_command_runs_wherever_the_checkout_lies(tmp_path: Path, folder: str) -> None:
    """A path that no #! line could hold is fine too; arguments and exit code pass unchanged."""
    command = linked_command(tmp_path / folder, SAYS_ITS_ARGUMENTS)
    done = subprocess.run([command, "infer", "a b.jpg"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (3, "['infer', 'a b.jpg']\n"), done.stderr


def test_link_gives_the_environment_the_metadata_of_the_package(tmp_path: Path) -> None:
    """Version and entry points are pyproject.toml's, and pip can uninstall what was linked, also when linked again."""
    command = linked_command(tmp_path / "checkout", SAYS_ITS_ARGUMENTS)
    subprocess.run([command.parent / "python", tmp_path / "checkout/requirements/link.py"], check=True, timeout=60)
    (folder,) = (command.parent.parent / "lib").glob("python*/site-packages")
    (linked,) = distributions(name="penstock", path=[str(folder)])
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    assert linked.version == project["version"]
    assert {entry.name for entry in linked.entry_points if entry.group == "penstock.commands"} == {"video", "load"}
    assert command in {Path(str(linked.locate_file(path))).resolve() for path in linked.files or ()}


def test_command_interrupted_amid_its_imports_ends_without_a_traceback(tmp_path: Path) -> None:
    """Ctrl-C in the first half second is no crash."""
    command = linked_command(tmp_path / "checkout", IMPORTS_FOR_LONG)
    with subprocess.Popen([command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (-signal.SIGINT, "")
