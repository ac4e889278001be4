// A streamed conversation. It exists only in memory, until the page is closed.

import { createApiError, describeError, getJson, postJson, readLines } from "./api.js";
import { announce, formatNumber, h, setText } from "./dom.js";
import { createField, createSelect } from "./submit.js";

const messages = []; // {role, content, note}

export function createChatView(signal) {
  const view = new ChatView(signal);
  view.loadModels();
  return view.node;
}

class ChatView {
  constructor(signal) {
    this.signal = signal;
    this.modelSelect = createSelect("model", []);
    this.systemPrompt = h("textarea", { id: "system-prompt", rows: 2, placeholder: "none" });
    this.maxTokens = h("input", { id: "max-tokens", type: "number", min: 1, value: 256 });
    this.temperature = h("input", { id: "temperature", type: "number", min: 0, max: 2, step: 0.1, value: 0.7 });
    this.log = h("div", { className: "log", tabIndex: 0, role: "region", "aria-label": "Conversation" });
    this.messageInput = h("textarea", { id: "message", rows: 3, required: true, placeholder: "Type a message", onkeydown: (event) => this.handleKey(event) });
    this.sendButton = h("button", { type: "submit", className: "primary" }, "Send");
    this.stopButton = h("button", { type: "button", hidden: true, onclick: () => this.requestController?.abort() }, "Stop");
    this.clearButton = h("button", { type: "button", className: "quiet", onclick: () => this.clear() }, "New conversation");
    this.error = h("p", { className: "error", role: "alert", hidden: true });
    this.node = h("div", { className: "chat" },
      h("div", { className: "heading" }, h("h1", {}, "Chat"), this.clearButton),
      h("details", { className: "card" }, h("summary", {}, "Model and settings"),
        h("div", { className: "fields" }, createField("Model", this.modelSelect), createField("Max tokens", this.maxTokens), createField("Temperature", this.temperature), createField("System prompt", this.systemPrompt))),
      this.log, this.error,
      h("form", { className: "composer", onsubmit: (event) => this.submit(event) },
        h("label", { for: "message", className: "visually-hidden" }, "Message"), this.messageInput,
        h("div", { className: "row" }, this.sendButton, this.stopButton, h("span", { className: "note" }, "Enter sends, Shift+Enter starts a new line"))));
    signal.addEventListener("abort", () => this.requestController?.abort());
    for (const message of messages) this.appendMessage(message);
    this.showHint();
  }

  async loadModels() {
    try {
      const models = await getJson("/v1/models", this.signal);
      this.modelSelect.append(...models.data.map((model) => h("option", { value: model.id }, model.id)));
      if (!models.data.length) this.showError("No worker has served a model yet. Start a worker, then open this view again.");
    } catch (error) {
      if (error.name !== "AbortError") this.showError(describeError(error));
    }
  }

  showHint() {
    if (!messages.length) this.log.replaceChildren(h("p", { className: "muted empty" }, "The conversation appears here. It is stored only in this page."));
  }

  clear() {
    this.requestController?.abort();
    messages.length = 0;
    this.error.hidden = true;
    this.showHint();
    this.messageInput.focus();
  }

  handleKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!this.sendButton.disabled) event.currentTarget.form.requestSubmit();
  }

  /** Appends a message to the log; returns its nodes, so that a streamed answer can be extended. */
  appendMessage(message) {
    if (!this.log.querySelector(".message")) this.log.replaceChildren();
    const text = h("p", { className: "text", dir: "auto" }, message.content);
    const note = h("span", { className: "note" }, message.note ?? "");
    this.log.append(h("article", { className: `message ${message.role}` }, h("h2", {}, message.role === "user" ? "You" : "Model"), text, note));
    this.log.scrollTop = this.log.scrollHeight;
    return { text, note };
  }

  /** Appends to the model's thought, which is shown on demand. */
  appendThought(nodes, text) {
    if (!nodes.thought) {
      nodes.thought = h("p", { className: "text muted", dir: "auto" });
      nodes.text.before(h("details", { className: "thought" }, h("summary", {}, "Thought"), nodes.thought));
    }
    nodes.thought.append(text);
  }

  async submit(event) {
    event.preventDefault();
    const content = this.messageInput.value.trim();
    if (!content || this.requestController) return;
    this.error.hidden = true;
    this.messageInput.value = "";
    const question = { role: "user", content };
    messages.push(question);
    const questionNodes = this.appendMessage(question);
    const answer = { role: "assistant", content: "" };
    const answerNodes = this.appendMessage(answer);
    const requestController = (this.requestController = new AbortController());
    this.setBusy(true);
    try {
      await this.streamAnswer(answer, answerNodes, requestController.signal);
      announce("The answer is complete.");
    } catch (error) {
      if (error.name === "AbortError") answer.note = "stopped";
      else this.showError(describeError(error));
    } finally {
      const isAnswered = answer.content || answerNodes.thought;
      if (isAnswered && messages.includes(question)) messages.push(answer);
      else if (!isAnswered) {
        answerNodes.text.parentElement.remove();
        questionNodes.text.parentElement.remove();
        const index = messages.indexOf(question);
        if (index >= 0) messages.splice(index, 1);
        if (!this.messageInput.value) this.messageInput.value = content;
      }
      setText(answerNodes.note, answer.note ?? "");
      this.requestController = null;
      this.setBusy(false);
      if (this.node.isConnected) this.messageInput.focus();
    }
  }

  async streamAnswer(answer, answerNodes, signal) {
    const systemPrompt = this.systemPrompt.value.trim();
    const conversation = messages.map(({ role, content }) => ({ role, content }));
    const body = { model: this.modelSelect.value || undefined, messages: systemPrompt ? [{ role: "system", content: systemPrompt }, ...conversation] : conversation, max_tokens: Number(this.maxTokens.value) || undefined, temperature: this.temperature.value === "" ? undefined : Number(this.temperature.value), stream: true, stream_options: { include_usage: true } };
    const startTime = performance.now();
    let finishReason = null;
    for await (const { text } of readLines(await postJson("/v1/chat/completions", body, signal))) {
      if (!text.startsWith("data:")) continue;
      const data = text.slice(5).trim();
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw createApiError(500, chunk.error);
      const choice = chunk.choices?.[0];
      if (choice?.delta?.reasoning_content) this.appendThought(answerNodes, choice.delta.reasoning_content);
      const delta = choice?.delta?.content;
      if (delta) {
        // follows the answer only if the user hasn't scrolled up
        const isAtBottom = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
        answer.content += delta;
        answerNodes.text.firstChild ? answerNodes.text.firstChild.appendData(delta) : answerNodes.text.append(delta);
        if (isAtBottom) this.log.scrollTop = this.log.scrollHeight;
      }
      finishReason = choice?.finish_reason ?? finishReason;
      if (chunk.usage) {
        const seconds = (performance.now() - startTime) / 1000;
        answer.note = `${formatNumber(chunk.usage.completion_tokens)} tokens in ${seconds.toFixed(1)} s${finishReason === "length" ? ", truncated at the token limit" : ""}`;
      }
    }
    if (!answer.content) throw createApiError(200, { message: "The model returned no text. Rephrase the message." });
  }

  setBusy(isBusy) {
    this.sendButton.disabled = isBusy;
    this.stopButton.hidden = !isBusy;
    this.log.setAttribute("aria-busy", String(isBusy));
  }

  showError(message) {
    this.error.textContent = message;
    this.error.hidden = false;
  }
}
