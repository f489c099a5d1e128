// The page of `tachyscope play` and `serve`: docs/serve.md has the protocol.

const VERSION = 1;
const HEADER_BYTES = 16;
const DENSE = 1; // the lane of the dense model; 0 is the plan's
const TYPES = ["image/png", "image/jpeg", "image/webp"];
const RECONNECT_MS = [300, 1000, 2000, 5000];
const FULL = 1013; // the close code where there is no room
const FULL_MS = 30_000;
const WINDOW_S = 3; // over which rates are taken, and three pictures at least
const SAMPLES = 100; // of key to pixel

const $ = (id) => document.getElementById(id);
const token = new URLSearchParams(location.hash.slice(1)).get("token");
const canvas = $("picture");
const pen = canvas.getContext("2d");

let socket = null;
let settings = null;
let session = null; // the last `opened` or `began`
let attempts = 0;
let nextId = 1;
let paused = false;
let held = []; // actions whose keys are down, newest last
let sentAction = "";
let drawn = { generation: 0, frame: -1 };
let drawing = Promise.resolve();
const sentAt = new Map(); // id of a keys message -> when the key was pressed
const answeredBy = new Map(); // chunk -> when the keys that it answers were pressed
const keyToPixel = [];
const shownAt = [];
const chunks = []; // the last chunk messages
const KEPT = 64; // pictures that dense's can be laid beside
const kept = new Map(); // frame -> its header and picture, while dense runs beside
let dense = null; // dense's last picture and its frame
let snapshots = []; // chunks that one can go back to

// ---- the connection

async function start() {
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  const answer = await fetch("/v1/settings", { headers }).catch(() => null);
  if (!answer) {
    setStatus("ended", "no answer");
    notice("The server does not answer: reload this page once it runs.");
    return;
  }
  if (!answer.ok) {
    setStatus("ended", "not let in");
    notice("This server needs a token: add #token=… to the address.");
    return;
  }
  settings = await answer.json();
  $("model").textContent = settings.model;
  $("plan").replaceChildren(...settings.plans.map((name) => new Option(name, name)));
  $("plan").value = settings.plan;
  $("world-form").hidden = !settings.worlds;
  $("prompt").maxLength = settings.prompt_letters;
  connect();
}

function connect() {
  const url = new URL("/v1/sessions", location.href);
  url.protocol = url.protocol.replace("http", "ws");
  const protocols = [`tachyscope.v${VERSION}`, ...(token ? [`bearer.${token}`] : [])];
  setStatus("waiting", "connecting");
  socket = new WebSocket(url, protocols);
  socket.binaryType = "arraybuffer";
  socket.onopen = hello;
  socket.onmessage = (event) =>
    typeof event.data === "string" ? hear(JSON.parse(event.data)) : see(event.data);
  socket.onclose = lost;
}

function hello() {
  const kept = JSON.parse(sessionStorage.getItem("session") ?? "null");
  if (kept) {
    send("resume", kept);
  } else {
    const opening = settings.worlds ? { world: Number($("world").value) } : {};
    send("open", { plan: $("plan").value, ...opening });
  }
}

function lost(event) {
  release();
  if (event.code === 1000 || event.code === 1008) {
    setStatus("ended", "ended");
    $("pause").disabled = true;
    const next = sessionStorage.getItem("session") ? "go on" : "begin again";
    notice(`${event.reason || "The session has ended"}: reload this page to ${next}.`);
    return;
  }
  if (event.code === FULL) {
    setStatus("waiting", "no room, trying again");
    setTimeout(connect, FULL_MS);
    return;
  }
  setStatus("waiting", "reconnecting");
  setTimeout(connect, RECONNECT_MS[Math.min(attempts++, RECONNECT_MS.length - 1)]);
}

function send(type, fields = {}) {
  const id = nextId++;
  if (socket?.readyState === WebSocket.OPEN) {
    socket.send(JSON.stringify({ type, id, ...fields }));
  }
  return id;
}

// ---- what the server says

const HEARD = {
  opened(message) {
    attempts = 0;
    session = message;
    sessionStorage.setItem(
      "session",
      JSON.stringify({ session: message.session, secret: message.secret }),
    );
    for (const one of [canvas, $("dense")]) [one.height, one.width] = message.size;
    $("beside").value = "off";
    if ($("map-kind").value) send("map", { on: true });
    $("pad").hidden = !message.actions;
    began(message);
    setPaused(false);
    setRecording(false);
    send("pause", { paused: false });
    setStatus("live", "live");
    notice("");
  },
  began(message) {
    began(message);
  },
  chunk(message) {
    chunks.push({ ...message, at: performance.now() });
    if (chunks.length > 60) chunks.shift();
  },
  beside(message) {
    $("behind").textContent = message.behind;
    if (message.psnr) put("psnr", message.psnr.at(-1));
    $("beside-note").textContent = message.behind > 1 ? "dense is behind: pause, and it follows" : "";
  },
  map(message) {
    lastMap = message;
    drawMap();
  },
  snapshot(message) {
    setSnapshots(message.chunks);
  },
  receipt(message) {
    if (message.phase === "refused") notice(message.reason);
    const pressed = sentAt.get(message.id);
    if (pressed !== undefined && message.phase !== "received") {
      sentAt.delete(message.id);
      if (message.phase === "applied") {
        answeredBy.set(message.chunk, [...(answeredBy.get(message.chunk) ?? []), pressed]);
      }
    }
    if (message.id === promptId) {
      const words = { received: "on its way", applied: `applied at chunk ${message.chunk}` };
      $("prompt-receipt").textContent = words[message.phase] ?? "not applied";
    }
  },
  async recorded(message) {
    const headers = { "x-session-secret": session.secret };
    if (token) headers.authorization = `Bearer ${token}`;
    const answer = await fetch(`/v1/sessions/${session.session}/recording`, { headers });
    if (answer.ok) download(await answer.blob(), `${session.model}-${message.frames}-frames.mp4`);
    else notice("The recording could not be fetched.");
  },
  log(message) {
    download(
      new Blob([JSON.stringify(message.log)], { type: "application/json" }),
      `${message.log.model}-${session.session.slice(0, 6)}.json`,
    );
    $("log-note").textContent = `saved ${message.log.steps.length} steps`;
  },
  notice(message) {
    notice(message.message);
  },
  error(message) {
    if (!session && sessionStorage.getItem("session")) {
      sessionStorage.removeItem("session"); // what it was to go on with is gone
      hello();
      return;
    }
    notice(message.message);
  },
  closed(message) {
    sessionStorage.removeItem("session");
    notice(message.reason);
  },
};

function hear(message) {
  HEARD[message.type]?.(message);
}

function began(message) {
  session = { ...session, ...message };
  drawn = { generation: message.generation, frame: -1 };
  chunks.length = keyToPixel.length = 0;
  forgetPictures();
  setSnapshots(message.snapshots);
  answeredBy.clear();
  $("plan").value = settings.plans.includes(message.plan) ? message.plan : "";
  $("prompt").value = message.prompt;
  if (message.world !== null) $("world").value = message.world;
  setView();
}

// ---- pictures

function see(data) {
  const view = new DataView(data);
  const header = {
    version: view.getUint8(0),
    type: TYPES[view.getUint8(1)],
    lane: view.getUint8(2),
    generation: view.getUint32(4, true),
    chunk: view.getUint32(8, true),
    frame: view.getUint32(12, true),
  };
  if (header.version !== VERSION) return;
  const file = new Blob([new Uint8Array(data, HEADER_BYTES)], { type: header.type });
  const picture = createImageBitmap(file);
  // pictures are drawn in the order in which they came, however long each takes to decode
  drawing = drawing.then(async () => show(header, await picture)).catch(() => {});
}

function show(header, picture) {
  if (header.generation !== drawn.generation) return;
  if (header.lane === DENSE) {
    showDense(header.frame, picture);
    return;
  }
  if (header.frame < drawn.frame) return;
  drawn = { generation: header.generation, frame: header.frame, chunk: header.chunk };
  if (besideMode() === "off") {
    paint(canvas, picture);
    picture.close();
    seen(header);
  } else {
    keep(header, picture);
    // in turns, both panels show the same frame: this one waits for dense's
    if (besideMode() === "follow" && $("view").value === "side") {
      paint(canvas, picture);
      seen(header);
    }
  }
}

// a picture has been drawn: what counts is when
function seen(header) {
  canvas.dataset.frame = header.frame;
  const now = performance.now();
  shownAt.push(now);
  for (const [chunk, pressed] of answeredBy) {
    if (chunk > header.chunk) continue;
    keyToPixel.push(...pressed.map((at) => now - at));
    answeredBy.delete(chunk);
  }
  while (keyToPixel.length > SAMPLES) keyToPixel.shift();
}

function paint(target, picture) {
  target.getContext("2d").drawImage(picture, 0, 0, target.width, target.height);
}

// ---- dense beside

const besideMode = () => $("beside").value;
const MODES = {
  off: "",
  turns: "a chunk of each in turns: both in step, and slower",
  follow: "dense runs while the machine has nothing else to do",
};

function keep(header, picture) {
  kept.set(header.frame, { header, picture });
  for (const old of [...kept.keys()].slice(0, -KEPT)) {
    kept.get(old).picture.close();
    kept.delete(old);
  }
}

function forgetPictures() {
  for (const { picture } of kept.values()) picture.close();
  kept.clear();
  dense = null;
  for (const id of ["psnr", "behind"]) $(id).textContent = "–";
}

function showDense(frame, picture) {
  dense?.picture.close();
  dense = { frame, picture };
  $("dense").dataset.frame = frame;
  const side = $("view").value === "side";
  if (side) paint($("dense"), picture);
  else compose();
  const own = kept.get(frame);
  if (!own || (side && besideMode() === "follow")) return;
  if (side) paint(canvas, own.picture);
  seen(own.header);
}

// both pictures of dense's last frame in one canvas
function compose() {
  const own = dense && kept.get(dense.frame);
  if (!own) return;
  const { width, height } = canvas;
  pen.save();
  paint(canvas, own.picture);
  if ($("view").value === "wipe") {
    const at = Math.round((width * $("wipe").value) / 100);
    pen.beginPath();
    pen.rect(at, 0, width - at, height);
    pen.clip();
    pen.drawImage(dense.picture, 0, 0, width, height);
    pen.fillStyle = "#7fb6d9";
    pen.fillRect(at, 0, 1, height);
  } else {
    pen.globalCompositeOperation = "difference";
    pen.drawImage(dense.picture, 0, 0, width, height);
    pen.globalCompositeOperation = "lighter";
    for (let times = 0; times < 3; times++) pen.drawImage(canvas, 0, 0); // doubles: x8
  }
  pen.restore();
}

function setView() {
  const on = besideMode() !== "off";
  const side = $("view").value === "side";
  $("view").disabled = !on;
  $("dense-figure").hidden = !(on && side);
  $("picture-name").hidden = !on;
  $("picture-name").textContent = side ? $("plan").value : `${$("plan").value} and dense`;
  $("wipe").hidden = !on || $("view").value !== "wipe";
  $("psnr-tile").hidden = !on;
  if (on && !side) compose();
}

$("beside").addEventListener("change", () => {
  send("beside", { mode: besideMode() });
  $("beside-note").textContent = MODES[besideMode()];
  if (besideMode() === "off") forgetPictures();
  setView();
  $("screen").focus();
});
$("view").addEventListener("change", () => {
  setView();
  $("screen").focus(); // keys move again
});
$("wipe").addEventListener("input", compose);

// ---- the map

let lastMap = null;
const COLOURS = { read: "127 182 217", merged: "224 164 88", replayed: "124 196 138", fetched: "206 130 196" };

const MEANING = {
  read: "bright: much of this place's past was read",
  merged: "bright: many entries of this place were merged or dropped",
  replayed: "bright: MLP outputs of the last frame were used again",
  fetched: "bright: much of what is read here came from host memory",
};

function drawMap() {
  const kind = $("map-kind").value;
  $("map").hidden = !kind || !lastMap;
  if ($("map").hidden) return;
  const names = lastMap.groups.map(({ layers: [low, high] }) =>
    low === high ? `layer ${low}` : `layers ${low}–${high}`,
  );
  if ($("map-group").length !== names.length) {
    $("map-group").replaceChildren(...names.map((name, i) => new Option(name, i)));
  }
  const values = lastMap.groups[$("map-group").value][kind];
  if (!values) {
    $("map").hidden = true;
    $("map-note").textContent = "not told of this plan and model";
    return;
  }
  const most = Math.max(...values) || 1; // colours are relative to it
  const [high, wide] = lastMap.grid;
  const box = canvas.getBoundingClientRect();
  Object.assign($("map").style, { width: `${box.width}px`, height: `${box.height}px` });
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

// ---- numbers

function refresh() {
  const now = performance.now();
  while (shownAt.length > (paused ? 0 : 3) && shownAt[0] < now - 1000 * WINDOW_S) shownAt.shift();
  put("shown", shownAt.length > 1 ? (shownAt.length - 1) / ((shownAt.at(-1) - shownAt[0]) / 1000) : null);
  put("key-p50", quantile(keyToPixel, 0.5), 0);
  put("key-p95", quantile(keyToPixel, 0.95), 0);
  const last = chunks.at(-1);
  if (!last) return;
  const recent = chunks.slice(-20);
  const sum = (name) => recent.reduce((total, one) => total + one[name], 0);
  put("made", (1000 * sum("frames")) / sum("step_ms"));
  put("step", sum("step_ms") / recent.length, 0);
  put("pairs", (100 * sum("pairs")) / sum("dense_pairs"));
  put("mlp", (100 * sum("mlp_share")) / recent.length);
  $("cache").textContent = bytes(last.cache_bytes);
  $("cache-dense").textContent = bytes(last.dense_cache_bytes);
  $("chunk").textContent = last.chunk;
}

function put(id, value, digits = 1) {
  $(id).textContent = value === null || !Number.isFinite(value) ? "–" : value.toFixed(digits);
}

function quantile(values, share) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}

function bytes(count) {
  const units = ["B", "kB", "MB", "GB"];
  const power = Math.min(3, Math.floor(Math.log10(Math.max(count, 1)) / 3));
  return `${(count / 1000 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}

// ---- keys and the pad

function press(action) {
  if (!session?.actions.includes(action) || held.includes(action)) return;
  held.push(action);
  tellKeys();
}

function lift(action) {
  held = held.filter((one) => one !== action);
  tellKeys();
}

function release() {
  held = [];
  tellKeys();
}

function tellKeys() {
  const action = held.at(-1) ?? "";
  for (const button of $("pad").children) {
    button.toggleAttribute("data-held", held.includes(button.dataset.action));
  }
  if (action === sentAction) return;
  sentAction = action;
  const id = send("keys", { actions: action });
  if (action) sentAt.set(id, performance.now());
}

function typing(target) {
  return target.closest("input, select, textarea") !== null;
}

addEventListener("keydown", (event) => {
  if (typing(event.target) || event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
  press(event.key.toLowerCase());
});
addEventListener("keyup", (event) => lift(event.key.toLowerCase()));
addEventListener("blur", release);
for (const button of $("pad").children) {
  const { action } = button.dataset;
  button.addEventListener("pointerdown", (event) => {
    button.setPointerCapture(event.pointerId);
    press(action);
  });
  for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) {
    button.addEventListener(end, () => lift(action));
  }
  button.addEventListener("contextmenu", (event) => event.preventDefault());
}

// ---- controls

let promptId = 0;

$("prompt-form").addEventListener("submit", (event) => {
  event.preventDefault();
  promptId = send("prompt", { text: $("prompt").value });
  $("screen").focus();
});
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
$("pause").addEventListener("click", () => {
  setPaused(!paused);
  send("pause", { paused });
});
$("record").addEventListener("click", () => {
  const on = $("record").ariaPressed !== "true";
  setRecording(on);
  send("record", { on });
});
$("save").addEventListener("click", () => send("log"));
$("load").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  const [file] = $("file").files;
  $("file").value = "";
  if (!file) return;
  if (file.size > settings.log_bytes) {
    notice(`An action log has at most ${bytes(settings.log_bytes)}.`);
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

function begin(fields) {
  notice("");
  send("reset", fields);
  if (paused) $("pause").click();
  $("screen").focus();
}

// the newest snapshot that is a second or more ago, else the oldest
function backTo() {
  const now = chunks.at(-1)?.chunk ?? session.chunk;
  const ago = Math.ceil(session.fps / (chunks.at(-1)?.frames ?? 1));
  return snapshots.filter((chunk) => chunk <= now - ago).at(-1) ?? snapshots[0];
}

function setSnapshots(found) {
  snapshots = found;
  $("back").disabled = !found.length;
}

function setPaused(value) {
  paused = value;
  $("pause").disabled = false;
  $("pause").textContent = paused ? "Go on" : "Pause";
}

function setRecording(on) {
  $("record").ariaPressed = String(on);
  $("record").textContent = on ? "Stop" : "Record";
}

function setStatus(state, words) {
  $("status").dataset.state = state;
  $("status").textContent = words;
}

function notice(words) {
  $("notice").textContent = words;
  $("notice").hidden = !words;
}

function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

setInterval(refresh, 400);
start();
