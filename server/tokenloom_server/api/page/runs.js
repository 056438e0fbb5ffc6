// The list of runs: what each is doing, and what is wrong, from one answer for all.

import { ask } from "./ask.js";
import { title } from "./events.js";
import { smallCurve } from "./loss_chart.js";
import { dash, escaped, grouped, lasting, moment, points } from "./numbers.js";
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
  view.attribute("line", "points", run ? curveOf(run.rates) : "");
  showEnd(view, state === "bad" ? null : (run?.seconds_left ?? null));
  view.text("deviation", run?.deviation ? `${run.deviation.alias} ${points(run.deviation.share)}` : dash);
  const last = run?.last_event;
  view.text("event", last ? `${title(last.kind)}, ${moment(last.time)}` : "", last?.text ?? "");
  view.attribute("events", "href", href(name, "events"));
  view.hide("events", !last);
  view.text("ranks", run?.world_size ? `${grouped(run.ranks_connected)} of ${grouped(run.world_size)}` : dash);
}

function curveOf(rates) {
  const places = rates.map((_, at) => at);
  return smallCurve({ total_tokens: places }, places, rates, 0);
}

function showEnd(view, seconds) {
  const known = seconds !== null;
  view.text("seconds_left", known ? lasting(seconds) : dash, known ? `about ${moment(Date.now() / 1000 + seconds)}` : "not known");
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
