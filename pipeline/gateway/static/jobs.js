// The list of jobs: rows keep their positions, and only changed cells are updated.

import { ApiError, get } from "./api.js";
import { ago, count, cut, h, moment, notice, rate, say, span, status } from "./dom.js";
import { charts, table } from "./overview.js";
import { poll } from "./poll.js";
import { isOpen, left, rowRate, share } from "./rates.js";

const STEP = 20;
const MOST = 100;
const OPEN_SECONDS = 2;
const IDLE_SECONDS = 6;

export function jobsView(signal) {
  const body = h("tbody");
  const rows = new Map();
  let limit = STEP;
  const more = h("button", { type: "button", hidden: true, onclick: () => {
    limit = Math.min(MOST, limit + STEP);
    document.dispatchEvent(new Event("tokenmill:again"));
  } }, "Show more");
  const list = h("div", { "aria-busy": "true" }, h("p", { className: "muted" }, "Looking…"));
  const whole = [table("Jobs", ["Job", "Status", "Progress", "#Rows/s", "#Time left", "#Cost", "Made"], body), h("p", { className: "row" }, more)];
  const place = h("div", {},
    charts(signal),
    h("div", { className: "heading" }, h("h1", {}, "Jobs"), h("a", { className: "button first", href: "#/submit" }, "Submit a file")),
    list);

  poll(async (until) => {
    let page;
    try {
      page = await get(`/v1/batches?limit=${limit}`, until);
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 403) throw error;
      list.replaceChildren(notice("Not for this key", error.message));
      return 60;
    }
    list.setAttribute("aria-busy", "false");
    if (!page.data.length) {
      list.replaceChildren(notice("No jobs yet", "Drop a file of requests, one JSON document a line, and its answers appear here.",
        h("a", { className: "button first", href: "#/submit" }, "Submit a file")));
      return IDLE_SECONDS;
    }
    if (!body.isConnected) list.replaceChildren(...whole);
    show(body, rows, page.data);
    more.hidden = !page.has_more || limit >= MOST;
    return page.data.some(isOpen) ? OPEN_SECONDS : IDLE_SECONDS;
  }, OPEN_SECONDS, signal);
  return place;
}

function show(body, rows, jobs) {
  const wanted = jobs.map((job) => {
    const row = rows.get(job.id) ?? new Row(job);
    rows.set(job.id, row);
    row.update(job);
    return row.node;
  });
  if (wanted.length !== body.children.length || wanted.some((node, place) => body.children[place] !== node)) body.replaceChildren(...wanted);
}

class Row {
  constructor(job) {
    const link = h("a", { href: `#/jobs/${encodeURIComponent(job.id)}`, className: "mono" }, job.id);
    this.note = h("span", { className: "note" });
    this.status = h("td");
    this.bar = new Bar();
    this.rate = h("td", { className: "number", dataset: { name: "Rows/s" } });
    this.left = h("td", { className: "number", dataset: { name: "Time left" } });
    this.cost = h("td", { className: "number", dataset: { name: "Cost" } });
    this.made = h("td", { className: "nowrap", title: moment(job.created_at) });
    this.node = h("tr", {}, h("td", {}, link, this.note), this.status, h("td", {}, this.bar.node), this.rate, this.left, this.cost, this.made);
  }

  update(job) {
    const perSecond = rowRate(job);
    const seconds = left(job, perSecond);
    say(this.note, [job.model, job.tokenmill.tier, job.metadata?.name].filter(Boolean).map((text) => cut(String(text), 60)).join(" · "));
    if (this.word !== job.status) this.status.replaceChildren(status(job.status));
    this.word = job.status;
    this.bar.update(job);
    say(this.rate, rate(perSecond));
    say(this.left, seconds === null ? "–" : `~${span(seconds)}`);
    say(this.cost, cost(job));
    say(this.made, ago(job.created_at));
  }
}

/** A job's progress, as a bar and as text. */
export class Bar {
  constructor() {
    this.bar = h("progress", { max: 1, "aria-label": "Rows done" });
    this.words = h("span", { className: "note" });
    this.node = h("div", { className: "progress" }, this.bar, this.words);
  }

  update(job) {
    const done = share(job);
    const counts = job.request_counts;
    if (done !== null || !isOpen(job)) this.bar.value = done ?? 0;
    else this.bar.removeAttribute("value");
    this.bar.className = counts.failed ? "some-failed" : "";
    const failed = counts.failed ? `, ${count(counts.failed)} without an answer` : "";
    say(this.words, counts.total ? `${count(counts.completed + counts.failed)} of ${count(counts.total)}${failed}` : isOpen(job) ? "being planned" : "refused as a whole");
  }
}

export function cost(job) {
  return money(job.tokenmill?.cost);
}

export function money(value) {
  return typeof value === "number" ? value.toLocaleString("en", { maximumSignificantDigits: 3 }) : "–";
}
