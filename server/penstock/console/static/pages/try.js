/** Try: a picture, a model, and what the model finds in it. */

import {h, replace} from "/dom.js";
import {addresses, gateway, identity} from "/api.js";
import {button, command, emptyState, faultLine, field, pageHead, poll} from "/widgets.js";
import {pathOf} from "/pages/models/model.js";
import {imagePath, reachable, requestTabs} from "/pages/try/request.js";
import {pictureSource} from "/pages/try/source.js";
import {MAX_SIDE, depthImage, drawingOn} from "/pages/try/drawing.js";
import {kindOf, reportOf, resultList} from "/pages/try/list.js";

const MODELS_MS = 10_000;
const MAX_NAME = 200;
const MAX_LABELS = 3;
const LABELS_MS = 2000;
const DEBOUNCE_MS = 120;
const WAITING_MS = 400; // an answer that takes longer is announced
const TIMEOUT_MS = 60_000;
const LAST_MODEL = "try-model"; // in localStorage
/** A model by its name only, as a key without the role read sees it: its options may be tried. */
const unknown = name => ({name, state: "ready", inputs: [], card: {network_type: "other", options: ["conf", "iou"], conf: null, iou: null, skeleton: []}});
const KIND_OF_TYPE = {classifier: "classes", segmentation: "segmentation", other: ""};

export const page = {
  title: "Try",
  path: "/try",
  render(root, {query}) {
    root.append(pageHead("Try a model"));
    const lost = faultLine(); // of polling
    const fault = faultLine(); // of the request
    const body = h("div", {});
    root.append(lost.element, fault.element, body);
    let bench = null;
    const stop = poll(async signal => {
      const models = await listed(signal);
      const usable = models?.filter(model => model.card) ?? null;
      lost.show(null);
      if (!bench && usable?.length === 0) return replace(body, noModel());
      if (!bench) {
        const [who, known] = await Promise.all([identity(), addresses(signal)]);
        const gatewayUrl = reachable(known.gateway, location.hostname);
        bench = newBench({fault, gatewayUrl, needsKey: Boolean(who.client), wanted: query.get("model"), models});
        replace(body, bench.element);
      }
      if (usable === null) return stop(); // there is no list to follow
      return bench.update(usable);
    }, MODELS_MS, lost.show);
    return () => {
      stop();
      bench?.stop();
    };
  },
};

/** The models; null if the key may use models, but not list them. */
async function listed(signal) {
  try {
    return (await gateway.get("/v1/models", {signal})).models;
  } catch (error) {
    if (error.status === 403 && (await identity()).roles.includes("infer")) return null;
    throw error;
  }
}

/** The labels of a model that has at most MAX_LABELS. */
async function fewLabels({name, card}) {
  if (!(card.label_count <= MAX_LABELS)) return [];
  return gateway.get(pathOf(name), {timeoutMs: LABELS_MS}).then(found => found.card.labels, () => []);
}

function noModel() {
  const example = h("div", {class: "empty-command"}, command("penstock models pull yolox-nano"));
  return emptyState("No model takes pictures yet", "Add one on the page Models, or pull one:", example);
}

/** Loads the picture for the canvas. null if the browser cannot show it. */
async function loaded(blob) {
  let image;
  try {
    image = await createImageBitmap(blob);
  } catch {
    return null;
  }
  const {width, height} = image;
  const share = Math.min(1, MAX_SIDE / Math.max(width, height));
  if (share === 1) return {image, width, height};
  const small = new OffscreenCanvas(Math.round(width * share), Math.round(height * share));
  small.getContext("2d").drawImage(image, 0, 0, small.width, small.height);
  image.close();
  return {image: small, width, height};
}

/** Saves a picture that is no file of this machine, so that the shown commands find it. */
function download({blob, name}) {
  const url = URL.createObjectURL(blob);
  h("a", {href: url, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** A slider from 0 to 1 that stands at the model's own value until it is moved. value: null until then. */
function slider(label, hint, changed) {
  const input = h("input", {type: "range", min: "0", max: "1", step: "0.01", oninput: () => set(Number(input.value))});
  const output = h("output", {class: "number", "aria-live": "off"});
  const element = field(label, input, hint);
  element.querySelector("label").after(output);
  element.classList.add("slider");
  const one = {element, value: null, reset};
  function set(value) {
    one.value = value;
    output.textContent = value.toFixed(2);
    changed();
  }
  /** own: the model's own value; null if it names none. */
  function reset(own) {
    one.value = null;
    input.value = String(own ?? 0);
    output.textContent = own === null ? "the model's own" : `${shownOwn(own)} (the model's own)`;
  }
  return one;
}

const shownOwn = own => (own < 0.01 && own > 0 ? String(Number(own.toPrecision(2))) : own.toFixed(2));

function newBench({fault, gatewayUrl, needsKey, wanted, models}) {
  let known = [];
  let picture = null; // {blob, name, isFile, isLive}
  let image = null; // of the picture, {image, width, height}
  let labels = []; // of the model, or their promise; none if they are many
  let drawn = null; // the image on the canvas
  let kind = "";
  let aborter = null;
  let timer = null;

  const isNamed = models === null; // by hand, as there is no list
  const choose = h(isNamed ? "input" : "select", {onchange: () => model() && chosen(true)});
  const conf = slider("Lowest score (conf)", "", later);
  const iou = slider("Most overlap (iou)", "", later);
  const reset = button("Reset", () => {
    resetSliders();
    run();
  }, {kind: "small"});
  const canvas = h("canvas", {role: "img", "aria-label": "No picture yet"});
  const empty = h("div", {class: "empty"}, h("p", {class: "empty-title"}, "Drop a picture here"), h("p", {}, "or paste one with Ctrl+V, choose a file, or use the webcam."));
  const frame = h("div", {class: "try-picture"}, empty);
  const save = button("", () => download(picture), {kind: "small", hidden: true});
  const drawing = drawingOn(canvas, frame);
  const list = resultList(index => {
    drawing.highlight(index);
  });
  const report = h("div", {class: "try-report"});
  const tabs = requestTabs();
  const element = h("div", {class: "try"});
  const source = pictureSource(element, take);
  canvas.addEventListener("mousemove", event => point(drawing.at(event)));
  canvas.addEventListener("mouseleave", () => point(null));
  element.append(
    h("div", {class: "try-controls"}, field("Model", choose, isNamed ? "Enter its name: this key cannot list the models, as it lacks the role read." : ""), conf.element, iou.element, reset),
    source.element,
    h("div", {class: "try-bench"}, h("div", {class: "try-stage"}, frame, save), list.element, report),
    h("h2", {}, "The same request"), tabs.element,
  );

  const typed = () => choose.value.trim().slice(0, MAX_NAME);
  const model = () => (isNamed ? typed() && unknown(typed()) : known.find(one => one.name === choose.value));
  const options = () => ({conf: conf.element.hidden ? null : conf.value, iou: iou.element.hidden ? null : iou.value});
  function point(index) {
    drawing.highlight(index);
    list.mark(index);
  }
  function resetSliders() {
    const {card} = model();
    for (const [one, name] of [[conf, "conf"], [iou, "iou"]]) {
      one.element.hidden = !card.options.includes(name);
      one.reset(card[name]);
    }
    reset.hidden = conf.element.hidden && iou.element.hidden;
    reset.disabled = true;
    showRequest();
  }
  function chosen(isByHand) {
    kind = KIND_OF_TYPE[model().card.network_type] ?? "detections";
    if (image) present(null);
    labels = fewLabels(model());
    resetSliders();
    if (isByHand) {
      history.replaceState(null, "", `/try?model=${encodeURIComponent(model().name)}`);
      remember();
    }
    return run();
  }
  function later() {
    reset.disabled = false;
    showRequest();
    clearTimeout(timer);
    timer = setTimeout(run, DEBOUNCE_MS);
  }
  async function take(next) {
    picture = next;
    image = null;
    save.hidden = next.isFile;
    save.textContent = `Save ${next.name}`;
    showRequest();
    return run();
  }
  /** Sends the picture. False if live pictures should end. */
  async function run() {
    clearTimeout(timer);
    if (!picture) return true;
    if (!model()) return failed(new Error("Enter the name of the model."));
    aborter?.abort();
    aborter = new AbortController();
    const {signal} = aborter;
    const sent = picture;
    const began = performance.now();
    const waiting = sent.isLive ? null : setTimeout(list.wait, WAITING_MS);
    const asked = gateway.post(imagePath(model().name, options()), {body: sent.blob, type: sent.blob.type || "application/octet-stream", headers: {"x-penstock-explain": "1"}, timeoutMs: TIMEOUT_MS, signal})
      .then(answer => ({answer, ms: performance.now() - began}), error => ({error}))
      .finally(() => clearTimeout(waiting));
    if (!image) {
      const showing = await loaded(sent.blob);
      if (sent !== picture) return true;
      image = showing;
      if (!sent.isLive) present(null);
    }
    const {answer, error, ms} = await asked;
    if (signal.aborted || sent !== picture) return true;
    if (error) return failed(error);
    await answered(answer, ms, sent);
    return true;
  }
  /** Shows the picture with a result; null for none yet. */
  function present(result, depth = null) {
    if (!image) return replace(frame, h("p", {class: "empty"}, "The browser cannot show this picture."));
    if (canvas.parentNode !== frame) replace(frame, canvas);
    canvas.setAttribute("aria-label", result ? `${picture.name} with its results; the table lists them` : picture.name);
    drawing.show(image, result, model()?.card.skeleton ?? [], depth);
    if (drawn !== image) drawn?.image.close?.();
    drawn = image;
  }
  const remember = () => localStorage.setItem(LAST_MODEL, model().name);
  async function answered(answer, ms, sent) {
    remember();
    const result = answer.results[0];
    kind = kindOf(result);
    present(result, result.depth ? await depthImage(result.depth) : null);
    list.show(answer, image, {isLive: sent.isLive, hasConf: !conf.element.hidden, labels: await labels});
    replace(report, reportOf(answer, ms));
    fault.show(null);
    showRequest();
  }
  function failed(error) {
    if (error.name === "AbortError") return true;
    fault.show(error);
    list.clear();
    replace(report);
    if (!picture.isLive) return true;
    return error.status >= 500 ? new Promise(resolve => setTimeout(resolve, 1000 * (error.retryAfterS ?? 1))) : false;
  }
  function showRequest() {
    if (!model()) return;
    const {name, inputs} = model();
    const inputName = (inputs.find(one => one.datatype === "BYTES" || one.shape.length === 3) ?? inputs[0])?.name ?? "";
    tabs.update({gateway: gatewayUrl, model: name, fileName: picture?.name ?? "photo.jpg", options: options(), kind, inputName, needsKey});
  }
  function update(next) {
    const before = JSON.stringify([choose.value, model()?.card]);
    const text = one => (one.state === "ready" ? one.name : `${one.name} (${one.state})`);
    const isSame = next.length === known.length && next.every((one, index) => text(one) === text(known[index]));
    const names = [choose.value, wanted, localStorage.getItem(LAST_MODEL), (next.find(one => one.state === "ready") ?? next[0])?.name];
    known = next;
    if (!isSame) {
      replace(choose, next.map(one => h("option", {value: one.name}, text(one))));
      choose.value = names.find(name => name && next.some(one => one.name === name)) ?? "";
    }
    if (model() && JSON.stringify([choose.value, model().card]) !== before) chosen(false);
  }
  if (isNamed) {
    choose.value = wanted ?? localStorage.getItem(LAST_MODEL) ?? "";
    if (model()) chosen(false);
  } else if (wanted && !models.some(one => one.name === wanted && one.card)) {
    const problem = models.find(one => one.name === wanted)?.card_problem;
    fault.show(new Error(problem || `The model ${wanted.slice(0, 100)} is not here, or takes no pictures.`));
  }
  return {
    element, update,
    stop() {
      clearTimeout(timer);
      aborter?.abort();
      source.stop();
    },
  };
}
