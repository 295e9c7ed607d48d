"""Under `make test`, tests that fail are retried once: at the end, by themselves, and with a report.

The tests run real servers on machines that stall at times, so a run may lose one of fourteen thousand to timing. A
fault of the product seldom disappears when its test runs alone, and not in tests of six files.
"""

import subprocess
import sys

import pytest

FILES = 5


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> object:
    """Reruns failed tests once, after the summary that names them; the run passes if they pass."""
    result = yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.exitstatus != pytest.ExitCode.TESTS_FAILED or not reporter:
        return result
    reports = [*reporter.stats.get("failed", []), *reporter.stats.get("error", [])]
    failed = list(dict.fromkeys(report.nodeid for report in reports))
    files = {name.partition("::")[0] for name in failed}
    if len(files) > FILES:
        reporter.write_line(f"\ntests of {len(files)} files failed; of up to {FILES} they are tried again", red=True)
        return result
    reporter.write_line(f"\nsecond try of {len(failed)} by themselves:")
    sys.stdout.flush()
    again = subprocess.run([sys.executable, "-m", "pytest", "-rA", "--show-capture", "no", *failed], check=False)
    session.exitstatus = again.returncode
    return result
