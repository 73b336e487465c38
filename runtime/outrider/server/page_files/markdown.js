// The Markdown that models write, as nodes: headings, lists, quotes, code, emphasis, links. HTML stays text.

import { element } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +)(.*)$/;
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
  "s",
);
const DEEPEST = 8; // quotes in lists in quotes …
const LONGEST = 20000; // characters of a paragraph that are searched for signs

/** Make a node show a text. Blocks that it shows already stay, so a text that grows keeps its nodes. */
export function showMarkdown(node, text) {
  const sources = blocksOf(text.split("\n"));
  const shown = [...node.childNodes];
  sources.forEach((lines, i) => {
    const source = lines.join("\n");
    if (shown[i]?.markdown === source) return;
    const made = blockOf(lines, 0);
    made.markdown = source;
    if (shown[i]) shown[i].replaceWith(made);
    else node.append(made);
  });
  shown.slice(sources.length).forEach((old) => old.remove());
}

/** The lines of each block. */
function blocksOf(lines) {
  const blocks = [];
  for (let i = 0; i < lines.length; ) {
    const end = endOf(lines, i);
    if (lines[i].trim()) blocks.push(lines.slice(i, end));
    i = end;
  }
  return blocks;
}

/** Where the block ends that begins at line i. */
function endOf(lines, i) {
  const line = lines[i];
  let end = i + 1;
  const whileLines = (goesOn) => {
    while (end < lines.length && goesOn(lines[end], lines[end + 1] ?? "")) end += 1;
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

function blockOf(lines, depth) {
  const [first] = lines;
  const fence = FENCE.exec(first);
  if (fence) {
    const isClosed = lines.length > 1 && closes(lines.at(-1), fence[1]);
    const code = element("code", {}, lines.slice(1, isClosed ? -1 : undefined).join("\n"));
    return element("pre", { tabIndex: 0, role: "region", "aria-label": `Code ${fence[2]}`.trim() }, code);
  }
  const heading = HEADING.exec(first);
  if (heading) return element(`h${Math.min(heading[1].length + 2, 6)}`, {}, ...inline(heading[2]));
  if (RULE.test(first)) return element("hr");
  if (depth < DEEPEST && QUOTE.test(first)) {
    return element("blockquote", {}, ...inner(lines.map((line) => QUOTE.exec(line)[1]), depth));
  }
  if (depth < DEEPEST && ITEM.test(first)) return listOf(lines, depth);
  return element("p", {}, ...inline(lines.join("\n")));
}

const inner = (lines, depth) => blocksOf(lines).map((block) => blockOf(block, depth + 1));

function listOf(lines, depth) {
  const [, indent, marker] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent.length + 1) items.push([found[4]]);
    else items.at(-1).push(line);
  }
  const offset = indent.length + marker.length + 1;
  const dedent = (line) => line.replace(new RegExp(`^ {0,${offset}}`), "");
  const nodes = items.map(([first, ...rest]) => element("li", {}, ...inner([first, ...rest.map(dedent)], depth)));
  return /\d/.test(marker) ? element("ol", { start: parseInt(marker, 10) }, ...nodes) : element("ul", {}, ...nodes);
}

/** The nodes of a paragraph's text. */
function inline(text) {
  const nodes = [];
  let rest = text;
  while (rest.length <= LONGEST) {
    const found = INLINE.exec(rest);
    if (!found) break;
    nodes.push(rest.slice(0, found.index), spanOf(found));
    rest = rest.slice(found.index + found[0].length);
  }
  return [...nodes, rest].filter((node) => node !== "");
}

function spanOf([whole, escaped, , code, bold, bold2, italic, italic2, label, address]) {
  if (escaped) return escaped;
  if (code) return element("code", {}, code.replace(/^ (.*\S.*) $/s, "$1"));
  if (bold || bold2) return element("strong", {}, ...inline(bold || bold2));
  if (italic || italic2) return element("em", {}, ...inline(italic || italic2));
  return /^https?:\/\//i.test(address) && URL.canParse(address)
    ? element("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, ...inline(label))
    : whole;
}
