/** Clients of the REST APIs of the gateway (port 8000) and the video program (port 8010). The console forwards the calls. */

import {visible} from "/dom.js";

/** An error response. message: the server's error message. status: HTTP status; 0 without a response. */
export class ApiError extends Error {
  constructor(status, message, retryAfterS = null) {
    super(visible(message));
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

const TIMEOUT_MS = 30_000;

function client(prefix) {
  async function call(method, path, {json, body, type, headers = {}, timeoutMs = TIMEOUT_MS, signal} = {}) {
    const options = {method, headers: {...headers}, signal: limited(timeoutMs, signal), credentials: "same-origin"};
    if (json !== undefined) {
      options.body = JSON.stringify(json);
      options.headers["content-type"] = "application/json";
    } else if (body !== undefined) {
      options.body = body;
      options.headers["content-type"] = type ?? "application/octet-stream";
    }
    let response;
    try {
      response = await fetch(prefix + path, options);
    } catch (error) {
      if (error.name === "TimeoutError") throw new ApiError(0, `no response within ${timeoutMs / 1000} s; try again`);
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "no response from the console; check with `penstock status` that it is running");
    }
    if (!response.ok) throw await errorOf(response);
    return response;
  }
  return {
    call,
    /** The URL of a resource, for images and links. */
    url: path => prefix + path,
    get: async (path, options) => (await call("GET", path, options)).json(),
    post: async (path, options) => parsed(await call("POST", path, options)),
    put: async (path, options) => parsed(await call("PUT", path, options)),
    /** POSTs a file. progress(share): how much of it was sent, 0 to 1. */
    upload: (path, file, options) => upload(prefix + path, file, options),
    delete: async (path, options) => parsed(await call("DELETE", path, options)),
  };
}

/** By XMLHttpRequest, as fetch does not say how much it has sent. */
function upload(url, file, {progress, signal}) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    const fail = error => () => reject(error);
    request.open("POST", url);
    request.setRequestHeader("content-type", "application/octet-stream");
    request.upload.addEventListener("progress", event => progress(event.total ? event.loaded / event.total : 1));
    request.addEventListener("load", async () => {
      const response = new Response(request.responseText, {status: request.status, statusText: request.statusText});
      try {
        resolve(response.ok ? await parsed(response) : reject(await errorOf(response)));
      } catch (error) {
        reject(error);
      }
    });
    request.addEventListener("error", fail(new ApiError(0, "the connection was closed before the whole file was sent; is the stack still running?")));
    request.addEventListener("abort", fail(new DOMException("stopped", "AbortError")));
    signal.addEventListener("abort", () => request.abort());
    request.send(file);
  });
}

function limited(timeoutMs, signal) {
  const timeout = AbortSignal.timeout(timeoutMs);
  return signal ? AbortSignal.any([timeout, signal]) : timeout;
}

/** The JSON of a response; null if it has no body. */
async function parsed(response) {
  const text = await response.text();
  return text ? JSON.parse(text) : null;
}

const HEADER_ADVICE = /; send `Authorization: .*$/; // for programs: here a person enters the key

async function errorOf(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error ?? message;
  } catch {
    // not JSON: report the HTTP status only
  }
  if (response.status === 401) message = message.replace(HEADER_ADVICE, "");
  if (response.status === 401) document.dispatchEvent(new CustomEvent("needs-key", {detail: message}));
  return new ApiError(response.status, message, Number(response.headers.get("retry-after")) || null);
}

export const gateway = client("/gateway");
export const video = client("/video");

/** Starts a session with an API key. The console's process stores the key, not the browser. */
export async function login(apiKey) {
  const response = await fetch("/session", {
    method: "POST",
    headers: {"content-type": "application/json"},
    body: JSON.stringify({api_key: apiKey}),
  });
  if (!response.ok) throw await errorOf(response);
}

export async function logout() {
  await fetch("/session", {method: "DELETE"});
}

/** {gateway, program}: the gateway's URL, and how a shell on the console's host calls penstock. */
export const addresses = async signal => (await fetch("/addresses", {signal})).json();

/** {client, roles} of the session. */
export const identity = () => gateway.get("/v1/identity");

/** A path with a query string. Parameters that are null, undefined or "" are omitted. */
export function withQuery(path, parameters) {
  const given = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return query ? `${path}?${query}` : path;
}
