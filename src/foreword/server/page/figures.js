// The figures beside the answer.

const at = (id) => document.getElementById(id);
const percent = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–");

// A run as far as it has come: what the server told last, and the clock of this page until the engine's own arrives.
export class Run {
  constructor() {
    this.tokens = 0;
    this.first = 0; // tokens of the first delivery, which took no time of decoding
    this.began = null;
    this.now = null;
    this.progress = null;
    this.timings = null;
  }

  note(event) {
    this.now = performance.now();
    this.began ??= this.now;
    if (event.timings) this.timings = event.timings;
    const fresh = event.token_ids?.length ?? 0;
    if (!this.tokens) this.first = fresh;
    this.tokens += fresh;
    this.progress = event.origin?.progress ?? this.progress;
  }

  get seconds() {
    return this.timings ? this.timings.predicted_ms / 1e3 : (this.now - this.began) / 1e3;
  }

  get rate() {
    return this.tokens > this.first && this.seconds > 0 ? (this.tokens - this.first) / this.seconds : 0;
  }

  get line() {
    const passes = this.progress ? ` in ${this.progress.passes} passes` : "";
    return `${this.tokens} tokens${passes}, ${this.seconds.toFixed(2)} s, ${this.rate.toFixed(1)} per second`;
  }
}

export function showRun(run) {
  at("rate").textContent = run.rate ? run.rate.toFixed(1) : "–";
  at("count").textContent = String(run.tokens);
  const told = run.progress;
  if (!told) return;
  at("tau").textContent = told.passes ? (told.output_tokens / told.passes).toFixed(2) : "–";
  at("acceptance").textContent = percent(told.accepted, told.drafted);
  showPositions(told);
  showSplit(told);
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
  drafted.forEach((count, place) => {
    const item = columns.children[place];
    const part = count ? (accepted[place] ?? 0) / count : 0;
    item.querySelector(".value").textContent = count ? `${Math.round(100 * part)}%` : "–";
    item.querySelector(".fill").style.height = `${100 * part}%`;
    item.title = `${accepted[place] ?? 0} of ${count} guesses at position ${place + 1}`;
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

function showSplit(told) {
  const total = told.draft_ms + told.verify_ms + told.accept_ms;
  for (const stage of ["draft", "verify", "accept"]) {
    const ms = told[`${stage}_ms`];
    at("split").querySelector(`.${stage}`).style.width = total ? `${(100 * ms) / total}%` : "0";
    at(`${stage}-time`).textContent = `${ms.toFixed(1)} ms · ${percent(ms, total)}`;
  }
}
