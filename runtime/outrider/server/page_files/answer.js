// One answer on the page: its text as Markdown, perhaps with the tokens' sources, its calls of functions, its figures.

import { element } from "./dom.js";
import { showMarkdown } from "./markdown.js";
import { SOURCES, countSources, textsOf, tokenNodes } from "./tokens.js";

/** An answer that grows. text, tokens, calls: so far. timings: the server's, once it is complete. */
export class Answer {
  text = "";
  thoughts = ""; // the reasoning before the text
  reason = null; // why it has ended, in the API's words
  tokens = [];
  calls = []; // {name, written}: the arguments as they are written, in JSON
  timings = null;
  seed = null;
  waiting = "Waiting …"; // what is shown before the first token
  #pieces = []; // of the stream: [text, tokens]
  #owners = []; // the token of each character
  #began = 0;
  #note = null; // once it has ended: why, if it is not complete
  #showsDrafts;
  #thoughts = element("p");
  #thinking = element("details", { className: "thinking", hidden: true }, element("summary"), this.#thoughts);
  #text = element("div", { className: "text" });
  #calls = element("div", { className: "calls" });
  #figures = element("p", { className: "figures" });

  constructor(showsDrafts) {
    this.actions = element("div", { className: "actions" });
    const properties = { className: "answer", "aria-label": "Answer", "aria-busy": "true" };
    this.node = element("article", properties, this.#thinking, this.#text, this.#calls, this.#figures, this.actions);
    this.showDrafts(showsDrafts);
  }

  /** What `restore` needs. */
  get saved() {
    const { calls, timings, seed, thoughts, reason } = this;
    return { pieces: this.#pieces, calls, timings, seed, thoughts, reason, note: this.#note ?? "Not complete." };
  }

  /** Show an answer that was saved. */
  restore({ pieces, note, ...fields }) {
    for (const piece of pieces) this.#add(...piece);
    Object.assign(this, fields);
    this.end(note);
  }

  /** Add an event of the stream. */
  read(event) {
    const [choice] = event.choices;
    if (event.timings) this.timings = event.timings;
    const progress = event.prompt_progress;
    if (progress) this.waiting = `${progress.processed} of ${progress.total} prompt tokens read …`;
    if (!choice) return;
    if (choice.seed !== undefined) this.seed = choice.seed;
    if (choice.finish_reason) this.reason = choice.finish_reason;
    this.thoughts += choice.delta.reasoning_content ?? "";
    for (const part of choice.delta.tool_calls ?? []) this.#readCall(part);
    const text = choice.delta.content ?? "", tokens = choice.tokens ?? [];
    if (!text && !tokens.length) return;
    this.#began ||= performance.now();
    this.#add(text, tokens);
  }

  #add(text, tokens) {
    this.#pieces.push([text, tokens]);
    this.text += text;
    this.tokens.push(...tokens);
    const texts = textsOf(text, tokens.map((token) => token.text));
    if (!tokens.length) this.#own(null, text);
    texts.forEach((own, i) => this.#own(tokens[i], own));
  }

  #own(token, text) {
    for (let i = 0; i < text.length; i += 1) this.#owners.push(token);
  }

  /** All that was answered, as text. */
  get whole() {
    return [this.text, ...this.calls.map(({ name, written }) => `${name}(${written})`)].filter(Boolean).join("\n");
  }

  #readCall({ index, function: { name, arguments: written } }) {
    const call = (this.calls[index] ??= { name: "", written: "" });
    call.name += name ?? "";
    call.written += written ?? "";
  }

  /** Show text, calls and figures as they are now. */
  refresh() {
    this.#showThoughts();
    this.#showText();
    this.#calls.replaceChildren(...this.calls.map(callNode));
    this.#figures.textContent = this.#line();
  }

  /** More comes, to an answer that has ended. */
  goOn() {
    this.#note = this.timings = this.reason = null;
    this.#began = 0;
    this.node.setAttribute("aria-busy", "true");
    this.refresh();
  }

  /** Nothing more comes. note: why, if the answer is not complete. */
  end(note = "") {
    this.#note = note;
    this.node.setAttribute("aria-busy", "false");
    this.refresh();
    if (note) this.#figures.prepend(element("strong", {}, note), " ");
  }

  /** Whether to colour tokens by their sources. */
  showDrafts(shows) {
    this.#showsDrafts = shows;
    this.#text.classList.toggle("drafts", shows);
    this.#text.replaceChildren();
    this.#showText();
  }

  /** The reasoning, folded: it opens on a click. */
  #showThoughts() {
    this.#thinking.hidden = !this.thoughts;
    this.#thinking.firstChild.textContent = this.text || this.#note !== null ? "Thoughts" : "Thinking …";
    if (this.#thoughts.textContent !== this.thoughts) this.#thoughts.textContent = this.thoughts;
  }

  #showText() {
    const leaf = (text, places) => tokenNodes(text, places.slice(0, text.length).map((place) => this.#owners[place]));
    showMarkdown(this.#text, this.text, this.#showsDrafts ? leaf : undefined);
  }

  #line() {
    const count = this.tokens.length, seconds = (performance.now() - this.#began) / 1e3;
    if (!count) return this.#note === null ? this.waiting : "";
    const counts = countSources(this.tokens);
    const isDrafted = count > counts.plain; // without drafts their figures say nothing
    const isRunning = this.#note === null && count > 1 && seconds > 0;
    const speed = this.timings?.predicted_per_second ?? (isRunning ? (count - 1) / seconds : 0);
    return [
      `${count} token${count > 1 ? "s" : ""}`,
      speed && `${speed.toFixed(1)} a second`,
      this.timings && isDrafted && `${tokensPerRound(this.timings).toFixed(2)} a round`,
      ...SOURCES.map((source) => isDrafted && counts[source] && `${counts[source]} ${source}`),
      this.seed !== null && `seed ${this.seed}`,
    ].filter(Boolean).join(" · ");
  }
}

/** A call of a function: its name, and its arguments in lines of their own once they are complete. */
function callNode({ name, written }) {
  let shown = written;
  try {
    shown = JSON.stringify(JSON.parse(written), null, 2);
  } catch {} // they are still being written, or were cut
  const label = element("strong", {}, `Calls ${name}`);
  return element("section", { "aria-label": `Call of ${name}` }, label, element("pre", {}, shown));
}

/** Tokens that a call of the main model gave, on average. The first token comes from reading the prompt. */
export const tokensPerRound = (timings) => (timings.rounds_n ? (timings.predicted_n - 1) / timings.rounds_n : 1);
