// A step of each model: how long what took, as predicted and as measured, and how long steps have been of late.

import { byId, el, svg } from "./dom.js";
import * as format from "./format.js";

const KINDS = ["compute", "encode", "exchange", "add", "finalise", "decode"];
const ROW = 34;
const MOST_ROWS = 30;
/** So many lengths of steps are remembered. */
const KEPT = 150;
const paces = new Map();

const kind = (what) => { const first = what.split(" ")[0]; return KINDS.includes(first) ? first : "other"; };

/** How long steps of each job take now, for the line over time. */
export function remember(overview) {
  for (const id of [...paces.keys()]) if (!overview.jobs.some((j) => j.id === id)) paces.delete(id);
  for (const j of overview.jobs.filter((x) => x.id && x.steps_rate)) {
    const past = paces.get(j.id) ?? [];
    past.push(1 / j.steps_rate);
    if (past.length > KEPT) past.shift();
    paces.set(j.id, past);
  }
}

export function drawSteps(details) {
  const models = details ? details.steps.filter((s) => s.measured.bars.length || s.predicted.bars.length || s.expected !== null) : [];
  byId("step-none").hidden = models.length > 0;
  byId("step-models").replaceChildren(...models.map((s) => model(s, paces.get(details.id) ?? [])));
}

function model(s, past) {
  const end = Math.max(s.predicted.end ?? 0, s.measured.end ?? 0) || 1;
  const parts = [el("h3", {}, s.domain), pace(past, s.expected)];
  if (s.parts.length) {
    const whole = s.seconds || 1;
    parts.push(el("p", { class: "muted" }, `One measured step took ${format.seconds(s.seconds)}. For how long of it each kind of work was under way on this node (kinds overlap):`));
    parts.push(...s.parts.map((p) => part(p, whole)));
  }
  for (const [name, side] of [["Predicted", s.predicted], ["Measured", s.measured]]) {
    if (side.bars.length) parts.push(el("h3", {}, `${name}: ${format.seconds(side.end)}`), timeline(name, side, end));
    if (side.left_out) parts.push(el("p", { class: "muted" }, `${side.left_out} shorter jobs are left out.`));
  }
  return el("div", {}, ...parts);
}

function part(p, whole) {
  const bar = el("div", { class: `bar k-${kind(p.what)}` });
  bar.style.width = `${Math.min(100, (100 * p.seconds) / whole)}%`;
  return el("div", { class: "part" }, el("span", {}, p.what), bar, el("span", { class: "n" }, format.seconds(p.seconds)));
}

/** Lengths of steps over the last minutes, beside the length that the plan expects. */
function pace(past, expected) {
  if (!past.length) return null;
  const width = Math.max(byId("step-models").clientWidth, 240);
  const top = Math.max(...past, expected ?? 0) * 1.1;
  const y = (s) => 75 - (70 * s) / top;
  const d = past.map((s, i) => `${i ? "L" : "M"}${((i * width) / (KEPT - 1)).toFixed(1)} ${y(s).toFixed(1)}`).join("");
  const now = past[past.length - 1];
  const said = `Steps take ${format.seconds(now)}${expected ? `, the plan expects ${format.seconds(expected)}` : ""}`;
  return el("div", {}, el("p", {}, said),
    svg("svg", { class: "pace", viewBox: `0 0 ${width} 80`, role: "img", "aria-label": said },
      svg("line", { class: "tick", x1: 0, y1: 75, x2: width, y2: 75 }),
      expected ? svg("line", { class: "expected", x1: 0, x2: width, y1: y(expected), y2: y(expected) }) : null,
      svg("path", { class: "measured", d })));
}

function timeline(name, side, end) {
  const width = Math.max(byId("step-models").clientWidth, 240);
  const lines = new Map();
  for (const bar of side.bars) {
    if (!lines.has(bar[0]) && lines.size >= MOST_ROWS) continue;
    lines.set(bar[0], [...(lines.get(bar[0]) ?? []), bar]);
  }
  const height = lines.size * ROW + 18;
  const scale = (width - 2) / end;
  const said = `${name} step, ${format.seconds(side.end)}, ${side.bars.length} jobs on ${lines.size} lines`;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": said });
  [...lines].forEach(([label, bars], i) => {
    picture.append(svg("text", { x: 0, y: i * ROW + 12 }, label));
    for (const [, what, from, to] of bars) {
      picture.append(svg("rect", { class: `k-${kind(what)}`, x: from * scale, y: i * ROW + 17, height: 14, width: Math.max((to - from) * scale, 1) },
        svg("title", {}, `${what}: ${format.seconds(from)} to ${format.seconds(to)}`)));
    }
  });
  for (let i = 0; i <= 4; i += 1) {
    const x = (i * (width - 2)) / 4;
    picture.append(svg("line", { class: "tick", x1: x, x2: x, y1: 0, y2: height - 14 }),
      svg("text", { class: "faint", x, y: height - 2, "text-anchor": i === 0 ? "start" : i === 4 ? "end" : "middle" }, format.seconds((i * end) / 4)));
  }
  return el("div", {}, picture);
}
