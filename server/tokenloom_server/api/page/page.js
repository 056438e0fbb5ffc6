// Asks the server for its runs' figures once a second and shows them.
//
// Texts from the server (aliases, specs, errors) are other people's: they only ever become textContent.
// Rows are kept and updated in place, so that focus, selection and screen readers keep their place.

const POLL_MS = 1000;
const LONGEST_WAIT_MS = 15000; // between two tries while the server is away
const REQUEST_TIMEOUT_MS = 5000;
const SNAPSHOT_TIMEOUT_MS = 120000; // going forward to a sample index may take a while
const SNAPSHOTS_EVERY = 10; // polls
const LOSSES_EVERY = 5; // polls
const SNAPSHOTS_SHOWN = 10;
const LAG_STEPS = 2; // ranks take their batches when it suits them: only more is worth a look
const SLOW_DATA_SHARE = 0.1; // where every rank waits for data this part of its time, the data sets the pace
const RANKS_SHOWN = 16; // beyond twice as many ranks, only those that lag most

const $ = (id) => document.getElementById(id);
const views = new Map(); // run name → view
let failures = 0;
let awaySince = null;
let wake = () => {};
// In this tab only.
const TOKEN_KEY = "tokenloom-token";
let token = sessionStorage.getItem(TOKEN_KEY) ?? "";

// Numbers

const grouped = (n) => n.toLocaleString("en");
const dash = "–";

function compact(n) {
  if (Math.abs(n) < 10000) return n.toLocaleString("en", { maximumFractionDigits: 1 });
  for (const [unit, size] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]]) {
    // 999,950 is 1.00 M and not 1000 k.
    if (n >= size * 0.9995) return `${(n / size).toPrecision(Math.max(3, String(Math.round(n / size)).length))}\u00a0${unit}`;
  }
  return String(n);
}

const percent = (share) => `${(share * 100).toFixed(share > 0 && share < 0.0995 ? 2 : 1)}\u00a0%`;

function lasting(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)}\u00a0s`;
  if (seconds < 120) return `${Math.round(seconds)}\u00a0s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)}\u00a0min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)}\u00a0h` : `${Math.round(seconds / 86400)}\u00a0days`;
}

const loss = (value) => (value === null ? dash : value.toPrecision(4));

const ago = (seconds) => (seconds === null ? "never" : `${lasting(seconds)} ago`);

// The end of the bars' scale: the least of these that holds every share.
const SCALES = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1];
const scaleFor = (greatest) => SCALES.find((end) => greatest <= end) ?? 1;

// A curve in a box of 72 × 22: over sample indices, between the least and the greatest of its values.
function points(indices, values) {
  const known = values.map((value, at) => [indices[at], value]).filter(([, value]) => value !== null);
  if (known.length < 2) return "";
  const range = (all) => [Math.min(...all), Math.max(...all)];
  const [[left, right], [low, high]] = [range(known.map(([x]) => x)), range(known.map(([, y]) => y))];
  const place = ([x, y]) => {
    const across = ((x - left) / (right - left)) * 72;
    const down = high > low ? 2 + ((high - y) / (high - low)) * 18 : 11;
    return `${across.toFixed(1)},${down.toFixed(1)}`;
  };
  return known.map(place).join(" ");
}

// A control character, or one that turns the direction of writing, becomes JSON's escape of it; lines stay.
const CONTROL = /[\0-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]/gu;
const escaped = (text) =>
  String(text ?? "").replace(CONTROL, (found) => `\\u${found.codePointAt(0).toString(16).padStart(4, "0")}`);

// Views: the parts of a template, by name

class View {
  constructor(template) {
    this.root = $(template).content.cloneNode(true).firstElementChild;
    this.texts = new Map();
    this.slots = new Map();
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

  number(name, n, unit = "") {
    return this.text(name, n === null ? dash : compact(n), n === null ? "not known" : `${grouped(n)}${unit}`);
  }

  // A text that is only there when it says something.
  notice(name, value) {
    this.text(name, value).hidden = !value;
  }
}

// Makes the children of a parent the views of these items, in this order.
function keep(parent, kept, items, key, template, update) {
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

// A run

class RunView extends View {
  constructor(name) {
    super("run");
    this.name = name;
    this.url = `v1/runs/${encodeURIComponent(name)}`;
    this.sources = new Map();
    this.ranks = new Map();
    this.snapshots = new Map();
    this.refreshes = 0;
    this.losses = null; // the curves, and the report that they end with
    this.lossesOf = null;
    this.text("run", name);
    this.slot("plan").href = `${this.url}/plan.svg`;
    this.slot("snap").addEventListener("click", () => this.takeSnapshot());
  }

  async refresh(server) {
    try {
      const stats = await ask(`${this.url}/stats`);
      await this.refreshLosses(stats.reported);
      this.show(stats, server);
      this.root.classList.remove("stale");
      if (this.refreshes++ % SNAPSHOTS_EVERY === 0) await this.refreshSnapshots();
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.notice("trouble", `These figures cannot be read now: ${error.message}`);
      this.root.classList.add("stale");
    }
  }

  show(stats, server) {
    const begun = stats.generation > 0;
    const connected = stats.ranks.filter((rank) => rank.connected).length;
    this.text("stream", stats.stream);
    this.showState(stats, begun, connected);
    this.slot("no-trainer").hidden = begun || stats.sample_index > 0;
    this.text("example", example(stats.run, server.grpc_address));

    this.number("total_tokens", stats.total_tokens);
    this.text("tokens_per_s", `${compact(stats.tokens_per_s)} per second`, `${grouped(stats.tokens_per_s)} per second`);
    this.text("sample_index", grouped(stats.sample_index), "committed");
    const ahead = stats.produced_index - stats.sample_index;
    this.text("produced", `${grouped(ahead)} more produced`, `up to ${grouped(stats.produced_index)}`);
    this.text("world", begun ? `${grouped(stats.world_size)} × ${grouped(stats.batch_size)}` : dash);
    this.text("step", begun ? `${grouped(stats.world_size * stats.batch_size)} samples a micro-step` : "no trainer yet");
    this.text("generation", begun ? grouped(stats.generation) : dash);
    this.text("connected", begun ? `${connected} of ${grouped(stats.world_size)} connected` : "none opened yet");
    this.text("window_fill", `${Math.round(stats.window_fill * 100)}\u00a0% full`);
    this.slot("window").style.width = `${Math.min(1, stats.window_fill) * 100}%`;
    this.text("commit_age", ago(stats.ledger.last_commit_age_s), `at sample ${grouped(stats.ledger.last_commit_index)}`);
    this.text("ledger", stats.ledger.available ? "ledger available" : "ledger away", stats.ledger.backend);

    this.text("revision", revisionNote(stats));
    this.text("count", stats.count === "real" ? "shares of real tokens, without padding" : "");
    this.notice("pin", pinNote(stats.pin));
    const skips = skipsText(stats.skips);
    this.notice("skips", skips && `The order passes over ${skips}.`);
    this.showMix(stats.sources);
    this.showReported(stats.reported);
    this.showRanks(stats.ranks, stats.world_size * stats.batch_size);
    this.text("digest", stats.digest, `at sample ${grouped(stats.sample_index)}`);
    for (const fact of ["run_uid", "tokenizer"]) this.text(fact, stats[fact]);
    this.text("seed", String(stats.seed));
    this.text("sequence_length", `${grouped(stats.sequence_length)} tokens`);
    this.text("ledger_backend", stats.ledger.backend);
  }

  showState(stats, begun, connected) {
    const away = stats.ranks.filter((rank) => rank.state === "away").length;
    let [state, words] = ["good", "Running"];
    if (stats.error) [state, words] = ["bad", "Stopped"];
    else if (stats.ended) [state, words] = ["wait", "Ended"];
    else if (stats.opening && connected === 0) [state, words] = ["wait", "Is being opened"];
    else if (!begun) [state, words] = ["wait", "No trainer yet"];
    else if (!stats.ledger.available) [state, words] = ["warn", "Ledger away"];
    else if (connected === 0 && away === 0) [state, words] = ["wait", "All ranks finished"];
    else if (connected === 0) [state, words] = ["warn", "No rank connected"];
    else if (away > 0) [state, words] = ["warn", `${connected} of ${stats.world_size} ranks connected`];
    else if (stats.waiting_reason === "storage") [state, words] = ["warn", "Waiting for storage"];
    else if (stats.data_wait_share >= SLOW_DATA_SHARE) [state, words] = ["warn", "The data is slow"];
    this.slot("state").dataset.state = state;
    this.text("state", words);
    this.text("waiting", begun && !stats.error && !stats.ended ? paceNote(stats) : "");
    this.notice("error", stats.error ? `The run has stopped: ${stats.error}` : "");
    this.notice("ended", stats.ended ? `The data has ended: ${stats.ended}` : "");
    this.notice("trouble", stats.ledger.available ? stats.warning : `The ledger is away: ${stats.ledger.error ?? "no reason known"}`);
  }

  showMix(sources) {
    const scale = scaleFor(Math.max(...sources.flatMap((s) => [s.expected_share, s.actual_share, s.window_share])));
    this.text("scale", `${scale * 100}\u00a0%`);
    const width = (share) => `${Math.min(1, share / scale) * 100}%`;
    keep(this.slot("sources"), this.sources, sources, (source) => source.id, "source", (row, source) => {
      row.text("alias", source.alias);
      row.text("spec", source.spec === source.alias ? "" : source.spec);
      row.notice("exhausted", source.exhausted ? "exhausted" : "");
      row.text("exhausted", source.exhausted ? "exhausted" : "", `${grouped(source.dropped_tokens)} tokens filled no sample`);
      row.notice("skipped", source.skipped_tokens ? `${compact(source.skipped_tokens)} tokens skipped` : "");
      row.notice("bad", source.bad_rows ? `${compact(source.bad_rows)} bad rows` : "");
      row.slot("actual").style.width = width(source.actual_share);
      row.slot("window").style.width = width(source.window_share);
      row.slot("expected").style.left = width(source.expected_share);
      for (const name of ["target_share", "expected_share", "actual_share", "window_share"]) {
        const share = source[name];
        if (share === null) row.text(name, dash, "no commit in the last 30 s");
        else row.text(name, percent(share), `${(share * 100).toFixed(6)} %`);
      }
      this.showLoss(row, source);
      for (const name of ["tokens", "rows", "samples"]) row.number(name, source[name]);
      if (source.padding_tokens || source.cut_documents) {
        const cut = source.cut_rate === null ? "" : `, ${percent(source.cut_rate)} of the rows cut`;
        const lost = source.lost_tokens ? ` (${grouped(source.lost_tokens)} tokens lost)` : "";
        row.text("tokens", compact(source.tokens), `${grouped(source.tokens)}; ${percent(source.fill_rate)} filled${cut}${lost}`);
      }
      const without = [
        source.bad_rows ? `${grouped(source.bad_rows)} did not decode` : "",
        source.filtered_rows ? `${grouped(source.filtered_rows)} did not pass the filter, or are blank lines` : "",
        source.excluded_rows ? `${grouped(source.excluded_rows)} of each epoch are left out` : "",
      ].filter(Boolean);
      if (without.length) row.text("rows", compact(source.rows), [grouped(source.rows), ...without].join("; "));
      const epochs = source.epochs === null ? "∞" : compact(source.epochs);
      row.text("epochs", `${source.epoch.toFixed(2)} of ${epochs}`, `${source.epoch} passes so far`);
      if (source.exhausted) row.text("remaining", "0", "exhausted");
      else if (source.remaining_samples === null) row.text("remaining", dash, "not known");
      else row.text("remaining", `≈\u00a0${compact(source.remaining_samples)}`, `about ${grouped(source.remaining_samples)}`);
    });
  }

  // The curves are asked for when there is more of them, and not with every poll.
  async refreshLosses(reported) {
    const last = reported === null ? null : reported.sample_index;
    if (last === this.lossesOf || (last !== null && this.losses !== null && this.refreshes % LOSSES_EVERY !== 0)) return;
    this.losses = last === null ? null : await ask(`${this.url}/losses`);
    this.lossesOf = last;
  }

  showLoss(row, source) {
    row.text("loss", loss(source.loss), source.loss === null ? "none was reported" : `smoothed; ${loss(source.last_loss)} in the last report`);
    const curve = this.losses?.sources.find((each) => each.id === source.id);
    const line = curve ? points(this.losses.sample_index, curve.losses) : "";
    if (row.slot("line").getAttribute("points") !== line) row.slot("line").setAttribute("points", line);
  }

  showReported(reported) {
    this.slot("mix-table").classList.toggle("with-losses", reported !== null);
    if (reported === null) {
      this.notice("reported", "");
      return;
    }
    const parts = [`Losses of step ${grouped(reported.step)}, sample ${grouped(reported.sample_index)}, ${ago(reported.age_s)}`];
    if (reported.loss !== null) parts.push(`${loss(reported.loss)} over all`);
    if (reported.learning_rate !== null) parts.push(`learning rate ${reported.learning_rate.toExponential(2)}`);
    this.notice("reported", parts.join("; "));
    if (this.losses !== null) {
      const since = new Date(this.losses.since * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
      this.text("reported", parts.join("; "), `This server knows what was reported since it took the run up, ${since}`);
    }
  }

  showRanks(ranks, step) {
    const many = ranks.length > 2 * RANKS_SHOWN;
    const byLag = (a, b) => (b.state === "away") - (a.state === "away") || b.lag - a.lag || a.rank - b.rank;
    const shown = many ? [...ranks].sort(byLag).slice(0, RANKS_SHOWN) : ranks;
    this.text("ranks_note", many ? `The ${RANKS_SHOWN} that lag most, of ${grouped(ranks.length)}` : "");
    this.slot("ranks-card").hidden = ranks.length === 0;
    keep(this.slot("ranks"), this.ranks, shown, (rank) => rank.rank, "rank", (row, rank) => {
      row.text("rank", grouped(rank.rank));
      row.slot("dot").dataset.state = { connected: "good", finished: "wait", away: "bad" }[rank.state];
      row.text("rank-state", rank.state);
      row.text("position", grouped(rank.position));
      row.text("lag", grouped(rank.lag), "samples that the fastest rank is ahead").classList.toggle("lagging", rank.lag > LAG_STEPS * step);
      row.text("waited", lasting(rank.waited_s), "since it joined");
      row.text("last_heard", ago(rank.last_heard_s));
    });
  }

  async refreshSnapshots() {
    let all;
    try {
      all = await ask(`${this.url}/snapshots`);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.text("snapshots_note", `The list cannot be read now: ${error.message}`);
      return;
    }
    all.sort((a, b) => b.saved_at - a.saved_at);
    const shown = all.slice(0, SNAPSHOTS_SHOWN);
    this.slot("snapshots").closest("table").hidden = all.length === 0;
    this.text("snapshots_note", all.length === 0
      ? "None is saved in the ledger yet. One holds all that is needed to resume from its sample index."
      : all.length > shown.length ? `The newest ${shown.length} of ${grouped(all.length)}` : "");
    keep(this.slot("snapshots"), this.snapshots, shown, (snapshot) => snapshot.id, "snapshot", (row, snapshot) => {
      row.text("id", snapshot.id);
      row.slot("link").href = `${this.url}/snapshots/${encodeURIComponent(snapshot.id)}`;
      row.text("sample_index", grouped(snapshot.sample_index));
      const saved = new Date(snapshot.saved_at * 1000);
      row.text("saved_at", saved.toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" }), saved.toISOString());
    });
  }

  async takeSnapshot() {
    const button = this.slot("snap");
    button.disabled = true;
    this.text("snap_result", "Taking a snapshot …");
    try {
      const saved = await ask(`${this.url}/snapshots`, { method: "POST", body: "{}", timeout: SNAPSHOT_TIMEOUT_MS });
      this.text("snap_result", `Saved at sample ${grouped(saved.sample_index)}.`);
      await this.refreshSnapshots();
    } catch (error) {
      this.text("snap_result", `No snapshot was taken: ${error.message}`);
    } finally {
      button.disabled = false;
      // A disabled button loses the focus; give it back unless it was taken elsewhere meanwhile.
      if (document.activeElement === document.body) button.focus();
    }
  }
}

// Whether training or the data sets the pace, and what is waited for.
function paceNote(stats) {
  const parts = [];
  if (stats.data_wait_share !== null) {
    const pace = stats.data_wait_share >= SLOW_DATA_SHARE ? "the data sets the pace" : "training sets the pace";
    parts.push(`${pace}: ranks waited for data ${Math.round(stats.data_wait_share * 100)}\u00a0% of the last half a minute`);
  }
  if (stats.waiting_for) parts.push(`${stats.waiting_reason === "ranks" ? "samples are ready; " : ""}waiting for ${stats.waiting_for}`);
  return parts.join("; ");
}

// Which mixture is in force, where it was ever changed.
function revisionNote({ revision, next_revision: next }) {
  if (!revision && !next) return "";
  const now = revision ? `Revision ${grouped(revision)} in force` : "As it began";
  if (!next) return now;
  const when = next.eta_s === null ? "" : `, in about ${lasting(next.eta_s)}`;
  return `${now}; revision ${grouped(next.number)} from sample ${grouped(next.sample_index)} on${when}`;
}

// What the order passes over.
function skipsText(skips) {
  return Object.entries(skips).map(([index, samples]) => `${grouped(samples)} samples at sample ${grouped(Number(index))}`).join(", ");
}

// Where a restore has the next launch begin.
function pinNote(pin) {
  if (!pin) return "";
  const skips = pin.skips === null ? "" : `; from then on the order passes over ${skipsText(pin.skips) || "nothing"}`;
  return `A restore pinned sample ${grouped(pin.sample_index)} for the next launch${skips}.`;
}

function example(run, address) {
  // What a server bound to every interface is called from here.
  const target = (address ?? "HOST:PORT").replace(/^(0\.0\.0\.0|\[::\])(?=:)/, location.hostname);
  // Both endpoints use TLS, or none does.
  const scheme = location.protocol === "https:" ? "grpcs://" : "grpc://";
  return `from tokenloom import RemoteDataset
dataset = RemoteDataset("${scheme}${target}/${run}", batch_size=4)
for batch in dataset: ...`;
}

// Asking

// The server answered, with an error of its own.
class Refused extends Error {}

// It wants a token, or another one.
class NoEntry extends Error {}

async function fetchAnswer(url, { method = "GET", body, timeout = REQUEST_TIMEOUT_MS } = {}) {
  const headers = method === "POST" ? { "content-type": "application/json" } : {};
  if (token) headers.authorization = `Bearer ${token}`;
  const answer = await fetch(url, { method, body, headers, signal: AbortSignal.timeout(timeout) });
  if (answer.ok) return answer;
  const { message = `status ${answer.status}` } = await answer.json();
  throw answer.status === 401 ? new NoEntry(message) : new Refused(message);
}

const ask = async (url, options) => (await fetchAnswer(url, options)).json();

// A link of its own carries no token, so the page asks and shows the very bytes that came. What may be refused is asked
// for first also without one, so that the reason stands beside the link.
async function follow(event) {
  const link = event.target.closest?.("a[data-asks]");
  if (!link || !(token || link.dataset.asks)) return;
  event.preventDefault();
  const answer = link.parentElement.querySelector("[data-answer]");
  const say = (words) => answer && Object.assign(answer, { textContent: words, hidden: !words });
  say("One moment …");
  try {
    const content = await (await fetchAnswer(link.href, { timeout: SNAPSHOT_TIMEOUT_MS })).blob();
    say("");
    if (token) download(content, link.pathname.split("/").pop());
    else location.assign(link.href);
  } catch (error) {
    if (answer && error instanceof Refused) return say(error.message);
    say("");
    showConnection(error);
  }
}

function download(content, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), REQUEST_TIMEOUT_MS);
}

async function poll() {
  const server = await ask("v1/runs");
  $("version").textContent = server.version;
  for (const [name, view] of views) {
    if (!server.runs.includes(name)) {
      view.root.remove();
      views.delete(name);
    }
  }
  for (const name of server.runs) {
    if (!views.has(name)) views.set(name, new RunView(name));
  }
  await Promise.all(server.runs.map((name) => views.get(name).refresh(server)));
  // Shown once they have figures.
  const shown = server.runs.length ? server.runs.map((name) => views.get(name).root) : [emptyState(server)];
  if (shown.length !== $("runs").children.length || shown.some((root, at) => $("runs").children[at] !== root)) {
    $("runs").replaceChildren(...shown);
  }
}

let empty = null;
function emptyState(server) {
  empty ??= new View("no-runs");
  empty.text("example", example("RUN", server.grpc_address));
  return empty.root;
}

// The form in place of the runs, or the runs.
function showEntry(error) {
  const appears = error !== null && $("entry").hidden;
  $("entry").hidden = error === null;
  if (appears) $("token").focus();
  $("runs").hidden = error !== null;
  $("forget").hidden = error !== null || !token;
  if (error === null) return;
  $("connection").dataset.state = "wait";
  $("connection-text").textContent = "Token wanted";
  $("away").hidden = true;
  const words = token ? "The server does not know this token." : "";
  if ($("entry-text").textContent !== words) $("entry-text").textContent = words;
}

function keepToken(text) {
  token = text;
  if (text) sessionStorage.setItem(TOKEN_KEY, text);
  else sessionStorage.removeItem(TOKEN_KEY);
  wake();
}

// The address that a server prints with the token it made: taken out of it at once, so that no history keeps it.
function takeToken() {
  const shown = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!shown) return;
  history.replaceState(null, "", location.pathname + location.search);
  keepToken(shown);
}

function showConnection(error) {
  const away = error !== null;
  const words = away ? "Away" : "Live";
  $("connection").dataset.state = away ? "bad" : "good";
  if ($("connection-text").textContent !== words) $("connection-text").textContent = words;
  $("away").hidden = !away;
  for (const view of views.values()) if (away) view.root.classList.add("stale");
  if (!away) {
    awaySince = null;
    return;
  }
  awaySince ??= new Date();
  const since = awaySince.toLocaleTimeString("en-GB");
  const reason = error instanceof Refused ? `The server cannot answer: ${escaped(error.message)}` : "The server does not answer.";
  const kept = views.size ? ` The figures are those of ${since}.` : "";
  if ($("away-text").textContent !== reason + kept) $("away-text").textContent = reason + kept;
}

// Waits, or less when "Try now" is pressed or the page comes to the front.
async function pause(ms) {
  const until = Date.now() + ms;
  let woken = false;
  const wakened = new Promise((resolve) => {
    wake = () => {
      woken = true;
      resolve();
    };
  });
  for (let left = ms; left > 0 && !woken; left = until - Date.now()) {
    $("away-next").textContent = `Next try in ${Math.ceil(left / 1000)} s.`;
    await Promise.race([wakened, new Promise((resolve) => setTimeout(resolve, Math.min(left, 1000)))]);
  }
}

// Waits for another token: the server is not asked again with one that it does not know.
function entered() {
  return new Promise((resolve) => {
    wake = resolve;
  });
}

async function main() {
  takeToken();
  window.addEventListener("hashchange", takeToken);
  $("entry").addEventListener("submit", (event) => {
    event.preventDefault();
    const given = $("token").value.trim();
    $("token").value = "";
    if (given) keepToken(given);
  });
  $("forget").addEventListener("click", () => keepToken(""));
  document.addEventListener("click", follow);
  $("retry").addEventListener("click", () => wake());
  document.addEventListener("visibilitychange", () => wake());
  for (;;) {
    if (!document.hidden) {
      const shownToken = token;
      try {
        await poll();
        failures = 0;
        showConnection(null);
        showEntry(null);
      } catch (error) {
        if (error instanceof NoEntry) {
          if (token !== shownToken) continue; // another came with the address meanwhile
          showEntry(error);
          await entered();
          continue;
        }
        failures += 1;
        console.warn(error);
        showConnection(error);
      }
    }
    await pause(failures ? Math.min(LONGEST_WAIT_MS, POLL_MS * 2 ** failures) : POLL_MS);
  }
}

main();
