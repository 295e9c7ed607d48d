"""What an MPS daemon is started with, and what its clients need to find it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from server.gpu.mps.presence import PIPE_DIRECTORY

LOG_DIRECTORY = "CUDA_MPS_LOG_DIRECTORY"
LIMIT_VARIABLES = ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
PROTOCOL_VARIABLE = "CUDA_MPS_PROTOCOL_VERSION"  # of drivers that know a third one, with other commands, on request
OUR_PROTOCOL = "2"
VISIBLE_CARDS = "CUDA_VISIBLE_DEVICES"
LONGEST_DIRECTORY = 88  # bytes; a Unix socket's path has 107, and the longest one in there is /control_privileged


@dataclass(frozen=True, slots=True)
class MpsOptions:
    """directory: for the daemon's pipes and its log.

    active_thread_percentage: of a card's threads for a client, 1 to 100; 0 for no limit. pinned_memory: of a card's
    memory for a client, "4G", or by card "0=4G,1=2G"; empty for no limit. quit_s: what clients get to end in when the
    daemon is told to.
    """

    directory: Path
    active_thread_percentage: float = 0
    pinned_memory: str = ""
    start_s: float = 20.0
    quit_s: int = 5

    def env_vars(self) -> dict[str, str]:
        """What a process needs in its environment, before its first word with CUDA, to become a client."""
        return {PIPE_DIRECTORY: str(self.directory), LOG_DIRECTORY: str(self.directory / "logs")}

    def client_environ(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """A client's whole environment. inherited: that of the daemon.

        Cards that the daemon is shown by their numbers have new ones for its clients, from 0 on: who filters once more
        loses some.
        """
        environ = {**inherited, **self.env_vars()}
        if environ.get(VISIBLE_CARDS, "").replace(",", "").replace(" ", "").isdecimal():
            del environ[VISIBLE_CARDS]
        return environ

    def daemon_environ(self, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The daemon's whole environment. Limits are told to it instead, where it refuses a wrong one aloud."""
        environ = {**inherited, **self.env_vars(), PROTOCOL_VARIABLE: OUR_PROTOCOL}
        for variable in LIMIT_VARIABLES:
            environ.pop(variable, None)
        return environ
