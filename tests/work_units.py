"""What stays together under `make test`: the tests of one `xdist_group`, or else of one file, on one worker.

xdist's own `loadgroup` tells the groups to its scheduler by the end of a test's id, where pytest 9.2 no longer lets it
write: every test went anywhere, and every worker started every stack (pytest-xdist's issue 1386).
"""

import re
from collections import defaultdict
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# Those of a dozen seconds and more, roughly as long as they take: started first, so that none is left at the end.
LONGEST_FIRST = (
    "stack",
    "console",
    "add-model",
    "added",
    "tests/models/inspect/test_mutants.py",
    "video",
    "embedded",
    "client-stack",
    "workers",
    "tests/integration/test_openapi.py",
    "load-trial",
    "video-own-engine",
    "own-rows",
    "ledgers",
    "own_engines",
    "shared_memory",
    "model_faults",
    "tests/integration/test_stop.py",
    "tests/integration/test_deaths.py",
    "prometheus",
    "tests/integration/test_rolling_restart.py",
    "gateway_is_triton",
    "tests/models/inspect/test_torch_files.py",
    "tests/models/inspect/test_hostile_files.py",
    "docs",
    "tests/cli/test_add_process.py",
    "tests/integration/test_video_beside.py",
    "tests/test_architecture.py",
    "tests/models/optimize/test_added.py",
    "contract",
    "wire",
    "tests/models/inspect/test_inspection.py",
    "tests/deepstream_pipeline/decode/test_decoder.py",
    "chart",
    "tests/loadtest/test_locustfile.py",
    "tests/cli/test_completion.py",
    "tests/integration/test_start.py",
    "tests/packaging/test_wheel.py",
    "streams",
    "access",
    "wire-stacks",
    "tests/integration/test_clock_and_cpu.py",
    "tests/deepstream_pipeline/sources/test_decode_hosts.py",
    "tests/models/inspect/test_anchor_rows.py",
    "tests/models/inspect/test_real_files.py",
    "tests/deepstream_pipeline/sinks/test_broker_faults.py",
    "tracing",
    "engine_faults",
    "relayed-pictures",
    "tests/integration/test_plain_loads.py",
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


class UnitFixtures:
    """Ends a session's fixtures with the last test of the one unit that uses them. Nothing breaks if tests are mixed:
    the next test that needs such a fixture makes it again."""

    def __init__(self, session: pytest.Session) -> None:
        self._rootdir = session.config.rootpath
        units = defaultdict[Any, set[str]](set)
        for item in session.items:
            for found in getattr(item, "_fixtureinfo").name2fixturedefs.values():  # noqa: B009 - private to pytest
                if found[-1].scope == "session":
                    units[found[-1]].add(self._unit_of(item))
        self._of_unit = defaultdict[str, list[Any]](list)
        for fixture, users in units.items():
            if len(users) == 1:
                self._of_unit[users.pop()].append(fixture)

    def _unit_of(self, item: pytest.Item) -> str:
        return unit_of(self._rootdir, item.nodeid.split("::", 1)[0])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
        """After the test's own teardown."""
        yield
        unit = self._unit_of(item)
        if nextitem is not None and self._unit_of(nextitem) != unit:
            for fixture in self._of_unit[unit]:
                fixture.finish(getattr(item, "_request"))  # noqa: B009 - private to pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    """The tests of the units are known."""
    session.config.pluginmanager.register(UnitFixtures(session))
