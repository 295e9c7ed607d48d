"""summary.html: the page of a run, in one file without scripts."""

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import cast

import cv2
import numpy as np
import simplejpeg
import yaml

from penstock_video.cli.markup import Markup, joined, tag
from penstock_video.cli.run_charts import MAX_SERIES, Series, TimeAxis, bar_chart, crossing_chart, line_chart
from penstock_video.cli.summary import UNKNOWN, Summary, is_failed, rate_of, state_of
from penstock_video.cli.table import dropped, drops_text, duration
from penstock_video.interfaces import Extension, SourceStatistics
from penstock_video.settings.models import VideoSettings
from penstock_video.sinks.run_record import STAY_LIMITS_S, SourceRecord
from penstock_video.sinks.schemas import iso_time
from penstock_video.types import AnalyticsKind, ByteArray, FloatArray

SUMMARY_FILE = "summary.html"
MAX_DETAILED = 12  # sources with pictures and charts, the busiest first
_MAX_CLASSES, _MAX_LINES = 20, 12
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_HEAT_PX = 960
_HOT_SHARE = 0.95  # of the used cells are below the brightest colour: parked cars outshine no path
_LEAST_BARS = 5
_LONGEST = 40  # characters of a class in the sentence


@dataclass(slots=True)
class RuleCounts:
    """into, out_of: of a line that counts both ways, else None. total: of a line that counts one way. present: the
    number at the end, of other rules. events: their number."""

    kind: str
    name: str
    into: int | None = None
    out_of: int | None = None
    total: int | None = None
    present: int | None = None
    events: int = 0


def counts_by_rule(source: SourceStatistics) -> list[RuleCounts]:
    """One row for each rule, a line's two counters together; lines first."""
    rows: dict[tuple[str, str], RuleCounts] = {}
    kinds = frozenset(AnalyticsKind)
    for key in dict.fromkeys((*source.counts, *source.events)):
        kind, _, counter = key.partition("/")
        if "/" in counter or (kind not in kinds and key not in source.events):
            continue
        name, _, way = counter.rpartition(".")
        is_line = kind == AnalyticsKind.LINE_CROSSING
        is_way = is_line and way in ("in", "out") and f"{kind}/{name}" not in source.counts
        row = rows.setdefault((kind, name if is_way else counter), RuleCounts(kind, name if is_way else counter))
        events = source.events.get(key, 0)
        count = source.counts.get(key, events if is_line else None)
        row.events += events
        if is_way and way == "in":
            row.into = count
        elif is_way:
            row.out_of = count
        elif is_line:
            row.total = count
        else:
            row.present = count
    return sorted(rows.values(), key=lambda row: (row.kind != AnalyticsKind.LINE_CROSSING, row.kind, row.name))


def run_page(
    summary: Summary, records: Mapping[str, SourceRecord], settings: VideoSettings, engine: str, ended_unix_s: float
) -> bytes:
    """The page, UTF-8. engine: the title of the engine used."""
    began = iso_time(ended_unix_s - summary.seconds)[:19].replace("T", " ")
    detailed = sorted(
        (source for source in summary.everybody if source.source_id in records),
        key=lambda source: -records[source.source_id].tracks.total(),
    )[:MAX_DETAILED]
    order = [source for source in summary.everybody if source in detailed]
    body = tag(
        "main",
        tag("h1", "Summary of a video run"),
        tag("p", f"{began} UTC, {duration(summary.seconds)}, model {settings.primary.model}", class_="soft"),
        tag("p", sentence(summary, records), class_="lead"),
        *(tag("p", text, class_="bad") for text in _failures(summary)),
        _source_table(summary),
        *(_source_section(source, records[source.source_id]) for source in order),
        _settings_section(summary, settings, engine),
        tag("footer", "Written by penstock video run. This page loads no external resources."),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("title", f"penstock video: {began}"),
        tag("style", Markup(files(__package__).joinpath("run_page.css").read_text())),
    )
    return b"<!doctype html>" + tag("html", head, tag("body", body), lang="en").encode()


def sentence(summary: Summary, records: Mapping[str, SourceRecord]) -> str:
    """The run in a sentence: frames, rate, tracked objects, counts of lines."""
    count, frames = len(summary.everybody), sum(source.frames for source in summary.everybody)
    rate = f", {frames / summary.seconds:.1f} frames/s" if summary.seconds > 0 else ""
    text = f"{count} source{'s' * (count != 1)}, {frames:,} frames in {duration(summary.seconds)}{rate}"
    tracks = sum((_by_label(record) for record in records.values()), Counter[str]())
    if tracks:
        text += ". Tracked: " + ", ".join(f"{label[:_LONGEST]} {number:,}" for label, number in tracks.most_common(4))
    lines = [
        (f"{source.source_id}: " if count > 1 else "")
        + (f"{row.name} {row.into} in, {row.out_of} out" if row.into is not None else f"{row.name} {row.total}")
        for source in summary.everybody
        for row in counts_by_rule(source)
        if row.kind == AnalyticsKind.LINE_CROSSING
    ]
    if lines:
        more = f" and {len(lines) - 4} more" if len(lines) > 4 else ""
        text += ". Crossed: " + "; ".join(lines[:4]) + more
    return f"{text}.{' It was stopped before its end.' if summary.is_stopped else ''}"


def _by_label(record: SourceRecord) -> Counter[str]:
    return Counter({record.label(class_id): number for class_id, number in record.tracks.items()})


def _failures(summary: Summary) -> list[str]:
    failed = [
        f"{one.source_id} failed: {one.reason or 'no usable answer'}" for one in summary.sources if is_failed(one)
    ]
    return failed + [f"Sink {text}" for text in summary.sink_failures]


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int) -> Markup:
    """texts: number of leading columns with text instead of numbers."""
    kinds = [None if number < texts else "n" for number in range(len(titles))]
    head = tag("tr", *(tag("th", title, scope="col", class_=kind) for title, kind in zip(titles, kinds, strict=True)))
    body = [tag("tr", *(tag("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True))) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="table")


def _source_table(summary: Summary) -> Markup:
    rows = []
    for source in summary.everybody:
        rate = rate_of(source)
        rows.append(
            (
                _named(source.camera_name or source.source_id, state_of(source, is_stopped=summary.is_stopped)),
                _named(f"{source.frames:,}", _not_all_inferred(source)),
                _named(f"{dropped(source):,}", drops_text(source.drops.items())),
                str(source.restarts),
                UNKNOWN if rate is None else f"{rate:.1f}",
            )
        )
    return _table(("source", "frames", "dropped", "restarts", "fps"), rows, texts=1)


def _source_section(source: SourceStatistics, record: SourceRecord) -> Markup:
    name = source.camera_name or source.source_id
    title = name if name == source.source_id else f"{name} ({source.source_id})"
    axis = _axis(source, record)
    charts = [_objects_chart(record, axis), *_crossing_charts(source, record, axis), *_stay_charts(record)]
    counts = counts_by_rule(source)
    tracked = [(label, f"{number:,}") for label, number in _by_label(record).most_common(_MAX_CLASSES)]
    return joined(
        tag("h2", f"Source {title}"),
        tag("div", _annotated(record), _heat(record), class_="row wide"),
        tag(
            "div",
            tag("div", tag("h3", "Counts of rules"), _counts_table(counts)) if counts else None,
            tag("div", tag("h3", "Tracked objects"), _table(("class", "tracks"), tracked, texts=1))
            if tracked
            else None,
            class_="row",
        ),
        tag("div", *charts, class_="row"),
    )


def _axis(source: SourceStatistics, record: SourceRecord) -> TimeAxis:
    def clock(at_s: float) -> str:
        if source.is_live:
            return iso_time(record.began_unix_s + at_s)[11:16]
        return duration(at_s)

    return TimeAxis(len(record.bins), record.bins.width_s, clock)


def _counts_table(counts: Sequence[RuleCounts]) -> Markup:
    def shown(number: int | None) -> str:
        return UNKNOWN if number is None else f"{number:,}"

    rows = [
        (_named(row.name, row.kind), shown(row.into if row.into is not None else row.total), shown(row.out_of),
         shown(row.present), shown(row.events))
        for row in counts
    ]  # fmt: skip
    return _table(("rule", "in", "out", "at the end", "events"), rows, texts=1)


def _not_all_inferred(source: SourceStatistics) -> str:
    return f"{source.inferred:,} inferred" if source.inferred != source.frames else ""


def _named(name: str, detail: str) -> Markup:
    """A cell with a second line."""
    return joined(name, tag("small", detail) if detail else None)


def _objects_chart(record: SourceRecord, axis: TimeAxis) -> Markup:
    sums = sum((one.objects for one in record.bins), Counter[int]())
    shown = [class_id for class_id, _ in sums.most_common(MAX_SERIES)]
    series = [
        Series(
            record.label(class_id), [one.objects[class_id] / one.frames if one.frames else None for one in record.bins]
        )
        for class_id in shown
    ]
    peaks = ", ".join(f"{one.name} at most {max(value or 0 for value in one.values):.1f}" for one in series)
    return line_chart("Objects in the picture, mean over time", series, axis, text=peaks or "no objects")


def _crossing_charts(source: SourceStatistics, record: SourceRecord, axis: TimeAxis) -> list[Markup]:
    charts = []
    lines = [row for row in counts_by_rule(source) if row.kind == AnalyticsKind.LINE_CROSSING]
    for row in lines[:_MAX_LINES]:
        key = f"{row.kind}/{row.name}"
        is_both = row.into is not None or row.out_of is not None
        into = [one.events[f"{key}.in" if is_both else key] for one in record.bins]
        out_of = [one.events[f"{key}.out"] for one in record.bins] if is_both else None
        text = f"{sum(into)} in, {sum(out_of)} out" if out_of is not None else f"{sum(into)} crossings"
        charts.append(crossing_chart(f"Crossings of {row.name}", into, out_of, axis, text=text))
    return charts


def _stay_charts(record: SourceRecord) -> list[Markup]:
    charts = []
    for name, stays in list(record.stays.items())[:_MAX_LINES]:
        figures = stays.figures()
        names = [*(f"< {duration(limit)}" for limit in STAY_LIMITS_S), "longer"]
        used = [number for number, count in enumerate(figures.counts) if count] or [0]
        first = max(0, min(used[0], used[-1] - _LEAST_BARS + 1))
        bars = list(zip(names, figures.counts, strict=True))[first : max(used[-1] + 1, _LEAST_BARS)]
        text = f"{figures.number} stays, mean {figures.mean_s:.1f} s, longest {figures.longest_s:.1f} s"
        charts.append(bar_chart(f"Stays in {name}", bars, text=text))
    return charts


def _annotated(record: SourceRecord) -> Markup | None:
    poster = record.poster
    if poster is None:
        return None
    about = f"{poster.objects} tracked objects at {duration(poster.pts_s)}"
    return tag(
        "figure",
        tag("figcaption", "Sharp frame with the most objects", tag("small", about)),
        _image(poster.picture, about),
    )


def _heat(record: SourceRecord) -> Markup | None:
    if not record.heat.any():
        return None
    longest = hottest(record.heat)
    about = "Seconds that feet of tracked objects were in each of 64 × 36 cells"
    picture = heat_picture(record.poster.plain if record.poster is not None else b"", record.heat)
    ends = tag("span", tag("span", "0 s"), tag("span", f"{longest:.1f} s and more"), class_="ends")
    caption = tag("figcaption", "Where objects were", tag("small", about))
    return tag("figure", caption, _image(picture, about), tag("span", class_="scale"), ends)


def _image(jpeg: bytes, about: str) -> Markup:
    return tag("img", src=f"data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}", alt=about)


def hottest(heat: FloatArray) -> float:
    """Seconds at which a cell has the brightest colour."""
    return max(float(np.quantile(heat[heat > 0], _HOT_SHARE)), 1e-9)


def heat_picture(plain: bytes, heat: FloatArray) -> bytes:
    """JPEG of the heat map over a darkened frame. plain: the frame as JPEG, or empty. heat: (rows, columns)."""
    if plain:
        ground = cast("ByteArray", simplejpeg.decode_jpeg(plain, colorspace="GRAY"))[:, :, 0]
        size = _HEAT_PX, max(1, round(ground.shape[0] * _HEAT_PX / ground.shape[1]))
        grey = cv2.resize(ground, size, interpolation=cv2.INTER_AREA)
    else:
        grey = np.zeros((_HEAT_PX * heat.shape[0] // heat.shape[1], _HEAT_PX), np.uint8)
    share = np.sqrt(np.minimum(heat / hottest(heat), 1)).astype(np.float32)
    share = np.clip(cv2.resize(share, (grey.shape[1], grey.shape[0]), interpolation=cv2.INTER_LINEAR), 0, 1)
    colors = cv2.applyColorMap((share * 255).astype(np.uint8), cv2.COLORMAP_INFERNO).astype(np.float32)
    weight = np.clip(share * 3, 0, 0.85)[:, :, None]
    mixed = grey[:, :, None] * 0.6 * (1 - weight) + colors * weight
    return bytes(simplejpeg.encode_jpeg(mixed.astype(np.uint8), quality=85, colorspace="BGR"))


def _settings_section(summary: Summary, settings: VideoSettings, engine: str) -> Markup:
    primary, tracker = settings.primary, settings.tracker
    rows = [
        ("model", primary.model),
        ("engine", engine),
        ("frames skipped between two inferred", str(primary.interval)),
        ("score threshold", "the model's" if primary.threshold is None else f"{primary.threshold:g}"),
        ("IoU threshold", "the model's" if primary.iou is None else f"{primary.iou:g}"),
        ("classes", ", ".join(map(str, primary.operate_on_class_ids)) or "all"),
        ("tracker", tracker.type if isinstance(tracker, Extension) else str(tracker.type)),
        *((f"source {source.source_id}", source.uri.partition("?")[0]) for source in summary.everybody),
    ]
    sections = [section.content for section in settings.rules_sections]
    rules = [
        tag("pre", yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100, default_flow_style=None))
        for content in sections
    ]
    return joined(
        tag("h2", "Settings"),
        _table(("setting", "value"), rows, texts=2),
        *((tag("h3", "Rules"), *rules) if rules else ()),
    )
