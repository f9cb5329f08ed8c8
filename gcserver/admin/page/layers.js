// What each layer sends, and what is held back of it. Sorted and filtered here; the daemon sends the largest.

import { byId, rows, say } from "./dom.js";
import * as format from "./format.js";

let by = "";
let down = true;
let newest = null;

export function drawLayers(details) {
  newest = details;
  const all = details ? details.layers.shown : [];
  const wanted = byId("filter").value.toLowerCase();
  const shown = all.filter((t) => t.name.toLowerCase().includes(wanted));
  if (by) shown.sort((a, b) => (down ? -1 : 1) * compare(a[by], b[by]));
  rows(byId("layers-t"), shown.map((t) => [
    t.name,
    t.domain,
    t.codec,
    { text: format.size(t.raw), n: true },
    { text: t.wire ? format.size(t.wire) : "–", n: true },
    { text: format.times(t.ratio), n: true },
    { text: format.times(t.error), n: true },
  ]));
  say(byId("layers-sum"), details ? summary(details.layers, shown.length) : "No job has been looked at yet.");
}

function summary(layers, shown) {
  const ratio = layers.ratio === null ? "" : `, compressed ${format.times(layers.ratio)}`;
  return `${layers.tensors} tensors, ${format.size(layers.raw)}${ratio}. ${shown} are shown${layers.tensors > layers.shown.length ? ", of the largest" : ""}.`;
}

function compare(a, b) {
  if (a === null || b === null) return (a === null ? -1 : 1) - (b === null ? -1 : 1);
  return typeof a === "string" ? a.localeCompare(b) : a - b;
}

/** Buttons in the head sort; the same one again turns the order around. */
export function listen() {
  for (const button of byId("layers-t").querySelectorAll("[data-sort]")) {
    button.addEventListener("click", () => {
      down = by === button.dataset.sort ? !down : button.dataset.sort !== "name";
      by = button.dataset.sort;
      for (const th of byId("layers-t").tHead.rows[0].cells) th.removeAttribute("aria-sort");
      button.parentElement.setAttribute("aria-sort", down ? "descending" : "ascending");
      drawLayers(newest);
    });
  }
  byId("filter").addEventListener("input", () => drawLayers(newest));
}
