/** Events: events of rules with snapshots and clips; search for objects; occupancy and heat map of a stream. */

import {h, replace, s} from "/dom.js";
import {video, withQuery} from "/api.js";
import {heatmap, occupancyPanel} from "/occupancy.js";
import {absent} from "/pages/streams/stream.js";
import {virtualList} from "/virtual_list.js";
import {badge, clockTime, dialog, emptyState, faultLine, field, pageHead, poll, position, roleNeeded, shown} from "/widgets.js";

const ROW_HEIGHT = 84; // as .virtual-row in console.css
const PAGE_ROWS = 200;
const KINDS = ["line-crossing", "roi-filtering", "overcrowding", "direction-detection", "dwell"];
const VIEWS = {"": ["Events", events], objects: ["Objects", objects], occupancy: ["Occupancy", occupancy]};

export const page = {
  title: "Events",
  path: "/events",
  async render(root, {rest, query}) {
    const name = rest[0] in VIEWS ? rest[0] : "";
    const tabs = Object.entries(VIEWS).map(([key, [title]]) => h("a", {href: key ? `/events/${key}` : "/events", "aria-current": key === name ? "page" : null}, title));
    const content = h("div", {});
    const actions = h("div", {class: "actions"});
    root.append(pageHead("Events", actions), h("nav", {class: "tabs", "aria-label": "Event views"}, tabs), content);
    try {
      return await VIEWS[name][1](content, query, actions);
    } catch (error) {
      replace(content, error.status === 502 ? await absent(error) : unavailable(error));
    }
  },
};

function unavailable(error) {
  if (error.status === 403) return roleNeeded("This list", "read");
  return emptyState("No events", error.message);
}

/** A filter form. names: the query parameters to offer. changed(): called on input. value() -> the query parameters. */
function filterForm(names, query, changed) {
  const options = values => [h("option", {value: ""}, "All"), values.map(value => h("option", {value}, value))];
  const inputs = {
    source_id: ["Stream", h("select", {}, options([query.get("source_id")].filter(Boolean)))],
    kind: ["Kind", h("select", {}, options(KINDS))],
    rule: ["Rule", h("input", {type: "search", maxlength: 200})],
    zone: ["Zone or line", h("input", {type: "search", maxlength: 200})],
    label: ["Class", h("input", {type: "search", maxlength: 200, placeholder: "person"})],
    since: ["From", h("input", {type: "datetime-local"})],
    until: ["To", h("input", {type: "datetime-local"})],
  };
  const fields = names.map(name => {
    const [label, input] = inputs[name];
    input.value = query.get(name) ?? "";
    input.addEventListener("change", changed);
    return field(label, input);
  });
  video.get("/v1/streams").then(({streams}) => {
    const select = inputs.source_id[1];
    const chosen = select.value;
    replace(select, options([...new Set([...streams.map(one => one.source_id), chosen])].filter(Boolean)));
    select.value = chosen;
  }).catch(() => {}); // the list below says why
  const form = h("form", {class: "fields event-filter", onsubmit: event => event.preventDefault()}, fields);
  const element = h("details", {open: matchMedia("(min-width: 561px)").matches}, h("summary", {}, "Filter"), form);
  const read = name => {
    const text = inputs[name][1].value.trim();
    return text && inputs[name][1].type === "datetime-local" ? new Date(text).toISOString() : text;
  };
  return {element, value: () => Object.fromEntries(names.map(name => [name, read(name)]))};
}

/** Shows a list below its filter form, with a line for errors of loading. */
async function filteredList(root, query, names, list) {
  const fault = faultLine();
  const reload = async () => {
    try {
      await list.reload();
      fault.show(null);
    } catch (error) {
      fault.show(error);
    }
  };
  const form = filterForm(names, query, reload);
  list.bind(form.value);
  await list.reload();
  root.append(fault.element, form.element, list.element);
  return {form, fault};
}

function picture(path, text) {
  if (!path) return h("span", {class: "thumb none"}, text);
  const image = h("img", {class: "thumb", src: video.url(path), alt: "", loading: "lazy", decoding: "async"});
  image.addEventListener("error", () => image.replaceWith(h("span", {class: "thumb none"}, "removed")));
  return image;
}

const titleOf = event => `${event.rule}${event.direction ? ` ${event.direction}` : ""}`;
const objectOf = event => (event.label ? `${event.label}${event.track_id === null ? "" : ` #${event.track_id}`}` : `${shown(event.value)} ${event.value === 1 ? "object" : "objects"}`);

async function events(root, query, actions) {
  let filter = () => ({});
  const alarm = h("p", {class: "fault", role: "alert"});
  const link = h("a", {class: "button", href: video.url("/v1/events.csv"), download: "events.csv"}, "Export CSV");
  const load = async after => {
    link.setAttribute("href", video.url(withQuery("/v1/events.csv", filter())));
    const answer = await video.get(withQuery("/v1/events", {...filter(), limit: PAGE_ROWS, after}));
    replace(alarm, answer.alarm);
    return {rows: answer.events, next: answer.next};
  };
  const list = virtualList({
    label: "Events",
    noun: "event",
    rowHeight: ROW_HEIGHT,
    load,
    key: event => event.id,
    open: showEvent,
    row: event => [
      picture(event.snapshot, "no snapshot"),
      h("span", {class: "row-title"}, h("strong", {}, titleOf(event)), " ", badge(event.kind), event.clip ? badge("clip", "good") : null),
      h("span", {class: "row-who"}, objectOf(event), event.score === null ? "" : ` ${event.score.toFixed(2)}`),
      h("span", {class: "row-where quiet"}, `${event.source_id} · ${clockTime(new Date(event.time))}`),
    ],
    empty: () => emptyState("No events", "No stored event matches the filter. Events come from rules, such as a line or a zone of a stream."),
  });
  list.bind = value => (filter = value);
  root.append(alarm);
  await filteredList(root, query, ["source_id", "rule", "kind", "label", "since", "until"], list);
  actions.append(link);
  const stop = poll(async () => list.refresh(await load("")), 5000);
  return () => {
    stop();
    list.stop();
  };
}

function showEvent(event) {
  const facts = [
    ["Time", new Date(event.time).toLocaleString("en-GB")],
    ["Stream", event.source_id],
    ["Object", objectOf(event)],
    ["Score", event.score === null ? null : event.score.toFixed(3)],
    ["Position", `${position(event.pts_s, 1)} after the stream's start, frame ${event.frame_num}`],
  ].filter(pair => pair[1] !== null);
  const clip = event.clip ? h("video", {controls: true, preload: "metadata", src: video.url(event.clip), "aria-label": "Clip of the event"}) : null;
  clip?.addEventListener("loadedmetadata", () => (clip.currentTime = Math.max(event.clip_offset_s - 1, 0)), {once: true});
  const image = event.snapshot ? h("img", {class: "whole-picture", src: video.url(event.snapshot), alt: `${titleOf(event)}: ${objectOf(event)}`}) : h("p", {class: "quiet"}, "This event has no snapshot.");
  const film = h("p", {class: "quiet"});
  if (!event.clip) whyNoFilm(event).then(text => (film.textContent = text)).catch(() => {}); // the stream was removed
  const box = dialog(`${titleOf(event)} (${event.kind})`, [image, clip, film, h("dl", {class: "facts"}, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]))]);
  box.classList.add("wide");
}

async function whyNoFilm(event) {
  const stream = await video.get(`/v1/streams/${encodeURIComponent(event.source_id)}`);
  return stream.is_recordable ? "" : `Events of this stream have no film: packets of ${stream.codec} do not fit into MP4.`;
}

/** A small drawing of an object's path. */
function drawnPath(points) {
  const text = points.map(([x, y]) => `${(96 * x).toFixed(1)},${(54 * y).toFixed(1)}`).join(" ");
  const [x, y] = points.at(-1) ?? [0, 0];
  return s("svg", {class: "thumb none", viewBox: "0 0 96 54", role: "img", "aria-label": "Path through the frame"}, s("polyline", {points: text}), s("circle", {cx: 96 * x, cy: 54 * y, r: 2.5}));
}

async function objects(root, query) {
  let filter = () => ({});
  const list = virtualList({
    label: "Objects",
    noun: "object",
    rowHeight: ROW_HEIGHT,
    load: async after => {
      const answer = await video.get(withQuery("/v1/tracks", {...filter(), limit: PAGE_ROWS, after}));
      return {rows: answer.tracks, next: answer.next};
    },
    key: track => track.id,
    open: track => (track.event_id === null ? showTrack(track) : openEventOf(track)),
    row: track => [
      track.snapshot ? picture(track.snapshot, "") : drawnPath(track.path),
      h("span", {class: "row-title"}, h("strong", {}, `${track.label} #${track.track_id}`), " ", track.zones.map(zone => badge(zone))),
      h("span", {class: "row-who"}, `${position(track.duration_s, 1)} long, score ${track.score.toFixed(2)}`),
      h("span", {class: "row-where quiet"}, `${track.source_id} · ${clockTime(new Date(track.first_time))}`),
    ],
    empty: () => emptyState("No objects", "No stored object matches the filter. Objects come from a stream's tracker."),
  });
  list.bind = value => (filter = value);
  await filteredList(root, query, ["source_id", "label", "zone", "since", "until"], list);
  return list.stop;
}

async function openEventOf(track) {
  try {
    showEvent(await video.get(`/v1/events/${track.event_id}`));
  } catch {
    showTrack(track); // the event was removed
  }
}

function showTrack(track) {
  const facts = [["Stream", track.source_id], ["From", clockTime(new Date(track.first_time))], ["To", clockTime(new Date(track.last_time))], ["Frames", shown(track.frames)], ["Zones", track.zones.join(", ") || "none"]];
  dialog(`${track.label} #${track.track_id}`, [drawnPath(track.path), h("dl", {class: "facts"}, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]))]);
}

async function occupancy(root, query) {
  const streams = new Map((await video.get("/v1/streams")).streams.map(one => [one.source_id, one]));
  if (!streams.size) throw Object.assign(new Error("No stream is configured. Add a camera on the Streams page."), {status: 0});
  const chosen = h("select", {onchange: show}, [...streams.keys()].map(value => h("option", {value}, value)));
  if (streams.has(query.get("source_id"))) chosen.value = query.get("source_id");
  const place = h("div");
  let panel = null;
  function show() {
    panel?.stop();
    panel = occupancyPanel(chosen.value, {isLive: streams.get(chosen.value).is_live, parts: [heatmap]});
    replace(place, panel.element);
  }
  root.append(h("div", {class: "fields event-filter"}, field("Stream", chosen)), place);
  show();
  return () => panel.stop();
}
