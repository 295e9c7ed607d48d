/** Models: what is served, in which state and how fast. A row leads to the model's page. */

import {h, replace} from "/dom.js";
import {gateway, identity} from "/api.js";
import {button, command, emptyState, faultLine, pageHead, poll, roleNeeded, shown, table} from "/widgets.js";
import {hasFiles, openAdd} from "/pages/models/add.js";
import {detail} from "/pages/models/detail.js";
import {pageOf, reasonOf, refusedOf, stateBadge} from "/pages/models/model.js";

const ORDER = ["unavailable", "loading", "ready", "not loaded"];
const POLL_MS = 2000;

export const page = {
  title: "Models",
  path: "/models",
  render: (root, context) => (context.rest[0] ? detail(root, context.rest[0], context) : list(root)),
};

/** What a model takes, in a few words. */
function summaryOf({card, backend, inputs}) {
  if (card) {
    const size = card.width && card.height ? `${card.width} × ${card.height}` : "any size";
    return [card.layout, size, card.label_count ? `${card.label_count} ${card.label_count === 1 ? "label" : "labels"}` : null].filter(Boolean).join(" · ");
  }
  return inputs.length ? `tensors · ${backend}` : "";
}

/** Two lines of a cell: a figure, and what explains it. */
const pair = (figure, rest) => h("div", {class: "pair"}, h("span", {}, figure), h("small", {}, rest));

function nameCell(model) {
  const versions = model.versions.filter(version => version.state === "READY").map(version => version.version);
  const more = [summaryOf(model), versions.length ? `version ${versions.join(", ")}` : null, model.runs_on ? `${model.runs_on.device} in ${model.runs_on.precision.toUpperCase()}` : null].filter(Boolean).join(" · ");
  const problem = reasonOf(model) || model.card_problem;
  return h("div", {class: "model-name"}, h("a", {href: pageOf(model.name)}, model.name), more ? h("small", {}, more) : null, problem ? h("small", {class: model.state === "not loaded" ? "" : "fault"}, problem) : null);
}

/** A model that is not loaded has figures only if it served before. */
const hasFigures = model => model.state === "ready" || model.traffic.requests > 0;
const figure = content => model => (hasFigures(model) ? content(model) : "");

const COLUMNS = [
  {title: "Model", cell: nameCell},
  {title: "State", cell: stateBadge},
  {title: "Rate", class: "number", cell: figure(({traffic}) => pair(shown(traffic.rate_per_s, "/s"), `${shown(traffic.requests)} in all`))},
  {title: "Latency", class: "number", cell: figure(({traffic}) => (traffic.p50_ms === null ? "–" : pair(`p50 ${shown(traffic.p50_ms, "ms")}`, `p99 ${shown(traffic.p99_ms, "ms")}`)))},
  {title: "Queue", class: "number", cell: figure(({queue}) => pair(`${shown(queue.waiting)} waiting`, `${shown(queue.in_flight)} running`))},
  {title: "Batches", class: "number", cell: figure(({batching}) => (batching.count ? pair(shown(batching.count), `mean ${shown(batching.mean_rows)}`) : "–"))},
  {title: "Refused", class: "number", cell: figure(model => shown(refusedOf(model)))},
];

function list(root) {
  const fault = faultLine();
  const search = h("input", {type: "search", placeholder: "Find a model", "aria-label": "Find a model"});
  const filters = h("div", {class: "actions", role: "group", "aria-label": "States"});
  const rows = table({caption: "Models", key: model => model.name, columns: COLUMNS, empty});
  const omitted = h("p", {class: "quiet"});
  let models = null;
  let state = "all";

  function empty() {
    if (models.length) return emptyState("No model matches", "Change the text, or choose another state.");
    return emptyState("No model yet", "Drop an ONNX file here, or take one of the catalogue:", h("div", {class: "empty-command"}, command("penstock models pull yolox-nano")));
  }
  function arrange() {
    if (models === null) return;
    const words = search.value.trim().toLowerCase();
    const isMatch = model => (state === "all" || model.state === state) && `${model.name} ${summaryOf(model)}`.toLowerCase().includes(words);
    rows.update(models.filter(isMatch));
    arrangeFilters();
  }
  /** A button for each state that occurs. */
  function arrangeFilters() {
    const counts = new Map([["all", models.length]]);
    for (const model of models) counts.set(model.state, (counts.get(model.state) ?? 0) + 1);
    if (!counts.has(state)) counts.set(state, 0);
    for (const one of [...filters.children]) if (!counts.has(one.dataset.state)) one.remove();
    for (const [name, count] of counts) {
      let one = [...filters.children].find(child => child.dataset.state === name);
      if (!one) {
        one = button("", () => {
          state = name;
          arrange();
        }, {kind: "small", "data-state": name});
        filters.append(one);
      }
      one.textContent = `${name} ${count}`;
      one.setAttribute("aria-pressed", String(name === state));
    }
  }
  async function load(signal) {
    const found = await gateway.get("/v1/models", {signal});
    models = found.models.sort((one, other) => ORDER.indexOf(one.state) - ORDER.indexOf(other.state)); // stable: by name within a state
    omitted.textContent = found.omitted ? `${found.omitted} more are not listed.` : "";
    fault.show(null);
    arrange();
  }
  search.addEventListener("input", arrange);
  const add = button("Add a model", () => openAdd(), {kind: "primary", disabled: true});
  const note = h("p", {class: "quiet"});
  identity().then(who => {
    add.disabled = !who.roles.includes("admin");
    note.textContent = add.disabled && who.roles.length ? `Adding a model needs the role admin; this key has ${who.roles.join(", ")}.` : "";
  }, () => {});
  const stopDrops = takeDrops(() => !add.disabled);
  root.append(pageHead("Models", search, add), note, fault.element, h("div", {class: "row"}, filters), rows.element, omitted);
  const stop = poll(load, POLL_MS, error => {
    if (error.status !== 403) return fault.show(error);
    stop();
    return replace(root, pageHead("Models"), roleNeeded("The list of models", "read"));
  });
  return () => {
    stop();
    stopDrops();
  };
}

/** Adds a file that is dropped anywhere on the page. Returns a function that ends it. */
function takeDrops(isAllowed) {
  const ended = new AbortController();
  const shows = isOver => document.body.classList.toggle("dropping", isOver);
  const isWanted = event => hasFiles(event) && isAllowed() && !document.querySelector("dialog[open]");
  const on = (kind, run) => document.addEventListener(kind, run, {signal: ended.signal});
  on("dragover", event => {
    if (!isWanted(event)) return;
    event.preventDefault();
    shows(true);
  });
  on("dragleave", event => event.relatedTarget === null && shows(false));
  on("drop", event => {
    shows(false);
    if (!isWanted(event)) return;
    event.preventDefault();
    openAdd(event.dataTransfer.files[0] ?? null);
  });
  return () => {
    shows(false);
    ended.abort();
  };
}
