// Starts the page: follows the address to the list of runs or to one run, asks the server once a second, and says how the
// connection is.

import { NoEntry, Refused, ask, currentToken, follow, keepToken } from "./ask.js";
import { escaped } from "./numbers.js";
import { currentRoute } from "./route.js";
import { RunView } from "./run.js";
import { NoRun, RunList } from "./runs.js";

const POLL_MS = 1000;
const LONGEST_WAIT_MS = 15000; // between two tries while the server is away
const POLL_SHARE = 5; // a poll that lasts is followed by a wait so many times as long: the server has runs to serve

const $ = (id) => document.getElementById(id);

// Touches the document only where something changes.
function put(id, property, value) {
  if ($(id)[property] !== value) $(id)[property] = value;
}

let shown = null; // the view in <main>
let failures = 0;
let awaySince = null;
let wake = () => {};

// What the address asks for, given the runs that there are: a key, and how its view is made.
function wanted(route, server) {
  const broken = server.broken.length > 0; // mixtures that are not served as they stand
  if (server.runs.length === 0 && !broken) return ["none", () => new NoRun("no-runs")];
  // Where there is one run, that is what people come for.
  const name = route.run ?? (server.runs.length === 1 && !broken ? server.runs[0] : null);
  if (name === null) return ["list", () => new RunList()];
  if (!server.runs.includes(name)) return [`missing ${name}`, () => new NoRun("no-such-run", name)];
  return [`run ${name}`, () => new RunView(name)];
}

async function poll() {
  const server = await ask("v1/runs");
  put("version", "textContent", server.version);
  const route = currentRoute();
  const [key, make] = wanted(route, server);
  showBroken(key === "list" ? [] : server.broken); // the list has a row for each
  const fresh = shown?.key !== key;
  const next = fresh ? { key, view: make() } : shown;
  if (next.view instanceof RunView) next.view.follow(route.tab, route.params);
  await next.view.refresh(server);
  // Shown once it has figures, unless somebody went elsewhere meanwhile.
  if (!fresh) return;
  if (currentRoute().run !== route.run) return next.view.close();
  shown?.view.close();
  shown = next;
  $("runs").replaceChildren(next.view.root);
  document.title = next.view instanceof RunView ? `${next.view.name} · Tokenloom` : "Tokenloom";
  $("all-runs").hidden = key === "list" || server.runs.length + server.broken.length < 2;
}

// The form in place of the runs, or the runs.
function showEntry(error) {
  const appears = error !== null && $("entry").hidden;
  put("entry", "hidden", error === null);
  if (appears) $("token").focus();
  put("runs", "hidden", error !== null);
  put("forget", "hidden", error !== null || !currentToken());
  if (error === null) return;
  $("connection").dataset.state = "wait";
  put("connection-text", "textContent", "Token wanted");
  put("away", "hidden", true);
  put("entry-text", "textContent", currentToken() ? "The server does not know this token." : "");
}

function takeUp(token) {
  keepToken(token);
  wake();
}

// The address that a server prints with the token it made: taken out of it at once, so that no history keeps it.
function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!given) return;
  history.replaceState(null, "", location.pathname + location.search);
  takeUp(given);
}

function showConnection(error) {
  const away = error !== null;
  const state = away ? "bad" : "good";
  if ($("connection").dataset.state !== state) $("connection").dataset.state = state;
  put("connection-text", "textContent", away ? "Away" : "Live");
  put("away", "hidden", !away);
  if (away) shown?.view.root.classList.add("stale");
  if (!away) {
    awaySince = null;
    return;
  }
  awaySince ??= new Date();
  const since = awaySince.toLocaleTimeString("en-GB");
  const reason = error instanceof Refused ? `The server cannot answer: ${escaped(error.message)}` : "The server does not answer.";
  const kept = shown ? ` The figures are those of ${since}.` : "";
  put("away-text", "textContent", reason + kept);
}

// Waits, or less when "Try now" is pressed, another address is followed or the page comes to the front.
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
    put("away-next", "textContent", failures ? `Next try in ${Math.ceil(left / 1000)} s.` : "");
    await Promise.race([wakened, new Promise((resolve) => setTimeout(resolve, Math.min(left, 1000)))]);
  }
}

// The mixtures that the server could not take.
function showBroken(broken) {
  const lines = broken.map((each) => `${escaped(each.run)} is ${each.served ? "served as it was" : "not served"}: ${escaped(each.message.split("\n")[0])}`);
  $("broken").hidden = lines.length === 0;
  if ($("broken").textContent !== lines.join(" · ")) $("broken").textContent = lines.join(" · ");
}

// Waits for another token: the server is not asked again with one that it does not know.
function entered() {
  return new Promise((resolve) => {
    wake = resolve;
  });
}

// Another address: the tab changes at once, and what it shows comes with the next answer.
function followAddress() {
  takeToken();
  const route = currentRoute();
  if (shown?.view instanceof RunView && route.run === shown.view.name) shown.view.follow(route.tab, route.params);
  wake();
}

async function main() {
  takeToken();
  window.addEventListener("hashchange", followAddress);
  $("entry").addEventListener("submit", (event) => {
    event.preventDefault();
    const given = $("token").value.trim();
    $("token").value = "";
    if (given) takeUp(given);
  });
  $("forget").addEventListener("click", () => takeUp(""));
  document.addEventListener("click", (event) => follow(event, showConnection));
  $("retry").addEventListener("click", () => wake());
  document.addEventListener("visibilitychange", () => wake());
  let wait = POLL_MS;
  for (;;) {
    const asked = location.hash;
    if (!document.hidden) {
      const shownToken = currentToken();
      try {
        const begun = performance.now();
        await poll();
        wait = Math.min(POLL_SHARE * POLL_MS, Math.max(POLL_MS, (performance.now() - begun) * POLL_SHARE));
        failures = 0;
        showConnection(null);
        showEntry(null);
      } catch (error) {
        if (error instanceof NoEntry) {
          if (currentToken() !== shownToken) continue; // another came with the address meanwhile
          showEntry(error);
          await entered();
          continue;
        }
        failures += 1;
        console.warn(error);
        showConnection(error);
      }
    }
    if (location.hash !== asked && !failures) continue; // somebody went elsewhere meanwhile
    await pause(failures ? Math.min(LONGEST_WAIT_MS, POLL_MS * 2 ** failures) : wait);
  }
}

main();
