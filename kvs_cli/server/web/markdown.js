// A modest Markdown: code blocks, headings, lists, quotes, paragraphs; code, strong and emphasis within lines.
// Text of a model only ever becomes text nodes: no HTML, no links, no images.

import { make, copyButton } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.+?)\s*#*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const INLINE = /(?<code>`[^`\n]+`)|\*\*(?<strong>[^\s*][^*\n]*)\*\*|(?<![\w*])\*(?<em>[^\s*][^*\n]*)\*(?![\w*])/g;
const LONGEST_MARKED = 4000; // of a line: a longer one is data, and is shown as it is

/** Blocks of a text: {kind, text, ...}. A fence that is still open is a code block. */
export function blocks(text) {
  const made = [];
  let open = null; // a paragraph, list or quote that the next line may continue
  const lines = text.split("\n");
  for (let at = 0; at < lines.length; at += 1) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (fence) {
      const end = closing(lines, at + 1, fence[1]);
      made.push({ kind: "code", language: fence[2], text: lines.slice(at + 1, end).join("\n") });
      at = end;
      open = null;
      continue;
    }
    const heading = HEADING.exec(line);
    const item = ITEM.exec(line);
    const quote = QUOTE.exec(line);
    if (!line.trim()) {
      open = null;
    } else if (heading) {
      made.push({ kind: "heading", level: heading[1].length, text: heading[2] });
      open = null;
    } else if (item) {
      if (open?.kind !== "list") made.push((open = { kind: "list", items: [], text: "" }));
      open.items.push({ depth: Math.min(4, Math.floor(item[1].length / 2)), mark: item[2], text: item[3] });
      open.text += `${line}\n`;
    } else if (quote) {
      if (open?.kind !== "quote") made.push((open = { kind: "quote", text: "" }));
      open.text += `${quote[1]}\n`;
    } else if (open?.kind === "list" && /^\s/.test(line)) {
      open.items.at(-1).text += `\n${line.trim()}`;
      open.text += `${line}\n`;
    } else {
      if (open?.kind !== "paragraph") made.push((open = { kind: "paragraph", text: "" }));
      open.text += `${open.text && "\n"}${line}`;
    }
  }
  return made;
}

function closing(lines, from, fence) {
  const end = lines.findIndex((line, at) => at >= from && line.trim().length >= fence.length
    && line.trim().replaceAll(fence[0], "") === "");
  return end < 0 ? lines.length : end;
}

/** Make `parent` show `text`; what it shows already stays, so a growing text changes its end alone. */
export function render(parent, text) {
  const shown = parent.shownBlocks ?? [];
  const wanted = blocks(text);
  wanted.forEach((block, at) => {
    const old = shown[at];
    if (old && old.kind === block.kind && old.text === block.text && old.language === block.language) {
      block.node = old.node;
    } else if (old?.kind === "code" && block.kind === "code" && old.language === block.language) {
      block.node = old.node;
      block.node.querySelector("code").textContent = block.text;
    } else {
      block.node = build(block);
      if (old) old.node.replaceWith(block.node);
      else parent.append(block.node);
    }
  });
  shown.slice(wanted.length).forEach((old) => old.node.remove());
  parent.shownBlocks = wanted;
}

function build(block) {
  switch (block.kind) {
    case "code": {
      const code = make("code", { text: block.text });
      return make("div", { class: "code" }, [
        make("div", { class: "code-top" }, [
          make("span", { text: block.language || "text" }), copyButton("Copy code", () => code.textContent),
        ]),
        make("pre", { tabindex: "0", "aria-label": "Code" }, [code]),
      ]);
    }
    case "heading":
      return make("p", { class: "heading", role: "heading", "aria-level": String(Math.min(6, block.level + 2)) },
        inline(block.text));
    case "list":
      return make("ul", {}, block.items.map((item) => make("li", { class: `depth-${item.depth}` }, [
        make("span", { class: "mark", text: /\d/.test(item.mark) ? item.mark : "\u2022" }),
        make("span", {}, inline(item.text)),
      ])));
    case "quote":
      return make("blockquote", {}, inline(block.text.trim()));
    default:
      return make("p", {}, inline(block.text));
  }
}

function inline(text) {
  return text.split("\n").flatMap((line, at) => [...(at ? ["\n"] : []), ...marked(line)]);
}

function marked(line) {
  if (line.length > LONGEST_MARKED) return [line];
  const made = [];
  let end = 0;
  for (const match of line.matchAll(INLINE)) {
    made.push(line.slice(end, match.index));
    const { code, strong, em } = match.groups;
    if (code) made.push(make("code", { text: code.slice(1, -1) }));
    else made.push(make(strong ? "strong" : "em", { text: strong ?? em }));
    end = match.index + match[0].length;
  }
  return [...made, line.slice(end)].filter((part) => part !== "");
}
