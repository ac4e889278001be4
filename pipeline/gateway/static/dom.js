// DOM helpers and formats. External data becomes text nodes, never markup; the Content-Security-Policy enforces that.

const SVG_NAMESPACE = "http://www.w3.org/2000/svg";

/** Creates an element (`h` as in hyperscript). `properties`: properties, `on…` listeners, `dataset`, and attributes: `role`,
 * `for`, `scope`, `list`, and names with a dash such as `aria-…`. */
export function h(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (key === "dataset") Object.assign(node.dataset, value);
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key.includes("-") || key === "role" || key === "for" || key === "scope" || key === "list") node.setAttribute(key, value);
    else node[key] = value;
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

/** Creates an SVG element with these attributes. */
export function createSvg(name, attributes = {}, ...children) {
  const node = document.createElementNS(SVG_NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, String(value));
  node.append(...children);
  return node;
}

/** Sets a node's text only if it differs, so that selections and screen readers aren't disturbed. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Announces a text to screen readers. */
export function announce(text) {
  setText(document.getElementById("announcements"), text);
}

export const truncate = (text, maxLength) => (text.length > maxLength ? `${text.slice(0, maxLength)}…` : text);

const NUMBER_FORMAT = new Intl.NumberFormat("en");
const COMPACT_FORMAT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const TIME_FORMAT = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

export const formatNumber = (value) => (value === null || value === undefined ? "–" : NUMBER_FORMAT.format(Math.round(value)));
export const formatCompact = (value) => (value === null || value === undefined ? "–" : COMPACT_FORMAT.format(value));
export const formatPercent = (share) => (share === null || share === undefined ? "–" : `${Math.round(100 * share)} %`);

/** Formats a latency in milliseconds or seconds, with two digits. */
export function formatLatency(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  // 0.9995 s and more would be rounded to 1000 ms
  const [value, unit] = seconds < 0.9995 ? [seconds * 1000, "ms"] : [seconds, "s"];
  return `${value >= 10 ? Math.round(value) : value.toFixed(1)} ${unit}`;
}

export const formatRate = (value) => (value === null || value === undefined ? "–" : value >= 10 ? formatCompact(value) : value.toFixed(1));

/** Formats a Unix time as a local date and time. */
export function formatTime(seconds) {
  return seconds ? TIME_FORMAT.format(new Date(seconds * 1000)) : "–";
}

/** Formats the time since a Unix time. */
export function formatAge(seconds) {
  const age = Date.now() / 1000 - seconds;
  return age < 5 ? "just now" : `${formatDuration(age)} ago`;
}

export function formatDuration(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 48 * 3600) return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
  return `${Math.round(seconds / 86400)} days`;
}

export function formatSize(bytes) {
  const units = ["B", "kB", "MB", "GB"];
  let unit = 0;
  while (bytes >= 1000 && unit < units.length - 1) (bytes /= 1000), unit++;
  return `${unit ? bytes.toFixed(1) : bytes} ${units[unit]}`;
}

/** Creates a badge. A status becomes a class only if it has letters and underscores alone, since it is external data. */
export function createStatusBadge(status) {
  return h("span", { className: `status ${/^[a-z_]+$/.test(status) ? status : ""}` }, status.replaceAll("_", " "));
}

/** Creates a notice for an empty view or an error. */
export function createNotice(title, text, ...children) {
  return h("div", { className: "notice" }, h("h2", {}, title), h("p", {}, text), ...children);
}
