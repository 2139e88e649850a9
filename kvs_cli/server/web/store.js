// What the browser keeps. A browser that keeps nothing (private windows, full storage) costs memory, not the chat.

const CHAT = "kvs.chat";
const SETTINGS = "kvs.settings";
const LIVE = "kvs.live";
const KEY = "kvs.key"; // of the tab alone: a key is not for the disk

function read(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? fallback;
  } catch {
    return fallback;
  }
}

/** Whether it could be kept. */
function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

const isText = (value) => typeof value === "string";

/** Messages as they were left: {role, content, thoughts, note}. What is no message is dropped. */
export function loadMessages() {
  const held = read(CHAT, []);
  if (!Array.isArray(held)) return [];
  return held.filter((each) => each && isText(each.content) && ["user", "assistant"].includes(each.role))
    .map(({ role, content, thoughts, note }) => (
      { role, content, thoughts: isText(thoughts) ? thoughts : "", note: isText(note) ? note : "" }));
}

export const saveMessages = (messages) => write(CHAT, messages);

/** Texts of the settings' fields by name; an empty one is the server's value. */
export function loadSettings() {
  const held = read(SETTINGS, {});
  return Object.fromEntries(Object.entries(held ?? {}).filter(([, value]) => isText(value)));
}

export const saveSettings = (settings) => write(SETTINGS, settings);

/** Whether the panel was open; null if nobody has said so. */
export const loadLive = () => read(LIVE, null);
export const saveLive = (open) => write(LIVE, open);

let key = "";
try {
  key = sessionStorage.getItem(KEY) ?? "";
} catch {
  // then it lives as long as the page
}

export const apiKey = () => key;

export function setApiKey(text) {
  key = text.trim();
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // as above
  }
}
