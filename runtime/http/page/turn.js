// One message as it is shown: name, thoughts, text, tool calls, a line about the answer.

import { make, say } from "./dom.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool result" };

export class Turn {
  constructor(role, text = "") {
    this.text = text;
    this.thought = "";
    this.calls = [];
    this._said = make("div", { class: "text" }, text);
    this._foot = make("p", { class: "foot" });
    this._foot.hidden = true;
    this.element = make(
      "article",
      { class: `turn ${role}`, "aria-label": NAMES[role] },
      make("h4", { "aria-hidden": "true" }, NAMES[role]),
      this._said,
      this._foot,
    );
  }

  // One `delta` of a streamed answer.
  add(delta) {
    const thought = delta.reasoning_content ?? delta.reasoning;
    if (thought) this._think(thought);
    if (delta.content) {
      this._settle();
      this.text += delta.content;
      this._said.append(delta.content);
    }
    for (const call of delta.tool_calls ?? []) this._call(call);
  }

  busy(isBusy) {
    this.element.classList.toggle("busy", isBusy);
    this.element.setAttribute("aria-busy", isBusy);
    if (!isBusy) {
      this._settle();
      this._said.normalize();
    }
  }

  foot(text) {
    this._foot.hidden = !text;
    say(this._foot, text);
  }

  // The message as the API wants it back.
  message() {
    if (!this.calls.length) return { role: "assistant", content: this.text };
    const calls = this.calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
    return { role: "assistant", content: this.text || null, tool_calls: calls };
  }

  _think(text) {
    if (!this._details) {
      this._thinking = make("div", { class: "text" });
      this._title = make("summary", {}, "Thinking…");
      this._details = make("details", { class: "thought", open: "" }, this._title, this._thinking);
      this._said.before(this._details);
    }
    this.thought += text;
    this._thinking.append(text);
  }

  // The thoughts are over: they fold away, unless the reader has folded them already.
  _settle() {
    if (!this._details || this._settled) return;
    this._settled = true;
    this._thinking.normalize();
    say(this._title, "Thoughts");
    this._details.open = false;
  }

  _call({ index, id, function: made }) {
    this._settle();
    const call = (this.calls[index] ??= this._newCall());
    call.id ||= id;
    if (made?.name) say(call.title, `Calls ${(call.name = made.name)}`);
    if (made?.arguments) {
      call.text += made.arguments;
      call.shown.append(made.arguments);
    }
  }

  _newCall() {
    const call = { id: "", name: "", text: "", title: make("strong"), shown: make("pre") };
    this._foot.before(make("div", { class: "call" }, call.title, call.shown));
    return call;
  }
}
