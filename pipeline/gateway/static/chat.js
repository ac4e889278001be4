// A streamed conversation. It exists until the page is closed, and isn't stored.

import { get, lines, post, refused, why } from "./api.js";
import { announce, count, h, say } from "./dom.js";
import { field, select } from "./submit.js";

const messages = []; // {role, content, note}

export function chatView(signal) {
  const view = new Chat(signal);
  view.models();
  return view.node;
}

class Chat {
  constructor(signal) {
    this.signal = signal;
    this.model = select("model", []);
    this.system = h("textarea", { id: "system", rows: 2, placeholder: "none" });
    this.most = h("input", { id: "most", type: "number", min: 1, value: 256 });
    this.heat = h("input", { id: "heat", type: "number", min: 0, max: 2, step: 0.1, value: 0.7 });
    this.log = h("div", { className: "log", tabIndex: 0, role: "region", "aria-label": "Conversation" });
    this.text = h("textarea", { id: "message", rows: 3, required: true, placeholder: "Ask something", onkeydown: (event) => this.key(event) });
    this.send = h("button", { type: "submit", className: "first" }, "Send");
    this.stop = h("button", { type: "button", hidden: true, onclick: () => this.aborting?.abort() }, "Stop");
    this.clear = h("button", { type: "button", className: "quiet", onclick: () => this.empty() }, "New conversation");
    this.error = h("p", { className: "bad", role: "alert", hidden: true });
    this.node = h("div", { className: "chat" },
      h("div", { className: "heading" }, h("h1", {}, "Chat"), this.clear),
      h("details", { className: "card" }, h("summary", {}, "Model and settings"),
        h("div", { className: "fields" }, field("Model", this.model), field("At most so many tokens", this.most), field("Temperature", this.heat), field("System prompt", this.system))),
      this.log, this.error,
      h("form", { className: "composer", onsubmit: (event) => this.submit(event) },
        h("label", { for: "message", className: "unseen" }, "Message"), this.text,
        h("div", { className: "row" }, this.send, this.stop, h("span", { className: "note" }, "Enter sends, Shift+Enter begins a new line"))));
    signal.addEventListener("abort", () => this.aborting?.abort());
    for (const message of messages) this.show(message);
    this.hint();
  }

  async models() {
    try {
      const found = await get("/v1/models", this.signal);
      this.model.append(...found.data.map((model) => h("option", { value: model.id }, model.id)));
      if (!found.data.length) this.fail("No worker has served a model yet. Start one, and come back.");
    } catch (error) {
      if (error.name !== "AbortError") this.fail(why(error));
    }
  }

  hint() {
    if (!messages.length) this.log.replaceChildren(h("p", { className: "muted empty" }, "The conversation appears here. It is kept nowhere but on this page."));
  }

  empty() {
    this.aborting?.abort();
    messages.length = 0;
    this.error.hidden = true;
    this.hint();
    this.text.focus();
  }

  key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!this.send.disabled) event.currentTarget.form.requestSubmit();
  }

  show(message) {
    if (!this.log.querySelector(".message")) this.log.replaceChildren();
    const text = h("p", { className: "text", dir: "auto" }, message.content);
    const note = h("span", { className: "note" }, message.note ?? "");
    this.log.append(h("article", { className: `message ${message.role}` }, h("h2", {}, message.role === "user" ? "You" : "Model"), text, note));
    this.log.scrollTop = this.log.scrollHeight;
    return { text, note };
  }

  async submit(event) {
    event.preventDefault();
    const asked = this.text.value.trim();
    if (!asked || this.aborting) return;
    this.error.hidden = true;
    this.text.value = "";
    const question = { role: "user", content: asked };
    messages.push(question);
    const above = this.show(question);
    const answer = { role: "assistant", content: "" };
    const shown = this.show(answer);
    const aborting = (this.aborting = new AbortController());
    this.working(true);
    try {
      await this.read(answer, shown, aborting.signal);
      announce("The answer is complete.");
    } catch (error) {
      if (error.name === "AbortError") answer.note = "stopped";
      else this.fail(why(error));
    } finally {
      if (answer.content && messages.includes(question)) messages.push(answer);
      else if (!answer.content) {
        shown.text.parentElement.remove();
        above.text.parentElement.remove();
        const place = messages.indexOf(question);
        if (place >= 0) messages.splice(place, 1);
        if (!this.text.value) this.text.value = asked;
      }
      say(shown.note, answer.note ?? "");
      this.aborting = null;
      this.working(false);
      if (this.node.isConnected) this.text.focus();
    }
  }

  async read(answer, shown, signal) {
    const system = this.system.value.trim();
    const said = messages.map(({ role, content }) => ({ role, content }));
    const body = { model: this.model.value || undefined, messages: system ? [{ role: "system", content: system }, ...said] : said, max_tokens: Number(this.most.value) || undefined, temperature: this.heat.value === "" ? undefined : Number(this.heat.value), stream: true, stream_options: { include_usage: true } };
    const began = performance.now();
    let reason = null;
    for await (const { text } of lines(await post("/v1/chat/completions", body, signal))) {
      if (!text.startsWith("data:")) continue;
      const data = text.slice(5).trim();
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw refused(500, chunk.error);
      const choice = chunk.choices?.[0];
      const more = choice?.delta?.content;
      if (more) {
        const below = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
        answer.content += more;
        shown.text.firstChild ? shown.text.firstChild.appendData(more) : shown.text.append(more);
        if (below) this.log.scrollTop = this.log.scrollHeight;
      }
      reason = choice?.finish_reason ?? reason;
      if (chunk.usage) {
        const seconds = (performance.now() - began) / 1000;
        answer.note = `${count(chunk.usage.completion_tokens)} tokens in ${seconds.toFixed(1)} s${reason === "length" ? ", cut off at its limit" : ""}`;
      }
    }
    if (!answer.content) throw refused(200, { message: "The model said nothing; ask in other words." });
  }

  working(now) {
    this.send.disabled = now;
    this.stop.hidden = !now;
    this.log.setAttribute("aria-busy", String(now));
  }

  fail(message) {
    this.error.textContent = message;
    this.error.hidden = false;
  }
}
