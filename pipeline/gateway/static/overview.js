// Figures and charts of the whole installation. What was seen outlives the view, so that charts go on.

import { ApiError, get } from "./api.js";
import { Chart } from "./charts.js";
import { count, h, notice, rate, say, short } from "./dom.js";
import { poll } from "./poll.js";

const SECONDS = 3;
const seen = { tokens: [], backlog: [], waiting: [] };

export const isBusy = (worker) => worker.shards > 0 || worker.waiting_tokens > 0;

/** Charts on top of the jobs. */
export function charts(signal) {
  const speed = new Chart("Throughput", "tokens/s", rate, seen.tokens);
  const backlog = new Chart("Backlog", "tokens", short, seen.backlog);
  const waiting = new Chart("Waiting callers", "requests", short, seen.waiting);
  const place = h("section", { className: "charts", "aria-label": "Installation" }, speed.node, backlog.node, waiting.node);
  follow(signal, place, (status) => {
    const busy = status.workers.filter(isBusy);
    const known = busy.filter((worker) => worker.tokens_per_second !== null);
    speed.add(known.reduce((sum, worker) => sum + worker.tokens_per_second, 0));
    backlog.add(status.backlog.tokens);
    waiting.add(status.lane.waiting);
  });
  return place;
}

/** Workers, what each has, and what waits for them. */
export function workersView(signal) {
  const rows = h("tbody");
  const kinds = h("tbody");
  const lane = h("p", { className: "muted" });
  const place = h("div", {},
    h("h1", {}, "Workers"),
    lane,
    table("Workers", ["Worker", "State", "Models", "#Shards", "#Waiting tokens", "#Tokens/s"], rows),
    h("h2", {}, "Backlog"),
    table("Backlog by model and tier", ["Model", "Tier", "#Jobs", "#Tokens left"], kinds));
  follow(signal, place, (status) => {
    const { open, waiting } = status.lane;
    say(lane, `Callers that this gateway answers now: ${count(open)}, of which ${count(waiting)} wait for the first token.`);
    fill(rows, status.workers.map(workerRow), "No worker is alive. Jobs are kept, and go on when one starts.");
    fill(kinds, status.backlog.kinds.map(kindRow), "Nothing is queued.");
  });
  return place;
}

function follow(signal, place, take) {
  poll(async (until) => {
    try {
      take(await get("/v1/status", until));
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 403) throw error;
      place.replaceChildren(notice("Not for this key", error.message));
      return 60;
    }
  }, SECONDS, signal);
}

export function table(name, columns, body) {
  const heads = columns.map((title) => h("th", { scope: "col", className: title[0] === "#" ? "number" : "" }, title.replace("#", "")));
  return h("div", { className: "card wide", tabIndex: 0, role: "region", "aria-label": name },
    h("table", {}, h("thead", {}, h("tr", {}, heads)), body));
}

function fill(body, rows, empty) {
  const shown = rows.length ? rows : [h("tr", {}, h("td", { colSpan: 6, className: "empty" }, empty))];
  body.replaceChildren(...shown);
}

const number = (name, text) => h("td", { className: "number", dataset: { name } }, text);

function workerRow(worker) {
  const state = worker.draining ? "draining" : isBusy(worker) ? "busy" : "idle";
  return h("tr", {},
    h("td", { className: "mono" }, worker.name),
    h("td", {}, h("span", { className: `status ${state}` }, state)),
    h("td", {}, worker.models.join(", ") || "–"),
    number("Shards", count(worker.shards)), number("Waiting tokens", short(worker.waiting_tokens)), number("Tokens/s", rate(worker.tokens_per_second)));
}

function kindRow(kind) {
  return h("tr", {}, h("td", {}, kind.model ?? "several"), h("td", {}, kind.tier), number("Jobs", count(kind.jobs)), number("Tokens left", short(kind.tokens)));
}
