// The expected gain of speculation: the formulas of docs/theory.md, fed with what a run has measured.

export const MOST_GUESSES = 64;
const HALVINGS = 60;
const FEWEST_DRAFTS = 3; // below that an acceptance is an accident

// Tokens of a pass with so many draft levels, each accepted with probability alpha if those before it were.
export function expectedTokens(alpha, levels) {
  if (alpha >= 1) return levels + 1;
  const log = Math.log(alpha); // (1 - alpha ** (levels + 1)) / (1 - alpha), also where alpha is nearly 1
  return Math.expm1((levels + 1) * log) / Math.expm1(log);
}

// The least acceptance whose expected tokens pay for the cost of a pass; null if no acceptance does.
export function breakEven(levels, cost) {
  if (cost <= 1) return 0;
  if (cost > levels + 1) return null;
  let [tooLow, enough] = [0, 1];
  for (let round = 0; round < HALVINGS; round += 1) {
    const middle = (tooLow + enough) / 2;
    if (expectedTokens(middle, levels) >= cost) enough = middle;
    else tooLow = middle;
  }
  return enough;
}

// The probability that a draft token is accepted, given that those before it were; null from too few drafts.
export function acceptance(passes) {
  const drafts = passes.filter((pass) => pass.guesses.length);
  if (drafts.length < FEWEST_DRAFTS) return null;
  const accepted = sum(drafts.map((pass) => pass.accepted.length));
  const ends = drafts.filter((pass) => pass.accepted.length < pass.levels).length;
  return accepted / (accepted + ends);
}

// Time of a pass by the number of its rows, as a straight line through the medians; null if only one number was seen.
export function stepLine(passes) {
  const times = Map.groupBy(passes, (pass) => 1 + pass.guesses.length);
  if (times.size < 2) return null;
  const points = [...times].map(([rows, of]) => [rows, median(of.map((pass) => pass.end - pass.begin - pass.draftMs)), of.length]);
  const weight = sum(points.map(([, , count]) => count));
  const meanRows = sum(points.map(([rows, , count]) => rows * count)) / weight;
  const meanTime = sum(points.map(([, time, count]) => time * count)) / weight;
  const spread = sum(points.map(([rows, , count]) => count * (rows - meanRows) ** 2));
  const slope = Math.max(sum(points.map(([rows, time, count]) => count * (rows - meanRows) * time)) / spread, 0);
  const one = meanTime + slope * (1 - meanRows);
  return one > 0 ? { one, ratio: (rows) => (one + slope * (rows - 1)) / one } : null;
}

// What the passes of a run say about every depth; null if they say too little. `plain` are passes without draft tokens.
export function outlook(guessed, plain) {
  const timed = guessed.slice(1).filter((pass) => pass.end !== null); // the first is the prompt's
  const drafts = timed.filter((pass) => pass.guesses.length);
  const alpha = acceptance(timed);
  const line = stepLine([...timed, ...plain.slice(1).filter((pass) => pass.end !== null)]);
  if (alpha === null || line === null) return null;
  const guesses = sum(drafts.map((pass) => pass.guesses.length));
  const draftCost = sum(timed.map((pass) => pass.draftMs)) / guesses / line.one;
  const share = drafts.length / timed.length; // of the passes, those that had draft tokens: lookups often find none
  const width = guesses / sum(drafts.map((pass) => pass.levels)); // draft tokens per level: 1 for chains
  const cost = (count) => count * draftCost + line.ratio(1 + count);
  const at = (count) => {
    const tokens = share * expectedTokens(alpha, count / width) + 1 - share;
    return tokens / (share * cost(count) + 1 - share);
  };
  const depths = Array.from({ length: MOST_GUESSES }, (_, place) => ({ depth: place + 1, speedup: at(place + 1) }));
  const typical = guesses / drafts.length;
  return {
    alpha,
    depths,
    best: depths.reduce((best, found) => (found.speedup > best.speedup ? found : best)),
    predicted: predictedFor(timed, alpha, cost),
    breakEven: breakEven(typical / width, cost(typical)),
  };
}

// Of the drafts that there were, whatever their lengths.
function predictedFor(passes, alpha, cost) {
  const tokens = sum(passes.map((pass) => expectedTokens(alpha, pass.levels)));
  return tokens / sum(passes.map((pass) => (pass.guesses.length ? cost(pass.guesses.length) : 1)));
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
