// The form's settings, as a request and as the part of the page's address that browsers do not send.

const at = (id) => document.getElementById(id);

const VALUES = ["prompt", "method", "depth", "temperature", "seed", "max-tokens"];
const SWITCHES = ["compare", "raw", "ghosts", "mono"];
const MAX_ADDRESS = 16000; // characters; a longer address leaves out the prompt

const CHANGES = [
  "const user = await load(user.id);", "const order = await load(order.id);", "const parcel = await load(parcel.id);",
  "const invoice = await load(invoice.id);", "const refund = await load(refund.id);",
].join("\n");

// Prompts for which speculation speeds up, breaks even and slows down; docs/page.md has the measurements.
const PRESETS = {
  pays: { prompt: `Rewrite every line with the name in capitals:\n${CHANGES}`, depth: 5, temperature: 0, "max-tokens": 96 },
  even: {
    prompt: "Write a poem about a lighthouse and the sea, in which no line repeats.",
    depth: 5, temperature: 1, "max-tokens": 160,
  },
  costs: { prompt: "Explain in a few paragraphs why it rains.", depth: 32, temperature: 0.8, "max-tokens": 160 },
};

// Offer the methods that this server accepts; "default" is the drafter with which it was started.
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

// The request. Without a seed, one is drawn here, so that it can be shown and kept.
export function requestBody() {
  const method = at("method").value;
  const seed = at("seed").value === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : at("seed").valueAsNumber;
  const depth = at("depth").valueAsNumber;
  const drafter = { ...(method !== "default" && { method }), num_speculative_tokens: depth };
  return {
    prompt: at("prompt").value,
    raw: at("raw").checked,
    temperature: at("temperature").valueAsNumber,
    seed,
    max_tokens: at("max-tokens").valueAsNumber,
    stream: true,
    speculation: method === "none" ? false : drafter,
  };
}

export function methodName() {
  return at("method").selectedOptions[0]?.textContent ?? "";
}

// The part after # is not sent to the server: prompts stay out of its log.
export function writeAddress(seed) {
  const settings = new URLSearchParams();
  for (const id of VALUES) if (at(id).value !== "") settings.set(id, at(id).value);
  if (seed !== undefined) settings.set("seed", seed);
  for (const id of SWITCHES) if (at(id).checked) settings.set(id, "1");
  if (String(settings).length > MAX_ADDRESS) settings.delete("prompt");
  history.replaceState(null, "", `#${settings}`);
}

export function readAddress() {
  const settings = new URLSearchParams(location.hash.slice(1));
  if (!VALUES.some((id) => settings.has(id))) return;
  for (const id of VALUES) if (settings.has(id)) setValue(at(id), settings.get(id));
  for (const id of SWITCHES) at(id).checked = settings.get(id) === "1";
}

// Set a field's value; a method that is not offered and an invalid number leave it as it is.
function setValue(field, value) {
  const before = field.value;
  field.value = value;
  if (field.value === "" && value !== "") field.value = before;
}
