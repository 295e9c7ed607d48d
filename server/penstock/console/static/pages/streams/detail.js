/** One camera: its live picture, and the lines, zones and directions on it, drawn and saved as its rules. */

import {h, replace} from "/dom.js";
import {video} from "/api.js";
import {button, confirmed, faultLine, field, pageHead, poll, toast} from "/widgets.js";
import {heatCells, occupancyPanel} from "/occupancy.js";
import {openCamera, savedText} from "/pages/streams/form.js";
import {KINDS, middle, overlay, sectionOf, shapesOf} from "/pages/streams/shapes.js";
import {STILL, absent, figuresOf, liveImage, pathOf, restart, stateBadge} from "/pages/streams/stream.js";

const PICTURE_MS = 500;
const HEAT_MS = 20_000; // as often as the video program stores it
const TRIAL_MS = 30_000;
const OPTIONS = {
  overcrowding: [["object-threshold", "Objects or more", 5, 1], ["time-threshold", "Time threshold (ms)", 2000, 0]],
  dwell: [["time-threshold-s", "Time threshold (s)", 10, 0]],
};

export async function detail(root, id) {
  let stream;
  try {
    stream = await video.get(pathOf(id));
  } catch (error) {
    replace(root, pageHead(id), await absent(error));
    return () => {};
  }
  const title = h("span", {}, id);
  const fault = faultLine();
  const state = h("p", {class: "stream-state"});
  const frame = h("div", {class: "stream-picture"});
  const side = h("div", {class: "card stream-rules"});
  const again = button("Start over", () => restart(id, () => load()), {title: "Opens it anew, a file from its beginning, and counts from 0"});
  const heat = heatSwitch(id, frame, fault);
  root.append(h("p", {}, h("a", {href: "/streams"}, "All cameras")), pageHead(title, heat.element, again, button("Edit the camera", () => openCamera({source: id, done: load}))), fault.element, state);
  root.append(h("div", {class: "split"}, frame, side));
  const editor = newEditor(id, () => stream, side, frame);
  const panel = occupancyPanel(id, {isLive: stream.is_live});
  root.append(h("h2", {}, "Counters"), panel.element);
  async function load(signal) {
    stream = await video.get(pathOf(id), {signal});
    replace(title, stream.camera_name || id);
    const figures = [...figuresOf(stream), stream.width ? `${stream.width} × ${stream.height} ${stream.codec}` : null, stream.decoder || null];
    replace(state, stateBadge(stream), h("span", {class: "quiet"}, ` ${figures.filter(Boolean).join(" · ")} `), h("span", {}, stream.reason));
    fault.show(null);
    await editor.update();
  }
  const stops = [poll(load, 1000, fault.show), editor.stop, panel.stop, heat.stop];
  return () => stops.forEach(stop => stop());
}

/** A button that lays the heat map over the picture, and takes it away. */
function heatSwitch(id, frame, fault) {
  let drawing = null;
  let isOn = false;
  let stopPoll = () => {};
  const element = button("Heat map", turn, {"aria-pressed": "false"});
  async function draw() {
    const made = await heatCells(id);
    if (!isOn) return;
    drawing?.remove();
    frame.append((drawing = made.drawing));
    element.title = made.note;
  }
  function turn() {
    isOn = !isOn;
    element.setAttribute("aria-pressed", String(isOn));
    stopPoll();
    drawing?.remove();
    stopPoll = isOn ? poll(draw, HEAT_MS, fault.show) : () => {};
  }
  return {element, stop: () => stopPoll()};
}

/** A picture of a stream that shows none now. Returns {image, size}. Throws ApiError. */
async function triedPicture(id) {
  const {uri, is_udp} = await video.get(`${pathOf(id)}/options`);
  const found = await video.post("/v1/streams/probe", {json: {uri, is_udp, source_id: id}, timeoutMs: TRIAL_MS});
  return {image: h("img", {src: `data:image/jpeg;base64,${found.jpeg}`, alt: `A picture of ${id}`}), size: [found.width, found.height]};
}

/** The picture with its drawing, and the list of rules beside it. */
function newEditor(id, streamNow, side, frame) {
  const image = h("img", {alt: `Live picture of ${id}`, hidden: true});
  const empty = h("p", {class: "quiet"}, "No picture yet");
  const message = h("p", {class: "fault", role: "alert"});
  let size = null;
  let canvas = null;
  let section = null;
  let shapes = [];
  let edited = null; // {shape, isNew, before}
  let still = null; // the picture of a stream that is paused, or over
  const live = liveImage(image, () => !STILL.includes(streamNow().state), () => `${pathOf(id)}/preview.jpg?width=960&draw=${edited ? 0 : 1}`, PICTURE_MS);
  replace(frame, empty, image);
  image.addEventListener("load", () => {
    empty.remove();
    still?.image?.remove();
  });

  async function update() {
    const stream = streamNow();
    live.wake();
    if (STILL.includes(stream.state) && image.hidden && !still) await showStill();
    const [width, height] = stream.width ? [stream.width, stream.height] : still?.size ?? [0, 0];
    if (width && (!size || size[0] !== width || size[1] !== height)) {
      size = [width, height];
      canvas?.element.remove();
      canvas = overlay({size, changed: () => {}});
      frame.append(canvas.element);
      section = null;
    }
    if (!size) return;
    if (section === null) await read();
    if (!edited) list();
  }
  async function showStill() {
    still = {};
    try {
      still = await triedPicture(id);
      empty.replaceWith(still.image);
    } catch (error) {
      empty.textContent = `No picture: ${error.message}`;
    }
  }
  async function read() {
    section = await video.get(`${pathOf(id)}/rules`);
    shapes = shapesOf(section, size);
    canvas.show([]);
  }
  /** Counters of a rule, as the video program names them: KIND/NAME, and NAME.in and NAME.out of a two-way line. */
  function countText({kind, rule}) {
    const counts = streamNow().counts;
    const [whole, into, out] = ["", ".in", ".out"].map(end => counts[`${kind}/${rule.name}${end}`]);
    if (into !== undefined) return `in ${into}, out ${out ?? 0}`;
    return whole === undefined ? "–" : `${whole} ${kind === "line-crossing" ? "so far" : "now"}`;
  }
  function list() {
    const rows = shapes.map(shape => h("li", {}, h("div", {}, h("strong", {}, shape.rule.name), h("small", {}, ` ${KINDS[shape.kind].title}`)), h("span", {class: "count"}, countText(shape)), h("span", {class: "rule-actions"}, button("Edit", () => begin(shape, false), {kind: "small", "aria-label": `Edit ${shape.rule.name}`}), button("Delete", () => remove(shape), {kind: "small", "aria-label": `Delete ${shape.rule.name}`}))));
    const key = JSON.stringify(shapes.map(shape => [shape.kind, shape.rule.name]));
    const counts = side.querySelectorAll(".count");
    if (side.dataset.key === key && counts.length === shapes.length) {
      counts.forEach((cell, number) => (cell.textContent = countText(shapes[number]))); // keeps the focus on its buttons
      return;
    }
    side.dataset.key = key;
    const adders = [["line-crossing", "Draw a line"], ["roi-filtering", "Draw a zone"], ["direction-detection", "Draw a direction"]].map(([kind, text]) => button(text, () => begin({kind, rule: {name: ""}, points: []}, true)));
    replace(side, h("h2", {}, "Rules"), rows.length ? h("ul", {class: "rules"}, rows) : h("p", {class: "quiet"}, "Nothing is counted yet."), h("div", {class: "rule-adders"}, adders), message);
  }
  function begin(shape, isNew) {
    edited = {shape, isNew, before: JSON.stringify(shape)};
    message.textContent = "";
    side.dataset.key = "";
    if (!isNew) return form();
    canvas.draw(shape, form);
    canvas.show([...shapes, shape], shape);
    const isZone = KINDS[shape.kind].isZone;
    const finish = () => {
      if (shape.points.length < (isZone ? 3 : 2)) shape.points.splice(0, Infinity, ...middle(shape.kind));
      form();
    };
    const hint = isZone ? "Click the corners of the zone in the picture, or drag along its edges, then Finish." : shape.kind === "line-crossing" ? "Drag the line in the picture, or click its two ends. The arrow points to the side that counts as in." : "Drag along the way in the picture, or click where it begins and where it leads.";
    replace(side, h("h2", {}, KINDS[shape.kind].title), h("p", {role: "status"}, hint), h("div", {class: "rule-adders"}, isZone ? button("Finish", finish, {kind: "primary"}) : null, button("Place it in the middle", () => {
      shape.points.splice(0, Infinity, ...middle(shape.kind));
      form();
    }), button("Cancel", cancel)));
    side.querySelector("button").focus();
    return null;
  }
  function cancel() {
    canvas.stop();
    if (!edited.isNew) Object.assign(edited.shape, JSON.parse(edited.before));
    edited = null;
    canvas.show([]);
    list();
  }
  function form() {
    const {shape} = edited;
    canvas.stop();
    canvas.show(edited.isNew ? [...shapes, shape] : shapes, shape);
    const rule = shape.rule;
    const name = h("input", {value: rule.name, required: true, maxlength: 60, autocomplete: "off"});
    const labels = [...new Set(Object.keys(streamNow().counts).filter(key => key.startsWith("objects/")).map(key => key.slice(8)))];
    const choices = h("datalist", {id: "known-labels"}, labels.map(label => h("option", {value: label})));
    const classes = h("input", {value: [rule["class-id"] ?? []].flat().join(", "), list: "known-labels", placeholder: "all", autocomplete: "off"});
    const kinds = Object.entries(KINDS).filter(([, kind]) => kind.isZone);
    const kind = h("select", {}, kinds.map(([value, {title}]) => h("option", {value}, title)));
    if (KINDS[shape.kind].isZone) kind.value = shape.kind;
    const more = h("div", {class: "fields"});
    const inputs = new Map();
    const chosen = () => (KINDS[shape.kind].isZone ? kind.value : shape.kind);
    function options() {
      inputs.clear();
      replace(more, (OPTIONS[chosen()] ?? []).map(([key, text, usual, least]) => {
        const input = h("input", {type: "number", min: least, value: rule[key] ?? usual});
        inputs.set(key, input);
        return field(text, input);
      }));
    }
    kind.addEventListener("change", options);
    options();
    const save = button("Save", () => store({name, classes, inputs, kind: chosen()}, save), {kind: "primary"});
    const points = h("p", {class: "quiet"}, "Drag the points in the picture, or move them with Tab and the arrow keys (Shift: small steps).");
    const swap = shape.points.length === 2 ? button("Swap the ends", () => {
      shape.points.reverse();
      canvas.show(edited.isNew ? [...shapes, shape] : shapes, shape);
    }) : null;
    const note = shape.kind === "line-crossing" && !rule.direction ? h("p", {class: "quiet"}, "Counts both ways: in with the arrow, out against it. Swap the ends to turn it.") : null;
    replace(side, h("h2", {}, edited.isNew ? "New rule" : `Edit ${rule.name}`), points, note, field("Name", name), KINDS[shape.kind].isZone ? field("Rule", kind) : null, field("Classes", classes, "Labels with commas; empty for all."), choices, more, message, h("div", {class: "rule-adders"}, save, swap, button("Cancel", cancel)));
    name.focus();
  }
  async function store({name, classes, inputs, kind}, save) {
    const {shape} = edited;
    const rule = {...shape.rule, name: name.value.trim()};
    if (!rule.name) {
      message.textContent = "Give the rule a name.";
      name.focus();
      return;
    }
    const labels = classes.value.split(",").map(label => label.trim()).filter(Boolean);
    delete rule["class-id"];
    if (labels.length) rule["class-id"] = labels.length === 1 ? labels[0] : labels;
    for (const [key] of Object.values(OPTIONS).flat()) delete rule[key];
    for (const [key, input] of inputs) rule[key] = Number(input.value);
    const made = {kind, rule, points: shape.points};
    await put(edited.isNew ? [...shapes, made] : shapes.map(one => (one === shape ? made : one)), save, `${rule.name} is saved.`);
  }
  const remove = shape => confirmed(`Delete the rule ${shape.rule.name}?`, "Delete", async () => {
    await put(shapes.filter(one => one !== shape), null, `${shape.rule.name} is deleted.`);
  });
  async function put(next, save, text) {
    message.textContent = "";
    if (save) save.disabled = true;
    try {
      const response = await video.call("PUT", `${pathOf(id)}/rules`, {json: sectionOf(section, next, size)});
      toast(`${text} ${savedText(response)}`, "good");
      edited = null;
      side.dataset.key = "";
      await read();
      list();
    } catch (error) {
      if (!save) throw error;
      message.textContent = error.message;
      save.disabled = false;
    }
  }
  return {update, stop: live.stop};
}
