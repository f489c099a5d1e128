// A walk as text for an address: the action log as JSON, deflated, in base64 of URLs.

export async function writeWalk(log) {
  const packed = await through(new Blob([JSON.stringify(log)]), new CompressionStream("deflate-raw"));
  const text = btoa(Array.from(new Uint8Array(packed), (byte) => String.fromCharCode(byte)).join(""));
  return text.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

// null without a text; raises where it is no walk, or one of more than `most` letters
export async function readWalk(text, most) {
  if (!text) return null;
  const bytes = Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (letter) =>
    letter.charCodeAt(0),
  );
  const open = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const parts = [];
  let size = 0;
  for (const reader = open.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) break;
    size += value.length;
    if (size > most) throw new RangeError("a walk that is too long");
    parts.push(value);
  }
  return JSON.parse(await new Blob(parts).text());
}

async function through(blob, stream) {
  return new Response(blob.stream().pipeThrough(stream)).arrayBuffer();
}
