/** Streams: live previews of all cameras, each with a link to the camera's page. */

import {h, replace} from "/dom.js";
import {video} from "/api.js";
import {button, confirmed, emptyState, faultLine, pageHead, poll, shown, toast} from "/widgets.js";
import {openCamera, savedText} from "/pages/streams/form.js";
import {detail} from "/pages/streams/detail.js";
import {STILL, absent, figuresOf, liveImage, pathOf, restart, stateBadge, stateText} from "/pages/streams/stream.js";

const TILE_MS = 1000;

export const page = {
  title: "Streams",
  path: "/streams",
  render: (root, context) => (context.rest[0] ? detail(root, context.rest[0], context) : wall(root)),
};

function wall(root) {
  const fault = faultLine();
  const search = h("input", {type: "search", placeholder: "Find a camera", "aria-label": "Find a camera"});
  const summary = h("span", {class: "quiet", role: "status"});
  const grid = h("div", {class: "wall"});
  const tiles = new Map();
  const seen = new Set();
  const watcher = new IntersectionObserver(entries => entries.forEach(entry => {
    if (entry.isIntersecting) {
      seen.add(entry.target);
      tiles.get(entry.target.getAttribute("aria-label"))?.wake();
    } else seen.delete(entry.target);
  }));
  const add = button("Add a camera", () => openCamera({done: again}), {kind: "primary"});
  root.append(pageHead("Streams", search, add), fault.element, h("p", {}, summary), grid);
  const isMatch = stream => `${stream.source_id} ${stream.camera_name}`.toLowerCase().includes(search.value.trim().toLowerCase());
  let streams = [];
  search.addEventListener("input", () => arrange());

  function arrange() {
    const matching = streams.filter(isMatch);
    const fps = streams.filter(stream => !STILL.includes(stream.state)).reduce((sum, stream) => sum + stream.fps, 0);
    summary.textContent = streams.length ? `${streams.length} ${streams.length === 1 ? "camera" : "cameras"}, ${shown(fps, "frames/s")}` : "";
    if (!streams.length) {
      replace(grid, emptyState("No cameras yet", "Add an RTSP or HTTP address, or a video file on the video program's host."));
      return;
    }
    grid.querySelector(".empty")?.remove();
    const wanted = new Set(matching.map(stream => stream.source_id));
    for (const [id, tile] of tiles) {
      if (wanted.has(id)) continue;
      watcher.unobserve(tile.element);
      tile.stop();
      tile.element.remove();
      tiles.delete(id);
    }
    matching.forEach((stream, index) => {
      let tile = tiles.get(stream.source_id);
      if (!tile) {
        tiles.set(stream.source_id, (tile = newTile(stream, element => seen.has(element), again)));
        watcher.observe(tile.element);
      }
      tile.update(stream);
      if (grid.children[index] !== tile.element) grid.insertBefore(tile.element, grid.children[index] ?? null);
    });
  }
  async function load(signal) {
    try {
      streams = (await video.get("/v1/streams", {signal})).streams;
    } catch (error) {
      if (error.status !== 502) throw error;
      streams = [];
      tiles.clear();
      replace(grid, await absent(error));
      add.disabled = true;
      fault.show(null);
      return;
    }
    add.disabled = false;
    fault.show(null);
    arrange();
  }
  const again = () => load().catch(fault.show);
  const stop = poll(load, 2000, fault.show);
  return () => {
    stop();
    watcher.disconnect();
    tiles.forEach(tile => tile.stop());
  };
}

/** A camera's tile. isSeen(element): whether it is on the screen; only then previews are requested. */
function newTile(first, isSeen, again) {
  const id = first.source_id;
  const picture = h("img", {alt: "", hidden: true});
  const still = h("span", {class: "quiet"}, "no preview");
  const name = h("a", {class: "tile-name", href: `/streams/${encodeURIComponent(id)}`}, id);
  const state = h("span");
  const reason = h("p", {class: "tile-reason"});
  const figures = h("p", {class: "quiet tile-figures"});
  const turn = button("Pause", () => (isOver() ? restart(id, again) : change(stream.state === "paused" ? "resume" : "pause")), {kind: "small"});
  const remove = button("Remove", () => confirmed(`Remove ${id}?`, "Remove", async () => {
    const response = await video.call("DELETE", pathOf(id));
    toast(`Removed ${id}. ${savedText(response)}`, "good");
    again();
  }), {kind: "small", "aria-label": `Remove ${id}`});
  const edit = button("Edit", () => openCamera({source: id, done: again}), {kind: "small", "aria-label": `Edit ${id}`});
  const element = h("article", {class: "tile", "aria-label": id}, h("div", {class: "tile-picture"}, still, picture), h("div", {class: "tile-head"}, name, state), reason, figures, h("div", {class: "tile-actions"}, turn, edit, remove));
  let stream = first;
  const isOver = () => ["ended", "failed"].includes(stream.state);
  async function change(verb) {
    turn.disabled = true;
    try {
      await video.post(`${pathOf(id)}/${verb}`);
      await again();
    } catch (error) {
      toast(error.message, "bad");
    }
    turn.disabled = false;
  }
  const live = liveImage(picture, () => isSeen(element) && !STILL.includes(stream.state), `${pathOf(id)}/preview.jpg?width=320`, TILE_MS);
  return {
    element,
    ...live,
    update(next) {
      stream = next;
      live.wake();
      replace(name, next.camera_name || id);
      if (state.textContent !== stateText(next)) replace(state, stateBadge(next));
      replace(reason, next.reason);
      figures.textContent = figuresOf(next).join(" · ");
      const isStill = STILL.includes(next.state);
      still.textContent = isStill ? next.state : "no preview";
      if (isStill) picture.hidden = true;
      turn.textContent = isOver() ? "Start over" : next.state === "paused" ? "Resume" : "Pause";
      turn.setAttribute("aria-label", `${turn.textContent} ${id}`);
    },
  };
}
