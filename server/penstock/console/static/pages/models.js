/** Models: what is served, and in which state. */

import {h} from "/dom.js";
import {gateway} from "/api.js";
import {badge, emptyState, faultLine, pageHead, poll, table} from "/widgets.js";

const KINDS = {READY: "good", LOADING: "warn", UNAVAILABLE: "bad"};

export const page = {
  title: "Models",
  path: "/models",
  render(root) {
    const fault = faultLine();
    const list = table({
      caption: "Models",
      key: row => `${row.name}/${row.version}`,
      columns: [
        {title: "Model", cell: row => row.name},
        {title: "Version", cell: row => row.version ?? ""},
        {title: "State", cell: row => badge(row.state || "not loaded", KINDS[row.state] ?? "")},
        {title: "Reason", cell: row => row.reason ?? ""},
      ],
      empty: () => emptyState("No model yet", "Add one with `penstock models add best.onnx`."),
    });
    root.append(pageHead("Models"), fault.element, list.element);
    return poll(async signal => {
      list.update(await gateway.post("/v2/repository/index", {signal}));
      fault.show(null);
    }, 2000, fault.show);
  },
};
