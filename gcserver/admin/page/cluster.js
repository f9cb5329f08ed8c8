// The map of the cluster: this node, its peers around it, and what each link carries.

import { el, svg } from "./dom.js";
import * as format from "./format.js";

/** How a state of a link or node is to be taken. */
export function standing(state) {
  if (["up", "serving", "ready", "running", "finished"].includes(state)) return "good";
  if (["dead", "refused", "failed", "degraded", "silent", "stopping", "stopped"].includes(state)) return "bad";
  return "wait";
}

/** More nodes than fit around one are in the table of links only. */
const MOST = 40;
let drawn = "";

export function drawMap(into, overview) {
  const { node, links } = overview;
  const width = Math.max(into.clientWidth, 280);
  const busiest = Math.max(1, ...links.map((l) => (l.rate_out ?? 0) + (l.rate_in ?? 0)));
  const weight = (l) => Math.round(1 + (6 * ((l.rate_out ?? 0) + (l.rate_in ?? 0))) / busiest);
  const shown = links.slice(0, MOST);
  // What would look the same is left alone: a link that somebody has reached by keyboard keeps the focus.
  const look = JSON.stringify([width, node.name, node.state, links.length, shown.map((l) => [l.peer, l.state, weight(l)])]);
  if (look === drawn) return;
  drawn = look;

  const height = shown.length > 8 ? 380 : shown.length > 2 ? 260 : 150;
  const alone = shown.length === 1;
  const [cx, cy, radius] = [alone ? 70 : width / 2, height / 2, height / 2 - 45];
  const wide = alone ? width - 140 : width / 2 - 60;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": `${node.name} and ${links.length} peers` });
  const nodes = shown.map((l, i) => {
    const angle = (2 * Math.PI * i) / shown.length - (shown.length === 2 ? 0 : Math.PI / 2);
    const straight = alone ? 0 : angle;
    const [x, y] = [cx + wide * Math.cos(straight), cy + radius * Math.sin(straight)];
    const said = `${l.peer}: ${l.state}, sends ${format.rate(l.rate_in)}, gets ${format.rate(l.rate_out)}`;
    return svg("a", { href: "#links", "aria-label": said, "data-state": standing(l.state) },
      svg("title", {}, said),
      svg("line", { x1: cx, y1: cy, x2: x, y2: y, "stroke-width": weight(l) }),
      svg("circle", { cx: x, cy: y, r: 12 }),
      svg("text", { x, y: y + 28, "text-anchor": "middle" }, short(l.peer)),
      svg("text", { x, y: y - 18, "text-anchor": "middle", class: "faint" }, l.state));
  });
  const own = svg("g", { "data-state": standing(node.state) },
    svg("rect", { x: cx - 16, y: cy - 16, width: 32, height: 32, rx: 6 }),
    svg("text", { x: cx, y: cy + 33, "text-anchor": "middle" }, short(node.name)),
    svg("text", { x: cx, y: cy - 22, "text-anchor": "middle", class: "faint" }, node.state));
  picture.append(...nodes, own);
  into.replaceChildren(picture);
  if (links.length > MOST) into.append(el("p", { class: "muted" }, `and ${links.length - MOST} more`));
}

const short = (name) => (name.length > 18 ? `${name.slice(0, 17)}…` : name);
