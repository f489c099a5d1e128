// Another plan along the same walk: first in silence, as far as ours went; then, if wanted, in step.

import { $, notice, put } from "./common.js";
import { OWN, hold, send, subscribe } from "./session.js";
import { drew, screen } from "./screen.js";

const KEPT_BYTES = 48e6; // of pictures of each plan
const LAST_MS = 400; // for a run's last picture

const films = new Map(); // plan -> frame -> picture; "" is ours
let under = null; // the run under way: its plan, how far, and what to do then
let inStep = ""; // the plan that is shown in step
let pair = null; // the last two pictures of one frame

export const film = (plan) => films.get(plan) ?? new Map();
export const isRunning = (plan = under?.plan) => under !== null && under.plan === plan;

subscribe("begin", () => {
  films.clear();
  if (under) end("the walk began again");
  if (inStep) send("beside", { mode: "turns", plan: inStep });
});
subscribe("disconnected", () => {
  if (under) end("the connection was lost");
  if (inStep) leaveStep();
});

// have a plan walk along up to where ours is; resolves once it is there
export function along(plan, label, keep = false) {
  if (under) return Promise.reject(new Error("another plan is under way"));
  if (inStep) leaveStep();
  hold("beside", true);
  return new Promise((resolve, reject) => {
    under = { plan, label, keep, resolve, reject, id: send("beside", { mode: "follow", plan }) };
    progress(0);
  });
}

export const stop = () => under && end("it was stopped");

function end(fault = "") {
  const { keep, resolve, reject, plan } = under;
  under = null;
  $("ring").hidden = true;
  if (fault || !keep) send("beside", { mode: "off" });
  hold("beside", false);
  if (fault) reject(new Error(fault));
  else resolve(film(plan));
}

subscribe("receipt", (message) => {
  if (!under || message.id !== under.id || message.phase !== "refused") return;
  notice(message.reason);
  end(message.reason);
});

subscribe("beside", (message) => {
  if (message.psnr) put("psnr", message.psnr.at(-1));
  if (!under) return;
  progress((message.chunk + 1) / (message.chunk + 1 + message.behind));
  // its last picture comes after this message, if it is not dropped
  if (message.behind === 0) {
    const run = under;
    setTimeout(() => under === run && end(), LAST_MS);
  }
});

function progress(share) {
  const percent = Math.round(100 * share);
  $("ring").hidden = false;
  $("ring").style.setProperty("--share", `${percent}%`);
  $("ring").textContent = `${under.label}: ${percent} %`;
  $("ring").setAttribute("aria-valuenow", percent);
}

subscribe("picture", (picture) => {
  const plan = picture.lane === OWN ? "" : (under?.plan ?? inStep);
  const frames = films.get(plan) ?? new Map();
  films.set(plan, frames.set(picture.frame, picture));
  const most = Math.max(8, KEPT_BYTES / picture.pixels.data.length);
  while (frames.size > most) frames.delete(frames.keys().next().value);
  if (inStep) showPair(picture);
});

// ---- in step

$("beside").addEventListener("change", async () => {
  const { value: plan, selectedOptions } = $("beside");
  const label = selectedOptions[0].text;
  if (inStep) leaveStep();
  $("screen").focus();
  if (!plan) return;
  $("beside").value = plan;
  $("beside-note").textContent = "It walks the same way first, and is shown once it is there.";
  try {
    await along(plan, label, true);
    send("beside", { mode: "turns", plan });
    inStep = plan;
    screen.shows = false;
    setView();
    showPair(film(plan).get([...film(plan).keys()].at(-1)));
    $("beside-note").textContent = "A chunk of each in turns: in step, and slower.";
  } catch (fault) {
    $("beside").value = "";
    $("beside-note").textContent = `Not shown: ${fault.message}.`;
  }
});

function leaveStep() {
  send("beside", { mode: "off" });
  inStep = "";
  pair = null;
  screen.shows = true;
  $("beside").value = $("beside-note").textContent = "";
  put("psnr", null);
  setView();
}

function setView() {
  const side = inStep !== "" && $("view").value === "side";
  $("view").disabled = inStep === "";
  $("dense").hidden = $("dense-badge").hidden = !side;
  $("screen").classList.toggle("two", side);
  $("wipe").hidden = inStep === "" || $("view").value !== "wipe";
  $("psnr-row").hidden = inStep === "";
  if (inStep) {
    const other = $("beside").selectedOptions[0].text;
    $("badge").textContent = side ? "ours" : `ours and ${other}`;
    $("badge").classList.remove("given");
    $("dense-badge").textContent = other;
  }
  compose();
}

// both pictures of a frame, once both are here
function showPair(picture) {
  const own = film("").get(picture.frame);
  const other = film(inStep).get(picture.frame);
  if (!own || !other) return;
  pair = { own, other };
  compose();
  drew(own);
}

function compose() {
  if (!pair) return;
  const canvas = $("picture");
  const { width, height } = canvas;
  const [own, other] = [pair.own.pixels, pair.other.pixels];
  const view = $("view").value;
  const shown = new ImageData(new Uint8ClampedArray(own.data), width, height);
  if (view === "difference") {
    for (let i = 0; i < shown.data.length; i++) {
      shown.data[i] = i % 4 === 3 ? 255 : 8 * Math.abs(own.data[i] - other.data[i]);
    }
  }
  const pen = canvas.getContext("2d");
  pen.putImageData(shown, 0, 0);
  if (view === "wipe") {
    const at = Math.round((width * $("wipe").value) / 100);
    pen.putImageData(other, 0, 0, at, 0, width - at, height);
    pen.fillStyle = "#7fb6d9";
    pen.fillRect(at, 0, 1, height);
  }
  if (view === "side") {
    const panel = $("dense");
    Object.assign(panel, { width, height });
    panel.getContext("2d").putImageData(other, 0, 0);
  }
  canvas.dataset.frame = $("dense").dataset.frame = pair.own.frame;
}

$("view").addEventListener("change", () => {
  setView();
  $("screen").focus(); // keys move again
});
$("wipe").addEventListener("input", compose);
