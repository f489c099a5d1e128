// The lab: everything that one needs only on a second visit.

import { $, bytes, download, make, notice, token } from "./common.js";
import { hold, isHeld, openAnother, send, state, subscribe } from "./session.js";

const COLOURS = { read: "127 182 217", merged: "224 164 88", replayed: "124 196 138", fetched: "206 130 196" };
const MEANING = {
  read: "strong: much of this part's past was read",
  merged: "strong: many entries of this part were merged or dropped",
  replayed: "strong: MLP outputs of the last frame were used again",
  fetched: "strong: much of what is read here came from host memory",
};

let snapshots = []; // chunks that one can go back to
let frames = 1; // of a chunk
let lastMap = null;
let promptId = 0;
let promptChunk = 0; // from which a prompt holds; 0: the next
let logId = 0;

function open(on) {
  $("lab").hidden = !on;
  $("lab-button").ariaExpanded = String(on);
  (on ? $("lab-close") : $("lab-button")).focus();
}
$("lab-button").addEventListener("click", () => open($("lab").hidden));
$("lab-close").addEventListener("click", () => open(false));
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("lab").hidden) open(false);
});

subscribe("settings", (settings) => {
  $("model").textContent = settings.model;
  $("plan").replaceChildren(...settings.plans.map((name) => new Option(name, name)));
  $("plan").value = settings.page_plan;
  $("world-form").hidden = !settings.worlds;
  $("first-row").hidden = settings.worlds; // a world brings its own
  $("smooth-row").hidden = !settings.room;
  $("prompt").maxLength = settings.prompt_letters;
  $("words-box").hidden = !settings.words;
  $("words").replaceChildren(...(settings.words ?? []).map(chip));
  // a model that draws what one writes has its prompt in the open
  if (!settings.words) $("prompt-place").append($("prompt-form"));
});

function chip(word) {
  const button = make("button", { type: "button", textContent: word });
  button.addEventListener("click", () => {
    $("prompt").value = `${$("prompt").value.trimEnd()} ${word}`.trim();
    $("prompt").focus();
  });
  return button;
}

subscribe("begin", (session) => {
  setSnapshots(session.snapshots);
  const { plans } = state.settings;
  $("plan").value = plans.includes(session.plan) ? session.plan : "";
  $("prompt").value = session.prompt;
  if (session.world !== null) $("world").value = session.world;
});
subscribe("opened", () => {
  setRecording(false);
  if ($("map-kind").value) send("map", { on: true });
});
subscribe("chunk", (message) => {
  frames = message.frames;
});
subscribe("snapshot", (message) => setSnapshots(message.chunks));
subscribe("paused", () => {
  $("pause").textContent = isHeld("visitor") ? "Go on" : "Pause";
});

// ---- begin again, go back, record

function begin(fields) {
  notice("");
  send("reset", { look: state.settings.look, ...fields });
  hold("visitor", false);
  $("screen").focus();
}

$("world-form").addEventListener("submit", (event) => {
  event.preventDefault();
  begin({ world: Number($("world").value) });
});
$("dice").addEventListener("click", () => {
  $("world").value = Math.floor(Math.random() * 1_000_000_000);
  begin({ world: Number($("world").value) });
});
$("plan").addEventListener("change", () => begin({ plan: $("plan").value }));
$("reset").addEventListener("click", () => begin({}));
$("back").addEventListener("click", () => send("rewind", { chunk: backTo() }));
$("pause").addEventListener("click", () => hold("visitor", !isHeld("visitor")));

// the newest snapshot that is a second or more ago, else the oldest
function backTo() {
  const ago = Math.ceil(state.session.fps / frames);
  return snapshots.filter((chunk) => chunk <= state.chunk - ago).at(-1) ?? snapshots[0];
}

function setSnapshots(found) {
  snapshots = found;
  $("back").disabled = !found.length;
}

$("record").addEventListener("click", () => {
  const on = $("record").ariaPressed !== "true";
  setRecording(on);
  send("record", { on });
});

function setRecording(on) {
  $("record").ariaPressed = String(on);
  $("record").textContent = on ? "Stop" : "Record";
}

subscribe("notice", ({ code }) => {
  if (code === "recording_failed") setRecording(false);
});
subscribe("recorded", async (message) => {
  const { session, secret, model } = state.session;
  const headers = { "x-session-secret": secret };
  if (token) headers.authorization = `Bearer ${token}`;
  const answer = await fetch(`/v1/sessions/${session}/recording`, { headers });
  if (answer.ok) download(await answer.blob(), `${model}-${message.frames}-frames.mp4`);
  else notice("The recording could not be fetched.");
});

// ---- a picture to begin with

async function beginFrom(file) {
  const bitmap = await createImageBitmap(file).catch(() => null);
  if (!bitmap) {
    notice("This file is no picture.");
    return;
  }
  const [height, width] = state.session.size;
  const scale = Math.min(bitmap.width / width, bitmap.height / height);
  const [wide, high] = [scale * width, scale * height]; // its middle, of the video's shape
  const canvas = make("canvas", { width, height });
  const [left, top] = [(bitmap.width - wide) / 2, (bitmap.height - high) / 2];
  canvas.getContext("2d").drawImage(bitmap, left, top, wide, high, 0, 0, width, height);
  bitmap.close();
  const image = canvas.toDataURL("image/jpeg", 0.92).split(",")[1];
  const { plan, seed } = state.session;
  openAnother({ plan, seed, prompt: $("prompt").value, image });
}

$("first").addEventListener("change", () => {
  const [file] = $("first").files;
  $("first").value = "";
  if (file) beginFrom(file);
});
for (const kind of ["dragover", "drop"]) {
  $("screen").addEventListener(kind, (event) => {
    event.preventDefault();
    const [file] = event.dataTransfer.files;
    if (kind === "drop" && file && !state.settings.worlds) beginFrom(file);
  });
}

// ---- the prompt

$("prompt-form").addEventListener("submit", (event) => {
  event.preventDefault();
  promptChunk = Number($("prompt-chunk").value);
  promptId = send("prompt", { text: $("prompt").value, chunk: promptChunk });
  $("screen").focus();
});
subscribe("receipt", (message) => {
  if (message.phase === "refused") notice(message.reason);
  if (message.id !== promptId) return;
  const later = promptChunk > state.chunk + 1;
  const received = later ? `waits for chunk ${promptChunk}` : "on its way";
  const words = { received, applied: `applied at chunk ${message.chunk}` };
  $("prompt-receipt").textContent = words[message.phase] ?? "not applied";
});

// ---- the action log

$("save").addEventListener("click", () => {
  logId = send("log");
});
subscribe("log", (message) => {
  if (message.id !== logId) return;
  const text = JSON.stringify(message.log);
  const name = `${message.log.model}-${state.session.session.slice(0, 6)}.json`;
  download(new Blob([text], { type: "application/json" }), name);
  $("log-note").textContent = `saved ${message.log.steps.length} steps`;
});
$("load").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  const [file] = $("file").files;
  $("file").value = "";
  if (!file) return;
  if (file.size > state.settings.log_bytes) {
    notice(`An action log has at most ${bytes(state.settings.log_bytes)}.`);
    return;
  }
  try {
    const log = JSON.parse(await file.text());
    send("replay", { log });
    $("log-note").textContent = `plays ${log.steps.length} steps`;
  } catch {
    notice("This file is no action log.");
  }
});

// ---- what was read, over the picture

subscribe("map", (message) => {
  lastMap = message;
  drawMap();
});

function drawMap() {
  const kind = $("map-kind").value;
  $("map").hidden = !kind || !lastMap;
  if ($("map").hidden) return;
  for (const option of $("map-kind").options) {
    option.disabled = option.value !== "" && lastMap.groups.every((one) => !one[option.value]);
  }
  const names = lastMap.groups.map(({ layers: [low, high] }) =>
    low === high ? `layer ${low}` : `layers ${low}–${high}`,
  );
  if ($("map-group").length !== names.length) {
    $("map-group").replaceChildren(...names.map((name, i) => new Option(name, i)));
  }
  const values = lastMap.groups[$("map-group").value][kind];
  if (!values) {
    $("map").hidden = true;
    $("map-note").textContent = "this plan cannot tell";
    return;
  }
  const most = Math.max(...values) || 1; // colours are relative to it
  const [high, wide] = lastMap.grid;
  Object.assign($("map"), { width: wide, height: high });
  const brush = $("map").getContext("2d");
  values.forEach((value, i) => {
    brush.fillStyle = `rgb(${COLOURS[kind]} / ${value / most})`;
    brush.fillRect(i % wide, Math.floor(i / wide), 1, 1);
  });
  const mean = values.reduce((total, value) => total + value, 0) / values.length;
  const average = kind === "merged" ? "" : `, ${(100 * mean).toFixed(0)} % on average`;
  $("map-note").textContent = `${MEANING[kind]}${average} (chunk ${lastMap.chunk})`;
  $("map").dataset.chunk = lastMap.chunk;
}

$("map-kind").addEventListener("change", () => {
  const on = $("map-kind").value !== "";
  if (on !== !$("map-group").disabled) send("map", { on });
  $("map-group").disabled = !on;
  if (!on) $("map-note").textContent = "";
  drawMap();
  $("screen").focus();
});
$("map-group").addEventListener("change", drawMap);
