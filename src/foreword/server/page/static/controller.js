// The policy's current choices for all requests, their gains, and the head that the server trains.

import { get } from "./events.js";
import { element } from "./text.js";

const MAX_PAIRS = 3; // maximum rows, each for a drafter and a cohort

const at = (id) => document.getElementById(id);
const ratio = (bounds) => (bounds ? `${bounds.mean.toFixed(2)}×` : "–");

function row(name, value, title) {
  const line = document.createElement("div");
  const cell = element("dd", "", value);
  cell.title = title;
  line.append(element("dt", "", name), cell);
  return line;
}

function pairRow(pair) {
  const choice = pair.in_use ? `on, depth ${pair.kept || pair.depth}` : pair.state === "on" ? "not now" : pair.state;
  const gain = `${ratio(pair.measured ?? pair.predicted)} ${pair.measured ? "measured" : "expected"}`;
  return row(`${pair.drafter}, ${pair.cohort}`, `${choice}; ${gain}`, pair.reason);
}

// The head that the server trains on its traffic.
function learningRow(learning) {
  const version = learning.version === null ? "no version in use" : `version ${learning.version} in use`;
  return row("trained head", `${version}; ${learning.state}`, learning.reason);
}

export async function showController() {
  // Without the reports, the run itself is still complete.
  const [report, health] = await Promise.all(["speculation", "health"].map((path) => get(path).catch(() => null)));
  const rows = (report?.pairs.slice(0, MAX_PAIRS) ?? []).map(pairRow);
  if (health?.learning) rows.push(learningRow(health.learning));
  at("controller").hidden = !rows.length;
  at("controller-pairs").replaceChildren(...rows);
}
