// Pictures between two that the model drew: both turned to where the camera stands in between.
//
// The room is a box of 1 by 1 by `height`. A pose is x, y and degrees to the left; the picture is
// square, `slope` the tangent of half its field of view.

const SOFT = 0.12; // of a picture's half, over which it fades out at its edge
const FILL = 0.01; // weight of a third picture: it fills what the other two do not see

// of two poses, the one a share of the way from the first to the second
export function between(from, to, share) {
  const turn = ((to[2] - from[2] + 540) % 360) - 180;
  return [
    from[0] + share * (to[0] - from[0]),
    from[1] + share * (to[1] - from[1]),
    from[2] + share * turn,
  ];
}

// whether a step leads from one pose to the other, and no jump
export function isNear(from, to) {
  return Boolean(from && to) && distance(from, to) <= 1;
}

// of 45 degrees, or a fifth of the room's side, whichever is more
function distance(from, to) {
  const turn = Math.abs(((to[2] - from[2] + 540) % 360) - 180);
  return Math.max(turn / 45, Math.hypot(to[0] - from[0], to[1] - from[1]) / 0.2);
}

// where a turn to the next picture starts: at the view that is shown, but not farther behind the
// last picture than `third`, the one before it, as no picture shows what was there to see
export function startOf(shown, last, third) {
  return third && distance(shown, last.pose) > distance(third.pose, last.pose) ? third.pose : shown;
}

// the view from `pose`, from two pictures ({pixels, pose}): the second one's weight is `share`
export function warp(out, first, second, pose, share, room, third = null) {
  const { width, height } = out;
  const [cos, sin] = direction(pose[2]);
  const views = [
    { ...seen(first), weight: 1 - share },
    { ...seen(second), weight: share },
  ];
  if (third) views.push({ ...seen(third), weight: FILL });
  for (let row = 0, at = 0; row < height; row++) {
    const up = -(((row + 0.5) / height) * 2 - 1) * room.slope;
    for (let column = 0; column < width; column++, at += 4) {
      const right = (((column + 0.5) / width) * 2 - 1) * room.slope;
      const dx = cos + right * sin;
      const dy = sin - right * cos;
      // how far the wall, the floor or the ceiling is
      const tx = ((dx > 0 ? 1 : 0) - pose[0]) / (dx || 1e-9);
      const ty = ((dy > 0 ? 1 : 0) - pose[1]) / (dy || 1e-9);
      const tz = ((up > 0 ? room.height : 0) - room.eye) / (up || 1e-9);
      const far = Math.min(tx, ty, tz);
      blend(out.data, at, views, pose[0] + far * dx, pose[1] + far * dy, far * up, room.slope);
    }
  }
  return out;
}

function seen({ pixels, pose }) {
  const [cos, sin] = direction(pose[2]);
  return { pixels, x: pose[0], y: pose[1], cos, sin };
}

function direction(degrees) {
  const angle = (degrees * Math.PI) / 180;
  return [Math.cos(angle), Math.sin(angle)];
}

// a pixel: the colours that the pictures have of a place of the room, `z` above the eye
function blend(data, at, views, x, y, z, slope) {
  let total = 0;
  let red = 0;
  let green = 0;
  let blue = 0;
  for (const view of views) {
    const ahead = (x - view.x) * view.cos + (y - view.y) * view.sin;
    const aside = (x - view.x) * view.sin - (y - view.y) * view.cos;
    const deep = Math.max(ahead, 1e-3) * slope;
    const across = ahead > 0 ? aside / deep : Math.sign(aside) * 2;
    const down = -z / deep;
    const edge = 1 - Math.max(Math.abs(across), Math.abs(down));
    const weight = 1e-4 + view.weight * Math.min(1, Math.max(0, edge / SOFT));
    const { width, height, data: from } = view.pixels;
    const u = Math.min(width - 1.001, Math.max(0, ((across + 1) / 2) * width - 0.5));
    const v = Math.min(height - 1.001, Math.max(0, ((down + 1) / 2) * height - 0.5));
    const left = Math.floor(u);
    const top = Math.floor(v);
    const p = u - left;
    const q = v - top;
    const a = 4 * (top * width + left);
    const b = a + 4 * width;
    const wa = weight * (1 - p) * (1 - q);
    const wb = weight * p * (1 - q);
    const wc = weight * (1 - p) * q;
    const wd = weight * p * q;
    red += wa * from[a] + wb * from[a + 4] + wc * from[b] + wd * from[b + 4];
    green += wa * from[a + 1] + wb * from[a + 5] + wc * from[b + 1] + wd * from[b + 5];
    blue += wa * from[a + 2] + wb * from[a + 6] + wc * from[b + 2] + wd * from[b + 6];
    total += weight;
  }
  data[at] = red / total;
  data[at + 1] = green / total;
  data[at + 2] = blue / total;
  data[at + 3] = 255;
}
