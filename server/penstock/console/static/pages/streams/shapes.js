/** Draws and edits lines, zones and directions on a camera's image, and converts them from and to rules. */

import {h, replace, s} from "/dom.js";

/** Kinds of rules, by the section name of nvdsanalytics. key: the rule's field with the points. isZone: a polygon. */
export const KINDS = {
  "line-crossing": {title: "Line crossing", key: "line", isZone: false},
  "roi-filtering": {title: "Zone (ROI filtering)", key: "roi", isZone: true},
  overcrowding: {title: "Zone: overcrowding", key: "roi", isZone: true},
  dwell: {title: "Zone: dwell time", key: "roi", isZone: true},
  "direction-detection": {title: "Direction", key: "direction", isZone: false},
};
const STEP = 0.01; // movement per arrow key, as a fraction of the image's width or height
const FINE = 0.001; // the same with Shift
const DRAG_PX = 6; // a shorter movement of the pointer is a click

const listOf = value => (Array.isArray(value) ? value : value ? [value] : []);

/** The frame size to which a section's points refer; [1, 1] for relative points. picture: [width, height]. */
function unitOf(section, picture) {
  const points = Object.keys(KINDS).flatMap(kind => listOf(section[kind]).flatMap(rule => [...listOf(rule[KINDS[kind].key]), ...listOf(rule.direction)]));
  if (points.every(([x, y]) => x >= 0 && x <= 1 && y >= 0 && y <= 1)) return [1, 1];
  return section["config-width"] ? [section["config-width"], section["config-height"]] : picture;
}

/** The shapes of a section: [{kind, rule, points, way}], with way: a one-way line's direction. Points are from 0 to 1. */
export function shapesOf(section, picture) {
  const [width, height] = unitOf(section, picture);
  const relative = points => listOf(points).map(([x, y]) => [x / width, y / height]);
  return Object.keys(KINDS).flatMap(kind =>
    listOf(section[kind]).map(rule => ({kind, rule, points: relative(rule[KINDS[kind].key]), way: kind === "line-crossing" ? relative(rule.direction) : []})),
  );
}

/** A copy of the section with these shapes. Its other fields and the unit of its points do not change. */
export function sectionOf(section, shapes, picture) {
  const [width, height] = unitOf(section, picture);
  const round = (value, size) => (size === 1 ? Number(value.toFixed(4)) : Math.round(value * size));
  const made = {...section};
  for (const [kind, {key}] of Object.entries(KINDS)) {
    const rules = shapes.filter(shape => shape.kind === kind).map(({rule, points}) => ({...rule, [key]: points.map(([x, y]) => [round(x, width), round(y, height)])}));
    delete made[kind];
    if (rules.length) made[kind] = rules;
  }
  return made;
}

/** Points of a new shape that is placed without a mouse. */
export function middle(kind) {
  if (KINDS[kind].isZone) return [[0.3, 0.4], [0.7, 0.4], [0.7, 0.8], [0.3, 0.8]];
  return kind === "direction-detection" ? [[0.35, 0.6], [0.65, 0.6]] : [[0.25, 0.6], [0.75, 0.6]];
}

/**
 * An SVG overlay on an image. `show(shapes, selected)` draws the shapes; the points of the selected one can be moved.
 * `draw(shape, done)` collects points by clicks and drags. changed(): called after a point was moved.
 */
export function overlay({size, changed}) {
  const [width, height] = size;
  const unit = Math.max(width, height) / 100;
  const element = s("svg", {class: "overlay", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none"});
  let drawing = null; // {shape, done, pressed, placed, pointer}: pressed and placed in CSS pixels
  let last = {shapes: [], selected: null};

  const at = event => {
    const box = element.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height].map(value => Math.min(Math.max(value, 0), 1));
  };
  const text = points => points.map(([x, y]) => `${(x * width).toFixed(1)},${(y * height).toFixed(1)}`).join(" ");

  function outline(shape, isSelected, isDrawn) {
    const kind = KINDS[shape.kind];
    const name = shape.rule?.name ?? "";
    const parts = [s(kind.isZone && shape.points.length > 2 ? "polygon" : "polyline", {class: `shape ${shape.kind}${isSelected ? " selected" : ""}`, points: text(shape.points), "stroke-width": unit * (isSelected ? 0.6 : 0.4)})];
    if (shape.kind === "direction-detection" && shape.points.length === 2) parts.push(arrow(...shape.points));
    // of the line that is drawn or edited only: those of lines beside it would cover it
    if (shape.kind === "line-crossing" && shape.points.length === 2 && (isSelected || isDrawn)) parts.push(...inArrow(shape));
    if (shape.points.length && name) {
      const [x, y] = shape.points[0];
      parts.push(s("text", {class: "shape-name", x: x * width + unit, y: Math.max(y * height - unit, 3 * unit), "font-size": 2.4 * unit, "stroke-width": 0.5 * unit}, name));
    }
    return parts;
  }

  function arrow([x0, y0], [x1, y1], look = "direction-detection") {
    const angle = Math.atan2((y1 - y0) * height, (x1 - x0) * width);
    const head = [2.6, -2.6].map(turn => [x1 * width - 3 * unit * Math.cos(angle + turn + Math.PI), y1 * height - 3 * unit * Math.sin(angle + turn + Math.PI)]);
    const points = [head[0], [x1 * width, y1 * height], head[1]].map(point => point.map(value => value.toFixed(1)).join(",")).join(" ");
    return s("polyline", {class: `shape ${look}`, points, "stroke-width": 0.5 * unit});
  }

  /** The way that counts as in: of a line without a direction from its left to its right, seen from its first point. */
  function inArrow({points: [[x0, y0], [x1, y1]], way}) {
    const [dx, dy] = way?.length === 2 ? [(way[1][0] - way[0][0]) * width, (way[1][1] - way[0][1]) * height] : [(y0 - y1) * height, (x1 - x0) * width];
    const length = Math.hypot(dx, dy);
    if (!length) return [];
    const [x, y] = [((x0 + x1) / 2) * width, ((y0 + y1) / 2) * height];
    const along = steps => [(x + (steps * unit * dx) / length) / width, (y + (steps * unit * dy) / length) / height];
    const [begin, end, label] = [along(-4), along(6), along(9)];
    return [
      s("polyline", {class: "shape way", points: text([begin, end]), "stroke-width": 0.5 * unit}),
      arrow(begin, end, "way"),
      s("text", {class: "shape-name way-name", x: label[0] * width, y: label[1] * height, "font-size": 2.4 * unit, "stroke-width": 0.5 * unit}, "in"),
    ];
  }

  function handle(shape, number) {
    const [x, y] = shape.points[number];
    const label = () => `Point ${number + 1} of ${shape.rule.name || "the new shape"}: ${Math.round(100 * shape.points[number][0])} % across, ${Math.round(100 * shape.points[number][1])} % down`;
    const dot = s("circle", {class: "handle", cx: x * width, cy: y * height, r: 1.2 * unit, "stroke-width": 0.4 * unit, tabindex: 0, role: "button", "aria-roledescription": "movable point", "aria-label": label()});
    const move = point => {
      shape.points[number] = point.map(value => Math.min(Math.max(value, 0), 1));
      dot.setAttribute("aria-label", label());
      render(dot);
      changed();
    };
    dot.addEventListener("pointerdown", event => {
      dot.setPointerCapture(event.pointerId);
      event.preventDefault();
      dot.focus();
    });
    dot.addEventListener("pointermove", event => dot.hasPointerCapture(event.pointerId) && move(at(event)));
    dot.addEventListener("keydown", event => {
      const step = event.shiftKey ? FINE : STEP;
      const by = {ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step]}[event.key];
      if (!by) return;
      event.preventDefault();
      move(shape.points[number].map((value, axis) => value + by[axis]));
    });
    return dot;
  }

  /** Draws all shapes. moved: the focused handle; handles are then repositioned, not replaced. */
  function render(moved = null) {
    const {shapes, selected} = last;
    const lines = shapes.flatMap(shape => {
      const isDrawn = drawing?.shape === shape;
      return outline(isDrawn ? withPointer(shape) : shape, shape === selected, isDrawn);
    });
    if (moved) {
      const handles = [...element.querySelectorAll(".handle")];
      handles.forEach((dot, number) => {
        dot.setAttribute("cx", selected.points[number][0] * width);
        dot.setAttribute("cy", selected.points[number][1] * height);
      });
      element.querySelectorAll(":scope > :not(.handle)").forEach(part => part.remove());
      element.prepend(...lines);
      return;
    }
    const dots = (drawing?.shape.points ?? []).map(([x, y]) => s("circle", {class: "corner", cx: x * width, cy: y * height, r: unit, "stroke-width": 0.4 * unit}));
    replace(element, lines, dots, selected && !drawing ? selected.points.map((_, number) => handle(selected, number)) : []);
  }

  /** The shape as it is with the pointer as its next point. */
  const withPointer = shape => ({...shape, points: drawing.pointer && shape.points.length ? [...shape.points, drawing.pointer] : shape.points});
  const isFar = ([x0, y0], event) => Math.hypot(event.clientX - x0, event.clientY - y0) >= DRAG_PX;

  element.addEventListener("pointerdown", event => {
    if (!drawing || !event.isPrimary || event.button) return;
    event.preventDefault(); // keeps the focus, and selects no text
    element.setPointerCapture(event.pointerId);
    const isSame = drawing.placed && !isFar(drawing.placed, event); // a double click
    drawing.pressed = [event.clientX, event.clientY];
    drawing.pointer = null;
    if (!isSame) drawing.shape.points.push(at(event));
    render();
  });
  element.addEventListener("pointermove", event => {
    if (!drawing || !event.isPrimary) return;
    const isComplete = !KINDS[drawing.shape.kind].isZone && drawing.shape.points.length === 2;
    if (isComplete) drawing.shape.points[1] = at(event);
    else drawing.pointer = at(event);
    render();
  });
  element.addEventListener("pointerup", event => {
    if (!drawing?.pressed) return;
    const {shape, done, pressed} = drawing;
    const isLine = !KINDS[shape.kind].isZone;
    if (isFar(pressed, event) && !(isLine && shape.points.length === 2)) shape.points.push(at(event));
    Object.assign(drawing, {pressed: null, pointer: null, placed: [event.clientX, event.clientY]});
    if (isLine && shape.points.length === 2) {
      drawing = null;
      done();
    }
    render();
  });
  element.addEventListener("dblclick", event => event.preventDefault());

  return {
    element,
    show(shapes, selected = null) {
      last = {shapes, selected};
      element.classList.toggle("drawing", Boolean(drawing));
      render();
    },
    /** Collects the shape's points by clicks and drags. done(): called after the second point of a line. */
    draw(shape, done) {
      drawing = {shape, done, pressed: null, pointer: null, placed: null};
      element.classList.add("drawing");
    },
    stop() {
      drawing = null;
      element.classList.remove("drawing");
    },
  };
}
