// DOM helpers. External data becomes text nodes, never markup; the Content-Security-Policy enforces that.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `given`: properties, `on…` listeners, `dataset`, and `aria-…` and other names with a dash as attributes. */
export function h(name, given = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(given)) {
    if (value === undefined || value === null) continue;
    if (key === "dataset") Object.assign(made.dataset, value);
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key.includes("-") || key === "role" || key === "for" || key === "scope" || key === "list") made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

/** An element of SVG with these attributes. */
export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.append(...children);
  return made;
}

/** Sets a node's text only if it differs, so that selections and screen readers aren't disturbed. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Announces a text to screen readers. */
export function announce(text) {
  say(document.getElementById("told"), text);
}

export const cut = (text, most) => (text.length > most ? `${text.slice(0, most)}…` : text);

const NUMBERS = new Intl.NumberFormat("en");
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const MOMENTS = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

export const count = (value) => (value === null || value === undefined ? "–" : NUMBERS.format(Math.round(value)));
export const short = (value) => (value === null || value === undefined ? "–" : SHORT.format(value));
export const percent = (share) => (share === null || share === undefined ? "–" : `${Math.round(100 * share)} %`);

/** A time in milliseconds or seconds, with two digits. */
export function brief(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const [value, unit] = seconds < 0.9995 ? [seconds * 1000, "ms"] : [seconds, "s"];
  return `${value >= 10 ? Math.round(value) : value.toFixed(1)} ${unit}`;
}

export const rate = (value) => (value === null || value === undefined ? "–" : value >= 10 ? short(value) : value.toFixed(1));

export function moment(seconds) {
  return seconds ? MOMENTS.format(new Date(seconds * 1000)) : "–";
}

export function ago(seconds) {
  const passed = Date.now() / 1000 - seconds;
  return passed < 5 ? "just now" : `${span(passed)} ago`;
}

export function span(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 48 * 3600) return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
  return `${Math.round(seconds / 86400)} days`;
}

export function size(bytes) {
  const units = ["B", "kB", "MB", "GB"];
  let unit = 0;
  while (bytes >= 1000 && unit < units.length - 1) (bytes /= 1000), unit++;
  return `${unit ? bytes.toFixed(1) : bytes} ${units[unit]}`;
}

export function status(word) {
  return h("span", { className: `status ${/^[a-z_]+$/.test(word) ? word : ""}` }, word.replaceAll("_", " "));
}

/** A notice for an empty view or an error. */
export function notice(title, text, ...more) {
  return h("div", { className: "notice" }, h("h2", {}, title), h("p", {}, text), ...more);
}
