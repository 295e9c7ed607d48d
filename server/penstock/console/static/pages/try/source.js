/** Where a picture comes from: a file that is chosen, dropped or pasted, or the webcam. */

import {h, replace} from "/dom.js";
import {button, toast} from "/widgets.js";

const WEBCAM = {video: {width: {ideal: 1280}, height: {ideal: 720}}, audio: false};
const REFUSALS = {
  NotAllowedError: "the browser does not allow this page to use the webcam; allow it in the address bar",
  NotFoundError: "there is no webcam",
  NotReadableError: "another program uses the webcam",
};
const DRAGS = ["dragover", "dragleave", "drop"];
const JPEG_QUALITY = 0.92;

/**
 * Buttons; files that are dropped on the page, during which `root` has the class "dropping"; and pasted ones.
 * taken(picture) is called with {blob, name, isFile, isLive}. Its promise ends with the answer, and with false if live
 * pictures should end. isFile: it is a file of this machine. stop() ends all of it.
 */
export function pictureSource(root, taken) {
  const chooser = h("input", {type: "file", accept: "image/*", hidden: true, "aria-label": "Picture file", onchange: () => {
    take(chooser.files, true);
    chooser.value = "";
  }});
  const webcam = newWebcam(taken);
  function take(files, isFile) {
    if (!files?.length) return toast("That is not a file; drop or paste a picture.", "bad");
    if (files.length > 1) toast(`${files.length} files: only the first is used.`);
    webcam.endLive();
    return taken({blob: files[0], name: files[0].name || "picture", isFile, isLive: false});
  }
  function paste(event) {
    if (event.clipboardData?.files.length) take(event.clipboardData.files, false);
  }
  function drag(event) {
    event.preventDefault();
    root.classList.toggle("dropping", event.type === "dragover");
    if (event.type === "drop") take(event.dataTransfer?.files, true);
  }
  document.addEventListener("paste", paste);
  for (const type of DRAGS) document.addEventListener(type, drag);
  return {
    element: h("div", {class: "picture-source"}, h("div", {class: "actions"}, button("Choose a picture", () => chooser.click()), webcam.opener, chooser), webcam.element),
    stop() {
      document.removeEventListener("paste", paste);
      for (const type of DRAGS) document.removeEventListener(type, drag);
      webcam.close();
    },
  };
}

function newWebcam(taken) {
  const video = h("video", {muted: true, playsinline: true, autoplay: true, "aria-label": "Webcam"});
  const live = button("Live", () => (isLive ? endLive() : runLive()), {"aria-pressed": "false"});
  const takeOne = button("Take picture", async () => taken({...(await grab()), isLive: false}), {kind: "primary"});
  const element = h("div", {class: "webcam", hidden: true}, video, h("div", {class: "actions"}, takeOne, live, button("Turn webcam off", close)));
  const opener = button("Use the webcam", open);
  let stream = null;
  let isLive = false;
  let isClosed = false;

  async function open() {
    if (!navigator.mediaDevices) return toast("Browsers give a page the webcam only over https:// or on localhost.", "bad");
    opener.disabled = true;
    try {
      const opened = await navigator.mediaDevices.getUserMedia(WEBCAM);
      if (isClosed) return opened.getTracks().forEach(track => track.stop());
      stream = opened;
      stream.getVideoTracks()[0].addEventListener("ended", close);
      video.srcObject = stream;
      await video.play();
      [element.hidden, opener.hidden] = [false, true];
      takeOne.focus();
    } catch (error) {
      toast(`Webcam: ${REFUSALS[error.name] ?? error.message}`, "bad");
    } finally {
      opener.disabled = false;
    }
  }
  /** The current frame as a JPEG. */
  async function grab() {
    const frame = new OffscreenCanvas(video.videoWidth, video.videoHeight);
    frame.getContext("2d").drawImage(video, 0, 0);
    return {blob: await frame.convertToBlob({type: "image/jpeg", quality: JPEG_QUALITY}), name: "webcam.jpg", isFile: false};
  }
  /** The next picture is sent when the last one was answered; none while the page is hidden. */
  async function runLive() {
    isLive = true;
    live.setAttribute("aria-pressed", "true");
    while (isLive && stream) {
      await new Promise(requestAnimationFrame);
      if (isLive && stream && (await taken({...(await grab()), isLive: true})) === false) endLive();
    }
  }
  function endLive() {
    isLive = false;
    live.setAttribute("aria-pressed", "false");
  }
  function close() {
    endLive();
    stream?.getTracks().forEach(track => track.stop());
    stream = null;
    video.srcObject = null;
    [element.hidden, opener.hidden] = [true, false];
  }
  return {
    opener, element, endLive,
    close() {
      isClosed = true;
      close();
    },
  };
}
