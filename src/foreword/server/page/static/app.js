// The playground: runs the prompt, on request also without speculation, and shows the answers as a whole and pass by pass.

import { AnswerView, hideTip } from "./answer.js";
import { showController } from "./controller.js";
import { showDraft } from "./draft.js";
import { Refusal, get, stream, useKey } from "./events.js";
import { clearFigures, showRun } from "./figures.js";
import { clearOutlook, showOutlook } from "./outlook.js";
import { Overview } from "./overview.js";
import { Race } from "./race.js";
import { RecordedRace } from "./recorded.js";
import { Replay } from "./replay.js";
import { Run } from "./run.js";
import { applyPreset, methodName, offerMethods, requestBody, readAddress, writeAddress } from "./settings.js";
import { oncePerFrame } from "./svg.js";

const at = (id) => document.getElementById(id);
const speculative = new AnswerView(at("speculative"), (index) => select(index));
const plain = new AnswerView(at("plain"), (index) => plain.select(index));
const overview = new Overview(at("overview"), (index) => select(index));
const race = new Race(at("race"));
const recorded = new RecordedRace(at("recorded"));
const replay = new Replay(showTime);
let running = null; // the AbortController of the requests in flight
let runs = []; // the runs on the page: the first, then plain decoding if it is compared
let depth = 1; // draft depth that the first run requested
let showsSpeculation = true; // false: the server hides its speculation figures

async function start() {
  try {
    const settings = await get("page/settings");
    at("about").textContent = `${settings.model} · speculative decoding with identical output.`;
    offerMethods(settings);
    if (settings.max_model_len) at("max-tokens").max = settings.max_model_len;
    showsSpeculation = settings.shows_speculation;
    for (const part of document.querySelectorAll(".speculation, #legend")) part.hidden = !showsSpeculation;
    at("hidden-note").hidden = showsSpeculation;
    readAddress();
    applyDisplay();
    at("key-form").hidden = true;
    at("error").textContent = "";
  } catch (error) {
    report(error);
  }
}

function report(error) {
  if (error.name === "AbortError") {
    at("status").textContent = `Stopped. ${withSeed(runs.at(-1).line)}.`;
    return;
  }
  at("status").textContent = "";
  if (error instanceof Refusal && error.status === 401) {
    at("key-form").hidden = false;
    at("key").focus();
    at("error").textContent = at("key").value ? "The server does not know this key." : "";
    return;
  }
  at("error").textContent = error.message;
}

const drawRace = oncePerFrame(() => race.draw(runs));

// Send a request, show its answer in a view as it arrives, and return the run.
async function decode(view, body, name) {
  const run = new Run(name);
  const isFirst = runs.push(run) === 1;
  view.busy = true;
  try {
    for await (const event of stream("generate", body, running.signal)) {
      const shownPasses = run.passes.length;
      view.add(run.note(event));
      view.figures.textContent = run.line;
      if (isFirst) {
        showRun(run);
        run.passes.slice(shownPasses).forEach((pass) => overview.add(pass));
      }
      if (!at("race").hidden) drawRace();
    }
  } finally {
    view.busy = false;
  }
  if (isFirst && body.speculation) view.title.textContent = `Speculative: ${run.name}`;
  return run;
}

async function runPrompt() {
  const body = requestBody();
  const compares = at("compare").checked && body.speculation !== false;
  clear(body, compares);
  running = new AbortController();
  setBusy(true);
  try {
    at("status").textContent = `Answering with seed ${body.seed} …`;
    if (matchMedia("(max-width: 40rem)").matches) at("status").scrollIntoView(); // the form fills a small screen
    const first = await decode(speculative, body, body.speculation ? methodName() : "plain");
    at("status").textContent = `Finished. ${withSeed(first.line)}.`;
    if (compares) {
      // One run after the other, since two at once would slow each other down.
      at("status").textContent = `The same prompt and seed ${body.seed} without speculation …`;
      compareRuns(first, await decode(plain, { ...body, speculation: false }, "plain"));
    }
  } catch (error) {
    report(error);
  } finally {
    running = null;
    setBusy(false);
    if (runs[0].timed) analyzeRuns();
    if (showsSpeculation) showController();
  }
}

// Prepare the page for the runs of a request.
function clear(body, compares) {
  runs = [];
  recorded.end();
  depth = body.speculation ? body.speculation.num_speculative_tokens : 1;
  for (const part of [speculative, plain, overview, race, replay]) part.clear();
  showDraft(null);
  clearFigures();
  clearOutlook();
  at("error").textContent = at("verdict").textContent = "";
  at("verdict").className = "";
  at("results").hidden = false;
  plain.article.hidden = !compares;
  at("race").hidden = !compares || !showsSpeculation;
  speculative.title.textContent = body.speculation ? `Speculative: ${methodName()}` : "Plain decoding";
  at("keep-seed").hidden = at("seed").value !== "";
  at("keep-seed").dataset.seed = body.seed;
  writeAddress(body.seed);
}

function withSeed(line) {
  return `${line}, seed ${at("keep-seed").dataset.seed}`;
}

// Show what follows from the runs when they have ended or were stopped.
function analyzeRuns() {
  const same = runs.length > 1 && isSame(...runs);
  if (speculative.passes.some((pass) => pass.draftTokens.length)) showOutlook(runs[0], same ? runs[1] : null, depth);
  if (!at("race").hidden) race.draw(runs);
  replay.load(runs);
  const { passes } = runs[0];
  const instructive = passes.findIndex((pass) => pass.rejected && pass.accepted.length);
  select(instructive < 0 ? passes.findIndex((pass) => pass.draftTokens.length) : instructive);
}

function isSame(first, second) {
  return first.text === second.text && String(first.tokenIds) === String(second.tokenIds);
}

// Say whether the texts are equal, and how much time speculation saved.
function compareRuns(first, second) {
  at("status").textContent = `Both runs have finished, seed ${at("keep-seed").dataset.seed}.`;
  const same = isSame(first, second);
  at("verdict").classList.toggle("differs", !same);
  if (!same) {
    const index = second.tokenIds.findIndex((token, position) => token !== first.tokenIds[position]);
    at("verdict").textContent = `The texts differ, from token ${(index < 0 ? second.tokens : index) + 1} on.`;
    return;
  }
  const saved = second.seconds - first.seconds;
  const part = second.seconds > 0 ? Math.abs(Math.round((100 * saved) / second.seconds)) : 0;
  const outcome = saved >= 0 ? "Speculation saved" : "Speculation cost";
  at("verdict").textContent =
    `Identical, all ${second.tokens} tokens. ${outcome} ${Math.abs(saved).toFixed(2)} s of decoding (${part} %).`;
}

function select(index, pending = false) {
  const pass = runs[0]?.passes[index];
  speculative.select(index);
  overview.select(pass ? index : null);
  showDraft(pass, { pending });
}

function showTime(time) {
  speculative.showTime(time);
  plain.showTime(time);
  race.showTime(time);
  if (time === null) return;
  const { passes } = runs[0];
  const inFlight = passes.findIndex((pass) => pass.begin <= time && time < pass.end);
  select(inFlight < 0 ? passes.length - 1 : inFlight, inFlight >= 0);
}

function setBusy(on) {
  at("run").disabled = on;
  at("stop").disabled = !on;
}

function applyDisplay() {
  at("answers").classList.toggle("with-ghosts", at("ghosts").checked);
  at("answers").classList.toggle("mono", at("mono").checked);
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) runPrompt();
});
at("ask").addEventListener("change", () => writeAddress());
for (const id of ["ghosts", "mono"]) {
  at(id).addEventListener("change", () => {
    applyDisplay();
    writeAddress(at("keep-seed").dataset.seed);
  });
}
for (const chip of document.querySelectorAll(".chip")) {
  chip.addEventListener("click", () => {
    applyPreset(chip.dataset.preset);
    writeAddress();
  });
}
at("keep-seed").addEventListener("click", () => {
  at("seed").value = at("keep-seed").dataset.seed;
  at("keep-seed").hidden = true;
  writeAddress();
});
at("stop").addEventListener("click", () => running?.abort());
at("prompt").addEventListener("keydown", (press) => {
  if (press.key === "Enter" && (press.ctrlKey || press.metaKey)) at("ask").requestSubmit();
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // following the link would replace the settings in the page's address
  at("prompt").focus();
});
document.addEventListener("keydown", (press) => {
  if (press.key !== "Escape") return;
  hideTip();
  running?.abort();
});
addEventListener("hashchange", () => {
  readAddress();
  applyDisplay();
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(at("key").value.trim());
  start();
});
start();
recorded.show().catch(report);
