"""Boards in Grafana's own words, by its SDK: panels on the grid, variables, links."""

import json
from collections.abc import Callable, Iterator

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

from deploy.monitoring.build.board import RED, Board, Choice, Look, Panel, Query, Row

SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
COLUMNS = 24
ALL = model.VariableOption(selected=True, text="All", value="$__all")
TAG = "penstock"
_COLOURED_BY_NAME = (Look.LINES, Look.STACKED, Look.STEPS)
_Builder = timeseries.Panel | heatmap.Panel | stat.Panel | statetimeline.Panel | text.Panel


def written(board: Board) -> str:
    """The dashboard's file: the same text for the same board."""
    return json.dumps(_built(board), cls=JSONEncoder, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _built(board: Board) -> model.Dashboard:
    builder = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags([TAG])
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .readonly()
        .variables([_data_source(), *map(_variable, board.choices)])
        .annotation(_firing_alerts())
        .link(
            dashboard.DashboardLink("Penstock's dashboards")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
    )
    built = builder.build()
    built.panels = list(_placed(board.rows))
    return built


def _firing_alerts() -> dashboard.AnnotationQuery:
    """Marks in every picture where an alert of ours began and ended."""
    alerts = 'ALERTS{alertname=~"Penstock.+", alertstate="firing"}'
    return dashboard.AnnotationQuery().name("Alerts").datasource(SOURCE).enable(True).icon_color(RED).expr(alerts)


def _data_source() -> dashboard.DatasourceVariable:
    return dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")


def _variable(choice: Choice) -> dashboard.QueryVariable:
    """Several may be chosen. Where All is a pattern, a missing label matches, too: `namespace` outside Kubernetes."""
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
        if row.is_collapsed:
            heading.panels, y = panels, heading.grid_pos.y + 1
            yield heading
        else:
            yield heading
            yield from panels


def _in_row(panels: tuple[Panel, ...], y: int, number: int) -> tuple[list[model.Panel], int]:
    """From left to right, on a new line where one does not fit; and where the next row begins."""
    placed, x, height = [], 0, 0
    for offset, panel in enumerate(panels, 1):
        if x + panel.width > COLUMNS:
            x, y, height = 0, y + height, 0
        built = _panel(panel).build()
        built.id_val = number + offset
        built.grid_pos = model.GridPos(h=panel.height, w=panel.width, x=x, y=y)
        placed.append(built)
        x, height = x + panel.width, max(height, panel.height)
    return placed, y + height


def _panel(panel: Panel) -> _Builder:
    builder: _Builder = _LOOKS[panel.look](panel)
    builder = builder.title(panel.title).description(panel.description).unit(panel.unit).datasource(SOURCE)
    if panel.minimum is not None:
        builder = builder.min(panel.minimum)
    if panel.maximum is not None:
        builder = builder.max(panel.maximum)
    if panel.decimals is not None:
        builder = builder.decimals(panel.decimals)
    steps = [model.Threshold(value, colour) for value, colour in panel.steps]
    builder = builder.thresholds(dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps))
    palette = (
        model.FieldColorModeId.PALETTE_CLASSIC if panel.look in _COLOURED_BY_NAME else model.FieldColorModeId.THRESHOLDS
    )
    builder = builder.color_scheme(dashboard.FieldColor().mode(palette))
    if panel.words:
        options = {value: model.ValueMappingResult(text, colour) for value, text, colour in panel.words}
        builder = builder.mappings([model.ValueMap(options)])
    for pattern, unit in panel.right:
        axis = [model.DynamicConfigValue("custom.axisPlacement", "right"), model.DynamicConfigValue("unit", unit)]
        builder = builder.override_by_regexp(pattern, axis)
    for number, query in enumerate(panel.queries):
        builder = builder.with_target(_target(panel, query, chr(ord("A") + number)))
    return builder


def _target(panel: Panel, query: Query, ref_id: str) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(ref_id).datasource(SOURCE)
    if panel.look is Look.HEATMAP:
        return target.range().format(PromQueryFormat.HEATMAP)
    return target.instant() if panel.look is Look.STAT else target.range()


def _legend(panel: Panel) -> common.VizLegendOptions:
    """A table with the last and the greatest value; below the picture."""
    calcs = [] if panel.look is Look.STATES else ["lastNotNull", "max"]
    mode = shapes.LegendDisplayMode.LIST if panel.look is Look.STATES else shapes.LegendDisplayMode.TABLE
    return (
        common.VizLegendOptions()
        .display_mode(mode)
        .placement(shapes.LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(calcs)
    )


def _lines(panel: Panel) -> timeseries.Panel:
    builder = (
        timeseries.Panel()
        .line_width(1)
        .fill_opacity(10)
        .show_points(shapes.VisibilityMode.NEVER)
        .legend(_legend(panel))
        .tooltip(common.VizTooltipOptions().mode(shapes.TooltipDisplayMode.MULTI).sort(shapes.SortOrder.DESCENDING))
    )
    if len(panel.steps) > 1:
        style = common.GraphThresholdsStyleConfig().mode(shapes.GraphTresholdsStyleMode.DASHED)
        builder = builder.thresholds_style(style)
    return builder


def _stacked(panel: Panel) -> timeseries.Panel:
    stacking = common.StackingConfig().mode(shapes.StackingMode.NORMAL).group("A")
    return _lines(panel).stacking(stacking).fill_opacity(40)


def _in_steps(panel: Panel) -> timeseries.Panel:
    return _lines(panel).line_interpolation(shapes.LineInterpolation.STEP_AFTER)


def _heatmap(panel: Panel) -> heatmap.Panel:
    colour = heatmap.HeatmapColorOptions().mode(heat.HeatmapColorMode.SCHEME).scheme("Oranges").steps(64)
    return (
        heatmap.Panel()
        .calculate(False)
        .color(colour.scale(heat.HeatmapColorScale.EXPONENTIAL).exponent(0.5))
        .cell_gap(1)
        .y_axis(heatmap.YAxisConfig().unit(panel.unit))
        .cell_values(heatmap.CellValues().unit("short"))
        .show_tooltip()
        .show_legend()
        .hide_from(common.HideSeriesConfig().tooltip(False).legend(False).viz(False))
    )


def _stat(panel: Panel) -> stat.Panel:
    reduced = common.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields("")
    return (
        stat.Panel()
        .reduce_options(reduced)
        .color_mode(shapes.BigValueColorMode.VALUE)
        .graph_mode(shapes.BigValueGraphMode.NONE)
        .no_value("no data")
    )


def _states(panel: Panel) -> statetimeline.Panel:
    builder = statetimeline.Panel().line_width(0).fill_opacity(70).merge_values(True)
    return builder.show_value(shapes.VisibilityMode.AUTO).legend(_legend(panel))


def _text(panel: Panel) -> text.Panel:
    return text.Panel().mode(TextMode.MARKDOWN).content(panel.text)


_LOOKS: dict[Look, Callable[[Panel], _Builder]] = {
    Look.LINES: _lines,
    Look.STACKED: _stacked,
    Look.STEPS: _in_steps,
    Look.HEATMAP: _heatmap,
    Look.STAT: _stat,
    Look.STATES: _states,
    Look.TEXT: _text,
}
