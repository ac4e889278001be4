// Metrics and charts of the whole installation. Points outlive the view, so that the charts continue.

import { ApiError, sendRequest } from "./api.js";
import { Chart } from "./charts.js";
import { createNotice, formatCompact, formatLatency, formatNumber, formatPercent, formatRate, h, setText } from "./dom.js";
import { addSamples, computeQuantiles, findMostUrgentTier } from "./latency.js";
import { poll } from "./poll.js";

const INTERVAL_SECONDS = 3;
const FORBIDDEN_INTERVAL_SECONDS = 60;
const points = { tokens: [], backlog: [], waitingRequests: [], workerRequests: [], ttft: [], itl: [] };
const QUANTILE_NAMES = ["p50", "p95"];

export const isBusy = (worker) => worker.shards > 0 || worker.waiting_tokens > 0 || (worker.metrics?.lane_open ?? 0) > 0;

/** Creates the charts above the list of jobs. */
export function createCharts(signal) {
  const throughput = new Chart("Throughput", "tokens/s", formatRate, points.tokens, ["answers", "prompts"]);
  const ttft = new Chart("Time to first token", "", formatLatency, points.ttft, QUANTILE_NAMES);
  const itl = new Chart("Inter-token latency", "", formatLatency, points.itl, QUANTILE_NAMES);
  const backlog = new Chart("Backlog", "tokens", formatCompact, points.backlog);
  const workerRequests = new Chart("Requests at workers", "", formatCompact, points.workerRequests, ["running", "waiting"]);
  const waitingRequests = new Chart("Waiting requests", "at this gateway", formatCompact, points.waitingRequests);
  const nodes = [throughput, ttft, itl, backlog, workerRequests, waitingRequests].map((chart) => chart.node);
  const section = h("section", { className: "charts", "aria-label": "Installation" }, nodes);
  pollStatus(signal, section, (status) => {
    const workerMetrics = status.workers.filter((worker) => worker.metrics).map((worker) => worker.metrics);
    const sumRates = (kinds) => (workerMetrics.length ? workerMetrics.reduce((total, { rates }) => total + kinds.reduce((sum, kind) => sum + rates[kind], 0), 0) : null);
    throughput.addPoint([sumRates(["generated"]), sumRates(["prompt", "cached"])]);
    const tier = findMostUrgentTier(status.latency_bounds);
    for (const [chart, kind] of [[ttft, "ttft"], [itl, "itl"]]) {
      chart.addPoint((tier && computeQuantiles(tier, kind, status.latency_bounds)) ?? [null, null], tier ?? "");
    }
    backlog.addPoint([status.backlog.tokens]);
    workerRequests.addPoint(["running", "waiting"].map((name) => (workerMetrics.length ? workerMetrics.reduce((total, metrics) => total + sumTiers(metrics, name), 0) : null)));
    waitingRequests.addPoint([status.lane?.waiting ?? null]);
  });
  return section;
}

/** Creates the view of the workers with their load, and of the backlog. */
export function createWorkersView(signal) {
  const [workerBody, tierBody, backlogBody] = [h("tbody"), h("tbody"), h("tbody")];
  const laneSummary = h("p", { className: "muted" });
  const rateLimit = h("p", { className: "muted", hidden: true });
  const columns = ["Worker", "State", "Models", "#Shards", "#Requests", "#KV cache", "#Prefix hits", "#Step", "#Tokens/s"];
  const view = h("div", {},
    h("h1", {}, "Workers"),
    laneSummary,
    rateLimit,
    createTable("Workers", columns, workerBody),
    h("h2", {}, "Requests by tier"),
    createTable("Requests by tier", ["Tier", "#Running", "#Waiting", "#TTFT", "#ITL"], tierBody),
    h("p", { className: "note" }, "TTFT (time to first token) and ITL (inter-token latency): median and 95th percentile of the last minute, measured while this page is open."),
    h("h2", {}, "Backlog"),
    createTable("Backlog by model and tier", ["Model", "Tier", "#Jobs", "#Tokens left"], backlogBody));
  pollStatus(signal, view, (status, headers) => {
    const { open, waiting } = status.lane ?? {};
    const { answered = 0, cached = 0 } = status.answers ?? {};
    setText(laneSummary, status.lane
      ? `Open requests at this gateway: ${formatNumber(open)}, of which ${formatNumber(waiting)} wait for the first token. Responses since its start: ${formatNumber(answered + cached)}, of which ${formatNumber(cached)} came from the answer store.`
      : "Worker metrics need a key with the scope metrics, since they add up the work of all tenants.");
    const limit = headers.get("x-ratelimit-limit-requests");
    rateLimit.hidden = limit === null;
    if (limit !== null) setText(rateLimit, `Rate limit: ${formatNumber(Number(headers.get("x-ratelimit-remaining-requests")))} of ${formatNumber(Number(limit))} requests per minute remain.`);
    fillTable(workerBody, status.workers.map(createWorkerRow), "No worker is alive. Jobs are queued until a worker starts.");
    fillTable(tierBody, createTierRows(status), "No worker has reported metrics yet.");
    fillTable(backlogBody, status.backlog.kinds.map(createBacklogRow), "The backlog is empty.");
  });
  return view;
}

/** Polls /v1/status and passes each response to `update`; a key without access replaces the children of `node` by a notice. */
function pollStatus(signal, node, update) {
  poll(async (pollSignal) => {
    try {
      const response = await sendRequest("/v1/status", { signal: pollSignal });
      const status = await response.json();
      addSamples(status);
      update(status, response.headers);
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 403) throw error;
      node.replaceChildren(createNotice("Not allowed with this key", error.message));
      return FORBIDDEN_INTERVAL_SECONDS;
    }
  }, INTERVAL_SECONDS, signal);
}

/** Creates a table around its body. A column title with a leading # marks a column of numbers. */
export function createTable(name, columns, tableBody) {
  const headers = columns.map((title) => h("th", { scope: "col", className: title[0] === "#" ? "number" : "" }, title.replace("#", "")));
  return h("div", { className: "card table-card", tabIndex: 0, role: "region", "aria-label": name },
    h("table", {}, h("thead", {}, h("tr", {}, headers)), tableBody));
}

function fillTable(tableBody, rows, emptyText) {
  const columnCount = tableBody.closest("table").querySelectorAll("th").length;
  const nodes = rows.length ? rows : [h("tr", {}, h("td", { colSpan: columnCount, className: "empty" }, emptyText))];
  tableBody.replaceChildren(...nodes);
}

const createNumberCell = (name, ...children) => h("td", { className: "number", dataset: { name } }, ...children);

const sumTiers = (metrics, name) => Object.values(metrics.tiers).reduce((sum, tier) => sum + tier[name], 0);

function createWorkerRow(worker) {
  const state = worker.draining ? "draining" : worker.name === null ? "alive" : isBusy(worker) ? "busy" : "idle";
  const { metrics } = worker;
  const kvCacheUsage = metrics?.kv_blocks ? metrics.kv_blocks_used / metrics.kv_blocks : null;
  const prefixHitRate = metrics?.prefix_queried ? metrics.prefix_hits / metrics.prefix_queried : null;
  const steps = metrics?.steps.counts.reduce((sum, count) => sum + count, 0);
  return h("tr", {},
    h("td", { className: "mono" }, worker.name ?? "–"),
    h("td", {}, h("span", { className: `status ${state}` }, state)),
    h("td", {}, worker.models.join(", ") || "–"),
    createNumberCell("Shards", worker.shards === null ? "–" : formatNumber(worker.shards)),
    createNumberCell("Requests", metrics ? `${formatNumber(sumTiers(metrics, "running"))} + ${formatNumber(sumTiers(metrics, "waiting"))} waiting` : "–"),
    createNumberCell("KV cache", formatPercent(kvCacheUsage), kvCacheUsage === null ? null : h("meter", { min: 0, max: 1, value: kvCacheUsage, "aria-hidden": "true" })),
    createNumberCell("Prefix hits", formatPercent(prefixHitRate)),
    createNumberCell("Step", formatLatency(steps ? metrics.steps.seconds / steps : null)),
    createNumberCell("Tokens/s", formatRate(worker.tokens_per_second)));
}

function createTierRows(status) {
  const requestsByTier = new Map(); // tier -> [running, waiting] over all workers
  for (const { metrics } of status.workers) {
    for (const [tier, { running, waiting }] of Object.entries(metrics?.tiers ?? {})) {
      const [totalRunning, totalWaiting] = requestsByTier.get(tier) ?? [0, 0];
      requestsByTier.set(tier, [totalRunning + running, totalWaiting + waiting]);
    }
  }
  return [...requestsByTier].map(([tier, [running, waiting]]) => {
    const formatQuantiles = (kind) => computeQuantiles(tier, kind, status.latency_bounds)?.map(formatLatency).join(" / ") ?? "–";
    return h("tr", {}, h("td", {}, tier), createNumberCell("Running", formatNumber(running)), createNumberCell("Waiting", formatNumber(waiting)), createNumberCell("TTFT", formatQuantiles("ttft")), createNumberCell("ITL", formatQuantiles("itl")));
  });
}

function createBacklogRow(kind) {
  return h("tr", {}, h("td", {}, kind.model ?? "several"), h("td", {}, kind.tier), createNumberCell("Jobs", formatNumber(kind.jobs)), createNumberCell("Tokens left", formatCompact(kind.tokens)));
}
