// What was recorded of a run over time: asked for once as a whole, and then for what is new.

const EVERY_MS = 10000; // no point comes sooner
const POINTS = 800;
const NEW_POINTS = 200; // as many points that came one by one as are kept before the whole is asked for again

// Lists with a value for each point; those of the sources lie in `sources`.
const isColumn = (value) => Array.isArray(value);

export class RunHistory {
  constructor(ask) {
    this.ask = ask;
    this.curves = null; // the answer of GET …/history
    this.events = []; // oldest first
    this.version = 0; // counts changes of the curves
    this.grown = 0;
    this.askedAt = -Infinity;
    this.asking = null;
  }

  // Brings both up to date; many may wait for one answer.
  refresh() {
    if (performance.now() - this.askedAt < EVERY_MS) return this.asking ?? Promise.resolve();
    this.askedAt = performance.now();
    this.asking = this.update().finally(() => {
      this.asking = null;
    });
    return this.asking;
  }

  async update() {
    const known = this.curves?.time.length ? this.curves : null;
    if (known && this.grown < NEW_POINTS) {
      const lastEvent = this.events.at(-1)?.time;
      const [newer, { events }] = await Promise.all([
        this.ask(`history?from=${known.time.at(-1)}&points=${NEW_POINTS}`),
        this.ask(lastEvent === undefined ? "events" : `events?from=${lastEvent}`),
      ]);
      if (this.append(newer)) {
        const ids = new Set(this.events.map((event) => event.id));
        this.events.push(...events.filter((event) => !ids.has(event.id)));
        return;
      }
    }
    const [curves, { events }] = await Promise.all([this.ask(`history?points=${POINTS}`), this.ask("events")]);
    Object.assign(this, { curves, events, grown: 0 });
    this.version += 1;
  }

  // Whether what came goes on where the known curves end: a new launch may have taken points back.
  append(newer) {
    const { curves } = this;
    const sources = newer.sources.map((source) => source.id).join();
    const same = sources === curves.sources.map((source) => source.id).join();
    if (!same || newer.generation.some((generation) => generation !== curves.generation.at(-1))) return false;
    const from = newer.time.findIndex((time) => time > curves.time.at(-1));
    if (from < 0) return true;
    const extend = (all, more) => {
      for (const [name, value] of Object.entries(more)) if (isColumn(value) && name !== "sources") all[name].push(...value.slice(from));
    };
    newer.sources.forEach((source, at) => extend(curves.sources[at], source));
    extend(curves, newer);
    this.grown += newer.time.length - from;
    this.version += 1;
    return true;
  }
}
