// The playground: reads the form, runs the prompt once or twice, shows what comes.

import { AnswerView, hide } from "./answer.js";
import { Refusal, get, stream, useKey } from "./events.js";
import { Run, clearFigures, showRun } from "./figures.js";

const at = (id) => document.getElementById(id);
const guessed = new AnswerView(at("guessed"));
const plain = new AnswerView(at("plain"));
let running = null; // the AbortController of what runs now

async function start() {
  try {
    applySettings(await get("page/settings"));
    at("key-form").hidden = true;
    at("error").textContent = "";
  } catch (error) {
    report(error);
  }
}

function applySettings(settings) {
  at("about").textContent = `${settings.model} · guesses ahead, checks every guess, says the same.`;
  const methods = [...settings.methods, "none"];
  at("method").replaceChildren(...methods.map((name) => new Option(name === "none" ? "none (plain)" : name, name)));
  at("method").value = settings.default_method ?? methods[0];
  if (settings.max_model_len) at("max-tokens").max = settings.max_model_len;
  for (const part of document.querySelectorAll(".guessing, #legend")) part.hidden = !settings.shows_speculation;
  at("hidden-note").hidden = settings.shows_speculation;
}

function report(error) {
  if (error.name === "AbortError") {
    at("status").textContent = "Stopped.";
    return;
  }
  if (error instanceof Refusal && error.status === 401) {
    at("key-form").hidden = false;
    at("key").focus();
    at("error").textContent = at("key").value ? "The server does not know this key." : "";
    at("status").textContent = "";
    return;
  }
  at("status").textContent = "";
  at("error").textContent = error.message;
}

function question() {
  const method = at("method").value;
  const seed = at("seed").value === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : at("seed").valueAsNumber;
  return {
    prompt: at("prompt").value,
    raw: at("raw").checked,
    temperature: at("temperature").valueAsNumber,
    seed,
    max_tokens: at("max-tokens").valueAsNumber,
    stream: true,
    speculation: method === "none" ? false : { method, num_speculative_tokens: at("depth").valueAsNumber },
  };
}

async function decode(view, body, { showsFigures }) {
  const run = new Run();
  view.busy = true;
  try {
    for await (const event of stream("generate", body, running.signal)) {
      run.note(event);
      if (event.origin) view.add(event);
      view.figures.textContent = run.line;
      if (showsFigures) showRun(run);
    }
  } finally {
    view.busy = false;
  }
  return run;
}

async function ask() {
  const body = question();
  const compares = at("compare").checked && body.speculation !== false;
  clear(body, compares);
  running = new AbortController();
  setBusy(true);
  try {
    at("status").textContent = `Answering with seed ${body.seed} …`;
    const first = await decode(guessed, body, { showsFigures: true });
    at("status").textContent = `Finished with seed ${body.seed}: ${first.line}.`;
    if (compares) {
      // After the other and not beside it, since two answers at once would slow each other down.
      at("status").textContent = "The same prompt without guessing …";
      const second = await decode(plain, { ...body, speculation: false }, { showsFigures: false });
      judge(first, second);
    }
  } catch (error) {
    report(error);
  } finally {
    running = null;
    setBusy(false);
  }
}

function clear(body, compares) {
  guessed.clear();
  plain.clear();
  clearFigures();
  at("error").textContent = at("verdict").textContent = "";
  at("verdict").className = "";
  plain.article.hidden = !compares;
  guessed.title.textContent = body.speculation ? `Speculative: ${body.speculation.method}` : "Plain decoding";
}

function judge(first, second) {
  at("status").textContent = "Both runs have finished.";
  const same = guessed.written === plain.written && String(guessed.tokenIds) === String(plain.tokenIds);
  at("verdict").classList.toggle("differs", !same);
  if (!same) {
    const place = plain.tokenIds.findIndex((token, index) => token !== guessed.tokenIds[index]);
    at("verdict").textContent = `The texts differ, from token ${(place < 0 ? plain.tokenIds.length : place) + 1} on.`;
    return;
  }
  const saved = second.seconds - first.seconds;
  const part = second.seconds > 0 ? Math.abs(Math.round((100 * saved) / second.seconds)) : 0;
  const outcome = saved >= 0 ? "Guessing saved" : "Guessing cost";
  at("verdict").textContent =
    `Identical, all ${plain.tokenIds.length} tokens. ${outcome} ${Math.abs(saved).toFixed(2)} s of decoding (${part} %).`;
}

function setBusy(on) {
  at("run").disabled = on;
  at("stop").disabled = !on;
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) ask();
});
at("stop").addEventListener("click", () => running?.abort());
at("prompt").addEventListener("keydown", (press) => {
  if (press.key === "Enter" && (press.ctrlKey || press.metaKey)) at("ask").requestSubmit();
});
document.addEventListener("keydown", (press) => {
  if (press.key !== "Escape") return;
  hide();
  running?.abort();
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(at("key").value.trim());
  start();
});
start();
