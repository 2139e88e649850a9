// Puts the page together: server, conversation, settings, live panel, keyboard.

import { getJson } from "./api.js";
import { Chat } from "./chat.js";
import { $ } from "./dom.js";
import { Live } from "./live.js";
import { Settings } from "./settings.js";
import { loadLive, saveLive } from "./store.js";

const WIDE = matchMedia("(min-width: 900px)");
const UNAUTHORISED = 401;

const prompt = $("prompt");
let known = false; // what the server says of itself

/**
 * One line above the conversation. `kind`: what concerns the chat stays, what concerns the server goes once it answers.
 * `action`: {label, run}
 */
function notify(text, kind, action = null) {
  if (!$("notice").hidden && $("notice-text").textContent === text) return; // said once, not with every poll
  $("notice").dataset.kind = kind;
  $("notice-text").textContent = text;
  $("notice-action").hidden = action === null;
  $("notice-action").textContent = action?.label ?? "";
  $("notice-action").onclick = () => {
    hideNotice();
    action.run();
  };
  $("notice").hidden = false;
}

function hideNotice() {
  $("notice").hidden = true;
}

function failed(error, kind) {
  if (error.status === UNAUTHORISED) {
    notify("This server wants an API key", "server", { label: "Enter it", run: () => settings.open("key") });
  } else {
    notify(error.message, kind);
  }
}

async function knowServer() {
  const props = await getJson("props");
  settings.know(props);
  $("model").textContent = props.model_alias;
  $("model").title = `${props.model_path} (${props.model_ftype}), ${props.build_info}`;
  document.title = `${props.model_alias} \u2013 kvs`;
  known = true;
}

const settings = new Settings(() => {
  hideNotice();
  live.wake();
});

const chat = new Chat({
  request: () => settings.request(),
  onState: (busy) => {
    $("send").hidden = busy;
    $("stop").hidden = !busy;
  },
  onError: (error, sent) => {
    failed(error, "chat");
    if (sent && !prompt.value) {
      prompt.value = sent;
      fit();
    }
  },
});

const live = new Live((error) => {
  if (error) {
    known = false;
    failed(error, "server");
    return;
  }
  if ($("notice").dataset.kind === "server") hideNotice();
  if (!known) knowServer().catch((wrong) => failed(wrong, "server"));
});

/** The box grows with its text. */
function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

function submit() {
  const text = prompt.value.trim();
  if (!text || chat.busy) return;
  if ($("notice").dataset.kind === "chat") hideNotice();
  prompt.value = "";
  fit();
  chat.send(text);
}

function showLive(open) {
  $("live").hidden = !open;
  $("toggle-live").setAttribute("aria-expanded", String(open));
  if (open) live.redraw();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
  prompt.focus();
});
prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || $("settings").open || !chat.busy) return;
  chat.stop();
  prompt.focus();
});
$("stop").addEventListener("click", () => {
  chat.stop();
  prompt.focus();
});
$("new-chat").addEventListener("click", () => {
  const old = chat.clear();
  const back = { label: "Bring the last one back", run: () => chat.replace(old) };
  if (old.length) notify("A new conversation", "chat", back);
  prompt.focus();
});
$("open-settings").addEventListener("click", () => settings.open());
$("notice-close").addEventListener("click", () => {
  hideNotice();
  prompt.focus();
});
$("toggle-live").addEventListener("click", () => {
  const open = $("live").hidden;
  showLive(open);
  saveLive(open);
});

showLive(loadLive() ?? WIDE.matches);
fit();
