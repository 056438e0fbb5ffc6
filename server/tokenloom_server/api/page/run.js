// A run: what stands above its tabs, and the tab that is shown.
//
// A tab is a class with
//   constructor(run, root)  run: {name, url, params, history, plan, ask(path, options), href(tab, params), keep(params)};
//                           root: where it puts what it shows; params: those of the address, a plain object of texts
//   show(stats)             with every poll, each second, the run's stats
//   refresh()               after each show; asks for more, as rarely as it can, and never twice at once. What the server
//                           refuses is shown above the tab
//   follow(params)          the address has changed to these (back, forward, a link), while the tab is open; may be left out
//   close()                 the tab is left

import { Refused, ask } from "./ask.js";
import { EventsTab } from "./events.js";
import { RunHistory } from "./history.js";
import { MixTab } from "./mix.js";
import { MixtureTab } from "./mixture.js";
import { ago, dash, grouped } from "./numbers.js";
import { RunPlan } from "./plan.js";
import { RanksTab } from "./ranks.js";
import { currentRoute, href, replaceRoute } from "./route.js";
import { SamplesTab } from "./samples.js";
import { SourcesTab } from "./sources.js";
import { example, paceNote, pinNote, rate, stateOf } from "./state.js";
import { View } from "./view.js";

// In the order of the navigation; the first is shown where the address names none.
const TABS = [
  ["mix", "Mix", MixTab],
  ["sources", "Sources", SourcesTab],
  ["samples", "Samples", SamplesTab],
  ["ranks", "Ranks", RanksTab],
  ["mixture", "Mixture", MixtureTab],
  ["events", "Events", EventsTab],
];

export class RunView extends View {
  constructor(name) {
    super("run");
    this.name = name;
    this.url = `v1/runs/${encodeURIComponent(name)}`;
    this.askRun = (path, options) => ask(`${this.url}/${path}`, options);
    this.history = new RunHistory(this.askRun); // both outlive a tab
    this.plan = new RunPlan(this.askRun);
    this.tab = null;
    this.tabName = null;
    this.text("run", name);
    for (const [tab, title] of TABS) {
      const link = document.createElement("a");
      link.textContent = title;
      link.dataset.tab = tab;
      link.href = href(name, tab);
      this.slot("tabs").append(link);
    }
  }

  // Shows the tab that the address names.
  follow(tabName, params) {
    const [name, title, Tab] = TABS.find(([each]) => each === tabName) ?? TABS[0];
    if (this.tabName === name) {
      this.run.params = params;
      this.tab.follow?.(params);
      return;
    }
    this.tab?.close();
    this.tabName = name;
    for (const link of this.slot("tabs").children) {
      if (link.dataset.tab === name) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    const root = document.createElement("section");
    root.className = `tab ${name}-tab`;
    root.setAttribute("aria-label", title);
    this.slot("tab").replaceChildren(root);
    this.notice("tab-trouble", "");
    this.refreshing = null;
    const run = {
      name: this.name,
      url: this.url,
      params,
      history: this.history,
      plan: this.plan,
      ask: this.askRun,
      href: (tab, query) => href(this.name, tab, query),
      keep: (query) => {
        run.params = query;
        // Whoever went elsewhere meanwhile stays there.
        if (this.run === run && currentRoute().run === this.name) replaceRoute(this.name, name, query);
      },
    };
    this.run = run;
    this.tab = new Tab(this.run, root);
    if (this.stats) this.showTab(this.stats);
  }

  async refresh(server) {
    try {
      const stats = await ask(`${this.url}/stats`);
      this.stats = stats;
      this.show(stats, server);
      this.showTab(stats);
      this.root.classList.remove("stale");
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.notice("trouble", `These figures cannot be read now: ${error.message}`);
      this.root.classList.add("stale");
    }
  }

  showTab(stats) {
    const tab = this.tab;
    tab.show(stats);
    if (this.refreshing === tab) return;
    this.refreshing = tab;
    const say = (words) => this.tab === tab && this.notice("tab-trouble", words);
    tab.refresh().then(
      () => say(""),
      (error) => {
        if (error instanceof Refused) say(error.message);
        else if (error.name !== "AbortError") console.warn(error); // the next poll says whether the server is away
      },
    ).finally(() => {
      if (this.refreshing === tab) this.refreshing = null;
    });
  }

  close() {
    this.tab?.close();
    this.root.remove();
  }

  show(stats, server) {
    const begun = stats.generation > 0;
    const connected = stats.ranks.filter((rank) => rank.connected).length;
    this.text("stream", stats.stream);
    this.showState(stats, begun, connected);
    this.hide("no-trainer", begun || stats.sample_index > 0);
    this.text("example", example(stats.run, server.grpc_address));

    this.number("total_tokens", stats.total_tokens);
    this.text("tokens_per_s", rate(stats.tokens_per_s), `${grouped(stats.tokens_per_s)} per second`);
    this.text("sample_index", grouped(stats.sample_index), "committed");
    const ahead = stats.produced_index - stats.sample_index;
    this.text("produced", `${grouped(ahead)} more produced`, `up to ${grouped(stats.produced_index)}`);
    this.text("world", begun ? `${grouped(stats.world_size)} × ${grouped(stats.batch_size)}` : dash);
    this.text("step", begun ? `${grouped(stats.world_size * stats.batch_size)} samples a micro-step` : "no trainer yet");
    this.text("generation", begun ? grouped(stats.generation) : dash);
    this.text("connected", begun ? `${connected} of ${grouped(stats.world_size)} connected` : "none opened yet");
    this.text("window_fill", `${Math.round(stats.window_fill * 100)}\u00a0% full`);
    this.style("window", "width", `${Math.min(1, stats.window_fill) * 100}%`);
    this.text("commit_age", ago(stats.ledger.last_commit_age_s), `at sample ${grouped(stats.ledger.last_commit_index)}`);
    this.text("ledger", stats.ledger.available ? "ledger available" : "ledger away", stats.ledger.backend);

    this.notice("pin", pinNote(stats.pin));
    this.text("digest", stats.digest, `at sample ${grouped(stats.sample_index)}`);
    for (const fact of ["run_uid", "tokenizer"]) this.text(fact, stats[fact]);
    this.text("seed", String(stats.seed));
    this.text("sequence_length", `${grouped(stats.sequence_length)} tokens`);
    this.text("ledger_backend", stats.ledger.backend);
  }

  showState(stats, begun, connected) {
    const away = stats.ranks.filter((rank) => rank.state === "away").length;
    const [state, words] = stateOf(stats, connected, away);
    this.attribute("state", "data-state", state);
    this.text("state", words);
    this.text("waiting", begun && !stats.error && !stats.ended ? paceNote(stats) : "");
    this.notice("error", stats.error ? `The run has stopped: ${stats.error}` : "");
    this.notice("ended", stats.ended ? `The data has ended: ${stats.ended}` : "");
    this.notice("trouble", stats.ledger.available ? stats.warning : `The ledger is away: ${stats.ledger.error ?? "no reason known"}`);
  }
}
