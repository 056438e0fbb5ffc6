// The shares of the tab Mix as a table: for screen readers, and for whoever wants numbers.

import { compact, dash, escaped, moment, percent } from "./numbers.js";

const ROWS = 12; // evenly over the points

export class MixTable {
  // `details`: a <details> with an empty table. It is only filled while it is open.
  constructor(details) {
    this.details = details;
    this.table = details.querySelector("table");
  }

  show(bands, points, curves) {
    if (!this.details.open) return;
    const rows = Math.min(ROWS, points.length);
    const places = Array.from({ length: rows }, (_, row) => Math.round((row * (points.length - 1)) / Math.max(1, rows - 1))).reverse();
    const cell = (tag, text, scope) => {
      const made = document.createElement(tag);
      made.textContent = escaped(text);
      if (scope) made.scope = scope;
      return made;
    };
    const line = (cells) => {
      const made = document.createElement("tr");
      made.append(...cells);
      return made;
    };
    const head = line([cell("th", "Tokens", "col"), cell("th", "Time", "col"), ...bands.map((band) => cell("th", band.alias, "col"))]);
    const body = places.map((at) => {
      const share = (band) => (band.actual[at] === null ? dash : `${percent(band.actual[at])} (${percent(band.planned[at])})`);
      const point = points[at];
      return line([
        cell("th", compact(curves.total_tokens[point]), "row"),
        cell("td", moment(curves.time[point])),
        ...bands.map((band) => cell("td", share(band))),
      ]);
    });
    this.table.tHead.replaceChildren(head);
    this.table.tBodies[0].replaceChildren(...body);
  }
}
