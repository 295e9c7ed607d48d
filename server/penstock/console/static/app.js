/** Navigation, theme, login, and the router: shows the page for the current URL. */

import {h, replace} from "/dom.js";
import {identity, login, logout} from "/api.js";
import {button, dialog, field, toast} from "/widgets.js";
import {page as events} from "/pages/events.js";
import {page as load} from "/pages/load.js";
import {page as models} from "/pages/models.js";
import {page as streams} from "/pages/streams.js";
import {page as system} from "/pages/system.js";
import {page as tryPage} from "/pages/try.js";

const PAGES = [models, tryPage, streams, events, load, system];
const main = document.getElementById("main");
let stopPage = () => {};
let shownPath = null;

function pageOf(path) {
  return PAGES.find(page => path === page.path || path.startsWith(`${page.path}/`)) ?? PAGES[0];
}

/** Renders the page for the current URL. */
async function show() {
  const path = location.pathname;
  const page = pageOf(path);
  stopPage();
  stopPage = () => {};
  shownPath = path;
  document.title = `${page.title} – Penstock`;
  for (const link of document.querySelectorAll("#nav a")) {
    if (link.getAttribute("href") === page.path) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const root = h("div", {class: "page"});
  replace(main, root);
  try {
    const rest = path.slice(page.path.length).split("/").filter(Boolean).map(decodeURIComponent);
    const stop = await page.render(root, {rest, query: new URLSearchParams(location.search), go});
    if (shownPath === path) stopPage = stop ?? (() => {});
    else stop?.();
  } catch (error) {
    replace(root, h("p", {class: "fault", role: "alert"}, error.message));
  }
}

/** Navigates to a path of the console. */
export function go(path) {
  history.pushState(null, "", path);
  show().then(() => document.querySelector("main h1")?.focus());
}

function followLinks(event) {
  const link = event.target.closest?.("a[href]");
  const isPlain = !event.defaultPrevented && event.button === 0 && !event.ctrlKey && !event.metaKey && !event.shiftKey;
  if (!link || !isPlain || link.target || link.hasAttribute("download") || link.origin !== location.origin) return;
  if (link.pathname !== "/" && !PAGES.some(page => pageOf(link.pathname) === page && link.pathname.startsWith(page.path))) return;
  if (link.hash && link.pathname === location.pathname) return;
  event.preventDefault();
  go(link.pathname + link.search);
}

const THEMES = {auto: "Theme: system", light: "Theme: light", dark: "Theme: dark"};

function themeButton() {
  const order = Object.keys(THEMES);
  let theme = order.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "auto";
  const one = button("", () => apply(order[(order.indexOf(theme) + 1) % order.length]), {kind: "small"});
  function apply(next) {
    theme = next;
    localStorage.setItem("theme", theme);
    document.documentElement.dataset.theme = theme;
    one.textContent = THEMES[theme];
  }
  apply(theme);
  return one;
}

let openLogin = null;

/** Opens the login dialog, unless it is already open. */
function askForKey(reason) {
  if (openLogin?.open) return;
  const input = h("input", {type: "password", autocomplete: "off", spellcheck: "false"});
  const enter = async () => {
    await login(input.value);
    await showIdentity();
    show();
  };
  openLogin = dialog("API key", [h("p", {}, reason), field("API key", input, "Stored in the memory of the console's process until you log out, or for 12 hours without use.")], [{text: "Log in", kind: "primary", run: enter}]);
  input.addEventListener("keydown", event => {
    if (event.key === "Enter") openLogin.querySelector("button.primary").click();
  });
  input.focus();
}

async function showIdentity() {
  const tools = document.getElementById("tools");
  let who;
  try {
    who = await identity();
  } catch (error) {
    replace(tools, themeButton());
    if (error.status !== 401) toast(error.message, "bad");
    return;
  }
  const leave = button("Log out", async () => {
    await logout();
    await showIdentity();
    show();
  }, {kind: "small"});
  const name = who.client ? h("span", {class: "quiet who", title: `roles: ${who.roles.join(", ")}`}, who.client) : null;
  replace(tools, name, themeButton(), who.client ? leave : null);
  if (!who.roles.length) askForKey("This gateway requires an API key.");
}

replace(document.getElementById("nav"), PAGES.map(page => h("a", {href: page.path}, page.title)));
document.addEventListener("click", followLinks);
document.addEventListener("needs-key", event => askForKey(event.detail));
window.addEventListener("popstate", show);
await showIdentity();
show();
