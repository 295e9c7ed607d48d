/** The form that adds or edits a camera. It tests the address first and shows a frame. */

import {h, replace} from "/dom.js";
import {video} from "/api.js";
import {button, dialog, field, shown, toast} from "/widgets.js";

const PROBE_TIMEOUT_MS = 45_000;
const MAX_ID = 64;
const ID = /^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$/;

/** A sentence: was the change written to the settings file? */
export function savedText(response) {
  const saved = response.headers.get("x-penstock-saved");
  if (saved === "yes") return "Saved to the settings file.";
  if (saved === "failed") return "Not saved to the settings file: `penstock logs` shows the cause.";
  return "Not saved: a restart undoes it. Start the video program with --save-changes to save changes.";
}

/** An ID for an address: host and last part of the path of a URL, or the name of a file. */
export function suggestedId(address) {
  const [, host, urlPath] = /^[a-z][a-z0-9+.-]*:\/\/(?:[^/?#]*@)?(\[[^\]]*\]|[^:/?#]*)[^/?#]*([^?#]*)/i.exec(address) ?? [null, "", address];
  const stem = urlPath.split("/").at(-1).replace(/(.)\.[^.]*$/, "$1");
  return [host, stem].filter(Boolean).join("-").replace(/[^A-Za-z0-9._-]+/g, "-").slice(0, MAX_ID).replace(/^[-.]+|[-.]+$/g, "");
}

/** Opens the form. source: ID of the camera to edit; null adds a camera. done(): called after the change. */
export async function openCamera({source = null, done}) {
  let known = {};
  if (source !== null) {
    try {
      known = await video.get(`/v1/streams/${encodeURIComponent(source)}/options`);
    } catch (error) {
      toast(error.message, "bad");
      return;
    }
  }
  const uri = h("input", {value: known.uri ?? "", required: true, placeholder: "rtsp://user:password@192.0.2.10/stream1", spellcheck: "false", autocomplete: "off"});
  const id = h("input", {value: source ?? "", disabled: source !== null, required: source === null, maxlength: MAX_ID, spellcheck: "false", autocomplete: "off"});
  const name = h("input", {value: known.camera_name ?? "", autocomplete: "off"});
  const check = (key, text) => {
    const box = h("input", {type: "checkbox", checked: Boolean(known[key])});
    return {box, element: h("label", {class: "check"}, box, ` ${text}`)};
  };
  const udp = check("is_udp", "RTSP over UDP");
  const realtime = check("is_realtime", "Play a file in real time");
  const loop = check("is_loop", "Loop a file");
  const result = h("div", {class: "probe", role: "status"});
  let tested = null;
  const address = () => JSON.stringify([uri.value.trim(), udp.box.checked]);

  const needed = (isGiven, input, text) => {
    if (isGiven) return;
    input.focus();
    throw new Error(text);
  };

  async function probe() {
    needed(uri.value.trim(), uri, "Enter the camera's address.");
    replace(result, h("p", {class: "quiet"}, "Opening the address …"));
    const body = {uri: uri.value.trim(), is_udp: udp.box.checked, ...(source === null ? {} : {source_id: source})};
    try {
      const found = await video.post("/v1/streams/probe", {json: body, timeoutMs: PROBE_TIMEOUT_MS});
      const facts = [`${found.width} × ${found.height}`, found.codec, found.fps ? `${shown(found.fps)} fps` : null, found.is_live ? "live" : "file"].filter(Boolean).join(", ");
      replace(result, h("img", {src: `data:image/jpeg;base64,${found.jpeg}`, alt: "A frame from this address"}), h("p", {}, facts), found.is_recordable ? null : h("p", {class: "fault"}, `Events of this camera will have no film: packets of ${found.codec} do not fit into MP4.`));
      tested = address();
    } catch (error) {
      replace(result);
      throw error;
    }
  }
  async function apply() {
    needed(uri.value.trim(), uri, "Enter the camera's address.");
    if (source === null) needed(ID.test(id.value.trim()), id, id.value.trim() ? "The ID takes letters, digits, - _ and ., and begins with no dot." : "Give the camera an ID.");
    const json = {...known, uri: uri.value.trim(), camera_name: name.value.trim(), is_udp: udp.box.checked, is_realtime: realtime.box.checked, is_loop: loop.box.checked};
    const response = source === null
      ? await video.call("POST", "/v1/streams", {json: {...json, source_id: id.value.trim()}})
      : await video.call("PUT", `/v1/streams/${encodeURIComponent(source)}`, {json});
    toast(`${source === null ? "Added" : "Changed"} ${name.value.trim() || id.value.trim()}. ${savedText(response)}`, "good");
    await done();
  }
  const verb = source === null ? "Add camera" : "Save";
  const box = dialog(source === null ? "Add a camera" : `Edit ${source}`, [
    field("Address", uri, "rtsp://, http:// or https:// URL, or the path of a file on the video program's host."),
    h("div", {class: "fields"}, field("ID", id, source === null ? "Letters, digits, - . and _; it cannot be changed later." : ""), field("Name", name, "Optional. Shown instead of the ID.")),
    udp.element, realtime.element, loop.element, result,
  ], [
    {text: `${verb} without test`, run: apply},
    {text: "Test the address", kind: "primary", run: async () => {
      if (tested === address()) return apply();
      await probe();
      label();
      return false;
    }},
  ]);
  const primary = box.querySelector("button.primary");
  const label = () => (primary.textContent = tested === address() ? verb : "Test the address");
  let isSuggested = source === null;
  id.addEventListener("input", () => (isSuggested = !id.value));
  uri.addEventListener("input", () => isSuggested && (id.value = suggestedId(uri.value.trim())));
  for (const input of [uri, udp.box]) input.addEventListener("input", label);
  (source === null ? uri : name).focus();
}
