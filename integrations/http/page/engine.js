// What the engines do now, beside the chat: figures, every request, the last steps, the prefix cache as a picture.
"use strict";

import { make } from "./markdown.js";

const at = (id) => document.getElementById(id);
const SVG = document.getElementById("rates").namespaceURI;
const shape = (tag, parent, values, title = "") => {
  const node = parent.appendChild(document.createElementNS(SVG, tag));
  for (const [name, value] of Object.entries(values)) node.setAttribute(name, value);
  if (title) node.appendChild(document.createElementNS(SVG, "title")).append(title);
  return node;
};
const ms = (value) => (value ? `${(1000 * value).toFixed(1)} ms` : "–");
const share = (part, all) => (all ? `${((100 * part) / all).toFixed(0)} %` : "–");
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

let before = null;
let rates = [];

export function forget() {
  [before, rates] = [null, []];
  for (const id of ["figures", "requests", "steps", "tree"]) at(id).replaceChildren();
  shown.clear();
}

export function showFigures(stats) {
  const { pages, requests } = stats;
  const seconds = before ? stats.uptime - before.uptime : 0;
  rates = [...rates, seconds > 0 ? (stats.generated_tokens - before.generated_tokens) / seconds : 0].slice(-120);
  before = stats;
  const most = Math.max(1, ...rates);
  at("rates").setAttribute("points", rates.map((rate, i) => `${120 - rates.length + i + 1},${29 - (27 * rate) / most}`).join(" "));
  const counts = { used: pages.total - pages.free - pages.cached, cached: pages.cached, free: pages.free };
  const guesses = stats.speculation;
  const rows = {
    "Running": requests.running, "Waiting": requests.waiting, "Grammar queue": requests.grammar_queue,
    "Adapter queue": requests.adapter_queue, "Tokens a second": rates.at(-1).toFixed(0), "Step, median": ms(stats.step.p50),
    "First token, median": ms(stats.first_token.p50), "Prefix hits": share(stats.cached_tokens, stats.prompt_tokens),
    "Guesses right": guesses ? share(guesses.accepted, guesses.drafted) : "–",
    "Pages in use": counts.used, "Pages cached": counts.cached, "Pages free": counts.free,
  };
  at("figures").replaceChildren();
  for (const [name, value] of Object.entries(rows)) {
    make("dt", at("figures"), "", name);
    make("dd", at("figures"), "", String(value));
  }
  for (const span of at("pages").children) span.style.flexGrow = counts[span.className];
}

// ---------------------------------------------------------------- every request: kept nodes, so that a click meets its button

const shown = new Map();

function card(request, stop) {
  const node = make("li", at("requests"));
  const head = make("div", node, "head");
  const parts = { node, name: make("b", head), state: make("span", head, "state"), why: make("p", node, "why") };
  parts.bar = make("progress", node);
  parts.bar.ariaLabel = "Tokens written";
  parts.facts = make("p", node, "facts");
  const button = make("button", head, "small", "Stop");
  button.type = "button";
  button.ariaLabel = `Stop request ${request.request_id}`;
  button.addEventListener("click", async () => {
    button.disabled = true;
    try { await stop(request.request_id); } catch (error) { parts.why.textContent = error.message; }
  });
  return parts;
}

export function showRequests(requests, own, stop) {
  const keys = new Set();
  for (const each of requests) {
    const key = `${each.request_id} ${each.index}`;
    keys.add(key);
    if (!shown.has(key)) shown.set(key, card(each, stop));
    const parts = shown.get(key);
    parts.name.textContent = each.request_id.slice(0, 8) + (own.has(each.request_id) ? " (yours)" : "");
    parts.name.title = each.request_id;
    parts.state.textContent = each.preemptions && each.state === "waiting" ? "gave way" : each.state.replace("_", " ");
    parts.state.className = `state ${each.state}`;
    parts.why.textContent = each.waits_for && `waits for ${each.waits_for}`;
    parts.bar.max = each.max_tokens || 1;
    parts.bar.value = each.output_tokens;
    const facts = [
      `${each.age.toFixed(1)} s`, `prompt ${each.prompt_tokens}${each.computed_tokens ? ` (${share(each.cached_tokens, each.prompt_tokens)} cached)` : ""}`,
      `${each.output_tokens} of ${each.max_tokens} written`,
    ];
    if (each.guessed_tokens) facts.push(`${each.accepted_tokens} of ${each.guessed_tokens} guesses right`);
    if (each.preemptions) facts.push(`gave way ${plural(each.preemptions, "time")}`);
    if (each.adapter) facts.push(`adapter ${each.adapter}`);
    parts.facts.textContent = facts.join(" · ");
  }
  for (const [key, parts] of shown) {
    if (keys.has(key)) continue;
    parts.node.remove();
    shown.delete(key);
  }
  at("count").textContent = plural(requests.length, "request");
}

// ---------------------------------------------------------------- the last steps: rows below, tokens of prompts above them

export function showSteps(steps) {
  const most = Math.max(1, ...steps.map((step) => step.tokens));
  const height = (tokens) => (38 * Math.log2(1 + tokens)) / Math.log2(1 + most);
  at("steps").replaceChildren();
  steps.forEach((step, i) => {
    const x = 120 - steps.length + i;
    const [whole, rows] = [height(step.tokens), height(Math.min(step.rows, step.tokens))];
    const title = `step ${step.step}: ${plural(step.rows, "request")}, ${plural(step.tokens, "token")}, ${ms(step.seconds)}`;
    const bar = shape("g", at("steps"), {}, title);
    shape("rect", bar, { x, y: 40 - whole, width: 0.8, height: whole, class: "prompt" });
    shape("rect", bar, { x, y: 40 - rows, width: 0.8, height: rows, class: "rows" });
  });
  const last = steps.at(-1);
  at("laststep").textContent = last ? `${plural(last.rows, "request")}, ${plural(last.tokens, "token")}, ${ms(last.seconds)}` : "none yet";
}

// ---------------------------------------------------------------- the prefix cache: depth to the right, prompts that part below each other

export function showTree(runs) {
  const nodes = runs.map((run) => ({ ...run, children: [], rows: 0, depth: 0 }));
  const roots = nodes.filter((node) => node.parent < 0);
  for (const node of nodes) {
    if (node.parent < 0) continue;
    const above = nodes[node.parent];
    above.children.push(node);
    node.depth = above.depth + above.pages;
  }
  for (const node of nodes.toReversed()) { // children come behind their parents
    node.rows = Math.max(1, node.children.reduce((sum, child) => sum + child.rows, 0));
    node.children.sort((one, other) => other.rows - one.rows || other.hits - one.hits);
  }
  const deepest = Math.max(1, ...nodes.map((node) => node.depth + node.pages));
  const rows = Math.max(1, roots.reduce((sum, root) => sum + (root.children.length ? root.rows : 0), 0));
  const size = Math.max(2, Math.min(12, 240 / rows));
  at("tree").replaceChildren();
  at("tree").setAttribute("viewBox", `0 0 300 ${rows * size}`);
  let top = 0;
  for (const root of roots.filter((each) => each.children.length)) {
    const todo = [[root, top]];
    while (todo.length) {
      const [node, y] = todo.pop();
      const title = `${plural(node.pages, "page")}, ${node.users ? `in use by ${plural(node.users, "request")}` : "cached"}, found ${plural(node.hits, "time")}`;
      const box = { x: (300 * node.depth) / deepest, y, width: Math.max(0.5, (300 * node.pages) / deepest - 0.6), height: Math.max(1, node.rows * size - 0.6) };
      if (node.pages) shape("rect", at("tree"), { ...box, class: node.users ? "used" : node.hits ? "found" : "cached" }, title);
      let below = y;
      for (const child of node.children) {
        todo.push([child, below]);
        below += child.rows * size;
      }
    }
    top += root.rows * size;
  }
  const pages = nodes.reduce((sum, node) => sum + node.pages, 0);
  const ends = nodes.filter((node) => node.pages && !node.children.length).length;
  at("treesize").textContent = `${plural(pages, "page")} in ${plural(ends, "branch").replace("branchs", "branches")}`;
}
