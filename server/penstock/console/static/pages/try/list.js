/** The results of a picture as a table, its stages as a bar, and how its batch was formed. */

import {h, replace} from "/dom.js";
import {stageBar} from "/charts.js";
import {shown, table} from "/widgets.js";
import {areaOf, runLengths} from "/pages/try/masks.js";
import {colorOf} from "/pages/try/drawing.js";

const MAX_ROWS = 200;
const MAX_JSON = 100_000;
const STAGES = {decode: "decode the picture", preprocess: "preprocess", queue: "queue", infer: "engine", postprocess: "decode the outputs"};
const NOUNS = {detections: "object", classes: "class", text: "text"};

/** The member of a result that is present, such as "detections". */
export const kindOf = result => Object.keys(result)[0] ?? "";

const score = {title: "Score", class: "number", cell: row => row.score.toFixed(3)};
const swatched = (color, text) => h("span", {}, swatch(color), text);

function swatch(color) {
  const box = h("span", {class: "swatch", "aria-hidden": "true"});
  box.style.setProperty("background", `rgb(${color.join(" ")})`);
  return box;
}

/** {columns, rows, hasPlace}: hasPlace if a row is something in the picture. */
function tableOf(result) {
  const kind = kindOf(result);
  const value = result[kind];
  if (kind === "detections") return {columns: detectionColumns(value), rows: value, hasPlace: true};
  if (kind === "classes") return {columns: [{title: "Class", cell: row => row.label}, {title: "ID", class: "number", cell: row => row.class_id}, score], rows: value};
  if (kind === "text") return {columns: [{title: "Text", cell: row => row.text || "(not read)"}, score], rows: value, hasPlace: true};
  if (kind === "segmentation") return segmentationTable(value);
  if (kind === "embedding") return factTable(embeddingFacts(value));
  if (kind === "depth") return factTable([["Size", `${value.size[1]} × ${value.size[0]}`], ["Lowest value", shown(value.offset)], ["Highest value", shown(value.offset + 65535 * value.scale)]]);
  return factTable([[kind, JSON.stringify(value).slice(0, 2000)]]);
}

function detectionColumns(found) {
  const columns = [
    {title: "Label", class: "name", cell: row => swatched(colorOf(row.class_id), row.label)},
    score,
    {title: "x1, y1, x2, y2", class: "number", cell: row => row.xyxy.map(Math.round).join(", ")},
  ];
  if (found.some(one => one.xywhr)) columns.push({title: "Angle", class: "number", cell: row => `${Math.round((row.xywhr[4] * 180) / Math.PI)}°`});
  if (found.some(one => one.mask)) columns.push({title: "Mask", class: "number", cell: row => `${areaOf(runLengths(row.mask.counts)).toLocaleString("en")} px`});
  if (found.some(one => one.keypoints)) columns.push({title: "Keypoints", class: "number", cell: row => row.keypoints.length});
  return columns;
}

function segmentationTable({size, classes}) {
  const whole = Math.max(size[0] * size[1], 1);
  const columns = [
    {title: "Class", class: "name", cell: row => swatched(colorOf(row.class_id), row.label)},
    {title: "Share", class: "number", cell: row => `${((100 * row.area) / whole).toFixed(1)} %`},
    {title: "Pixels", class: "number", cell: row => row.area.toLocaleString("en")},
  ];
  return {columns, rows: classes, hasPlace: true};
}

function embeddingFacts(vector) {
  const first = vector.slice(0, 8).map(value => value.toFixed(4)).join(", ");
  return [["Length", `${vector.length} values`], ["First values", vector.length > 8 ? `${first}, …` : first], ["L2 norm", shown(Math.sqrt(vector.reduce((sum, value) => sum + value * value, 0)))]];
}

const factTable = facts => ({columns: [{title: "What", cell: row => row[0]}, {title: "Value", cell: row => row[1]}], rows: facts});

/** highlighted(index): a row is under the pointer or has the focus; null if none. mark(index): marks a row. */
export function resultList(highlighted) {
  const head = h("p", {class: "result-head", role: "status"});
  const body = h("div", {});
  const json = h("details", {hidden: true}, h("summary", {}, "Answer as JSON"));
  const element = h("section", {class: "result-list", "aria-label": "Results"}, h("h2", {}, "Results"), head, body, json);
  let lines = [];
  clear();
  json.addEventListener("toggle", showJson);
  let answer = null;
  function showJson() {
    json.querySelector("pre")?.remove();
    if (!json.open || !answer) return;
    const text = JSON.stringify(answer, null, 1);
    json.append(h("pre", {class: "json", tabindex: "0"}, text.length > MAX_JSON ? `${text.slice(0, MAX_JSON)}…` : text));
  }
  function show(next, size, {isLive, hasConf, labels}) {
    answer = next;
    const result = answer.results[0];
    const {columns, rows, hasPlace} = tableOf(result);
    const list = table({columns, caption: "Results", key: row => rows.indexOf(row), empty: () => nothing(hasConf, labels)});
    list.update(rows.slice(0, MAX_ROWS));
    lines = [...list.element.querySelectorAll("tbody tr")];
    if (hasPlace) watch(lines, highlighted);
    head.setAttribute("aria-live", isLive ? "off" : "polite");
    replace(head, headline(answer, rows, size));
    replace(body, list.element, rows.length > MAX_ROWS ? h("p", {class: "quiet"}, `${rows.length - MAX_ROWS} more are in the picture and in the JSON.`) : null);
    json.hidden = false;
    showJson();
  }
  function clear() {
    replace(head, "");
    replace(body, h("p", {class: "quiet"}, "What the model finds is listed here."));
    json.hidden = true;
    lines = [];
  }
  function mark(index) {
    lines.forEach((line, place) => line.classList.toggle("marked", place === index));
    const line = lines[index];
    const box = line?.closest(".scroll");
    if (!box) return;
    const isSeen = line.offsetTop >= box.scrollTop && line.offsetTop + line.offsetHeight <= box.scrollTop + box.clientHeight;
    if (!isSeen) box.scrollTop = line.offsetTop - box.clientHeight / 2; // not scrollIntoView, which also moves the page
  }
  return {element, show, clear, mark, wait: () => replace(head, "Waiting for the answer …")};
}

function headline(answer, rows, size) {
  const noun = NOUNS[kindOf(answer.results[0])];
  const plural = noun === "class" ? "classes" : `${noun}s`;
  const count = noun ? `${rows.length} ${rows.length === 1 ? noun : plural} · ` : "";
  return `${count}${answer.model_name}, version ${answer.model_version}${size ? ` · ${size.width} × ${size.height} pixels` : ""}`;
}

/** labels: the model's, if they are few. */
function nothing(hasConf, labels) {
  const known = labels.length ? ` This model knows: ${labels.join(", ")}.` : "";
  return h("p", {class: "empty"}, `Nothing found.${hasConf ? " A lower score threshold may show more." : ""}${known}`);
}

/** Rows tell what is under the pointer or has the focus; one is reached by Tab, the others by the arrow keys. */
function watch(lines, highlighted) {
  lines.forEach((line, index) => {
    line.tabIndex = index ? -1 : 0;
    line.addEventListener("mouseenter", () => highlighted(index));
    line.addEventListener("mouseleave", () => highlighted(null));
    line.addEventListener("focus", () => highlighted(index));
    line.addEventListener("blur", () => highlighted(null));
    line.addEventListener("keydown", event => {
      const next = lines[index + ({ArrowDown: 1, ArrowUp: -1}[event.key] ?? 0)];
      if (!next || next === line) return;
      event.preventDefault();
      [line.tabIndex, next.tabIndex] = [-1, 0];
      next.focus();
    });
  });
}

/** The stages of a request as a bar, and the explanation of its batch. roundTripMs: as the browser measured it. */
export function reportOf(answer, roundTripMs) {
  const known = answer.timings_ms;
  const stages = Object.entries(STAGES).map(([name, text]) => ({name: text, value: known[name] ?? 0}));
  const other = known.total - stages.reduce((sum, stage) => sum + stage.value, 0);
  if (other > 0) stages.push({name: "other", value: other});
  const explained = answer.explain?.[0];
  return [
    stageBar({title: `Time in the gateway: ${shown(known.total, "ms")}`, stages}),
    h("p", {class: "quiet"}, `${shown(roundTripMs, "ms")} from this page to the answer, with the network and the console.`),
    explained ? batchOf(explained, answer.batch_size) : null,
  ];
}

function batchOf(explained, rows) {
  const facts = [
    ["Formed by", explained.owner === "off" ? "no one: batching is off" : explained.owner],
    ["Rows", `${explained.batch_rows ?? rows}${explained.batch_requests ? ` of ${explained.batch_requests} request${explained.batch_requests === 1 ? "" : "s"}` : ""}`],
    ["Waited", explained.queue_ms === undefined ? null : shown(explained.queue_ms, "ms")],
    ["Engine", explained.engine_ms === undefined ? null : `${shown(explained.engine_ms, "ms")}${explained.expected_ms === undefined ? "" : `, expected ${shown(explained.expected_ms, "ms")}`}`],
    ["Time left", explained.slack_ms === undefined ? null : `${shown(explained.slack_ms, "ms")} to the deadline`],
  ];
  const text = explained.text.charAt(0).toUpperCase() + explained.text.slice(1);
  return [
    h("h3", {}, "Batch"),
    h("p", {}, `${text}.`),
    h("dl", {class: "facts"}, facts.filter(([, value]) => value !== null).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
  ];
}
