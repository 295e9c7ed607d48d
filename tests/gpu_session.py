"""A pytest plugin for `make test-gpu`: files by importance, a limit for each test and for all, and a table by file.

A GPU may be available for minutes. What it was not tried on is listed with its reason.

    python -m pytest -p tests.gpu_session -m gpu tests/gpu --most-s 60 --within-s 280
"""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

ORDER = (
    "test_onnx_gpu",
    "test_added_model_gpu",
    "test_torch_fusing_gpu",
    "test_torch_engine_gpu",
    "test_nvdec_gpu",
    "test_decode_processes_gpu",
    "test_pictures_gpu",
    "test_hand_over_gpu",
    "test_mps_gpu",
    "test_thread_limits_gpu",
    "test_mps_daemon_gpu",
    "test_cards_gpu",
    "test_video_engines",
    "test_device_rows_gpu",
    "test_encoders_gpu",
    "test_telemetry_gpu",
    "test_sentences_gpu",
    "test_bench_gpu_video",
    "test_bench_gpu",
)
_BEGAN_S = pytest.StashKey[float]()
_OUTCOMES = ("passed", "failed", "error", "skipped")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options for the two time limits."""
    group = parser.getgroup("gpu session")
    group.addoption("--most-s", type=float, default=120.0, help="seconds for each test with its fixtures [120]")
    group.addoption("--within-s", type=float, default=0.0, help="seconds after which no test begins [no limit]")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts the tests, and limits each."""
    items.sort(key=lambda item: rank(item.path))
    config.stash[_BEGAN_S] = time.monotonic()
    most_s = float(config.getoption("--most-s"))
    for item in items:
        item.add_marker(pytest.mark.timeout(most_s))  # wins over its module's


def rank(path: Path) -> int:
    """Place of a test file in ORDER; files that it lacks come first."""
    return ORDER.index(path.stem) if path.stem in ORDER else -1


def pytest_runtest_setup(item: pytest.Item) -> None:
    """No test begins after the time for all."""
    within_s = float(item.config.getoption("--within-s"))
    if within_s and time.monotonic() - item.config.stash[_BEGAN_S] > within_s:
        pytest.skip(f"not run: the {within_s:g} s for all tests are over")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table."""
    reports = [
        (outcome, report)
        for outcome in _OUTCOMES
        for report in terminalreporter.stats.get(outcome, [])
        if isinstance(report, pytest.TestReport)
    ]
    found = [(Path(report.location[0]).stem, outcome, report.duration) for outcome, report in reports]
    terminalreporter.section("by file")
    for line in table(found):
        terminalreporter.write_line(line)


def table(found: Sequence[tuple[str, str, float]]) -> list[str]:
    """A line a file, in ORDER. found: (file, outcome, seconds) of each test; set-ups that passed are not counted."""
    lines = []
    for file in sorted({one[0] for one in found}, key=lambda name: (rank(Path(name)), name)):
        counts = Counter(outcome for name, outcome, _ in found if name == file)
        seconds = sum(duration for name, _, duration in found if name == file)
        shown = ", ".join(f"{counts[outcome]} {outcome}" for outcome in _OUTCOMES if counts[outcome])
        lines.append(f"{file}: {shown}; {seconds:.0f} s")
    return lines
