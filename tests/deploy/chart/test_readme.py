"""The chart's README tells what can be done: presets, values, files and images are as it says."""

import re

import pytest
import yaml

from deploy.helm.readme import CHART
from tests.deploy.chart.objects import pods_of
from tests.deploy.chart.test_values import VALUES, keys
from tests.deploy.chart.value_sets import NAMES, PRESETS, SETS, preset, rendered

pytestmark = pytest.mark.xdist_group("chart")

DOCKERFILE = CHART.parents[1] / "docker" / "Dockerfile"
README = (CHART / "README.md").read_text()


def test_readmes_table_of_presets_is_what_they_install() -> None:
    """Each preset has a row, whose Triton is the one that it renders, and the waiver is said where there is one."""
    rows = {
        name: (cells[1].strip(), "waived" in cells[2])
        for names, *cells in (line.strip("|").split("|") for line in README.splitlines() if line.startswith("| `"))
        for name in re.findall(r"`(\w+)`", names)
        if (PRESETS / f"{name}.yaml").is_file()
    }
    assert set(rows) == {path.stem for path in PRESETS.glob("*.yaml")}
    for name, (release, is_waived) in rows.items():
        triton = preset(name).get("triton", {})
        assert triton.get("release", "bundled") == release, name
        assert triton.get("acceptKnownVulnerabilities", False) is is_waived, name


def test_readme_names_values_that_exist_and_files_that_are_there() -> None:
    """The values that the README names exist, and so do its links."""
    known = set(keys(yaml.safe_load(VALUES.read_text())))
    named = set(re.findall(r"--set(?:-json)? '?([\w.]+)=", README)) | set(re.findall(r"`((?:\w+\.)+\w+)`", README))
    parts = {each.partition(".")[0] for each in known}
    assert {each for each in named if each.partition(".")[0] in parts} <= known
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert [link for link in links if not (CHART / link).exists()] == []


def test_readmes_builds_are_stages_that_exist_and_images_that_the_chart_runs() -> None:
    """The README's build commands build and push every image that any kind of installation pulls."""
    builds = dict(re.findall(r"--target (\w+) .*?-t \$REGISTRY/([\w-]+):", README.replace("\\\n", "")))
    stages = set(re.findall(r"^FROM \S+ AS (\w+)", DOCKERFILE.read_text(), re.MULTILINE))
    assert set(builds) <= stages
    run = {container["image"] for name in NAMES for pods in pods_of(rendered(name)) for container in pods.containers}
    ours = {re.split("[:@]", image.rpartition("/")[2])[0] for image in run if "penstock" in image}
    assert set(builds.values()) == ours
    user = re.findall(r"^USER (\S+)", DOCKERFILE.read_text(), re.MULTILINE)
    assert user[-1] == "10001:10001"


def test_readme_names_every_topology_and_way_of_sharing() -> None:
    """No choice of the schema is left out of its table."""
    words = set(re.findall(r"`(?:mode: |provider: )?([\w-]+)`", README))
    topologies = {values.get("topology", "bundled") for values in SETS.values()}
    assert topologies | {"none", "time-slicing", "mps", "device-plugin", "own", "hpa", "keda"} <= words
