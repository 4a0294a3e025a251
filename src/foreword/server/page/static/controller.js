// The controller's present choice for all requests, and its gain.

import { get } from "./events.js";

const MOST = 3; // pairs of drafter and cohort

const at = (id) => document.getElementById(id);
const ratio = (bounds) => (bounds ? `${bounds.mean.toFixed(2)}×` : "–");

function line(pair) {
  const row = document.createElement("div");
  const name = document.createElement("dt");
  const told = document.createElement("dd");
  const choice = pair.in_use ? `on, depth ${pair.kept || pair.depth}` : pair.state === "on" ? "not now" : pair.state;
  name.textContent = `${pair.drafter}, ${pair.cohort}`;
  told.textContent = `${choice}; ${ratio(pair.measured ?? pair.predicted)} ${pair.measured ? "measured" : "expected"}`;
  told.title = pair.reason;
  row.append(name, told);
  return row;
}

export async function showController() {
  const report = await get("speculation").catch(() => null); // a figure less is no fault of the run
  const pairs = report?.pairs.slice(0, MOST) ?? [];
  at("controller").hidden = !pairs.length;
  at("controller-pairs").replaceChildren(...pairs.map(line));
}
