/** Occupancy chart, heat map and counters of a stream, from the event store of the video program. */

import {h, s} from "/dom.js";
import {video, withQuery} from "/api.js";
import {lineChart} from "/charts.js";
import {clockTime, duration, shown, table} from "/widgets.js";

const MAX_SERIES = 6;
const path = (source, name) => `/v1/streams/${encodeURIComponent(source)}/${name}`;

/** A chart of the objects for which each rule held, and of the classes in the picture. range: {since, until}. */
export async function occupancyChart(source, range = {}) {
  const answer = await video.get(withQuery(path(source, "occupancy"), range));
  const series = answer.series.filter(one => one.points.some(point => point.most > 0)).slice(0, MAX_SERIES);
  const began = Date.parse(answer.began ?? answer.since) / 1000;
  const isVideo = answer.clock === "video";
  const lines = series.map(one => ({name: one.kind === "objects" ? one.rule : `${one.rule} (${one.kind})`, points: gapless(one.points, answer.step_s)}));
  const xText = time => (isVideo ? duration(Math.max(time - began, 0)) : clockTime(new Date(time * 1000)));
  return lineChart({title: isVideo ? "Objects at once, by position in the file" : "Objects at once", series: lines, xText});
}

/** [[seconds, mean], …] with 0 for the steps that are left out. */
function gapless(points, step) {
  const known = points.map(point => [Date.parse(point.time) / 1000, point.mean]);
  const all = [];
  for (const [time, mean] of known) {
    const last = all.at(-1);
    if (last && time - last[0] > step) all.push([last[0] + step, 0], [time - step, 0]);
    all.push([time, mean]);
  }
  return all;
}

/** Where feet were, over the newest picture. range: {since, until}. */
export async function heatmap(source, range = {}) {
  const answer = await video.get(withQuery(path(source, "heatmap"), range));
  const most = Math.max(...answer.seconds.flat(), 0);
  const figure = h("figure", {class: "chart heat"}, h("figcaption", {}, "Where objects stood"));
  if (!most) {
    figure.append(h("p", {class: "quiet"}, "No data yet"));
    return figure;
  }
  const cells = answer.seconds.flatMap((row, y) => row.map((seconds, x) => (seconds ? s("rect", {x, y, width: 1, height: 1, "fill-opacity": (0.15 + 0.75 * Math.sqrt(seconds / most)).toFixed(2)}) : null)));
  const total = answer.seconds.flat().reduce((sum, seconds) => sum + seconds, 0);
  const image = h("img", {src: video.url(path(source, "preview.jpg")), alt: ""});
  const frame = h("div", {class: "heat-picture"}, image);
  image.addEventListener("load", () => frame.style.setProperty("aspect-ratio", `${image.naturalWidth} / ${image.naturalHeight}`));
  image.addEventListener("error", () => image.remove());
  const drawing = s("svg", {viewBox: `0 0 ${answer.columns} ${answer.rows}`, preserveAspectRatio: "none", role: "img", "aria-label": `Heat map: ${shown(total, "s")} in all, at most ${shown(most, "s")} in a cell`}, cells);
  frame.append(drawing);
  figure.append(frame, h("small", {}, `Darkest: ${shown(most, "s")} in one of ${answer.columns} × ${answer.rows} cells`));
  return figure;
}

/** A table of each rule's events, in, out and current objects. range: {since, until}. */
export async function counters(source, range = {}) {
  const answer = await video.get(withQuery(path(source, "counters"), range));
  const list = table({
    caption: "Counters",
    key: row => `${row.kind}/${row.rule}`,
    columns: [
      {title: "Rule", cell: row => row.rule},
      {title: "Kind", cell: row => row.kind},
      {title: "In", class: "number", cell: row => shown(row.in)},
      {title: "Out", class: "number", cell: row => shown(row.out)},
      {title: "Events", class: "number", cell: row => shown(row.events)},
      {title: "Now", class: "number", cell: row => shown(row.current)},
    ],
    empty: () => h("p", {class: "quiet"}, "This stream has no rules."),
  });
  list.update(answer.rules);
  return list.element;
}
