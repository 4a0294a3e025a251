// The policy's current choices for all requests, and their gains.

import { get } from "./events.js";

const MAX_PAIRS = 3; // maximum rows, each for a drafter and a cohort

const at = (id) => document.getElementById(id);
const ratio = (bounds) => (bounds ? `${bounds.mean.toFixed(2)}×` : "–");

function line(pair) {
  const row = document.createElement("div");
  const name = document.createElement("dt");
  const state = document.createElement("dd");
  const choice = pair.in_use ? `on, depth ${pair.kept || pair.depth}` : pair.state === "on" ? "not now" : pair.state;
  name.textContent = `${pair.drafter}, ${pair.cohort}`;
  state.textContent = `${choice}; ${ratio(pair.measured ?? pair.predicted)} ${pair.measured ? "measured" : "expected"}`;
  state.title = pair.reason;
  row.append(name, state);
  return row;
}

export async function showController() {
  const report = await get("speculation").catch(() => null); // without the report, the run itself is still complete
  const pairs = report?.pairs.slice(0, MAX_PAIRS) ?? [];
  at("controller").hidden = !pairs.length;
  at("controller-pairs").replaceChildren(...pairs.map(line));
}
