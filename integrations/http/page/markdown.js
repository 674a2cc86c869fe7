// Markdown as it is written: each piece of text that a model says becomes DOM nodes of its own, never HTML.
// What is read: paragraphs, headings, lists, quotes, tables, rules, fenced code; bold, italic, struck, code, links.
"use strict";

export const make = (tag, parent, name = "", text = "") => {
  const node = parent.appendChild(document.createElement(tag));
  if (name) node.className = name;
  node.append(text);
  return node;
};

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const ITEM = /^(\s*)(?:([-*+])|(\d{1,9})[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE = /(`+)([\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|__(?=\S)([\s\S]*?\S)__(?!\w)|~~(?=\S)([\s\S]*?\S)~~|\*(?=[^\s*])([\s\S]*?[^\s*])\*(?!\*)|(?<!\w)_(?=[^\s_])([\s\S]*?[^\s_])_(?!\w)|\[([^\]\n]+)\]\(\s*<?([^\s()<>]+)>?(?:\s+"[^"]*")?\s*\)|\\([!-/:-@[-`{-~])/;

function link(parent, text, address) { // only to pages: an address of another kind stays text
  let target = null;
  try { target = new URL(address); } catch { /* no address */ }
  if (!target || !["http", "https"].includes(target.protocol.slice(0, -1))) return parent.append(`[${text}](${address})`);
  const node = make("a", parent);
  Object.assign(node, { href: target.href, target: "_blank", rel: "noopener noreferrer nofollow", title: target.href });
  inline(node, text);
}

function inline(parent, text) {
  for (let rest = text; rest; ) {
    const found = INLINE.exec(rest);
    if (!found) return parent.append(rest);
    if (found.index) parent.append(rest.slice(0, found.index));
    const [whole, ticks, code, strong, strong2, struck, em, em2, name, address, escaped] = found;
    if (ticks) make("code", parent, "", code.replace(/^ (.*[^ ].*) $/s, "$1").replaceAll("\n", " "));
    else if (strong ?? strong2) inline(make("strong", parent), strong ?? strong2);
    else if (struck) inline(make("s", parent), struck);
    else if (em ?? em2) inline(make("em", parent), em ?? em2);
    else if (name) link(parent, name, address);
    else parent.append(escaped);
    rest = rest.slice(found.index + whole.length);
  }
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text); // there is none at an address without TLS, but for this machine's
  } catch {
    const area = make("textarea", document.body, "", "");
    area.value = text;
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const before = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = before; }, 1200);
}

export function copyButton(parent, text) {
  const button = make("button", parent, "small", "Copy");
  button.type = "button";
  button.addEventListener("click", () => copy(text(), button));
  return button;
}

function code(parent, language, lines) {
  const box = make("figure", parent, "code");
  const head = make("figcaption", box, "", language || "text");
  copyButton(head, () => lines.join("\n"));
  make("code", make("pre", box), "", lines.join("\n"));
}

function list(parent, lines, at) { // items of one list, each with what is indented below it; returns the line behind
  const first = ITEM.exec(lines[at]);
  const [depth, ordered] = [first[1].length, first[3] !== undefined];
  const node = make(ordered ? "ol" : "ul", parent);
  if (ordered && first[3] !== "1") node.start = Number(first[3]);
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[1].length < depth || item[1].length > depth + 1 || (item[3] !== undefined) !== ordered) break;
    const own = [item[4]];
    const indent = lines[at].length - item[4].length;
    for (at++; at < lines.length; at++) {
      const nested = ITEM.exec(lines[at]);
      if (nested && nested[1].length <= depth + 1) break;
      if (!lines[at].trim()) {
        const next = lines[at + 1];
        if (next === undefined || !next.trim() || (!/^\s/.test(next) && !ITEM.test(next))) break;
        own.push("");
      } else if (/^\s/.test(lines[at]) || own.at(-1)) {
        own.push(lines[at].replace(new RegExp(`^\\s{0,${indent}}`), ""));
      } else break;
    }
    while (own.length > 1 && !own.at(-1)) own.pop();
    const entry = make("li", node);
    if (own.length === 1) inline(entry, own[0]);
    else blocks(entry, own, true);
    while (at < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1] ?? "")) at++;
  }
  return at;
}

function table(parent, lines, at) {
  const node = make("table", make("div", parent, "wide"));
  const sides = cells(lines[at + 1]).map((cell) => (/^:-+:$/.test(cell) ? "center" : /-:$/.test(cell) ? "right" : ""));
  const row = (into, tag, line) => {
    const tr = make("tr", into);
    const texts = cells(line);
    sides.forEach((side, i) => {
      const cell = make(tag, tr, side);
      inline(cell, (texts[i] ?? "").replaceAll("\\|", "|"));
    });
  };
  row(make("thead", node), "th", lines[at]);
  const body = make("tbody", node);
  for (at += 2; at < lines.length && lines[at].includes("|") && lines[at].trim(); at++) row(body, "td", lines[at]);
  return at;
}

const begins = (line, next) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || ITEM.test(line)
  || QUOTE.test(line) || (line.includes("|") && DIVIDER.test(next ?? "") && (next ?? "").includes("-"));

function blocks(parent, lines, tight = false) {
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    if (!line.trim()) at++;
    else if (fence) {
      let end = at + 1;
      while (end < lines.length && !(lines[end].trim().startsWith(fence[1]) && !lines[end].trim().replaceAll(fence[1][0], ""))) end++;
      code(parent, fence[2], lines.slice(at + 1, end));
      at = end + 1;
    } else if (heading) {
      inline(make(`h${Math.min(6, heading[1].length + 1)}`, parent), heading[2]);
      at++;
    } else if (RULE.test(line)) {
      make("hr", parent);
      at++;
    } else if (ITEM.test(line)) at = list(parent, lines, at);
    else if (QUOTE.test(line)) {
      const inner = [];
      for (; at < lines.length && QUOTE.test(lines[at]); at++) inner.push(QUOTE.exec(lines[at])[1]);
      blocks(make("blockquote", parent), inner);
    } else if (line.includes("|") && (lines[at + 1] ?? "").includes("-") && DIVIDER.test(lines[at + 1] ?? "")) at = table(parent, lines, at);
    else {
      const own = [line.trimStart()];
      for (at++; at < lines.length && lines[at].trim() && !begins(lines[at], lines[at + 1]); at++) own.push(lines[at].trimStart());
      inline(tight && own.length === 1 ? parent.appendChild(document.createElement("span")) : make("p", parent), own.join("\n"));
    }
  }
}

export class Markdown { // text that grows: blocks that can change no more stay, the last ones are made anew
  constructor(parent, drawn = (work) => work()) { // `drawn`: does the work of drawing, and what goes with it
    this.drawn = drawn;
    this.node = make("div", parent, "markdown");
    this.tail = make("div", this.node, "tail");
    this.open = "";
    this.due = 0;
  }
  append(text) {
    this.open += text;
    this.due ||= requestAnimationFrame(() => this.draw());
  }
  draw(ended = false) { // also called at the end, as no frame comes to a page that is hidden
    cancelAnimationFrame(this.due);
    this.due = 0;
    const lines = this.open.split("\n");
    let [fence, cut] = ["", 0];
    lines.slice(0, -1).forEach((line, i) => {
      const found = FENCE.exec(line);
      if (fence) fence = line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "") ? "" : fence;
      else if (found) fence = found[1];
      const next = lines[i + 1];
      if (!fence && !line.trim() && next.trim() && !/^\s/.test(next) && !ITEM.test(next)) cut = i + 1;
    });
    const done = document.createDocumentFragment();
    blocks(done, ended ? lines : lines.slice(0, cut));
    this.open = ended ? "" : lines.slice(cut).join("\n");
    this.drawn(() => {
      this.tail.before(done);
      this.tail.replaceChildren();
      if (ended) this.tail.remove();
      if (this.open) blocks(this.tail, this.open.split("\n"));
    });
  }
}
