"""How the open files of a process are divided among its ports."""

import pytest

from penstock.gateway.composition import connection_limits, grpc_limits, metrics_limits, port_limits
from penstock.gateway.settings_sources import SettingsError, read_settings


@pytest.mark.parametrize("open_files", [512, 1024, 4096, 65_536])
@pytest.mark.parametrize("workers", [1, 4])
def test_full_ports_leave_descriptors_for_everything_else(open_files: int, workers: int) -> None:
    """With all three ports full, a third of the open files is free, and one address never fills a port."""
    settings = read_settings({"workers": workers}, environ={})
    ports = port_limits(settings, open_files=open_files)
    rest, metrics = connection_limits(settings, ports), metrics_limits()
    grpc = grpc_limits(settings, ports).connections
    assert grpc is not None
    assert rest.max_connections + grpc.max_connections + metrics.max_connections <= open_files * 2 // 3
    for limits in (rest, grpc, metrics):
        assert limits.allowed_from("192.0.2.1") <= limits.max_connections // 2


def test_connections_are_what_the_settings_allow_where_files_are_plenty() -> None:
    """The settings apply to the whole gateway: each of two workers has half. A proxy may use a whole port."""
    flags = {"max_connections": 100, "max_connections_per_address": 20, "workers": 2, "trusted_proxy": ("10.0.0.0/8",)}
    limits = port_limits(read_settings(flags, environ={}), open_files=-1)
    assert (limits.max_connections, limits.allowed_from("192.0.2.1"), limits.allowed_from("10.9.9.9")) == (50, 10, 50)


def test_trusted_proxy_that_is_no_address_is_refused_at_start() -> None:
    """The message has the value and an example."""
    with pytest.raises(SettingsError, match=r"trusted_proxy.*'proxy.local'.*10\.0\.0\.0/24"):
        read_settings({"trusted_proxy": ("proxy.local",)}, environ={})
