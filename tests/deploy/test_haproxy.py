"""The example for HAProxy: valid as it is given, and in step with the chart's drain."""

import subprocess
from pathlib import Path

from tests.integration.balancer import check_interval_s, example_for, haproxy
from tests.integration.replicas import chart_drain


def test_haproxy_takes_the_example_without_a_warning(tmp_path: Path) -> None:
    """With addresses that are known; every directive is one that Debian's version knows."""
    file = tmp_path / "haproxy.cfg"
    addresses = [("127.0.0.1:1", "127.0.0.1:2"), ("127.0.0.1:3", "127.0.0.1:4")]
    file.write_text(example_for(addresses, 5, 6, check_interval_ms=1000))
    done = subprocess.run([haproxy(), "-c", "-f", file], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, "WARNING" in done.stderr) == (0, False), done.stderr
    assert "valid" in done.stdout


def test_haproxy_notices_a_drain_before_the_chart_ends_it() -> None:
    """The checks that take a gateway out are over, answers included, with time to spare."""
    seconds, fall = check_interval_s()
    assert (seconds * fall) * 2 <= chart_drain(1).delay_s
