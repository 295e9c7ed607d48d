/** The form of a camera: its address is tried, and a picture shown, before it is added or changed. */

import {h, replace} from "/dom.js";
import {video} from "/api.js";
import {button, dialog, field, shown, toast} from "/widgets.js";

const TRY_MS = 45_000;

/** Whether a change will be there after a restart, from its response. */
export function savedText(response) {
  const saved = response.headers.get("x-penstock-saved");
  if (saved === "yes") return "The settings file has it.";
  return saved === "failed" ? "It could not be saved: the log says why." : "It lasts until the video program ends, which runs without --save-changes.";
}

/** Opens the form. source: the ID of a camera to change; none for a new one. done(): after the change. */
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
  const realtime = check("is_realtime", "Play a file at its own speed");
  const loop = check("is_loop", "Begin a file anew at its end");
  const result = h("div", {class: "probe", role: "status"});
  let tried = null;
  const trial = () => JSON.stringify([uri.value.trim(), udp.box.checked]);

  async function attempt() {
    replace(result, h("p", {class: "quiet"}, "Opening the address …"));
    const body = {uri: uri.value.trim(), is_udp: udp.box.checked, ...(source === null ? {} : {source_id: source})};
    try {
      const found = await video.post("/v1/streams/probe", {json: body, timeoutMs: TRY_MS});
      const facts = [`${found.width} × ${found.height}`, found.codec, found.fps ? `${shown(found.fps)} fps` : null, found.is_live ? "live" : "file"].filter(Boolean).join(", ");
      replace(result, h("img", {src: `data:image/jpeg;base64,${found.jpeg}`, alt: "A picture of this address"}), h("p", {}, facts));
      tried = trial();
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
    toast(`${name.value.trim() || id.value.trim()} is ${source === null ? "added" : "changed"}. ${savedText(response)}`, "good");
    await done();
  }
  const verb = source === null ? "Add camera" : "Save";
  const box = dialog(source === null ? "Add a camera" : `Edit ${source}`, [
    field("Address", uri, "rtsp://, http://, https://, or a file of the machine of the video program."),
    h("div", {class: "fields"}, field("ID", id, source === null ? "Letters, digits, - and _. It cannot be changed later." : ""), field("Name", name, "What people read. May be empty.")),
    udp.element, realtime.element, loop.element, result,
  ], [
    {text: `${verb} without a test`, run: apply},
    {text: "Test the address", kind: "primary", run: async () => {
      if (tried === trial()) return apply();
      await attempt();
      label();
      return false;
    }},
  ]);
  const primary = box.querySelector("button.primary");
  const label = () => (primary.textContent = tried === trial() ? verb : "Test the address");
  for (const input of [uri, udp.box]) input.addEventListener("input", label);
  (source === null ? uri : name).focus();
}
