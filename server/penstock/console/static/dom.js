/** Elements from data. Text is always text: nothing here parses HTML, so names from users and cameras cannot inject any. */

const SVG = "http://www.w3.org/2000/svg";
const SAFE_URL = /^(?:[/#?]|https?:\/\/|blob:|data:image\/|rtsps?:\/\/)/;

// Characters that no one sees, or that change the order of the text beside them
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g;

/** The text with such characters written as \\u202e. */
export const visible = text => text.replace(UNSEEN, one => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`);

/** An HTML element. attributes: `onclick` and its kind take functions, true sets an empty attribute, null and false leave it out. */
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
  if (!SAFE_URL.test(url)) throw new Error(`not an address that a page may link to: ${url.slice(0, 100)}`);
  return url;
}

/** Replaces the children of an element. */
export function replace(element, ...children) {
  element.replaceChildren(...parts(children));
  return element;
}
