"""Grafana's dashboards: `python -m deploy.monitoring.build` writes dashboards/*.json from boards/*.yaml.

A board has rows, a row has panels from left to right, a panel has queries by their legends. The words of `names` are
label matchers: queries use them in braces. `shared` rows stand in boards/shared.yaml; a `runbook` row shows the
runbook's sections on the alerts of these rule files. The models below list all keys, with their defaults.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import yaml
from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    text,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heat
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.text import TextMode
from pydantic import BaseModel, ConfigDict

HERE = Path(__file__).resolve().parent
BOARDS = ("gateway", "batching", "video", "gpu")
SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
COLUMNS = 24
ALL = model.VariableOption(selected=True, text="All", value="$__all")
TAG = "penstock"
_Builder = timeseries.Panel | heatmap.Panel | stat.Panel | statetimeline.Panel | text.Panel


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Panel(_Strict):
    """One panel. unit: Grafana's word. width: of 24; height: in grid rows; by default 8, of a `stat` 4."""

    title: str
    description: str
    unit: str
    look: Literal["lines", "stacked", "steps", "heatmap", "stat", "states", "text"] = "lines"
    queries: dict[str, str] = {}  # PromQL by legend
    width: int | None = None
    height: int | None = None
    steps: tuple[tuple[int | float | None, str], ...] | None = (
        None  # colours from values on; null: from below everything
    )
    words: tuple[tuple[str, str, str], ...] = ()  # of states: value, text, colour
    minimum: int | float | None = 0
    maximum: int | float | None = None
    decimals: int | None = None
    text: str = ""
    right: dict[str, str] = {}  # series, by a pattern of their legends, with an axis of their own, and its unit

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in the grid."""
        usual = 4 if self.look == "stat" else 8
        return self.width or usual, self.height or usual


class Row(_Strict):
    """Panels under a heading. A collapsed row costs no queries until it is opened."""

    title: str
    panels: tuple[Panel, ...]
    is_collapsed: bool = False


class Choice(_Strict):
    """A variable: the values of a label. is_always_there: All is these values; else it matches no label, too."""

    name: str
    label: str
    query: str
    is_always_there: bool = False


class Board(_Strict):
    """A dashboard. uid: part of links, so it never changes."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    choices: tuple[Choice, ...] = ()


def read_board(name: str) -> Board:
    """The board of boards/NAME.yaml, with its names, shared rows and runbook filled in."""
    document = yaml.safe_load((HERE / "boards" / f"{name}.yaml").read_text())
    shared = yaml.safe_load((HERE / "boards" / "shared.yaml").read_text())
    rows = []
    for row in document.pop("rows"):
        if "runbook" in row:
            rows.append(_runbook(row["runbook"]))
        else:
            rows.append(shared[row["shared"]] if "shared" in row else row)
    names = document.pop("names")
    for item in [*document["choices"], *(panel for row in rows for panel in row["panels"])]:
        if "query" in item:
            item["query"] = _filled(item["query"], names)
        if "queries" in item:
            item["queries"] = {legend: _filled(query, names) for legend, query in item["queries"].items()}
    return Board.model_validate({**document, "rows": rows})


def _filled(query: str, names: dict[str, str]) -> str:
    return re.sub(rf"\b(?:{'|'.join(names)})\b", lambda found: names[found[0]], query)


def _runbook(rule_files: list[str]) -> dict[str, Any]:
    """A row with the runbook's sections on the alerts of these rule files, in their order."""
    sections = {}
    for path in sorted(HERE.glob("RUNBOOK*.md")):
        for section in path.read_text().split("\n## ")[1:]:
            words = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", section.strip())  # such links lead nowhere in Grafana
            sections[section.partition("\n")[0].lower()] = f"## {words}"
    groups = [
        group for name in rule_files for group in yaml.safe_load((HERE / f"rules/{name}.yaml").read_text())["groups"]
    ]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    anchors = dict.fromkeys(alert["annotations"]["runbook"].partition("#")[2] for alert in alerts)
    panel = {
        "title": "What each alert means, and what to do",
        "description": "From the runbook (deploy/monitoring/RUNBOOK.md and RUNBOOK-video-gpu.md), as it was when the "
        "dashboard was made.",
        "unit": "none", "look": "text", "width": COLUMNS, "height": 30,
        "text": "\n\n".join(sections[anchor] for anchor in anchors) + "\n",
    }  # fmt: skip
    return {"title": "Runbook", "is_collapsed": True, "panels": [panel]}


def written(board: Board) -> str:
    """The dashboard's file: the same text for the same board."""
    return json.dumps(_built(board), cls=JSONEncoder, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _built(board: Board) -> model.Dashboard:
    links = dashboard.DashboardLink("Penstock's dashboards").type(model.DashboardLinkType.DASHBOARDS).tags([TAG])
    alerts = 'ALERTS{alertname=~"Penstock.+", alertstate="firing"}'  # marked in every picture
    marks = dashboard.AnnotationQuery().name("Alerts").datasource(SOURCE).enable(True).icon_color("red").expr(alerts)
    source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    built = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags([TAG])
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .readonly()
        .variables([source, *map(_variable, board.choices)])
        .annotation(marks)
        .link(links.as_dropdown(True).include_vars(True).keep_time(True))
        .build()
    )
    built.panels = list(_placed(board.rows))
    return built


def _variable(choice: Choice) -> dashboard.QueryVariable:
    """Several values may be chosen."""
    variable = (
        dashboard.QueryVariable(choice.name)
        .label(choice.label)
        .datasource(SOURCE)
        .query(choice.query)
        .multi(True)
        .include_all(True)
        .current(ALL)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
    )
    return variable if choice.is_always_there else variable.all_value(".*")


def _placed(rows: tuple[Row, ...]) -> Iterator[model.Panel | model.RowPanel]:
    """Every panel at its place, ids counted from 1. The panels of a collapsed row are inside it."""
    y, number = 0, 0
    for row in rows:
        number += 1
        heading = model.RowPanel(collapsed=row.is_collapsed, title=row.title, id_val=number)
        heading.grid_pos = model.GridPos(h=1, w=COLUMNS, x=0, y=y)
        panels, y = _in_row(row.panels, y + 1, number)
        number += len(panels)
        yield heading
        if row.is_collapsed:
            heading.panels, y = panels, heading.grid_pos.y + 1
        else:
            yield from panels


def _in_row(panels: tuple[Panel, ...], y: int, number: int) -> tuple[list[model.Panel], int]:
    """From left to right, on a new line where one does not fit; and where the next row begins."""
    placed, x, tallest = [], 0, 0
    for offset, panel in enumerate(panels, 1):
        width, height = panel.size
        if x + width > COLUMNS:
            x, y, tallest = 0, y + tallest, 0
        built = _panel(panel).build()
        built.id_val = number + offset
        built.grid_pos = model.GridPos(h=height, w=width, x=x, y=y)
        placed.append(built)
        x, tallest = x + width, max(tallest, height)
    return placed, y + tallest


def _panel(panel: Panel) -> _Builder:
    builder = _drawn(panel).title(panel.title).description(panel.description).unit(panel.unit).datasource(SOURCE)
    if panel.minimum is not None:
        builder = builder.min(panel.minimum)
    if panel.maximum is not None:
        builder = builder.max(panel.maximum)
    if panel.decimals is not None:
        builder = builder.decimals(panel.decimals)
    usual = ((None, "blue" if panel.look == "stat" else "green"),)
    steps = [model.Threshold(value, colour) for value, colour in (usual if panel.steps is None else panel.steps)]
    builder = builder.thresholds(dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps))
    by_name = panel.look in ("lines", "stacked", "steps")
    palette = model.FieldColorModeId.PALETTE_CLASSIC if by_name else model.FieldColorModeId.THRESHOLDS
    builder = builder.color_scheme(dashboard.FieldColor().mode(palette))
    if panel.words:
        options = {value: model.ValueMappingResult(text, colour) for value, text, colour in panel.words}
        builder = builder.mappings([model.ValueMap(options)])
    for pattern, unit in panel.right.items():
        axis = [model.DynamicConfigValue("custom.axisPlacement", "right"), model.DynamicConfigValue("unit", unit)]
        builder = builder.override_by_regexp(pattern, axis)
    for letter, (legend, expr) in zip("ABCDEFGH", panel.queries.items(), strict=False):
        target = prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(letter).datasource(SOURCE)
        target = target.instant() if panel.look == "stat" else target.range()
        builder = builder.with_target(target.format(PromQueryFormat.HEATMAP) if panel.look == "heatmap" else target)
    return builder


def _drawn(panel: Panel) -> _Builder:
    """The panel's kind, with what depends on nothing else."""
    if panel.look == "heatmap":
        return _heatmap(panel.unit)
    if panel.look == "stat":
        reduced = common.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields("")
        shown = stat.Panel().reduce_options(reduced).color_mode(shapes.BigValueColorMode.VALUE)
        return shown.graph_mode(shapes.BigValueGraphMode.NONE).no_value("no data")
    if panel.look == "states":
        timeline = statetimeline.Panel().line_width(0).fill_opacity(70).merge_values(True)
        return timeline.show_value(shapes.VisibilityMode.AUTO).legend(_legend(shapes.LegendDisplayMode.LIST, []))
    if panel.look == "text":
        return text.Panel().mode(TextMode.MARKDOWN).content(panel.text)
    return _lines(panel)


def _lines(panel: Panel) -> timeseries.Panel:
    builder = (
        timeseries.Panel()
        .line_width(1)
        .fill_opacity(40 if panel.look == "stacked" else 10)
        .show_points(shapes.VisibilityMode.NEVER)
        .legend(_legend(shapes.LegendDisplayMode.TABLE, ["lastNotNull", "max"]))
        .tooltip(common.VizTooltipOptions().mode(shapes.TooltipDisplayMode.MULTI).sort(shapes.SortOrder.DESCENDING))
    )
    if panel.steps is not None and len(panel.steps) > 1:
        style = common.GraphThresholdsStyleConfig().mode(shapes.GraphTresholdsStyleMode.DASHED)
        builder = builder.thresholds_style(style)
    if panel.look == "stacked":
        builder = builder.stacking(common.StackingConfig().mode(shapes.StackingMode.NORMAL).group("A"))
    return builder.line_interpolation(shapes.LineInterpolation.STEP_AFTER) if panel.look == "steps" else builder


def _legend(mode: shapes.LegendDisplayMode, calcs: list[str]) -> common.VizLegendOptions:
    legend = common.VizLegendOptions().display_mode(mode).placement(shapes.LegendPlacement.BOTTOM)
    return legend.show_legend(True).calcs(calcs)


def _heatmap(unit: str) -> heatmap.Panel:
    colour = heatmap.HeatmapColorOptions().mode(heat.HeatmapColorMode.SCHEME).scheme("Oranges").steps(64)
    return (
        heatmap.Panel()
        .calculate(False)
        .color(colour.scale(heat.HeatmapColorScale.EXPONENTIAL).exponent(0.5))
        .cell_gap(1)
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .cell_values(heatmap.CellValues().unit("short"))
        .show_tooltip()
        .show_legend()
        .hide_from(common.HideSeriesConfig().tooltip(False).legend(False).viz(False))
    )


if __name__ == "__main__":
    for name in BOARDS:
        (HERE / "dashboards" / f"{name}.json").write_text(written(read_board(name)))
