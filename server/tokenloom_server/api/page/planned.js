// A plan as a picture: stacked shares over the tokens of the run, as it is and as a change would make it.

import { compact, dash, grouped, percent } from "./numbers.js";
import { View } from "./view.js";

const [WIDTH, HEIGHT] = [600, 150];
const COLOURS = 12; // of page.css
const sourceColour = (place) => `var(--source-${place < COLOURS ? place : "other"})`;

const draw = (svg, name, attributes) => {
  const made = document.createElementNS(svg.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  return made;
};

// The areas of a plan's shares between two totals of tokens, into an SVG element; `mark`: the total where a change begins.
function drawShares(svg, plan, [begin, end], mark) {
  const across = (tokens) => (((tokens - begin) / Math.max(1, end - begin)) * WIDTH).toFixed(2);
  const below = plan.segments.map(() => 0);
  const areas = plan.sources.map((source, at) => {
    const [top, bottom] = [[], []];
    for (const [i, segment] of plan.segments.entries()) {
      const [left, right] = [across(segment.from_tokens), across(segment.until_tokens)];
      const [low, high] = [below[i], below[i] + segment.shares[source.id]].map((share) => ((1 - share) * HEIGHT).toFixed(2));
      bottom.unshift(`${right},${low} ${left},${low}`);
      top.push(`${left},${high} ${right},${high}`);
      below[i] += segment.shares[source.id];
    }
    const area = draw(svg, "polygon", { points: [...top, ...bottom].join(" ") });
    area.style.fill = sourceColour(at);
    return area;
  });
  const ends = plan.endings.map(({ tokens }) => draw(svg, "line", { x1: across(tokens), x2: across(tokens), y1: 0, y2: HEIGHT, class: "ending" }));
  const marks = mark > begin && mark < end ? [draw(svg, "line", { x1: across(mark), x2: across(mark), y1: 0, y2: HEIGHT, class: "mark" })] : [];
  svg.replaceChildren(...areas, ...ends, ...marks);
}

// Of the tokens that a plan tells of, the share of each source, by its id.
function sharesOf(plan) {
  const total = plan.until_tokens - plan.from_tokens;
  return plan.sources.map(({ id }) =>
    plan.segments.reduce((sum, { shares, from_tokens, until_tokens }) => sum + shares[id] * (until_tokens - from_tokens), 0) / Math.max(1, total));
}

const endOf = (plan) => `${plan.ends ? "ends at" : "up to"} ${compact(plan.until_tokens)} tokens`;
const outOf = (source) => (source?.exhausted_at_tokens ? `at ${compact(source.exhausted_at_tokens)}` : source?.exhausted ? "already" : dash);

// Fills the parts of a view: `picture-now`, `picture-then`, their captions, and the rows by source.
export function showPlanned(view, now, then, mark) {
  const range = [Math.min(now.from_tokens, then.from_tokens), Math.max(now.until_tokens, then.until_tokens)];
  for (const [name, plan] of [["now", now], ["then", then]]) {
    drawShares(view.slot(`picture-${name}`), plan, range, mark);
    view.text(`caption-${name}`, `${name === "now" ? "As it is" : "With this change"}: ${endOf(plan)}`, plan.reason);
  }
  view.text("range-from", compact(range[0]), `${grouped(range[0])} tokens`);
  view.text("range-until", `${compact(range[1])} tokens`, `${grouped(range[1])} tokens`);
  const [before, after] = [sharesOf(now), sharesOf(then)];
  view.slot("planned-rows").replaceChildren(...then.sources.map((source, at) => {
    const row = new View("planned-source");
    row.slot("swatch").style.background = sourceColour(at);
    row.text("alias", source.alias);
    row.text("share-now", now.sources[at] ? percent(before[at]) : dash);
    row.text("share-then", percent(after[at])).classList.toggle("strong", Math.abs(after[at] - (before[at] ?? 0)) > 0.0005);
    row.text("out-now", outOf(now.sources[at]));
    row.text("out-then", outOf(source)).classList.toggle("strong", outOf(source) !== outOf(now.sources[at]));
    return row.root;
  }));
}
