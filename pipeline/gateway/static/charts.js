// A small line chart of the values since the page was opened, over the last minutes.

import { createSvg, formatDuration, h, setText } from "./dom.js";

const WIDTH = 320;
const HEIGHT = 84;
const MIN_WINDOW_SECONDS = 60;
const MAX_WINDOW_SECONDS = 300;

export class Chart {
  /** `points`: [time, a value for each of `lineNames`, …], null where a value is unknown; the caller keeps them, so that they
   * outlive the chart. `formatValue`: formats a value. `lineNames`: one or two names; a single line has an empty name. */
  constructor(title, unit, formatValue, points, lineNames = [""]) {
    this.title = title;
    this.points = points;
    this.formatValue = formatValue;
    this.lineNames = lineNames;
    this.unit = h("span", {}, unit);
    this.values = lineNames.map(() => h("span", { className: "value" }, "–"));
    this.area = createSvg("path", { class: "area" });
    this.lines = lineNames.map((_, index) => createSvg("path", { class: index ? "line second" : "line" }));
    this.dots = lineNames.map((_, index) => createSvg("circle", { class: index ? "dot second" : "dot", r: 3, visibility: "hidden" }));
    this.maxLabel = createSvg("text", { class: "axis", x: WIDTH - 2, y: 11, "text-anchor": "end" });
    const baseline = createSvg("path", { class: "baseline", d: `M0 ${HEIGHT - 1}H${WIDTH}` });
    this.graph = createSvg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: no data yet` });
    this.graph.append(baseline, this.area, ...this.lines, ...this.dots, this.maxLabel);
    const currentValues = lineNames.flatMap((name, index) => {
      const legendKey = h("span", { className: index ? "legend-key second" : "legend-key", hidden: lineNames.length === 1 });
      return [h("span", { className: "nowrap" }, legendKey, this.values[index], name && ` ${name}`), " "];
    });
    this.windowStart = h("span");
    const timeAxis = h("p", { className: "time-axis" }, this.windowStart, h("span", {}, "now"));
    this.node = h("figure", { className: "card chart" }, h("h3", {}, title), h("p", { className: "current-values" }, currentValues, this.unit), this.graph, timeAxis);
    this.draw();
  }

  /** Adds the current values, one for each line. `unit`: replaces the previous unit. */
  addPoint(values, unit) {
    const now = Date.now() / 1000;
    this.points.push([now, ...values]);
    while (this.points.length && this.points[0][0] < now - MAX_WINDOW_SECONDS) this.points.shift();
    if (unit !== undefined) setText(this.unit, unit);
    this.draw();
  }

  draw() {
    const knownValues = this.points.flatMap(([, ...values]) => values.filter((value) => value !== null));
    if (!knownValues.length) return;
    const now = this.points.at(-1)[0];
    const max = Math.max(...knownValues);
    const windowSeconds = Math.min(MAX_WINDOW_SECONDS, Math.max(MIN_WINDOW_SECONDS, now - this.points[0][0]));
    const scaleX = (time) => WIDTH - ((now - time) / windowSeconds) * WIDTH;
    const scaleY = (value) => HEIGHT - 2 - (value / (max || 1)) * (HEIGHT - 20);
    this.lines.forEach((line, index) => this.drawLine(line, index, scaleX, scaleY));
    this.maxLabel.textContent = `max ${this.formatValue(max)}`;
    setText(this.windowStart, `${formatDuration(windowSeconds)} ago`);
    const current = this.lineNames.map((name, index) => `${name} ${this.formatValue(this.points.at(-1)[index + 1])}`.trim()).join(", ");
    this.graph.setAttribute("aria-label", `${this.title}: now ${current}, at most ${this.formatValue(max)} in the last ${formatDuration(windowSeconds)}`);
  }

  drawLine(line, index, scaleX, scaleY) {
    let path = "";
    let isConnected = false; // an unknown value leaves a gap in the line
    for (const [time, ...values] of this.points) {
      const value = values[index];
      if (value !== null) path += `${isConnected ? "L" : "M"}${scaleX(time).toFixed(1)} ${scaleY(value).toFixed(1)}`;
      isConnected = value !== null;
    }
    line.setAttribute("d", path);
    const [time, ...values] = this.points.at(-1);
    const value = values[index];
    setText(this.values[index], this.formatValue(value));
    this.dots[index].setAttribute("visibility", value === null ? "hidden" : "visible");
    if (value !== null) {
      this.dots[index].setAttribute("cx", (scaleX(time) - 3).toFixed(1));
      this.dots[index].setAttribute("cy", scaleY(value).toFixed(1));
    }
    if (this.lines.length === 1 && !this.points.some(([, value]) => value === null)) {
      this.area.setAttribute("d", `${path}V${HEIGHT - 1}H${scaleX(this.points[0][0]).toFixed(1)}Z`);
    }
  }
}
