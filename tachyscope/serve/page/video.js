// Pictures that come as H.264: decoded in the order in which they came, each at once.

const CONFIG = { codec: "avc1.4D4028", optimizeForLatency: true }; // main profile, Annex B

const lanes = new Map(); // lane -> its decoder, and what waits for its pictures
let count = 0;

// whether this browser decodes it
export async function canDecode() {
  const found = await globalThis.VideoDecoder?.isConfigSupported(CONFIG).catch(() => null);
  return found?.supported === true;
}

// another connection begins another stream; of this one no more pictures come
export function forget() {
  for (const { decoder, waiting } of lanes.values()) {
    if (decoder.state !== "closed") decoder.close();
    for (const { resolve } of waiting.values()) resolve(null);
  }
  lanes.clear();
}

// a packet as ImageData, or null; it rejects where the stream cannot be decoded
export function readFrame(lane, data, key) {
  if (!lanes.has(lane)) lanes.set(lane, open());
  const { decoder, waiting } = lanes.get(lane);
  return new Promise((resolve, reject) => {
    waiting.set(++count, { resolve, reject });
    decoder.decode(
      new EncodedVideoChunk({ type: key ? "key" : "delta", timestamp: count, data }),
    );
  });
}

function open() {
  const waiting = new Map(); // timestamp -> who waits for its picture
  const decoder = new VideoDecoder({
    output(frame) {
      waiting.get(frame.timestamp)?.resolve(pixelsOf(frame));
      waiting.delete(frame.timestamp);
      frame.close();
    },
    error(fault) {
      for (const { reject } of waiting.values()) reject(fault);
      waiting.clear();
    },
  });
  decoder.configure(CONFIG);
  return { decoder, waiting };
}

function pixelsOf(frame) {
  const { displayWidth: width, displayHeight: height } = frame;
  const pen = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  pen.drawImage(frame, 0, 0);
  return pen.getImageData(0, 0, width, height);
}
