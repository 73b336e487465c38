// Tokens of an answer with their sources.

import { element } from "./dom.js";

export const SOURCES = ["accepted", "recovered", "bonus", "plain"];

/** A text as nodes, one for each token, coloured by its source. tokens: of each character, null if it has none. */
export function tokenNodes(text, tokens) {
  const nodes = [];
  for (let from = 0, to = 1; to <= text.length; to += 1) {
    const token = tokens[from];
    if (to < text.length && tokens[to] === token) continue;
    const shown = text.slice(from, to);
    nodes.push(token ? element("span", { className: `token ${token.source}`, title: titleOf(token) }, shown) : shown);
    from = to;
  }
  return nodes;
}

const titleOf = ({ source, drafter }) => (drafter && source === "accepted" ? `${source}, drafted by ${drafter}` : source);

/** How many of the tokens come from each source. */
export function countSources(tokens) {
  const counts = Object.fromEntries(SOURCES.map((source) => [source, 0]));
  for (const token of tokens) counts[token.source] += 1;
  return counts;
}

/**
 * A piece's text, divided among its tokens. Alone, a token that is part of a character has no text of its own, and
 * one may lack the space before it; special tokens have a text that is not the piece's. So tokens are matched from both
 * ends; the last of those between gets the text between.
 */
export function textsOf(text, tokens) {
  const texts = tokens.map(() => "");
  let from = 0, to = text.length, first = 0, last = tokens.length - 1;
  for (; first <= last; first += 1) {
    const own = [tokens[first], ` ${tokens[first]}`].find((each) => tokens[first] && text.startsWith(each, from));
    if (!own) break;
    texts[first] = own;
    from += own.length;
  }
  for (; last >= first; last -= 1) {
    const own = tokens[last];
    if (!own || to - own.length < from || !text.slice(from, to).endsWith(own)) break;
    texts[last] = own;
    to -= own.length;
  }
  const between = text.slice(from, to);
  if (first <= last) texts[last] = between;
  else if (first) texts[first - 1] += between;
  else if (tokens.length) texts[0] = between + texts[0];
  return texts;
}
