// The connection to the server, and what it told of the session: docs/serve.md has the protocol.

import { $, fragment, notice, token } from "./common.js";
import { canDecode, forget, readFrame } from "./video.js";
import { readWalk } from "./walk.js";

const VERSION = 1;
const HEADER_BYTES = 16;
const TYPES = ["image/png", "image/jpeg", "image/webp"];
const H264 = 3; // a format beside those
const KEY = 2; // a flag: it needs no picture before it
const LARGE = 320 * 480; // pixels from which a video is sent as H.264
const RECONNECT_MS = [300, 1000, 2000, 5000];
const FULL = 1013; // the close code where there is no room
const FULL_MS = 30_000;
const ATTEMPTS = 30; // without a session, some two minutes: then the page gives up
const POSES = 4096; // chunks whose pose is remembered

export const OWN = 0; // lanes
export const BESIDE = 1;
export const state = { settings: null, session: null, poses: new Map(), chunk: -1 };

const listeners = {};
const holds = new Set(); // who wants the session to pause
let socket = null;
let opened = false; // whether this connection has its session
let wish = null; // what the next session begins with: the address's walk, or a picture
let video = false; // whether pictures come as H.264
let attempts = 0;
let gone = ""; // why a new session is here instead of the last one
let nextId = 1;
let decoding = Promise.resolve();

export function hear(type, listener) {
  (listeners[type] ??= []).push(listener);
}

function tell(type, message) {
  for (const listener of listeners[type] ?? []) listener(message);
}

export function send(type, fields = {}) {
  const id = nextId++;
  if (socket?.readyState === WebSocket.OPEN) socket.send(JSON.stringify({ type, id, ...fields }));
  return id;
}

// a picture of the visitor's camera; none while others wait to be sent
export function sendPicture(file) {
  if (socket?.readyState === WebSocket.OPEN && !socket.bufferedAmount) socket.send(file);
}

// the session pauses while anyone holds it
export function hold(who, on) {
  const before = holds.size > 0;
  if (on) holds.add(who);
  else holds.delete(who);
  const paused = holds.size > 0;
  if (paused !== before) send("pause", { paused });
  tell("paused", paused);
}

export const isHeld = (who) => holds.has(who);

export async function start() {
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  const answer = await fetch("/v1/settings", { headers }).catch(() => null);
  if (!answer?.ok) {
    setStatus("ended", answer ? "not let in" : "no answer");
    const how = answer
      ? "This server needs a token: add #token=… to the address."
      : "The server does not answer: reload this page once it runs.";
    notice(how);
    return;
  }
  state.settings = await answer.json();
  const [height, width] = state.settings.size ?? [0, 0];
  video = height * width >= LARGE && (await canDecode());
  try {
    const log = await readWalk(fragment.get("walk"), state.settings.log_bytes);
    wish = log && { log };
  } catch {
    gone = "The link's walk cannot be read. Here is a new one.";
  }
  if (fragment.has("walk")) {
    sessionStorage.removeItem("session");
    history.replaceState(null, "", token ? `#token=${token}` : "/");
  }
  tell("settings", state.settings);
  connect();
}

function connect() {
  const url = new URL("/v1/sessions", location.href);
  url.protocol = url.protocol.replace("http", "ws");
  const protocols = [`tachyscope.v${VERSION}`, ...(token ? [`bearer.${token}`] : [])];
  setStatus("waiting", "connecting");
  opened = false;
  forget();
  socket = new WebSocket(url, protocols);
  socket.binaryType = "arraybuffer";
  socket.onopen = hello;
  socket.onmessage = (event) =>
    typeof event.data === "string" ? take(JSON.parse(event.data)) : see(event.data);
  socket.onclose = lost;
}

function hello() {
  const kept = JSON.parse(sessionStorage.getItem("session") ?? "null");
  const { settings } = state;
  const form = { format: video ? "h264" : "jpeg", quality: quality() };
  if (kept) send("resume", { ...kept, ...form });
  else if (wish) send("open", { ...wish, ...form });
  else if (settings.worlds) {
    const world = Number($("world").value);
    send("open", { plan: settings.page_plan, world, look: settings.look, ...form });
  } else send("open", { plan: settings.page_plan, ...form });
}

// close this session, and open one that begins with these fields
export function beginWith(fields) {
  wish = fields;
  sessionStorage.removeItem("session");
  send("close");
}

// pictures of a small world are small
const quality = () => (state.settings.look ? 95 : 85);

function lost(event) {
  tell("lost", event);
  if (wish && event.code === 1000) connect();
  else if (event.code === 1000 || event.code === 1008) {
    setStatus("ended", "ended");
    const next = sessionStorage.getItem("session") ? "go on" : "begin again";
    notice(`${event.reason || "The session has ended"}: reload this page to ${next}.`);
  } else if (event.code === FULL) {
    setStatus("waiting", "no room, trying again");
    setTimeout(connect, FULL_MS);
  } else if (attempts >= ATTEMPTS) {
    setStatus("ended", "no answer");
    notice("The server does not go on with this session: reload this page to try again.");
  } else {
    setStatus("waiting", "reconnecting");
    setTimeout(connect, RECONNECT_MS[Math.min(attempts++, RECONNECT_MS.length - 1)]);
  }
}

function take(message) {
  if (message.type === "opened") {
    opened = true;
    attempts = 0;
    wish = null;
    const { session, secret } = message;
    sessionStorage.setItem("session", JSON.stringify({ session, secret }));
    setStatus("live", "live");
    notice(gone);
    gone = "";
    send("pause", { paused: holds.size > 0 });
  }
  if (message.type === "opened" || message.type === "began") begin(message);
  if (message.generation !== undefined && message.generation !== state.session?.generation) return;
  if (message.type === "pose") {
    state.poses.set(message.chunk, message);
    state.poses.delete(message.chunk - POSES);
  }
  if (message.type === "chunk") state.chunk = message.chunk;
  if (message.type === "closed") {
    sessionStorage.removeItem("session");
    notice(wish ? "" : message.reason);
  }
  if (message.type === "notice") notice(message.message);
  if (message.type === "error") refused(message);
  tell(message.type, message);
}

function begin(message) {
  state.session = { ...state.session, ...message };
  state.poses.clear();
  state.chunk = message.chunk - 1;
  tell("begin", state.session);
}

// what the session was to begin with is refused: begin a new one
function refused(message) {
  const kept = sessionStorage.getItem("session");
  if (opened || !(kept || wish)) {
    notice(message.message);
    return;
  }
  sessionStorage.removeItem("session");
  wish = null;
  const why = kept ? "The server does not have your walk any more" : message.message;
  gone = `${why}. Here is a new one.`;
  hello();
}

function see(data) {
  const view = new DataView(data);
  if (view.getUint8(0) !== VERSION) return;
  const header = {
    lane: view.getUint8(2),
    generation: view.getUint32(4, true),
    chunk: view.getUint32(8, true),
    frame: view.getUint32(12, true),
  };
  const bytes = new Uint8Array(data, HEADER_BYTES);
  const kind = view.getUint8(1);
  const picture =
    kind === H264
      ? readFrame(header.lane, bytes, (view.getUint8(3) & KEY) !== 0).catch(noVideo)
      : readPicture(new Blob([bytes], { type: TYPES[kind] }));
  // pictures are shown in the order in which they came, however long each takes to decode
  decoding = decoding
    .then(async () => {
      const pixels = await picture;
      if (!pixels || header.generation !== state.session.generation) return;
      const { pose = null, given = false } = state.poses.get(header.chunk) ?? {};
      tell("picture", { ...header, pose, given, pixels });
    })
    .catch((fault) => console.error(fault));
}

// this browser fails at the stream: go on with pictures by themselves
function noVideo() {
  if (video) socket.close();
  video = false;
}

// a picture's file as ImageData
export async function readPicture(file) {
  const bitmap = await createImageBitmap(file);
  const { width, height } = bitmap;
  const pen = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  pen.drawImage(bitmap, 0, 0);
  bitmap.close();
  return pen.getImageData(0, 0, width, height);
}

function setStatus(condition, words) {
  $("status").dataset.state = condition;
  $("status").textContent = words;
}
