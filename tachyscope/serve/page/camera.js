// The visitor's camera: its pictures are sent, and the session follows them.

import { $, notice } from "./common.js";
import { send, sendPicture, state, subscribe } from "./session.js";

const eye = Object.assign(document.createElement("video"), { muted: true, playsInline: true });
let timer = 0;

async function begin() {
  try {
    const [height, width] = state.session.size;
    const size = { height: { ideal: height }, width: { ideal: width } };
    eye.srcObject = await navigator.mediaDevices.getUserMedia({ video: size });
    await eye.play();
  } catch {
    notice("There is no camera here: plug one in, allow it, and open the page on localhost or by https.");
    end();
    return;
  }
  notice("");
  send("reset", { strength: strength(), look: false });
}

function end() {
  clearInterval(timer);
  timer = 0;
  for (const track of eye.srcObject?.getTracks() ?? []) track.stop();
  eye.srcObject = null;
  show();
}

const strength = () => $("strength").value / 100;

function show() {
  const on = eye.srcObject !== null;
  $("camera").ariaPressed = String(on);
  $("camera").textContent = on ? "Stop" : "Begin";
  $("strength-note").textContent = `${$("strength").value} % noise${on ? ", a chunk behind you" : ""}`;
}

// the middle of the camera's picture, at the video's size
async function look() {
  const [height, width] = state.session.size;
  const scale = Math.min(eye.videoWidth / width, eye.videoHeight / height);
  if (!scale) return; // it has shown nothing yet
  const [wide, high] = [scale * width, scale * height];
  const canvas = new OffscreenCanvas(width, height);
  const pen = canvas.getContext("2d");
  pen.drawImage(eye, (eye.videoWidth - wide) / 2, (eye.videoHeight - high) / 2, wide, high, 0, 0, width, height);
  sendPicture(await canvas.convertToBlob({ type: "image/jpeg", quality: 0.85 }));
}

subscribe("begin", (session) => {
  clearInterval(timer);
  timer = 0;
  if (eye.srcObject === null) return;
  if (session.strength) {
    timer = setInterval(look, 1000 / session.fps);
    show();
  } else end();
});
subscribe("disconnected", () => {
  if (!timer) return;
  end();
  sessionStorage.removeItem("session"); // it was the camera's, and is gone with it
});

$("camera").addEventListener("click", () => {
  if (eye.srcObject === null) {
    begin();
    return;
  }
  end();
  send("reset", { strength: 0 });
});
$("strength").addEventListener("input", show);
$("strength").addEventListener("change", () => {
  if (timer) send("reset", { strength: strength() });
});
