// What is said of a run's state in a few words, in the list of runs and above a run.

import { compact, grouped, lasting } from "./numbers.js";

const SLOW_DATA_SHARE = 0.05; // where every rank waits for data this part of its time, the data sets the pace

// [state, words]: the state is good, wait, warn or bad. Of a run's stats or of its summary in the list.
export function stateOf(run, connected, away) {
  const begun = run.generation > 0;
  if (run.error) return ["bad", "Stopped"];
  if (run.ended) return ["wait", "Ended"];
  if (run.opening && connected === 0) return ["wait", "Is being opened"];
  if (!begun) return ["wait", "No trainer yet"];
  if (!run.ledger.available) return ["warn", "Ledger away"];
  if (connected === 0 && away === 0) return ["wait", "All ranks finished"];
  if (connected === 0) return ["warn", "No rank connected"];
  if (away > 0) return ["warn", `${connected} of ${run.world_size} ranks connected`];
  if (run.waiting_reason === "storage") return ["warn", "Waiting for storage"];
  if (run.waiting_reason === "readers") return ["warn", "Waiting for readers"];
  if (run.straggler) return ["warn", `${ranksText(run.straggler.ranks, "holds", "hold")} the others up`];
  if (run.data_wait_share >= SLOW_DATA_SHARE) return ["warn", "The data is slow"];
  return ["good", "Running"];
}

const NAMED = 8; // ranks

function ranksText(ranks, verb, plural) {
  const more = ranks.length > NAMED ? ` and ${grouped(ranks.length - NAMED)} more` : "";
  const named = ranks.slice(0, NAMED).join(", ") + more;
  return ranks.length > 1 ? `Ranks ${named} ${plural}` : `Rank ${named} ${verb}`;
}

// Whether training or the data sets the pace, or a rank does, and what is waited for.
export function paceNote(run) {
  const parts = [];
  if (run.straggler) {
    const { ranks, waited_share: share, seconds } = run.straggler;
    parts.push(`${ranksText(ranks, "holds", "hold")} the others up: they waited ${Math.round(share * 100)}\u00a0% of the last ${Math.round(seconds / 60)}\u00a0minutes`);
  } else if (run.data_wait_share !== null) {
    const pace = run.data_wait_share >= SLOW_DATA_SHARE ? "the data sets the pace" : "training sets the pace";
    parts.push(`${pace}: ranks waited for data ${Math.round(run.data_wait_share * 100)}\u00a0% of the last half a minute`);
  }
  if (run.waiting_for) parts.push(`${run.waiting_reason === "ranks" ? "samples are ready; " : ""}waiting for ${run.waiting_for}`);
  return parts.join("; ");
}

// Which mixture is in force, where it was ever changed.
export function revisionNote({ revision, next_revision: next }) {
  if (!revision && !next) return "";
  const now = revision ? `Revision ${grouped(revision)} in force` : "As it began";
  if (!next) return now;
  const when = next.eta_s === null ? "" : `, in about ${lasting(next.eta_s)}`;
  return `${now}; revision ${grouped(next.number)} from sample ${grouped(next.sample_index)} on${when}`;
}

// What the order passes over.
export function skipsText(skips) {
  return Object.entries(skips).map(([index, samples]) => `${grouped(samples)} samples at sample ${grouped(Number(index))}`).join(", ");
}

// Where a restore has the next launch begin.
export function pinNote(pin) {
  if (!pin) return "";
  const skips = pin.skips === null ? "" : `; from then on the order passes over ${skipsText(pin.skips) || "nothing"}`;
  return `A restore pinned sample ${grouped(pin.sample_index)} for the next launch${skips}.`;
}

// What somebody should look at, in one sentence, of a run's summary; empty where there is nothing.
export function wrongOf(run) {
  if (run.error) return run.error;
  if (!run.ledger.available) return `The ledger is away: ${run.ledger.error ?? "no reason known"}`;
  if (run.warning) return run.warning;
  return run.generation > 0 && stateOf(run, run.ranks_connected, run.ranks_away)[0] === "warn" ? paceNote(run) : "";
}

export const rate = (tokensPerSecond) => `${compact(tokensPerSecond)} per second`;

// The lines that a newcomer adds to a training script.
export function example(run, address) {
  // What a server bound to every interface is called from here.
  const target = (address ?? "HOST:PORT").replace(/^(0\.0\.0\.0|\[::\])(?=:)/, location.hostname);
  // Both endpoints use TLS, or none does.
  const scheme = location.protocol === "https:" ? "grpcs://" : "grpc://";
  return `from tokenloom import RemoteDataset
dataset = RemoteDataset("${scheme}${target}/${run}", batch_size=4)
for batch in dataset: ...`;
}
