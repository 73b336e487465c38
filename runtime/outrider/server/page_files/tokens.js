// Tokens of an answer with their sources.

import { element } from "./dom.js";

export const SOURCES = ["accepted", "recovered", "bonus", "plain"];

/** The nodes of a piece of a stream: one for each token, coloured by its source. Their texts are the piece's text. */
export function tokenNodes(text, tokens) {
  const texts = textsOf(text, tokens.map((token) => token.text));
  const nodes = tokens.map((token, i) => {
    const by = token.drafter && token.source === "accepted" ? `, drafted by ${token.drafter}` : "";
    return element("span", { className: `token ${token.source}`, title: token.source + by }, texts[i]);
  });
  return tokens.length || !text ? nodes : [text];
}

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
function textsOf(text, tokens) {
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
