// Many sources as few: the groups that the server puts them in, and the smaller ones as one.

export const MANY = 24; // rows, beyond which a table is cut

const sum = (sources, name) => sources.reduce((total, source) => (total === null || source[name] === null ? null : total + source[name]), 0);
const SUMS = ["target_share", "expected_share", "actual_share", "window_share", "tokens", "rows", "samples", "remaining_samples", "dropped_tokens", "skipped_tokens", "bad_rows", "filtered_rows", "excluded_rows", "padding_tokens", "cut_documents", "lost_tokens"];

// Sources by their group: [[name, sources]], in the order of the first of each.
export function groupsOf(sources) {
  const groups = new Map();
  for (const source of sources) {
    if (!groups.has(source.group)) groups.set(source.group, []);
    groups.get(source.group).push(source);
  }
  return [...groups];
}

// Whether groups say more than the sources: so few sources need none.
export const isGrouped = (sources, most) => sources.length > most && groupsOf(sources).length * 2 <= sources.length;

// Several sources as one, with the fields of a source's stats; `group`: its name, where it is a whole one.
export function merged(id, alias, sources, group = "") {
  const rows = sources.reduce((total, source) => total + source.rows, 0);
  const epoch = sources.reduce((total, source) => total + source.epoch * source.rows, 0) / (rows || 1);
  return {
    ...sources[0],
    ...Object.fromEntries(SUMS.map((name) => [name, sum(sources, name)])),
    id,
    alias,
    group,
    spec: `${sources.length} sources`,
    epoch,
    epochs: null,
    exhausted: sources.every((source) => source.exhausted),
    label_share: null,
    cut_rate: null,
    loss: null,
    last_loss: null,
    of: sources.length,
  };
}

export const groupRows = (sources) =>
  groupsOf(sources).map(([name, of]) => (of.length > 1 ? merged(`group ${name}`, name, of, name) : of[0]));

// Whether shares of so many samples differ from their targets by no more than a sample each: that is no deviation.
export const isCoarse = (shares, targets, samples) =>
  shares.every((share, at) => Math.abs((share ?? 0) - (targets[at] ?? 0)) * samples <= 1);
