"""What holds of every pod that the chart makes, whatever the values: its rights, its limits, its images, its mounts."""

import re
from collections.abc import Iterator

import pytest

from tests.deploy.chart.objects import Pods, pods_of
from tests.deploy.chart.pod_security import violations
from tests.deploy.chart.rendering import render
from tests.deploy.chart.value_sets import NAMES, SETS, merged, rendered

pytestmark = pytest.mark.xdist_group("chart")

DIGEST = "sha256:" + "ab" * 32
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def size_bytes(quantity: str | int) -> float:
    """Kubernetes' quantity in bytes."""
    number, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(quantity)).groups()  # type: ignore[union-attr]
    return float(number) * UNITS[unit]


@pytest.mark.parametrize("name", NAMES)
def test_pods_are_restricted_but_the_mps_daemons(name: str) -> None:
    """A namespace that enforces Pod Security `restricted` takes everything but the MPS DaemonSet, in every set."""
    found = {pods.name: violations(pods.template) for pods in pods_of(rendered(name)) if pods.component != "mps"}
    assert {who: what for who, what in found.items() if what} == {}


def test_mps_daemon_goes_beyond_restricted_in_these_points_only() -> None:
    """What MPS by our own daemon needs is said to the word, so that more of it shows here. The daemon is not root."""
    (mps,) = (pods for pods in pods_of(rendered("mps-own")) if pods.component == "mps")
    assert mps.owner["kind"] == "DaemonSet"
    assert sorted(violations(mps.template)) == [
        "folders: capability CHOWN",
        "folders: runAsNonRoot is false",
        "folders: runAsNonRoot is not true",
        "folders: runAsUser is 0",
        "hostPID is true",
        "volume host is a hostPath",
    ]
    assert {each["name"] for each in mps.containers} == {"folders", "mps"}


@pytest.mark.parametrize("name", NAMES)
def test_pods_have_no_token(name: str) -> None:
    """No pod can ask the API server; nor does the ServiceAccount hand out tokens by itself."""
    for pods in pods_of(rendered(name)):
        assert pods.spec.get("automountServiceAccountToken") is False, pods.name
        assert pods.spec.get("serviceAccountName"), pods.name
    for account in rendered(name).of_kind("ServiceAccount"):
        assert account.get("automountServiceAccountToken") is False


@pytest.mark.parametrize("name", NAMES)
def test_containers_ask_for_what_they_need_and_are_limited_in_memory(name: str) -> None:
    """Requests of CPU and memory and a limit of memory, init containers as well; no limit is below its request.

    The MPS daemon alone has no limit: with it all of its clients would end.
    """
    for pods in pods_of(rendered(name)):
        for container in (each for each in pods.containers if each["name"] != "mps"):
            resources = container.get("resources") or {}
            requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
            assert {"cpu", "memory"} <= requests.keys(), (pods.name, container["name"])
            assert "memory" in limits, (pods.name, container["name"])
            assert size_bytes(requests["memory"]) <= size_bytes(limits["memory"])


@pytest.mark.parametrize("name", NAMES)
def test_containers_write_nowhere_but_in_their_volumes(name: str) -> None:
    """Read-only roots, one unprivileged user for all, every volume mounted once at least, none that is not there."""
    for pods in pods_of(rendered(name)):
        volumes = {each["name"] for each in pods.spec.get("volumes") or []}
        claims = {each["metadata"]["name"] for each in pods.owner.get("spec", {}).get("volumeClaimTemplates") or []}
        mounts = [mount for each in pods.containers for mount in each.get("volumeMounts") or []]
        assert {mount["name"] for mount in mounts} == volumes | claims, pods.name
        for container in pods.containers:
            paths = [mount["mountPath"] for mount in container.get("volumeMounts") or []]
            assert len(set(paths)) == len(paths), (pods.name, container["name"])
            context = {**(pods.spec.get("securityContext") or {}), **(container.get("securityContext") or {})}
            assert context.get("readOnlyRootFilesystem") is True, (pods.name, container["name"])
            ids = (context.get("runAsUser"), context.get("runAsGroup"))
            assert ids == (10001, 10001) or container["name"] == "folders", pods.name


@pytest.mark.parametrize("name", NAMES)
def test_memory_of_volumes_is_bounded_and_within_the_limits(name: str) -> None:
    """Every emptyDir has a size; those in memory count against the limits, and fit."""
    for pods in pods_of(rendered(name)):
        empty = [each["emptyDir"] for each in pods.spec.get("volumes") or [] if "emptyDir" in each]
        assert all("sizeLimit" in each for each in empty), pods.name
        in_memory = sum(size_bytes(each["sizeLimit"]) for each in empty if each.get("medium") == "Memory")
        limits = [each["resources"].get("limits", {}).get("memory", "1Ti") for each in pods.containers]
        assert in_memory < sum(map(size_bytes, limits)), pods.name


def images(pods: list[Pods]) -> Iterator[str]:
    """Every image of every container."""
    yield from (container["image"] for each in pods for container in each.containers)


def given_whole(name: str) -> set[str]:
    """The images that a set names with their registry: a user's own, not ours."""
    models = SETS[name].get("models", {})
    return {models.get("ociImage", {}).get("reference", ""), models.get("git", {}).get("image", "")}


@pytest.mark.parametrize("name", NAMES)
def test_images_have_the_registry_the_digest_and_the_pull_secrets_that_are_said(name: str) -> None:
    """image.registry stands before every image of ours, a digest wins over its tag, pull secrets reach every pod."""
    pinned = {"image": {"digest": DIGEST, "tag": "never"}}
    image = {"registry": "mirror.example.net:5000/x", "pullSecrets": ["one", "two"]}
    done = render(merged(SETS[name], {"image": image, "gateway": pinned, "triton": pinned, "video": pinned}))
    for found in set(images(pods_of(done))) - given_whole(name):
        assert re.fullmatch(rf"mirror\.example\.net:5000/x/penstock(-[a-z]+)?@{DIGEST}", found), found
    for pods in pods_of(done):
        assert pods.spec.get("imagePullSecrets") == [{"name": "one"}, {"name": "two"}], pods.name


def test_tag_of_all_images_is_the_charts_version_unless_said() -> None:
    """No tag said: the appVersion, with Triton's release behind it; image.tag: that one; an image's own tag wins."""

    def tags(values: dict[str, object]) -> set[str]:
        return {image.rpartition(":")[2] for image in images(pods_of(render(merged(SETS["t4"], values))))}

    assert tags({}) == {"0.1.0", "0.1.0-26.07"}
    assert tags({"image": {"tag": "9"}}) == {"9", "9-26.07"}
    assert tags({"gateway": {"image": {"tag": "a"}}, "triton": {"image": {"tag": "b"}}}) == {"a", "b"}
