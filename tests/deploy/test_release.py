"""What a release is made of: notes, versions that agree, bills of materials, the list of images."""

import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from deploy.release.images import IMAGES, RUNNER, TRITON_RELEASES, Image, build_matrix
from deploy.release.notes import NoNotesError, notes_of
from deploy.release.sbom import PYTHON, TRITON_VERSION, bill_of, components_of
from deploy.release.versions import CHECKOUT, disagreements, project_version, versions
from penstock.gpu import triton_images as advice
from tests.deploy.test_container import inherited, stages

CHANGELOG = """# Changelog

## [Unreleased]

### Added

- what comes

## [0.2.0] - 2026-11-22

### Fixed

- what broke

## [0.1.5] - 2026-13-40

- x

## [0.1.1]

- y

## [0.1.0] - 2026-01-01

[0.1.0]: https://example.org/compare
"""


def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """One of the modules, as a release runs it."""
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=CHECKOUT, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("version", "notes"), [("0.2.0", "### Fixed\n\n- what broke\n"), ("Unreleased", "### Added\n\n- what comes\n")]
)
def test_notes_of_a_version_are_its_section_alone(version: str, notes: str) -> None:
    """Neither the heading nor a neighbour's changes are in them; what is not released needs no date."""
    assert notes_of(version, CHANGELOG) == notes


@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        ("9.9.9", r"has no section \[9\.9\.9\], only Unreleased, 0\.2\.0, 0\.1\.5, 0\.1\.1, 0\.1\.0; write it first"),
        ("0.1.1", r"section \[0\.1\.1\] has no date; its heading looks like '## \[0\.1\.1\] - "),
        ("0.1.5", r"section \[0\.1\.5\] has the date '2026-13-40'; its heading looks like"),
        ("0.1.0", r"section \[0\.1\.0\] is empty; say what changed"),
    ],
)
def test_notes_that_are_not_there_are_refused_in_one_sentence(version: str, sentence: str) -> None:
    """A version without a section, a date or a change is no release."""
    with pytest.raises(NoNotesError, match=sentence):
        notes_of(version, CHANGELOG)


def test_notes_of_an_unknown_version_end_with_one_line() -> None:
    """The program fails with the sentence alone."""
    refused = run("deploy.release.notes", "9.9.9")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.count("\n") == 1
    assert "9.9.9" in refused.stderr


def test_versions_of_this_repository_agree() -> None:
    """The project, the chart, its application, the Dockerfile and the compose files say the same version."""
    assert disagreements(project_version()) == []
    places = {place.partition(",")[0] for place, _ in versions()}
    assert {"pyproject.toml", "server/penstock/__init__.py", "Chart.yaml", "Dockerfile"} <= places


@pytest.mark.parametrize(
    ("path", "old", "new", "sentence"),
    [
        ("pyproject.toml", 'version = "1.2.3"', 'version = "1.2.4"', "pyproject.toml, version is 1.2.4, not 1.2.3"),
        (
            "deploy/helm/penstock/Chart.yaml",
            "version: 1.2.3",
            "version: 2.0.0",
            "Chart.yaml, version is 2.0.0, not 1.2.3",
        ),
        ("deploy/helm/penstock/Chart.yaml", "appVersion: 1.2.3", 'appVersion: "1.2"', "appVersion is 1.2, not 1.2.3"),
        (
            "server/penstock/__init__.py",
            '"1.2.3"',
            '"1.2.2"',
            "server/penstock/__init__.py, VERSION is 1.2.2, not 1.2.3",
        ),
        ("deploy/docker/Dockerfile", "VERSION=1.2.3", "VERSION=1.2.2", "Dockerfile, ARG VERSION is 1.2.2, not 1.2.3"),
        ("compose.gpu.yaml", "penstock-triton:1.2.3", "penstock-triton:1.2.1", "image tag is 1.2.1, not 1.2.3"),
        ("compose.gpu.yaml", "${TAG:-1.2.3}", "${TAG:-1.1.1}", "image tag is 1.1.1, not 1.2.3"),
    ],
)
def test_version_that_disagrees_is_named_with_its_place(
    tmp_path: Path, path: str, old: str, new: str, sentence: str
) -> None:
    """Any one place that was forgotten is reported; the rest is accepted, other projects' images too."""
    files = {
        "pyproject.toml": '[project]\nversion = "1.2.3"\n',
        "server/penstock/__init__.py": '"""Ours."""\n\nVERSION = "1.2.3"  # as pyproject.toml has it\n',
        "deploy/helm/penstock/Chart.yaml": "version: 1.2.3\nappVersion: 1.2.3\n",
        "deploy/docker/Dockerfile": "ARG BASE=x\nARG VERSION=1.2.3\nARG VERSION=1.2.3\n",
        "compose.yaml": "services: {a: {image: 'penstock:latest'}, b: {image: 'prom/prometheus:v3'}, c: {build: .}}\n",
        "compose.gpu.yaml": (
            "services:\n  a: {image: 'penstock-triton:1.2.3-26.07'}\n"
            "  b: {image: 'registry.example/penstock-gateway:${TAG:-1.2.3}'}\n"
        ),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert disagreements("1.2.3", tmp_path) == []
    (tmp_path / path).write_text(files[path].replace(old, new, 1))
    (found,) = disagreements("1.2.3", tmp_path)
    assert sentence in found


@pytest.mark.parametrize(("tag", "code"), [(f"v{project_version()}", 0), ("v99.0.0", 1), ("0.1", 2)])
def test_tag_is_held_against_the_version(tag: str, code: int) -> None:
    """The tag that fits is taken; another, and what is none, is refused."""
    answer = run("deploy.release.versions", "--tag", tag)
    assert answer.returncode == code
    assert answer.stdout == ("" if code else f"all {project_version()}\n")


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    """Every image's bill of materials, by target; of the gateway's with its time."""
    made_at = {"gateway": datetime(2026, 11, 22, tzinfo=UTC)}
    return {image.target: bill_of(image, "1.2.3", made_at=made_at.get(image.target)) for image in IMAGES}


@pytest.fixture(scope="module")
def bills(written: dict[str, str]) -> dict[str, dict[str, Any]]:
    """The same, read."""
    return {target: json.loads(text) for target, text in written.items()}


def names(bill: dict[str, Any], scope: str = "required") -> set[str]:
    """The packages of a bill."""
    return {component["name"] for component in bill["components"] if component.get("scope") == scope}


@pytest.mark.parametrize("target", [image.target for image in IMAGES])
def test_bill_is_valid_by_cyclonedx_own_schema(written: dict[str, str], target: str) -> None:
    """Version 1.6's strict schema takes it, with a time and without."""
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(written[target]) is None
    assert ("timestamp" in json.loads(written[target])["metadata"]) == (target == "gateway")


def test_bills_list_what_each_image_holds(bills: dict[str, dict[str, Any]]) -> None:
    """The gateway has no Triton, the stack has it with its version, video has decoders, load has locust."""
    assert {"fastapi", "grpcio", "numpy"} <= names(bills["gateway"])
    assert names(bills["gateway"]).isdisjoint({"nvidia-pytriton", "av", "locust", "pytest", "colorama"})
    (wheel,) = (part for part in bills["stack"]["components"] if part["name"] == "nvidia-pytriton")
    assert (wheel["components"][0]["name"], wheel["components"][0]["version"]) == ("tritonserver", TRITON_VERSION)
    assert {part["version"] for part in bills["stack"]["components"] if part["name"] == "numpy"} > {"1.26.4"}
    assert {"av", "supervision"} <= names(bills["video"])
    assert "locust" in names(bills["load"])
    assert "onnxruntime" in names(bills["triton"], scope="optional") - names(bills["triton"])


def test_bill_has_name_version_purl_hashes_and_licence(bills: dict[str, dict[str, Any]]) -> None:
    """A package stands with all that the lock and its own metadata say of it."""
    (found,) = (part for part in bills["gateway"]["components"] if part["name"] == "msgspec")
    lock = (CHECKOUT / "requirements" / "base.txt").read_text()
    entry = lock[lock.index("\nmsgspec==") :].partition("# via")[0]
    assert found["purl"] == found["bom-ref"] == f"pkg:pypi/msgspec@{found['version']}"
    assert f"msgspec=={found['version']} " in entry
    assert {one["content"] for one in found["hashes"]} == set(re.findall(r"sha256:(\w+)", entry))
    assert found["licenses"] == [{"license": {"id": "BSD-3-Clause"}}]
    for bill in bills.values():
        assert all("hashes" in part and "purl" in part for part in bill["components"] if part["type"] == "library")


def test_packages_of_other_systems_and_pythons_are_left_out() -> None:
    """A marker is read for Linux on x86-64 and the Python of the image."""
    lock = "".join(
        f"{name}==1 ; {marker} \\\n    --hash=sha256:{'0' * 64}\n"
        for name, marker in (
            ("a", "sys_platform == 'win32'"),
            ("b", "python_full_version < '3.12'"),
            ("c", "python_full_version >= '3.12' and platform_machine == 'x86_64'"),
        )
    )
    assert [component.name for component in components_of(lock)] == ["c"]


def test_bill_twice_made_is_the_same_and_another_lock_makes_another(tmp_path: Path) -> None:
    """Neither the clock nor chance is in it; a hash that changes changes its number."""
    image = Image("x", "x", ("a.txt",))
    (tmp_path / "requirements").mkdir()
    made = []
    for digest in ("0" * 64, "0" * 64, "1" * 64):
        (tmp_path / "requirements" / "a.txt").write_text(f"numpy==2.0 \\\n    --hash=sha256:{digest}\n    # via x\n")
        made.append(json.loads(bill_of(image, "1", checkout=tmp_path)))
    assert made[0] == made[1]
    assert made[0]["serialNumber"] != made[2]["serialNumber"]


def test_bills_are_written_for_every_image_at_the_given_time(tmp_path: Path) -> None:
    """SOURCE_DATE_EPOCH is the time of all; each file is named after its image."""
    done = run("deploy.release.sbom", "--out", str(tmp_path), env={"SOURCE_DATE_EPOCH": "1795000000", "PATH": ""})
    assert (done.returncode, done.stderr) == (0, "")
    written = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert set(written) == {f"{image.name}.cdx.json" for image in IMAGES}
    assert {bill["metadata"]["timestamp"] for bill in written.values()} == {"2026-11-18T11:06:40+00:00"}


def locks_installed(target: str) -> set[str]:
    """Every lock that the stage, those it is made from and those it copies our folder from install into it."""
    if target not in stages():
        return set()
    stage = stages()[target]
    installed = re.findall(r"uv pip install[^&;]*? -r requirements/([\w-]+\.txt)", "\n".join(stage.get("RUN", [])))
    copied = [found[1] for words in stage.get("COPY", []) if (found := re.match(r"--from=(\S+) /opt/penstock", words))]
    return set(installed).union(*(locks_installed(stage) for stage in [*stage["FROM"], *copied]))


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.target)
def test_locks_of_an_image_are_those_that_the_dockerfile_installs(image: Image) -> None:
    """The bill of materials is of the same locks as the image."""
    assert locks_installed(image.target) == {*image.locks, *image.optional_locks}


def test_images_are_those_of_the_dockerfile_for_its_python() -> None:
    """Every target is a stage, every stage that starts a program is a target, and the Python is the base's."""
    assert {image.target for image in IMAGES} == {name for name in stages() if inherited(name, "ENTRYPOINT")}
    dockerfile = (CHECKOUT / "deploy" / "docker" / "Dockerfile").read_text()
    assert f"ARG BASE=docker.io/library/python:{PYTHON}-slim" in dockerfile


def test_triton_is_built_only_where_a_runner_is_named_for_every_generation() -> None:
    """Without one, four images; with one, also a Triton for each row of the table of cards, with known gaps."""
    assert [entry["name"] for entry in build_matrix("1.2.3")] == [
        "penstock",
        "penstock-gateway",
        "penstock-video",
        "penstock-load",
    ]
    tritons = build_matrix("1.2.3", "big")[4:]
    assert {entry["tag"] for entry in tritons} == {f"1.2.3-{release.name}" for release in TRITON_RELEASES}
    assert {entry["runner"] for entry in tritons} == {"big"}
    assert {entry["runner"] for entry in build_matrix("1.2.3")} == {RUNNER}
    wanted = {
        item.image: not item.warnings
        for capability in ((6, 1), (7, 0), (7, 5), (10, 0))
        if (item := advice.advise(capability, None)).image
    }
    assert {str(entry["build_args"]).partition("=")[2]: entry["fail_on_findings"] for entry in tritons} == wanted


def test_matrix_is_what_github_reads() -> None:
    """One line of JSON whose `include` holds what the workflow asks of an entry."""
    shown = run("deploy.release.images", "--version", "1.2.3", "--triton-runner", "")
    assert shown.stdout.count("\n") == 1
    entries = json.loads(shown.stdout)["include"]
    asked = set(re.findall(r"matrix\.(\w+)", (CHECKOUT / ".github" / "workflows" / "release.yaml").read_text()))
    assert all(set(entry) == asked for entry in entries)
