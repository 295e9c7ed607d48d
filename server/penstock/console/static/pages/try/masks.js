/** Masks in COCO's compressed run lengths, painted into pixels. */

/** The lengths of runs of unset and set pixels in turn, column by column. Throws for text that is none. */
export function runLengths(text) {
  const lengths = [];
  let value = 0;
  let place = 1;
  for (let at = 0; at < text.length; at += 1) {
    const digit = text.charCodeAt(at) - 48;
    if (digit < 0 || digit > 63) throw new Error("a mask is not in COCO's compressed form");
    value += (digit & 31) * place;
    place *= 32;
    if (digit & 32) continue;
    if (digit & 16) value -= place;
    if (lengths.length > 2) value += lengths[lengths.length - 2];
    lengths.push(value);
    value = 0;
    place = 1;
  }
  return lengths;
}

/** The number of set pixels. */
export const areaOf = lengths => lengths.reduce((sum, length, index) => (index % 2 ? sum + length : sum), 0);

/**
 * Sets the mask's pixels. target: {pixels: Uint32Array, width, height}, scaled by `scale` from the picture's height.
 */
export function paintMask(lengths, pictureHeight, scale, target, color) {
  let begin = 0;
  lengths.forEach((length, index) => {
    const end = begin + length;
    if (index % 2) paintRun(begin, end, pictureHeight, scale, target, color);
    begin = end;
  });
}

/** A run of pixels goes down a column of the picture, then down the next one. */
function paintRun(begin, end, pictureHeight, scale, {pixels, width, height}, color) {
  for (let at = begin; at < end; ) {
    const column = Math.floor(at / pictureHeight);
    const top = at - column * pictureHeight;
    const bottom = Math.min(pictureHeight, top + end - at);
    at += bottom - top;
    const [left, right] = [Math.floor(column * scale), Math.min(width, Math.ceil((column + 1) * scale))];
    const [first, last] = [Math.floor(top * scale), Math.min(height, Math.ceil(bottom * scale))];
    for (let y = first; y < last; y += 1) pixels.fill(color, y * width + left, y * width + right);
  }
}
