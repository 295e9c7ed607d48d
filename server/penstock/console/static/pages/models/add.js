/** Adds a model from its file: the file is sent, what was found in it is shown, open questions are asked, then it is added. */

import {h, replace} from "/dom.js";
import {gateway, withQuery} from "/api.js";
import {badge, button, bytes, dialog, field, shown} from "/widgets.js";
import {pageOf, tryPageOf} from "/pages/models/model.js";

const WORK_MS = 360_000; // the file is read, tried and loaded
const SHOWN_LABELS = 8;
const MAX_NAME = 100;
const VERDICTS = {servable: ["can be served", "good"], ambiguous: ["a question is open", "warn"], unservable: ["cannot be served", "bad"]};
const REPLACE_LABEL = "Replace a model of this name that was added before";
const REPLACE_ADVICE = "replace=1 replaces a model that was added"; // of the API
const COLORS = ["RGB", "BGR", "gray"]; // of model-color-format
/** Facts that a person can state. The gateway checks the values. */
const FACTS = {
  labels: "Labels", conf: "Lowest score", iou: "Most overlap of two boxes", layout: "Layout of the outputs", color: "Order of the colors", input_size: "Size of the input",
  scale: "Factor of the pixels", mean: "Mean that is subtracted", std: "Standard deviation that divides", resize: "How pictures are resized", padding: "Value of the padding",
  keypoint_names: "Names of the keypoints", skeleton: "Joined keypoints", parameter: "Any other parameter, KEY=VALUE",
};
const wordsOf = parameter => (FACTS[parameter] ? `${FACTS[parameter]} [${parameter}]` : parameter);

/** Whether a drag brings files. */
export const hasFiles = event => [...(event.dataTransfer?.types ?? [])].includes("Files");

/** Opens the dialog. file: one that was dropped already. */
export function openAdd(file = null) {
  const body = h("div", {class: "add-model"});
  const stopper = new AbortController();
  const signal = stopper.signal;
  const answers = new Map();
  let found = null;
  const name = h("input", {autocomplete: "off", spellcheck: "false", maxlength: String(MAX_NAME)});
  const replaces = h("input", {type: "checkbox"});
  const box = dialog("Add a model", [body], [{text: "Add", kind: "primary", run: add}]);
  const fault = box.querySelector(".fault");
  const primary = box.querySelector("button.primary");
  const limit = gateway.get("/v1/system/config", {signal}).then(all => all.settings.find(one => one.name === "max_model_bytes")?.value ?? Infinity, () => Infinity);
  box.classList.add("wide");
  box.addEventListener("close", () => stopper.abort());
  if (file) send(file);
  else choose();

  function choose(message = "") {
    const input = h("input", {type: "file", class: "hidden", accept: ".onnx,.pt2,.pt,.torchscript", onchange: () => input.files[0] && send(input.files[0])});
    const zone = h("label", {class: "drop-zone"}, input, h("span", {class: "empty-title"}, "Drop an ONNX file here, or choose one"), h("span", {class: "quiet"}, "It is inspected before it is added."));
    zone.addEventListener("dragover", event => hasFiles(event) && event.preventDefault());
    zone.addEventListener("drop", event => {
      event.preventDefault();
      if (event.dataTransfer.files[0]) send(event.dataTransfer.files[0]);
    });
    primary.hidden = true;
    fault.textContent = message;
    replace(body, zone);
    limit.then(most => most < Infinity && zone.append(h("span", {class: "quiet"}, `${bytes(most)} at most.`)));
    input.focus();
  }

  async function send(chosen) {
    const most = await limit;
    if (chosen.size > most) return choose(`${chosen.name} has ${bytes(chosen.size)}, and this gateway takes ${bytes(most)} at most (max_model_bytes).`);
    const bar = h("progress", {max: "1", value: 0, "aria-label": "Sent"});
    const text = h("p", {role: "status"});
    const progress = share => {
      if (share >= 1) bar.removeAttribute("value");
      else bar.value = share;
      text.textContent = share < 1 ? `Sending ${chosen.name}, ${bytes(chosen.size)}: ${Math.floor(100 * share)} %` : `Reading ${chosen.name}, and trying it on two pictures …`;
    };
    primary.hidden = true;
    fault.textContent = "";
    replace(body, bar, text);
    progress(0);
    try {
      found = await gateway.upload("/v1/inspect", chosen, {progress, signal});
    } catch (error) {
      if (error.name !== "AbortError") choose(`${chosen.name}: ${error.message}`);
      return null;
    }
    answers.clear();
    name.value = nameOf(chosen.name);
    show();
    return null;
  }

  /** Has the file read again with one fact more, or one less if the value is null. */
  async function answer(parameter, value) {
    const before = new Map(answers);
    if (value === null) answers.delete(parameter);
    else answers.set(parameter, value);
    fault.textContent = "";
    const form = body.querySelector("fieldset");
    const focused = document.activeElement; // a disabled form loses it
    form.disabled = primary.disabled = true;
    try {
      found = await gateway.post(withQuery("/v1/inspect", {upload: found.upload, ...Object.fromEntries(answers)}), {signal, timeoutMs: WORK_MS});
      show();
      (body.querySelector(".question.open :is(button, input)") ?? (primary.hidden ? body.querySelector("button") : name)).focus();
    } catch (error) {
      answers.clear();
      before.forEach((old, key) => answers.set(key, old));
      fault.textContent = error.message;
      form.disabled = false;
      focused.focus();
    }
    primary.disabled = false;
  }

  function show() {
    const [words, kind] = VERDICTS[found.verdict] ?? [found.verdict, ""];
    primary.hidden = found.verdict !== "servable";
    const given = [...answers].map(([parameter, value]) => button(`${parameter}=${value} ×`, () => answer(parameter, null), {kind: "small", "aria-label": `Take back ${parameter}=${value}`}));
    replace(body, h("fieldset", {class: "plain"},
      h("div", {class: "row"}, h("p", {role: "status"}, badge(words, kind), found.verdict === "unservable" ? ` ${found.reason}` : null), button("Another file", () => choose(), {kind: "small"})),
      given.length ? h("p", {class: "actions"}, h("span", {}, "You said:"), given) : null,
      found.questions.map(question => questionOf(question, answer)),
      found.verdict === "servable" ? [field("Name", name, "Letters, digits, '.', '_' and '-'. It is part of the model's address."), h("label", {class: "check"}, replaces, ` ${REPLACE_LABEL}`)] : null,
      factsOf(found),
      listOf("Found in two pictures", found.trial), listOf("Assumed", found.assumptions), listOf("Warnings", found.trial_failure ? [...found.warnings, `The trial failed: ${found.trial_failure}`] : found.warnings),
      found.evidence.length ? h("details", {}, h("summary", {}, "Why"), h("ul", {class: "plain"}, found.evidence.map(text => h("li", {}, text)))) : null,
      h("details", {}, h("summary", {}, "Change what was found"), factForm(answer))));
  }

  async function add() {
    const model = name.value.trim();
    if (!model) throw new Error("Give it a name.");
    const form = body.querySelector("fieldset");
    const waiting = h("p", {role: "status"}, badge("loading", "warn"), ` ${model} is tried and loaded …`);
    form.disabled = true;
    box.querySelector(".dialog-actions").before(waiting);
    try {
      const query = {upload: found.upload, ...Object.fromEntries(answers), replace: replaces.checked ? "1" : null};
      const added = await gateway.post(withQuery(`/v2/repository/models/${encodeURIComponent(model)}/add`, query), {timeoutMs: WORK_MS, signal});
      primary.hidden = true;
      replace(body, h("p", {role: "status"}, badge("ready", "good"), ` ${added.name} is served.`), h("p", {}, `Batches: ${added.batches}`), added.placement_reason ? h("p", {}, `It ${added.placement_reason}.`) : null, listOf("Warnings", added.warnings),
        h("p", {class: "actions"}, leave(tryPageOf(added.name), "Try it", "button primary"), leave(pageOf(added.name), "Its page", "button")));
      box.querySelector(".dialog-actions button").textContent = "Close";
      body.querySelector("a").focus();
    } catch (error) {
      throw new Error(error.message.replace(REPLACE_ADVICE, `or check “${REPLACE_LABEL}”`));
    } finally {
      form.disabled = false;
      waiting.remove();
    }
    return false;
  }
  /** A link that closes the dialog, too. */
  const leave = (href, text, kind) => h("a", {href, class: kind, onclick: () => box.close()}, text);
}

/** A model's name from that of its file. */
export const nameOf = file => file.replace(/\.[A-Za-z0-9]+$/, "").replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[^A-Za-z0-9]+|-+$/g, "").slice(0, MAX_NAME);

function listOf(title, texts) {
  return texts.length ? [h("h3", {}, title), h("ul", {class: "plain"}, texts.map(text => h("li", {}, text)))] : null;
}

/** An open question: its choices, or a field where there are none. answer(parameter, value). */
function questionOf({parameter, choices, ambiguous, is_blocking: isBlocking}, answer) {
  const buttons = parameter === "labels" ? [] : choices.map(choice => button(`${choice} [${parameter}=${choice}]`, () => answer(parameter, choice), {kind: "small"}));
  return h("div", {class: `card question ${isBlocking ? "open" : ""}`, role: "group", "aria-label": `Question: ${parameter}`},
    h("p", {}, badge(isBlocking ? "question" : "may be answered", isBlocking ? "warn" : ""), ` ${ambiguous}`),
    buttons.length ? h("div", {class: "actions"}, buttons) : valueForm(parameter, answer, choices));
}

function valueForm(parameter, answer, choices = []) {
  const input = h("input", {spellcheck: "false", placeholder: parameter === "labels" ? "person;car;dog" : "", "aria-label": parameter});
  const give = () => input.value.trim() && answer(parameter, input.value.trim());
  input.addEventListener("keydown", event => event.key === "Enter" && give());
  return h("div", {class: "actions"}, h("span", {}, `${wordsOf(parameter)}${choices.length ? ` (${choices.join(", ")})` : ""}:`), input, button("Answer", give));
}

/** A field for any fact. */
function factForm(answer) {
  const what = h("select", {"aria-label": "What"}, Object.keys(FACTS).map(fact => h("option", {value: fact}, wordsOf(fact))));
  const value = h("input", {spellcheck: "false", "aria-label": "Value", placeholder: "labels: person;car;dog"});
  const give = () => value.value.trim() && answer(what.value, value.value.trim());
  return h("div", {class: "actions"}, what, value, button("Apply", give));
}

function factsOf(found) {
  const size = found.width && found.height ? `${found.width} × ${found.height}` : "that of the picture";
  const some = found.labels.slice(0, SHOWN_LABELS).join(", ");
  const tensor = one => `${one.name} ${one.datatype ?? "unknown type"} [${one.shape.map(side => (side < 0 ? "any" : side)).join(", ")}]`;
  const opset = found.opset ? `, opset ${found.opset}` : "";
  const rows = [
    ["Layout", found.layout || "not recognised"], ["Size", size], ["Colors", COLORS[Number(found.card["model-color-format"])]],
    ["Labels", found.label_count ? `${found.label_count}: ${some}${found.label_count > SHOWN_LABELS ? ", …" : ""}` : "none"],
    ["Threshold", found.card["pre-cluster-threshold"]], ["NMS IoU", found.card["nms-iou-threshold"]],
    ["Inputs", found.inputs.map(tensor).join("; ")], ["Outputs", found.outputs.map(tensor).join("; ")],
    ["File", `${bytes(found.size_bytes)}, ${found.producer || "unknown producer"}${opset}, ${shown(found.node_count)} operators${found.is_quantised ? ", quantised" : ""}`],
    ["SHA-256", `${found.sha256.slice(0, 16)}…`],
  ];
  return h("dl", {class: "facts"}, rows.filter(([, value]) => value).map(([term, value]) => [h("dt", {}, term), h("dd", {}, value)]));
}
