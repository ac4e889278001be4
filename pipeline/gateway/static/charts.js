// A small chart of the values since the page was opened: one or two lines over the last minutes.

import { h, say, span, svg } from "./dom.js";

const WIDTH = 320;
const HEIGHT = 84;
const LEAST_SECONDS = 60;
const MOST_SECONDS = 300;

export class Chart {
  /** `name`: what is shown; `words`: how a value is written. `seen`: the points, which outlive the chart: moments, with a
   * value for each of `lines`, their names (none where there is one line); null where nothing is known. */
  constructor(name, unit, words, seen, lines = [""]) {
    this.seen = seen;
    this.words = words;
    this.names = lines;
    this.unit = h("span", {}, unit);
    this.values = lines.map(() => h("span", { className: "value" }, "–"));
    this.area = svg("path", { class: "area" });
    this.lines = lines.map((_, place) => svg("path", { class: place ? "line second" : "line" }));
    this.dots = lines.map((_, place) => svg("circle", { class: place ? "dot second" : "dot", r: 3, visibility: "hidden" }));
    this.top = svg("text", { class: "axis", x: WIDTH - 2, y: 11, "text-anchor": "end" });
    const base = svg("path", { class: "base", d: `M0 ${HEIGHT - 1}H${WIDTH}` });
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${name}: nothing seen yet` });
    this.picture.append(base, this.area, ...this.lines, ...this.dots, this.top);
    const now = lines.flatMap((line, place) => {
      const key = h("span", { className: place ? "key second" : "key", hidden: lines.length === 1 });
      return [h("span", { className: "nowrap" }, key, this.values[place], line && ` ${line}`), " "];
    });
    this.since = h("span");
    const foot = h("p", { className: "foot" }, this.since, h("span", {}, "now"));
    this.node = h("figure", { className: "card chart" }, h("h3", {}, name), h("p", { className: "now" }, now, this.unit), this.picture, foot);
    this.name = name;
    this.draw();
  }

  /** Adds the current values, one for each line. `unit`: replaces the previous unit. */
  add(values, unit) {
    const now = Date.now() / 1000;
    this.seen.push([now, ...values]);
    while (this.seen.length && this.seen[0][0] < now - MOST_SECONDS) this.seen.shift();
    if (unit !== undefined) say(this.unit, unit);
    this.draw();
  }

  draw() {
    const known = this.seen.flatMap(([, ...values]) => values.filter((value) => value !== null));
    if (!known.length) return;
    const now = this.seen.at(-1)[0];
    const most = Math.max(...known);
    const window = Math.min(MOST_SECONDS, Math.max(LEAST_SECONDS, now - this.seen[0][0]));
    const x = (at) => WIDTH - ((now - at) / window) * WIDTH;
    const y = (value) => HEIGHT - 2 - (value / (most || 1)) * (HEIGHT - 20);
    this.lines.forEach((line, place) => this.drawLine(line, place, x, y));
    this.top.textContent = `max ${this.words(most)}`;
    say(this.since, `${span(window)} ago`);
    const told = this.names.map((line, place) => `${line} ${this.words(this.seen.at(-1)[place + 1])}`.trim()).join(", ");
    this.picture.setAttribute("aria-label", `${this.name}: now ${told}, at most ${this.words(most)} in the last ${span(window)}`);
  }

  drawLine(line, place, x, y) {
    let path = "";
    let pen = false;
    for (const [at, ...values] of this.seen) {
      const value = values[place];
      if (value !== null) path += `${pen ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = value !== null;
    }
    line.setAttribute("d", path);
    const [at, ...values] = this.seen.at(-1);
    const value = values[place];
    say(this.values[place], this.words(value));
    this.dots[place].setAttribute("visibility", value === null ? "hidden" : "visible");
    if (value !== null) {
      this.dots[place].setAttribute("cx", (x(at) - 3).toFixed(1));
      this.dots[place].setAttribute("cy", y(value).toFixed(1));
    }
    if (this.lines.length === 1 && !this.seen.some(([, ...all]) => all[0] === null)) {
      this.area.setAttribute("d", `${path}V${HEIGHT - 1}H${x(this.seen[0][0]).toFixed(1)}Z`);
    }
  }
}
