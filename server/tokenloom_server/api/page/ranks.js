// The tab Ranks: a cell for each rank, and the slowest in a table below.

import { ago, grouped, lasting } from "./numbers.js";
import { View, keep } from "./view.js";

const LAG_STEPS = 2; // ranks take their batches when it suits them: only more is worth a look
const FAR_STEPS = 16;
const RANKS_SHOWN = 16; // beyond twice as many ranks, only those that lag most stand in the table
const CELLS_SHOWN = 4096;
const WORDS = { good: "keeping up", lag: "lagging", far: "lagging far", wait: "finished", bad: "away" };

const levelOf = (rank, step) => {
  if (rank.state === "away") return "bad";
  if (rank.state === "finished") return "wait";
  return rank.lag > FAR_STEPS * step ? "far" : rank.lag > LAG_STEPS * step ? "lag" : "good";
};

export class RanksTab extends View {
  constructor(run, root) {
    super("ranks");
    this.rows = new Map();
    this.cells = [];
    this.chosen = null; // the cell that the keyboard is at, or that was clicked
    root.append(this.root);
    const grid = this.slot("grid");
    grid.addEventListener("keydown", (event) => this.press(event));
    grid.addEventListener("click", (event) => event.target.dataset.rank && this.choose(Number(event.target.dataset.rank)));
    grid.addEventListener("focus", () => this.choose(this.chosen ?? 0));
  }

  show({ ranks, world_size, batch_size }) {
    this.ranks = ranks;
    const step = world_size * batch_size;
    for (const name of ["table", "map"]) this.hide(name, ranks.length === 0);
    this.showCells(ranks, step);
    this.showChosen();
    const slow = (a, b) => (b.state === "away") - (a.state === "away") || b.lag - a.lag || a.rank - b.rank;
    const many = ranks.length > 2 * RANKS_SHOWN;
    const shown = [...ranks].sort(slow).slice(0, many ? RANKS_SHOWN : undefined);
    this.text("ranks_note", ranks.length ? (many ? `The ${RANKS_SHOWN} that lag most, of ${grouped(ranks.length)}` : "The slowest first") : "No rank has joined yet.");
    keep(this.slot("ranks"), this.rows, shown, (rank) => rank.rank, "rank", (row, rank) => {
      row.text("rank", grouped(rank.rank));
      row.attribute("dot", "data-state", { connected: "good", finished: "wait", away: "bad" }[rank.state]);
      row.text("rank-state", rank.state);
      row.text("position", grouped(rank.position));
      row.text("lag", grouped(rank.lag), "samples that the fastest rank is ahead").classList.toggle("lagging", rank.lag > LAG_STEPS * step);
      row.text("waited", lasting(rank.waited_s), "since it joined");
      row.text("last_heard", ago(rank.last_heard_s));
    });
  }

  async refresh() {}

  close() {}

  // Only what changed is written: 4,096 cells stay far below a frame.
  showCells(ranks, step) {
    const count = Math.min(ranks.length, CELLS_SHOWN);
    if (this.cells.length !== count) {
      this.cells = ranks.slice(0, count).map((rank) => cell(rank.rank, count <= 64));
      this.slot("grid").replaceChildren(...this.cells);
      this.slot("grid").classList.toggle("numbered", count <= 64);
      this.chosen = null;
      this.slot("grid").removeAttribute("aria-activedescendant");
    }
    const totals = { bad: 0, far: 0, lag: 0, good: 0, wait: 0 };
    for (const [at, rank] of ranks.entries()) {
      const level = levelOf(rank, step);
      totals[level] += 1;
      if (at >= count || this.cells[at].dataset.level === level) continue;
      this.cells[at].dataset.level = level;
      this.cells[at].ariaLabel = this.cells[at].title = `Rank ${rank.rank}: ${WORDS[level]}`;
    }
    const parts = Object.entries(totals).filter(([, of]) => of).map(([level, of]) => `${grouped(of)} ${WORDS[level]}`);
    this.text("totals", parts.join(", ") + (ranks.length > count ? `; the first ${grouped(count)} are shown` : ""));
  }

  press(event) {
    const across = Math.max(1, Math.round(this.slot("grid").clientWidth / (this.cells[0]?.offsetWidth + 3)));
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -across, ArrowDown: across, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    this.choose(Math.max(0, Math.min(this.cells.length - 1, (this.chosen ?? 0) + by)));
  }

  choose(at) {
    this.cells[this.chosen]?.setAttribute("aria-selected", "false");
    this.chosen = at;
    const chosen = this.cells[at];
    if (!chosen) return;
    chosen.setAttribute("aria-selected", "true");
    this.slot("grid").setAttribute("aria-activedescendant", chosen.id);
    this.showChosen();
  }

  showChosen() {
    const rank = this.chosen === null ? undefined : this.ranks[this.chosen];
    this.text("chosen", rank === undefined ? "Choose a cell for its figures: by the mouse, or by the arrow keys."
      : `Rank ${grouped(rank.rank)}: ${rank.state}, at sample ${grouped(rank.position)}, lag ${grouped(rank.lag)}, waited ${lasting(rank.waited_s)} for data, heard ${ago(rank.last_heard_s)}`);
  }
}

function cell(rank, numbered) {
  const made = document.createElement("span");
  made.className = "cell";
  made.id = `rank-${rank}`;
  made.dataset.rank = String(rank);
  made.setAttribute("role", "option");
  made.setAttribute("aria-selected", "false");
  if (numbered) made.textContent = String(rank);
  return made;
}
