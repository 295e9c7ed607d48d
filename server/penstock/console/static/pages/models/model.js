/** What the list of models, a model's page and the form for a new one share. */

import {badge} from "/widgets.js";

const KINDS = {ready: "good", loading: "warn", unavailable: "bad"};

export const pathOf = name => `/v1/models/${encodeURIComponent(name)}`;
export const pageOf = name => `/models/${encodeURIComponent(name)}`;
export const tryPageOf = name => `/try?model=${encodeURIComponent(name)}`;
export const stateBadge = model => badge(model.state, KINDS[model.state] ?? "");
/** Why a model is not ready; "" if its state says as much. */
export const reasonOf = model => (model.state === "ready" || model.reason === model.state ? "" : model.reason || model.versions.find(version => version.reason)?.reason || "");
/** Requests that were refused or failed in the queue, whatever the reason. */
export const refusedOf = model => Object.values(model.traffic.refused).reduce((sum, count) => sum + count, 0);

/** `cpu in FP32`, or `cuda:0 in FP16, CUDA graphs for 1, 2, 4, 8`; null where the engine does not report it. */
export function runsOn(found) {
  if (!found) return null;
  const sizes = found.graph_batch_sizes;
  return `${found.device} in ${found.precision.toUpperCase()}${sizes.length ? `, CUDA graphs for ${sizes.join(", ")}` : ""}`;
}
