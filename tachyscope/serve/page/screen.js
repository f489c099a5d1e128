// The picture: what the model drew, and between two of its pictures the last ones turned.

import { $ } from "./common.js";
import { OWN, state, subscribe } from "./session.js";
import { between, isNear, startOf, warp } from "./warp.js";

const LONGEST_MS = 900; // of a turn between two pictures
const BETWEEN_MS = 45; // at least, from one turned picture to the next: the model needs the CPU

const canvas = $("picture");
const pen = canvas.getContext("2d");
const still = matchMedia("(prefers-reduced-motion: reduce)");
let out = null; // ImageData
let last = null; // the last picture that came
let shown = null; // the pose that is shown
let apart = 400; // ms between pictures
let cameAt = 0;
let motion = null; // from one picture to the next
let turnedAt = 0;

export const screen = { shows: true, turned: 0 }; // `shows` is off while another part draws here

subscribe("begin", (session) => {
  const [height, width] = session.size ?? [canvas.height, canvas.width];
  if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
  $("screen").style.setProperty("--ratio", width / height);
  document.documentElement.style.setProperty("--ratio", width / height);
  out = new ImageData(width, height);
  motion = last = shown = null;
  canvas.dataset.frame = -1;
});

subscribe("picture", (picture) => {
  if (picture.lane !== OWN || !screen.shows) return;
  const now = performance.now();
  if (last) apart = 0.7 * apart + 0.3 * Math.min(LONGEST_MS, now - cameAt);
  cameAt = now;
  $("badge").hidden = !state.settings.look;
  $("badge").textContent = picture.given ? "true picture, shown to it" : "drawn by the network";
  $("badge").classList.toggle("given", picture.given);
  const turns = $("smooth").checked && !still.matches && state.settings.room && last;
  if (turns && isNear(last.pose, picture.pose) && String(shown) !== String(picture.pose)) {
    const idle = motion === null;
    // a picture that comes early finds the view behind the last one, which shows only a part of it
    const third = motion?.from ?? null;
    const pose = startOf(shown ?? last.pose, last, third);
    motion = { third, from: last, pose, to: picture, at: now, ms: 0.95 * apart };
    if (idle) requestAnimationFrame(turn);
  } else {
    motion = null;
    settle(picture);
  }
  last = picture;
  drew(picture);
});

function turn(now) {
  if (!motion || !screen.shows) {
    motion = null;
    return;
  }
  const share = Math.min(1, Math.max(0, (now - motion.at) / motion.ms));
  if (share >= 1) {
    settle(motion.to);
    motion = null;
    return;
  }
  if (now - turnedAt >= BETWEEN_MS) {
    turnedAt = now;
    shown = between(motion.pose, motion.to.pose, share);
    const { from, to, third } = motion;
    pen.putImageData(warp(out, from, to, shown, share, state.settings.room, third), 0, 0);
    screen.turned += 1;
  }
  requestAnimationFrame(turn);
}

// the model's picture itself
function settle(picture) {
  pen.putImageData(picture.pixels, 0, 0);
  shown = picture.pose;
  canvas.dataset.frame = picture.frame;
}

const watchers = [];
export const onShown = (watcher) => watchers.push(watcher);
export function drew(picture) {
  for (const watcher of watchers) watcher(picture);
}
