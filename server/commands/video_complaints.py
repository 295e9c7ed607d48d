"""Settings that cannot be meant, as a command tells of them: every fault, a line each, on standard error."""

import sys
from typing import NoReturn

import typer

from deepstream_pipeline.settings.complaints import SettingsRefused
from server.commands.terminal import fail, one_line
from server.commands.video_watch import write_json


def refuse(refused: SettingsRefused, *, as_json: bool, code: int = 2) -> NoReturn:
    """Ends the command. as_json: the faults on standard output, for programs."""
    if as_json:
        faults = [{"where": fault.where, "text": fault.text} for fault in refused.complaints]
        write_json({"is_valid": False, "exit_code": code, "faults": faults})
        raise typer.Exit(code)
    lines = [one_line(str(fault)) for fault in refused.complaints]
    if len(lines) == 1:
        fail(lines[0], code=code)
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    fail(f"{len(lines)} faults in the settings", code=code)
