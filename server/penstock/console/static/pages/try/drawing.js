/** Draws a picture and its result on a canvas, with the colors of the gateway's own drawings (draw=1). */

import {paintMask, runLengths} from "/pages/try/masks.js";

export const PALETTE = [
  [80, 220, 240], [180, 200, 120], [200, 100, 160], [100, 180, 255], [240, 140, 0],
  [160, 255, 180], [120, 120, 255], [240, 240, 0], [255, 160, 180], [60, 160, 120],
];
const INK = "rgb(22 22 22)";
const MIN_KEYPOINT_SCORE = 0.25;
const MAX_CAPTIONS = 200;
const MAX_LINES = 12;
const FONT_PX = 13;
const LINE_PX = 2;
const MASK_ALPHA = 0.5;
const MAX_UPSCALE = 8;
export const MAX_SIDE = 2048; // pixels of a picture that a page keeps
const DEPTH_COLORS = [[0, 0, 4], [87, 16, 110], [188, 55, 84], [249, 142, 9], [252, 255, 164]];

export function colorOf(classId) {
  const number = Math.max(classId, 0);
  return PALETTE[(number + Math.floor(number / PALETTE.length)) % PALETTE.length];
}

const css = ([red, green, blue]) => `rgb(${red} ${green} ${blue})`;

/** The items of a result that have a place in the picture: {color, caption, outline?, mask?, keypoints?, isLine}. */
function itemsOf(result) {
  const caption = (text, score) => `${text} ${score.toFixed(2)}`.trim();
  if (result.detections) {
    return result.detections.map(one => ({
      color: colorOf(one.class_id),
      caption: caption(one.label, one.score),
      outline: one.xywhr ? orientedCorners(one.xywhr) : corners(one.xyxy),
      mask: one.mask?.counts,
      keypoints: one.keypoints,
    }));
  }
  if (result.text) return result.text.map(one => ({color: colorOf(0), caption: caption(one.text, one.score), outline: one.polygon}));
  if (result.segmentation) {
    const [height, width] = result.segmentation.size;
    return result.segmentation.classes.map(one => ({
      color: colorOf(one.class_id),
      caption: `${one.label} ${Math.round((100 * one.area) / Math.max(height * width, 1))}%`,
      mask: one.counts,
    }));
  }
  if (result.classes) return result.classes.map((one, index) => ({color: colorOf(index), caption: caption(one.label, one.score)}));
  if (result.embedding) return [{color: colorOf(0), caption: `embedding of ${result.embedding.length} values`}];
  return [];
}

const corners = ([left, top, right, bottom]) => [[left, top], [right, top], [right, bottom], [left, bottom]];

function orientedCorners([x, y, width, height, angle]) {
  const [cos, sin] = [Math.cos(angle), Math.sin(angle)];
  return [[-1, -1], [1, -1], [1, 1], [-1, 1]].map(([along, across]) => {
    const [dx, dy] = [(along * width) / 2, (across * height) / 2];
    return [x + dx * cos - dy * sin, y + dx * sin + dy * cos];
  });
}

/**
 * A canvas as wide as `frame` allows. show(picture, result, skeleton): picture {image, width, height}; result null for
 * none. highlight(index): of an item, null for none. at(event): the index of the smallest box under the pointer.
 */
export function drawingOn(canvas, frame) {
  const context = canvas.getContext("2d");
  let shown = null; // {picture, result, skeleton, items, depth}
  let highlighted = null;
  let scale = 1; // pixels of the canvas for one of the picture
  let masks = null; // a canvas with all masks

  function size() {
    const {width, height} = shown.picture;
    const wide = frame.clientWidth || 640;
    const fit = Math.min(wide / width, (0.75 * window.innerHeight) / height, MAX_UPSCALE);
    const ratio = window.devicePixelRatio || 1;
    scale = fit * ratio;
    canvas.style.setProperty("width", `${Math.round(width * fit)}px`);
    const [across, down] = [Math.max(Math.round(width * scale), 1), Math.max(Math.round(height * scale), 1)];
    if (canvas.width !== across || canvas.height !== down) [canvas.width, canvas.height] = [across, down];
  }
  function maskCanvas(items) {
    const layer = new OffscreenCanvas(canvas.width, canvas.height);
    const data = new ImageData(canvas.width, canvas.height);
    const target = {pixels: new Uint32Array(data.data.buffer), width: canvas.width, height: canvas.height};
    for (const item of [...items].reverse()) {
      if (item.mask) paintMask(runLengths(item.mask), shown.picture.height, scale, target, pixelOf(item.color));
    }
    layer.getContext("2d").putImageData(data, 0, 0);
    return layer;
  }
  function blend(layer, alpha) {
    context.globalAlpha = alpha;
    context.drawImage(layer, 0, 0);
    context.globalAlpha = 1;
  }
  function drawMasks() {
    if (!shown.items.some(item => item.mask)) return;
    masks ??= maskCanvas(shown.items);
    const one = highlighted === null ? null : shown.items[highlighted];
    blend(masks, one?.mask ? MASK_ALPHA / 3 : MASK_ALPHA);
    if (one?.mask) blend(maskCanvas([one]), 0.8);
  }
  function draw() {
    if (!shown) return;
    size();
    context.drawImage(shown.depth ?? shown.picture.image, 0, 0, canvas.width, canvas.height);
    drawMasks();
    const pen = newPen(context, scale, canvas);
    const order = shown.items.map((_, index) => index).reverse();
    for (const index of order) if (index !== highlighted) pen.shape(shown.items[index], shown.skeleton, false);
    if (highlighted !== null && shown.items[highlighted]) pen.shape(shown.items[highlighted], shown.skeleton, true);
    const first = highlighted !== null && shown.items[highlighted] ? [shown.items[highlighted]] : [];
    pen.captions([...first, ...shown.items.filter(item => item !== first[0])]);
  }
  new ResizeObserver(() => {
    masks = null;
    draw();
  }).observe(frame);
  return {
    show(picture, result, skeleton, depth = null) {
      shown = {picture, skeleton, depth, items: result ? itemsOf(result) : []};
      masks = null;
      highlighted = null;
      draw();
    },
    highlight(index) {
      if (index === highlighted) return;
      highlighted = index;
      draw();
    },
    at(event) {
      if (!shown) return null;
      const box = canvas.getBoundingClientRect();
      const ratio = canvas.width / box.width / scale;
      return smallestAt(shown.items, (event.clientX - box.left) * ratio, (event.clientY - box.top) * ratio);
    },
  };
}

/** The index of the smallest item whose bounds have the point; null for none. */
function smallestAt(items, x, y) {
  let found = null;
  let least = Infinity;
  items.forEach(({outline}, index) => {
    if (!outline) return;
    const [left, top, right, bottom] = bounds(outline);
    const area = (right - left) * (bottom - top);
    if (x >= left && x <= right && y >= top && y <= bottom && area < least) [found, least] = [index, area];
  });
  return found;
}

function bounds(outline) {
  const [xs, ys] = [outline.map(point => point[0]), outline.map(point => point[1])];
  return [Math.min(...xs), Math.min(...ys), Math.max(...xs), Math.max(...ys)];
}

/** Draws outlines, keypoints and captions. scale: from the picture's pixels to the canvas'. */
function newPen(context, scale, canvas) {
  const ratio = window.devicePixelRatio || 1;
  const taken = [];

  function stroke(path, color, width) {
    for (const [style, extra] of [[INK, 2], [css(color), 0]]) {
      context.strokeStyle = style;
      context.lineWidth = (width + extra) * ratio;
      context.stroke(path);
    }
  }
  function outline(points, color, width) {
    const path = new Path2D();
    const corner = values => values.map(value => Math.round(value * scale)); // whole pixels: sharp edges
    points.forEach((point, index) => (index ? path.lineTo(...corner(point)) : path.moveTo(...corner(point))));
    path.closePath();
    stroke(path, color, width);
  }
  function keypoints(points, skeleton, color) {
    const isSeen = index => points[index]?.[2] >= MIN_KEYPOINT_SCORE;
    for (const [one, other] of skeleton) {
      if (!isSeen(one) || !isSeen(other)) continue;
      const bone = new Path2D();
      bone.moveTo(points[one][0] * scale, points[one][1] * scale);
      bone.lineTo(points[other][0] * scale, points[other][1] * scale);
      stroke(bone, color, LINE_PX);
    }
    points.forEach(([x, y], index) => {
      if (!isSeen(index)) return;
      const dot = new Path2D();
      dot.arc(x * scale, y * scale, 2.5 * ratio, 0, 2 * Math.PI);
      stroke(dot, color, 1);
      context.fillStyle = css(color);
      context.fill(dot);
    });
  }
  function plate(text, color, x, y, width, height) {
    context.fillStyle = css(color);
    context.fillRect(x, y, width, height);
    context.fillStyle = INK;
    context.fillText(text, x + 4 * ratio, y + height / 2);
  }
  /** The first position where the caption covers no other; null if there is none. */
  function placed(item, width, height) {
    const [left, top, , bottom] = bounds(item.outline).map(value => value * scale);
    const x = Math.max(0, Math.min(left, canvas.width - width));
    for (const y of [top - height, top, bottom]) {
      const inside = Math.max(0, Math.min(y, canvas.height - height));
      const box = [x, inside, x + width, inside + height];
      if (!taken.some(other => box[0] < other[2] && other[0] < box[2] && box[1] < other[3] && other[1] < box[3])) return box;
    }
    return null;
  }
  return {
    shape(item, skeleton, isHighlighted) {
      context.lineJoin = "round";
      if (item.outline) outline(item.outline, item.color, isHighlighted ? 3 * LINE_PX : LINE_PX);
      if (item.keypoints) keypoints(item.keypoints, skeleton, item.color);
    },
    captions(items) {
      context.font = `${FONT_PX * ratio}px system-ui, "Noto Sans", sans-serif`;
      context.textBaseline = "middle";
      const height = (FONT_PX + 6) * ratio;
      let line = 0;
      for (const item of items.slice(0, MAX_CAPTIONS)) {
        const text = item.caption.slice(0, 80);
        const width = context.measureText(text).width + 8 * ratio;
        if (item.outline) {
          const box = placed(item, width, height);
          if (box) taken.push(box);
          if (box) plate(text, item.color, box[0], box[1], width, height);
        } else if (line < MAX_LINES && (line + 1) * height <= canvas.height) {
          plate(text, item.color, 0, line * height, width, height);
          line += 1;
        }
      }
    },
  };
}

/** The canvas of a depth map: bright where its values are high. */
export async function depthImage(depth) {
  const text = atob(depth.png16);
  const bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at += 1) bytes[at] = text.charCodeAt(at);
  const image = await createImageBitmap(new Blob([bytes], {type: "image/png"}));
  const share = Math.min(1, MAX_SIDE / Math.max(image.width, image.height));
  const layer = new OffscreenCanvas(Math.ceil(image.width * share), Math.ceil(image.height * share));
  const context = layer.getContext("2d");
  context.drawImage(image, 0, 0, layer.width, layer.height);
  image.close();
  const data = context.getImageData(0, 0, layer.width, layer.height);
  const pixels = new Uint32Array(data.data.buffer);
  const colors = Uint32Array.from({length: 256}, (_, value) => depthColor(value / 255));
  for (let at = 0; at < pixels.length; at += 1) pixels[at] = colors[pixels[at] & 255];
  context.putImageData(data, 0, 0);
  return layer;
}

/** A pixel of ImageData. share: from 0 to 1. */
function depthColor(share) {
  const place = share * (DEPTH_COLORS.length - 1);
  const low = Math.min(Math.floor(place), DEPTH_COLORS.length - 2);
  return pixelOf(DEPTH_COLORS[low].map((from, channel) => from + (place - low) * (DEPTH_COLORS[low + 1][channel] - from)));
}

const pixelOf = ([red, green, blue]) => ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
