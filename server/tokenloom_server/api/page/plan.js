// The plan of a run from where it is. It costs the server seconds of work, so it is asked for rarely.

import { Refused, SLOW_TIMEOUT_MS } from "./ask.js";

const EVERY_MS = 15 * 60 * 1000;

export class RunPlan {
  constructor(ask) {
    this.ask = ask;
    this.plan = null; // the answer of GET …/plan
    this.trouble = "";
    this.of = null; // what it was made of
    this.askedAt = -Infinity;
  }

  // Asks anew where a launch or a revision changed what is to come, or after a long while.
  async refresh({ generation, revision, next_revision: next }) {
    const of = [generation, revision, next?.number].join();
    if (of === this.of && performance.now() - this.askedAt < EVERY_MS) return;
    Object.assign(this, { of, askedAt: performance.now() });
    try {
      this.plan = await this.ask("plan", { timeout: SLOW_TIMEOUT_MS });
      this.trouble = "";
    } catch (error) {
      if (!(error instanceof Refused)) {
        this.of = null;
        throw error;
      }
      this.plan = null;
      this.trouble = error.message;
    }
  }
}
