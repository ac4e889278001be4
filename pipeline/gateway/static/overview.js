// Metrics and charts of the whole installation. Samples outlive the view, so that charts continue.

import { ApiError, ask } from "./api.js";
import { Chart } from "./charts.js";
import { brief, count, h, notice, percent, rate, say, short } from "./dom.js";
import { busiest, learn, quantiles } from "./latency.js";
import { poll } from "./poll.js";

const SECONDS = 3;
const seen = { tokens: [], backlog: [], waiting: [], held: [], ttft: [], itl: [] };
const LINES = ["p50", "p95"];

export const isBusy = (worker) => worker.shards > 0 || worker.waiting_tokens > 0 || (worker.metrics?.lane_open ?? 0) > 0;

/** Charts above the list of jobs. */
export function charts(signal) {
  const speed = new Chart("Throughput", "tokens/s", rate, seen.tokens, ["answers", "prompts"]);
  const ttft = new Chart("Time to first token", "", brief, seen.ttft, LINES);
  const itl = new Chart("Between tokens", "", brief, seen.itl, LINES);
  const backlog = new Chart("Backlog", "tokens", short, seen.backlog);
  const held = new Chart("Requests at workers", "", short, seen.held, ["running", "waiting"]);
  const waiting = new Chart("Waiting callers", "requests", short, seen.waiting);
  const all = [speed, ttft, itl, backlog, held, waiting].map((chart) => chart.node);
  const place = h("section", { className: "charts", "aria-label": "Installation" }, all);
  follow(signal, place, (status) => {
    const told = status.workers.filter((worker) => worker.metrics).map((worker) => worker.metrics);
    const sum = (kinds) => (told.length ? told.reduce((all, { rates }) => all + kinds.reduce((sum, kind) => sum + rates[kind], 0), 0) : null);
    speed.add([sum(["generated"]), sum(["prompt", "cached"])]);
    const tier = busiest(status.latency_bounds);
    for (const [chart, kind] of [[ttft, "ttft"], [itl, "itl"]]) {
      chart.add((tier && quantiles(tier, kind, status.latency_bounds)) ?? [null, null], tier ?? "");
    }
    backlog.add([status.backlog.tokens]);
    held.add(["running", "waiting"].map((name) => (told.length ? told.reduce((all, metrics) => all + inTiers(metrics, name), 0) : null)));
    waiting.add([status.lane?.waiting ?? null]);
  });
  return place;
}

/** Workers with their work, and the backlog. */
export function workersView(signal) {
  const [rows, tiers, kinds] = [h("tbody"), h("tbody"), h("tbody")];
  const lane = h("p", { className: "muted" });
  const limits = h("p", { className: "muted", hidden: true });
  const columns = ["Worker", "State", "Models", "#Shards", "#Requests", "#KV cache", "#Prefix hits", "#Step", "#Tokens/s"];
  const place = h("div", {},
    h("h1", {}, "Workers"),
    lane,
    limits,
    table("Workers", columns, rows),
    h("h2", {}, "Requests by tier"),
    table("Requests by tier", ["Tier", "#Running", "#Waiting", "#First token", "#Between tokens"], tiers),
    h("p", { className: "note" }, "Times are the median and the 95th percentile of the last minute, while this page is open."),
    h("h2", {}, "Backlog"),
    table("Backlog by model and tier", ["Model", "Tier", "#Jobs", "#Tokens left"], kinds));
  follow(signal, place, (status, headers) => {
    const { open, waiting } = status.lane ?? {};
    const { answered = 0, cached = 0 } = status.answers ?? {};
    say(lane, status.lane
      ? `Callers that this gateway answers now: ${count(open)}, of which ${count(waiting)} wait for the first token. Answers since it began: ${count(answered + cached)}, of which ${count(cached)} were there from before.`
      : "Samples of the workers need a key with the scope metrics: they add up the work of all tenants.");
    const most = headers.get("x-ratelimit-limit-requests");
    limits.hidden = most === null;
    if (most !== null) say(limits, `You have ${count(Number(headers.get("x-ratelimit-remaining-requests")))} of ${count(Number(most))} requests a minute left.`);
    fill(rows, status.workers.map(workerRow), "No worker is alive. Jobs are kept, and go on when one starts.");
    fill(tiers, tierRows(status), "No worker has reported its metrics yet.");
    fill(kinds, status.backlog.kinds.map(kindRow), "Nothing is queued.");
  });
  return place;
}

function follow(signal, place, take) {
  poll(async (until) => {
    try {
      const answer = await ask("/v1/status", { signal: until });
      const status = await answer.json();
      learn(status);
      take(status, answer.headers);
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
  const columns = body.closest("table").querySelectorAll("th").length;
  const shown = rows.length ? rows : [h("tr", {}, h("td", { colSpan: columns, className: "empty" }, empty))];
  body.replaceChildren(...shown);
}

const number = (name, ...children) => h("td", { className: "number", dataset: { name } }, ...children);

const inTiers = (metrics, name) => Object.values(metrics.tiers).reduce((sum, tier) => sum + tier[name], 0);

function workerRow(worker) {
  const state = worker.draining ? "draining" : worker.name === null ? "alive" : isBusy(worker) ? "busy" : "idle";
  const { metrics } = worker;
  const used = metrics?.kv_blocks ? metrics.kv_blocks_used / metrics.kv_blocks : null;
  const hits = metrics?.prefix_queried ? metrics.prefix_hits / metrics.prefix_queried : null;
  const steps = metrics?.steps.counts.reduce((sum, of) => sum + of, 0);
  return h("tr", {},
    h("td", { className: "mono" }, worker.name ?? "–"),
    h("td", {}, h("span", { className: `status ${state}` }, state)),
    h("td", {}, worker.models.join(", ") || "–"),
    number("Shards", worker.shards === null ? "–" : count(worker.shards)),
    number("Requests", metrics ? `${count(inTiers(metrics, "running"))} + ${count(inTiers(metrics, "waiting"))} waiting` : "–"),
    number("KV cache", percent(used), used === null ? null : h("meter", { min: 0, max: 1, value: used, "aria-hidden": "true" })),
    number("Prefix hits", percent(hits)),
    number("Step", brief(steps ? metrics.steps.seconds / steps : null)),
    number("Tokens/s", rate(worker.tokens_per_second)));
}

function tierRows(status) {
  const sums = new Map();
  for (const { metrics } of status.workers) {
    for (const [tier, { running, waiting }] of Object.entries(metrics?.tiers ?? {})) {
      const [all, queued] = sums.get(tier) ?? [0, 0];
      sums.set(tier, [all + running, queued + waiting]);
    }
  }
  return [...sums].map(([tier, [running, waiting]]) => {
    const times = (kind) => quantiles(tier, kind, status.latency_bounds)?.map(brief).join(" / ") ?? "–";
    return h("tr", {}, h("td", {}, tier), number("Running", count(running)), number("Waiting", count(waiting)), number("First token", times("ttft")), number("Between tokens", times("itl")));
  });
}

function kindRow(kind) {
  return h("tr", {}, h("td", {}, kind.model ?? "several"), h("td", {}, kind.tier), number("Jobs", count(kind.jobs)), number("Tokens left", short(kind.tokens)));
}
