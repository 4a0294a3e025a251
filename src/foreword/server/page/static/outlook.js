// Predicted and measured speed-up, and the predicted best depth.

import { shape } from "./svg.js";
import { outlook } from "./theory.js";

const at = (id) => document.getElementById(id);
const times = (value) => `${value.toFixed(2)}×`;
const CEILING = 1.1; // room above the curve, as a factor

export function clearOutlook() {
  for (const id of ["measured", "predicted", "best-depth", "alpha", "break-even"]) at(id).textContent = "–";
  at("outlook-chart").replaceChildren();
  at("outlook-note").hidden = false;
}

// `plain`: the run of the same answer without speculation, or null.
export function showOutlook(speculative, plain, depth) {
  const speedup = plain && speculative.seconds > 0 ? plain.seconds / speculative.seconds : null;
  if (speedup !== null) at("measured").textContent = times(speedup);
  const found = outlook(speculative.passes, plain?.passes ?? []);
  at("outlook-note").hidden = found !== null;
  if (!found) return;
  at("predicted").textContent = times(found.predicted);
  at("best-depth").textContent = `${found.best.depth}, ${times(found.best.speedup)}`;
  at("alpha").textContent = `${Math.round(100 * found.alpha)} %`;
  at("break-even").textContent = found.breakEven === null ? "never" : `${Math.round(100 * found.breakEven)} %`;
  draw(found, depth, speedup);
}

// Draw the chart; x is the depth, y the speed-up. The style sheet gives dots their size, so that they are not stretched.
function draw({ depths, best, predicted }, depth, measured) {
  const most = Math.min(Math.max(16, 2 * best.depth, 2 * depth), depths.length);
  const shown = depths.slice(0, most);
  const highest = CEILING * Math.max(1.2, best.speedup, predicted, measured ?? 0, ...shown.map((found) => found.speedup));
  const chart = at("outlook-chart");
  chart.setAttribute("viewBox", `0.5 ${-highest} ${most} ${highest}`);
  const dot = (found, kind) => shape("path", { class: `dot ${kind}`, d: `M${found.depth} ${-found.speedup}h0` });
  const marks = [
    shape("line", { class: "level", x1: 0.5, x2: most + 0.5, y1: -1, y2: -1 }),
    shape("polyline", { class: "curve", points: shown.map((found) => `${found.depth},${-found.speedup}`).join(" ") }),
    dot(best, "best"),
    dot({ depth, speedup: predicted }, "predicted"),
  ];
  if (measured !== null) marks.push(dot({ depth, speedup: measured }, "measured"));
  chart.replaceChildren(...marks);
  at("outlook-most").textContent = String(most);
}
