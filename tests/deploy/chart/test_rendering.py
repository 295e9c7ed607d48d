"""Every set renders to the same golden text; lint has nothing to say of it, and the package holds what it needs."""

import difflib
import tarfile
from pathlib import Path

import pytest

from tests.deploy.chart.golden import golden_path, golden_text
from tests.deploy.chart.rendering import CHART, lint, package, render
from tests.deploy.chart.value_sets import NAMES, PRESETS, SETS, VALUES, merged, rendered

pytestmark = pytest.mark.xdist_group("chart")

MONITORING = CHART.parents[1] / "monitoring"


@pytest.mark.parametrize("name", NAMES)
def test_set_renders_to_its_golden_file(name: str) -> None:
    """What an installation sends is what was last looked at; a change shows as a diff that a person reads."""
    path = golden_path(name)
    wanted = path.read_text() if path.is_file() else ""
    got = golden_text(rendered(name))
    diff = "".join(difflib.unified_diff(wanted.splitlines(True), got.splitlines(True), path.name, "rendered now", n=2))
    assert not diff, f"if it is meant, python -m tests.deploy.chart.golden writes it anew:\n{diff[:8000]}"


def test_no_golden_file_outlives_its_set() -> None:
    """Each set of values has a golden file, and each golden file a set."""
    assert {path.stem for path in golden_path("cpu").parent.glob("*.yaml")} == set(NAMES)


def test_presets_are_each_the_ground_of_a_set() -> None:
    """No preset ships that was never rendered."""
    over = {word for path in VALUES.glob("*.yaml") for word in path.read_text().partition("\n")[0].split()[2:]}
    assert {path.stem for path in PRESETS.glob("*.yaml")} <= over


LINTED = ("console", "cpu", "everything", "external", "hpa", "mig", "mps-own", "separate", "time-slicing", "video-gpu")


def test_linted_sets_render_every_template() -> None:
    """No template is left out of `helm lint`."""
    files = {str(path.relative_to(CHART / "templates")) for path in (CHART / "templates").rglob("*.yaml")}
    seen = {file for name in LINTED for file, text in rendered(name).texts.items() if text.strip()}
    assert files - seen <= {"validate.yaml"}


@pytest.mark.parametrize("name", LINTED)
def test_lint_has_nothing_to_say(name: str) -> None:
    """`helm lint --strict` passes with sets that render every template."""
    assert lint(SETS[name]) == []


def test_package_holds_rules_dashboards_schema_and_presets(tmp_path: Path) -> None:
    """The archive needs nothing of the repository around it."""
    with tarfile.open(package(tmp_path)) as archive:
        files = {each.name.removeprefix("penstock/") for each in archive.getmembers() if each.isfile()}
    wanted = {"Chart.yaml", "values.yaml", "values.schema.json", "README.md", "VALUES.md", "templates/NOTES.txt"}
    wanted |= {f"presets/{path.name}" for path in PRESETS.glob("*.yaml")}
    wanted |= {f"files/rules/{path.name}" for path in (MONITORING / "rules").glob("*.yaml")}
    wanted |= {f"files/dashboards/{path.name}" for path in (MONITORING / "dashboards").glob("*.json")}
    assert wanted <= files
    assert any(name.startswith("files/rules/") for name in files)
    assert any(name.startswith("files/dashboards/") for name in files)


NEEDS_KEY = ' -H "x-api-key: $KEY"'
ANONYMOUS = "callers without one may still infer, read"


@pytest.mark.parametrize(
    ("over", "values", "said", "unsaid"),
    [
        ("cpu", {}, ["/v2/models/street/image"], ["$KEY", "repository/index", ANONYMOUS]),
        ("cpu", {"gateway": {"models": ["people"]}}, ["/v2/models/people/image"], ["street"]),
        ("models-pvc", {}, ["-X POST localhost:8000/v2/repository/index", "/v2/models/NAME/image"], ["street", "$KEY"]),
        ("external", {}, ["repository/index", "/v2/models/NAME/image"], ["street"]),
        ("cpu", {"gateway": {"auth": {"existingSecret": "k"}}}, [ANONYMOUS, "/v2/models/street"], ["$KEY"]),
        ("cpu", {"gateway": {"auth": {"anonymous": [], "existingSecret": "k"}}}, [f"jpeg'{NEEDS_KEY}"], [ANONYMOUS]),
    ],
)
def test_notes_first_question_can_be_asked(
    over: str, values: dict[str, object], said: list[str], unsaid: list[str]
) -> None:
    """A model that there is, a key where one is wanted, and a warning where keys are given and not wanted."""
    notes = render(merged(SETS[over], values)).notes
    assert [each for each in said if each not in notes] == [], notes
    assert [each for each in unsaid if each in notes] == [], notes
