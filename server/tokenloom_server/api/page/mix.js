// The tab Mix: what the run's tokens were made of, beside what was planned, and how fast they came.
//
// In the address: share=sofar or deviation, by=sources where there are groups, over=time, from= and to= (the zoom) and at= (a place to point to), in tokens or Unix time.

import { COLOURS, Chart, axis, colour, hatch, sourceColour, textScale, tick, timeAxis, tokenAxis } from "./chart.js";
import { title } from "./events.js";
import { isGrouped } from "./groups.js";
import { MixTable } from "./mix_table.js";
import { bandsOf, markedEvents, plannedSegments, rewoundParts, samplesLately, shownPoints, stacked, wholeRange } from "./mix_data.js";
import { compact, dash, grouped, lasting, moment, percent, points as inPoints } from "./numbers.js";
import { View, keep } from "./view.js";

/* global uPlot */

const NEAR_PX = 6; // how near to a mark the pointer counts as on it
const STEP = 1.6; // of a zoom by keys or buttons
const MARK_COLOURS = { revision: "accent", launch: "muted", fork: "accent", skip: "expected", rewind: "warn", exhausted: "ink", rank: "bad", straggler: "warn", error: "bad", end: "ink" };

// Whether a range of tokens or seconds can be shown: uPlot does not end where ticks are as near as floats are.
const isWide = (from, to) => to - from >= Math.max(1, 1e-10 * Math.max(-from, to));

export class MixTab extends View {
  constructor(run, root) {
    super("mix");
    this.run = run;
    this.stats = null;
    this.drawn = null; // what the charts were drawn of
    this.charts = [];
    this.keys = new Map();
    this.cursor = null; // x under the pointer
    this.table = new MixTable(this.slot("table"));
    this.slot("plan").href = `${run.url}/plan.svg`;
    for (const [slot, change] of [["lately", { share: "" }], ["sofar", { share: "sofar" }], ["deviation", { share: "deviation" }], ["groups", { by: "" }], ["each", { by: "sources" }], ["tokens", { over: "" }], ["time", { over: "time" }]]) {
      const elsewhere = "over" in change ? { from: "", to: "", at: "" } : {};
      this.slot(slot).addEventListener("click", () => this.change({ ...change, ...elsewhere }));
    }
    this.slot("zoom-in").addEventListener("click", () => this.zoomBy(1 / STEP));
    this.slot("zoom-out").addEventListener("click", () => this.zoomBy(STEP));
    this.slot("whole-plan").addEventListener("click", () => this.zoom(0, this.segments.at(-1).until));
    this.slot("reset").addEventListener("click", () => this.reset());
    this.slot("chart").addEventListener("keydown", (event) => this.press(event));
    this.slot("table").addEventListener("toggle", () => this.draw());
    root.append(this.root);
    this.showChoices();
  }

  show(stats) {
    this.stats = stats;
    this.text("count", stats.count === "real" ? "shares of real tokens, without padding" : "");
    this.hide("by", !isGrouped(stats.sources, COLOURS));
    this.showEnd();
  }

  async refresh() {
    await this.run.history.refresh();
    this.draw();
    await this.run.plan.refresh(this.stats);
    this.draw();
  }

  follow() {
    this.showChoices();
    this.draw(true);
  }

  close() {
    for (const chart of this.charts) chart.close();
    this.charts = [];
  }

  // What the address says

  get overTime() {
    return this.run.params.over === "time";
  }

  get share() {
    const { share } = this.run.params;
    return ["sofar", "deviation"].includes(share) ? share : "lately";
  }

  // By source id, where groups are shown.
  get groups() {
    const { sources } = this.stats;
    return this.run.params.by === "sources" || !isGrouped(sources, COLOURS) ? null : new Map(sources.map(({ id, group }) => [id, group]));
  }

  get range() {
    const [from, to] = [Number(this.run.params.from || NaN), Number(this.run.params.to || NaN)];
    return isWide(from, to) ? [from, to] : wholeRange(this.xs, this.segments, this.overTime);
  }

  change(params) {
    this.run.keep({ ...this.run.params, ...params });
    this.follow();
  }

  showChoices() {
    const { by, over, from } = this.run.params;
    for (const [slot, on] of [...["lately", "sofar", "deviation"].map((each) => [each, this.share === each]), ["groups", by !== "sources"], ["each", by === "sources"], ["tokens", over !== "time"], ["time", over === "time"]]) {
      this.slot(slot).setAttribute("aria-pressed", String(on));
    }
    this.slot("reset").disabled = !from;
    this.hide("legend", this.share === "deviation");
  }

  // Zoom

  zoom(from, to) {
    if (isWide(from, to)) this.change({ from: from.toFixed(0), to: to.toFixed(0) });
  }

  zoomBy(factor) {
    if (!this.xs?.length) return;
    const [from, to] = this.range;
    const middle = this.cursor ?? (from + to) / 2;
    this.zoom(Math.max(0, middle - (middle - from) * factor), middle + (to - middle) * factor);
  }

  reset() {
    this.change({ from: "", to: "", at: "" });
    this.slot("chart").focus();
  }

  // Left and right go from point to point, plus and minus zoom, escape shows all.
  press(event) {
    const plot = this.charts[0]?.plot;
    if (!plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      ArrowLeft: () => this.point(-1),
      ArrowRight: () => this.point(1),
      "+": () => this.zoomBy(1 / STEP),
      "-": () => this.zoomBy(STEP),
      Escape: () => this.reset(),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }

  point(by) {
    const { plot } = this.charts[0];
    const now = plot.cursor.idx ?? (by > 0 ? -1 : this.xs.length);
    const next = Math.min(this.xs.length - 1, Math.max(0, now + by));
    plot.setCursor({ left: plot.valToPos(this.xs[next], "x"), top: 0 });
  }

  // Drawing

  draw(again = false) {
    const { curves, events, version } = this.run.history;
    const { plan } = this.run.plan;
    if (!curves) return;
    const points = shownPoints(curves, this.overTime);
    const early = !points.length; // perhaps all of them were taken back
    this.hide("charts", early);
    this.notice("too-early", early ? "The history begins with the run's first commits: a point every ten seconds." : "");
    this.showEnd();
    if (early) return;
    const of = `${version},${events.length},${this.run.plan.askedAt},${plan !== null},${this.slot("table").open}`;
    if (of === this.drawn && !again) return;
    this.drawn = of;

    const overTime = this.overTime;
    const x = overTime ? curves.time : curves.total_tokens;
    // The first point tells of all from the run's beginning on, which a short run has no other point of.
    const begin = overTime ? x[points[0]] - curves.every_s : 0;
    this.points = points.length < 2 ? [points[0], points[0]] : points;
    this.xs = this.points.map((at) => x[at]);
    if (points.length < 2) this.xs[0] = begin;
    this.bands = bandsOf(curves, this.points, this.share, this.groups);
    this.segments = plan ? plannedSegments(plan, this.bands) : [];
    this.marks = markedEvents(events, overTime);
    this.rewound = rewoundParts(curves, x);
    this.hide("whole-plan", overTime || !this.segments.length);
    const column = (name) => this.points.map((at) => curves[name][at]);
    const data = [
      [this.xs, ...(this.share === "deviation" ? this.bands.map(({ off }) => off) : stacked(this.bands))],
      [this.xs, column("tokens_per_s")],
      [this.xs, column("data_wait_share")],
    ];
    const shape = `${this.bands.map((band) => band.alias).join("\n")}\n${overTime}\n${this.share === "deviation"}`;
    if (shape !== this.shape) {
      this.close();
      this.charts = this.makeCharts(data);
      this.shape = shape;
    }
    this.drawing = true;
    this.charts.forEach((chart, at) => chart.show(data[at], this.range));
    queueMicrotask(() => {
      this.drawing = false;
    });
    this.showPlace();
    this.table.show(this.bands, this.points, curves);
  }

  makeCharts(data) {
    const overTime = this.overTime;
    const xAxis = (options) => (overTime ? timeAxis(options) : tokenAxis(options));
    const common = (height, shown) => ({
      height,
      padding: [8 * textScale(), 10, shown ? 0 : 8, 0],
      scales: { x: { time: overTime, auto: false } },
      cursor: {
        y: false,
        points: { show: false },
        drag: { x: true, y: false, dist: 4 },
        sync: { key: `mix ${this.run.name}`, scales: ["x", null] },
        bind: { dblclick: () => () => this.reset() },
      },
      hooks: {
        setScale: [(plot, key) => key === "x" && this.zoomed(plot)],
        setCursor: [(plot) => shown && this.moved(plot)],
        ...(shown ? { drawAxes: [(plot) => this.drawPlan(plot)], draw: [(plot) => this.drawMarks(plot)] } : {}),
      },
    });
    const share = { range: () => [0, 1] };
    const percents = axis({ values: (_, splits) => splits.map((at) => `${Math.round(at * 100)}\u00a0%`), size: 52, space: 36 });
    const rates = axis({ values: (_, splits) => splits.map(tick), size: 52, space: 26 });
    const hidden = xAxis({ show: false });
    const line = (name, fill) => ({ stroke: () => colour(name), width: 1.5, fill, points: { show: false } });
    const mix = common(Math.round(Math.min(760, Math.max(240, this.slot("chart").clientWidth * 0.28))), true);
    const stepped = uPlot.paths.stepped({ align: -1 });
    const areas = this.bands.map((band, at) => ({
      fill: () => sourceColour(band.id < 0 ? Infinity : at),
      width: 0,
      paths: stepped,
      points: { show: false },
    }));
    if (this.share === "deviation") {
      mix.scales.y = { range: (_, min, max) => [-1.1, 1.1].map((side) => side * Math.max(-min, max, 0.0005)) };
      mix.series = [{}, ...this.bands.map((band, at) => ({ stroke: () => sourceColour(band.id < 0 ? Infinity : at), width: 2, points: { show: false } }))];
      mix.axes = [xAxis(), axis({ values: (_, splits) => splits.map((at) => (at ? inPoints(at, "") : "0")), size: 58, space: 36 })];
    } else {
      mix.scales.y = share;
      mix.series = [{}, ...areas.reverse()];
      mix.axes = [xAxis(), percents];
    }
    const rate = common(96, false);
    rate.scales.y = { range: (_, __, max) => [0, (max || 1) * 1.1] };
    rate.series = [{}, line("accent")];
    rate.axes = [hidden, rates];
    const wait = common(72, false);
    wait.scales.y = share;
    wait.series = [{}, line("expected", () => `${colour("expected")}33`)];
    wait.axes = [hidden, percents];
    return [
      new Chart(this.slot("chart"), mix, data[0]),
      new Chart(this.slot("rate"), rate, data[1]),
      new Chart(this.slot("wait"), wait, data[2]),
    ];
  }

  // A zoom by dragging in one chart holds for all, and stands in the address.
  zoomed(plot) {
    if (this.drawing || !this.charts.length) return;
    const { min, max } = plot.scales.x;
    if (min !== null && max > min) this.zoom(min, max);
  }

  // What is planned: lines of the shares that the weights in force asked for, and the plan's areas after the present.
  drawPlan(plot) {
    const { ctx } = plot;
    const [y0, y1] = [plot.bbox.top, plot.bbox.top + plot.bbox.height];
    const across = (value) => plot.valToPos(value, "x", true);
    const up = (share) => y1 - share * (y1 - y0);
    if (this.share === "deviation") return;
    this.clipped(plot, () => {
      ctx.globalAlpha = 0.38;
      for (const { from, until, shares } of this.overTime ? [] : this.segments) {
        let below = 0;
        shares.forEach((own, at) => {
          ctx.fillStyle = sourceColour(this.bands[at].id < 0 ? Infinity : at);
          ctx.fillRect(across(from), up(below + own), across(until) - across(from), up(below) - up(below + own));
          below += own;
        });
      }
    });
  }

  drawMarks(plot) {
    const { ctx } = plot;
    const { top, height } = plot.bbox;
    const across = (value) => plot.valToPos(value, "x", true);
    const ratio = devicePixelRatio;
    this.clipped(plot, () => {
      ctx.lineWidth = ratio;
      if (this.share !== "deviation") this.drawPlannedLines(plot, across);
      for (const { from, until } of this.rewound) {
        ctx.fillStyle = ctx.strokeStyle = colour("warn");
        const [left, width] = [across(from), Math.max(2, across(until) - across(from))];
        ctx.globalAlpha = 0.14;
        ctx.fillRect(left, top, width, height);
        ctx.globalAlpha = 0.7;
        hatch(ctx, left, top, width, this.overTime ? height : 10 * ratio);
      }
      ctx.globalAlpha = 1;
      for (const { x, event } of this.marks) {
        ctx.strokeStyle = ctx.fillStyle = colour(MARK_COLOURS[event.kind] ?? "muted");
        ctx.setLineDash([4 * ratio, 3 * ratio]);
        ctx.beginPath();
        ctx.moveTo(across(x), top);
        ctx.lineTo(across(x), top + height);
        ctx.stroke();
        ctx.beginPath();
        ctx.arc(across(x), top + 5 * ratio, 4 * ratio, 0, 2 * Math.PI);
        ctx.fill();
      }
      const pointed = Number(this.run.params.at || NaN);
      if (!Number.isNaN(pointed)) {
        ctx.setLineDash([]);
        ctx.lineWidth = 2 * ratio;
        ctx.strokeStyle = colour("ink");
        ctx.strokeRect(across(pointed) - 6 * ratio, top + ratio, 12 * ratio, height - 2 * ratio);
      }
    });
  }

  drawPlannedLines(plot, across) {
    const { ctx } = plot;
    const { top, height } = plot.bbox;
    const below = this.xs.map(() => 0);
    const places = this.xs.map(across);
    ctx.strokeStyle = colour("ink");
    ctx.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath();
    for (const { planned } of this.bands.slice(0, -1)) {
      // A step where other weights came into force.
      let last = null;
      places.forEach((x, at) => {
        below[at] += planned[at];
        const y = top + (1 - below[at]) * height;
        if (last === null) ctx.moveTo(x, y);
        else ctx.lineTo(x, last);
        ctx.lineTo(x, y);
        last = y;
      });
    }
    ctx.stroke();
    ctx.setLineDash([]);
  }

  clipped(plot, draw) {
    const { left, top, width, height } = plot.bbox;
    plot.ctx.save();
    plot.ctx.beginPath();
    plot.ctx.rect(left, top, width, height);
    plot.ctx.clip();
    draw();
    plot.ctx.restore();
  }

  // What is under the pointer, or the newest point

  moved(plot) {
    const { left } = plot.cursor;
    this.cursor = left >= 0 && plot.cursor.idx !== null ? plot.posToVal(left, "x") : null;
    this.near = left < 0 ? null : this.marks.find(({ x }) => Math.abs(plot.valToPos(x, "x") - left) < NEAR_PX);
    this.showPlace();
  }

  showPlace() {
    const { curves } = this.run.history;
    const { cursor, bands, segments } = this;
    const last = this.xs.length - 1;
    const planned = cursor !== null && !this.overTime && cursor > this.xs[last] ? segments.find(({ until }) => cursor <= until) : undefined;
    const at = cursor === null ? last : this.charts[0].plot.valToIdx(cursor);
    const point = this.points[at];
    const parts = planned
      ? [`At ${compact(cursor)} tokens, as planned`]
      : [
          `${cursor === null ? "Now at" : "At"} ${compact(curves.total_tokens[point])} tokens`,
          moment(curves.time[point]),
          `generation ${grouped(curves.generation[point])}, ${grouped(curves.world_size[point])} ranks`,
          `${compact(curves.tokens_per_s[point])} tokens per second`,
          this.share === "lately" ? `shares of ${grouped(samplesLately(curves, this.points, at))} samples` : "",
          curves.data_wait_share[point] === null ? "" : `ranks waited ${percent(curves.data_wait_share[point])}`,
        ];
    const back = cursor === null ? null : this.rewound.find(({ from, until }) => from <= cursor && cursor <= until);
    if (back) parts.push(`a later launch took back what generation ${back.generation} had here`);
    this.text("place", parts.filter(Boolean).join(" · "));
    const event = this.near?.event;
    this.text("event", event ? `${title(event.kind)}, ${moment(event.time)}: ${event.text}` : "");
    keep(this.slot("keys"), this.keys, bands, (band) => band.id, "mix-key", (key, band) => {
      const place = bands.indexOf(band);
      key.style("swatch", "background-color", sourceColour(band.id < 0 ? Infinity : place));
      key.text("alias", band.alias);
      key.attribute("link", "href", this.run.href("sources", band.id < 0 ? { by: "sources" } : { filter: band.alias, by: "sources" }));
      const share = planned ? null : band.actual[at];
      const asked = percent(planned ? planned.shares[place] : band.planned[at]);
      const isOff = this.share === "deviation" && share !== null;
      key.text("actual", share === null ? dash : isOff ? inPoints(band.off[at]) : percent(share));
      key.text("planned", isOff ? `of ${asked}` : `planned ${asked}`);
    });
    const shares = bands.map((band) => `${band.alias} ${percent(band.actual[last] ?? 0)}, planned ${percent(band.planned[last])}`);
    this.attribute("chart", "aria-label", `Shares over ${this.overTime ? "time" : "tokens"}. Now: ${shares.join("; ")}. Left and right go from point to point, plus and minus zoom, Escape shows all.`);
  }

  // When the plan says that the data end.
  showEnd() {
    const { plan, trouble } = this.run.plan;
    if (!plan) {
      this.text("end", trouble && `No plan: ${trouble}`);
      return;
    }
    const left = plan.until_tokens - this.stats.total_tokens;
    const rate = this.stats.tokens_per_s;
    const soon = rate > 0 && left > 0 ? `, in about ${lasting(left / rate)}` : "";
    this.text("end", plan.ends ? `By plan the data end at ${compact(plan.until_tokens)} tokens${soon}: ${plan.reason}` : "By plan the data do not end");
  }
}
