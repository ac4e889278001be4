// The list of jobs: rows keep their positions, and only changed cells are updated.

import { ApiError, getJson } from "./api.js";
import { createNotice, createStatusBadge, formatAge, formatDuration, formatNumber, formatRate, formatTime, h, setText, truncate } from "./dom.js";
import { createCharts, createTable } from "./overview.js";
import { poll } from "./poll.js";
import { computeProgress, computeRowRate, estimateSecondsLeft, isOpen } from "./rates.js";

const PAGE_SIZE = 20;
const MAX_JOBS = 100;
const OPEN_INTERVAL_SECONDS = 2;
const IDLE_INTERVAL_SECONDS = 6;
const FORBIDDEN_INTERVAL_SECONDS = 60;

export function createJobsView(signal) {
  const tableBody = h("tbody");
  const rows = new Map(); // job ID -> its row
  let limit = PAGE_SIZE;
  const moreButton = h("button", { type: "button", hidden: true, onclick: () => {
    limit = Math.min(MAX_JOBS, limit + PAGE_SIZE);
    document.dispatchEvent(new Event("tokenmill:refresh"));
  } }, "Show more");
  const list = h("div", { "aria-busy": "true" }, h("p", { className: "muted" }, "Loading…"));
  const listNodes = [createTable("Jobs", ["Job", "Status", "Progress", "#Rows/s", "#Time left", "#Cost", "Created"], tableBody), h("p", { className: "row" }, moreButton)];
  const view = h("div", {},
    createCharts(signal),
    h("div", { className: "heading" }, h("h1", {}, "Jobs"), h("a", { className: "button primary", href: "#/submit" }, "Submit a file")),
    list);

  poll(async (pollSignal) => {
    let page;
    try {
      page = await getJson(`/v1/batches?limit=${limit}`, pollSignal);
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 403) throw error;
      list.replaceChildren(createNotice("Not allowed with this key", error.message));
      return FORBIDDEN_INTERVAL_SECONDS;
    }
    list.setAttribute("aria-busy", "false");
    if (!page.data.length) {
      list.replaceChildren(createNotice("No jobs yet", "Submit a file of requests, one JSON document per line. Its job appears here.",
        h("a", { className: "button primary", href: "#/submit" }, "Submit a file")));
      return IDLE_INTERVAL_SECONDS;
    }
    if (!tableBody.isConnected) list.replaceChildren(...listNodes);
    updateRows(tableBody, rows, page.data);
    moreButton.hidden = !page.has_more || limit >= MAX_JOBS;
    return page.data.some(isOpen) ? OPEN_INTERVAL_SECONDS : IDLE_INTERVAL_SECONDS;
  }, OPEN_INTERVAL_SECONDS, signal);
  return view;
}

function updateRows(tableBody, rows, jobs) {
  const nodes = jobs.map((job) => {
    const row = rows.get(job.id) ?? new JobRow(job);
    rows.set(job.id, row);
    row.update(job);
    return row.node;
  });
  if (nodes.length !== tableBody.children.length || nodes.some((node, index) => tableBody.children[index] !== node)) tableBody.replaceChildren(...nodes);
}

class JobRow {
  constructor(job) {
    const link = h("a", { href: `#/jobs/${encodeURIComponent(job.id)}`, className: "mono" }, job.id);
    this.note = h("span", { className: "note" });
    this.statusCell = h("td");
    this.progressBar = new ProgressBar();
    this.rateCell = h("td", { className: "number", dataset: { name: "Rows/s" } });
    this.timeLeftCell = h("td", { className: "number", dataset: { name: "Time left" } });
    this.costCell = h("td", { className: "number", dataset: { name: "Cost" } });
    this.createdCell = h("td", { className: "nowrap", title: formatTime(job.created_at) });
    this.node = h("tr", {}, h("td", {}, link, this.note), this.statusCell, h("td", {}, this.progressBar.node), this.rateCell, this.timeLeftCell, this.costCell, this.createdCell);
  }

  update(job) {
    const rowRate = computeRowRate(job);
    const secondsLeft = estimateSecondsLeft(job, rowRate);
    setText(this.note, [job.model, job.tokenmill.tier, job.metadata?.name].filter(Boolean).map((text) => truncate(String(text), 60)).join(" · "));
    if (this.status !== job.status) this.statusCell.replaceChildren(createStatusBadge(job.status));
    this.status = job.status;
    this.progressBar.update(job);
    setText(this.rateCell, formatRate(rowRate));
    setText(this.timeLeftCell, secondsLeft === null ? "–" : `~${formatDuration(secondsLeft)}`);
    setText(this.costCell, formatJobCost(job));
    setText(this.createdCell, formatAge(job.created_at));
  }
}

/** A job's progress, as a bar and as text. */
export class ProgressBar {
  constructor() {
    this.bar = h("progress", { max: 1, "aria-label": "Rows done" });
    this.text = h("span", { className: "note" });
    this.node = h("div", { className: "progress" }, this.bar, this.text);
  }

  update(job) {
    const progress = computeProgress(job);
    const counts = job.request_counts;
    if (progress !== null || !isOpen(job)) this.bar.value = progress ?? 0;
    else this.bar.removeAttribute("value");
    this.bar.className = counts.failed ? "some-failed" : "";
    const failed = counts.failed ? `, ${formatNumber(counts.failed)} without an answer` : "";
    const withoutRows = isOpen(job) ? "being planned" : job.status === "failed" ? "rejected as a whole" : "ended before it was planned";
    const done = formatNumber(counts.completed + counts.failed);
    setText(this.text, counts.total ? `${done} of ${formatNumber(counts.total)}${failed}` : withoutRows);
  }
}

export function formatJobCost(job) {
  return formatCost(job.tokenmill?.cost);
}

export function formatCost(cost) {
  return typeof cost === "number" ? cost.toLocaleString("en", { maximumSignificantDigits: 3 }) : "–";
}
