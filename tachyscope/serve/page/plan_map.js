// The room from above: where the walker stands and went, and whose memory the last picture read.

import { $ } from "./common.js";
import { state, subscribe } from "./session.js";

const TRAIL = 240; // steps
const EDGE = 0.06; // around the room, of its width
const canvas = $("plan-map");
const pen = canvas.getContext("2d");
const dark = matchMedia("(prefers-color-scheme: dark)");

let trail = [];
let read = [];

subscribe("begin", (session) => {
  [trail, read] = [[], []];
  $("plan-figure").hidden = !state.settings.room || session.world === null;
});
subscribe("pose", ({ pose }) => {
  if (!pose) return;
  trail = [...trail, pose].slice(-TRAIL);
  draw();
});
subscribe("chunk", (message) => {
  read = message.read ?? [];
  const count = read.length;
  $("plan-map-note").textContent = count
    ? `blue: the ${count} pictures that it just remembered`
    : "the room from above";
  draw();
});
dark.addEventListener("change", draw);

// the front wall is above, the left one to the left
function at([x, y]) {
  const room = canvas.width * (1 - 2 * EDGE);
  return [canvas.width * EDGE + (1 - y) * room, canvas.height * EDGE + (1 - x) * room];
}

function colour(name) {
  return getComputedStyle(canvas).getPropertyValue(name);
}

function draw() {
  const pose = trail.at(-1);
  if (!pose) return;
  pen.clearRect(0, 0, canvas.width, canvas.height);
  const [left, top] = at([1, 1]);
  const [right, bottom] = at([0, 0]);
  pen.fillStyle = colour("--raised");
  pen.strokeStyle = colour("--ink");
  pen.lineWidth = 5;
  pen.beginPath();
  pen.rect(left, top, right - left, bottom - top);
  pen.fill();
  pen.stroke();
  wedge(pose);
  pen.lineWidth = 2;
  pen.strokeStyle = colour("--soft");
  pen.beginPath();
  for (const one of trail) pen.lineTo(...at(one));
  pen.stroke();
  for (const one of read) memory(one);
  const [x, y] = at(pose);
  dot(x, y, 7, colour("--ink"));
  const side = ["front", "left", "back", "right"][Math.round(pose[2] / 90) % 4];
  canvas.ariaLabel = `The room from above: you face the ${side} wall; ${read.length} memories read`;
}

// what is in view
function wedge(pose) {
  const half = Math.atan(state.settings.room.slope);
  const [x, y] = at(pose);
  const angle = -Math.PI / 2 - (pose[2] * Math.PI) / 180;
  const reach = canvas.width * 0.3;
  const light = pen.createRadialGradient(x, y, 0, x, y, reach);
  light.addColorStop(0, colour("--view"));
  light.addColorStop(1, "transparent");
  pen.fillStyle = light;
  pen.beginPath();
  pen.moveTo(x, y);
  pen.arc(x, y, reach, angle - half, angle + half);
  pen.fill();
}

// a place whose picture was read, and where that looked
function memory(pose) {
  const [x, y] = at(pose);
  const angle = -Math.PI / 2 - (pose[2] * Math.PI) / 180;
  const [tipX, tipY] = [x + 34 * Math.cos(angle), y + 34 * Math.sin(angle)];
  pen.strokeStyle = colour("--accent");
  pen.lineWidth = 2;
  pen.beginPath();
  pen.moveTo(x, y);
  pen.lineTo(tipX, tipY);
  pen.stroke();
  dot(tipX, tipY, 5, colour("--accent"));
}

function dot(x, y, radius, fill) {
  pen.fillStyle = fill;
  pen.beginPath();
  pen.arc(x, y, radius, 0, 2 * Math.PI);
  pen.fill();
}
