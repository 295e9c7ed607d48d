/** Widgets that several pages use. Each function returns an element, or an object with `element`. */

import {h, replace} from "/dom.js";

/** Shows a notification. Errors stay until they are closed. kind: "info", "good" or "bad". */
export function toast(message, kind = "info") {
  const close = () => box.remove();
  const box = h("div", {class: `toast ${kind}`}, h("span", {}, message), h("button", {type: "button", onclick: close, "aria-label": "Close message"}, "×"));
  document.getElementById("toasts").append(box);
  if (kind !== "bad") setTimeout(close, 6000);
}

/** A colored label, such as a state. kind: "good", "warn", "bad" or "". */
export const badge = (text, kind = "") => h("span", {class: `badge ${kind}`}, text);

/** The title and buttons of a page. */
export function pageHead(title, ...actions) {
  return h("div", {class: "page-head"}, h("h1", {tabindex: "-1"}, title), h("div", {class: "actions"}, ...actions));
}

export function button(text, onclick, {kind = "", ...attributes} = {}) {
  return h("button", {type: "button", class: kind, onclick, ...attributes}, text);
}

/** The content of an empty list. */
export function emptyState(title, text, ...actions) {
  return h("div", {class: "empty"}, h("p", {class: "empty-title"}, title), h("p", {}, text), ...actions);
}

/** Says which role the key lacks. what: what needs it. */
export function roleNeeded(what, role) {
  return emptyState(`${what} needs the role ${role}`, `The API key in use does not have the role ${role}. Log out, and log in with a key that has it.`);
}

/** A command with a copy button. */
export function command(text) {
  const copy = button("Copy", async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  }, {kind: "small", "aria-label": `Copy: ${text.slice(0, 60)}`});
  return h("div", {class: "command"}, h("pre", {tabindex: "0"}, h("code", {}, text)), copy);
}

let fieldCount = 0;

/** An input with a label, which marks a required one. hint: a text below the input. */
export function field(label, input, hint = "") {
  input.id ||= `field-${++fieldCount}`;
  const note = hint ? h("small", {id: `${input.id}-hint`}, hint) : null;
  if (note) input.setAttribute("aria-describedby", note.id);
  return h("div", {class: "field"}, h("label", {for: input.id}, label, input.required ? h("span", {class: "fault", "aria-hidden": "true"}, " *") : null), input, note);
}

/**
 * A table. columns: [{title, cell(row) -> text or element, class?}]. key(row): identity of a row.
 * `update(rows)` changes only cells whose value changed, so that focus and selection are preserved.
 */
export function table({columns, key, caption, empty}) {
  const body = h("tbody");
  const head = h("thead", {}, h("tr", {}, columns.map(column => h("th", {scope: "col", class: column.class ?? null}, column.title))));
  const grid = h("table", {}, caption ? h("caption", {class: "hidden"}, caption) : null, head, body);
  const scroll = h("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": caption ?? "Table"}, grid);
  const element = h("div", {}, scroll);
  const known = new Map();
  function update(rows) {
    const content = rows.length || !empty ? scroll : empty();
    if (!isSame(content, element.firstChild)) replace(element, content);
    const seen = new Set();
    rows.forEach((row, index) => {
      const id = key(row);
      seen.add(id);
      let line = known.get(id);
      if (!line) known.set(id, (line = {element: h("tr"), cells: columns.map(() => undefined)}));
      columns.forEach((column, number) => {
        const value = column.cell(row);
        const cell = line.element.children[number] ?? line.element.appendChild(h("td", {class: column.class ?? null, "data-title": column.title}));
        if (!isSame(value, line.cells[number])) replace(cell, (line.cells[number] = value) ?? "");
      });
      if (body.children[index] !== line.element) body.insertBefore(line.element, body.children[index] ?? null);
    });
    for (const [id, line] of known) {
      if (!seen.has(id)) {
        line.element.remove();
        known.delete(id);
      }
    }
  }
  return {element, update};
}

/** Whether a cell already shows this value. */
const isSame = (value, old) => value === old || (value instanceof Node && old instanceof Node && value.isEqualNode(old) && value.checked === old.checked);

/** Opens a dialog and returns its element. actions: [{text, kind, run}]; the dialog stays open if run returns false. */
export function dialog(title, content, actions = []) {
  const head = h("h2", {id: "dialog-title"}, title);
  const message = h("p", {class: "fault", role: "alert"});
  const box = h("dialog", {"aria-labelledby": "dialog-title"});
  const buttons = actions.map(({text, kind, run}) => {
    const one = button(text, async () => {
      one.disabled = true;
      message.textContent = "";
      try {
        if ((await run?.()) !== false) box.close();
      } catch (error) {
        message.textContent = error.message;
      }
      one.disabled = false;
    }, {kind});
    return one;
  });
  const cancel = button(actions.length ? "Cancel" : "Close", () => box.close());
  box.append(head, h("div", {class: "dialog-body"}, content), message, h("div", {class: "dialog-actions"}, cancel, ...buttons));
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  box.showModal();
  return box;
}

/** Opens a confirmation dialog for a removal. run: called if the user confirms. */
export function confirmed(question, verb, run) {
  return dialog(question, [], [{text: verb, kind: "danger", run}]);
}

/**
 * Calls work(signal) immediately, then `ms` after each call, but not while the page is hidden. Returns a function that
 * stops polling. If `work` throws, failed(error) is called and polling continues.
 */
export function poll(work, ms, failed = () => {}) {
  let timer = null;
  let isStopped = false;
  const aborter = new AbortController();
  async function turn() {
    if (!document.hidden) {
      try {
        await work(aborter.signal);
      } catch (error) {
        if (!isStopped && error.name !== "AbortError") failed(error);
      }
    }
    if (!isStopped) timer = setTimeout(turn, ms);
  }
  turn();
  return () => {
    isStopped = true;
    clearTimeout(timer);
    aborter.abort();
  };
}

/** A line for the last error of a page's polling; empty without an error. */
export function faultLine() {
  const element = h("p", {class: "fault", role: "alert"});
  return {element, show: error => (element.textContent = error ? error.message : "")};
}

const UNITS = ["B", "kB", "MB", "GB", "TB"];

export function bytes(size) {
  let unit = 0;
  while (size >= 1000 && unit < UNITS.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${size >= 100 || unit === 0 ? Math.round(size) : size.toFixed(1)} ${UNITS[unit]}`;
}

/** A number with three significant digits. */
export function shown(value, unit = "") {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const text = Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
  return unit ? `${text} ${unit}` : text;
}

export function duration(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} days`;
}

/** A position in time as on a clock: 1:39, or 1:55.6 with one digit, or 1:02:03. seconds: from 0. */
export function position(seconds, digits = 0) {
  const whole = Number(seconds.toFixed(digits));
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor(whole / 60) % 60;
  const rest = (whole % 60).toFixed(digits).padStart(digits ? digits + 3 : 2, "0");
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
}

/** The time of day, with the date unless it is today. when: a Date. */
export function clockTime(when) {
  const time = when.toLocaleTimeString("en-GB");
  return when.toDateString() === new Date().toDateString() ? time : `${when.toLocaleDateString("en-CA")} ${time}`;
}
