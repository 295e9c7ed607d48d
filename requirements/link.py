"""Put this checkout and its command `penstock` into the environment that runs this, without a build step."""

import sysconfig
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


if __name__ == "__main__":
    main()
