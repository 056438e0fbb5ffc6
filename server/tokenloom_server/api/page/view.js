// Copies of the templates in index.html, and their parts by name.
//
// Texts from the server (aliases, specs, errors) are other people's: they only ever become textContent or a title.
// Rows are kept and updated in place, so that focus, selection and screen readers keep their place.

import { compact, dash, escaped, grouped } from "./numbers.js";

export class View {
  constructor(template) {
    this.root = document.getElementById(template).content.cloneNode(true).firstElementChild;
    this.texts = new Map(); // data-text: a part that shows a text
    this.slots = new Map(); // data-slot: any other part
    this.styles = new Map(); // those that were set
    for (const part of [this.root, ...this.root.querySelectorAll("[data-text], [data-slot]")]) {
      if (part.dataset.text) this.texts.set(part.dataset.text, part);
      if (part.dataset.slot) this.slots.set(part.dataset.slot, part);
    }
  }

  slot(name) {
    return this.slots.get(name);
  }

  text(name, value, exact) {
    const part = this.texts.get(name);
    const shown = escaped(value);
    if (part.textContent !== shown) part.textContent = shown;
    if (exact !== undefined && part.title !== escaped(exact)) part.title = escaped(exact);
    return part;
  }

  // The next three touch the document only where something changes: rows are updated each second.
  attribute(name, attribute, value) {
    const part = this.slot(name);
    if (part.getAttribute(attribute) !== String(value)) part.setAttribute(attribute, value);
  }

  style(name, property, value) {
    // A browser gives back another spelling than it was given.
    const key = `${name} ${property}`;
    if (this.styles.get(key) === value) return;
    this.styles.set(key, value);
    this.slot(name).style.setProperty(property, value);
  }

  hide(name, hidden) {
    const part = this.slots.get(name) ?? this.texts.get(name);
    if (part.hidden !== hidden) part.hidden = hidden;
  }

  number(name, n, unit = "") {
    return this.text(name, n === null ? dash : compact(n), n === null ? "not known" : `${grouped(n)}${unit}`);
  }

  // A text that is only there when it says something.
  notice(name, value) {
    this.text(name, value);
    this.hide(name, !value);
  }
}

// Makes the children of a parent the views of these items, in this order. `kept`: a Map of views by the items' keys.
export function keep(parent, kept, items, key, template, update) {
  const left = new Set(kept.keys());
  items.forEach((item, at) => {
    const id = key(item);
    left.delete(id);
    if (!kept.has(id)) kept.set(id, new View(template));
    const view = kept.get(id);
    if (parent.children[at] !== view.root) parent.insertBefore(view.root, parent.children[at] ?? null);
    update(view, item);
  });
  for (const id of left) {
    kept.get(id).root.remove();
    kept.delete(id);
  }
}
