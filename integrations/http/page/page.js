// The app's page: chats over /v1/chat/completions, kept in this browser, and beside them what the engine does now.
// What a model or a server says is put in as text or as nodes that are made here, never as HTML: it may be hostile.
"use strict";

import { Markdown, copyButton, make } from "./markdown.js";
import { forget, showFigures, showRequests, showSteps, showTree } from "./engine.js";

const at = (id) => document.getElementById(id);
const STORE = "asyncengine.chats";
const MOST_CHATS = 100;
const MOST_PIXELS = 1536; // of a picture's longer side: more is only more to send

let chats = []; // the newest first: { id, title, turns: [{ message, note }] }, messages as the API takes them
let chat = null; // the one that is shown
let calls = []; // the model's calls of tools whose results are to be typed in
let pictures = []; // data URLs that go with the next message
let answering = null; // the AbortController of the answer that is being written
let models = {}; // rows of /v1/models by id
const own = new Set(); // ids of requests that this page made

async function request(path, options = {}) {
  const key = at("key").value;
  const headers = { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  if (response.status === 401) at("options").open = true;
  const body = await response.json().catch(() => null); // a proxy's error need not be JSON
  throw new Error(body?.error?.message ?? `${response.status} ${response.statusText}`);
}

const button = (parent, text, label, act) => {
  const node = make("button", parent, "small", text);
  node.type = "button";
  node.ariaLabel = label;
  node.addEventListener("click", act);
  return node;
};

// ---------------------------------------------------------------- chats, kept in this browser

function load() {
  try {
    const kept = JSON.parse(localStorage.getItem(STORE) ?? "[]");
    chats = kept.filter((each) => Array.isArray(each?.turns) && each.turns.every((turn) => turn?.message?.role));
  } catch { // no storage, or not ours
    chats = [];
  }
}

function save() { // where there is no room for all, the oldest go
  chats = chats.slice(0, MOST_CHATS);
  for (let kept = chats.length; kept >= 0; kept--) {
    try {
      localStorage.setItem(STORE, JSON.stringify(chats.slice(0, kept)));
      break;
    } catch { /* the next one is smaller */ }
  }
  listChats();
}

function listChats() {
  at("chats").replaceChildren();
  for (const each of chats) {
    const row = make("li", at("chats"), each === chat ? "current" : "");
    button(row, each.title, `Open chat ${each.title}`, () => open(each)).className = "title";
    button(row, "×", `Delete chat ${each.title}`, () => {
      chats = chats.filter((other) => other !== each);
      if (each === chat) fresh();
      save();
    });
  }
}

function fresh() {
  answering?.abort();
  chat = { id: Date.now(), title: "", turns: [] };
  show();
}

function open(wanted) {
  answering?.abort();
  chat = wanted;
  show();
}

function show() { // the whole chat anew
  at("log").replaceChildren();
  chat.turns.forEach(draw);
  const last = chat.turns.findLast((turn) => turn.message.role === "assistant");
  const answered = new Set(chat.turns.map((turn) => turn.message.tool_call_id));
  calls = (last?.message.tool_calls ?? []).filter((call) => !answered.has(call.id));
  placeholder();
  meter(last?.usage);
  listChats();
  at("log").scrollTop = at("log").scrollHeight;
}

function remember(turn) {
  if (!chats.includes(chat)) chats.unshift(chat);
  if (!chat.title) chat.title = textOf(turn.message).trim().slice(0, 60) || "Pictures";
  save();
}

// ---------------------------------------------------------------- the chat

const textOf = ({ content }) => (typeof content === "string" ? content : content.filter((part) => part.type === "text").map((part) => part.text).join("\n"));
const imagesOf = ({ content }) => (typeof content === "string" ? [] : content.filter((part) => part.type === "image_url").map((part) => part.image_url.url));

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
      this.text ??= new Markdown(this.article, scrolling);
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
  end(turn) { // all of it is there: its buttons
    this.text?.draw(true);
    if (turn.note) make("p", this.article, "note", turn.note);
    const row = make("p", this.article, "tools");
    if (turn.message.content) copyButton(row, () => turn.message.content);
    button(row, "Regenerate", "Write this answer again", () => again(turn));
  }
}

function draw(turn) {
  const { message } = turn;
  if (message.role === "assistant") {
    const answer = new Answer();
    answer.add({ ...message, tool_calls: message.tool_calls?.map((call, index) => ({ ...call, index })) });
    answer.message = message;
    return answer.end(turn);
  }
  const article = make("article", at("log"), message.role);
  const box = make("div", article, "", textOf(message));
  for (const url of imagesOf(message)) Object.assign(make("img", box), { src: url, alt: "A picture that was sent" });
  if (message.role === "user") button(make("p", article, "tools"), "Edit", "Edit this message", () => edit(turn));
  return article;
}

function cutTo(turn) { // leave out a turn and all behind it; false: it is not there any more
  const place = chat.turns.indexOf(turn);
  if (answering || place < 0) return false;
  chat.turns.length = place;
  show();
  return true;
}

function edit(turn) {
  if (!cutTo(turn)) return;
  at("text").value = textOf(turn.message);
  pictures = imagesOf(turn.message);
  showPictures();
  at("text").focus();
}

function again(turn) {
  if (cutTo(turn)) ask();
}

function placeholder() {
  at("text").placeholder = calls.length ? `Result of ${calls[0].function.name}` : "Message";
}

function meter(usage) { // how much of the model's context the chat takes
  const most = models[at("model").value]?.max_model_len;
  at("context").hidden = !usage || !most;
  if (at("context").hidden) return;
  const used = usage.prompt_tokens + usage.completion_tokens;
  Object.assign(at("fill"), { max: most, high: 0.8 * most, optimum: 0, value: used });
  at("left").textContent = `${used.toLocaleString("en")} of ${most.toLocaleString("en")} tokens of context`;
}

async function ask() {
  const [answer, own_chat] = [new Answer(), chat]; // another chat may be opened meanwhile
  const turn = { message: answer.message, note: "", usage: null };
  const began = performance.now();
  const aborting = (answering = new AbortController());
  let failure = "";
  at("send").textContent = "Stop";
  try {
    const messages = own_chat.turns.map((each) => each.message);
    const body = { model: at("model").value, messages, stream: true, stream_options: { include_usage: true } };
    for (const name of ["temperature", "max_tokens"]) if (at(name).value) body[name] = Number(at(name).value);
    if (at("system").value) body.messages.unshift({ role: "system", content: at("system").value });
    if (at("tools").value.trim()) body.tools = JSON.parse(at("tools").value);
    const options = { method: "POST", body: JSON.stringify(body), signal: aborting.signal };
    const response = await request("v1/chat/completions", options);
    own.add(response.headers.get("x-request-id"));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      scrolling(() => event.choices.forEach((choice) => answer.add(choice.delta)));
      if (event.usage) {
        const { prompt_tokens: read, completion_tokens: written, prompt_tokens_details: details } = event.usage;
        const seconds = (performance.now() - began) / 1000;
        turn.usage = { prompt_tokens: read, completion_tokens: written };
        turn.note = `${read} tokens read (${details?.cached_tokens ?? 0} cached), ${written} written in ${seconds.toFixed(1)} s`;
      }
    }
  } catch (error) {
    if (error.name === "AbortError") turn.note = "Stopped";
    else failure = error.message;
    delete answer.message.tool_calls; // perhaps cut off in the middle
  }
  if (answering === aborting) answering = null;
  at("send").textContent = answering ? "Stop" : "Send";
  const kept = answer.message.content || answer.message.tool_calls;
  if (kept) own_chat.turns.push(turn);
  if (own_chat !== chat) return save();
  if (kept) scrolling(() => answer.end(turn));
  else if (turn.note) make("p", answer.article, "note", turn.note);
  if (failure) scrolling(() => make("p", answer.article, "error", failure));
  if (!kept && own_chat.turns.at(-1)?.message.role === "user") { // nothing came of it: it may be sent once more
    const { message } = own_chat.turns.pop();
    at("text").value ||= textOf(message);
    pictures = imagesOf(message);
    showPictures();
    answer.article.previousElementSibling?.remove();
  }
  calls = kept ? [...(answer.message.tool_calls ?? [])] : calls;
  placeholder();
  meter(turn.usage);
  save();
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (answering) return answering.abort();
  const text = at("text").value;
  if (!text.trim() && !pictures.length) return;
  const parts = [...pictures.map((url) => ({ type: "image_url", image_url: { url } })), ...(text.trim() ? [{ type: "text", text }] : [])];
  const message = calls.length ? { role: "tool", content: text, tool_call_id: calls.shift().id }
    : { role: "user", content: pictures.length ? parts : text };
  const turn = { message };
  [at("text").value, pictures] = ["", []];
  showPictures();
  at("log").querySelectorAll(".error").forEach((node) => node.closest("article").remove());
  chat.turns.push(turn);
  remember(turn);
  scrolling(() => draw(turn));
  at("log").scrollTop = at("log").scrollHeight;
  placeholder();
  if (!calls.length) ask();
});
at("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || answering) return;
  event.preventDefault();
  at("ask").requestSubmit();
});
at("fresh").addEventListener("click", fresh);
at("forget").addEventListener("click", () => {
  chats = [];
  fresh();
  save();
});

// ---------------------------------------------------------------- pictures

async function shrunk(file) { // a data URL, no larger than a model looks at
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MOST_PIXELS / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.max(1, Math.round(bitmap.width * scale)), Math.max(1, Math.round(bitmap.height * scale))];
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL(file.type === "image/jpeg" ? "image/jpeg" : "image/png", 0.92);
}

async function attach(files) {
  for (const file of files) {
    try { pictures.push(await shrunk(file)); } catch { make("p", make("article", at("log")), "error", `${file.name} is no picture that this browser reads`); }
  }
  showPictures();
}

function showPictures() {
  at("pictures").replaceChildren();
  pictures.forEach((url, place) => {
    const row = make("li", at("pictures"));
    Object.assign(make("img", row), { src: url, alt: `Picture ${place + 1}` });
    button(row, "×", `Leave picture ${place + 1} out`, () => {
      pictures.splice(place, 1);
      showPictures();
    });
  });
}

const sees = () => models[at("model").value]?.capabilities?.includes("vision") ?? false;
at("files").addEventListener("change", async () => {
  await attach(at("files").files);
  at("files").value = "";
});
at("text").addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files].filter((file) => file.type.startsWith("image/"));
  if (files.length && sees()) attach(files);
});

// ---------------------------------------------------------------- what the engine does now

const stop = (id) => request(`requests/${encodeURIComponent(id)}`, { method: "DELETE" });

async function watch() {
  try {
    if (!at("model").length) await list();
    const chosen = models[at("model").value];
    const name = chosen?.parent ?? chosen?.id;
    const stats = (await (await request("stats")).json())[name];
    at("state").textContent = stats ? `up ${Math.round(stats.uptime)} s` : "not loaded";
    if (stats) showFigures(stats);
    if (stats && (at("running").open || at("computed").open)) {
      const { requests, steps } = (await (await request("requests")).json())[name] ?? { requests: [], steps: [] };
      showRequests(requests, own, stop);
      showSteps(steps);
    }
    if (stats && at("prefixes").open) showTree((await (await request("prefix_tree")).json())[name] ?? []);
    if (stats && !chosen.max_model_len) await list(); // it has been loaded, and its abilities are known now
  } catch (error) {
    at("state").textContent = error.message;
  }
  setTimeout(watch, document.hidden ? 5000 : 1000);
}

async function list() {
  const [{ data }, stats] = await Promise.all(["v1/models", "stats"].map(async (path) => (await request(path)).json()));
  const before = at("model").value;
  models = Object.fromEntries(data.map((row) => [row.id, row]));
  const able = data.filter((row) => (stats[row.parent ?? row.id]?.task ?? row.task ?? "generate") === "generate" || row.task === "auto");
  at("model").replaceChildren(...able.map((row) => new Option(row.id, row.id)));
  if (models[before]) at("model").value = before;
  chosen();
}

function chosen() {
  at("attach").hidden = !sees();
  meter(chat.turns.findLast((turn) => turn.usage)?.usage);
}

at("model").addEventListener("change", () => {
  forget();
  chosen();
});
at("now").open = at("past").open = matchMedia("(min-width: 60rem)").matches;
at("key").value = sessionStorage.getItem("key") ?? "";
at("key").addEventListener("input", () => sessionStorage.setItem("key", at("key").value));
load();
fresh();
watch();
