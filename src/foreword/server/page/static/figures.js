// The figures beside the answer.

const at = (id) => document.getElementById(id);
const percent = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–");
const MOST_LABELS = 10;

export function showRun(run) {
  at("rate").textContent = run.rate ? run.rate.toFixed(1) : "–";
  at("count").textContent = String(run.tokens);
  const { progress } = run;
  if (!progress) return;
  at("tau").textContent = progress.passes ? (progress.output_tokens / progress.passes).toFixed(2) : "–";
  at("acceptance").textContent = percent(progress.accepted, progress.drafted);
  showPositions(progress);
  showSplit(progress);
}

export function clearFigures() {
  for (const id of ["rate", "tau", "acceptance", "count", "draft-time", "verify-time", "accept-time"]) {
    at(id).textContent = "–";
  }
  at("positions").replaceChildren();
  for (const part of at("split").children) part.style.width = "0";
}

function showPositions({ drafted_per_position: drafted, accepted_per_position: accepted }) {
  const columns = at("positions");
  while (columns.children.length < drafted.length) columns.append(column(columns.children.length + 1));
  columns.classList.toggle("many", drafted.length > MOST_LABELS);
  drafted.forEach((count, index) => {
    const item = columns.children[index];
    const part = count ? (accepted[index] ?? 0) / count : 0;
    item.querySelector(".value").textContent = count ? `${Math.round(100 * part)}%` : "–";
    item.querySelector(".fill").style.height = `${100 * part}%`;
    item.title = `${accepted[index] ?? 0} of ${count} draft tokens at position ${index + 1}`;
  });
}

function column(position) {
  const item = document.createElement("li");
  for (const name of ["value", "track", "place"]) {
    const part = document.createElement("span");
    part.className = name;
    item.append(part);
  }
  const fill = document.createElement("span");
  fill.className = "fill";
  item.querySelector(".track").append(fill);
  item.querySelector(".place").textContent = String(position);
  return item;
}

function showSplit(progress) {
  const total = progress.draft_ms + progress.verify_ms + progress.accept_ms;
  for (const stage of ["draft", "verify", "accept"]) {
    const ms = progress[`${stage}_ms`];
    at("split").querySelector(`.${stage}`).style.width = total ? `${(100 * ms) / total}%` : "0";
    at(`${stage}-time`).textContent = `${ms.toFixed(1)} ms · ${percent(ms, total)}`;
  }
}
