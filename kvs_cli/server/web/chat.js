// The conversation: its messages, how they look, and the answer that is being written.
//
//     idle ─ send, again ─> answering ─ end, stop, failure ─> idle

import { streamChat } from "./api.js";
import { $, announce, copyButton, make, short, whole } from "./dom.js";
import { render } from "./markdown.js";
import { loadMessages, saveMessages } from "./store.js";

const SAVE_MS = 1000; // between two writes while an answer grows
const NEAR_PX = 60;   // this close to the end, the view follows it

export class Chat {
  /**
   * request   gives the fields of a request beside its messages, and the system prompt
   * onState   hears whether an answer is being written
   * onError   hears of what went wrong; the message that was sent is given back if nothing came of it
   */
  constructor({ request, onState, onError }) {
    this.request = request;
    this.onState = onState;
    this.onError = onError;
    this.messages = loadMessages();
    this.shown = new Map(); // by message: what stays is left alone, so that it is not read out again
    this.abort = null;
    this.savedAt = 0;
    this.isKept = true;
    this.scroll = $("scroll");
    this.follows = true; // the view stays at the end, whatever grows or shrinks
    this.top = 0;
    this.scroll.addEventListener("scroll", () => this.scrolled());
    new ResizeObserver(() => this.toEnd()).observe(this.scroll);
    this.draw();
    // A page that changes nothing writes nothing: another tab may have said more.
    window.addEventListener("pagehide", () => { if (this.busy) this.save(); });
  }

  get busy() {
    return this.abort !== null;
  }

  /** Begin anew; returns the messages until now. */
  clear() {
    const old = this.messages;
    this.replace([]);
    return old;
  }

  replace(messages) {
    this.stop();
    this.messages = messages;
    this.save();
    this.draw();
  }

  stop() {
    this.abort?.abort();
  }

  async send(text) {
    const before = this.messages;
    this.messages = [...before, { role: "user", content: text, thoughts: "", note: "" }];
    this.draw();
    await this.answer(before, text);
  }

  /** Write the last answer anew. */
  again = async () => {
    const before = this.messages;
    const end = before.findLastIndex((each) => each.role === "user") + 1;
    if (this.busy || end === 0) return;
    this.messages = before.slice(0, end);
    $("prompt").focus(); // the button goes
    this.draw();
    await this.answer(before, "");
  };

  async answer(before, sent) {
    const abort = new AbortController();
    const { system, ...fields } = this.request();
    const told = this.messages.map(({ role, content, thoughts }) => (
      { role, content, ...(thoughts && { reasoning_content: thoughts }) }));
    const messages = system ? [{ role: "system", content: system }, ...told] : told;
    const answer = { role: "assistant", content: "", thoughts: "", note: "" };
    const list = [...this.messages, answer];
    this.messages = list;
    const shown = this.show(answer);
    this.follows = true;
    this.toEnd();
    this.abort = abort;
    this.onState(true);
    announce("Answering");
    try {
      const body = { ...fields, messages, stream: true, return_progress: true, timings_per_token: true };
      for await (const event of streamChat(body, abort.signal)) {
        shown.take(event);
        this.grow(shown);
      }
      answer.note = shown.summary();
    } catch (error) {
      answer.note = shown.summary(error.name === "AbortError" ? "stopped" : "broken off");
      if (error.name !== "AbortError") {
        const lost = !answer.content && !answer.thoughts && this.messages === list;
        if (lost) this.messages = before;
        this.onError(error, lost ? sent : "");
      }
    } finally {
      this.abort = null;
      this.save();
      this.draw();
      this.onState(false);
      announce(`The answer has ended: ${answer.note}`);
    }
  }

  /** More text: draw it with the next frame, and keep it now and then. */
  grow(shown) {
    if (shown.frame) return;
    shown.frame = requestAnimationFrame(() => {
      shown.frame = 0;
      shown.draw();
      this.toEnd();
      if (performance.now() - this.savedAt > SAVE_MS) this.save();
    });
  }

  save() {
    this.savedAt = performance.now();
    const kept = saveMessages(this.messages);
    if (!kept && this.isKept) this.onError(new Error("The browser has no room to keep this conversation"), "");
    this.isKept = kept;
  }

  draw() {
    for (const [message, shown] of this.shown) {
      if (this.messages.includes(message)) continue;
      shown.node.remove();
      this.shown.delete(message);
    }
    const last = this.messages.at(-1);
    for (const message of this.messages) {
      const shown = this.shown.get(message) ?? this.show(message);
      shown.finish(message === last && message.role === "assistant" ? this.again : null);
    }
    $("empty").hidden = this.messages.length > 0;
    this.toEnd();
  }

  /** A message more at the end. */
  show(message) {
    const shown = new Shown(message);
    this.shown.set(message, shown);
    $("messages").append(shown.node);
    return shown;
  }

  isNearEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroll;
    return scrollHeight - scrollTop - clientHeight < NEAR_PX;
  }

  /** Only who goes up leaves the end: a window that shrinks, or text that grows, moves the end away by itself. */
  scrolled() {
    if (this.isNearEnd()) this.follows = true;
    else if (this.scroll.scrollTop < this.top) this.follows = false;
    this.top = this.scroll.scrollTop;
  }

  toEnd() {
    if (this.follows) this.scroll.scrollTop = this.scroll.scrollHeight;
  }
}

/** One message in the list. */
class Shown {
  constructor(message) {
    this.message = message;
    this.frame = 0;
    this.finishedWith = undefined; // until the text stands
    this.againButton = make("button", { type: "button", class: "small", id: "again", text: "Regenerate" });
    this.timings = null;
    this.reason = "";
    this.progress = null;
    const isUser = message.role === "user";
    this.body = make("div", { class: "body" });
    this.thoughtsBody = make("div", { class: "body" });
    this.summaryLine = make("summary");
    this.thoughts = make("details", { class: "thoughts" }, [this.summaryLine, this.thoughtsBody]);
    this.note = make("span", { class: "note" });
    this.actions = make("div", { class: "actions" }, [this.note]);
    this.node = make("li", { class: `message ${message.role}` }, [
      make("p", { class: "who", text: isUser ? "You" : "Model" }), ...(isUser ? [] : [this.thoughts]), this.body,
      this.actions,
    ]);
    if (!isUser) this.node.setAttribute("aria-busy", "true");
    this.draw();
  }

  /** One event of the stream. */
  take(event) {
    const [choice] = event.choices ?? [];
    this.progress = event.prompt_progress ?? null;
    this.timings = event.timings ?? this.timings;
    this.reason = choice?.finish_reason ?? this.reason;
    this.message.thoughts += choice?.delta.reasoning_content ?? "";
    this.message.content += choice?.delta.content ?? "";
  }

  draw() {
    const { role, content, thoughts } = this.message;
    if (role === "user") {
      this.body.textContent = content;
      this.body.classList.add("plain");
    } else {
      render(this.body, content);
      render(this.thoughtsBody, thoughts);
    }
    this.thoughts.hidden = !thoughts;
    const busy = this.node.getAttribute("aria-busy") === "true";
    this.summaryLine.textContent = busy && !content ? "Thinking" : "Thoughts";
    if (busy) this.note.textContent = this.running();
  }

  /** The text stands: with its note and what can be done with it. `again` writes it anew. */
  finish(again) {
    if (this.finishedWith === again) return;
    if (this.finishedWith === undefined) {
      this.node.removeAttribute("aria-busy");
      this.draw();
      this.note.textContent = this.message.note;
      this.actions.append(copyButton("Copy message", () => this.message.content));
    }
    this.finishedWith = again;
    this.againButton.remove();
    if (!again) return;
    this.againButton.onclick = again;
    this.actions.append(this.againButton);
  }

  running() {
    if (this.progress) return `reading the prompt: ${whole(this.progress.processed)} of ${whole(this.progress.total)}`;
    return this.timings ? speed(this.timings) : "waiting";
  }

  /** What came of it, in a line; `end`: why it ended, if not by itself. */
  summary(end = this.reason === "length" ? "reached the limit of tokens" : "") {
    if (!this.timings) return end;
    const { cache_n: cached, prompt_n: read } = this.timings;
    const prompt = `prompt ${whole(cached + read)}${cached ? `, ${whole(cached)} known` : ""}`;
    return [speed(this.timings), prompt, end].filter(Boolean).join(" \u00b7 ");
  }
}

function speed({ predicted_n: tokens, predicted_per_second: rate }) {
  return `${whole(tokens)} tokens${rate > 0 ? ` \u00b7 ${short(rate)} tokens/s` : ""}`;
}
