"""Install this checkout into the environment that runs this, for editing: import path, command, entry points.

It does without a build step, so it takes a moment and no package; pip can uninstall it, or install a wheel over it.
"""

import os
import shutil
import sysconfig
import tomllib
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
PROGRAMS = ("server", "deepstream_pipeline", "loadtest")  # the folders that hold our packages
# A shell starts the interpreter: a kernel's #! line takes no path with a space in it, and none over 127 bytes.
# Ctrl-C amid the imports ends it without a word; main() listens for it again.
COMMAND = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from penstock.cli.main import main

raise SystemExit(main())
"""


def main() -> None:
    scripts, packages = Path(sysconfig.get_path("scripts")), Path(sysconfig.get_path("purelib"))
    (packages / "penstock-checkout.pth").write_text("".join(f"{CHECKOUT / folder}\n" for folder in (*PROGRAMS, ".")))
    command = scripts / "penstock"
    command.write_text(COMMAND.format(python=scripts / "python"))
    command.chmod(0o755)
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    for former in packages.glob("penstock-*.dist-info"):
        shutil.rmtree(former)
    metadata = packages / f"penstock-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: penstock\nVersion: {project['version']}\n")
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    (metadata / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in rows.items())
            for group, rows in groups.items()
        )
    )
    written = [*metadata.iterdir(), metadata / "RECORD", packages / "penstock-checkout.pth", command]
    (metadata / "RECORD").write_text("".join(f"{os.path.relpath(path, packages)},,\n" for path in written))


if __name__ == "__main__":
    main()
