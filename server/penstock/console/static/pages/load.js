/** Load: starts a load test, shows its progress and report, compares two runs, and shows the history by commit. */

import {h, replace} from "/dom.js";
import {gateway, withQuery} from "/api.js";
import {lineChart} from "/charts.js";
import {badge, button, clockTime, dialog, duration, emptyState, faultLine, field, pageHead, poll, shown, table, toast} from "/widgets.js";

const RUNS = "/v1/load/runs";
const KINDS = {running: "warn", passed: "good", failed: "bad", error: "bad"};
const MAX_POINTS = 600;
const MAX_CHARTED = 40;
const path = (id, rest = "") => `${RUNS}/${encodeURIComponent(id)}${rest}`;
const ENDED = {failed: "ended: target missed", invalid: "ended: not valid", error: "broken off: no result", no_verdict: "ended: no verdict"};
const state = run => badge(ENDED[run.state === "failed" && run.figures?.is_invalid ? "invalid" : run.state] ?? run.state, KINDS[run.state] ?? "");
const ms = value => (value === null || value === undefined ? "–" : shown(value, "ms"));
const perSecond = value => (value === null || value === undefined ? "–" : `${shown(value)}/s`);

export const page = {
  title: "Load",
  path: "/load",
  render(root, {rest, go}) {
    return rest[0] ? oneRun(root, rest[0]) : allRuns(root, go);
  },
};

/** The content of the page if its first request fails. */
function failure(error) {
  if (error.status === 403) return emptyState("Administrators only", "Load tests require an API key with the role admin.");
  return h("p", {class: "fault", role: "alert"}, error.message);
}

async function allRuns(root, go) {
  root.append(pageHead("Load"));
  let known;
  try {
    known = await gateway.get("/v1/load/scenarios", {timeoutMs: 90_000});
  } catch (error) {
    root.append(failure(error));
    return () => {};
  }
  const fault = faultLine();
  const history = h("div", {});
  const chosen = new Set();
  const compare = button("Compare the two selected runs", () => showComparison([...chosen]), {disabled: true});
  const list = runTable(chosen, () => (compare.disabled = chosen.size !== 2));
  const pick = h("select", {onchange: drawHistory});
  let runs = [];
  function drawHistory() {
    replace(history, historyCharts(runs.filter(run => run.scenario === pick.value)));
  }
  root.append(
    startForm(known, go), fault.element,
    h("h2", {}, "Runs"), h("div", {class: "row"}, h("p", {class: "quiet"}, "The newest 50 runs are stored. Select two to compare them."), compare), list.element,
    h("h2", {}, "History by commit"), field("Scenario of the history", pick), history,
  );
  let before = "";
  return poll(async signal => {
    const answer = await gateway.get(RUNS, {signal});
    fault.show(null);
    const now = JSON.stringify(answer.runs);
    if (now === before) return;
    before = now;
    runs = answer.runs;
    for (const id of [...chosen]) if (!runs.some(run => run.id === id)) chosen.delete(id);
    compare.disabled = chosen.size !== 2;
    list.update(runs);
    const names = [...new Set(runs.map(run => run.scenario))];
    const selected = names.includes(pick.value) ? pick.value : names[0];
    replace(pick, names.map(name => h("option", {value: name}, name)));
    if (selected) pick.value = selected;
    drawHistory();
  }, 2000, fault.show);
}

function startForm({scenarios, targets}, go) {
  const about = h("p", {class: "quiet", "aria-live": "polite"});
  const scenario = h("select", {onchange: describe}, scenarios.map(one => h("option", {value: one.name}, one.name)));
  const target = h("select", {}, targets.map((url, index) => h("option", {value: url}, index ? url : `this gateway (${url})`)));
  const model = h("input", {type: "text", spellcheck: "false", maxlength: "256"});
  const seconds = h("input", {type: "number", min: "1", max: "3600", step: "any"});
  const rounds = h("input", {type: "number", min: "1", max: "10", value: "1"});
  const key = h("input", {type: "password", autocomplete: "off", maxlength: "4096"});
  const message = h("p", {class: "fault", role: "alert"});
  const start = h("button", {type: "submit", class: "primary"}, "Start");
  if (scenarios.some(one => one.name === "image-steady")) scenario.value = "image-steady";
  function describe() {
    const one = scenarios.find(each => each.name === scenario.value);
    const length = one.seconds ? `Duration: about ${duration(one.seconds + 10)} per round.` : "The duration depends on the model.";
    replace(about, `${one.about} ${length} Models: ${one.models.join(", ")}. SLO: p99 within ${shown(one.slo_p99_ms, "ms")}.`);
  }
  async function submit(event) {
    event.preventDefault();
    message.textContent = "";
    start.disabled = true;
    const body = {scenario: scenario.value, target: target.value, model: model.value.trim(), rounds: Number(rounds.value) || 1, api_key: key.value};
    if (seconds.value) body.duration_s = Number(seconds.value);
    try {
      const run = await gateway.post(RUNS, {json: body});
      go(`/load/${run.id}`);
    } catch (error) {
      message.textContent = error.message;
    }
    start.disabled = false;
  }
  describe();
  return h("form", {class: "card", onsubmit: submit},
    h("div", {class: "fields"}, field("Scenario", scenario), field("Target", target)), about,
    h("details", {}, h("summary", {}, "Options"), h("div", {class: "fields"},
      field("Model", model, "Default: the scenario's model."), field("Seconds per measured phase", seconds), field("Rounds", rounds, "The report shows the spread between rounds from 3 rounds on."),
      field("API key for another target", key, "This gateway gets the key of your login."))),
    message, h("div", {class: "actions"}, start));
}

function runTable(chosen, changed) {
  const choice = run => h("input", {type: "checkbox", checked: chosen.has(run.id), disabled: !run.figures, "aria-label": `Compare ${run.id}`, onchange: event => {
    if (event.target.checked) chosen.add(run.id);
    else chosen.delete(run.id);
    changed();
  }});
  return table({
    caption: "Runs",
    key: run => run.id,
    columns: [
      {title: "Compare", cell: choice},
      {title: "Run", class: "whole", cell: run => h("a", {href: `/load/${encodeURIComponent(run.id)}`}, run.scenario)},
      {title: "Started", class: "whole", cell: run => clockTime(new Date(run.started_at))},
      {title: "State", cell: state},
      {title: "Throughput", class: "number", cell: run => perSecond(run.figures?.ok_per_s)},
      {title: "p50", class: "number", cell: run => ms(run.figures?.p50_ms)},
      {title: "p99", class: "number", cell: run => ms(run.figures?.p99_ms)},
      {title: "Commit", class: "whole", cell: run => run.figures?.commit ?? ""},
    ],
    empty: () => emptyState("No runs yet", "Select a scenario above and start it."),
  });
}

/** Charts of latency and throughput of a scenario's runs, oldest first, labelled by commit. */
function historyCharts(runs) {
  const measured = runs.filter(run => run.figures && (run.figures.p99_ms ?? run.figures.load_ms) !== null).slice(0, MAX_CHARTED).reverse();
  if (measured.length < 2) return h("p", {class: "quiet"}, "The history needs two finished runs of the scenario.");
  const line = (name, field_) => ({name, points: measured.map((run, index) => [index, run.figures[field_] ?? null])});
  const names = index => {
    const run = measured[Math.round(index)];
    return run.figures.commit || clockTime(new Date(run.started_at));
  };
  const isReload = measured.every(run => run.figures.p99_ms === null);
  const latency = isReload ? [line("load", "load_ms")] : [line("p50", "p50_ms"), line("p99", "p99_ms")];
  return h("div", {class: "load-charts"},
    lineChart({title: "Latency", unit: "ms", series: latency, xText: names}),
    isReload ? null : lineChart({title: "Rate", unit: "requests/s", series: [line("throughput", "ok_per_s"), line("capacity", "capacity_per_s")], xText: names}));
}

async function showComparison(ids) {
  const [a, b] = ids.sort((one, other) => one.slice(-22).localeCompare(other.slice(-22)));  // by the time in the ID
  let found;
  try {
    found = await gateway.get(withQuery(path(a, "/comparison"), {with: b}), {timeoutMs: 90_000});
  } catch (error) {
    toast(error.message, "bad");
    return;
  }
  const rows = table({
    caption: "Comparison",
    key: row => row.measure,
    columns: [
      {title: "Metric", cell: row => (row.unit ? `${row.measure} (${row.unit})` : row.measure)},
      {title: "A", class: "number", cell: row => shown(row.a)},
      {title: "B", class: "number", cell: row => shown(row.b)},
      {title: "Exceeds the spread", cell: row => (row.is_larger_than_spread === null ? "unknown" : row.is_larger_than_spread ? "yes" : "no")},
      {title: "Meaning", cell: row => row.sentence},
    ],
  });
  rows.update(found.rows);
  const box = dialog("Comparison", [
    h("p", {}, `A: ${a}`), h("p", {}, `B: ${b}`), rows.element,
    h("ul", {class: "plain"}, [...found.changes, ...found.warnings].map(text => h("li", {}, text))),
  ]);
  box.classList.add("wide");
}

async function oneRun(root, id) {
  const stop = button("Stop", async () => {
    stop.disabled = true;
    try {
      await gateway.delete(path(id), {timeoutMs: 60_000});
    } catch (error) {
      toast(error.message, "bad");
      stop.disabled = false;
    }
  }, {kind: "danger", hidden: true});
  const fault = faultLine();
  const facts = h("div", {class: "card", "aria-live": "polite"});
  const charts = h("div", {class: "load-charts"});
  const notes = h("ul", {class: "plain"});
  const report = h("div", {});
  root.append(pageHead("Load test", stop, h("a", {class: "button", href: "/load"}, "All runs")), fault.element, facts, charts, notes, report);
  let points = [];
  let after = 0;
  let isShown = false;
  return poll(async signal => {
    if (isShown) return;
    const answer = await gateway.get(withQuery(path(id), {after}), {signal});
    fault.show(null);
    const isMore = answer.next !== after;
    after = answer.next;
    points = [...points, ...answer.progress.filter(line => line.phase)].slice(-MAX_POINTS);
    notes.append(...answer.progress.filter(line => line.text).map(line => h("li", {}, line.text)));
    replace(facts, runFacts(answer.run, points.at(-1)));
    const isRunning = answer.run.state === "running";
    if (isMore || !isRunning || !charts.hasChildNodes()) replace(charts, liveCharts(points, isRunning));
    stop.hidden = !isRunning;
    if (!isRunning && !isMore) {
      isShown = true;
      if (answer.run.has_report) replace(report, reportOf(id));
    }
  }, 1000, fault.show);
}

function runFacts(run, last) {
  const now = run.state === "running" && last ? `phase ${last.phase_number} of ${last.phase_count}, ${last.phase}${last.rounds > 1 ? `, round ${last.round} of ${last.rounds}` : ""}` : null;
  const pairs = [
    ["State", [state(run), now ? ` ${now}` : ""]], ["Scenario", run.scenario], ["Target", run.target], ["Model", run.model || null],
    ["Started", clockTime(new Date(run.started_at))], ["Started by", run.client || null], ["Commit", run.figures?.commit || null],
    ["Requests of this phase", now ? `${shown(last.ok)} succeeded, ${shown(last.refused)} rejected, ${shown(last.failed)} failed, ${shown(last.in_flight)} in flight` : null],
    ["Error", run.error || null],
  ].filter(pair => pair[1] !== null);
  return [
    run.figures ? h("p", {class: "load-verdict"}, run.figures.headline) : null,
    run.figures?.note ? h("p", {class: "load-note"}, run.figures.note) : null,
    h("dl", {class: "facts"}, pairs.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
  ];
}

function liveCharts(points, isRunning) {
  const empty = isRunning ? "The load test starts and warms up: the first figures come after about ten seconds." : "No figures were measured.";
  const line = (name, field_) => ({name, points: points.map(point => [point.at_s, point[field_] ?? null])});
  const highest = Math.max(0, ...points.map(point => point.p99_ms ?? 0));
  const slo = points.at(-1)?.slo_p99_ms ?? 0;
  const xText = value => `${Math.round(value)} s`;
  return [
    lineChart({title: "Latency", unit: "ms", series: [line("p50", "p50_ms"), line("p99", "p99_ms")], xText, empty, limit: slo && slo < 6 * highest ? slo : null}),
    lineChart({title: "Rate", unit: "requests/s", series: [line("throughput", "ok_per_s"), {name: "offered", points: points.map(point => [point.at_s, point.offered_per_s || null])}], xText, empty}),
  ];
}

function reportOf(id) {
  const url = gateway.url(path(id, "/report"));
  return [
    h("div", {class: "row"}, h("h2", {}, "Report"), h("div", {class: "actions"},
      h("a", {class: "button small", href: url, target: "_blank", rel: "noopener"}, "Open the report in a new tab"),
      h("a", {class: "button small", href: gateway.url(path(id, "/result")), download: `${id}.json`}, "Download the result (JSON)"))),
    h("iframe", {class: "load-report", src: url, title: "Report", sandbox: ""}),
  ];
}
