// The form: what it asks for, as a request and as a part of the page's address that never leaves the browser.

const at = (id) => document.getElementById(id);

const VALUES = ["prompt", "method", "depth", "temperature", "seed", "max-tokens"];
const SWITCHES = ["compare", "raw", "ghosts", "mono"];
const LONGEST_ADDRESS = 16000; // longer prompts are left out of it

const CHANGES = [
  "const user = await load(user.id);", "const order = await load(order.id);", "const parcel = await load(parcel.id);",
  "const invoice = await load(invoice.id);", "const refund = await load(refund.id);",
].join("\n");

// What they claim is measured in docs/page.md.
const PRESETS = {
  pays: { prompt: `Rewrite every line with the name in capitals:\n${CHANGES}`, depth: 5, temperature: 0, "max-tokens": 96 },
  even: {
    prompt: "Write a poem about a lighthouse and the sea, in which no line repeats.",
    depth: 5, temperature: 1, "max-tokens": 160,
  },
  costs: { prompt: "Explain in a few paragraphs why it rains.", depth: 32, temperature: 0.8, "max-tokens": 160 },
};

// Methods that this server takes; "default" is what it was started with, whatever that is.
export function offerMethods({ methods, default_method: own }) {
  const options = methods.map((name) => new Option(name, name));
  if (own) options.unshift(new Option("server's own", "default"));
  const chosen = at("method").value;
  at("method").replaceChildren(...options, new Option("none (plain)", "none"));
  at("method").value = [...at("method").options].some(({ value }) => value === chosen) ? chosen : options[0].value;
}

export function applyPreset(name) {
  for (const [id, value] of Object.entries({ seed: 7, ...PRESETS[name] })) at(id).value = value;
  if (at("method").value === "none") at("method").selectedIndex = 0;
  at("raw").checked = false;
}

// A seed that was left open is drawn here, so that it can be shown and kept.
export function question() {
  const method = at("method").value;
  const seed = at("seed").value === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : at("seed").valueAsNumber;
  const depth = at("depth").valueAsNumber;
  const guessing = { ...(method !== "default" && { method }), num_speculative_tokens: depth };
  return {
    prompt: at("prompt").value,
    raw: at("raw").checked,
    temperature: at("temperature").valueAsNumber,
    seed,
    max_tokens: at("max-tokens").valueAsNumber,
    stream: true,
    speculation: method === "none" ? false : guessing,
  };
}

export function methodName() {
  return at("method").selectedOptions[0]?.textContent ?? "";
}

// The part after # is not sent to the server: prompts stay out of its log.
export function writeAddress(seed) {
  const told = new URLSearchParams();
  for (const id of VALUES) if (at(id).value !== "") told.set(id, at(id).value);
  if (seed !== undefined) told.set("seed", seed);
  for (const id of SWITCHES) if (at(id).checked) told.set(id, "1");
  if (String(told).length > LONGEST_ADDRESS) told.delete("prompt");
  history.replaceState(null, "", `#${told}`);
}

export function readAddress() {
  const told = new URLSearchParams(location.hash.slice(1));
  if (!VALUES.some((id) => told.has(id))) return;
  for (const id of VALUES) if (told.has(id)) setValue(at(id), told.get(id));
  for (const id of SWITCHES) at(id).checked = told.get(id) === "1";
}

// A method that is not offered, or a number that is none, leaves the field as it is.
function setValue(field, value) {
  const before = field.value;
  field.value = value;
  if (field.value === "" && value !== "") field.value = before;
}
