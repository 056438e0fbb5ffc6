// What the charts of the tab Mix show, from a run's history, its events and its plan.

import { COLOURS } from "./chart.js";

// Sources that have a band of their own, by id; the rest is one band. All of them where they have room.
export function chosenSources(sources) {
  if (sources.length <= COLOURS) return { shown: sources, rest: [] };
  const byTokens = [...sources].sort((a, b) => (b.tokens.at(-1) ?? 0) - (a.tokens.at(-1) ?? 0));
  const most = new Set(byTokens.slice(0, COLOURS - 1));
  return { shown: sources.filter((each) => most.has(each)), rest: sources.filter((each) => !most.has(each)) };
}

// Which points are shown: over time all of them; over tokens those that were not taken back, at most one for a total.
export function shownPoints(curves, overTime) {
  const all = curves.time.map((_, at) => at);
  if (overTime) return all;
  const kept = [];
  for (const at of all) {
    if (curves.rewound[at]) continue;
    if (kept.length && curves.total_tokens[kept.at(-1)] >= curves.total_tokens[at]) kept.pop();
    kept.push(at);
  }
  return kept;
}

const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);

// Each source's share of the tokens since the shown point before; null where there were none. The history says it of the
// point before in time: not where that was taken back.
function sharesLately({ sources }, points) {
  const columns = sources.map(({ window_share, tokens, actual_share }) => points.map((at, place) => {
    if (place === 0) return { share: actual_share[at], tokens: 0 };
    return { share: window_share[at], tokens: Math.max(0, (tokens[at] ?? 0) - (tokens[points[place - 1]] ?? 0)) };
  }));
  const totals = points.map((_, place) => sum(columns.map((column) => column[place].tokens)));
  return columns.map((column) => column.map(({ share, tokens }, place) => share ?? (totals[place] ? tokens / totals[place] : null)));
}

// The bands at each of the points: [{id, alias, sources, actual[], planned[]}]; id is -1 for the band of all others.
export function bandsOf(curves, points, soFar) {
  const { shown, rest } = chosenSources(curves.sources);
  const shares = soFar ? curves.sources.map((source) => points.map((at) => source.actual_share[at])) : sharesLately(curves, points);
  const planned = soFar ? "expected_share" : "target_share";
  const band = (id, alias, sources) => {
    const own = sources.map((source) => shares[curves.sources.indexOf(source)]);
    return {
      id,
      alias,
      sources: sources.map((source) => source.id),
      actual: points.map((_, place) => (own.every((each) => each[place] === null) ? null : sum(own.map((each) => each[place])))),
      planned: points.map((at) => sum(sources.map((source) => source[planned][at]))),
    };
  };
  const bands = shown.map((source) => band(source.id, source.alias, [source]));
  if (rest.length) bands.push(band(-1, `${rest.length} other sources`, rest));
  return bands;
}

// Each band with all below it, the topmost first: drawn in this order, each covers what is below.
export function stacked(bands) {
  const levels = [];
  let below = null;
  for (const { actual } of bands) {
    below = actual.map((value, at) => (value === null ? null : value + (below?.[at] ?? 0)));
    levels.unshift(below);
  }
  return levels;
}

// Shares of the bands in the plan's segments: [{from, until, shares[]}], in tokens of the run.
export function plannedSegments(plan, bands) {
  return plan.segments.map(({ from_tokens, until_tokens, shares }) => ({
    from: from_tokens,
    until: until_tokens,
    shares: bands.map(({ sources }) => sum(sources.map((id) => shares[id]))),
  }));
}

// Stretches that a later launch took back: [{from, until, generation, tokens}], in the units of the x axis.
export function rewoundParts(curves, xs) {
  const parts = [];
  let begin = -1;
  for (let at = 0; at <= curves.rewound.length; at += 1) {
    const back = at < curves.rewound.length && curves.rewound[at];
    if (back && begin < 0) begin = at;
    if (back || begin < 0) continue;
    // From the point before on: that is where the tokens of the first one begin.
    const [from, until] = [xs[Math.max(0, begin - 1)], xs[at - 1]];
    parts.push({ from: Math.min(from, until), until, generation: curves.generation[at - 1] });
    begin = -1;
  }
  return parts;
}

// What is marked in the chart: what changed the order of the run or stopped it.
const MARKED = ["launch", "rewind", "skip", "fork", "pin", "revision", "failover", "bad_rows", "exhausted", "rank", "straggler", "error", "end"];
export const markedEvents = (events, overTime) =>
  events.filter(({ kind }) => MARKED.includes(kind)).map((event) => ({ x: overTime ? event.time : event.total_tokens, event }));

// The range that is shown where nobody zoomed: what was, and a quarter as much of what is to come.
export function wholeRange(xs, segments, overTime) {
  const [first, last] = [xs[0], xs.at(-1)];
  const until = overTime || !segments.length ? last : Math.min(segments.at(-1).until, last + Math.max((last - first) / 4, 1));
  return [first, Math.max(until, first + 1)];
}
