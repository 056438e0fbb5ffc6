// Many sources as few: the groups that the server puts them in, and the smaller ones as one.

export const MANY = 24; // rows, beyond which a table is cut

const sum = (sources, name) => sources.reduce((total, source) => (total === null || source[name] === null ? null : total + source[name]), 0);

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
  // A share or a counter is the sum of theirs; what is neither is named below.
  const sums = Object.fromEntries(Object.keys(sources[0]).map((name) => [name, sum(sources, name)]));
  const epoch = sources.reduce((total, source) => total + source.epoch * source.rows, 0) / (sums.rows || 1);
  const given = sums.tokens + sums.skipped_tokens;
  return {
    ...sums,
    id,
    alias,
    group,
    spec: `${sources.length} sources`,
    epoch,
    epochs: null,
    exhausted: sources.every((source) => source.exhausted),
    label_share: null,
    fill_rate: given ? 1 - sums.padding_tokens / given : 1,
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
