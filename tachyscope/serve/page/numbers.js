// Three numbers in the open, and more of them in the lab.

import { $, bytes, put } from "./common.js";
import { answered, keyToPixel } from "./keys.js";
import { subscribe } from "./session.js";
import { onShown, screen } from "./screen.js";

const WINDOW_S = 3; // over which rates are taken, and three pictures at least
const RECENT = 24; // chunks

const shownAt = [];
const chunks = []; // the last chunk messages that were drawn, not given
let paused = false;
let turned = 0;

subscribe("begin", () => {
  chunks.length = shownAt.length = 0;
  put("shown", null);
});
subscribe("paused", (value) => {
  if (paused && !value) shownAt.length = 0; // a pause says nothing of the rate
  paused = value;
});
subscribe("chunk", (message) => {
  if (message.given) return;
  chunks.push(message);
  if (chunks.length > 60) chunks.shift();
});
onShown((picture) => {
  if (!picture.given) shownAt.push(performance.now());
  answered(picture);
});

function refresh() {
  const now = performance.now();
  while (shownAt.length > 3 && shownAt[0] < now - 1000 * WINDOW_S) shownAt.shift();
  const span = shownAt.at(-1) - shownAt[0];
  const rate = shownAt.length > 1 ? (1000 * (shownAt.length - 1)) / span : null;
  if (rate) put("shown", rate);
  const between = screen.turned > turned && rate;
  $("shown-note").textContent = between ? "and turned in between" : "by the network";
  turned = screen.turned;
  put("key-p50", quantile(keyToPixel, 0.5), 0);
  put("key-p95", quantile(keyToPixel, 0.95), 0);
  const recent = chunks.slice(-RECENT);
  if (recent.length < 2) return;
  const last = recent.at(-1);
  const sum = (name) => recent.reduce((total, one) => total + one[name], 0);
  put("step", sum("step_ms") / recent.length, 0);
  put("pairs", (100 * sum("pairs")) / sum("dense_pairs"));
  $("cache").textContent = bytes(last.cache_bytes);
  $("chunk").textContent = last.chunk;
  // what a minute of walking adds, at the rate of these chunks
  const minute = (60_000 * recent.length) / (sum("step_ms") + sum("wait_ms")) / (recent.length - 1);
  const growth = (name) => minute * Math.max(0, last[name] - recent[0][name]);
  $("growth").textContent = megabytes(growth("cache_bytes"));
  $("growth-dense").textContent = megabytes(growth("dense_cache_bytes"));
}

const megabytes = (count) => `+${(count / 1e6).toFixed(count && count < 1e6 ? 1 : 0)} MB`;

function quantile(values, share) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}

subscribe("settings", () => setInterval(refresh, 400));
