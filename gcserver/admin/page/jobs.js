// Jobs, who waits for whom, and which one is looked at closer.

import { byId, el, rows } from "./dom.js";
import * as format from "./format.js";
import { standing } from "./cluster.js";

export function drawJobs(overview) {
  const { jobs } = overview;
  rows(byId("jobs-t"), jobs.map((j) => [
    j.label,
    { text: j.reason ? `${j.state}: ${j.reason}` : j.state, state: standing(j.state) },
    format.digits(j.step),
    format.digits(j.steps_rate),
    j.plan ? String(j.plan) : "defaults",
    j.members.map((m) => `${m.node} (${m.ranks})`).join(", "),
    { text: j.waits.map(waiting).join("; ") || "nobody", state: j.waits.length ? "wait" : "" },
  ]));
  byId("jobs-none").hidden = jobs.length > 0;
}

function waiting(w) {
  const where = [w.domain, w.step ? `step ${w.step}` : ""].filter(Boolean).join(", ");
  return `${w.wanted} of ${w.for} for ${format.seconds(w.seconds)}${where ? ` (${where})` : ""}`;
}

/** Offers the jobs that run; what was chosen stays chosen. Returns the id of the one that is. */
export function choose(overview) {
  const select = byId("job");
  const wanted = overview.jobs.filter((j) => j.id);
  const same = wanted.length === select.options.length && wanted.every((j, i) => select.options[i].value === j.id);
  if (!same) {
    const chosen = select.value;
    select.replaceChildren(...wanted.map((j) => el("option", { value: j.id, selected: j.id === chosen }, j.label)));
  }
  select.disabled = !wanted.length;
  return select.value;
}
