// The map of pages: a row per layer, a cell per page, its colour where the page is. Arrow keys or the pointer ask.

import { whole } from "./dom.js";
import { sized } from "./live.js";

const COLORS = ["--resident", "--ring", "--host"];
const WORDS = ["resident", "in the ring", "host only"];
const LEFT_PX = 26;      // the layers' numbers
const MOST_PX = 300;
const FEWEST_PAGES = 16; // a row shows at least so many cells

export class PageMap {
  constructor(canvas, detail) {
    this.canvas = canvas;
    this.detail = detail;
    this.layers = [];
    this.cursor = null; // {row, page}
    canvas.addEventListener("pointermove", (event) => this.point(event.offsetX, event.offsetY));
    canvas.addEventListener("pointerleave", () => this.move(null));
    canvas.addEventListener("blur", () => this.move(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  set(pages, counts) {
    this.layers = pages.layers;
    this.pageTokens = pages.page_tokens;
    this.pages = Math.max(0, ...this.layers.map(({ runs }) => runs.reduce((sum, [, number]) => sum + number, 0)));
    let cells = FEWEST_PAGES;
    while (cells < this.pages) cells *= 2;
    this.cells = cells;
    this.row = Math.max(3, Math.min(16, Math.floor(MOST_PX / Math.max(1, this.layers.length))));
    this.canvas.style.height = `${this.row * this.layers.length}px`;
    const words = WORDS.map((word, place) => `${counts[place]} ${word}`).join(", ");
    this.canvas.setAttribute("aria-label", `Map of pages: ${this.layers.length} layers, ${words}. Arrow keys ask.`);
    if (this.cursor) this.tell();
  }

  draw() {
    if (!this.layers.length) return;
    const { width, context } = sized(this.canvas);
    const style = getComputedStyle(this.canvas);
    const colors = COLORS.map((name) => style.getPropertyValue(name));
    const cell = (width - LEFT_PX) / this.cells;
    const tall = this.row - (this.row >= 6 ? 2 : 0);
    const gap = cell >= 4 ? 1 : 0;
    const every = Math.ceil(12 / this.row); // labels that do not touch
    context.font = `10px ${style.fontFamily}`;
    context.textBaseline = "middle";
    context.textAlign = "right";
    this.layers.forEach(({ layer, runs }, row) => {
      const y = row * this.row;
      context.fillStyle = style.getPropertyValue("--faint");
      if (row % every === 0) context.fillText(String(layer), LEFT_PX - 6, y + this.row / 2);
      context.fillStyle = style.getPropertyValue("--cell");
      const fill = (first, number) => {
        if (!gap) context.fillRect(LEFT_PX + first * cell, y, Math.max(1, number * cell), tall);
        for (let at = first; gap && at < first + number; at += 1) {
          context.fillRect(LEFT_PX + at * cell, y, cell - gap, tall);
        }
      };
      fill(0, this.cells);
      let page = 0;
      for (const [place, number] of runs) {
        context.fillStyle = colors[place];
        fill(page, number);
        page += number;
      }
    });
    if (this.cursor) {
      context.strokeStyle = style.getPropertyValue("--text");
      context.lineWidth = 1.5;
      context.strokeRect(LEFT_PX + this.cursor.page * cell - 0.5, this.cursor.row * this.row - 0.5,
        Math.max(3, cell - gap) + 1, tall + 1);
    }
  }

  point(x, y) {
    const row = Math.floor(y / this.row);
    const page = Math.floor(((x - LEFT_PX) / (this.canvas.clientWidth - LEFT_PX)) * this.cells);
    this.move(page >= 0 && page < this.pages && row >= 0 && row < this.layers.length ? { row, page } : null);
  }

  key(event) {
    const [down, right] = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key]
      ?? [0, 0];
    if ((!down && !right) || !this.pages) return;
    event.preventDefault();
    const at = this.cursor ?? { row: 0, page: 0 };
    const within = (value, size) => Math.max(0, Math.min(size - 1, value));
    this.move(this.cursor
      ? { row: within(at.row + down, this.layers.length), page: within(at.page + right, this.pages) } : at);
  }

  move(cursor) {
    this.cursor = cursor;
    this.tell();
    this.draw();
  }

  tell() {
    const text = this.cursor ? this.described(this.cursor) : "";
    if (this.detail.textContent !== text) this.detail.textContent = text;
  }

  described({ row, page }) {
    const layer = this.layers[row];
    let end = 0;
    for (const [place, number] of layer?.runs ?? []) {
      end += number;
      if (page < end) {
        const tokens = `${whole(page * this.pageTokens)} to ${whole((page + 1) * this.pageTokens - 1)}`;
        return `layer ${layer.layer}, page ${page}, tokens ${tokens}: ${WORDS[place]}`;
      }
    }
    return "";
  }
}
