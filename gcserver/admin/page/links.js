// Links to peers with live rates, and how these were in the last minutes.

import { byId, rows, svg } from "./dom.js";
import * as format from "./format.js";
import { standing } from "./cluster.js";

/** So many rates of each link are remembered. */
const KEPT = 90;
const seen = new Map();

export function drawLinks(overview) {
  const { links } = overview;
  for (const peer of [...seen.keys()]) if (!links.some((l) => l.peer === peer)) seen.delete(peer);
  rows(byId("links-t"), links.map((l) => {
    const past = seen.get(l.peer) ?? [];
    if (l.rate_out !== null) past.push([l.rate_out, l.rate_in]);
    if (past.length > KEPT) past.shift();
    seen.set(l.peer, past);
    return [
      `${l.peer} (${l.address})`,
      { text: l.reason ? `${l.state} for ${format.seconds(l.since)}: ${l.reason}` : l.state, state: standing(l.state) },
      { text: format.rate(l.rate_out), n: true },
      { text: format.rate(l.rate_in), n: true },
      { node: spark(past) },
      { text: format.seconds(l.rtt), n: true },
      { text: format.digits(l.resent), n: true },
      { text: format.digits(l.corrupt), n: true, state: l.corrupt ? "bad" : "" },
      l.encrypted ? "yes" : "no",
    ];
  }));
  byId("links-none").hidden = links.length > 0;
}

function spark(past) {
  const top = Math.max(1, ...past.flat());
  const line = (i) => past.map((p, t) => `${t ? "L" : "M"}${((t * 100) / (KEPT - 1)).toFixed(1)} ${(19 - (18 * p[i]) / top).toFixed(1)}`).join("");
  return svg("svg", { class: "spark", viewBox: "0 0 100 20", preserveAspectRatio: "none", role: "img", "aria-label": `at most ${format.rate(top)}` },
    past.length ? svg("path", { class: "out", d: line(0) }) : null,
    past.length ? svg("path", { class: "in", d: line(1) }) : null);
}
