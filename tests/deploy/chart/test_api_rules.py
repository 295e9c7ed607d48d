"""What the API server refuses, or takes and does nothing with, though its schemas allow it."""

import itertools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.chart.objects import pods_of
from tests.deploy.chart.pod_security import Spec
from tests.deploy.chart.value_sets import NAMES, rendered

pytestmark = pytest.mark.xdist_group("chart")

QUANTITY = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?")
ENV_NAME = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")
CONFIG_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")


def quantities(value: object) -> Iterator[str]:
    """Everything that has to be a quantity."""
    if isinstance(value, list):
        for each in value:
            yield from quantities(each)
    if isinstance(value, dict):
        for key, each in value.items():
            if key in ("requests", "limits", "capacity") and isinstance(each, dict):
                yield from map(str, each.values())
            elif key in ("sizeLimit", "averageValue"):
                yield str(each)
            else:
                yield from quantities(each)


@pytest.mark.parametrize("name", NAMES)
def test_quantities_are_quantities(name: str) -> None:
    """Sizes, shares of CPU and an autoscaler's targets are numbers with units that Kubernetes knows."""
    found = list(quantities(list(rendered(name).objects)))
    assert found
    assert [each for each in found if not QUANTITY.fullmatch(each)] == []


@pytest.mark.parametrize("name", NAMES)
def test_lists_that_are_maps_have_each_key_once(name: str) -> None:
    """Variables, volumes, mounts and ports: the second of a name would be refused, or win without a word."""
    for pods in pods_of(rendered(name)):
        volumes = [each["name"] for each in pods.spec.get("volumes") or []]
        assert len(set(volumes)) == len(volumes), pods.name
        ports = [(each["containerPort"], each["name"]) for one in pods.containers for each in one.get("ports") or []]
        assert len({port for port, _ in ports}) == len({label for _, label in ports}) == len(ports), pods.name
        for container in pods.containers:
            names = [each["name"] for each in container.get("env") or []]
            assert len(set(names)) == len(names), (pods.name, container["name"])
            assert all(ENV_NAME.fullmatch(each) for each in names)


@pytest.mark.parametrize("name", NAMES)
def test_config_maps_have_keys_that_can_be_files(name: str) -> None:
    """Keys of letters, digits, dots and dashes; less than the API server's 1 MiB."""
    for each in rendered(name).of_kind("ConfigMap"):
        assert all(CONFIG_KEY.fullmatch(key) for key in each["data"])
        assert sum(len(text.encode()) for text in each["data"].values()) < 1 << 20


def probes(container: Spec) -> Iterator[dict[str, Any]]:
    """A container's probes."""
    yield from (each for key, each in container.items() if key.endswith("Probe"))


@pytest.mark.parametrize("name", NAMES)
def test_probes_have_time_to_answer(name: str) -> None:
    """A probe's timeout is not longer than its period, except for a command with a longer one of its own."""
    for pods in pods_of(rendered(name)):
        for container in pods.containers:
            for probe in probes(container):
                assert 1 <= probe.get("timeoutSeconds", 1) <= probe.get("periodSeconds", 10), container["name"]
                assert probe.get("failureThreshold", 3) >= 1


def scripts(name: str) -> dict[str, str]:
    """Every text that a shell is given, by its container."""
    found = {}
    for pods in pods_of(rendered(name)):
        for container in pods.containers:
            commands = [[*(container.get("command") or []), *(container.get("args") or [])]]
            commands += [probe["exec"]["command"] for probe in probes(container) if "exec" in probe]
            for at, words in enumerate(commands):
                after = [word for flag, word in itertools.pairwise(words) if re.fullmatch(r"-[eu]*c", flag)]
                found |= {f"{container['name']}-{at}": str(after[0])} if after and "python" not in words else {}
    return found


@pytest.mark.parametrize("name", NAMES)
def test_scripts_are_ones_that_a_shell_reads(name: str, tmp_path: Path) -> None:
    """`sh -n` takes every script that a container or a probe is given."""
    for where, text in scripts(name).items():
        path = tmp_path / f"{where}.sh"
        path.write_text(f"#!/bin/sh\n{text}\n")
        assert subprocess.run(["sh", "-n", path], check=False, timeout=20).returncode == 0, text
