/** The request of the page Try as text to copy: curl, Python, and Python over gRPC. */

import {h, replace} from "/dom.js";
import {withQuery} from "/api.js";
import {command} from "/widgets.js";

const LOOPBACK = /^(?:localhost|127\..*|\[::1\]|0\.0\.0\.0|\[::\])$/;
const LOOPS = {
  detections: ["detection", "detection.label, detection.score, detection.xyxy"],
  classes: ["one", "one.label, one.score"],
  text: ["line", "line.text, line.score, line.polygon"],
  segmentation: ["area", "area.label, area.area"],
};
const VALUES = {embedding: "result.vector", depth: "result.values.shape"};

/** The gateway's address as this browser's machine reaches it, if the console reaches it on its own machine. */
export function reachable(address, pageHost) {
  const url = new URL(address);
  if (LOOPBACK.test(url.hostname) && !LOOPBACK.test(pageHost)) url.hostname = pageHost;
  return url.href.replace(/\/$/, "");
}

export const imagePath = (model, options) => withQuery(`/v2/models/${encodeURIComponent(model)}/image`, options);

/** A word of a shell command. */
export const shellQuoted = text => (/^[\w@%+=:,.\/-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`);

/** A string of Python: JSON's escapes are Python's, too. */
const python = text => JSON.stringify(text);

/** request: {gateway, model, fileName, options: {conf, iou}, kind, inputName, needsKey}. options: null for the model's own. */
export function curlText(request) {
  const key = request.needsKey ? ['  -H "authorization: Bearer $PENSTOCK_API_KEY"'] : [];
  const first = `curl -sS --data-binary ${shellQuoted(`@${request.fileName}`)}`;
  return [first, ...key, `  ${shellQuoted(request.gateway + imagePath(request.model, request.options))}`].join(" \\\n");
}

export function pythonText(request) {
  const given = Object.entries(request.options).filter(([, value]) => value !== null);
  const words = [python(request.model), python(request.fileName), ...given.map(([name, value]) => `${name}=${value}`)];
  const loop = LOOPS[request.kind];
  const shown = loop ? `for ${loop[0]} in result:\n    print(${loop[1]})` : `print(${VALUES[request.kind] ?? "result"})`;
  const key = request.needsKey ? "  # with the key in PENSTOCK_API_KEY" : "";
  return `from penstock import Client\n\nclient = Client(${python(request.gateway)})${key}\nresult = client.infer(${words.join(", ")})\n${shown}`;
}

export function grpcText(request) {
  const url = new URL(request.gateway);
  const isTls = url.protocol === "https:";
  const address = `${url.hostname}:${Number(url.port || (isTls ? 443 : 80)) + 1}`;
  const key = request.needsKey ? `, headers={"authorization": "Bearer " + os.environ["PENSTOCK_API_KEY"]}` : "";
  return [
    ...(request.needsKey ? ["import os", ""] : []),
    "import numpy as np",
    "import tritonclient.grpc as triton",
    "",
    ...(request.inputName ? [] : ["# this key cannot read the input's name: ask for it"]),
    `picture = triton.InferInput(${python(request.inputName || "NAME")}, [1, 1], "BYTES")`,
    `with open(${python(request.fileName)}, "rb") as file:`,
    "    picture.set_data_from_numpy(np.array([[file.read()]], object))",
    `with triton.InferenceServerClient(${python(address)}${isTls ? ", ssl=True" : ""}) as client:`,
    `    answer = client.infer(${python(request.model)}, [picture]${key})`,
    "for output in answer.get_response().outputs:",
    "    print(output.name, answer.as_numpy(output.name).shape)",
  ].join("\n");
}

const TABS = [
  {name: "curl", text: curlText, note: ""},
  {name: "Python", text: pythonText, note: "Needs `pip install penstock`."},
  {name: "gRPC", text: grpcText, note: "Answers the model's raw outputs, so conf and iou do not apply. Needs `pip install tritonclient[grpc]`. gRPC is on the port after REST's, unless --grpc-port names another."},
];

/** Tabs with the request in each form. update(request) shows another request. */
export function requestTabs() {
  const panel = h("div", {role: "tabpanel", id: "request-text", tabindex: "-1"});
  const buttons = TABS.map((tab, index) => h("button", {type: "button", role: "tab", id: `request-tab-${index}`, "aria-controls": "request-text", onclick: () => choose(index)}, tab.name));
  const list = h("div", {class: "tabs", role: "tablist", "aria-label": "Form of the request", onkeydown: move}, buttons);
  let chosen = 0;
  let request = null;
  function choose(index) {
    chosen = index;
    buttons.forEach((one, place) => {
      one.setAttribute("aria-selected", String(place === index));
      one.tabIndex = place === index ? 0 : -1;
    });
    panel.setAttribute("aria-labelledby", buttons[index].id);
    if (request) replace(panel, command(TABS[index].text(request)), TABS[index].note ? h("p", {class: "quiet"}, TABS[index].note) : null);
  }
  function move(event) {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    if (!step) return;
    choose((chosen + step + TABS.length) % TABS.length);
    buttons[chosen].focus();
  }
  choose(0);
  return {
    element: h("div", {}, list, panel),
    update(next) {
      if (JSON.stringify(next) === JSON.stringify(request)) return;
      request = next;
      choose(chosen);
    },
  };
}
