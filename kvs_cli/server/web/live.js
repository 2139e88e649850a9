// The live panel: polls the server about twice a second while the page is seen, and shows what it says.

import { getJson } from "./api.js";
import { $, bytes, make, short, whole } from "./dom.js";
import { PageMap } from "./pagemap.js";

const POLL_MS = 500;
const LOST_MS = 2000; // between polls that nobody answers
const SAMPLES = 120;

const DASH = "\u2013";

export class Live {
  /** `onReply` hears null for each answer, and the error for each poll that had none. */
  constructor(onReply) {
    this.onReply = onReply;
    this.timer = 0;
    this.map = new PageMap($("map"), $("map-detail"));
    this.sparks = [new Spark($("speed-spark"), "--accent"), new Spark($("link-spark"), "--ring")];
    document.addEventListener("visibilitychange", () => this.wake());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    new ResizeObserver(() => this.redraw()).observe($("live"));
    this.wake();
  }

  /** Poll now, if the page is seen. */
  wake() {
    clearTimeout(this.timer);
    this.timer = 0;
    if (!document.hidden) this.poll();
  }

  redraw() {
    if ($("live").hidden) return;
    this.map.draw();
    this.sparks.forEach((spark) => spark.draw());
  }

  async poll() {
    let wait = POLL_MS;
    try {
      const seen = await getJson("kvs/live");
      this.show(seen);
      this.onReply(null);
    } catch (error) {
      wait = LOST_MS;
      $("strip").textContent = "";
      this.onReply(error);
    }
    clearTimeout(this.timer);
    if (!document.hidden) this.timer = setTimeout(() => this.poll(), wait);
  }

  show(seen) {
    const { link, context, pages, prompt } = seen;
    const rate = link.bytes_per_s ?? 0;
    const share = percent(rate, link.probed_bytes_per_s);
    const used = percent(context.tokens, context.size);
    const doing = {
      idle: "idle",
      text: `writing: ${whole(seen.decoded)} tokens`,
      prompt: `reading: ${whole(prompt.processed)} of ${whole(prompt.tokens)}`,
    }[seen.state];
    put("speed", seen.tokens_per_s === null ? DASH : short(seen.tokens_per_s), "tokens/s");
    $("speed-note").textContent = doing;
    put("link", link.bytes_per_s === null ? DASH : short(link.bytes_per_s / 1e9), "GB/s");
    const shown = rate > 0 && share === 0 ? "<1" : share;
    $("link-note").textContent = `${shown} % of ${short(link.probed_bytes_per_s / 1e9)} GB/s`;
    put("context", whole(context.tokens), "tokens");
    $("context-note").textContent = `${used} % of ${whole(context.size)}`;
    put("queue", whole(seen.queue), "waiting");
    $("queue-note").textContent = seen.state === "idle" ? "the engine is free" : "one at work";
    meter("link-meter", share);
    meter("context-meter", used);
    this.sparks[0].push(seen.tokens_per_s ?? 0);
    this.sparks[1].push(rate);
    this.showPages(pages, link);
    showDrafters(seen.drafters);
    const queued = seen.queue ? [`${whole(seen.queue)} waiting`] : [];
    const rates = seen.state === "text" && seen.tokens_per_s !== null
      ? [`${short(seen.tokens_per_s)} tokens/s`, ...(rate > 0 ? [`${bytes(rate)}/s`] : [])] : [doing];
    $("strip").textContent = [...rates, `context ${used} %`, ...queued].join(" \u00b7 ");
    this.redraw();
  }

  showPages(pages, link) {
    const counts = pages.places.map((_, place) => pages.layers.flatMap((layer) => layer.runs)
      .reduce((sum, [at, number]) => sum + (at === place ? number : 0), 0));
    pages.places.forEach((name, place) => { $(`count-${name}`).textContent = whole(counts[place]); });
    this.map.set(pages, counts);
    const step = pages.streamed_pages_per_step;
    facts([
      ["streamed per step", step ? `${whole(step)} pages, ${bytes(step * pages.page_bytes)}` : "nothing"],
      ["a page", `${whole(pages.page_tokens)} tokens, ${bytes(pages.page_bytes)}`],
      ["pool", `${whole(pages.pool_pages)} slots, ring ${whole(pages.ring_slots)}`],
      ["history in host memory", bytes(pages.history_bytes)],
      ["copied to the device", bytes(link.h2d_bytes)],
      ["published to the host", bytes(link.d2h_bytes)],
    ]);
  }
}

/** A curve of the last minute. */
class Spark {
  constructor(canvas, color) {
    this.canvas = canvas;
    this.color = color;
    this.values = [];
  }

  push(value) {
    this.values.push(value);
    if (this.values.length > SAMPLES) this.values.shift();
  }

  draw() {
    const { width, height, context } = sized(this.canvas);
    const most = Math.max(...this.values, 1e-9);
    const color = getComputedStyle(this.canvas).getPropertyValue(this.color);
    const x = (at) => width * (1 - (this.values.length - 1 - at) / (SAMPLES - 1));
    const y = (value) => height - 1 - (height - 3) * (value / most);
    context.beginPath();
    this.values.forEach((value, at) => context.lineTo(x(at), y(value)));
    context.strokeStyle = color;
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.stroke();
    context.lineTo(width, height);
    context.lineTo(x(0), height);
    context.globalAlpha = 0.12;
    context.fillStyle = color;
    context.fill();
  }
}

/** A canvas as large as it is shown, empty, and its sizes in CSS pixels. */
export function sized(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return { width, height, context };
}

function put(id, value, unit) {
  $(id).replaceChildren(value, make("small", { text: ` ${unit}` }));
}

function meter(id, share) {
  const element = $(id);
  element.setAttribute("aria-valuemin", "0");
  element.setAttribute("aria-valuemax", "100");
  element.setAttribute("aria-valuenow", String(Math.min(100, share)));
  element.firstElementChild.style.width = `${Math.min(100, share)}%`;
}

function facts(pairs) {
  $("facts").replaceChildren(...pairs.flatMap(([name, value]) => [
    make("dt", { text: name }), make("dd", { text: value }),
  ]));
}

function showDrafters(drafters) {
  const asked = drafters.filter((each) => each.drafted > 0);
  $("drafters").hidden = asked.length === 0;
  $("drafter-list").replaceChildren(...asked.map(({ name, drafted, accepted }) => {
    const share = percent(accepted, drafted);
    const bar = make("i");
    bar.style.width = `${share}%`;
    return make("li", {}, [
      make("span", { text: name }), make("b", { text: `${share} %` }),
      make("span", { class: "note", text: `${whole(accepted)} of ${whole(drafted)}` }),
      make("div", { class: "meter", "aria-hidden": "true" }, [bar]),
    ]);
  }));
}

function percent(part, all) {
  return all > 0 ? Math.round((100 * part) / all) : 0;
}
