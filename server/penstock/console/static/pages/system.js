/** System: state of the stack, findings of `penstock doctor`, logs, audit log, and effective settings. */

import {h, replace} from "/dom.js";
import {gateway, withQuery} from "/api.js";
import {badge, bytes, button, clockTime, duration, emptyState, faultLine, field, pageHead, poll, roleNeeded, shown, table} from "/widgets.js";

const LEVEL_KINDS = {warning: "warn", error: "bad", critical: "bad"};
const STATUS_KINDS = {ok: "good", note: "", warning: "warn", problem: "bad"};
const MODEL_KINDS = {ready: "good", unavailable: "bad"};
const MAX_LOG_LINES = 2000;

const VIEWS = {
  "": ["Overview", overview],
  findings: ["Findings", findings],
  logs: ["Logs", logs],
  audit: ["Audit log", audit],
  config: ["Configuration", config],
};

export const page = {
  title: "System",
  path: "/system",
  render(root, {rest, query}) {
    const name = rest[0] in VIEWS ? rest[0] : "";
    const tabs = Object.entries(VIEWS).map(([key, [title]]) => h("a", {href: key ? `/system/${key}` : "/system", "aria-current": key === name ? "page" : null}, title));
    const content = h("div", {class: "system"});
    root.append(pageHead("System"), h("nav", {class: "tabs", "aria-label": "System views"}, tabs), content);
    return VIEWS[name][1](content, query);
  },
};

/** The content of a view if its first request fails. */
function failure(error) {
  if (error.status === 403) return roleNeeded("This view", "admin");
  return h("p", {class: "fault", role: "alert"}, error.message);
}

const logTime = text => new Date(text);
const facts = (...pairs) => h("dl", {class: "facts"}, pairs.filter(pair => pair[1] !== null).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
const share = value => (value === null ? "–" : `${Math.round(100 * value)} %`);

function overview(root) {
  const fault = faultLine();
  const state = h("div", {class: "cards"});
  const gpus = h("div", {class: "cards"});
  const errors = h("div", {});
  const processes = processTable();
  const queues = table({
    caption: "Queues",
    key: row => row.model,
    columns: [
      {title: "Model", cell: row => row.model},
      {title: "Waiting", class: "number", cell: row => shown(row.waiting)},
      {title: "In flight", class: "number", cell: row => shown(row.in_flight)},
      {title: "Queue delay", class: "number", cell: row => (row.wait_s === null ? "–" : shown(1000 * row.wait_s, "ms"))},
      {title: "Rejected", cell: row => Object.entries(row.dropped).map(([reason, count]) => `${reason} ${count}`).join(", ")},
    ],
    empty: () => h("p", {class: "quiet"}, "No queues: the gateway has not batched requests for any model yet."),
  });
  root.append(fault.element, state, h("h2", {}, "GPUs"), gpus, h("h2", {}, "Processes"), processes.element, h("h2", {}, "Queues"), queues.element, h("h2", {}, "Last errors"), errors);
  const stop = poll(async signal => {
    const report = await gateway.get("/v1/system", {signal});
    fault.show(null);
    replace(state, stateCards(report));
    replace(gpus, report.gpus.length ? report.gpus.map(gpuCard) : h("p", {class: "quiet"}, "No GPU found."));
    processes.update(report.processes);
    queues.update(report.queues);
    replace(errors, report.errors.length ? logList(report.errors) : h("p", {class: "quiet"}, "None."));
  }, 3000, error => {
    if (error.status !== 403) return fault.show(error);
    stop();
    return replace(root, roleNeeded("This view", "read"));
  });
  return stop;
}

function stateCards(report) {
  const {engine, mps} = report;
  const counts = Object.entries(Object.groupBy(report.models, model => model.state)).map(([state, models]) => badge(`${models.length} ${state}`, MODEL_KINDS[state] ?? ""));
  const down = report.models.filter(model => model.state === "unavailable");
  return [
    h("section", {class: "card"}, h("h3", {}, "Gateway ", report.is_ready ? badge("ready", "good") : badge("not ready", "bad")),
      report.reason ? h("p", {class: "fault"}, report.reason) : null,
      facts(["Version", report.version], ["Up for", duration(report.uptime_s)], ["Worker processes", shown(report.workers)], ["Requests in flight", shown(report.in_flight)])),
    h("section", {class: "card"}, h("h3", {}, "Engine ", engine.is_up ? badge("up", "good") : badge("down", "bad")),
      engine.reason ? h("p", {class: "fault"}, engine.reason) : null,
      facts(["Engine", engine.name || engine.kind], ["Restarts", shown(engine.restarts)], ...engine.replicas.map(one => [one.url, [badge(one.state, one.state === "up" ? "good" : "bad"), ` ${one.in_flight} in flight`]]))),
    h("section", {class: "card"}, h("h3", {}, "Models"), h("p", {}, counts.length ? counts.flatMap(one => [one, " "]) : "None."),
      down.length ? h("ul", {class: "plain"}, down.slice(0, 5).map(model => h("li", {}, h("strong", {}, model.name), `: ${model.reason}`))) : null),
    mps ? h("section", {class: "card"}, h("h3", {}, "MPS"), facts(["Clients", shown(mps.clients)], ["Processes outside MPS", shown(mps.unattached)], ["Active threads per client", mps.active_thread_percentage ? `${mps.active_thread_percentage} %` : "default"], ["Memory limit per client", mps.pinned_memory || "default"], ["Restarts", shown(mps.restarts)])) : null,
  ];
}

function gpuCard(gpu) {
  const clients = gpu.processes.filter(one => one.is_mps_client).length;
  const memory = gpu.memory_bytes ? `${bytes(gpu.memory_used_bytes ?? 0)} of ${bytes(gpu.memory_bytes)}` : "–";
  return h("section", {class: "card"}, h("h3", {}, `${gpu.index} ${gpu.name} `, gpu.lost ? badge("lost", "bad") : null),
    gpu.lost ? h("p", {class: "fault"}, gpu.lost) : null,
    meter("SM activity", gpu.sm_activity ?? gpu.kernel_running, share(gpu.sm_activity)),
    meter("Memory", gpu.memory_bytes ? (gpu.memory_used_bytes ?? 0) / gpu.memory_bytes : null, memory),
    facts(["Processes", `${gpu.processes.length}${clients ? `, ${clients} MPS clients` : ""}`]),
    gpu.processes.length ? h("details", {}, h("summary", {}, "Processes"), h("ul", {class: "plain"}, gpu.processes.map(one => h("li", {}, `${one.name} (${one.pid}): ${one.memory_bytes === null ? "–" : bytes(one.memory_bytes)}${one.time_share === null ? "" : `, kernels active ${share(one.time_share)} of the time`}`)))) : null);
}

function meter(name, value, text) {
  const bar = value === null ? null : h("meter", {min: 0, max: 1, value, "aria-label": name});
  return h("div", {class: "meter"}, h("span", {}, name), h("span", {class: "number"}, text), bar);
}

function processTable() {
  let before = new Map();
  const list = table({
    caption: "Processes",
    key: row => row.pid,
    columns: [
      {title: "Role", class: "whole", cell: row => row.role},
      {title: "PID", class: "number", cell: row => String(row.pid)},
      {title: "Memory", class: "number", cell: row => bytes(row.rss_bytes)},
      {title: "CPU", class: "number", cell: row => row.load},
      {title: "CPU time", class: "number", cell: row => shown(row.cpu_seconds, "s")},
      {title: "Uptime", class: "number", cell: row => duration(row.age_s)},
    ],
  });
  /** CPU is the use since the previous response; the first response has none. */
  function update(rows) {
    const known = rows.map(row => {
      const last = before.get(row.pid);
      const seconds = last ? row.age_s - last.age_s : 0;
      return {...row, load: seconds > 0 ? share((row.cpu_seconds - last.cpu_seconds) / seconds) : "–"};
    });
    if (rows.some(row => row.age_s !== before.get(row.pid)?.age_s)) before = new Map(rows.map(row => [row.pid, row]));
    list.update(known);
  }
  return {element: list.element, update};
}

function findings(root) {
  const order = Object.keys(STATUS_KINDS).reverse();
  const note = h("p", {class: "quiet", role: "status"}, "Running checks…");
  const body = h("div", {});
  const again = button("Run checks again", examine, {disabled: true});
  root.append(h("div", {class: "row"}, note, again), body);
  const aborter = new AbortController();
  async function examine() {
    again.disabled = true;
    note.textContent = "Running checks…";
    try {
      const report = await gateway.get("/v1/system/findings", {signal: aborter.signal, timeoutMs: 60_000});
      show(report);
    } catch (error) {
      if (error.name === "AbortError") return;
      note.textContent = "";
      replace(body, failure(error));
    }
    again.disabled = false;
  }
  function show(report) {
    note.textContent = `Checked ${report.age_s < 2 ? "just now" : `${duration(report.age_s)} ago`}. Checks run at most every 30 s.`;
    const rows = report.findings.toSorted((a, b) => order.indexOf(a.status) - order.indexOf(b.status));
    const open = rows.filter(row => row.status !== "ok");
    replace(body,
      open.length ? findingTable("Findings", open) : emptyState("No problems found", "Every check passed."),
      h("details", {}, h("summary", {}, `${rows.length - open.length} checks passed`), findingTable("Passed checks", rows.filter(row => row.status === "ok"))));
  }
  examine();
  return () => aborter.abort();
}

function findingTable(caption, rows) {
  const list = table({
    caption,
    key: row => row.id,
    columns: [
      {title: "Status", cell: row => badge(row.status, STATUS_KINDS[row.status] ?? "")},
      {title: "Subject", class: "whole", cell: row => row.subject},
      {title: "Found", cell: row => row.found},
      {title: "What to do", cell: row => row.advice},
    ],
  });
  list.update(rows);
  return list.element;
}

function logs(root, query) {
  const option = (value, text, chosen) => h("option", {value, selected: value === chosen}, text);
  const level = h("select", {}, ["debug", "info", "warning", "error"].map(each => option(each, each, query.get("level") ?? "info")));
  const since = h("select", {}, [["", "all stored lines"], ["10m", "10 minutes"], ["1h", "1 hour"], ["1d", "1 day"]].map(([value, text]) => option(value, text, query.get("since") ?? "")));
  const text = h("input", {type: "search", value: query.get("text") ?? "", maxlength: 200, placeholder: "text in a line"});
  const follow = h("input", {type: "checkbox", checked: true, id: "follow-log"});
  const fault = faultLine();
  const list = h("ol", {class: "log"});
  const view = h("div", {class: "scroll log-view", tabindex: "0", role: "log", "aria-label": "Log", "aria-live": "off"}, list);
  const count = h("p", {class: "quiet"});
  root.append(h("form", {class: "fields log-filter", onsubmit: event => event.preventDefault()}, field("Level and above", level), field("Since", since), field("Text", text), h("div", {class: "field check"}, follow, h("label", {for: "follow-log"}, "Follow new lines"))), fault.element, view, count);
  let at = null;
  let stop = () => {};
  function restart() {
    stop();
    at = null;
    stop = poll(turn, 2000, error => {
      if (error.status !== 403) return fault.show(error);
      stop();
      return replace(root, failure(error));
    });
  }
  async function turn(signal) {
    if (at !== null && !follow.checked) return;
    const filter = {level: level.value, text: text.value.trim()};
    const page = await gateway.get(withQuery("/v1/logs", at === null ? {...filter, since: since.value, limit: 500} : {...filter, after: at, limit: 1000}), {signal});
    fault.show(null);
    append(page.lines, at === null);
    at = page.next;
  }
  /** Appends lines. If the view was scrolled to the end, it stays there. */
  function append(lines, isFirst) {
    const isAtEnd = view.scrollHeight - view.scrollTop - view.clientHeight < 40;
    if (isFirst) replace(list);
    list.append(...lines.map(logItem));
    while (list.children.length > MAX_LOG_LINES) list.firstChild.remove();
    if (isFirst || (isAtEnd && lines.length)) view.scrollTop = view.scrollHeight;
    count.textContent = list.children.length ? `${list.children.length} lines` : "No line matches.";
  }
  let typing = null;
  text.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(restart, 300);
  });
  for (const one of [level, since]) one.addEventListener("change", restart);
  restart();
  return () => {
    clearTimeout(typing);
    stop();
  };
}

const logList = lines => h("ol", {class: "log card"}, lines.map(logItem));

function logItem(line) {
  const fields = Object.entries(line.fields).map(([name, value]) => [" ", h("span", {class: "quiet"}, `${name}=`), value]);
  return h("li", {}, h("time", {class: "quiet", datetime: line.time, title: line.time}, clockTime(logTime(line.time))), " ",
    badge(line.level, LEVEL_KINDS[line.level] ?? ""), " ", h("span", {class: "quiet"}, `${line.process} ${line.component}: `), line.event, fields);
}

function audit(root) {
  const fault = faultLine();
  const body = h("div", {});
  const list = table({
    caption: "Audit log",
    key: row => row.key,
    columns: [
      {title: "Time", class: "whole", cell: row => clockTime(logTime(row.time))},
      {title: "Client", cell: row => row.client ?? "anonymous"},
      {title: "Address", cell: row => row.address ?? ""},
      {title: "Action", cell: row => row.action},
      {title: "Target", cell: row => row.target},
      {title: "Outcome", cell: row => badge(row.outcome, row.outcome === "ok" ? "good" : "bad")},
    ],
    empty: () => emptyState("No entries yet", "Admin actions and rejected authentications are recorded here."),
  });
  root.append(fault.element, body);
  return poll(async signal => {
    try {
      const {lines} = await gateway.get("/v1/audit?limit=500", {signal});
      list.update(lines.map((line, index) => ({...line, key: `${line.time} ${line.target} ${index}`})).reverse());
      if (!list.element.isConnected) replace(body, list.element);
      fault.show(null);
    } catch (error) {
      if (error.status === 404) replace(body, emptyState("No audit log", error.message));
      else if (error.status === 403) replace(body, failure(error));
      else throw error;
    }
  }, 5000, fault.show);
}

async function config(root) {
  let rows;
  try {
    rows = (await gateway.get("/v1/system/config")).settings;
  } catch (error) {
    root.append(failure(error));
    return;
  }
  const text = h("input", {type: "search", placeholder: "name or value"});
  const changed = h("input", {type: "checkbox", id: "changed-only"});
  const list = table({
    caption: "Settings",
    key: row => row.name,
    columns: [
      {title: "Setting", class: "whole", cell: row => h("code", {}, row.name)},
      {title: "Value", cell: row => settingText(row.value)},
      {title: "Default", cell: row => (row.origin === "default" ? "" : settingText(row.default))},
      {title: "Origin", cell: row => h("span", {}, badge(row.origin, row.origin === "default" ? "" : "good"), ` ${row.source}`)},
    ],
    empty: () => emptyState("No setting matches", "Change the filter."),
  });
  function filter() {
    const wanted = text.value.trim().toLowerCase();
    list.update(rows.filter(row => (!changed.checked || row.origin !== "default") && `${row.name} ${settingText(row.value)} ${row.source}`.toLowerCase().includes(wanted)));
  }
  text.addEventListener("input", filter);
  changed.addEventListener("change", filter);
  root.append(h("div", {class: "fields log-filter"}, field("Filter", text), h("div", {class: "field check"}, changed, h("label", {for: "changed-only"}, "Only changed settings"))), list.element);
  filter();
}

/** A setting's value as text. */
function settingText(value) {
  if (value === null || value === "") return "not set";
  if (Array.isArray(value)) return value.join(", ") || "none";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
