// Charts by uPlot (global, from its own file) in the colours of the page, as wide as their place.

import { compact } from "./numbers.js";

/* global uPlot */

export const COLOURS = 12;

// A colour of page.css, in the scheme of now.
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
export const sourceColour = (place) => colour(place < COLOURS ? `source-${place}` : "source-other");

const dark = matchMedia("(prefers-color-scheme: dark)");

export class Chart {
  // `options`: uPlot's, without width; `host`: where it stands. What it draws asks for colours as it is drawn.
  constructor(host, options, data) {
    this.host = host;
    this.plot = new uPlot({ width: this.width, legend: { show: false }, ...options }, data, host);
    this.sizes = new ResizeObserver(() => {
      if (this.width > 0 && this.width !== this.plot.width) this.plot.setSize({ width: this.width, height: options.height });
    });
    this.sizes.observe(host);
    this.redraw = () => this.plot.redraw(false, true);
    dark.addEventListener("change", this.redraw);
  }

  get width() {
    return this.host.clientWidth;
  }

  // New points, and which part of the x axis is shown.
  show(data, [min, max]) {
    this.plot.batch(() => {
      this.plot.setData(data, false);
      this.plot.setScale("x", { min, max });
    });
  }

  close() {
    this.sizes.disconnect();
    dark.removeEventListener("change", this.redraw);
    this.plot.destroy();
  }
}

// Texts grow with those of the page, which are larger on a wall.
export const textScale = () => parseFloat(getComputedStyle(document.body).fontSize) / 15;

export function axis({ size, space = 50, ...options }) {
  const scale = textScale();
  return {
    stroke: () => colour("muted"),
    font: `${12 * scale}px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif`,
    grid: { stroke: () => colour("line"), width: 1 },
    ticks: { show: false },
    size: size * scale,
    space: space * scale,
    ...options,
  };
}

// 2 T and not 2.00 T.
export const tick = (value) => compact(value).replace(/\.0+(?=\D|$)|(\.\d*?)0+(?=\D|$)/, "$1");
export const tokenAxis = (options) => axis({ values: (_, splits) => splits.map(tick), size: 30, space: 60, ...options });

const DAY_S = 86400;
const clock = (seconds, options) => new Date(seconds * 1000).toLocaleString("en-GB", options);

// Hours and minutes, with the date below where a day begins.
function timeTicks(_, splits, __, ___, step) {
  let last = "";
  return splits.map((at) => {
    const date = clock(at, { day: "numeric", month: "short" });
    const time = clock(at, { hour: "2-digit", minute: "2-digit", ...(step < 60 ? { second: "2-digit" } : {}) });
    const shown = step >= DAY_S ? date : date === last ? time : `${time}\n${date}`;
    last = date;
    return shown;
  });
}

export const timeAxis = (options) => axis({ values: timeTicks, size: 44, ...options });

// Lines of 45 degrees over a part of the chart, in canvas pixels.
export function hatch(context, left, top, width, height) {
  const step = 7 * devicePixelRatio;
  context.save();
  context.beginPath();
  context.rect(left, top, width, height);
  context.clip();
  context.beginPath();
  for (let at = left - height; at < left + width; at += step) {
    context.moveTo(at, top + height);
    context.lineTo(at + height, top);
  }
  context.stroke();
  context.restore();
}
