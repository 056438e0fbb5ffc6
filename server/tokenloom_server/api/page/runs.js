// The list of runs: what each is doing, and what is wrong, from one answer for all.

import { ask } from "./ask.js";
import { dash, escaped, grouped, lasting } from "./numbers.js";
import { href } from "./route.js";
import { example, stateOf, wrongOf } from "./state.js";
import { View, keep } from "./view.js";

// What is wrong comes first; runs keep their order otherwise, so that rows do not jump.
const URGENCY = { bad: 0, warn: 1, good: 2, wait: 3 };

export class RunList extends View {
  constructor() {
    super("runs-list");
    this.rows = new Map();
  }

  async refresh(server) {
    const { runs, unread } = await ask("v1/summaries");
    const rows = runs.map((run) => {
      const [state, words] = stateOf(run, run.ranks_connected, run.ranks_away);
      return { name: run.run, state, words, wrong: wrongOf(run), run };
    });
    const broken = server.broken.map((each) => [each.run, `${each.error}: ${each.message}`]);
    const reasons = { ...Object.fromEntries(broken), ...unread };
    for (const [name, wrong] of Object.entries(reasons)) {
      const row = rows.find((each) => each.name === name);
      if (row) row.wrong = wrong;
      else rows.push({ name, state: "bad", words: "Not served", wrong, run: null });
    }
    rows.sort((a, b) => URGENCY[a.state] - URGENCY[b.state] || a.name.localeCompare(b.name));
    const troubled = rows.filter((row) => row.state === "bad" || row.state === "warn").length;
    this.text("runs_note", `${rows.length} on this server; ${troubled || "none"} to look at`);
    keep(this.slot("runs"), this.rows, rows, (row) => row.name, "run-row", showRow);
    this.root.classList.remove("stale");
  }

  close() {
    this.root.remove();
  }
}

function showRow(view, { name, state, words, wrong, run }) {
  view.text("run", name);
  view.attribute("link", "href", href(name, "mix"));
  view.attribute("state", "data-state", state);
  view.text("state", words);
  view.text("wrong", wrong);
  view.number("total_tokens", run && run.total_tokens);
  view.number("tokens_per_s", run && Math.round(run.tokens_per_s));
  view.text("seconds_left", run && state !== "bad" && run.seconds_left !== null ? lasting(run.seconds_left) : dash);
  view.text("ranks", run?.world_size ? `${grouped(run.ranks_connected)} of ${grouped(run.world_size)}` : dash);
}

// In place of a run: there is none, or none of this name.
export class NoRun extends View {
  constructor(template, name) {
    super(template);
    this.name = name;
  }

  async refresh(server) {
    if (this.texts.has("example")) this.text("example", example("RUN", server.grpc_address));
    if (this.texts.has("missing")) this.text("missing", `This server has no run ${escaped(this.name)}`);
  }

  close() {
    this.root.remove();
  }
}
