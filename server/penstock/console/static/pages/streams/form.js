/** The form that adds or edits a camera. It tests the address first and shows a frame. */

import {h, replace} from "/dom.js";
import {video} from "/api.js";
import {button, dialog, field, shown, toast} from "/widgets.js";

const PROBE_TIMEOUT_MS = 45_000;

/** A sentence: was the change written to the settings file? */
export function savedText(response) {
  const saved = response.headers.get("x-penstock-saved");
  if (saved === "yes") return "Saved to the settings file.";
  if (saved === "failed") return "Not saved to the settings file: `penstock logs` shows the cause.";
  return "Not saved: a restart undoes it. Start the video program with --save-changes to save changes.";
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
  const id = h("input", {value: source ?? "", disabled: source !== null, spellcheck: "false", autocomplete: "off"});
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

  async function probe() {
    replace(result, h("p", {class: "quiet"}, "Opening the address …"));
    const body = {uri: uri.value.trim(), is_udp: udp.box.checked, ...(source === null ? {} : {source_id: source})};
    try {
      const found = await video.post("/v1/streams/probe", {json: body, timeoutMs: PROBE_TIMEOUT_MS});
      const facts = [`${found.width} × ${found.height}`, found.codec, found.fps ? `${shown(found.fps)} fps` : null, found.is_live ? "live" : "file"].filter(Boolean).join(", ");
      replace(result, h("img", {src: `data:image/jpeg;base64,${found.jpeg}`, alt: "A frame from this address"}), h("p", {}, facts));
      tested = address();
    } catch (error) {
      replace(result);
      throw error;
    }
  }
  async function apply() {
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
    h("div", {class: "fields"}, field("ID", id, source === null ? "Letters, digits, - and _. It cannot be changed later." : ""), field("Name", name, "Optional. Shown instead of the ID.")),
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
  for (const input of [uri, udp.box]) input.addEventListener("input", label);
  (source === null ? uri : name).focus();
}
