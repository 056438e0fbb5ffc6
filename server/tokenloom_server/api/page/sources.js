// The tab Sources: each source's shares, counters and losses.
//
// In the address: filter= (part of a name), sort= (a column), down=1 (the greatest first), by=sources where there are
// groups, and all=1 (no row is left out).

import { MANY, groupRows, isCoarse, isGrouped, merged } from "./groups.js";
import { LossChart, smallCurve } from "./loss_chart.js";
import { shownPoints } from "./mix_data.js";
import { ago, compact, dash, grouped, loss, percent, scaleFor } from "./numbers.js";
import { View, keep } from "./view.js";

const ROWS_A_FRAME = 16; // that many rows come with a frame when the tab is opened

// What a column sorts by. Names go up first, figures down.
const COLUMNS = {
  alias: (source) => source.alias.toLowerCase(),
  target: (source) => source.target_share,
  expected: (source) => source.expected_share,
  actual: (source) => source.actual_share,
  window: (source) => source.window_share,
  loss: (source) => source.loss,
  tokens: (source) => source.tokens,
  rows: (source) => source.rows,
  samples: (source) => source.samples,
  epochs: (source) => source.epoch,
  remaining: (source) => source.remaining_samples,
};

// The filtered sources in the order that is asked for; what is not known comes last.
export function sorted(sources, { filter = "", sort = "", down = "" }) {
  const part = filter.toLowerCase();
  const shown = sources.filter(({ alias, spec, group }) => `${alias}\n${spec}\n${group}`.toLowerCase().includes(part));
  const value = Object.hasOwn(COLUMNS, sort) && COLUMNS[sort];
  if (!value) return shown;
  const sign = down ? -1 : 1;
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b) : a - b);
  return shown.sort((one, other) => {
    const [a, b] = [value(one), value(other)];
    if (a === null || b === null) return (a === null) - (b === null) || one.id - other.id;
    return sign * compare(a, b) || one.id - other.id;
  });
}

export class SourcesTab extends View {
  constructor(run, root) {
    super("sources");
    this.run = run;
    this.rows = new Map();
    this.readerSources = new Map();
    this.readerNodes = new Map();
    this.stats = null;
    this.curves = new Map(); // by source id: its small curve
    this.version = -1;
    this.limit = ROWS_A_FRAME;
    this.chart = new LossChart(this);
    for (const button of this.slot("table").tHead.querySelectorAll("button")) {
      button.addEventListener("click", () => this.sortBy(button.dataset.sort));
    }
    this.slot("filter").addEventListener("input", (event) => this.change({ filter: event.target.value }));
    this.slot("sort").addEventListener("change", (event) => this.sortBy(event.target.value));
    this.slot("turn").addEventListener("click", () => this.change({ down: run.params.down ? "" : "1" }));
    this.slot("groups").addEventListener("click", () => this.change({ by: "", filter: "" }));
    this.slot("each").addEventListener("click", () => this.change({ by: "sources" }));
    this.slot("more").addEventListener("click", () => this.change({ all: "1" }));
    for (const button of this.slot("table").tHead.querySelectorAll("button")) {
      this.slot("sort").append(new Option(button.textContent, button.dataset.sort));
    }
    root.append(this.root);
    this.showChoices();
  }

  show(stats) {
    this.stats = stats;
    const real = stats.count === "real" ? "shares of real tokens, without padding" : "";
    const samples = stats.window_samples ? `last window: ${grouped(stats.window_samples)} samples` : "";
    this.text("count", [real, samples].filter(Boolean).join("; "));
    this.showSources(this.rowsOf(stats.sources));
    this.showReported(stats.reported);
    this.showReaders(stats.readers);
    if (this.limit < stats.sources.length) {
      this.limit += ROWS_A_FRAME;
      requestAnimationFrame(() => this.show(this.stats));
    }
  }

  // Of many sources their groups, unless somebody looks for one; and of many rows the first, and the rest as one.
  rowsOf(sources) {
    const { params } = this.run;
    const canGroup = isGrouped(sources, MANY);
    const inGroups = canGroup && params.by !== "sources" && !params.filter;
    this.hide("by", !canGroup);
    this.slot("groups").setAttribute("aria-pressed", String(inGroups));
    this.slot("each").setAttribute("aria-pressed", String(!inGroups));
    const rows = sorted(inGroups ? groupRows(sources) : [...sources], params);
    const shown = rows.length < sources.length && !inGroups ? `${rows.length} of ${sources.length}` : `${sources.length} sources`;
    this.text("shown", inGroups ? `${shown} in ${rows.length} groups` : shown);
    const cut = !params.all && rows.length > MANY + 1;
    this.text("more", cut ? `Show all ${grouped(rows.length)}` : "");
    this.hide("more", !cut);
    if (!cut) return rows;
    const top = params.sort ? rows : [...rows].sort((a, b) => b.tokens - a.tokens || a.id - b.id);
    const rest = top.slice(MANY);
    return [...top.slice(0, MANY), merged("rest", `${grouped(rest.length)} others`, rest)];
  }

  async refresh() {
    await this.run.history.refresh();
    const { curves, version } = this.run.history;
    if (!curves || version === this.version) return;
    this.version = version;
    const points = shownPoints(curves, false);
    this.curves = new Map(curves.sources.map((source) => [source.id, smallCurve(curves, points, source.loss)]));
    this.show(this.stats);
    this.showChart();
  }

  follow() {
    this.showChoices();
    if (this.stats) this.show(this.stats);
    this.showChart();
  }

  close() {
    this.chart.close();
  }

  // Sorting and filtering

  change(params) {
    this.run.keep({ ...this.run.params, ...params });
    this.follow();
  }

  // The column that it is sorted by already turns round.
  sortBy(column) {
    const { sort, down } = this.run.params;
    const turned = sort === column ? !down : column !== "alias";
    this.change({ sort: column, down: column && turned ? "1" : "" });
  }

  showChoices() {
    const { filter = "", sort = "", down = "" } = this.run.params;
    if (this.slot("filter").value !== filter) this.slot("filter").value = filter;
    this.slot("sort").value = Object.hasOwn(COLUMNS, sort) ? sort : "";
    this.text("turn", down ? "greatest first" : "least first");
    this.slot("turn").disabled = !sort;
    for (const button of this.slot("table").tHead.querySelectorAll("button")) {
      const heading = button.closest("th");
      if (button.dataset.sort === sort) heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      else heading.removeAttribute("aria-sort");
    }
  }

  // Of the first sources of the table that have a loss.
  showChart() {
    if (this.stats && this.run.history.curves) this.chart.show(this.run.history.curves, sorted([...this.stats.sources], this.run.params).map((source) => source.id));
  }

  showSources(sources) {
    const column = (name) => this.stats.sources.map((source) => source[name]);
    const coarse = isCoarse(column("window_share"), column("target_share"), this.stats.window_samples);
    const scale = scaleFor(Math.max(...sources.flatMap((s) => [s.expected_share, s.actual_share, s.window_share])));
    this.text("scale", `${scale * 100}\u00a0%`);
    const width = (share) => `${Math.min(1, share / scale) * 100}%`;
    keep(this.slot("sources"), this.rows, sources.slice(0, this.limit), (source) => source.id, "source", (row, source) => {
      row.text("alias", source.alias);
      if (source.of && source.group) row.attribute("link", "href", this.run.href("sources", { ...this.run.params, by: "sources", filter: source.group }));
      row.text("spec", source.spec === source.alias ? "" : source.spec);
      row.notice("exhausted", source.exhausted ? "exhausted" : "");
      row.text("exhausted", source.exhausted ? "exhausted" : "", `${grouped(source.dropped_tokens)} tokens filled no sample`);
      row.notice("skipped", source.skipped_tokens ? `${compact(source.skipped_tokens)} tokens skipped` : "");
      row.notice("bad", source.bad_rows ? `${compact(source.bad_rows)} bad rows` : "");
      row.notice("labels", source.label_share === null ? "" : source.label_share ? `${percent(source.label_share)} of labels count` : "no label counts");
      row.style("actual", "width", width(source.actual_share));
      // What differs by whole samples alone is no deviation.
      row.style("window", "width", width(coarse && source.window_share !== null ? source.target_share : source.window_share));
      row.style("expected", "left", width(source.expected_share));
      for (const name of ["target_share", "expected_share", "actual_share", "window_share"]) {
        const share = source[name];
        if (share === null) row.text(name, dash, "no commit in the last 30 s");
        else row.text(name, percent(share), `${(share * 100).toFixed(6)} %`);
      }
      this.showLoss(row, source);
      this.showCounters(row, source);
    });
  }

  showCounters(row, source) {
    for (const name of ["tokens", "rows", "samples"]) row.number(name, source[name]);
    if (source.padding_tokens || source.cut_documents) {
      const cut = source.cut_rate === null ? "" : `, ${percent(source.cut_rate)} of the rows cut`;
      const lost = source.lost_tokens ? ` (${grouped(source.lost_tokens)} tokens lost)` : "";
      row.text("tokens", compact(source.tokens), `${grouped(source.tokens)}; ${percent(source.fill_rate)} filled${cut}${lost}`);
    }
    const without = [
      source.bad_rows ? `${grouped(source.bad_rows)} did not decode` : "",
      source.filtered_rows ? `${grouped(source.filtered_rows)} did not pass the filter, or are blank lines` : "",
      source.excluded_rows ? `${grouped(source.excluded_rows)} of each epoch are left out` : "",
    ].filter(Boolean);
    if (without.length) row.text("rows", compact(source.rows), [grouped(source.rows), ...without].join("; "));
    const epochs = source.epochs === null ? "∞" : compact(source.epochs);
    row.text("epochs", `${source.epoch.toFixed(2)} of ${epochs}`, `${source.epoch} passes so far`);
    if (source.exhausted) row.text("remaining", "0", "exhausted");
    else if (source.remaining_samples === null) row.text("remaining", dash, "not known");
    else row.text("remaining", `≈\u00a0${compact(source.remaining_samples)}`, `about ${grouped(source.remaining_samples)}`);
  }

  showLoss(row, source) {
    row.text("loss", loss(source.loss), source.loss === null ? "none was reported" : `smoothed; ${loss(source.last_loss)} in the last report`);
    row.attribute("line", "points", this.curves.get(source.id) ?? "");
  }

  // Only where text is read by others than the server.
  showReaders(readers) {
    this.hide("readers", !readers);
    if (!readers) return;
    this.text("readers-away", readers.away);
    keep(this.slot("reader-sources"), this.readerSources, readers.sources, (source) => source.id, "reader-source", (row, source) => {
      row.text("alias", source.alias);
      for (const name of ["rows_ahead", "asked_again", "tokens"]) row.number(name, source[name]);
      row.text("waiting", source.waiting_for);
      row.text("cost", source.ns_per_token.toFixed(1));
    });
    keep(this.slot("reader-nodes"), this.readerNodes, readers.nodes, (node) => node.name, "reader-node", (row, node) => {
      row.text("name", node.name);
      row.text("cpus", String(node.cpus));
      for (const name of ["answers", "tokens"]) row.number(name, node[name]);
      row.text("cost", node.ns_per_token.toFixed(1));
    });
  }

  showReported(reported) {
    this.slot("table").classList.toggle("with-losses", reported !== null);
    if (reported === null) {
      this.notice("reported", "");
      return;
    }
    const parts = [`Losses of step ${grouped(reported.step)}, sample ${grouped(reported.sample_index)}, ${ago(reported.age_s)}`];
    if (reported.loss !== null) parts.push(`${loss(reported.loss)} over all`);
    if (reported.learning_rate !== null) parts.push(`learning rate ${reported.learning_rate.toExponential(2)}`);
    this.notice("reported", parts.join("; "));
  }
}
