/** A long list of which only the visible rows are in the document. Further rows are loaded when its end comes near. */

import {h, replace} from "/dom.js";

const ROWS_BEYOND = 6;

/**
 * load(after) -> {rows, next}: a page, next null at the end. row(item) -> content of a row, a button. open(item): what
 * a click does. key(item): its identity. rowHeight: CSS pixels, as in console.css. empty(): shown without rows.
 */
export function virtualList({label, rowHeight, load, key, row, open, empty}) {
  const items = h("ul", {class: "virtual-rows"});
  const box = h("div", {class: "virtual scroll", tabindex: "0", role: "region", "aria-label": label}, items);
  const count = h("p", {class: "quiet", role: "status"});
  const element = h("div", {}, count, box);
  const shown = new Map();
  let rows = [];
  let next = null;
  let loading = null;
  let generation = 0;

  function draw() {
    const first = Math.max(0, Math.floor(box.scrollTop / rowHeight) - ROWS_BEYOND);
    const last = Math.min(rows.length, Math.ceil((box.scrollTop + box.clientHeight) / rowHeight) + ROWS_BEYOND);
    for (const [id, one] of shown) {
      if (one.index < first || one.index >= last || key(rows[one.index]) !== id) {
        one.element.remove();
        shown.delete(id);
      }
    }
    for (let index = first; index < last; index += 1) {
      const item = rows[index];
      if (shown.has(key(item))) continue;
      const line = h("li", {class: "virtual-row", "aria-posinset": index + 1, "aria-setsize": next === null ? rows.length : -1}, h("button", {type: "button", onclick: () => open(item)}, row(item)));
      line.style.setProperty("top", `${index * rowHeight}px`);
      const after = [...items.children].find(other => Number(other.getAttribute("aria-posinset")) > index + 1);
      items.insertBefore(line, after ?? null);
      shown.set(key(item), {element: line, index});
    }
    items.style.setProperty("height", `${rows.length * rowHeight}px`);
    if (next !== null && last + 50 > rows.length) more();
  }

  async function more() {
    if (loading !== null) return;
    const mine = generation;
    loading = load(next);
    try {
      const page = await loading;
      if (mine !== generation) return;
      rows = rows.concat(page.rows);
      next = page.next;
    } finally {
      if (mine === generation) loading = null;
    }
    tell();
    draw();
  }

  function tell() {
    count.textContent = rows.length ? `${rows.length}${next === null ? "" : " or more"}` : "";
    if (!rows.length) replace(element, count, empty());
    else if (box.parentNode !== element) replace(element, count, box); // taken out and put back it would lose its place
  }

  box.addEventListener("scroll", draw, {passive: true});
  const resized = new ResizeObserver(draw);
  resized.observe(box);
  return {
    element,
    /** Loads the first page anew. Throws ApiError. */
    async reload() {
      generation += 1;
      loading = null;
      const mine = generation;
      const page = await load("");
      if (mine !== generation) return;
      shown.forEach(one => one.element.remove());
      shown.clear();
      rows = page.rows;
      next = page.next;
      tell();
      box.scrollTop = 0;
      draw();
    },
    /** Shows the newest page, with rows that came or changed meanwhile, if the top of the list is in view. */
    refresh(page) {
      if (box.scrollTop > rowHeight || JSON.stringify(page.rows) === JSON.stringify(rows.slice(0, page.rows.length))) return;
      const newest = new Set(page.rows.map(key));
      const older = rows.filter(item => !newest.has(key(item)));
      const isJoined = older.length < rows.length; // else rows in between are not known
      rows = isJoined ? page.rows.concat(older) : page.rows;
      if (!isJoined) next = page.next;
      shown.forEach(one => one.element.remove());
      shown.clear();
      tell();
      draw();
    },
    stop: () => resized.disconnect(),
  };
}
