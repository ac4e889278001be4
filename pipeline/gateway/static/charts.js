// A small chart of what was seen while the page is open: one line over the last minutes.

import { h, say, span, svg } from "./dom.js";

const WIDTH = 320;
const HEIGHT = 84;
const LEAST_SECONDS = 60;
const MOST_SECONDS = 300;

export class Chart {
  /** `name`: what is shown; `words`: how a value is written. `seen`: the points, which outlive the chart. */
  constructor(name, unit, words, seen) {
    this.seen = seen;
    this.words = words;
    this.value = h("span", { className: "value" }, "–");
    this.area = svg("path", { class: "area" });
    this.line = svg("path", { class: "line" });
    this.top = svg("text", { class: "axis", x: WIDTH - 2, y: 11, "text-anchor": "end" });
    this.dot = svg("circle", { class: "dot", r: 3, visibility: "hidden" });
    const base = svg("path", { class: "base", d: `M0 ${HEIGHT - 1}H${WIDTH}` });
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": name });
    this.picture.append(base, this.area, this.line, this.dot, this.top);
    const title = h("h3", {}, name);
    this.since = h("span");
    const foot = h("p", { className: "foot" }, this.since, h("span", {}, "now"));
    this.node = h("figure", { className: "card chart" }, title, h("p", { className: "now" }, this.value, ` ${unit}`), this.picture, foot);
    this.name = name;
    this.draw();
  }

  add(value) {
    const now = Date.now() / 1000;
    this.seen.push([now, value]);
    while (this.seen.length && this.seen[0][0] < now - MOST_SECONDS) this.seen.shift();
    this.draw();
  }

  draw() {
    const points = this.seen.filter(([, value]) => value !== null);
    if (!points.length) return;
    const now = this.seen.at(-1)[0];
    const most = Math.max(...points.map(([, value]) => value));
    const window = Math.min(MOST_SECONDS, Math.max(LEAST_SECONDS, now - this.seen[0][0]));
    const x = (at) => WIDTH - ((now - at) / window) * WIDTH;
    const y = (value) => HEIGHT - 2 - (value / Math.max(1, most)) * (HEIGHT - 20);
    const path = points.map(([at, value], place) => `${place ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    const last = points.at(-1);
    this.line.setAttribute("d", path);
    this.area.setAttribute("d", `${path}V${HEIGHT - 1}H${x(points[0][0]).toFixed(1)}Z`);
    this.dot.setAttribute("cx", (x(last[0]) - 3).toFixed(1));
    this.dot.setAttribute("cy", y(last[1]).toFixed(1));
    this.dot.setAttribute("visibility", "visible");
    this.top.textContent = `max ${this.words(most)}`;
    say(this.value, this.words(last[1]));
    say(this.since, `${span(window)} ago`);
    this.picture.setAttribute("aria-label", `${this.name}: now ${this.words(last[1])}, at most ${this.words(most)} in the last ${span(window)}`);
  }
}
