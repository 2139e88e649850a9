// The server: JSON requests, and the events of a chat as they come. All addresses are relative, so a prefix holds.

import { apiKey } from "./store.js";

/** One line that can be shown. `status` 0: nobody answered. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message.replace(/\s+/g, " ").trim() || `the server answered with status ${status}`);
    this.status = status;
  }
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  let reply;
  try {
    reply = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer; is it still running?", 0);
  }
  if (!reply.ok) throw await failure(reply);
  return reply;
}

async function failure(reply) {
  let message = "";
  try {
    message = String((await reply.json()).error.message);
  } catch {
    // no error object: the status has to do
  }
  return new ServerError(message, reply.status);
}

export async function getJson(path) {
  const reply = await request(path);
  try {
    return await reply.json();
  } catch {
    throw new ServerError("The server broke off its answer", 0);
  }
}

/** The objects of a chat's event stream. ServerError if it fails, AbortError once `signal` says so. */
export async function* streamChat(body, signal) {
  const reply = await request("v1/chat/completions", {
    method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  });
  for await (const line of lines(reply.body)) {
    if (!line.startsWith("data:")) continue;
    const data = line.slice(5).trim();
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ServerError(String(event.error.message), event.error.code ?? 500);
    yield event;
  }
  throw new ServerError("The server broke off its answer", 0);
}

async function* lines(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The server broke off its answer", 0);
    }
    if (part.done) return;
    const split = (rest + part.value).split("\n");
    rest = split.pop();
    yield* split;
  }
}
