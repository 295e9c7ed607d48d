/** A virtual list: only visible rows are in the document. Scrolling near the end loads the next page. */

import {h, replace} from "/dom.js";

const OVERSCAN_ROWS = 6; // rendered above and below the visible rows

/**
 * load(after) -> {rows, next}: one page; next is null at the end. row(item) -> content of a row. open(item): called on
 * a click. key(item) -> identity of an item. rowHeight: CSS pixels, as in console.css. empty() -> shown if there are
 * no rows. noun: what a row is, such as event.
 */
export function virtualList({label, noun, rowHeight, load, key, row, open, empty}) {
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
    const first = Math.max(0, Math.floor(box.scrollTop / rowHeight) - OVERSCAN_ROWS);
    const last = Math.min(rows.length, Math.ceil((box.scrollTop + box.clientHeight) / rowHeight) + OVERSCAN_ROWS);
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
    showCount();
    draw();
  }

  function showCount() {
    count.textContent = rows.length ? `${rows.length}${next === null ? "" : " or more"} ${rows.length === 1 ? noun : `${noun}s`}` : "";
    if (!rows.length) replace(element, count, empty());
    else if (box.parentNode !== element) replace(element, count, box); // re-inserting it would reset its scroll position
  }

  box.addEventListener("scroll", draw, {passive: true});
  const resized = new ResizeObserver(draw);
  resized.observe(box);
  return {
    element,
    /** Reloads from the first page. Throws ApiError. */
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
      showCount();
      box.scrollTop = 0;
      draw();
    },
    /** Updates the first page with new and changed rows, unless the list is scrolled down. */
    refresh(page) {
      if (box.scrollTop > rowHeight || JSON.stringify(page.rows) === JSON.stringify(rows.slice(0, page.rows.length))) return;
      const newest = new Set(page.rows.map(key));
      const older = rows.filter(item => !newest.has(key(item)));
      const isJoined = older.length < rows.length; // else rows between the two pages are missing
      rows = isJoined ? page.rows.concat(older) : page.rows;
      if (!isJoined) next = page.next;
      shown.forEach(one => one.element.remove());
      shown.clear();
      showCount();
      draw();
    },
    stop: () => resized.disconnect(),
  };
}
