"""A test that fails gets one second try under `make test`, said aloud; more than a few of them fail the run.

The tests run real servers on machines that stand still at times, so of five thousand a run may lose one to the clock.
A fault of the product seldom is gone at the second try, and not in four tests of one run.
"""

import pytest

SECOND_TRIES = 3


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a run in which more than SECOND_TRIES tests passed only when tried again."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    tried_again = reporter.stats.get("rerun", []) if reporter else []
    if len(tried_again) > SECOND_TRIES:
        reporter.write_line(f"\n{len(tried_again)} tests were tried again; up to {SECOND_TRIES} may be", red=True)
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
