// What should not happen: counted since the daemon started, and as it happens.

import { byId, el, rows } from "./dom.js";
import * as format from "./format.js";

let told = "";

export function drawFaults(overview) {
  const { counts, changes } = overview.faults;
  rows(byId("counts-t"), counts.map((c) => [c.kind, { text: format.digits(c.count), n: true }, c.about]));
  byId("counts-none").hidden = counts.length > 0;
  const look = JSON.stringify(changes);
  if (look === told) return;
  told = look;
  byId("changes").replaceChildren(...changes.toReversed().map(line));
  byId("changes-none").hidden = changes.length > 0;
}

function line(c) {
  const when = new Date(c.date * 1000);
  return el("li", { "data-state": c.bad ? "bad" : null },
    el("time", { datetime: when.toISOString() }, when.toLocaleTimeString()), `${c.bad ? "! " : ""}${c.text}`);
}
