/** SVG charts. console.css sets the colors. */

import {h, s} from "/dom.js";
import {shown} from "/widgets.js";

const WIDTH = 640;
const LEFT = 52;
const RIGHT = 12;
const TOP = 10;
const BOTTOM = 24;

/**
 * A line chart with a legend. series: [{name, points: [[x, y], …]}]; y is null for a gap. xText: formats the ticks of
 * the x axis. limit: y of a horizontal line, such as an SLO. width: expected width in CSS pixels, which sets the size
 * of the text. empty: text without data.
 */
export function lineChart({title, series, unit = "", width = WIDTH, height = 200, xText = shown, limit = null, yMax = null, empty = "No data yet"}) {
  const all = series.flatMap(one => one.points);
  const points = all.filter(point => point[1] !== null);
  if (!points.length) return h("figure", {class: "chart"}, h("figcaption", {}, title), h("p", {class: "quiet"}, empty));
  const [x0, x1] = extent(all.map(point => point[0]));
  const top = niceCeiling(yMax ?? Math.max(...points.map(point => point[1]), limit ?? 0));
  const x = value => LEFT + ((value - x0) / (x1 - x0 || 1)) * (width - LEFT - RIGHT);
  const y = value => TOP + (1 - value / top) * (height - TOP - BOTTOM);
  const drawing = s("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: ${summary(series, unit)}`});
  for (let step = 0; step <= 4; step += 1) {
    const value = (top * step) / 4;
    drawing.append(s("line", {class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value)}));
    drawing.append(s("text", {class: "tick end", x: LEFT - 6, y: y(value) + 4}, shown(value)));
  }
  for (const [index, value] of (x0 < x1 ? [x0, (x0 + x1) / 2, x1] : [x0]).entries()) {
    drawing.append(s("text", {class: `tick ${["start", "middle", "end"][index]}`, x: x(value), y: height - 6}, xText(value)));
  }
  if (limit !== null) drawing.append(s("line", {class: "limit", x1: LEFT, x2: width - RIGHT, y1: y(limit), y2: y(limit)}));
  series.forEach((one, index) => drawing.append(s("path", {class: `line series-${index % 6}`, d: path(one.points, x, y)})));
  const legend = series.map((one, index) => h("span", {class: `key series-${index % 6}`}, one.name));
  return h("figure", {class: "chart"}, h("figcaption", {}, title, unit ? h("span", {class: "quiet"}, ` (${unit})`) : null), drawing, h("div", {class: "legend"}, legend));
}

/** A horizontal bar chart. rows: [{name, value, text?}]. */
export function barChart({title, rows, unit = ""}) {
  const most = Math.max(...rows.map(row => row.value), 1e-9);
  const lines = rows.map(row => {
    const bar = s("svg", {viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true"}, s("rect", {class: "bar-fill", width: (100 * row.value) / most, height: 8}));
    return h("li", {}, h("span", {}, row.name), bar, h("span", {class: "number"}, row.text ?? shown(row.value, unit)));
  });
  return h("figure", {class: "chart"}, h("figcaption", {}, title), h("ul", {class: "bars"}, lines));
}

/** One bar that is split into consecutive stages. stages: [{name, value}]. */
export function stageBar({title, stages, unit = "ms"}) {
  const total = stages.reduce((sum, stage) => sum + stage.value, 0) || 1;
  let begin = 0;
  const drawing = s("svg", {class: "stages", viewBox: "0 0 1000 24", preserveAspectRatio: "none", role: "img", "aria-label": `${title}: ${stages.map(stage => `${stage.name} ${shown(stage.value, unit)}`).join(", ")}`});
  stages.forEach((stage, index) => {
    const width = (1000 * stage.value) / total;
    drawing.append(s("rect", {class: `stage series-${index % 6}`, x: begin, width: Math.max(width, 1), height: 24}));
    begin += width;
  });
  const legend = stages.map((stage, index) => h("span", {class: `key series-${index % 6}`}, `${stage.name} ${shown(stage.value, unit)}`));
  return h("figure", {class: "chart"}, h("figcaption", {}, title), drawing, h("div", {class: "legend"}, legend));
}

function extent(values) {
  return [Math.min(...values), Math.max(...values)];
}

/** The smallest of 1, 2, 2.5, 5, 10 times a power of ten that is at least `value`. */
function niceCeiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].find(step => value <= step * power * 1.0001) * power;
}

function path(points, x, y) {
  let text = "";
  let isGap = true;
  for (const [px, py] of points) {
    if (py === null) {
      isGap = true;
      continue;
    }
    text += `${isGap ? "M" : "L"}${x(px).toFixed(1)} ${y(py).toFixed(1)}`;
    isGap = false;
  }
  return text;
}

function summary(series, unit) {
  return series.map(one => {
    const last = one.points.filter(point => point[1] !== null).at(-1);
    return `${one.name} ${last ? shown(last[1], unit) : "no data"}`;
  }).join(", ");
}
