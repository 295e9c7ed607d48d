/** One model: its card, versions and figures over time, and what can be done with it. */

import {h, replace} from "/dom.js";
import {gateway, identity} from "/api.js";
import {barChart, lineChart} from "/charts.js";
import {badge, button, clockTime, dialog, emptyState, faultLine, pageHead, poll, shown, table, toast} from "/widgets.js";
import {pathOf, reasonOf, refusedOf, runsOn, stateBadge, tryPageOf} from "/pages/models/model.js";

const POLL_MS = 2000;
const OVER_S = 10; // figures over the last seconds
const MAX_POINTS = 300;
const LOAD_MS = 300_000; // a model is tried before it serves
const CHECK_KINDS = {ok: "good", differs: "bad", "cannot run": "bad", "not judged": "warn"};
const SHOWN_LABELS = 200;
const VERSION_KINDS = {READY: "good", LOADING: "warn", UNAVAILABLE: "bad"};
const RESIZES = {stretch: "stretched", pad_right_bottom: "padded at the right and the bottom", pad_symmetric: "padded at all sides", keep: "own size", crop: "cropped to the center", fit_height: "fitted in height"};
const CLOSED = {slot_free: "the engine was free", deadline: "a deadline came near", full: "full", delay: "waited long enough", incompatible: "the next request differs"};

export async function detail(root, name, {go}) {
  const fault = faultLine();
  const state = h("span");
  const reason = h("p", {class: "fault"});
  const note = h("p", {class: "quiet"});
  const charts = h("div", {class: "model-charts"});
  const facts = h("div", {class: "model-facts"});
  const labels = h("div");
  const versions = versionTable();
  const history = [];
  const who = await identity();
  const isAdmin = who.roles.includes("admin");
  let model = null;
  let working = "";

  const tryIt = h("a", {class: "button primary", href: tryPageOf(name)}, "Try it");
  const load = button("Load", () => act("loading", () => gateway.post(`/v2/repository/models/${encodeURIComponent(name)}/load`, {json: {}, timeoutMs: LOAD_MS}), `${name} is loaded.`));
  const check = button("Check", () => act("checking", async () => {
    showCheck(await gateway.post(`${pathOf(name)}/check`, {timeoutMs: LOAD_MS}));
  }));
  const unload = button("Unload", () => ask(`Unload ${name}?`, "Requests to it fail until it is loaded again.", "Unload", async () => {
    await gateway.post(`/v2/repository/models/${encodeURIComponent(name)}/unload`, {json: {}});
    toast(`${name} is unloaded.`, "good");
    await again();
  }));
  const remove = button("Remove", () => ask(`Remove ${name}?`, "It is unloaded, and its folder is deleted from the disk of the gateway.", "Remove", async () => {
    await gateway.delete(pathOf(name));
    toast(`${name} is removed.`, "good");
    go("/models");
  }), {kind: "danger"});
  root.append(
    h("p", {}, h("a", {href: "/models"}, "All models")),
    pageHead(name, tryIt, check, load, unload, remove),
    h("div", {class: "stream-state"}, state, reason), note, fault.element, charts,
    h("div", {class: "model-cards"}, facts, h("section", {class: "card"}, h("h3", {}, "Versions"), versions.element)), labels,
  );
  const title = root.querySelector("h1");

  async function act(verb, work, done = "") {
    working = verb;
    arrange();
    try {
      await work();
      if (done) toast(done, "good");
    } catch (error) {
      toast(error.message, "bad");
    }
    working = "";
    await again();
  }
  function ask(question, text, verb, run) {
    dialog(question, [h("p", {}, text)], [{text: verb, kind: "danger", run}]);
  }
  /** The state of the buttons: what the model and the roles of the key allow. */
  function arrange() {
    if (model === null) return;
    const isReady = model.state === "ready";
    replace(state, working ? badge(`${working} …`, "warn") : stateBadge(model));
    reason.textContent = reasonOf(model) || model.card_problem;
    reason.classList.toggle("fault", model.state !== "not loaded");
    tryIt.hidden = !isReady || model.card === null;
    load.textContent = isReady ? "Load again" : "Load";
    check.hidden = !isReady;
    check.disabled = load.disabled = unload.disabled = remove.disabled = Boolean(working) || !isAdmin;
    unload.hidden = model.state === "not loaded";
    remove.hidden = !model.is_removable;
    note.textContent = isAdmin ? "" : `Check, load, unload and remove need the role admin; this key has ${who.roles.join(", ") || "none"}.`;
  }
  function record(found) {
    const last = history.at(-1);
    const batches = last ? found.batching.count - last.count : 0;
    const {rate_per_s: rate, p50_ms: p50, p99_ms: p99} = found.traffic;
    const {count, rows} = found.batching;
    history.push({at: Date.now() / 1000, rate, p50, p99, waiting: found.queue.waiting, running: found.queue.in_flight, count, rows, size: batches > 0 ? (rows - last.rows) / batches : null});
    if (history.length > MAX_POINTS) history.shift();
  }
  async function refresh(signal) {
    let found;
    try {
      found = await gateway.get(`${pathOf(name)}?over_s=${OVER_S}`, {signal});
    } catch (error) {
      if (error.status !== 404) throw error;
      replace(root, pageHead(name), emptyState("There is no such model", error.message, h("p", {}, h("a", {href: "/models"}, "All models"))));
      stop();
      return;
    }
    const hasNewLabels = model === null || String(found.card?.labels) !== String(model.card?.labels);
    model = found;
    fault.show(null);
    record(found);
    arrange();
    replace(charts, chartsOf(history, found, widthOf(charts)));
    put(facts, factsOf(found));
    versions.update(found.versions.filter(version => version.version || version.reason));
    if (hasNewLabels) replace(labels, labelsOf(found.card));
  }
  const again = () => refresh().catch(fault.show);
  title.classList.add("whole-name");
  const stop = poll(refresh, POLL_MS, fault.show);
  return () => stop();
}

/** Replaces the children of an element only if they differ, so that a selected text stays. */
function put(parent, children) {
  const next = replace(parent.cloneNode(), children);
  if (!parent.isEqualNode(next)) parent.replaceChildren(...next.childNodes);
}

/** A dialog with what a check found. */
function showCheck({name, verdict, compared_with: compared, reasons, notes, took_s: tookS}) {
  const words = compared.length ? `compared with ${compared.join(", ")} in ${shown(tookS, "s")}` : "nothing to compare with";
  dialog(`Check of ${name}`, [
    h("p", {}, badge(verdict, CHECK_KINDS[verdict] ?? ""), ` ${words}`),
    h("ul", {class: "plain"}, [...reasons, ...notes].map(text => h("li", {}, text))),
  ]);
}

function versionTable() {
  return table({
    caption: "Versions",
    key: version => version.version,
    columns: [
      {title: "Version", cell: version => version.version || "–"},
      {title: "State", cell: version => badge((version.state || "not loaded").toLowerCase(), VERSION_KINDS[version.state] ?? "")},
      {title: "Reason", cell: version => version.reason},
    ],
    empty: () => h("p", {class: "quiet"}, "None is loaded."),
  });
}

/** The pixels that a chart gets in a column of the grid. */
function widthOf(grid) {
  const [column] = getComputedStyle(grid).gridTemplateColumns.split(" ");
  return Math.max(220, parseFloat(column) - 32);
}

function chartsOf(history, model, width) {
  const line = (name, field) => ({name, points: history.map(point => [point.at, point[field]])});
  const options = {width, height: 150, xText: at => clockTime(new Date(at * 1000))};
  const {batching} = model;
  const slowest = Math.max(0, ...history.map(point => point.p99 ?? 0));
  const limit = batching.slo_p99_ms !== null && batching.slo_p99_ms < 3 * slowest ? batching.slo_p99_ms : null; // a far one would flatten the lines
  const all = [
    lineChart({title: "Requests", unit: "per second", series: [line("rate", "rate")], ...options}),
    lineChart({title: "Latency", unit: "ms", series: [line("p50", "p50"), line("p99", "p99")], limit, ...options}),
    lineChart({title: "Queue", unit: "requests", series: [line("waiting", "waiting"), line("running", "running")], ...options}),
  ];
  if (batching.owner === "gateway") all.push(lineChart({title: "Mean batch", unit: "rows", series: [line("rows", "size")], ...options}));
  return all.map(chart => h("section", {class: "card"}, chart));
}

const fact = (name, value) => (value === null || value === undefined || value === "" ? [] : [h("dt", {}, name), h("dd", {}, value)]);
const tensorText = tensor => `${tensor.name} ${tensor.datatype} [${tensor.shape.map(side => (side < 0 ? "any" : side)).join(", ")}]`;
const lines = texts => texts.map(text => h("div", {}, text));

/** A line for HTTP and one for gRPC, whose statuses have names. */
function statusesOf(codes) {
  const groups = Object.groupBy(Object.entries(codes), ([code]) => (/^[0-9]+$/.test(code) ? "HTTP" : "gRPC"));
  return Object.entries(groups).map(([protocol, found]) => `${protocol}: ${found.map(([code, count]) => `${shown(count)} × ${code}`).join(", ")}`);
}

function factsOf(model) {
  const {batching, traffic, card} = model;
  const refused = Object.entries(traffic.refused).filter(([, count]) => count).map(([why, count]) => `${count} ${why.replaceAll("_", " ")}`);
  const closed = Object.entries(batching.closed_by).map(([why, value]) => ({name: CLOSED[why] ?? why, value}));
  return [
    card ? cardOf(card, model) : h("section", {class: "card"}, h("h3", {}, "Tensors"), h("p", {class: "quiet"}, model.inputs.length ? "It has no picture parameters: it takes tensors." : "Its inputs are known once it is loaded."), h("dl", {class: "facts"}, tensorFacts(model))),
    model.runs_on ? h("section", {class: "card"}, h("h3", {}, "Device"), h("dl", {class: "facts"}, fact("Runs on", runsOn(model.runs_on)), fact("Not as configured", model.runs_on.fallbacks.join("; ") || null))) : null,
    h("section", {class: "card"}, h("h3", {}, "Batches"), h("dl", {class: "facts"},
      fact("Formed by", {gateway: "the gateway", triton: "Triton", off: "nothing: each request is a call"}[batching.owner]),
      fact("Largest", batching.max_batch_size), fact("Instances", batching.instances), fact("SLO", batching.slo_p99_ms === null ? null : `p99 ${shown(batching.slo_p99_ms, "ms")}`),
      fact("Not merged", batching.unmerged), fact("Batches", batching.count ? `${shown(batching.count)}, mean ${shown(batching.mean_rows)} rows` : null),
      fact("Answers by status", lines(statusesOf(traffic.codes))), fact("Refused", refusedOf(model) ? refused.join(", ") : "0")),
    batching.count ? barChart({title: "Why batches closed", rows: closed}) : null),
  ];
}

const tensorFacts = model => [fact("Inputs", lines(model.inputs.map(tensorText))), fact("Outputs", lines(model.outputs.map(tensorText))), fact("Backend", model.backend)];

function cardOf(card, model) {
  const size = card.width && card.height ? `${card.width} × ${card.height}` : "that of the picture";
  const padding = card.resize.startsWith("pad") ? ` with ${shown(card.padding)}` : "";
  const isPlain = card.offsets.every(value => value === 0) && card.channel_factors.every(value => value === 1);
  const values = isPlain ? `pixel × ${shown(card.scale)}` : `${shown(card.scale)} × (pixel − [${card.offsets.map(value => shown(value)).join(", ")}]) × [${card.channel_factors.map(value => shown(value)).join(", ")}]`;
  return h("section", {class: "card"}, h("h3", {}, "Card"), h("dl", {class: "facts"},
    fact("Answers", card.network_type.replaceAll("_", " ")), fact("Layout", card.layout), fact("Size", size), fact("Colors", card.color.toUpperCase()),
    fact("Resized", `${RESIZES[card.resize] ?? card.resize}${padding}`), fact("Values", values),
    fact("Threshold", card.conf === null ? null : shown(card.conf)), fact("NMS IoU", card.iou === null ? null : shown(card.iou)),
    fact("Parameters", card.options.join(", ")), fact("Decoded by", `the ${card.decoder}`), tensorFacts(model)));
}

function labelsOf(card) {
  if (!card?.label_count) return null;
  const some = card.labels.slice(0, SHOWN_LABELS);
  const rest = card.label_count - some.length;
  return h("details", {class: "card labelled"}, h("summary", {}, `${card.label_count} ${card.label_count === 1 ? "label" : "labels"}`), h("ol", {class: "labels", start: "0"}, some.map(label => h("li", {}, label))), rest > 0 ? h("p", {class: "quiet"}, `and ${rest} more`) : null);
}
