// The connection to the server, and the state of its session. The protocol is in docs/serve.md.

import { $, fragment, notice, token } from "./common.js";
import { canDecode, forget, readFrame } from "./video.js";
import { readWalk } from "./walk.js";

const VERSION = 1;
const HEADER_BYTES = 16;
const TYPES = ["image/png", "image/jpeg", "image/webp"]; // by the header's format
const H264 = 3; // another format
const KEY = 2; // flag: a key frame
const LARGE = 320 * 480; // pixels from which a video is sent as H.264
const RECONNECT_MS = [300, 1000, 2000, 5000];
const FULL = 1013; // close code: all session slots are taken
const NO_SLOT = 503; // the code of the error message before it
const FULL_MS = 30_000; // until the next try
const ATTEMPTS = 30; // to connect, some two minutes: then the page gives up
const POSES = 4096; // chunks whose pose is kept

export const OWN = 0; // lane of the session's own pictures
export const state = { settings: null, session: null, poses: new Map(), chunk: -1 };

const listeners = {};
const holds = new Set(); // names of the parts of the page that want the session paused
let socket = null;
let retry = 0; // timer of the next try to connect
let opened = false; // whether this connection has its session
let nextOpening = null; // fields of the next `open` message: the address's walk, or a picture
let sentOpening = null; // the `nextOpening` that this connection has sent
let openingId = 0; // of the open or resume message
let video = false; // whether pictures come as H.264
let attempts = 0;
let newWhy = ""; // why a new session is here instead of the last one
let nextId = 1;
let decoding = Promise.resolve();

export function subscribe(type, listener) {
  (listeners[type] ??= []).push(listener);
}

function emit(type, message) {
  for (const listener of listeners[type] ?? []) listener(message);
}

export function send(type, fields = {}) {
  const id = nextId++;
  if (socket?.readyState === WebSocket.OPEN) socket.send(JSON.stringify({ type, id, ...fields }));
  return id;
}

// send a picture of the visitor's camera, unless earlier ones still wait in the socket
export function sendPicture(file) {
  if (socket?.readyState === WebSocket.OPEN && !socket.bufferedAmount) socket.send(file);
}

// pause the session as long as any part of the page holds it
export function hold(who, held) {
  const before = holds.size > 0;
  if (held) holds.add(who);
  else holds.delete(who);
  const paused = holds.size > 0;
  if (paused !== before) send("pause", { paused });
  emit("paused", paused);
}

export const isHeld = (who) => holds.has(who);

export async function start() {
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  const answer = await fetch("/v1/settings", { headers }).catch(() => null);
  if (!answer?.ok) {
    setStatus("ended", answer ? "not let in" : "no answer");
    notice(whyNot(answer));
    return;
  }
  state.settings = await answer.json();
  const [height, width] = state.settings.size ?? [0, 0];
  video = height * width >= LARGE && (await canDecode());
  try {
    const log = await readWalk(fragment.get("walk"), state.settings.log_bytes);
    nextOpening = log && { log };
  } catch {
    newWhy = "The link's walk cannot be read. Here is a new one.";
  }
  if (fragment.has("walk")) {
    sessionStorage.removeItem("session");
    history.replaceState(null, "", token ? `#token=${token}` : "/");
  }
  emit("settings", state.settings);
  connect();
}

// why there are no settings
function whyNot(answer) {
  if (!answer) return "The server does not answer: reload this page once it runs.";
  if (answer.status === 401) return "This server needs a token: add #token=… to the address.";
  return `The server refuses this page (status ${answer.status}): reload it in a minute.`;
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
  socket.onopen = sendOpening;
  socket.onmessage = (event) =>
    typeof event.data === "string" ? onMessage(JSON.parse(event.data)) : onPicture(event.data);
  socket.onclose = onClose;
}

function sendOpening() {
  const kept = JSON.parse(sessionStorage.getItem("session") ?? "null");
  const { settings } = state;
  const form = { format: video ? "h264" : "jpeg", quality: quality() };
  sentOpening = nextOpening;
  if (kept) openingId = send("resume", { ...kept, ...form });
  else if (nextOpening) openingId = send("open", { ...nextOpening, ...form });
  else if (settings.worlds) {
    const world = Number($("world").value);
    const fields = { plan: settings.page_plan, world, look: settings.look };
    openingId = send("open", { ...fields, ...form });
  } else openingId = send("open", { plan: settings.page_plan, ...form });
}

// close this session, and open one with these fields
export function openAnother(fields) {
  nextOpening = fields;
  sessionStorage.removeItem("session");
  if (socket.readyState === WebSocket.CLOSED) {
    clearTimeout(retry);
    connect();
  } else send("close"); // one that still connects opens with these fields
}

// pictures of a small world are small
const quality = () => (state.settings.look ? 95 : 85);

function onClose(event) {
  emit("disconnected", event);
  if (nextOpening && event.code === 1000) connect();
  else if (event.code === 1000 || event.code === 1008) {
    setStatus("ended", "ended");
    const next = sessionStorage.getItem("session") ? "go on" : "begin again";
    notice(`${event.reason || "The session has ended"}: reload this page to ${next}.`);
  } else if (event.code === FULL) {
    setStatus("waiting", "no room, trying again");
    retry = setTimeout(connect, FULL_MS);
  } else if (attempts >= ATTEMPTS) {
    setStatus("ended", "no answer");
    notice("The server does not go on with this session: reload this page to try again.");
  } else {
    setStatus("waiting", "reconnecting");
    retry = setTimeout(connect, RECONNECT_MS[Math.min(attempts++, RECONNECT_MS.length - 1)]);
  }
}

function onMessage(message) {
  if (message.type === "opened") onOpened(message);
  if (message.type === "opened" || message.type === "began") begin(message);
  if (message.generation !== undefined && message.generation !== state.session?.generation) return;
  if (message.type === "pose") {
    state.poses.set(message.chunk, message);
    state.poses.delete(message.chunk - POSES);
  }
  if (message.type === "chunk") state.chunk = message.chunk;
  if (message.type === "closed") {
    sessionStorage.removeItem("session");
    notice(nextOpening ? "" : message.reason);
  }
  if (message.type === "notice") notice(message.message);
  if (message.type === "error") onError(message);
  emit(message.type, message);
}

function onOpened({ session, secret }) {
  opened = true;
  attempts = 0;
  // a picture that was dropped since: its `close` message is on its way
  if (nextOpening !== sentOpening) return;
  nextOpening = null;
  sessionStorage.setItem("session", JSON.stringify({ session, secret }));
  setStatus("live", "live");
  notice(newWhy);
  newWhy = "";
  send("pause", { paused: holds.size > 0 });
}

function begin(message) {
  state.session = { ...state.session, ...message };
  state.poses.clear();
  state.chunk = message.chunk - 1;
  emit("begin", state.session);
}

// the server refuses what the session was to begin with: open a new one
function onError(message) {
  const kept = sessionStorage.getItem("session");
  const refused = !opened && (message.id ?? openingId) === openingId;
  if (message.code === NO_SLOT || !refused || !(kept || nextOpening)) {
    notice(message.message);
    return;
  }
  sessionStorage.removeItem("session");
  if (nextOpening === sentOpening) nextOpening = null;
  const why = kept ? "The server does not have your walk any more" : message.message;
  newWhy = `${why}. Here is a new one.`;
  sendOpening();
}

function onPicture(data) {
  const connection = socket;
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
      // the session may have begun again, or be another one
      if (!pixels || connection !== socket || header.generation !== state.session.generation) return;
      const { pose = null, given = false } = state.poses.get(header.chunk) ?? {};
      emit("picture", { ...header, pose, given, pixels });
    })
    .catch((fault) => console.error(fault));
}

// this browser cannot decode the stream: connect again, with JPEGs
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
