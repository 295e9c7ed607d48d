/** Creates elements. Nothing here parses HTML, so names of models, cameras and files cannot inject markup. */

const SVG = "http://www.w3.org/2000/svg";
const SAFE_URL = /^(?:[/#?]|https?:\/\/|blob:|data:image\/|rtsps?:\/\/)/;

// Control characters, and characters that change the direction of text
const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g;

/** The text with control and direction characters escaped, such as \\u202e. */
export const visible = text => text.replace(INVISIBLE, one => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);

/** An HTML element. attributes: on… takes an event listener; true sets an empty attribute; null and false omit it. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element, with the same arguments. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function" && name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else if (name === "href" || name === "src") element.setAttribute(name, safeUrl(String(value)));
    else if (name === "style") throw new Error("no inline styles: use a class, or element.style.setProperty");
    else element.setAttribute(name, value === true ? "" : visible(String(value)));
  }
  element.append(...parts(children));
  return element;
}

const parts = children => children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== false).map(child => (child instanceof Node ? child : visible(String(child))));

function safeUrl(url) {
  if (!SAFE_URL.test(url)) throw new Error(`URL scheme not allowed in a link: ${url.slice(0, 100)}`);
  return url;
}

/** Replaces the children of an element. */
export function replace(element, ...children) {
  element.replaceChildren(...parts(children));
  return element;
}
