"""What stays together under `make test`: the tests of one `xdist_group`, or else of one file, on one worker.

xdist's own `loadgroup` tells the groups to its scheduler by the end of a test's id, where pytest 9.2 no longer lets it
write: every test went anywhere, and every worker started every stack (pytest-xdist's issue 1386).
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# Those of half a minute and more, roughly as long as they take: started first, so that none is left at the end.
LONGEST_FIRST = (
    "stack",
    "video",
    "video-own-engine",
    "client-stack",
    "embedded",
    "own-rows",
    "ledgers",
    "workers",
    "add-model",
    "console",
    "own_engines",
    "tests/integration/test_openapi.py",
    "tests/integration/test_stop.py",
    "tests/integration/test_deaths.py",
    "prometheus",
    "tests/integration/test_rolling_restart.py",
    "gateway_is_triton",
    "tests/loadtest/test_locustfile.py",
    "shared_memory",
    "tests/integration/test_start.py",
    "tests/packaging/test_wheel.py",
    "wire",
    "access",
    "streams",
    "wire-stacks",
    "tests/deepstream_pipeline/sinks/test_broker_faults.py",
)


@cache
def unit_of(rootdir: Path, path: str) -> str:
    """The group that the file's `pytestmark` names, or the file."""
    named = re.search(r'^pytestmark = .*\bxdist_group\("([^"]+)"\)', (rootdir / path).read_text(), re.MULTILINE)
    return named[1] if named else path


class WorkUnits(LoadScopeScheduling):
    """Hands out whole units, the longest first."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(self.config.rootpath, nodeid.split("::", 1)[0])

    def _assign_work_unit(self, node: Any) -> None:
        next_unit = next((unit for unit in LONGEST_FIRST if unit in self.workqueue), None)
        if next_unit:
            self.workqueue.move_to_end(next_unit, last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> WorkUnits:
    """What hands the tests out, as xdist asks for it."""
    return WorkUnits(config, log)
