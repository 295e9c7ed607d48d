"""The workflows for users: pinned, confined, and of commands that exist here.

`make check` holds them against GitHub's schema and zizmor's audits; these tests say what both cannot know. Nothing here
ran on a runner of GitHub's.
"""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

CHECKOUT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
WORKFLOWS = sorted((CHECKOUT / ".github" / "workflows").glob("*.yaml"))
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
IN_THE_RUNNERS_IMAGE = {"docker", "gh", "helm"}
OF_EVERY_SYSTEM = {"apt-get", "cat", "echo", "git", "make", "mkdir"}
VARIABLES_OF_THE_RUNNER = {
    "GITHUB_ACTOR",
    "GITHUB_OUTPUT",
    "GITHUB_REF_NAME",
    "GITHUB_REPOSITORY_OWNER",
    "GITHUB_WORKSPACE",
}
# The first word of a command, after what it is given as variables.
_PROGRAM = r"""^\s*(?:[A-Z_]+=(?:"[^"]*"|\S+) )*([a-z][\w-]+|\.\S+)(?= )"""

Job = dict[str, Any]


@cache
def document(path: Path) -> dict[str, Any]:
    """A workflow, with the key `on` as a string."""
    loaded: dict[str, Any] = YAML(typ="safe").load(path.read_text())
    return loaded


def jobs() -> list[tuple[str, Job]]:
    """(file and name, job) of every job of every workflow."""
    return [(f"{path.name}:{name}", job) for path in WORKFLOWS for name, job in document(path)["jobs"].items()]


def snippets() -> list[Any]:
    """Every step's script, with the variables that its step, job and workflow set."""
    return [
        pytest.param(step["run"], {*job.get("env", {}), *step.get("env", {})}, id=f"{where}:{step.get('name')}")
        for where, job in jobs()
        for step in job.get("steps", [])
        if "run" in step
    ]


def unpinned(text: str) -> list[str]:
    """What a workflow uses of others that is not a full commit with its version beside it."""
    used = re.findall(r"^\s*(?:- )?uses:\s*(.+?)\s*$", text, re.MULTILINE)
    return [use for use in used if not use.startswith("./") and not PINNED.fullmatch(use)]


def test_workflows_are_two() -> None:
    """One for every change, one for a release; both say that they were never run."""
    assert [path.name for path in WORKFLOWS] == ["ci.yaml", "release.yaml"]
    for path in WORKFLOWS:
        assert "# Never run:" in path.read_text().split("\nname:")[0]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit_with_their_version(path: Path) -> None:
    """A tag of another project's repository can be moved; a commit cannot."""
    text = path.read_text()
    assert text.count("uses:") == len(re.findall(r"^\s*(?:- )?uses:", text, re.MULTILINE))
    assert unpinned(text) == []


def test_action_is_of_one_commit_everywhere() -> None:
    """Two workflows that use an action use the same version of it."""
    pins = {use for path in WORKFLOWS for use in re.findall(r"uses: ([^.\s].*)", path.read_text())}
    assert len(pins) == len({pin.partition("@")[0] for pin in pins})


@pytest.mark.parametrize(("where", "job"), jobs(), ids=lambda value: value if isinstance(value, str) else "")
def test_job_is_bounded_and_holds_only_the_permissions_it_names(where: str, job: Job) -> None:
    """Each job ends by itself; what may write is named by the job, never by its workflow."""
    workflow = document(CHECKOUT / ".github" / "workflows" / where.partition(":")[0])
    assert set(workflow["permissions"].items()) <= {("contents", "read")}
    assert "permissions" in job or workflow["permissions"]
    if "uses" not in job:  # GitHub refuses a time limit on a workflow that is called
        assert 0 < job["timeout-minutes"] <= 120


def test_pull_request_gets_nothing_that_writes() -> None:
    """Code of strangers runs without secrets, without a token in the checkout and without the right to write."""
    text = (CHECKOUT / ".github" / "workflows" / "ci.yaml").read_text()
    workflow = document(CHECKOUT / ".github" / "workflows" / "ci.yaml")
    assert "pull_request" in workflow["on"]
    assert "pull_request_target" not in workflow["on"]
    assert re.search(r"secrets\.|github\.token|GITHUB_TOKEN|: write", text) is None
    for path in WORKFLOWS:
        assert path.read_text().count("actions/checkout@") == path.read_text().count("persist-credentials: false")


def test_scanner_may_write_nothing() -> None:
    """The tool that reads an image cannot change it: its job has no permission to write."""
    scanning = {where: job for where, job in jobs() if "anchore/scan-action" in str(job)}
    assert set(scanning) == {"ci.yaml:images", "release.yaml:scan"}
    for job in scanning.values():
        assert "write" not in job.get("permissions", {}).values()
        (scan,) = (step["with"] for step in job["steps"] if "anchore" in step.get("uses", ""))
        assert (scan["only-fixed"], scan["severity-cutoff"]) == (True, "critical")


def test_release_gives_no_tag_before_the_scan_of_every_image() -> None:
    """Tags, chart and release wait for tests and scans; an image is pushed by digest first."""
    release = dict(jobs())
    needs = {where.partition(":")[2]: job.get("needs") for where, job in release.items() if where.startswith("rel")}
    assert needs == {
        "verify": None,
        "ci": "verify",
        "build": ["verify", "ci"],
        "scan": ["verify", "build"],
        "tag": ["verify", "scan"],
        "publish": ["verify", "tag"],
    }
    (build,) = (step["with"] for step in release["release.yaml:build"]["steps"] if step.get("id") == "build")
    assert "push-by-digest=true" in build["outputs"]
    assert "tags" not in build
    assert (build["provenance"], build["sbom"]) == ("mode=max", True)


@pytest.mark.parametrize(("script", "variables"), snippets())
def test_script_of_a_step_is_sound_shell(script: str, variables: set[str]) -> None:
    """Bash reads it, shellcheck has nothing against it, no value is pasted into it, every variable is set."""
    assert "${{" not in script, "hand it over by env"
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=20)
    checked = subprocess.run(
        [BIN / "shellcheck", "--shell=bash", "-"], input=script, text=True, capture_output=True, check=False, timeout=20
    )
    assert checked.stdout == ""
    named = set(re.findall(r"\$\{?([A-Z][A-Z_]+)", script))
    assert named <= variables | VARIABLES_OF_THE_RUNNER


@pytest.mark.parametrize(("script", "variables"), snippets())
def test_script_of_a_step_calls_what_exists(script: str, variables: set[str]) -> None:
    """Targets of make, modules and paths are of this repository; other programs are of the runner's image."""
    del variables
    for target in re.findall(r"\bmake (\S+)", script):
        subprocess.run(["make", "--dry-run", target], cwd=CHECKOUT, capture_output=True, check=True, timeout=60)
    for module in re.findall(r"python -m (\S+)", script):
        assert (CHECKOUT / f"{module.replace('.', '/')}.py").is_file(), module
    for path in re.findall(r"(?<![\w./-])(\.ci/\S+|deploy/[\w./-]+)", script):
        assert (CHECKOUT / path).exists(), path
    programs = set(re.findall(_PROGRAM, script, re.MULTILINE))
    programs -= {".venv/bin/python"}
    assert programs <= OF_EVERY_SYSTEM | IN_THE_RUNNERS_IMAGE


def test_tests_are_those_of_the_repository_on_the_system_they_are_written_for() -> None:
    """CI runs .ci/run itself, as root on Debian 12 by digest: the packages and commands stand in one place."""
    job = dict(jobs())["ci.yaml:test"]
    assert [step["run"] for step in job["steps"] if step.get("name") == "lint and test"] == [".ci/run"]
    assert re.fullmatch(r"debian:bookworm@sha256:[0-9a-f]{64}", job["container"]["image"])
    installed = {
        package
        for step in job["steps"]
        for line in re.findall(r"install --no-install-recommends -y (.+)", step.get("run", ""))
        for package in line.split()
    }
    assert installed <= set((CHECKOUT / ".ci" / "run").read_text().split())


def test_images_are_built_from_targets_and_arguments_of_the_dockerfile() -> None:
    """Every target, and every build argument that a workflow passes, stands in the Dockerfile."""
    dockerfile = (CHECKOUT / "deploy" / "docker" / "Dockerfile").read_text()
    targets = set(dict(jobs())["ci.yaml:images"]["strategy"]["matrix"]["target"])
    assert targets <= set(re.findall(r"^FROM .* AS (\S+)$", dockerfile, re.MULTILINE))
    arguments = set(re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE))
    for where, job in jobs():
        for step in job.get("steps", []):
            passed = re.findall(r"^([A-Z_]+)=", step.get("with", {}).get("build-args", ""), re.MULTILINE)
            assert set(passed) <= arguments, where
