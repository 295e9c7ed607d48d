"""`python -m penstock.gateway SETTINGS_FILE CONTROL_FD [core | front-N]`: the gateway, or its core or a worker."""

import gc
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from penstock.process import remove_working_directory

EXIT_CANNOT_START = 78  # EX_CONFIG of sysexits.h: the parent does not retry


def main() -> int:
    """Exit code of the gateway."""
    remove_working_directory()
    os.umask(0o077)  # files of this process and its children may contain clients' data
    gc.disable()  # imports create objects that stay: collections find nothing to free, but cost CPU
    from penstock.gateway.grpc.server import AddressTaken
    from penstock.gateway.main import CoreOptions, run_gateway
    from penstock.gateway.settings import Settings
    from penstock.gateway.worker import WorkerOptions, run_worker
    from penstock.gateway.workers.gateway_process import CORE, FRONT
    from penstock.gateway.workers.running_stacks import reachable_folder
    from penstock.logs import PROCESS_VARIABLE, also_log_to_stack, configure_logs, get_logger
    from penstock.network import PortTaken
    from penstock.protocol.extensions import ExtensionError

    gc.freeze()
    gc.enable()
    settings = Settings.model_validate_json(Path(sys.argv[1]).read_text())
    configure_logs(settings.log_format, settings.log_level)
    also_log_to_stack(os.environ.get(PROCESS_VARIABLE, "gateway"))
    control_end = socket.socket(fileno=int(sys.argv[2]))
    os.set_inheritable(control_end.fileno(), False)
    part = sys.argv[3] if len(sys.argv) > 3 else ""
    run_dir = reachable_folder(Path(sys.argv[1]).absolute().parent)
    try:
        if part.startswith(FRONT):
            return run_worker(settings, control_end, WorkerOptions(int(part.removeprefix(FRONT)), run_dir))
        return run_gateway(settings, control_end, CoreOptions(run_dir, has_workers=part == CORE))
    except (PortTaken, AddressTaken, ExtensionError) as error:
        get_logger("gateway").error("cannot start", reason=str(error))
        return EXIT_CANNOT_START
    except Exception:  # noqa: BLE001 - the process's root: the parent starts another one
        get_logger("gateway").exception("gateway failed")
        return 1


def exit_now(code: int) -> NoReturn:
    """Exits without waiting for threads, because one inside an engine call may never end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    exit_now(main())
