// The tab Samples: what the model saw, sample by sample, with its documents, and which of their tokens count for the loss.
//
// Each sample has an address (`?index=4096`, and `&generation=2` for a line that was rewound), so that it can be sent to
// somebody. Texts are corpora's: they only ever become textContent.

import { Refused, SLOW_TIMEOUT_MS } from "./ask.js";
import { dash, escaped, grouped } from "./numbers.js";
import { View } from "./view.js";

// A long sample must not freeze the page: what goes beyond is a link to all of it.
const CHARACTERS_SHOWN = 400000;
const DOCUMENTS_SHOWN = 300;
const CHARACTERS_OF_A_PART = 200; // what an element costs, beside its text
const STATES = { committed: "good", produced: "wait", evaluated: "wait", rewound: "warn" };
const LARGEST = 2 ** 53 - 1;

export class SamplesTab extends View {
  constructor(run, root) {
    super("samples");
    this.run = run;
    this.asking = null; // what ends the request under way
    this.index = null;
    this.last = null; // the last sample that is committed
    this.names = "";
    root.append(this.root);
    this.slot("go").addEventListener("submit", (event) => {
      event.preventDefault();
      this.go(Number(this.slot("index").value), this.slot("generation").value);
    });
    this.slot("previous").addEventListener("click", () => this.step(-1));
    this.slot("next").addEventListener("click", () => this.step(1));
    this.slot("random").addEventListener("click", () => this.draw());
    this.onKey = (event) => this.press(event);
    document.addEventListener("keydown", this.onKey);
    this.follow(run.params);
  }

  show(stats) {
    this.last = stats.sample_index - 1;
    this.text("committed", this.last < 0 ? "Nothing is committed yet." : `0 to ${grouped(this.last)} are committed.`);
    const names = stats.sources.map((source) => source.alias);
    if (names.join("\n") !== this.names) {
      this.names = names.join("\n");
      const options = names.map((name, at) => Object.assign(document.createElement("option"), { value: String(at), textContent: escaped(name) }));
      this.slot("source").replaceChildren(...options);
      this.specs = stats.sources.map((source) => source.spec);
    }
    this.slot("random").disabled = this.last < 0;
    if (this.index === null && this.last >= 0) this.go(this.last, "");
  }

  async refresh() {}

  close() {
    this.asking?.abort();
    document.removeEventListener("keydown", this.onKey);
  }

  follow({ index, generation = "" }) {
    if (/^\d{1,16}$/.test(index ?? "")) this.go(Number(index), generation);
  }

  press(event) {
    const typing = event.target.closest?.("input, select, textarea, nav");
    if (typing || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    if (event.key === "ArrowLeft") this.step(-1);
    else if (event.key === "ArrowRight") this.step(1);
    else return;
    event.preventDefault();
  }

  step(by) {
    if (this.index !== null && this.index + by >= 0) this.go(this.index + by, this.slot("generation").value);
  }

  go(index, generation) {
    if (!Number.isInteger(index) || index < 0 || index > LARGEST) return;
    if (this.index === index && this.generation === generation) return;
    this.place(index, generation);
    this.load(pathOf(index, generation));
  }

  // A sample of the source that is chosen.
  draw() {
    const spec = this.specs[Number(this.slot("source").value)];
    this.slot("generation").value = "";
    this.load(`samples?text=true&source=${encodeURIComponent(spec)}`);
  }

  place(index, generation) {
    Object.assign(this, { index, generation });
    // What somebody is typing stays.
    if (document.activeElement !== this.slot("index")) this.slot("index").value = String(index);
    this.slot("generation").value = generation;
    this.slot("previous").disabled = index === 0;
    this.run.keep({ index: String(index), generation });
  }

  async load(path) {
    this.asking?.abort();
    const asking = (this.asking = new AbortController());
    this.root.setAttribute("aria-busy", "true");
    this.notice("trouble", "");
    // Where the answer is there at once, nothing flickers.
    const slow = setTimeout(() => this.notice("status", "The server makes this sample again …"), 300);
    try {
      const sample = await this.run.ask(path, { signal: asking.signal, timeout: SLOW_TIMEOUT_MS });
      if (this.asking === asking) this.present(sample);
    } catch (error) {
      if (this.asking !== asking) return;
      this.slot("sample").hidden = true;
      this.notice("trouble", error instanceof Refused ? error.message : "The server does not answer; try again.");
    } finally {
      clearTimeout(slow);
      if (this.asking === asking) {
        this.notice("status", "");
        this.root.removeAttribute("aria-busy");
      }
    }
  }

  present(sample) {
    if (sample.sample !== this.index) this.place(sample.sample, "");
    this.slot("sample").hidden = false;
    this.text("title", `Sample ${grouped(sample.sample)}`);
    this.slot("state").dataset.state = STATES[sample.status];
    this.text("state", sample.status);
    this.text("alias", sample.source);
    this.text("spec", sample.spec === sample.source ? "" : sample.spec);
    const place = sample.micro_step === null ? "in another ledger"
      : `generation ${sample.generation}, micro-step ${grouped(sample.micro_step)}: place ${sample.place} of rank ${grouped(sample.rank)}`;
    this.text("place", sample.status === "evaluated" ? "evaluated on" : place);
    this.text("number", `${grouped(sample.source_sample)} of its source, from 0`);
    this.text("tokens", grouped(sample.tokens));
    this.text("hash", sample.hash);
    this.slot("all").href = `${this.run.url}/${pathOf(this.index, this.generation)}`;
    this.presentLoss(sample);
    this.presentDocuments(sample);
  }

  presentLoss({ documents, ids }) {
    const uncounted = documents.flatMap(({ parts }) => parts ?? []).reduce((sum, part) => sum + (part.counts ? 0 : part.tokens), 0);
    const whole = ids === null ? "A row of tensors: their types and shapes." : "All tokens count for the loss.";
    this.text("uncounted", uncounted ? `${grouped(uncounted)} tokens do not count for the loss: they are shaded.` : whole);
  }

  presentDocuments(sample) {
    const [blocks, rows] = [[], []];
    let left = CHARACTERS_SHOWN;
    for (const [at, each] of sample.documents.entries()) {
      if (left <= 0 || at === DOCUMENTS_SHOWN) break;
      const block = new View("sample-document");
      left -= write(block.slot("text"), sample, each, left);
      block.text("title", String(at + 1));
      block.text("where", `${each.shard}, row ${grouped(each.row)}`, `tokens ${grouped(each.begin)} to ${grouped(each.end - 1)} of ${grouped(each.row_tokens)}`);
      blocks.push(block.root);
      rows.push(this.row(at, each, block.root));
    }
    this.slot("documents").replaceChildren(...blocks);
    this.slot("rows").replaceChildren(...rows);
    const count = sample.documents.length;
    this.text("count", count === 1 ? "1 document" : `${grouped(count)} documents`);
    this.slot("more").hidden = left > 0 && blocks.length === count;
    this.text("more", blocks.length === count ? "The text goes on." : `The text goes on, with ${grouped(count - blocks.length)} documents more.`);
  }

  row(at, each, block) {
    const row = new View("sample-row");
    row.text("number", String(at + 1), "Show it in the text").addEventListener("click", () => block.scrollIntoView({ block: "start" }));
    row.text("shard", each.shard);
    row.text("row", grouped(each.row));
    row.text("epoch", String(each.epoch));
    row.text("position", grouped(each.position));
    row.text("tokens", `${grouped(each.begin)} to ${grouped(each.end - 1)}`, each.fim ? `rearranged to fill in the middle: ${each.fim}` : "");
    row.text("of", grouped(each.row_tokens));
    return row.root;
  }
}

const pathOf = (index, generation) => `samples/${index}?text=true${generation ? `&generation=${encodeURIComponent(generation)}` : ""}`;

// Writes the text of a document, or its ids where there is no tokeniser, by the parts that count and those that do not;
// returns how much of `left` it took.
function write(root, { ids, documents }, each, left) {
  let begin = each.position - documents[0].position;
  let taken = 0;
  for (const part of each.parts ?? [{ tokens: each.end - each.begin, counts: true, text: each.text }]) {
    if (taken >= left) break;
    const words = part.text ?? (ids === null ? dash : `${ids.slice(begin, begin + part.tokens).join(" ")} `);
    const shown = escaped(words.slice(0, left - taken));
    begin += part.tokens;
    taken += words.length + CHARACTERS_OF_A_PART;
    if (part.counts) root.append(shown);
    else root.append(Object.assign(document.createElement("span"), { className: "uncounted", textContent: shown, title: "does not count for the loss" }));
  }
  root.classList.toggle("ids", each.text === null);
  return taken;
}
