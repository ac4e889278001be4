// Submission of a file: the user drops or selects it, the page uploads it and creates a job.

import { describeError, getJson, postJson, uploadFile } from "./api.js";
import { announce, formatSize, h, setText, truncate } from "./dom.js";

const FIRST_LINE_BYTES = 256 * 1024;
const ENDPOINTS = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"];

export function createSubmitView(signal) {
  const view = new SubmitView(signal);
  view.loadModels();
  return view.node;
}

class SubmitView {
  constructor(signal) {
    this.signal = signal;
    this.file = null;
    this.fileInput = h("input", { type: "file", id: "file", accept: ".jsonl,.ndjson,.gz,.zst,.csv,.arrow,.feather,.parquet", onchange: () => this.selectFile(this.fileInput.files[0]) });
    this.fileNote = h("p", { className: "note", id: "file-note" }, "JSONL, Parquet, Arrow or CSV, one request per row.");
    this.dropZone = h("div", { className: "drop-zone", ondragover: (event) => this.handleDragOver(event), ondragleave: () => this.dropZone.classList.remove("dragged-over"), ondrop: (event) => this.handleDrop(event) },
      h("label", { for: "file" }, "Drop a file here, or select one"), this.fileInput, this.fileNote);
    this.endpointSelect = createSelect("endpoint", ENDPOINTS.map((url) => [url, url]));
    this.tierSelect = createSelect("tier", [["standard", "standard"], ["bulk", "bulk: lowest priority"]]);
    this.windowInput = h("input", { id: "window", value: "24h", required: true, pattern: "\\s*[0-9]+(\\.[0-9]+)?\\s*[mhd]\\s*", "aria-describedby": "window-note" });
    this.modelSelect = createSelect("model", [["", "from each request"]]);
    this.onInvalidSelect = createSelect("on-invalid", [["job", "fail the job before any row is computed"], ["row", "fail only their own rows"]]);
    this.progressBar = h("progress", { max: 1, value: 0, "aria-label": "Upload", hidden: true });
    this.error = h("p", { className: "error", role: "alert", hidden: true });
    this.submitButton = h("button", { type: "submit", className: "primary", disabled: true }, "Submit");
    this.stopButton = h("button", { type: "button", hidden: true, onclick: () => this.uploadController?.abort() }, "Stop");
    this.node = h("form", { onsubmit: (event) => this.submit(event) },
      h("h1", {}, "Submit a file"),
      this.dropZone,
      h("div", { className: "fields card" },
        createField("Endpoint", this.endpointSelect), createField("Tier", this.tierSelect),
        createField("Window", this.windowInput, h("span", { className: "note", id: "window-note" }, "such as 30m, 24h or 2d; rows without an answer by then expire")),
        createField("Model", this.modelSelect), createField("Invalid lines", this.onInvalidSelect)),
      this.error,
      h("div", { className: "row" }, this.submitButton, this.stopButton, this.progressBar));
  }

  async loadModels() {
    try {
      const models = await getJson("/v1/models", this.signal);
      this.modelSelect.append(...models.data.map((model) => h("option", { value: model.id }, model.id)));
    } catch {
      // the only option remains the model of each request
    }
  }

  handleDragOver(event) {
    event.preventDefault();
    this.dropZone.classList.add("dragged-over");
  }

  handleDrop(event) {
    event.preventDefault();
    this.dropZone.classList.remove("dragged-over");
    if (event.dataTransfer.files.length > 1) return this.showError("Drop one file at a time.");
    this.selectFile(event.dataTransfer.files[0]);
  }

  async selectFile(file) {
    if (!file) return;
    this.file = file;
    this.error.hidden = true;
    this.submitButton.disabled = false;
    setText(this.fileNote, `${truncate(file.name, 120)}, ${formatSize(file.size)}`);
    announce(`${truncate(file.name, 120)} is selected.`);
    const url = await readEndpoint(file);
    if (ENDPOINTS.includes(url)) this.endpointSelect.value = url;
  }

  async submit(event) {
    event.preventDefault();
    if (this.file === null) return;
    this.error.hidden = true;
    this.setBusy(true);
    this.uploadController = new AbortController();
    const abortUpload = () => this.uploadController.abort();
    this.signal.addEventListener("abort", abortUpload);
    try {
      const uploaded = await uploadFile(this.file, (share) => (this.progressBar.value = share), this.uploadController.signal);
      const extension = { tier: this.tierSelect.value, on_invalid: this.onInvalidSelect.value };
      if (this.modelSelect.value) extension.model = this.modelSelect.value;
      const body = { input_file_id: uploaded.id, endpoint: this.endpointSelect.value, completion_window: this.windowInput.value.trim(), metadata: { name: truncate(this.file.name, 200) }, tokenmill: extension };
      const job = await (await postJson("/v1/batches", body, this.uploadController.signal)).json();
      announce("The job is submitted.");
      location.hash = `#/jobs/${encodeURIComponent(job.id)}`;
    } catch (error) {
      if (error.name !== "AbortError") this.showError(describeError(error));
    } finally {
      this.signal.removeEventListener("abort", abortUpload);
      this.setBusy(false);
    }
  }

  setBusy(isBusy) {
    this.progressBar.value = 0;
    this.progressBar.hidden = this.stopButton.hidden = !isBusy;
    this.submitButton.disabled = isBusy;
    this.submitButton.textContent = isBusy ? "Uploading…" : "Submit";
  }

  showError(message) {
    this.error.textContent = message;
    this.error.hidden = false;
  }
}

/** Reads the `url` of the first line; null if it has none. */
async function readEndpoint(file) {
  try {
    const start = await file.slice(0, FIRST_LINE_BYTES).text();
    return JSON.parse(start.split("\n", 1)[0]).url ?? null;
  } catch {
    return null;
  }
}

export function createSelect(id, options) {
  return h("select", { id }, options.map(([value, title]) => h("option", { value }, title)));
}

export function createField(title, input, ...children) {
  return h("div", { className: "field" }, h("label", { for: input.id }, title), input, ...children);
}
