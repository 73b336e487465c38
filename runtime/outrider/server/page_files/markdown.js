// The Markdown that models write, as nodes: headings, lists, quotes, code, emphasis, links. HTML stays text.

import { copyText, element } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/d;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?(.*)$/d;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +)(.*)$/d;
const INLINE = new RegExp(
  [
    String.raw`\\([!-/:-@[-${"`"}{-~])`, // 1: an escaped sign
    "(`+)(?!`)(.+?)(?<!`)\\2(?!`)", // 3: code
    String.raw`\*\*(?=\S)(.+?)(?<=\S)\*\*`, // 4, 5: bold
    String.raw`(?<!\w)__(?=\S)(.+?)(?<=\S)__(?!\w)`,
    String.raw`\*(?=[^\s*])(.+?)(?<=[^\s*])\*(?!\*)`, // 6, 7: italics
    String.raw`(?<!\w)_(?=[^\s_])(.+?)(?<=[^\s_])_(?!\w)`,
    String.raw`\[([^\[\]]+)\]\(([^\s()]+)\)`, // 8, 9: a link
  ].join("|"),
  "ds",
);
const DEEPEST = 8; // quotes in lists in quotes …
const LONGEST = 20000; // characters of a paragraph that are searched for signs

/** A part of the text that keeps where each of its characters is in the whole. */
class Part {
  constructor(text, places) {
    this.text = text;
    this.places = places; // of each character, and of the line's end
  }

  slice(from, to = this.text.length) {
    return new Part(this.text.slice(from, to), this.places.slice(from, to + 1));
  }

  /** What a group of a regular expression has matched. */
  group(found, number) {
    return this.slice(...found.indices[number]);
  }
}

const join = (lines) => new Part(lines.map(({ text }) => text).join("\n"), lines.flatMap(({ places }) => places));

/**
 * Make a node show a text. Blocks that it shows already stay, so a text that grows keeps its nodes.
 *
 * leaf: the nodes of a text without signs, from the text and the place of each character in the whole.
 */
export function showMarkdown(node, text, leaf = (text) => [text]) {
  let at = 0;
  const lines = text.split("\n").map((line) => {
    const places = Array.from({ length: line.length + 1 }, (_, i) => at + i);
    at += line.length + 1;
    return new Part(line, places);
  });
  const shown = [...node.childNodes];
  const blocks = blocksOf(lines);
  blocks.forEach((block, i) => {
    const source = join(block).text;
    if (shown[i]?.markdown === source) return;
    const made = blockOf(block, 0, leaf);
    made.markdown = source;
    if (shown[i]) shown[i].replaceWith(made);
    else node.append(made);
  });
  shown.slice(blocks.length).forEach((old) => old.remove());
}

/** The lines of each block. */
function blocksOf(lines) {
  const blocks = [];
  for (let i = 0; i < lines.length; ) {
    const end = endOf(lines, i);
    if (lines[i].text.trim()) blocks.push(lines.slice(i, end));
    i = end;
  }
  return blocks;
}

/** Where the block ends that begins at line i. */
function endOf(lines, i) {
  const line = lines[i].text;
  let end = i + 1;
  const whileLines = (goesOn) => {
    while (end < lines.length && goesOn(lines[end].text, lines[end + 1]?.text ?? "")) end += 1;
    return end;
  };
  const fence = FENCE.exec(line);
  if (fence) {
    whileLines((each) => !closes(each, fence[1]));
    return Math.min(end + 1, lines.length);
  }
  if (!line.trim() || HEADING.test(line) || RULE.test(line)) return end;
  if (QUOTE.test(line)) return whileLines((each) => QUOTE.test(each));
  if (ITEM.test(line)) {
    const isPart = (each) => ITEM.test(each) || /^ {2,}\S/.test(each);
    return whileLines((each, next) => (each.trim() ? isPart(each) || !begins(each) : isPart(next)));
  }
  return whileLines((each) => each.trim() && !begins(each) && !ITEM.test(each));
}

const begins = (line) => [FENCE, HEADING, RULE, QUOTE].some((form) => form.test(line));
const closes = (line, fence) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");

function blockOf(lines, depth, leaf) {
  const [first] = lines;
  const fence = FENCE.exec(first.text);
  if (fence) return codeOf(lines, fence, leaf);
  const heading = HEADING.exec(first.text);
  if (heading) return element(`h${Math.min(heading[1].length + 2, 6)}`, {}, ...inline(first.group(heading, 2), leaf));
  if (RULE.test(first.text)) return element("hr");
  if (depth < DEEPEST && QUOTE.test(first.text)) {
    const quoted = lines.map((line) => line.group(QUOTE.exec(line.text), 1));
    return element("blockquote", {}, ...inner(quoted, depth, leaf));
  }
  if (depth < DEEPEST && ITEM.test(first.text)) return listOf(lines, depth, leaf);
  return element("p", {}, ...inline(join(lines), leaf));
}

const inner = (lines, depth, leaf) => blocksOf(lines).map((block) => blockOf(block, depth + 1, leaf));

function codeOf(lines, fence, leaf) {
  const isClosed = lines.length > 1 && closes(lines.at(-1).text, fence[1]);
  const { text, places } = join(lines.slice(1, isClosed ? -1 : undefined));
  const code = element("code", {}, ...(text ? leaf(text, places) : []));
  return element("pre", { tabIndex: 0, role: "region", "aria-label": `Code ${fence[2]}`.trim() }, code, copies(text));
}

/** A button that copies code. Its label is the style's, so that the block's text is the code alone. */
function copies(text) {
  const button = element("button", { type: "button", className: "copy", "aria-label": "Copy code" });
  button.onclick = async () => {
    button.classList.toggle("done", await copyText(text));
    setTimeout(() => button.classList.remove("done"), 1500);
  };
  return button;
}

function listOf(lines, depth, leaf) {
  const [, indent, marker] = ITEM.exec(lines[0].text);
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line.text);
    if (found && found[1].length <= indent.length + 1) items.push([line.group(found, 4)]);
    else items.at(-1).push(line);
  }
  const offset = indent.length + marker.length + 1;
  const dedent = (line) => line.slice(new RegExp(`^ {0,${offset}}`).exec(line.text)[0].length);
  const nodes = items.map(([first, ...rest]) => element("li", {}, ...inner([first, ...rest.map(dedent)], depth, leaf)));
  return /\d/.test(marker) ? element("ol", { start: parseInt(marker, 10) }, ...nodes) : element("ul", {}, ...nodes);
}

/** The nodes of a paragraph's text. */
function inline(part, leaf) {
  const nodes = [];
  const add = ({ text, places }) => text && nodes.push(...leaf(text, places));
  let rest = part;
  while (rest.text.length <= LONGEST) {
    const found = INLINE.exec(rest.text);
    if (!found) break;
    const end = found.index + found[0].length;
    const span = spanOf(rest, found, leaf);
    add(rest.slice(0, span ? found.index : end)); // what is no span after all stays text
    nodes.push(...(span ?? []));
    rest = rest.slice(end);
  }
  add(rest);
  return nodes;
}

/** The nodes of what INLINE has found, if it is a span. */
function spanOf(part, found, leaf) {
  const number = [1, 3, 4, 5, 6, 7, 8].find((each) => found[each] !== undefined);
  const inside = part.group(found, number);
  if (number === 1) return leaf(inside.text, inside.places);
  if (number === 3) {
    const { text, places } = /^ .*\S.* $/s.test(inside.text) ? inside.slice(1, inside.text.length - 1) : inside;
    return [element("code", {}, ...leaf(text, places))];
  }
  if (number < 8) return [element(number < 6 ? "strong" : "em", {}, ...inline(inside, leaf))];
  const address = found[9];
  if (!/^https?:\/\//i.test(address) || !URL.canParse(address)) return null;
  const link = { href: address, target: "_blank", rel: "noopener noreferrer" };
  return [element("a", link, ...inline(inside, leaf))];
}
