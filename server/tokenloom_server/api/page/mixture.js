// The tab Mixture: the tree in force, what changes it, and a form that tries a change and makes it.

import { SLOW_TIMEOUT_MS } from "./ask.js";
import { askControl } from "./control.js";
import { dash, escaped, grouped, lasting, moment } from "./numbers.js";
import { showPlanned } from "./planned.js";
import { revisionNote, skipsText } from "./state.js";
import { View, keep } from "./view.js";

const MIXTURE_EVERY = 10; // polls, and at once where the revision in force is another one
// What a row shows and changes: the field of a child, and what stands for it where the file gives none.
const FIELDS = [["weight", "Weight", "1"], ["epochs", "Epochs", "1"], ["max_tokens", "Tokens at most", ""]];

export class MixtureTab extends View {
  constructor(run, root) {
    super("mixture");
    this.run = run;
    this.children = new Map();
    this.revisions = new Map();
    this.info = null;
    this.polls = 0;
    this.marks = "";
    root.append(this.root);
    this.slot("edit").addEventListener("click", () => this.edit(true));
    this.slot("cancel").addEventListener("click", () => this.edit(false));
    this.slot("form").addEventListener("submit", (event) => this.submit(event));
    this.slot("form").addEventListener("input", () => this.changed());
  }

  show(stats) {
    this.text("revision", revisionNote(stats) || "The mixture is as it began.");
    const skips = skipsText(stats.skips);
    this.notice("skips", skips && `The order passes over ${skips}.`);
    const marks = JSON.stringify([stats.revision, stats.next_revision?.number]);
    if (marks !== this.marks) this.polls = 0;
    this.marks = marks;
  }

  async refresh() {
    if (this.polls++ % MIXTURE_EVERY === 0) await this.read();
  }

  close() {}

  async read() {
    this.info = await this.run.ask("mixture");
    this.showRevisions();
    if (!this.editing) this.showTree();
  }

  // The tree in force

  showTree() {
    const { mixture, paused } = this.info;
    keep(this.slot("children"), this.children, [...below(mixture, "mixture", 0)], ({ place }) => place, "mixture-child", (row, each) => {
      row.child = each;
      row.text("name", each.name);
      row.text("spec", each.child.policy ? "" : each.child.source === each.name ? "" : each.child.source);
      row.slot("name").style.paddingLeft = `${each.depth * 18}px`;
      row.text("policy", each.child.policy ?? "source");
      row.root.classList.toggle("root", each.depth === 0);
      row.notice("paused", paused.includes(each.name) ? "paused" : "");
      row.slot("pause").checked = row.slot("pause").defaultChecked = paused.includes(each.name);
      row.slot("pause").setAttribute("aria-label", `${escaped(each.name)} is paused`);
      for (const [field, title, fallback] of FIELDS) {
        const value = each.child[field];
        const words = value === undefined || value === null ? fallback : typeof value === "object" ? JSON.stringify(value) : String(value);
        row.text(field, typeof value === "number" ? grouped(value) : words || dash);
        const input = row.slot(field);
        input.value = input.defaultValue = words;
        input.setAttribute("aria-label", `${title} of ${escaped(each.name)}`);
      }
    });
  }

  showRevisions() {
    const { revisions, dropped } = this.info;
    this.slot("revisions").closest("table").hidden = revisions.length === 0;
    this.text("no-revisions", revisions.length ? "" : "None was made yet: the mixture is that of the file that the run began with.");
    this.notice("dropped", dropped.length ? `Dropped: ${dropped.join(", ")}` : "");
    keep(this.slot("revisions"), this.revisions, [...revisions].reverse(), ({ number }) => number, "mixture-revision", (row, each) => {
      const fresh = !row.each;
      row.each = each;
      row.text("number", String(each.number));
      row.text("state", each.in_force ? "" : "to come");
      row.slot("state").hidden = each.in_force;
      row.text("from", `sample ${grouped(each.sample_index)}`, `after ${grouped(each.total_tokens)} tokens`);
      row.text("changes", each.changes.join("\n"));
      row.text("reason", each.reason);
      row.text("by", [each.author, moment(each.made_at)].filter(Boolean).join(", "));
      row.slot("drop").hidden = each.in_force;
      row.slot("drop").setAttribute("aria-label", `Take back revision ${each.number}`);
      if (fresh) row.slot("drop").addEventListener("click", () => this.drop(row));
    });
  }

  // Takes back a revision, and all after it, once that was confirmed.
  async drop(row) {
    const { number } = row.each;
    const later = this.info.revisions.filter((each) => each.number > number).length;
    if (!row.asked) {
      row.asked = true;
      row.text("drop", later ? `Really, with ${later} after it?` : "Really?");
      return;
    }
    row.asked = false;
    row.text("drop", "Take back");
    await this.make(`Revision ${number} is taken back.`, () => askControl(this.run, `mixture/revisions/${number}`, { method: "DELETE" }));
  }

  // The form

  edit(editing) {
    if (this.info === null) return;
    this.editing = editing;
    this.root.classList.toggle("editing", editing);
    this.slot("form-fields").hidden = !editing;
    this.slot("edit").hidden = editing;
    this.slot("planned").hidden = true;
    this.showTree();
    this.notice("result", "");
    this.notice("trouble", "");
    this.changed();
    (editing ? this.slot("reason") : this.slot("edit")).focus();
  }

  // The settings that differ from what is in force. Raises SyntaxError for a weight that is no JSON.
  settings() {
    const settings = [];
    for (const row of this.children.values()) {
      const setting = {};
      for (const [field] of FIELDS) {
        const input = row.slot(field);
        if (input.value.trim() !== input.defaultValue) setting[field] = parsed(input.value.trim());
      }
      const pause = row.slot("pause");
      if (pause.checked !== pause.defaultChecked) setting.paused = pause.checked;
      if (Object.keys(setting).length) settings.push({ child: row.child.name, ...setting });
    }
    return settings;
  }

  change() {
    const from = this.slot("from").value.trim();
    return { set: this.settings(), ...(from ? { sample_index: Number(from) } : {}) };
  }

  changed() {
    for (const row of this.children.values()) {
      for (const [field] of FIELDS) row.slot(field).classList.toggle("other", row.slot(field).value.trim() !== row.slot(field).defaultValue);
    }
  }

  async submit(event) {
    event.preventDefault();
    const { reason, author } = { reason: this.slot("reason").value.trim(), author: this.slot("author").value.trim() };
    const apply = event.submitter === this.slot("apply");
    let change;
    try {
      change = this.change();
    } catch (error) {
      this.notice("trouble", `A weight is a number, or a schedule as JSON: ${error.message}`);
      return;
    }
    if (!change.set.length) {
      this.notice("trouble", "Nothing is changed yet: write another weight, or pause something, above.");
      return;
    }
    if (!apply) return this.make("", () => this.plan(change));
    await this.make("", async () => {
      const body = JSON.stringify({ ...change, reason, author });
      const made = await askControl(this.run, "mixture", { method: "PATCH", body, timeout: SLOW_TIMEOUT_MS });
      const when = made.eta_s === null ? "" : `, in about ${lasting(made.eta_s)}`;
      this.edit(false);
      this.notice("result", `Revision ${made.number} holds from sample ${grouped(made.sample_index)} on${when}.`);
    });
  }

  // What the run would be under a change, beside what it will be as it is.
  async plan(change) {
    const options = { timeout: SLOW_TIMEOUT_MS };
    const tried = await this.run.ask("plan", { method: "POST", body: JSON.stringify(change), ...options });
    const now = await this.run.ask("plan", options);
    this.slot("planned").hidden = false;
    const { revision, plan } = tried;
    this.text("planned-from", `From sample ${grouped(revision.sample_index)} on, after ${grouped(revision.total_tokens)} tokens:`);
    this.text("planned-changes", revision.changes.join("\n"));
    showPlanned(this, now, plan, revision.total_tokens);
  }

  // Does something that may take a while, and says how it went.
  async make(done, work) {
    this.notice("trouble", "");
    this.notice("result", "One moment …");
    this.slot("form-fields").disabled = true;
    try {
      await work();
      if (done || this.texts.get("result").textContent === "One moment …") this.notice("result", done);
      await this.read();
    } catch (error) {
      this.notice("result", "");
      this.notice("trouble", error.message);
    } finally {
      this.slot("form-fields").disabled = false;
    }
  }
}

// A node and all below it: {place, name, depth, child}. The place is what a child without a name is called.
function* below(child, place, depth) {
  yield { place, name: child.alias ?? child.source ?? place, depth, child };
  for (const [at, each] of (child.children ?? []).entries()) yield* below(each, `${place}.children.${at}`, depth + 1);
}

function parsed(text) {
  if (text === "") return null;
  if (/^[[{]/.test(text)) return JSON.parse(text);
  const number = Number(text.replaceAll(/[,_]/g, ""));
  return Number.isFinite(number) ? number : text;
}
