// Keys, the pad and dragging: the held actions are sent to the session.

import { $ } from "./common.js";
import { send, state, subscribe } from "./session.js";

const ARROWS = { arrowleft: 0, arrowright: 1, arrowup: 2, arrowdown: 3 }; // of what looks there
const WALKS = ["", "", "w", "s"]; // where nothing looks up and down
const SAMPLES = 100; // of key to pixel
const DRAG_MS = 50; // between two messages

export const keyToPixel = [];
export let taken = false; // whether a visitor has moved since the session began

const sentAt = new Map(); // id of a keys message -> when the key was pressed
const answeredBy = new Map(); // chunk -> when the keys that it answers were pressed
const watchers = [];
let held = []; // actions whose keys are down, newest last
let sentAction = "";
let dragged = null; // how far the pointer went since the last message

export const onKeys = (watcher) => watchers.push(watcher);
export const isMoving = () => held.length > 0 || dragged !== null;

subscribe("begin", (session) => {
  $("pad").hidden = !session.actions;
  for (const button of $("pad").children) {
    const turn = session.looks[button.dataset.turn];
    if (turn) {
      button.dataset.action = turn;
      button.querySelector("kbd").textContent = turn.toUpperCase();
    }
    button.hidden = !session.actions.includes(button.dataset.action);
  }
  $("screen").classList.toggle("drag", session.looks !== "");
  keyToPixel.length = 0;
  answeredBy.clear();
  taken = false;
});
subscribe("disconnected", release);
subscribe("receipt", (message) => {
  const pressed = sentAt.get(message.id);
  if (pressed === undefined || message.phase === "received") return;
  sentAt.delete(message.id);
  if (message.phase !== "applied") return;
  answeredBy.set(message.chunk, [...(answeredBy.get(message.chunk) ?? []), pressed]);
});

// a picture is on the screen: it answers the keys up to its chunk
export function answered(picture) {
  const now = performance.now();
  for (const [chunk, pressed] of answeredBy) {
    if (chunk > picture.chunk) continue;
    keyToPixel.push(...pressed.map((at) => now - at));
    answeredBy.delete(chunk);
  }
  while (keyToPixel.length > SAMPLES) keyToPixel.shift();
}

function press(action) {
  if (!action || !state.session?.actions.includes(action) || held.includes(action)) return;
  held.push(action);
  taken = true;
  change();
}

function lift(action) {
  if (!held.includes(action)) return;
  held = held.filter((one) => one !== action);
  change();
}

export function release() {
  held = [];
  change();
}

function change() {
  const action = chord();
  for (const button of $("pad").children) {
    button.toggleAttribute("data-held", held.includes(button.dataset.action));
  }
  if (action === sentAction) return;
  sentAction = action;
  const id = send("keys", { actions: action });
  if (action) sentAt.set(id, performance.now());
  for (const watcher of watchers) watcher(action);
}

// the two newest keys where they are one action together, else the newest
function chord() {
  const [first = "", second = ""] = held.slice(-2);
  const { chords = {} } = state.session ?? {};
  if (chords[first + second] || chords[second + first]) return first + second;
  return second || first;
}

function action(event) {
  const key = event.key.toLowerCase();
  const arrow = ARROWS[key];
  return arrow === undefined ? key : state.session?.looks[arrow] || WALKS[arrow];
}

addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, select, textarea, dialog");
  if (typing || event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key.startsWith("Arrow")) event.preventDefault();
  press(action(event));
});
addEventListener("keyup", (event) => lift(action(event)));
addEventListener("blur", release);
for (const button of $("pad").children) {
  button.addEventListener("pointerdown", (event) => {
    button.setPointerCapture(event.pointerId);
    press(button.dataset.action);
  });
  for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) {
    button.addEventListener(end, () => lift(button.dataset.action));
  }
  // without a pointer, by Enter or a screen reader: one step
  button.addEventListener("click", (event) => {
    if (event.detail > 0) return;
    press(button.dataset.action);
    lift(button.dataset.action);
  });
  button.addEventListener("contextmenu", (event) => event.preventDefault());
}

// ---- dragging: the picture goes with the pointer, and so the view goes the other way

$("screen").addEventListener("pointerdown", (event) => {
  if (!state.session?.looks || event.button) return;
  $("screen").setPointerCapture(event.pointerId);
  dragged = { x: event.clientX, y: event.clientY, at: performance.now() };
});
$("screen").addEventListener("pointermove", (event) => {
  if (dragged && performance.now() - dragged.at >= DRAG_MS) drag(event);
});
for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) {
  $("screen").addEventListener(end, (event) => {
    if (dragged && end === "pointerup") drag(event);
    dragged = null;
  });
}

function drag(event) {
  const most = 10_000; // what a message may say
  const [dx, dy] = [dragged.x - event.clientX, dragged.y - event.clientY].map((far) =>
    Math.round(Math.max(-most, Math.min(most, far))),
  );
  if (!dx && !dy) return;
  dragged = { x: event.clientX, y: event.clientY, at: performance.now() };
  sentAt.set(send("mouse", { dx, dy }), performance.now());
  taken = true;
  for (const watcher of watchers) watcher("mouse");
}
