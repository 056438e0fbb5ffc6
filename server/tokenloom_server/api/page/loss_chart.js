// The losses that trainers reported, by source, as a chart over tokens; and as small curves beside the sources.

import { COLOURS, Chart, axis, colour, sourceColour, tick, tokenAxis } from "./chart.js";
import { compact, loss } from "./numbers.js";
import { shownPoints } from "./mix_data.js";
import { keep } from "./view.js";

const HEIGHT = 260;
const CURVE_POINTS = 72;
const hasLoss = (source) => source.loss.some((value) => value !== null);

export class LossChart {
  // `view` has the slots `losses`, `loss-chart`, `loss-keys` and the text `loss-place`.
  constructor(view) {
    this.view = view;
    this.chart = null;
    this.keys = new Map();
    this.shape = "";
  }

  // `order`: ids of sources; the first of them that have a loss are shown.
  show(curves, order) {
    const byId = new Map(curves.sources.map((source) => [source.id, source]));
    const shown = order.map((id) => byId.get(id)).filter((source) => source && hasLoss(source)).slice(0, COLOURS);
    const points = shownPoints(curves, false);
    this.view.slot("losses").hidden = !shown.length || points.length < 2; // a curve needs two
    if (this.view.slot("losses").hidden) return;
    const column = (values) => points.map((at) => values[at]);
    this.lines = [{ id: -1, alias: "all sources", values: column(curves.loss) }, ...shown.map(({ id, alias, loss: own }) => ({ id, alias, values: column(own) }))];
    this.xs = column(curves.total_tokens);
    const data = [this.xs, ...this.lines.map((line) => line.values)];
    const shape = this.lines.map((line) => line.id).join();
    if (shape !== this.shape) {
      this.close();
      this.shape = shape;
      this.chart = new Chart(this.view.slot("loss-chart"), this.options(), data);
    }
    this.chart.show(data, [this.xs[0], this.xs.at(-1)]);
    this.showKeys(null);
  }

  options() {
    const paint = (at) => (at === 0 ? colour("ink") : sourceColour(at - 1));
    const line = (_, at) => ({ stroke: () => paint(at), width: at === 0 ? 2.5 : 1.5, spanGaps: true, points: { show: false } });
    return {
      height: HEIGHT,
      padding: [8, 10, 0, 0],
      scales: { x: { time: false, auto: false } },
      cursor: { y: false, points: { size: 7 }, drag: { x: true, y: false, dist: 4 } },
      hooks: { setCursor: [(plot) => this.showKeys(plot.cursor.left < 0 ? null : plot.cursor.idx)] },
      series: [{}, ...this.lines.map(line)],
      axes: [tokenAxis(), axis({ values: (_, splits) => splits.map(tick), size: 52 })],
    };
  }

  showKeys(at) {
    const newest = (values) => values.findLast((value) => value !== null) ?? null;
    this.view.text("loss-place", at === null ? "The newest" : `At ${compact(this.xs[at])} tokens`);
    keep(this.view.slot("loss-keys"), this.keys, this.lines, (line) => line.id, "loss-key", (key, line) => {
      const place = this.lines.indexOf(line);
      key.style("swatch", "background-color", place ? sourceColour(place - 1) : colour("ink"));
      key.text("alias", line.alias);
      key.text("loss", loss(at === null ? newest(line.values) : line.values[at] ?? null));
    });
  }

  close() {
    this.chart?.close();
    this.chart = null;
    this.shape = "";
  }
}

// A curve in a box of 72 × 22: over tokens, between the least and the greatest of its values, or from `least` on.
// `points`: those that were not taken back.
export function smallCurve(curves, points, values, least = Infinity) {
  const all = points.filter((at) => values[at] !== null);
  if (all.length < 2) return "";
  const step = Math.max(1, (all.length - 1) / (CURVE_POINTS - 1));
  const known = Array.from({ length: Math.min(all.length, CURVE_POINTS) }, (_, i) => all[Math.min(all.length - 1, Math.round(i * step))]);
  const x = curves.total_tokens;
  const [left, right] = [x[known[0]], x[known.at(-1)]];
  const shown = known.map((at) => values[at]);
  const [low, high] = [Math.min(least, ...shown), Math.max(...shown)];
  const down = (value) => (high > low ? 2 + ((high - value) / (high - low)) * 18 : 11);
  return known.map((at) => `${(((x[at] - left) / (right - left || 1)) * 72).toFixed(1)},${down(values[at]).toFixed(1)}`).join(" ");
}
