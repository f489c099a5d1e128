// Small things that every part of the page uses.

export const $ = (id) => document.getElementById(id);
export const fragment = new URLSearchParams(location.hash.slice(1));
export const token = fragment.get("token");
export const WINDOW = "dense cache=window:budget=21f";

export function put(id, value, digits = 1) {
  $(id).textContent = value === null || !Number.isFinite(value) ? "–" : value.toFixed(digits);
}

export function notice(words) {
  $("notice").textContent = words;
  $("notice").hidden = !words;
}

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB"];
  const power = Math.min(3, Math.floor(Math.log10(Math.max(count, 1)) / 3));
  return `${(count / 1000 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}

export function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

export function make(tag, fields = {}, ...children) {
  const one = Object.assign(document.createElement(tag), fields);
  one.append(...children);
  return one;
}
