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

const listOf = value => (Array.isArray(value) ? value : value ? [value] : []);

/** The frame size to which a section's points refer; [1, 1] for relative points. picture: [width, height]. */
function unitOf(section, picture) {
  const points = Object.keys(KINDS).flatMap(kind => listOf(section[kind]).flatMap(rule => [...listOf(rule[KINDS[kind].key]), ...listOf(rule.direction)]));
  if (points.every(([x, y]) => x >= 0 && x <= 1 && y >= 0 && y <= 1)) return [1, 1];
  return section["config-width"] ? [section["config-width"], section["config-height"]] : picture;
}

/** The shapes of a section: [{kind, rule, points}]. Points are relative, from 0 to 1. */
export function shapesOf(section, picture) {
  const [width, height] = unitOf(section, picture);
  return Object.keys(KINDS).flatMap(kind =>
    listOf(section[kind]).map(rule => ({kind, rule, points: listOf(rule[KINDS[kind].key]).map(([x, y]) => [x / width, y / height])})),
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
 * `draw(shape, done)` collects points by clicks. changed(): called after a point was moved.
 */
export function overlay({size, changed}) {
  const [width, height] = size;
  const unit = Math.max(width, height) / 100;
  const element = s("svg", {class: "overlay", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none"});
  let drawing = null;
  let last = {shapes: [], selected: null};

  const at = event => {
    const box = element.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height].map(value => Math.min(Math.max(value, 0), 1));
  };
  const text = points => points.map(([x, y]) => `${(x * width).toFixed(1)},${(y * height).toFixed(1)}`).join(" ");

  function outline(shape, isSelected) {
    const kind = KINDS[shape.kind];
    const name = shape.rule?.name ?? "";
    const parts = [s(kind.isZone && shape.points.length > 2 ? "polygon" : "polyline", {class: `shape ${shape.kind}${isSelected ? " selected" : ""}`, points: text(shape.points), "stroke-width": unit * (isSelected ? 0.6 : 0.4)})];
    if (shape.kind === "direction-detection" && shape.points.length === 2) parts.push(arrow(...shape.points));
    if (shape.points.length && name) {
      const [x, y] = shape.points[0];
      parts.push(s("text", {class: "shape-name", x: x * width + unit, y: Math.max(y * height - unit, 3 * unit), "font-size": 2.4 * unit, "stroke-width": 0.5 * unit}, name));
    }
    return parts;
  }

  function arrow([x0, y0], [x1, y1]) {
    const angle = Math.atan2((y1 - y0) * height, (x1 - x0) * width);
    const head = [2.6, -2.6].map(turn => [x1 * width - 3 * unit * Math.cos(angle + turn + Math.PI), y1 * height - 3 * unit * Math.sin(angle + turn + Math.PI)]);
    const points = [head[0], [x1 * width, y1 * height], head[1]].map(point => point.map(value => value.toFixed(1)).join(",")).join(" ");
    return s("polyline", {class: "shape direction-detection", points, "stroke-width": 0.5 * unit});
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
    const lines = shapes.flatMap(shape => outline(shape, shape === selected));
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
    replace(element, lines, selected && !drawing ? selected.points.map((_, number) => handle(selected, number)) : []);
  }

  element.addEventListener("click", event => {
    if (!drawing) return;
    const {shape, done} = drawing;
    shape.points.push(at(event));
    if (!KINDS[shape.kind].isZone && shape.points.length === 2) {
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
    /** Collects the shape's points by clicks. done(): called after the second point of a line. */
    draw(shape, done) {
      drawing = {shape, done};
      element.classList.add("drawing");
    },
    stop() {
      drawing = null;
      element.classList.remove("drawing");
    },
  };
}
