// The page of `tachyscope play` and `serve`: docs/serve.md has the protocol.

import { $ } from "./common.js";
import { start, state, subscribe } from "./session.js";
import "./keys.js";
import "./screen.js";
import "./numbers.js";
import "./plan_map.js";
import "./beside.js";
import "./tour.js";
import "./share.js";
import "./lab.js";
import "./camera.js";

// what draws this, from what it has seen, what to press
subscribe("begin", (session) => {
  const { settings } = state;
  const who = `A network of ${count(session.parameters)} parameters`;
  const where = session.device === "cpu" ? "a CPU" : "a GPU";
  const turns = [...session.looks.slice(0, 2).toUpperCase()].join(" and ");
  const turn = turns && `, turn with ${turns} or drag the picture`;
  const keys = session.actions.includes("w") ? `Walk with W A S D${turn}.` : "";
  const seen = settings.look && session.world !== null && session.given;
  const grows = /^(dense|stock|lossless)\b/.test(session.plan);
  const memory = grows ? "a memory that grows with every picture" : "a memory that never grows";
  const noise = settings.random ? "Its weights are random: its pictures mean nothing. " : "";
  $("lead").replaceChildren(
    seen
      ? `${who} draws this room on ${where}. It saw ${session.given + 1} pictures of it; the rest it draws from ${memory}. `
      : `${who} draws this video on ${where} as you watch. ${noise}`,
    Object.assign(document.createElement("b"), { textContent: keys }),
  );
});

function count(number) {
  if (number >= 1e9) return `${(number / 1e9).toFixed(1)} billion`;
  if (number >= 1e6) return `${Math.round(number / 1e6)} million`;
  return number.toLocaleString("en");
}

$("more").addEventListener("click", () => {
  const on = $("more").ariaExpanded !== "true";
  $("more").ariaExpanded = String(on);
  document.body.classList.toggle("open", on);
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  if (on) $("lead").scrollIntoView({ behavior: still ? "auto" : "smooth" });
});

start();
