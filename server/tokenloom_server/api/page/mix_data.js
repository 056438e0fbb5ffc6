// What the charts of the tab Mix show, from a run's history, its events and its plan.

import { COLOURS } from "./chart.js";
import { groupsOf, isCoarse } from "./groups.js";

// The greatest of what could have a band of its own, in their order; the rest is one band. All where they have room.
function chosen(bands, size) {
  if (bands.length <= COLOURS) return { shown: bands, rest: [] };
  const most = new Set([...bands].sort((a, b) => size(b) - size(a)).slice(0, COLOURS - 1));
  return { shown: bands.filter((each) => most.has(each)), rest: bands.filter((each) => !most.has(each)) };
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

// How many samples a point's latest shares are of.
export function samplesLately({ sample_index: index }, points, place) {
  return place === 0 ? index[points[0]] : Math.max(0, index[points[place]] - index[points[place - 1]]);
}

// Shares of few samples are coarse: where they differ from the plan by whole samples alone, the plan is drawn.
function sharesDrawn(curves, points, shares) {
  const targets = curves.sources.map((source) => points.map((at) => source.target_share[at]));
  const column = (of, place) => of.map((values) => values[place]);
  const coarse = points.map((_, place) => isCoarse(column(shares, place), column(targets, place), samplesLately(curves, points, place)));
  return shares.map((values, at) => values.map((share, place) => (share !== null && coarse[place] ? targets[at][place] : share)));
}

// The bands at each of the points: [{id, alias, sources, actual[], drawn[], planned[], off[]}], of sources, or of the
// groups that `groups` has by source id; id is -1 for the band of all others. `share`: lately, sofar or deviation, where
// those that are furthest from their plan have bands. `off`: actual less planned, 0 where that is less than a sample.
export function bandsOf(curves, points, share, groups) {
  const lately = share === "lately";
  const shares = lately ? sharesLately(curves, points) : curves.sources.map((source) => points.map((at) => source.actual_share[at]));
  const drawn = lately ? sharesDrawn(curves, points, shares) : shares;
  const plan = lately ? "target_share" : "expected_share";
  const places = new Map(curves.sources.map((source, at) => [source, at]));
  const band = (id, alias, sources) => {
    const total = (of) => points.map((_, place) => {
      const own = sources.map((source) => of[places.get(source)][place]);
      return own.every((each) => each === null) ? null : sum(own);
    });
    const [actual, planned] = [total(shares), points.map((at) => sum(sources.map((source) => source[plan][at])))];
    const off = actual.map((value, place) => {
      const by = (value ?? 0) - planned[place];
      return Math.abs(by) * curves.sample_index[points[place]] <= sources.length ? 0 : by;
    });
    return { id, alias, sources: sources.map((source) => source.id), of: sources, actual, planned, off, drawn: lately ? total(drawn) : actual };
  };
  const named = curves.sources.map((source) => ({ source, group: groups?.get(source.id) ?? source.alias }));
  const all = groups
    ? groupsOf(named).map(([name, of]) => band(`group ${name}`, name, of.map(({ source }) => source)))
    : curves.sources.map((source) => band(source.id, source.alias, [source]));
  const size = share === "deviation" ? ({ off }) => Math.abs(off.at(-1)) : ({ of }) => sum(of.map(({ tokens }) => tokens.at(-1)));
  const { shown, rest } = chosen(all, size);
  const others = rest.flatMap(({ of }) => of);
  const bands = shown;
  if (rest.length) bands.push(band(-1, `${others.length} other sources`, others));
  return bands;
}

// Each band with all below it, the topmost first: drawn in this order, each covers what is below.
export function stacked(bands) {
  const levels = [];
  let below = null;
  for (const { drawn } of bands) {
    below = drawn.map((value, at) => (value === null ? null : value + (below?.[at] ?? 0)));
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
