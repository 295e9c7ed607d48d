"""Models of the catalogue in a home, from the files beside the checkout."""

from pathlib import Path

from typer.testing import CliRunner

from penstock.cli import models as models_command
from tests.support.stack import CHECKOUT

SOURCE = CHECKOUT.parent / "shared" / "models"
UNUSED_URL = "http://127.0.0.1:9"


def pull_model(home: Path, name: str = "fastestdet") -> None:
    """`penstock models pull` in this process, of a user who has the file and no gateway."""
    words = ["pull", name, "--from", str(SOURCE), "--url", UNUSED_URL]
    done = CliRunner().invoke(models_command.app, words, env={"PENSTOCK_HOME": str(home)})
    assert done.exit_code == 0, done.output
