// The first twenty seconds: the model is shown a room, turns around by itself, and its walls are
// held against the truth and against a copy that remembers its last 21 pictures.

import { $, WINDOW, make } from "./common.js";
import { along, isRunning, stop } from "./beside.js";
import { isMoving, onKeys } from "./keys.js";
import { hold, readPicture, send, state, subscribe } from "./session.js";

const SIDES = ["front", "left", "back", "right"];
const AGAIN_MS = 700; // a check is costly: the server takes two such a second
const ROWS = { truth: "truth", own: "ours", window: "last 21 pictures" };

let walls = []; // of each wall the newest chunk that faced it: pictures, and what is right
let compared = []; // the walls that a window was sent to
let scripted = -1; // the last chunk of the walk that plays by itself
let stood = ""; // where a wall was last faced from
const asked = new Map(); // id of a check -> what waits for its answer

subscribe("begin", (session) => {
  [walls, compared, stood] = [[], [], ""];
  asked.clear();
  hold("tour", false);
  scripted = session.script ? session.chunk + session.script - 1 : -1;
  const { look } = state.settings;
  $("strips").hidden = $("kept-number").hidden = !look || session.world === null;
  for (const row of Object.keys(ROWS)) for (let wall = 0; wall < 4; wall++) fill(row, wall);
  kept();
  if (session.script) return;
  say(session.actions ? "Press a key: its next picture answers." : "It goes on by itself.");
});

subscribe("chunk", ({ chunk, given, pose }) => {
  if (!state.settings.look || state.session.world === null) return;
  if (!given && pose[2] % 90 === 0 && stood !== String(pose)) {
    stood = String(pose);
    check(); // it faces a wall
  }
  const all = state.session.given;
  if (given) {
    say(`It is shown ${all + 1} true pictures of a room.`, `${chunk + 2} of ${all + 1}`);
  } else if (chunk <= scripted && !isMoving()) {
    const left = scripted - chunk;
    say("Now it turns around, and draws every picture from memory.", left ? `${left} to go` : "");
    if (!left) sendWindow("Is it the same room?");
  }
});

onKeys((action) => {
  if (!action) return;
  if (scripted >= 0 && state.chunk < scripted) {
    scripted = -1;
    say("You walk. Turn once around: is every wall as it was?");
  }
  if (isRunning()) stop();
});

// ---- right or wrong

// resolves with the server's answer, once its walls are taken up
function check() {
  return new Promise((resolve) => asked.set(send("check"), resolve));
}

subscribe("receipt", ({ id, phase }) => {
  const resolve = asked.get(id);
  if (!resolve || phase !== "refused") return;
  asked.delete(id);
  setTimeout(() => asked.set(send("check"), resolve), AGAIN_MS);
});

subscribe("check", async (message) => {
  for (const one of message.walls) {
    if (walls[one.wall]?.chunk >= one.chunk) continue;
    const entry = { chunk: one.chunk, right: one.right };
    walls[one.wall] = entry;
    [entry.own, entry.truth] = await Promise.all([one.made, one.truth].map(pictureOf));
    if (!compared.length) showWall(one.wall, entry);
  }
  kept();
  asked.get(message.id)?.(message);
  asked.delete(message.id);
});

function showWall(wall, entry) {
  fill("truth", wall, entry.truth);
  fill("own", wall, entry.own, entry.right);
}

const pictureOf = (text) =>
  readPicture(
    new Blob([Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))], { type: "image/jpeg" }),
  );

const judged = (found, name) => found.filter((one) => typeof one?.[name] === "boolean");

function kept() {
  const known = judged(walls, "right");
  const right = known.filter((one) => one.right).length;
  $("kept").textContent = known.length ? `${right} of ${known.length}` : "–";
  const fresh = walls.some((entry, wall) => entry && entry !== compared[wall]);
  $("again").hidden = isRunning() || state.chunk <= scripted || !fresh;
}

// ---- the window

async function sendWindow(words) {
  if (isRunning()) return;
  hold("tour", true);
  $("again").hidden = true;
  await check();
  if (isMoving() || isRunning() || !walls.some(Boolean)) {
    hold("tour", false);
    kept();
    return;
  }
  compared = [...walls];
  compared.forEach((entry, wall) => {
    fill("window", wall);
    if (entry) showWall(wall, entry);
  });
  say(`${words} A copy that remembers 21 pictures walks the same way.`);
  const walk = along(WINDOW, "last 21 pictures");
  hold("tour", false);
  try {
    await walk;
    for (const one of (await check()).beside) {
      const entry = compared[one.wall];
      if (entry?.chunk !== one.chunk) continue;
      entry.windowRight = one.right;
      fill("window", one.wall, await pictureOf(one.made), one.right);
    }
    verdict();
  } catch (fault) {
    say(isMoving() ? "You walk on." : `The copy did not arrive: ${fault.message}.`);
  }
  kept();
}

function verdict() {
  const own = judged(compared, "right");
  const other = judged(compared, "windowRight");
  const right = (found, name) => `${found.filter((one) => one[name]).length} of ${found.length}`;
  say(
    `${right(own, "right")} walls are as they were; the copy that remembers 21 ` +
      `has ${right(other, "windowRight")}. Now walk yourself.`,
  );
}

$("again").addEventListener("click", () => sendWindow("Is it the same?"));

// ---- the strips

for (const [row, label] of Object.entries(ROWS)) {
  const cells = SIDES.map((side) => {
    const canvas = make("canvas", { width: 64, height: 64, role: "img", ariaLabel: `${label}, ${side}: not seen yet` });
    const mark = make("span", { className: "mark", ariaHidden: true });
    const cell = make("td", {}, make("div", { className: "thumb" }, canvas, mark));
    cell.id = `${row}-${side}`;
    return cell;
  });
  $("walls").append(make("tr", {}, make("th", { scope: "row", textContent: label }), ...cells));
}

function fill(row, wall, pixels = null, right = undefined) {
  const cell = $(`${row}-${SIDES[wall]}`);
  const [canvas, mark] = [cell.querySelector("canvas"), cell.querySelector(".mark")];
  if (pixels) {
    Object.assign(canvas, { width: pixels.width, height: pixels.height });
    canvas.getContext("2d").putImageData(pixels, 0, 0);
  } else canvas.getContext("2d").clearRect(0, 0, canvas.width, canvas.height);
  cell.toggleAttribute("data-seen", pixels !== null);
  mark.textContent = right === true ? "✓" : right === false ? "✗" : "";
  mark.dataset.right = String(right);
  const words = !pixels ? "not seen yet" : right === undefined ? "seen" : right ? "right" : "wrong";
  canvas.ariaLabel = `${ROWS[row]}, ${SIDES[wall]}: ${words}`;
}

// `count` changes with every picture, so a screen reader does not announce it
function say(words, count = "") {
  if ($("line-words").textContent !== words) $("line-words").textContent = words;
  $("line-count").textContent = count;
}
