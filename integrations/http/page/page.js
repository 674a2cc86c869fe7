// The app's page: a chat over /v1/chat/completions, and beside it what the engine does now, from /stats.
// What a model or a server says is put in as text, never as HTML: it may be hostile.
"use strict";

const at = (id) => document.getElementById(id);
const make = (tag, parent, name = "", text = "") => {
  const node = parent.appendChild(document.createElement(tag));
  node.className = name;
  node.append(text);
  return node;
};

let messages = []; // the chat, as the API takes it
let calls = []; // the model's calls of tools whose results are to be typed in
let answering = null; // the AbortController of the answer that is being written
let models = {}; // rows of /v1/models by id

async function request(path, options = {}) {
  const key = at("key").value;
  const headers = { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  if (response.status === 401) at("options").open = true;
  const body = await response.json().catch(() => null); // a proxy's error need not be JSON
  throw new Error(body?.error?.message ?? `${response.status} ${response.statusText}`);
}

// ---------------------------------------------------------------- the chat

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (frame.startsWith("data: ") && frame !== "data: [DONE]") yield JSON.parse(frame.slice(6));
    }
  }
}

function scrolling(work) { // follow what is written, unless the reader has scrolled up
  const log = at("log");
  const follow = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  work();
  if (follow) log.scrollTop = log.scrollHeight;
}

function say(role, text) {
  messages.push(role === "tool" ? { role, content: text, tool_call_id: calls.shift().id } : { role, content: text });
  scrolling(() => make("div", make("article", at("log"), role), "", text));
}

class Answer { // an answer that is being written: what is shown of it, and the message that it becomes
  constructor() {
    this.article = make("article", at("log"), "assistant");
    this.message = { role: "assistant", content: "" };
    this.shown = [];
  }
  add(delta) {
    const thought = delta.reasoning_content ?? delta.reasoning;
    if (thought) this.think(thought);
    if (delta.content) {
      this.text ??= make("div", this.article);
      this.text.append(delta.content);
      this.message.content += delta.content;
    }
    for (const piece of delta.tool_calls ?? []) this.call(piece);
  }
  think(text) {
    if (!this.thinking) {
      const folded = make("details", this.article, "thinking");
      make("summary", folded, "", "Thinking");
      this.thinking = make("div", folded);
      this.message.reasoning_content = "";
    }
    this.thinking.append(text);
    this.message.reasoning_content += text;
  }
  call(piece) {
    const all = (this.message.tool_calls ??= []);
    if (!all[piece.index]) {
      all[piece.index] = { id: piece.id, type: "function", function: { name: piece.function.name, arguments: "" } };
      const box = make("div", this.article, "call");
      make("b", box, "", piece.function.name);
      this.shown[piece.index] = make("code", box);
    }
    const more = piece.function?.arguments ?? "";
    all[piece.index].function.arguments += more;
    this.shown[piece.index].append(more);
  }
}

async function ask() {
  const [answer, chat] = [new Answer(), messages]; // another chat may begin meanwhile
  const note = (name, text) => scrolling(() => make("p", answer.article, name, text));
  const began = performance.now();
  answering = new AbortController();
  at("send").textContent = "Stop";
  try {
    const body = { model: at("model").value, messages: [...chat], stream: true, stream_options: { include_usage: true } };
    for (const name of ["temperature", "max_tokens"]) if (at(name).value) body[name] = Number(at(name).value);
    if (at("system").value) body.messages.unshift({ role: "system", content: at("system").value });
    if (at("tools").value.trim()) body.tools = JSON.parse(at("tools").value);
    const options = { method: "POST", body: JSON.stringify(body), signal: answering.signal };
    for await (const event of events(await request("v1/chat/completions", options))) {
      if (event.error) throw new Error(event.error.message);
      scrolling(() => event.choices.forEach((choice) => answer.add(choice.delta)));
      if (event.usage) {
        const { prompt_tokens: read, completion_tokens: written, prompt_tokens_details: details } = event.usage;
        const seconds = (performance.now() - began) / 1000;
        note("note", `${read} tokens read (${details?.cached_tokens ?? 0} cached), ${written} written in ${seconds.toFixed(1)} s`);
      }
    }
    calls = [...(answer.message.tool_calls ?? [])];
  } catch (error) {
    note(error.name === "AbortError" ? "note" : "error", error.name === "AbortError" ? "Stopped" : error.message);
    delete answer.message.tool_calls; // perhaps cut off in the middle
  }
  answering = null;
  at("send").textContent = "Send";
  if (answer.message.content || answer.message.tool_calls) chat.push(answer.message);
  else if (chat.at(-1).role === "user") { // nothing came of it: it may be sent once more
    at("text").value ||= chat.pop().content;
    answer.article.previousElementSibling?.remove();
  }
  at("text").placeholder = calls.length ? `Result of ${calls[0].function.name}` : "Message";
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (answering) return answering.abort();
  const text = at("text").value;
  if (!text.trim()) return;
  at("text").value = "";
  say(calls.length ? "tool" : "user", text);
  if (calls.length) at("text").placeholder = `Result of ${calls[0].function.name}`;
  else ask();
});
at("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || answering) return;
  event.preventDefault();
  at("ask").requestSubmit();
});
at("fresh").addEventListener("click", () => {
  answering?.abort();
  [messages, calls] = [[], []];
  at("log").replaceChildren();
  at("text").placeholder = "Message";
});

// ---------------------------------------------------------------- what the engine does now

let before = null;
let rates = [];

function show(stats) {
  const { pages, requests } = stats;
  const seconds = before ? stats.uptime - before.uptime : 0;
  rates = [...rates, seconds > 0 ? (stats.generated_tokens - before.generated_tokens) / seconds : 0].slice(-120);
  before = stats;
  const most = Math.max(1, ...rates);
  at("rates").setAttribute("points", rates.map((rate, i) => `${120 - rates.length + i + 1},${29 - (27 * rate) / most}`).join(" "));
  const ms = (value) => (value ? `${(1000 * value).toFixed(1)} ms` : "–");
  const share = (part, all) => (all ? `${((100 * part) / all).toFixed(0)} %` : "–");
  const counts = { used: pages.total - pages.free - pages.cached, cached: pages.cached, free: pages.free };
  const rows = {
    "Running": requests.running, "Waiting": requests.waiting, "Grammar queue": requests.grammar_queue,
    "Adapter queue": requests.adapter_queue, "Tokens a second": rates.at(-1).toFixed(0), "Step, median": ms(stats.step.p50),
    "First token, median": ms(stats.first_token.p50), "Prefix hits": share(stats.cached_tokens, stats.prompt_tokens),
    "Pages in use": counts.used, "Pages cached": counts.cached, "Pages free": counts.free,
  };
  at("figures").replaceChildren();
  for (const [name, value] of Object.entries(rows)) {
    make("dt", at("figures"), "", name);
    make("dd", at("figures"), "", String(value));
  }
  for (const span of at("pages").children) span.style.flexGrow = counts[span.className];
}

async function watch() {
  try {
    if (!at("model").length) await list();
    const all = await (await request("stats")).json();
    const chosen = models[at("model").value];
    const stats = all[chosen?.parent ?? chosen?.id];
    at("state").textContent = stats ? `up ${Math.round(stats.uptime)} s` : "not loaded";
    if (stats) show(stats);
  } catch (error) {
    at("state").textContent = error.message;
  }
  setTimeout(watch, document.hidden ? 5000 : 1000);
}

async function list() {
  const [{ data }, stats] = await Promise.all(["v1/models", "stats"].map(async (path) => (await request(path)).json()));
  models = Object.fromEntries(data.map((row) => [row.id, row]));
  const chats = data.filter((row) => (stats[row.parent ?? row.id]?.task ?? "generate") === "generate");
  at("model").replaceChildren(...chats.map((row) => new Option(row.id, row.id)));
}

at("model").addEventListener("change", () => {
  [before, rates] = [null, []];
  at("figures").replaceChildren();
});
at("now").open = matchMedia("(min-width: 48rem)").matches;
at("key").value = sessionStorage.getItem("key") ?? "";
at("key").addEventListener("input", () => sessionStorage.setItem("key", at("key").value));
watch();
