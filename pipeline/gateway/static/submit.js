// Submission of a file: it is dropped or chosen, uploaded, and becomes a job.

import { get, post, upload, why } from "./api.js";
import { announce, cut, h, say, size } from "./dom.js";

const PEEKED = 256 * 1024;
const URLS = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"];

export function submitView(signal) {
  const view = new Submit(signal);
  view.models();
  return view.node;
}

class Submit {
  constructor(signal) {
    this.signal = signal;
    this.file = null;
    this.input = h("input", { type: "file", id: "file", accept: ".jsonl,.parquet", onchange: () => this.take(this.input.files[0]) });
    this.chosen = h("p", { className: "note", id: "file-note" }, "JSONL or Parquet, one request a row.");
    this.zone = h("div", { className: "zone", ondragover: (event) => this.over(event), ondragleave: () => this.zone.classList.remove("over"), ondrop: (event) => this.drop(event) },
      h("label", { for: "file" }, "Drop a file here, or choose one"), this.input, this.chosen);
    this.endpoint = select("endpoint", URLS.map((url) => [url, url]));
    this.tier = select("tier", [["standard", "standard"], ["bulk", "bulk: when nothing else is to do"]]);
    this.window = h("input", { id: "window", value: "24h", required: true, pattern: "\\s*[0-9]+(\\.[0-9]+)?\\s*[mhd]\\s*", "aria-describedby": "window-note" });
    this.model = select("model", [["", "as each request says"]]);
    this.invalid = select("invalid", [["job", "stops the job before anything is computed"], ["row", "fails by itself"]]);
    this.bar = h("progress", { max: 1, value: 0, "aria-label": "Upload", hidden: true });
    this.error = h("p", { className: "bad", role: "alert", hidden: true });
    this.button = h("button", { type: "submit", className: "first", disabled: true }, "Submit");
    this.stop = h("button", { type: "button", hidden: true, onclick: () => this.aborting?.abort() }, "Stop");
    this.node = h("form", { onsubmit: (event) => this.submit(event) },
      h("h1", {}, "Submit a file"),
      this.zone,
      h("div", { className: "fields card" },
        field("Endpoint", this.endpoint), field("Tier", this.tier),
        field("Window", this.window, h("span", { className: "note", id: "window-note" }, "such as 30m, 24h or 2d; rows without an answer by then expire")),
        field("Model", this.model), field("An invalid line", this.invalid)),
      this.error,
      h("div", { className: "row" }, this.button, this.stop, this.bar));
  }

  async models() {
    try {
      const found = await get("/v1/models", this.signal);
      this.model.append(...found.data.map((model) => h("option", { value: model.id }, model.id)));
    } catch {
      // the choice stays what the requests say
    }
  }

  over(event) {
    event.preventDefault();
    this.zone.classList.add("over");
  }

  drop(event) {
    event.preventDefault();
    this.zone.classList.remove("over");
    if (event.dataTransfer.files.length > 1) return this.fail("Drop one file at a time.");
    this.take(event.dataTransfer.files[0]);
  }

  async take(file) {
    if (!file) return;
    this.file = file;
    this.error.hidden = true;
    this.button.disabled = false;
    say(this.chosen, `${cut(file.name, 120)}, ${size(file.size)}`);
    announce(`${cut(file.name, 120)} is chosen.`);
    const url = await endpointOf(file);
    if (URLS.includes(url)) this.endpoint.value = url;
  }

  async submit(event) {
    event.preventDefault();
    if (this.file === null) return;
    this.error.hidden = true;
    this.working(true);
    this.aborting = new AbortController();
    const abort = () => this.aborting.abort();
    this.signal.addEventListener("abort", abort);
    try {
      const stored = await upload(this.file, (share) => (this.bar.value = share), this.aborting.signal);
      const own = { tier: this.tier.value, on_invalid: this.invalid.value };
      if (this.model.value) own.model = this.model.value;
      const body = { input_file_id: stored.id, endpoint: this.endpoint.value, completion_window: this.window.value.trim(), metadata: { name: cut(this.file.name, 200) }, tokenmill: own };
      const job = await (await post("/v1/batches", body, this.aborting.signal)).json();
      announce("The job is submitted.");
      location.hash = `#/jobs/${encodeURIComponent(job.id)}`;
    } catch (error) {
      if (error.name !== "AbortError") this.fail(why(error));
    } finally {
      this.signal.removeEventListener("abort", abort);
      this.working(false);
    }
  }

  working(now) {
    this.bar.value = 0;
    this.bar.hidden = this.stop.hidden = !now;
    this.button.disabled = now;
    this.button.textContent = now ? "Sending…" : "Submit";
  }

  fail(message) {
    this.error.textContent = message;
    this.error.hidden = false;
  }
}

/** The `url` of the first line; null if it has none. */
async function endpointOf(file) {
  try {
    const start = await file.slice(0, PEEKED).text();
    return JSON.parse(start.split("\n", 1)[0]).url ?? null;
  } catch {
    return null;
  }
}

export function select(id, options) {
  return h("select", { id }, options.map(([value, title]) => h("option", { value }, title)));
}

export function field(title, input, ...more) {
  return h("div", { className: "field" }, h("label", { for: input.id }, title), input, ...more);
}
