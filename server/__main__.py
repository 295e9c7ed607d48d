"""The gateway process: `python -m server SETTINGS_FILE CONTROL_FD [core | front-N]`, started by the stack's parent.

The third argument says which part of a gateway of several processes this is; without it, it is all of the gateway.
"""

import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from server.core.library_path import leave_working_directory_out
from server.front import Seat, run_front
from server.grpc.server import AddressTaken
from server.local.gateway_process import CORE, FRONT
from server.local.socket_folder import reachable
from server.logs import configure_logs, get_logger
from server.main import Place, run_gateway
from server.rest.listener import PortTaken
from server.settings import Settings

EXIT_CANNOT_START = 78  # sysexits' EX_CONFIG: the parent does not try again


def main() -> int:
    """The gateway's exit code."""
    leave_working_directory_out()
    os.umask(0o077)  # files that it or its children write may contain clients' data
    settings = Settings.model_validate_json(Path(sys.argv[1]).read_text())
    configure_logs(settings.log_format, settings.log_level)
    control_end = socket.socket(fileno=int(sys.argv[2]))
    os.set_inheritable(control_end.fileno(), False)
    part = sys.argv[3] if len(sys.argv) > 3 else ""
    run_dir = reachable(Path(sys.argv[1]).absolute().parent)
    try:
        if part.startswith(FRONT):
            return run_front(settings, control_end, Seat(int(part.removeprefix(FRONT)), run_dir))
        return run_gateway(settings, control_end, Place(run_dir, has_fronts=part == CORE))
    except (PortTaken, AddressTaken) as error:
        get_logger("gateway").error("cannot start", reason=str(error))
        return EXIT_CANNOT_START
    except Exception:  # noqa: BLE001 - the process's root: the parent starts another one
        get_logger("gateway").exception("gateway failed")
        return 1


def end(code: int) -> NoReturn:
    """Without waiting for threads: everything is closed, and one inside an engine's node may take for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    end(main())
