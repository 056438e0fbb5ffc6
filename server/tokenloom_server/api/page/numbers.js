// How numbers, times and other people's texts are written on the page.

export const grouped = (n) => n.toLocaleString("en");
export const dash = "–";

export function compact(n) {
  if (Math.abs(n) < 10000) return n.toLocaleString("en", { maximumFractionDigits: 1 });
  for (const [unit, size] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]]) {
    // 999,950 is 1.00 M and not 1000 k.
    if (n >= size * 0.9995) return `${(n / size).toPrecision(Math.max(3, String(Math.round(n / size)).length))}\u00a0${unit}`;
  }
  return String(n);
}

export const percent = (share) => `${(share * 100).toFixed(share > 0 && share < 0.0995 ? 2 : 1)}\u00a0%`;

// A difference of shares, in percentage points.
export const points = (difference, unit = "\u00a0pp") => `${difference < 0 ? "−" : "+"}${(Math.abs(difference) * 100).toFixed(2)}${unit}`;

export function lasting(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)}\u00a0s`;
  if (seconds < 120) return `${Math.round(seconds)}\u00a0s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)}\u00a0min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)}\u00a0h` : `${Math.round(seconds / 86400)}\u00a0days`;
}

export const loss = (value) => (value === null ? dash : value.toPrecision(4));

export const ago = (seconds) => (seconds === null ? "never" : `${lasting(seconds)} ago`);

// A Unix time in seconds, as this machine's clock shows it.
export const moment = (seconds) =>
  new Date(seconds * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });

// The end of the bars' scale: the least of these that holds every share.
const SCALES = [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1];
export const scaleFor = (greatest) => SCALES.find((end) => greatest <= end) ?? 1;

// A control character, or one that turns the direction of writing, becomes JSON's escape of it; lines stay.
const CONTROL = /[\0-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]/gu;
export const escaped = (text) =>
  String(text ?? "").replace(CONTROL, (found) => `\\u${found.codePointAt(0).toString(16).padStart(4, "0")}`);
