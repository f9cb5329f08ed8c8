// Listens to the daemon and has every part of the page drawn. What may live here: the connection, pausing, whose details
// are shown. What may not: how anything looks.

import { byId, say } from "./dom.js";
import * as format from "./format.js";
import { drawMap, standing } from "./cluster.js";
import { drawFaults } from "./faults.js";
import { choose, drawJobs } from "./jobs.js";
import { drawLayers, listen } from "./layers.js";
import { drawLinks } from "./links.js";
import { drawPlan } from "./plan.js";
import { drawSteps, remember } from "./step.js";

/** Milliseconds after which no news is worth saying, and after which a refused stream is asked for again. */
const QUIET = 8000;
const AGAIN = 5000;
const details = new Map();
/** What the daemon could not look at, and why. */
const troubles = new Map();
let overview = null;
let heard = 0;
let paused = false;

function live(state, text) {
  byId("live").dataset.state = state;
  say(byId("live"), text);
}

const going = () => live(paused ? "warn" : "good", paused ? "paused" : "live");

function draw() {
  if (paused || overview === null) return;
  const { node } = overview;
  document.title = `${node.name} – gradcomm`;
  say(byId("node"), `${node.name}, ${node.state}${node.reason ? `: ${node.reason}` : ""}`);
  byId("node").dataset.state = standing(node.state);
  const lanes = node.lanes.map((l) => `lane ${l.index} ${l.state}${l.restarts ? `, ${l.restarts} restarts` : ""}`).join("; ");
  say(byId("facts"), `up ${format.seconds(node.uptime)}; ${lanes}; ${format.size(node.arena_bytes)} of gradients; version ${node.version}`);
  drawMap(byId("map"), overview);
  drawLinks(overview);
  drawJobs(overview);
  drawFaults(overview);
  drawDetails();
}

function drawDetails() {
  const chosen = details.get(choose(overview)) ?? null;
  drawSteps(chosen);
  drawLayers(chosen);
  drawPlan(chosen);
}

function drawTroubles() {
  byId("trouble").hidden = !troubles.size;
  say(byId("trouble"), [...troubles].map(([what, text]) => `The daemon could not look at its ${what}: ${text}`).join(". "));
}

function connect() {
  const source = new EventSource("/dashboard/events");
  source.addEventListener("open", () => {
    going();
    // Perhaps it is another life of the daemon; what still is in the way is said again.
    troubles.clear();
    drawTroubles();
  });
  source.addEventListener("error", () => {
    const gone = source.readyState === EventSource.CLOSED;
    live("bad", gone ? "refused: too many pages are open, or no certificate" : "connection lost, trying again");
    if (gone) setTimeout(connect, AGAIN);
  });
  source.addEventListener("overview", (event) => {
    overview = JSON.parse(event.data);
    heard = Date.now();
    for (const id of [...details.keys()]) if (!overview.jobs.some((j) => j.id === id)) details.delete(id);
    remember(overview);
    going();
    draw();
  });
  source.addEventListener("details", (event) => {
    const one = JSON.parse(event.data);
    details.set(one.id, one);
    if (!paused && overview !== null) drawDetails();
  });
  source.addEventListener("trouble", (event) => {
    const { what, text } = JSON.parse(event.data);
    if (text) troubles.set(what, text);
    else troubles.delete(what);
    drawTroubles();
  });
}

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  going();
  draw();
});
byId("job").addEventListener("change", drawDetails);
setInterval(() => {
  if (!paused && heard && Date.now() - heard > QUIET) live("warn", `no news for ${format.seconds(Math.round((Date.now() - heard) / 1000))}`);
}, 1000);
addEventListener("resize", draw);
listen();
connect();
