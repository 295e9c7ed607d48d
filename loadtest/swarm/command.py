"""The command line of locust for a scenario, with defaults that open nothing to other machines."""

import math
from pathlib import Path

LOCUSTFILE = Path(__file__).parent.parent / "locustfile.py"
LOOPBACK = "127.0.0.1"
WEB_PORT = 8089


def locust_arguments(
    scenario: str,
    *,
    target: str = "http://127.0.0.1:8000",
    capacity_per_s: float | None = None,
    headless: bool = False,
    workers: int = 0,
    web_port: int = WEB_PORT,
) -> list[str]:
    """What follows `python -m locust`. workers: processes that ask, on this machine; 0: locust itself asks.

    Without headless the web page waits on the loopback for somebody to start the scenario. Raises ValueError for a
    number that cannot be.
    """
    if workers < 0 or not 0 < web_port < 65536:
        raise ValueError(f"--workers {workers} --web-port {web_port}: 0 or more workers, a port from 1 to 65535")
    if capacity_per_s is not None and not 0 < capacity_per_s < math.inf:
        raise ValueError(f"--capacity {capacity_per_s:g}: requests a second, above 0")
    arguments = ["-f", str(LOCUSTFILE), "--host", target, "--scenario", scenario]
    if capacity_per_s is not None:
        arguments += ["--capacity", f"{capacity_per_s:g}"]
    if workers:
        arguments += ["--processes", str(workers), "--master-bind-host", LOOPBACK]
    if headless:
        return [*arguments, "--headless", "--only-summary"]
    return [*arguments, "--web-host", LOOPBACK, "--web-port", str(web_port)]
