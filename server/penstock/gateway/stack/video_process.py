"""Runs the video program as a child process of the stack."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from penstock.gateway.settings import Settings
from penstock.gateway.stack.side_process import SideProcess
from penstock.gateway.stack.startup import CannotStart
from penstock.gateway.workers.running_stacks import UP_CHILD

STOP_TIMEOUT_S = 20.0  # the video program drains decoded frames within 15 s
_NEEDED = ("penstock_video", "av", "trackers", "yaml")
_NOT_FOR_IT = ("PENSTOCK_API_KEY", "PENSTOCK_API_KEYS", "PENSTOCK_GATEWAY_URL")


def video_process(settings: Settings, run_dir: Path) -> SideProcess | None:
    """The video program's process, not started; None without one. It waits until the stack is ready.

    run_dir: of the stack, from whose settings it takes keys, TLS files and addresses. Raises CannotStart.
    """
    if not settings.video:
        return None
    if missing := [module for module in _NEEDED if find_spec(module) is None]:
        raise CannotStart(f"--video needs the package {missing[0]}: run pip install 'penstock[video]', or omit --video")
    config = settings.video_config
    if config is not None and not config.is_file():
        raise CannotStart(
            f"--video-config {config}: no such file; create it, or omit the flag to use {default_config(settings)}"
        )
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_IT}
    environment["PENSTOCK_HOME"] = str(settings.home_path.absolute())
    file = (config or default_config(settings)).absolute()
    # ends with this process, however that ends
    bond = (sys.executable, "-P", "-m", UP_CHILD, str(os.getpid()))
    command = (*bond, "video", "beside", str(run_dir.absolute()), str(file))
    return SideProcess("video program", command, environment=environment, stop_timeout_s=STOP_TIMEOUT_S)


def default_config(settings: Settings) -> Path:
    """The default settings file of the video program, which is created on first use."""
    return settings.home_path / "video.yaml"
