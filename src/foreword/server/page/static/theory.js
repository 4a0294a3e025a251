// The expected gain of speculation: the formulas of docs/theory.md, with the measurements of a run.

export const MAX_DRAFT_TOKENS = 64;
const HALVINGS = 60; // of the interval in which the break-even acceptance is
const MIN_DRAFTS = 3; // acceptance is not estimated from fewer drafts

// The expected tokens of a pass with this many draft levels. Alpha: the probability that a level is accepted if the
// levels before it are.
export function expectedTokens(alpha, levels) {
  if (alpha >= 1) return levels + 1;
  const log = Math.log(alpha); // (1 - alpha ** (levels + 1)) / (1 - alpha), also where alpha is nearly 1
  return Math.expm1((levels + 1) * log) / Math.expm1(log);
}

// The smallest acceptance at which the expected tokens equal the cost of a pass; null if there is none. Costs are in
// plain passes.
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

// An estimate of alpha from the passes of a run; null from too few drafts.
export function acceptance(passes) {
  const drafts = passes.filter((pass) => pass.draftTokens.length);
  if (drafts.length < MIN_DRAFTS) return null;
  const accepted = sum(drafts.map((pass) => pass.accepted.length));
  const rejections = drafts.filter((pass) => pass.accepted.length < pass.levels).length;
  return accepted / (accepted + rejections);
}

// The time of a pass by its number of rows, as a line fitted to the medians: `one`, the milliseconds for one row, and
// `ratio`, the time for some rows divided by that. null if all passes have the same number of rows.
export function stepLine(passes) {
  const times = Map.groupBy(passes, (pass) => 1 + pass.draftTokens.length);
  if (times.size < 2) return null;
  const passMs = (pass) => pass.end - pass.begin - pass.draftMs;
  const points = [...times].map(([rows, group]) => [rows, median(group.map(passMs)), group.length]);
  const weight = sum(points.map(([, , count]) => count));
  const meanRows = sum(points.map(([rows, , count]) => rows * count)) / weight;
  const meanTime = sum(points.map(([, time, count]) => time * count)) / weight;
  const spread = sum(points.map(([rows, , count]) => count * (rows - meanRows) ** 2));
  const slope = Math.max(sum(points.map(([rows, time, count]) => count * (rows - meanRows) * time)) / spread, 0);
  const one = meanTime + slope * (1 - meanRows);
  return one > 0 ? { one, ratio: (rows) => (one + slope * (rows - 1)) / one } : null;
}

// The expected speed-up at every depth, from the passes of a speculative run and of a plain one; null if these passes
// do not suffice for the estimates.
export function outlook(speculative, plain) {
  const timed = speculative.slice(1).filter((pass) => pass.end !== null); // the first pass computes the prompt
  const drafts = timed.filter((pass) => pass.draftTokens.length);
  const alpha = acceptance(timed);
  const line = stepLine([...timed, ...plain.slice(1).filter((pass) => pass.end !== null)]);
  if (alpha === null || line === null) return null;
  const draftTokens = sum(drafts.map((pass) => pass.draftTokens.length));
  const draftCost = sum(timed.map((pass) => pass.draftMs)) / draftTokens / line.one;
  const share = drafts.length / timed.length; // fraction of passes with draft tokens: lookups often find none
  const width = draftTokens / sum(drafts.map((pass) => pass.levels)); // draft tokens per level: 1 for chains
  const cost = (count) => count * draftCost + line.ratio(1 + count);
  const at = (count) => {
    const tokens = share * expectedTokens(alpha, count / width) + 1 - share;
    return tokens / (share * cost(count) + 1 - share);
  };
  const depths = Array.from({ length: MAX_DRAFT_TOKENS }, (_, index) => ({ depth: index + 1, speedup: at(index + 1) }));
  const typical = draftTokens / drafts.length;
  return {
    alpha,
    depths,
    best: depths.reduce((best, found) => (found.speedup > best.speedup ? found : best)),
    predicted: predictedFor(timed, alpha, cost),
    breakEven: breakEven(typical / width, cost(typical)),
  };
}

// The expected speed-up of the run itself, whose drafts may have different lengths.
function predictedFor(passes, alpha, cost) {
  const tokens = sum(passes.map((pass) => expectedTokens(alpha, pass.levels)));
  return tokens / sum(passes.map((pass) => (pass.draftTokens.length ? cost(pass.draftTokens.length) : 1)));
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
