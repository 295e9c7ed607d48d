"""Constant metrics: version, limits, and the MPS daemon's health if there is one."""

import socket
from pathlib import Path

from penstock import VERSION
from penstock.gateway.settings_sources import read_settings
from penstock.gateway.telemetry_parts import constant_readers


def test_readers_tell_the_version_and_the_limits_that_were_set() -> None:
    """How near a gateway is to its limit can be computed from its page alone."""
    readers = constant_readers(
        read_settings({"max_inflight_requests": 7, "max_inflight_bytes": 1 << 20}, environ={}), environment={}
    )
    assert {name: read() for name, read in readers.items()} == {
        "build_info": {(VERSION,): 1.0},
        "max_inflight_requests": 7,
        "max_inflight_bytes": 1 << 20,
    }


def test_readers_tell_of_the_mps_daemon_only_where_its_pipes_are_named(tmp_path: Path) -> None:
    """A gateway without CUDA_MPS_PIPE_DIRECTORY has no mps_up; with it, 0 until a daemon listens there."""
    settings = read_settings({}, environ={})
    assert constant_readers(settings, environment={"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)})["mps_up"]() == 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
        control.bind(str(tmp_path / "control"))
        control.listen()
        assert constant_readers(settings, environment={"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)})["mps_up"]() == 1
