// The tab Events: what happened to the run, newest first, and the snapshots that it can go back to.
//
// In the address: kind= (one of those that there are).

import { compact, grouped, moment } from "./numbers.js";
import { Snapshots } from "./snapshots.js";
import { View, keep } from "./view.js";

const MORE = 100; // events that are shown at once

const TITLES = { failover: "fail-over", bad_rows: "bad rows", exhausted: "source ran out" };
export const title = (kind) => TITLES[kind] ?? kind;
const STATES = { error: "bad", bad_rows: "warn", rewind: "warn", failover: "warn", rank: "warn", straggler: "warn", revision: "good", end: "wait" };

export class EventsTab extends View {
  constructor(run, root) {
    super("events");
    this.run = run;
    this.rows = new Map();
    this.limit = MORE;
    this.snapshots = new Snapshots(run);
    this.slot("kind").addEventListener("change", (event) => this.choose(event.target.value));
    this.slot("more").addEventListener("click", () => {
      this.limit += MORE;
      this.draw();
    });
    for (const table of ["history", "events"]) this.slot(`${table}-csv`).href = `${run.url}/${table}?format=csv`;
    root.append(this.root, this.snapshots.root);
  }

  show() {}

  async refresh() {
    await this.snapshots.refresh();
    await this.run.history.refresh();
    this.draw();
  }

  follow() {
    this.draw();
  }

  close() {}

  choose(kind) {
    this.run.keep(kind ? { kind } : {});
    this.limit = MORE;
    this.draw();
  }

  draw() {
    const { events } = this.run.history;
    const kind = this.run.params.kind ?? "";
    this.showKinds([...new Set(events.map((event) => event.kind))].sort(), kind);
    const wanted = events.filter((event) => !kind || event.kind === kind).reverse();
    const shown = wanted.slice(0, this.limit);
    this.text("events_note", wanted.length ? `${grouped(wanted.length)} of them` : "");
    this.hide("table", !wanted.length);
    this.notice("none", wanted.length ? "" : kind ? `No event of the kind ${title(kind)} is kept.` : "Nothing has happened yet.");
    this.hide("more", shown.length === wanted.length);
    keep(this.slot("rows"), this.rows, shown, (event) => event.id, "event", (row, event) => {
      row.text("time", moment(event.time), new Date(event.time * 1000).toISOString());
      row.text("kind", title(event.kind));
      row.attribute("pill", "data-state", STATES[event.kind] ?? "wait");
      row.text("text", event.text);
      row.notice("author", event.author ? `by ${event.author}` : "");
      row.notice("rewound", event.rewound ? "taken back since" : "");
      row.text("place", `${compact(event.total_tokens)} tokens`, `sample ${grouped(event.sample_index)}, generation ${grouped(event.generation)}`);
      row.attribute("link", "href", this.run.href("mix", event.rewound ? { over: "time", at: event.time } : { at: event.total_tokens }));
    });
  }

  // The choices change only where another kind comes.
  showKinds(kinds, chosen) {
    const select = this.slot("kind");
    const all = kinds.includes(chosen) || !chosen ? kinds : [...kinds, chosen];
    if (select.dataset.of !== all.join()) {
      select.dataset.of = all.join();
      const options = all.map((kind) => new Option(title(kind), kind));
      select.replaceChildren(new Option("all kinds", ""), ...options);
    }
    if (select.value !== chosen) select.value = chosen;
  }
}
