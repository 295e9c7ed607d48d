/** What the wall of cameras and a camera's page share. */

import {h} from "/dom.js";
import {addresses, gateway, video} from "/api.js";
import {badge, command, confirmed, emptyState} from "/widgets.js";

const KINDS = {running: "good", connecting: "warn", reconnecting: "warn", stalled: "warn", paused: "", ended: "", auth_failed: "bad", failed: "bad"};
export const STILL = ["paused", "ended", "failed"];

export const pathOf = source => `/v1/streams/${encodeURIComponent(source)}`;
export const stateText = stream => stream.state.replace("_", " ") + (stream.is_frozen ? " (frozen)" : "");
export const stateBadge = stream => badge(stateText(stream), stream.is_frozen ? "warn" : KINDS[stream.state] ?? "");

/** Rate and lag of a stream that runs, and how many frames were dropped. */
export function figuresOf(stream) {
  const drops = Object.values(stream.drops).reduce((sum, count) => sum + count, 0);
  const lag = stream.latency_s === null ? "–" : `${Math.round(1000 * stream.latency_s)} ms`;
  return [...(STILL.includes(stream.state) ? [] : [`${stream.fps.toFixed(1)} fps`, `lag ${lag}`]), `${drops} dropped`];
}

/** Asks for confirmation, then restarts a stream: a file from its beginning, counters at 0. */
export const restart = (id, done) => confirmed(`Start ${id} over? Its counters restart at 0; stored events are not deleted.`, "Start over", async () => {
  await video.post(`${pathOf(id)}/restart`);
  await done();
});

/** The content of a page if a request to the video program fails. The gateway reports why its own one cannot run. */
export async function absent(error) {
  if (error.status !== 502) return h("p", {class: "fault", role: "alert"}, error.message);
  const {video_fault: fault, processes} = await gateway.get("/v1/system").catch(() => ({video_fault: "", processes: []}));
  if (fault) return emptyState("The video program cannot run", fault, h("p", {class: "quiet"}, "The stack tries to start it every 30 s."));
  if (processes?.some(process => process.role === "video")) return emptyState("The video program is starting", "Cameras and events are shown once it answers; load this page again in a moment.");
  const {program} = await addresses();
  return emptyState("The video program is not running", "It reads cameras, tracks objects and counts them. Start it with the stack:", h("div", {class: "empty-command"}, command(`${program} up --video`)));
}

/**
 * Requests one image after another while isWanted() is true and the page is visible. Otherwise nothing runs until
 * wake(): call it after each change of the stream's state. address: a path, or a function that returns one. ms: pause
 * between two images.
 */
export function liveImage(image, isWanted, address, ms) {
  let timer = null;
  let count = 0;
  let isBusy = false;
  let isStopped = false;
  function request() {
    isBusy = !isStopped && !document.hidden && isWanted();
    if (isBusy) image.src = `${video.url(typeof address === "function" ? address() : address)}&n=${(count += 1)}`;
  }
  const later = wait => {
    if (!isStopped) timer = setTimeout(request, wait);
  };
  image.addEventListener("load", () => {
    image.hidden = !isWanted();
    later(ms);
  });
  image.addEventListener("error", () => {
    image.hidden = true;
    later(3000);
  });
  return {
    wake: () => isBusy || request(),
    stop() {
      isStopped = true;
      clearTimeout(timer);
      image.removeAttribute("src");
    },
  };
}
