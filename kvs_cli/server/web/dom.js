// Small helpers for elements.

export const $ = (id) => document.getElementById(id);

/** An element with attributes, `text` as its text, and children: elements, or strings that become text. */
export function make(name, { text, ...attributes } = {}, children = []) {
  const element = document.createElement(name);
  Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
  if (text !== undefined) element.textContent = text;
  element.append(...children);
  return element;
}

export function announce(text) {
  $("announce").textContent = text;
}

/** A button that copies what `text` gives when it is pressed. */
export function copyButton(label, text) {
  const button = make("button", { type: "button", class: "small", text: "Copy", "aria-label": label });
  button.addEventListener("click", async () => {
    const done = await copied(text());
    button.textContent = done ? "Copied" : "Not copied";
    announce(button.textContent);
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedByHand(text); // pages of plain HTTP from other machines have no clipboard
  }
}

function copiedByHand(text) {
  const focused = document.activeElement;
  const area = make("textarea", { class: "unseen" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return done;
}

const NUMBERS = new Intl.NumberFormat("en");

export const whole = (value) => NUMBERS.format(Math.round(value));

/** Three digits: 0.123, 1.23, 12.3, 123. */
export function short(value) {
  if (value >= 100) return whole(value);
  return value.toFixed(value >= 10 ? 1 : 2);
}

/** Bytes in the unit that fits; decimal, as rates are given. */
export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) {
    value /= 1000;
    at += 1;
  }
  return `${at ? short(value) : whole(value)} ${units[at]}`;
}
