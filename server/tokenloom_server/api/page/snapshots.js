// The snapshots of a run that are saved in the ledger, and the button that takes one.

import { Refused, SLOW_TIMEOUT_MS } from "./ask.js";
import { askControl } from "./control.js";
import { grouped, moment } from "./numbers.js";
import { View, keep } from "./view.js";

const SNAPSHOTS_EVERY = 10; // polls
const SNAPSHOTS_SHOWN = 10;

export class Snapshots extends View {
  constructor(run) {
    super("snapshots");
    this.run = run;
    this.rows = new Map();
    this.polls = 0;
    this.slot("snap").addEventListener("click", () => this.take());
  }

  async refresh() {
    if (this.polls++ % SNAPSHOTS_EVERY === 0) await this.list();
  }

  async list() {
    let all;
    try {
      all = await this.run.ask("snapshots");
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.text("snapshots_note", `The list cannot be read now: ${error.message}`);
      return;
    }
    all.sort((a, b) => b.saved_at - a.saved_at);
    const shown = all.slice(0, SNAPSHOTS_SHOWN);
    this.slot("snapshots").closest("table").hidden = all.length === 0;
    this.text("snapshots_note", all.length === 0
      ? "None is saved in the ledger yet. One holds all that is needed to resume from its sample index."
      : all.length > shown.length ? `The newest ${shown.length} of ${grouped(all.length)}` : "");
    keep(this.slot("snapshots"), this.rows, shown, (snapshot) => snapshot.id, "snapshot", (row, snapshot) => {
      row.text("id", snapshot.id);
      row.slot("link").href = `${this.run.url}/snapshots/${encodeURIComponent(snapshot.id)}`;
      row.text("sample_index", grouped(snapshot.sample_index));
      row.text("saved_at", moment(snapshot.saved_at), new Date(snapshot.saved_at * 1000).toISOString());
    });
  }

  async take() {
    const button = this.slot("snap");
    button.disabled = true;
    this.text("snap_result", "Taking a snapshot …");
    try {
      const saved = await askControl(this.run, "snapshots", { method: "POST", body: "{}", timeout: SLOW_TIMEOUT_MS });
      this.text("snap_result", `Saved at sample ${grouped(saved.sample_index)}.`);
      await this.list();
    } catch (error) {
      this.text("snap_result", `No snapshot was taken: ${error.message}`);
    } finally {
      button.disabled = false;
      // A disabled button loses the focus; give it back unless it was taken elsewhere meanwhile.
      if (document.activeElement === document.body) button.focus();
    }
  }
}
