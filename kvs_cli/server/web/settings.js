// The settings dialog: fields as texts, kept as they are typed; what is empty is left to the server.

import { $ } from "./dom.js";
import { apiKey, loadSettings, saveSettings, setApiKey } from "./store.js";

const WHOLE = ["top_k", "n_predict", "seed"];
const NUMBERS = ["temperature", "top_p", "min_p", ...WHOLE];
const RANDOM_SEED = 0xffffffff;

export class Settings {
  /** `onKey`: there is another API key now. */
  constructor(onKey) {
    this.onKey = onKey;
    this.dialog = $("settings");
    this.form = $("settings-form");
    this.values = loadSettings();
    this.hasThinking = false;
    this.fill();
    this.form.addEventListener("input", () => this.read());
    this.dialog.addEventListener("close", () => { if (this.keyWas !== apiKey()) this.onKey(); });
    $("reset-settings").addEventListener("click", () => {
      this.values = {};
      saveSettings(this.values);
      this.fill();
    });
  }

  /** Show the dialog; `field`: where to begin. */
  open(field = "system") {
    if (this.dialog.open) return;
    this.keyWas = apiKey();
    this.dialog.showModal();
    this.form.elements[field].focus();
  }

  /** What the server has said of itself: its defaults, and whether its template has a switch for thinking. */
  know(props) {
    const defaults = props.default_generation_settings.params;
    NUMBERS.forEach((name) => {
      const value = defaults[name];
      this.form.elements[name].placeholder = placeholder(name, value);
    });
    this.hasThinking = props.chat_template.includes("enable_thinking");
    $("thinking-row").hidden = !this.hasThinking;
  }

  /** The fields of a request, and the system prompt. */
  request() {
    const fields = { system: (this.values.system ?? "").trim() };
    NUMBERS.forEach((name) => {
      const value = Number(this.values[name]);
      if (this.values[name] && Number.isFinite(value)) fields[name] = WHOLE.includes(name) ? Math.round(value) : value;
    });
    if (this.hasThinking && this.values.thinking) {
      fields.chat_template_kwargs = { enable_thinking: this.values.thinking === "on" };
    }
    return fields;
  }

  fill() {
    ["system", "thinking", ...NUMBERS].forEach((name) => { this.form.elements[name].value = this.values[name] ?? ""; });
    this.form.elements.key.value = apiKey();
  }

  read() {
    ["system", "thinking", ...NUMBERS].forEach((name) => { this.values[name] = this.form.elements[name].value; });
    saveSettings(this.values);
    setApiKey(this.form.elements.key.value);
  }
}

function placeholder(name, value) {
  if (name === "seed" && value === RANDOM_SEED) return "random";
  if (name === "n_predict" && value < 0) return "no limit";
  return String(Number(value.toPrecision(6)));
}
