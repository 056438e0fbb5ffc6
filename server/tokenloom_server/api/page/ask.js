// Asks the server, with the token where it wants one.

const REQUEST_TIMEOUT_MS = 5000;
// Going forward to a sample index, and the first plan of a run, may take a while.
export const SLOW_TIMEOUT_MS = 120000;

// In this tab only.
const TOKEN_KEY = "tokenloom-token";
let token = sessionStorage.getItem(TOKEN_KEY) ?? "";

export const currentToken = () => token;

export function keepToken(text) {
  token = text;
  if (text) sessionStorage.setItem(TOKEN_KEY, text);
  else sessionStorage.removeItem(TOKEN_KEY);
}

// The server answered, with an error of its own.
export class Refused extends Error {
  constructor(message, kind) {
    super(message);
    this.kind = kind; // its stable name, such as NotFound
  }
}

// It wants a token, or another one.
export class NoEntry extends Error {}

async function fetchAnswer(url, { method = "GET", body, timeout = REQUEST_TIMEOUT_MS, signal, token: other } = {}) {
  const headers = method === "GET" ? {} : { "content-type": "application/json" };
  if (other || token) headers.authorization = `Bearer ${other || token}`;
  const given = signal ? AbortSignal.any([signal, AbortSignal.timeout(timeout)]) : AbortSignal.timeout(timeout);
  const answer = await fetch(url, { method, body, headers, signal: given });
  if (answer.ok) return answer;
  const { error, message = `status ${answer.status}` } = await answer.json();
  throw answer.status === 401 ? new NoEntry(message) : new Refused(message, error);
}

// The answer's JSON. Raises Refused, NoEntry, or what fetch raises where the server is away.
export const ask = async (url, options) => (await fetchAnswer(url, options)).json();

// A link of its own carries no token, so the page asks and shows the very bytes that came. What may be refused is asked
// for first also without one, so that the reason stands beside the link. `onAway` gets what else went wrong.
export async function follow(event, onAway) {
  const link = event.target.closest?.("a[data-asks]");
  if (!link || !(token || link.dataset.asks)) return;
  event.preventDefault();
  const answer = link.parentElement.querySelector("[data-answer]");
  const say = (words) => answer && Object.assign(answer, { textContent: words, hidden: !words });
  say("One moment …");
  try {
    const content = await (await fetchAnswer(link.href, { timeout: SLOW_TIMEOUT_MS })).blob();
    say("");
    if (token) download(content, link.download || link.pathname.split("/").pop());
    else location.assign(link.href);
  } catch (error) {
    if (answer && error instanceof Refused) return say(error.message);
    say("");
    onAway(error);
  }
}

function download(content, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), REQUEST_TIMEOUT_MS);
}
