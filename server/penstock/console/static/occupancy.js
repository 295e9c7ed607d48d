/** Occupancy chart, heat map and counters of a stream, from the event store of the video program. */

import {h, replace, s} from "/dom.js";
import {video, withQuery} from "/api.js";
import {lineChart} from "/charts.js";
import {clockTime, faultLine, field, poll, position, shown, table} from "/widgets.js";

const MAX_SERIES = 6;
const COUNTERS_MS = 2000;
const CHARTS_MS = 5000;
const PARTS_MS = 20_000; // with the heat map, as often as the video program stores it
const HOUR_S = 3600;
const RANGES = [["Last hour", HOUR_S], ["Last 24 hours", 24 * HOUR_S], ["Last 7 days", 7 * 24 * HOUR_S], ["Since the stream was started", null]];
const path = (source, name) => `/v1/streams/${encodeURIComponent(source)}/${name}`;

/**
 * Chart and counters of a stream that stay up to date, with the choice of their time. parts: further ones, as functions
 * (source, range) that return an element. Call stop() in the end.
 */
export function occupancyPanel(source, {isLive, parts = []}) {
  const range = h("select", {}, RANGES.map(([text], number) => h("option", {value: number}, text)));
  range.value = isLive ? 1 : RANGES.length - 1;
  const since = () => {
    const seconds = RANGES[range.value][1];
    return seconds === null ? {} : {since: (Date.now() / 1000 - seconds).toFixed(0)};
  };
  const fault = faultLine();
  const charts = h("div", {class: "occupancy-charts"});
  const list = countersTable();
  const element = h("div", {}, isLive ? h("div", {class: "fields event-filter"}, field("Time", range)) : null, fault.element, h("div", {class: "occupancy"}, list.element, charts));
  const draw = async () => replace(charts, await Promise.all([occupancyChart, ...parts].map(part => part(source, since()))));
  const count = async signal => {
    list.update((await video.get(withQuery(path(source, "counters"), since()), {signal})).rules);
    fault.show(null);
  };
  const stops = [poll(count, COUNTERS_MS, fault.show), poll(draw, parts.length ? PARTS_MS : CHARTS_MS, fault.show)];
  range.addEventListener("change", () => Promise.all([count(), draw()]).catch(fault.show));
  return {element, stop: () => stops.forEach(stop => stop())};
}

/** A chart of the objects for which each rule held, and of the classes in the picture. range: {since, until}. */
async function occupancyChart(source, range) {
  const answer = await video.get(withQuery(path(source, "occupancy"), range));
  const series = answer.series.filter(one => one.points.some(point => point.most > 0)).slice(0, MAX_SERIES);
  const began = Date.parse(answer.began ?? answer.since) / 1000;
  const isVideo = answer.clock === "video";
  const end = isVideo ? Date.parse(answer.until) / 1000 : Date.now() / 1000; // the newest step is not over
  const lines = series.map(one => ({name: one.kind === "objects" ? one.rule : `${one.rule} (${one.kind})`, points: steps(one.points, answer.step_s, isVideo ? began : 0, end)}));
  const xText = time => (isVideo ? position(Math.max(time - began, 0)) : clockTime(new Date(time * 1000)));
  return lineChart({title: isVideo ? "Objects at once, by time since the stream's start" : "Objects at once", series: lines, xText});
}

/** [[seconds, mean], …], level for each step, with 0 for the steps that are left out. No step goes beyond [began, end], in seconds. */
function steps(points, step, began, end) {
  const all = [];
  for (const {time, mean} of points) {
    const start = Math.max(Date.parse(time) / 1000, began);
    const last = all.at(-1);
    if (last && start > last[0]) all.push([last[0], 0], [start, 0]);
    all.push([start, mean], [Math.max(Math.min(Date.parse(time) / 1000 + step, end), start), mean]);
  }
  return all;
}

/** Where feet were: a drawing to lay over the picture, and the most seconds in a cell; 0 without data. */
export async function heatCells(source, range = {}) {
  const {seconds, columns, rows} = await video.get(withQuery(path(source, "heatmap"), range));
  const most = Math.max(...seconds.flat(), 0);
  const total = seconds.flat().reduce((sum, one) => sum + one, 0);
  const cells = seconds.flatMap((row, y) => row.map((one, x) => (one ? s("rect", {x, y, width: 1, height: 1, "fill-opacity": (0.15 + 0.75 * Math.sqrt(one / most)).toFixed(2)}) : null)));
  const drawing = s("svg", {class: "heat-cells", viewBox: `0 0 ${columns} ${rows}`, preserveAspectRatio: "none", role: "img", "aria-label": `Heat map: ${shown(total, "s")} in all, at most ${shown(most, "s")} in a cell`}, cells);
  return {drawing, most, note: most ? `Darkest: ${shown(most, "s")} in one of ${columns} × ${rows} cells` : "No data yet"};
}

/** The heat map over the newest picture. range: {since, until}. */
export async function heatmap(source, range = {}) {
  const {drawing, most, note} = await heatCells(source, range);
  const figure = h("figure", {class: "chart heat"}, h("figcaption", {}, "Where objects stood"));
  if (!most) {
    figure.append(h("p", {class: "quiet"}, note));
    return figure;
  }
  const image = h("img", {src: video.url(path(source, "preview.jpg")), alt: ""});
  const frame = h("div", {class: "heat-picture"}, image, drawing);
  image.addEventListener("load", () => frame.style.setProperty("aspect-ratio", `${image.naturalWidth} / ${image.naturalHeight}`));
  image.addEventListener("error", () => image.remove());
  figure.append(frame, h("small", {}, note));
  return figure;
}

/** Whether the events of a rule have directions: not those of a one-way line, or of overcrowding and dwell. */
const hasDirections = row => ["line-crossing", "roi-filtering"].includes(row.kind) && row.in + row.out >= row.events;

/** A table of each rule's events, in, out and current objects. */
function countersTable() {
  return table({
    caption: "Counters",
    key: row => `${row.kind}/${row.rule}`,
    columns: [
      {title: "Rule", cell: row => row.rule},
      {title: "Kind", cell: row => row.kind},
      {title: "In", class: "number", cell: row => shown(hasDirections(row) ? row.in : null)},
      {title: "Out", class: "number", cell: row => shown(hasDirections(row) ? row.out : null)},
      {title: "Events", class: "number", cell: row => shown(row.events)},
      {title: "Now", class: "number", cell: row => shown(row.current)},
    ],
    empty: () => h("p", {class: "quiet"}, "This stream has no rules."),
  });
}
