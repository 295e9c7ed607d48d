"""The dashboards as Grafana would load them: as boards/*.yaml says, laid out well, asking for what exists."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.monitoring.build import BOARDS, read_board, written
from penstock_video.types import SourceState
from tests.deploy.metric_tables import MONITORING, known_metrics, rules
from tests.deploy.promql import complaints

FOLDER = MONITORING / "dashboards"
BUILT_IN = {"__rate_interval", "__interval", "__range", "__all"}
EVERY_BOARD = pytest.mark.parametrize("name", BOARDS)


def loaded(name: str) -> dict[str, Any]:
    """A dashboard's JSON."""
    document: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return document


def all_panels(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows, panels, and the panels inside collapsed rows."""
    for panel in document["panels"]:
        yield panel
        yield from panel.get("panels", ())


def shown_panels(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What is no row."""
    return (panel for panel in all_panels(document) if panel["type"] != "row")


def unsaid(panel: dict[str, Any]) -> list[str]:
    """What a panel does not say of itself."""
    asks = panel["type"] != "text"
    source = {"type": "prometheus", "uid": "${datasource}"}
    wrong = [word for word in ("title", "description") if len(panel.get(word, "")) < 3]
    if panel["fieldConfig"]["defaults"].get("unit") not in UNITS:
        wrong.append("unit")
    if not panel["fieldConfig"]["defaults"]["thresholds"]["steps"]:
        wrong.append("thresholds")
    if panel["datasource"] != source or any(target["datasource"] != source for target in panel.get("targets", ())):
        wrong.append("datasource")
    if asks and (not panel.get("targets") or any(not target["legendFormat"] for target in panel["targets"])):
        wrong.append("legend")
    return wrong


UNITS = {value for name, value in vars(units).items() if name[0].isupper()}


def overlaps(panels: list[dict[str, Any]]) -> list[str]:
    """Panels that lie on each other, or beyond the grid's 24 columns."""
    taken: dict[tuple[int, int], str] = {}
    wrong = []
    for panel in panels:
        at = panel["gridPos"]
        if at["x"] < 0 or at["x"] + at["w"] > 24:
            wrong.append(f"{panel['title']} is {at['w']} wide at {at['x']}")
        for cell in ((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])):
            if cell in taken:
                wrong.append(f"{panel['title']} lies on {taken[cell]}")
            taken[cell] = panel["title"]
    return wrong


def test_dashboards_on_disk_are_what_the_boards_say() -> None:
    """`python -m deploy.monitoring.build` would change no file, and there is no other one."""
    assert {path.stem: path.read_text() for path in FOLDER.glob("*.json")} == {
        name: written(read_board(name)) for name in BOARDS
    }


@EVERY_BOARD
def test_panels_say_what_they_show(name: str) -> None:
    """Every panel has a title, a description, a unit of Grafana's, thresholds, legends and the chosen data source."""
    assert [(panel["title"], wrong) for panel in shown_panels(loaded(name)) if (wrong := unsaid(panel))] == []


@EVERY_BOARD
def test_queries_name_only_what_exists(name: str) -> None:
    """Every query parses; every metric is in a table, every label on its metric, rates are of counters."""
    found = [
        (panel["title"], complaint)
        for panel in shown_panels(loaded(name))
        for target in panel.get("targets", ())
        for complaint in complaints(target["expr"], known_metrics())
    ]
    assert found == []


@EVERY_BOARD
def test_alerts_that_fire_are_marked(name: str) -> None:
    """In every picture of the dashboard, by a query that names only what exists."""
    (marks,) = loaded(name)["annotations"]["list"]
    assert marks["enable"]
    assert complaints(marks["expr"], known_metrics()) == []


@EVERY_BOARD
def test_panels_lie_beside_each_other(name: str) -> None:
    """No two panels overlap, also in an opened row, none is beyond the grid, and each has its own id."""
    document = loaded(name)
    assert overlaps(document["panels"]) == []
    assert [wrong for row in document["panels"] for wrong in overlaps(row.get("panels", []))] == []
    ids = [panel["id"] for panel in all_panels(document)]
    assert len(ids) == len(set(ids))


@EVERY_BOARD
def test_grafanas_models_read_the_dashboard_back(name: str) -> None:
    """Read by the SDK's models and written again it is the same: it holds nothing that Grafana's schema has not."""
    register_default_plugins()
    again = json.loads(json.dumps(Dashboard.from_json(loaded(name)), cls=JSONEncoder))
    assert again == loaded(name)


@EVERY_BOARD
def test_variables_are_declared_used_and_filled(name: str) -> None:
    """Every variable of a query is declared, every declared one used, and each is filled from a label that exists."""
    document = loaded(name)
    declared = {variable["name"]: variable for variable in document["templating"]["list"]}
    text = json.dumps(document["panels"])
    named = set(re.findall(r"\$\{?(\w+)", text)) - BUILT_IN
    assert named == set(declared)
    for variable in declared.values():
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
            assert found, variable["query"]
            assert complaints(f"count by ({found[2]}) ({found[1]})", known_metrics()) == []


def test_runbook_of_every_alert_is_in_a_dashboard() -> None:
    """Dashboards to which alerts link explain what they mean; no link within Grafana is broken."""
    texts = [
        panel["options"]["content"]
        for name in BOARDS
        for panel in shown_panels(loaded(name))
        if panel["type"] == "text"
    ]
    headings = {line.removeprefix("## ").lower() for text in texts for line in text.splitlines() if line[:3] == "## "}
    alerts = [rule for rule in rules() if "alert" in rule]
    assert {alert["annotations"]["runbook"].partition("#")[2] for alert in alerts} == headings
    assert not [text for text in texts if re.search(r"\]\((?!https)", text)]


def test_video_states_are_the_programs() -> None:
    """The timeline of sources has every state that the program tells, in its words."""
    (states,) = (panel for row in read_board("video").rows for panel in row.panels if panel.title == "State")
    assert [text.replace(" ", "_") for _, text, _ in states.words] == [state.value for state in SourceState]
