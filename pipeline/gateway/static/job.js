// The view of a job: its status, its errors, its first results, and its actions.

import { ApiError, describeError, getJson, postJson, readLines, saveFile, sendRequest } from "./api.js";
import { announce, createNotice, createStatusBadge, formatDuration, formatNumber, formatRate, formatTime, h, setText, truncate } from "./dom.js";
import { formatCost, formatJobCost, ProgressBar } from "./jobs.js";
import { poll } from "./poll.js";
import { computeRowRate, estimateSecondsLeft, isOpen } from "./rates.js";

const OPEN_INTERVAL_SECONDS = 1.5;
const ENDED_INTERVAL_SECONDS = 30;
const UNAVAILABLE_INTERVAL_SECONDS = 60;
const MAX_ROWS = 50;
const MAX_LINE_LENGTH = 100_000;
const MAX_TEXT_LENGTH = 2_000;

export function createJobView(signal, id) {
  const container = h("div", {}, h("p", {}, h("a", { href: "#/" }, "← Jobs")), h("p", { className: "muted" }, "Loading…"));
  const view = new JobView(signal, id);
  poll(async (pollSignal) => {
    let job;
    try {
      job = await getJson(`/v1/batches/${encodeURIComponent(id)}`, pollSignal);
    } catch (error) {
      if (!(error instanceof ApiError) || (error.status !== 404 && error.status !== 403)) throw error;
      container.lastChild.replaceWith(createNotice(error.status === 404 ? "Job not found" : "Not allowed with this key", error.message));
      return UNAVAILABLE_INTERVAL_SECONDS;
    }
    if (!view.node.isConnected) container.lastChild.replaceWith(view.node);
    view.update(job);
    return isOpen(job) ? OPEN_INTERVAL_SECONDS : ENDED_INTERVAL_SECONDS;
  }, OPEN_INTERVAL_SECONDS, signal);
  return container;
}

class JobView {
  constructor(signal, id) {
    this.signal = signal;
    this.path = `/v1/batches/${encodeURIComponent(id)}`;
    this.status = h("span");
    this.progressBar = new ProgressBar();
    this.detailNodes = new Map(); // name -> the node of its value
    this.details = h("dl", { className: "job-details" });
    this.errors = h("div");
    this.actionError = h("p", { className: "error", role: "alert", hidden: true });
    this.buttons = {
      cancel: this.createButton("Cancel job", () => this.cancel()),
      retry: this.createButton("Retry rows without an answer", () => this.retry()),
      output: this.createButton("Download answers", () => saveFile(`/v1/files/${this.job.output_file_id}/content`, `${id}-answers.jsonl`)),
      error: this.createButton("Download errors", () => saveFile(`/v1/files/${this.job.error_file_id}/content`, `${id}-errors.jsonl`)),
    };
    this.results = new ResultList(signal, this.path);
    this.node = h("div", {},
      h("div", { className: "heading" }, h("h1", { className: "mono" }, id), this.status),
      h("div", { className: "card" }, this.progressBar.node, h("div", { className: "row" }, Object.values(this.buttons)), this.actionError),
      this.errors,
      h("h2", {}, "Details"), h("div", { className: "card" }, this.details),
      h("h2", {}, "Results"), this.results.node);
  }

  /** Creates a button that is disabled while its action runs, and that shows the action's error. */
  createButton(title, action) {
    return h("button", { type: "button", hidden: true, onclick: async (event) => {
      const button = event.currentTarget;
      this.actionError.hidden = true;
      button.disabled = true;
      try {
        await action();
      } catch (error) {
        this.actionError.textContent = describeError(error);
        this.actionError.hidden = false;
      } finally {
        button.disabled = false;
      }
    } }, title);
  }

  async cancel() {
    if (!confirm("Cancel this job? Finished rows keep their answers; the other rows get none.")) return;
    await postJson(`${this.path}/cancel`, {}, this.signal);
    announce("The job is being cancelled.");
    document.dispatchEvent(new Event("tokenmill:refresh"));
  }

  async retry() {
    const newJob = await (await postJson(`${this.path}/retry`, {}, this.signal)).json();
    announce(`A new job is created: ${newJob.id}`);
    location.hash = `#/jobs/${encodeURIComponent(newJob.id)}`;
  }

  update(job) {
    if (this.job?.status !== job.status) {
      this.status.replaceChildren(createStatusBadge(job.status));
      announce(`The job is ${job.status.replaceAll("_", " ")}.`);
    }
    this.job = job;
    const open = isOpen(job);
    const rowRate = computeRowRate(job);
    this.progressBar.update(job);
    this.buttons.cancel.hidden = !open || job.status !== "in_progress" && job.status !== "validating";
    this.buttons.retry.hidden = open || !job.request_counts.failed;
    this.buttons.output.hidden = !job.output_file_id;
    this.buttons.error.hidden = !job.error_file_id;
    for (const [name, value] of collectDetails(job, rowRate)) this.updateDetail(name, value);
    this.updateErrors(job.errors?.data ?? []);
    this.results.update(job, open);
  }

  /** Sets a detail, and creates it at first. null hides it. */
  updateDetail(name, value) {
    const node = this.detailNodes.get(name) ?? h("dd");
    if (!this.detailNodes.has(name)) {
      this.detailNodes.set(name, node);
      this.details.append(h("div", {}, h("dt", {}, name), node));
    }
    node.parentElement.hidden = value === null;
    setText(node, value ?? "");
  }

  updateErrors(errors) {
    if (this.errorCount === errors.length) return;
    this.errorCount = errors.length;
    const items = errors.slice(0, MAX_ROWS).map((error) =>
      h("li", {}, error.line ? h("strong", {}, `Line ${error.line}: `) : null, truncate(String(error.message), MAX_TEXT_LENGTH), h("code", {}, ` ${error.code ?? ""}`)));
    this.errors.replaceChildren(...(items.length ? [h("h2", {}, "Why the job failed"), h("ul", { className: "card errors" }, items)] : []));
  }
}

/** [name, text] of each detail in the order shown; null: the job has no such value. */
function collectDetails(job, rowRate) {
  const extension = job.tokenmill;
  const secondsLeft = estimateSecondsLeft(job, rowRate);
  const counts = extension.counts ?? {};
  const tokens = job.usage ?? {};
  const cached = tokens.input_tokens ? ` (${Math.round((100 * (tokens.input_tokens_details?.cached_tokens ?? 0)) / tokens.input_tokens)} % from the cache)` : "";
  const metadata = Object.entries(job.metadata ?? {}).map(([name, value]) => `${name}: ${value}`).join(", ");
  return [
    ["Rows/s", isOpen(job) ? formatRate(rowRate) : null],
    ["Time left", secondsLeft === null ? null : `about ${formatDuration(secondsLeft)}`],
    ["Answered", formatNumber(counts.succeeded)],
    ["Failed", formatNumber(counts.failed)],
    ["Expired", counts.expired ? formatNumber(counts.expired) : null],
    ["Cancelled", counts.cancelled ? formatNumber(counts.cancelled) : null],
    ["Shards", extension.progress?.shards_total ? `${formatNumber(extension.progress.shards_done)} of ${formatNumber(extension.progress.shards_total)}` : null],
    ["Prompt tokens", `${formatNumber(tokens.input_tokens)}${cached}`],
    ["Answer tokens", formatNumber(tokens.output_tokens)],
    ["Recomputed", extension.repeated_tokens ? `${formatNumber(extension.repeated_tokens)} tokens` : null],
    ["Cost", formatJobCost(job) === "–" ? null : formatJobCost(job)],
    ["Cost limit", extension.max_cost ? formatCost(extension.max_cost) : null],
    ["Cost per million tokens", extension.cost_per_million_tokens ? formatCost(extension.cost_per_million_tokens) : null],
    ["Model", job.model ?? "several"],
    ["Tier", extension.tier],
    ["Endpoint", job.endpoint],
    ["Window", job.completion_window ?? null],
    ["Created", formatTime(job.created_at)],
    ["Started", job.in_progress_at ? formatTime(job.in_progress_at) : null],
    ["Expires", job.expires_at && isOpen(job) ? formatTime(job.expires_at) : null],
    ["Ended", formatEnd(job)],
    ["Retry of", extension.retry_of ?? null],
    ["Metadata", metadata ? truncate(metadata, MAX_TEXT_LENGTH) : null],
  ];
}

function formatEnd(job) {
  const endedAt = job.completed_at ?? job.failed_at ?? job.expired_at ?? job.cancelled_at;
  return endedAt ? `${formatTime(endedAt)}, after ${formatDuration(endedAt - job.created_at)}` : null;
}

/** The first committed rows. Reading stops once there are enough of them, or the job has ended. */
class ResultList {
  constructor(signal, path) {
    this.signal = signal;
    this.path = path;
    this.list = h("ol", { className: "results" });
    this.note = h("p", { className: "muted" }, "No results yet.");
    this.node = h("section", { "aria-label": "First results" }, this.note, this.list);
    this.isLoading = false;
    this.isComplete = false;
  }

  update(job, open) {
    const processed = job.request_counts.completed + job.request_counts.failed;
    const version = `${processed}/${open}`; // changes whenever there can be new rows
    if (this.isLoading || this.isComplete || this.shownVersion === version) return;
    if (!processed) {
      setText(this.note, open ? "No results yet." : "No results.");
      return;
    }
    this.isLoading = true;
    this.load(version, open).catch((error) => {
      if (error.name !== "AbortError") setText(this.note, describeError(error));
    }).finally(() => (this.isLoading = false));
  }

  async load(version, open) {
    const response = await sendRequest(`${this.path}/results`, { signal: this.signal });
    const rows = [];
    for await (const line of readLines(response, MAX_LINE_LENGTH)) {
      rows.push(createResultRow(line));
      if (rows.length === MAX_ROWS) break;
    }
    this.shownVersion = version;
    this.isComplete = rows.length === MAX_ROWS || !open;
    if (rows.length !== this.list.children.length) this.list.replaceChildren(...rows);
    const description = rows.length === MAX_ROWS ? `The first ${MAX_ROWS} committed rows` : `${rows.length} rows committed so far`;
    setText(this.note, open || rows.length === MAX_ROWS ? `${description}, in no particular order.` : "In no particular order.");
  }
}

function createResultRow(line) {
  if (line.isTruncated) return h("li", { className: "card" }, h("p", { className: "muted" }, "This line is too long to be shown. Download the answers to read it."));
  let result;
  try {
    result = JSON.parse(line.text);
  } catch {
    return h("li", { className: "card" }, h("p", { className: "error" }, "This line isn't valid JSON."));
  }
  const body = result.response?.body;
  const usage = body?.usage;
  const text = result.error ? result.error.message ?? result.error.code : extractText(body);
  const notes = [usage ? `${formatNumber(usage.prompt_tokens)} + ${formatNumber(usage.completion_tokens ?? 0)} tokens` : null, body?.choices?.[0]?.finish_reason];
  return h("li", { className: "card" },
    h("div", { className: "heading" }, h("strong", { className: "mono" }, truncate(String(result.custom_id), 200)),
      result.error ? createStatusBadge("failed") : null, h("span", { className: "note" }, notes.filter(Boolean).join(" · "))),
    h("p", { className: result.error ? "text error" : "text", dir: "auto" }, truncate(text || "(empty)", MAX_TEXT_LENGTH)));
}

/** The text of a response body of any endpoint: its choices and tool calls, its embeddings, or else its JSON. */
function extractText(body) {
  if (Array.isArray(body?.choices)) {
    return body.choices.map((choice) => {
      const message = choice.message;
      const toolCalls = (message?.tool_calls ?? []).map((call) => `${call.function?.name}(${call.function?.arguments})`);
      return [message?.content ?? choice.text, ...toolCalls].filter(Boolean).join("\n");
    }).join("\n––\n");
  }
  if (Array.isArray(body?.data)) return body.data.map((item) => `embedding of ${formatNumber(item.embedding?.length)} numbers`).join("\n");
  return JSON.stringify(body ?? null);
}
