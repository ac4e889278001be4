// The view of a job: its status, its errors, its first results, and its actions.

import { ApiError, ask, get, lines, post, save, why } from "./api.js";
import { announce, count, cut, h, moment, notice, rate, say, span, status } from "./dom.js";
import { Bar, cost, money } from "./jobs.js";
import { poll } from "./poll.js";
import { isOpen, left, rowRate } from "./rates.js";

const OPEN_SECONDS = 1.5;
const ENDED_SECONDS = 30;
const MOST_ROWS = 50;
const MOST_LINE = 100_000;
const MOST_TEXT = 2_000;

export function jobView(signal, id) {
  const place = h("div", {}, h("p", {}, h("a", { href: "#/" }, "← Jobs")), h("p", { className: "muted" }, "Looking…"));
  const view = new JobView(signal, id);
  poll(async (until) => {
    let job;
    try {
      job = await get(`/v1/batches/${encodeURIComponent(id)}`, until);
    } catch (error) {
      if (!(error instanceof ApiError) || (error.status !== 404 && error.status !== 403)) throw error;
      place.lastChild.replaceWith(notice(error.status === 404 ? "No such job" : "Not for this key", error.message));
      return 60;
    }
    if (!view.node.isConnected) place.lastChild.replaceWith(view.node);
    view.update(job);
    return isOpen(job) ? OPEN_SECONDS : ENDED_SECONDS;
  }, OPEN_SECONDS, signal);
  return place;
}

class JobView {
  constructor(signal, id) {
    this.signal = signal;
    this.path = `/v1/batches/${encodeURIComponent(id)}`;
    this.status = h("span");
    this.bar = new Bar();
    this.values = new Map();
    this.facts = h("dl", { className: "facts" });
    this.errors = h("div");
    this.trouble = h("p", { className: "bad", role: "alert", hidden: true });
    this.buttons = {
      cancel: this.button("Cancel job", () => this.cancel()),
      retry: this.button("Retry what has no answer", () => this.retry()),
      output: this.button("Download answers", () => save(`/v1/files/${this.job.output_file_id}/content`, `${id}-answers.jsonl`)),
      error: this.button("Download errors", () => save(`/v1/files/${this.job.error_file_id}/content`, `${id}-errors.jsonl`)),
    };
    this.results = new Results(signal, this.path);
    this.node = h("div", {},
      h("div", { className: "heading" }, h("h1", { className: "mono" }, id), this.status),
      h("div", { className: "card" }, this.bar.node, h("div", { className: "row" }, Object.values(this.buttons)), this.trouble),
      this.errors,
      h("h2", {}, "Facts"), h("div", { className: "card" }, this.facts),
      h("h2", {}, "Results"), this.results.node);
  }

  button(title, act) {
    return h("button", { type: "button", hidden: true, onclick: async (event) => {
      const pressed = event.currentTarget;
      this.trouble.hidden = true;
      pressed.disabled = true;
      try {
        await act();
      } catch (error) {
        this.trouble.textContent = why(error);
        this.trouble.hidden = false;
      } finally {
        pressed.disabled = false;
      }
    } }, title);
  }

  async cancel() {
    if (!confirm("Cancel this job? What is finished is kept; the other rows get no answer.")) return;
    await post(`${this.path}/cancel`, {}, this.signal);
    announce("The job is being cancelled.");
    document.dispatchEvent(new Event("tokenmill:again"));
  }

  async retry() {
    const made = await (await post(`${this.path}/retry`, {}, this.signal)).json();
    announce(`A new job was made: ${made.id}`);
    location.hash = `#/jobs/${encodeURIComponent(made.id)}`;
  }

  update(job) {
    if (this.job?.status !== job.status) {
      this.status.replaceChildren(status(job.status));
      announce(`The job is ${job.status.replaceAll("_", " ")}.`);
    }
    this.job = job;
    const open = isOpen(job);
    const perSecond = rowRate(job);
    this.bar.update(job);
    this.buttons.cancel.hidden = !open || job.status !== "in_progress" && job.status !== "validating";
    this.buttons.retry.hidden = open || !job.request_counts.failed;
    this.buttons.output.hidden = !job.output_file_id;
    this.buttons.error.hidden = !job.error_file_id;
    for (const [name, value] of facts(job, perSecond)) this.fact(name, value);
    this.showErrors(job.errors?.data ?? []);
    this.results.update(job, open);
  }

  fact(name, value) {
    const known = this.values.get(name) ?? h("dd");
    if (!this.values.has(name)) {
      this.values.set(name, known);
      this.facts.append(h("div", {}, h("dt", {}, name), known));
    }
    known.parentElement.hidden = value === null;
    say(known, value ?? "");
  }

  showErrors(errors) {
    if (this.shown === errors.length) return;
    this.shown = errors.length;
    const items = errors.slice(0, MOST_ROWS).map((error) =>
      h("li", {}, error.line ? h("strong", {}, `Line ${error.line}: `) : null, cut(String(error.message), MOST_TEXT), h("code", {}, ` ${error.code ?? ""}`)));
    this.errors.replaceChildren(...(items.length ? [h("h2", {}, "Why it failed"), h("ul", { className: "card errors" }, items)] : []));
  }
}

function facts(job, perSecond) {
  const own = job.tokenmill;
  const seconds = left(job, perSecond);
  const counts = own.counts ?? {};
  const tokens = job.usage ?? {};
  const cached = tokens.input_tokens ? ` (${Math.round((100 * (tokens.input_tokens_details?.cached_tokens ?? 0)) / tokens.input_tokens)} % from the cache)` : "";
  const metadata = Object.entries(job.metadata ?? {}).map(([name, value]) => `${name}: ${value}`).join(", ");
  return [
    ["Rows/s", isOpen(job) ? rate(perSecond) : null],
    ["Time left", seconds === null ? null : `about ${span(seconds)}`],
    ["Answered", count(counts.succeeded)],
    ["Failed", count(counts.failed)],
    ["Expired", counts.expired ? count(counts.expired) : null],
    ["Cancelled", counts.cancelled ? count(counts.cancelled) : null],
    ["Shards", own.progress?.shards_total ? `${count(own.progress.shards_done)} of ${count(own.progress.shards_total)}` : null],
    ["Prompt tokens", `${count(tokens.input_tokens)}${cached}`],
    ["Answer tokens", count(tokens.output_tokens)],
    ["Computed again", own.repeated_tokens ? `${count(own.repeated_tokens)} tokens` : null],
    ["Cost", cost(job) === "–" ? null : cost(job)],
    ["Cost limit", own.max_cost ? money(own.max_cost) : null],
    ["A million tokens", own.cost_per_million_tokens ? money(own.cost_per_million_tokens) : null],
    ["Model", job.model ?? "several"],
    ["Tier", own.tier],
    ["Endpoint", job.endpoint],
    ["Window", job.completion_window ?? null],
    ["Made", moment(job.created_at)],
    ["Begun", job.in_progress_at ? moment(job.in_progress_at) : null],
    ["Expires", job.expires_at && isOpen(job) ? moment(job.expires_at) : null],
    ["Ended", ended(job)],
    ["Retry of", own.retry_of ?? null],
    ["Metadata", metadata ? cut(metadata, MOST_TEXT) : null],
  ];
}

function ended(job) {
  const at = job.completed_at ?? job.failed_at ?? job.expired_at ?? job.cancelled_at;
  return at ? `${moment(at)}, after ${span(at - job.created_at)}` : null;
}

/** The first committed rows. Reading stops once there are enough of them, or the job has ended. */
class Results {
  constructor(signal, path) {
    this.signal = signal;
    this.path = path;
    this.list = h("ol", { className: "results" });
    this.note = h("p", { className: "muted" }, "None yet.");
    this.node = h("section", { "aria-label": "First results" }, this.note, this.list);
    this.done = -1;
    this.full = false;
  }

  update(job, open) {
    const done = job.request_counts.completed + job.request_counts.failed;
    const state = `${done}/${open}`;
    if (this.busy || this.full || this.seen === state) return;
    if (!done) {
      say(this.note, open ? "None yet." : "There are none.");
      return;
    }
    this.busy = true;
    this.read(state, open).catch((error) => {
      if (error.name !== "AbortError") say(this.note, why(error));
    }).finally(() => (this.busy = false));
  }

  async read(state, open) {
    const answer = await ask(`${this.path}/results`, { signal: this.signal });
    const rows = [];
    for await (const line of lines(answer, MOST_LINE)) {
      rows.push(row(line));
      if (rows.length === MOST_ROWS) break;
    }
    this.seen = state;
    this.full = rows.length === MOST_ROWS || !open;
    if (rows.length !== this.list.children.length) this.list.replaceChildren(...rows);
    const which = rows.length === MOST_ROWS ? `The first ${MOST_ROWS} that are committed` : `${rows.length} committed so far`;
    say(this.note, open || rows.length === MOST_ROWS ? `${which}, in no order.` : "In no order.");
  }
}

function row(line) {
  if (line.cut) return h("li", { className: "card" }, h("p", { className: "muted" }, "A line that is too long to be shown; download the answers to read it."));
  let result;
  try {
    result = JSON.parse(line.text);
  } catch {
    return h("li", { className: "card" }, h("p", { className: "bad" }, "A line that can't be read."));
  }
  const body = result.response?.body;
  const usage = body?.usage;
  const text = result.error ? result.error.message ?? result.error.code : textOf(body);
  const words = [usage ? `${count(usage.prompt_tokens)} + ${count(usage.completion_tokens ?? 0)} tokens` : null, body?.choices?.[0]?.finish_reason];
  return h("li", { className: "card" },
    h("div", { className: "heading" }, h("strong", { className: "mono" }, cut(String(result.custom_id), 200)),
      result.error ? status("failed") : null, h("span", { className: "note" }, words.filter(Boolean).join(" · "))),
    h("p", { className: result.error ? "text bad" : "text", dir: "auto" }, cut(text || "(empty)", MOST_TEXT)));
}

function textOf(body) {
  if (Array.isArray(body?.choices)) {
    return body.choices.map((choice) => {
      const message = choice.message;
      const calls = (message?.tool_calls ?? []).map((call) => `${call.function?.name}(${call.function?.arguments})`);
      return [message?.content ?? choice.text, ...calls].filter(Boolean).join("\n");
    }).join("\n––\n");
  }
  if (Array.isArray(body?.data)) return body.data.map((one) => `embedding of ${count(one.embedding?.length)} numbers`).join("\n");
  return JSON.stringify(body ?? null);
}
