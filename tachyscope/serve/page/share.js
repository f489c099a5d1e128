// A link that repeats the walk, and a clip of it: ours, the full cache, the last 21 pictures.

import { $, WINDOW, download, make, notice } from "./common.js";
import { along, film, isRunning } from "./beside.js";
import { hold, send, state, subscribe } from "./session.js";
import { writeWalk } from "./walk.js";
import { between, isNear, warp } from "./warp.js";

const CLIP_MS = 6000;
const STEPS = 25; // pictures of a clip: a full turn
const PANEL = 320;
const GAP = 8;
const SEEN = 0.6; // of a clip's pictures that a plan must have
const FOOT = 64;
const LANES = [
  ["", "Tachyscope"],
  ["dense", "full cache"],
  [WINDOW, "the last 21 pictures"],
];
const KINDS = ["video/mp4;codecs=avc1.42E01F", "video/webm;codecs=vp9", "video/webm"];

let asked = 0; // the log message whose answer becomes a link

subscribe("begin", () => {
  $("share").disabled = false;
  $("clip").disabled = !window.MediaRecorder;
});

$("share").addEventListener("click", () => {
  asked = send("log");
});

subscribe("log", async (message) => {
  if (message.id !== asked) return;
  const url = new URL(location.href);
  url.hash = `walk=${await writeWalk(message.log)}`; // and no token
  $("share-link").value = url.href;
  $("share-box").showModal();
  $("share-link").select();
  navigator.clipboard?.writeText(url.href).catch(() => {});
});
$("share-close").addEventListener("click", () => $("share-box").close());

$("clip").addEventListener("click", async () => {
  if (isRunning()) {
    notice("One moment: another plan walks along.");
    return;
  }
  $("clip").disabled = true;
  hold("clip", true);
  try {
    const frames = walked();
    if (frames.length < 2) throw new Error("walk some steps first");
    for (const [plan, label] of LANES.slice(1)) {
      // a server drops pictures that a page is too slow for
      const have = frames.filter((frame) => film(plan).has(frame)).length;
      if (have < SEEN * frames.length) await along(plan, label);
    }
    const whole = frames.filter((frame) => LANES.every(([plan]) => film(plan).has(frame)));
    if (whole.length < 2) throw new Error("too few pictures came");
    const blob = await record(LANES.map(([plan]) => whole.map((frame) => film(plan).get(frame))));
    const kind = blob.type.includes("mp4") ? "mp4" : "webm";
    download(blob, `tachyscope-${state.session.world ?? "walk"}.${kind}`);
  } catch (fault) {
    notice(`No clip: ${fault.message}.`);
  }
  hold("clip", false);
  $("clip").disabled = false;
});

// the frames of the last steps that were drawn and are still here, up to where the walker stopped
function walked() {
  const own = [...film("").values()].filter((picture) => !picture.given);
  const moved = (picture, i) => i > 0 && String(picture.pose) !== String(own[i - 1].pose);
  const end = own.findLastIndex(moved) + 1 || own.length;
  return own.slice(Math.max(0, end - STEPS), end).map((picture) => picture.frame);
}

async function record(lanes) {
  const canvas = make("canvas", { width: 3 * PANEL + 2 * GAP, height: PANEL + FOOT });
  const pen = canvas.getContext("2d");
  const stream = canvas.captureStream(30);
  const mimeType = KINDS.find((kind) => MediaRecorder.isTypeSupported(kind));
  const recorder = new MediaRecorder(stream, { mimeType, videoBitsPerSecond: 4e6 });
  const parts = [];
  recorder.ondataavailable = (event) => parts.push(event.data);
  const done = new Promise((resolve) => {
    recorder.onstop = resolve;
  });
  const [height, width] = state.session.size;
  const buffer = new OffscreenCanvas(width, height);
  recorder.start();
  for (const begun = performance.now(); ; ) {
    const share = Math.min(1, (performance.now() - begun) / CLIP_MS);
    paint(pen, canvas, lanes, share, buffer);
    $("line-count").textContent = `clip ${Math.round(100 * share)} %`;
    if (share >= 1) break;
    await new Promise((resolve) => setTimeout(resolve, 33));
  }
  recorder.stop();
  await done;
  for (const track of stream.getTracks()) track.stop();
  $("line-count").textContent = "";
  return new Blob(parts, { type: recorder.mimeType });
}

function paint(pen, canvas, lanes, share, buffer) {
  pen.fillStyle = "#121417";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.imageSmoothingQuality = "high";
  pen.font = "22px system-ui, sans-serif";
  lanes.forEach((pictures, i) => {
    const place = share * (pictures.length - 1);
    const [before, after] = [pictures[Math.floor(place)], pictures[Math.ceil(place)]];
    buffer.getContext("2d").putImageData(turned(before, after, place % 1), 0, 0);
    const left = i * (PANEL + GAP);
    const high = (PANEL * buffer.height) / buffer.width;
    pen.drawImage(buffer, left, (PANEL - high) / 2, PANEL, high);
    pen.fillStyle = "#e8e6e1";
    pen.fillText(LANES[i][1], left + 10, PANEL + 27);
  });
  pen.fillStyle = "#8f9296";
  pen.font = "16px system-ui, sans-serif";
  const between = state.settings.room ? ", turned between pictures" : "";
  pen.fillText(`the same walk, ${lanes[0].length} pictures${between}`, 10, PANEL + 52);
}

function turned(before, after, share) {
  const { room } = state.settings;
  if (!room || before === after || !isNear(before.pose, after.pose)) return before.pixels;
  const out = new ImageData(before.pixels.width, before.pixels.height);
  return warp(out, before, after, between(before.pose, after.pose, share), share, room);
}
