// The plan in force: who made it, its rules, what they make of the model, and what was expected of it.

import { byId, el, rows, say } from "./dom.js";
import * as format from "./format.js";

export function drawPlan(details) {
  const plan = details ? details.plan : null;
  say(byId("plan-says"), plan ? madeBy(plan) : "No job has been looked at yet.");
  byId("plan-domains").replaceChildren(...(plan ? plan.domains.map(domain) : []));
}

function madeBy(plan) {
  const who = plan.mode && plan.mode !== "static" ? `the planner (${plan.mode}, ${plan.quality})` : "operators";
  return `Made by ${who}${plan.says ? `: ${plan.says}` : ""}.`;
}

function domain(d) {
  const coming = d.coming.map((c) => `, plan ${c.version} from step ${c.step}`).join("");
  const force = d.version ? `plan ${d.version} since step ${d.since}` : "the defaults";
  const parts = [el("h3", {}, `${d.label}: ${force}${coming}`)];
  if (d.forecast) parts.push(forecast(d.forecast));
  for (const c of d.controllers) parts.push(el("p", {}, `${c.name} moves levels: ratio ${format.digits(c.ratio)} after ${c.steps} steps`));
  if (d.rules.length) parts.push(table("Rules", ["Pattern", "Codec", "Scheme", "From"], d.rules.map((r) => [r.pattern, r.codec, r.scheme, r.origin])));
  if (d.groups.length) {
    parts.push(table("What they make of the tensors", ["First", "Tensors", "Size", "Codec", "Scheme", "Why"],
      d.groups.map((g) => [g.first, String(g.tensors), format.size(g.bytes), g.codec, g.scheme, g.why])));
  }
  return el("div", {}, ...parts);
}

function forecast(f) {
  const made = f.version ? `plan ${f.version}` : "only proposed";
  return el("p", {}, `Step (${made}): expected ${format.seconds(f.expected)}, measured ${format.seconds(f.measured)}; ` +
    `without compression ${format.seconds(f.dense)}, without any exchange ${format.seconds(f.compute)}. ${f.reason}`);
}

function table(caption, head, lines) {
  const made = el("table", {}, el("caption", { class: "muted" }, caption),
    el("thead", {}, el("tr", {}, ...head.map((h) => el("th", { scope: "col" }, h)))), el("tbody"));
  rows(made, lines);
  return made;
}
