// The chat: what is sent when, and what the buttons do.

import { Answer } from "./answer.js";
import { ApiError, listModels, streamChat } from "./api.js";
import { comparison, verdict } from "./compare.js";
import { byId, element } from "./dom.js";
import { offerDrafters, offerModels, readSettings, systemTurn } from "./settings.js";

const KEY = "outrider-api-key";
const log = byId("log"), message = byId("message");

let exchanges = []; // {text, answer, request, node}: what was asked and answered, in order
let running = null; // the AbortController of the request under way
let started; // settles when the models are listed, or cannot be

const apiKey = () => sessionStorage.getItem(KEY) ?? "";

async function start() {
  try {
    offerModels(await listModels(apiKey()));
    byId("unlock").hidden = true;
    message.focus();
  } catch (error) {
    fail(error);
  }
}

/** Show a failure. A key that is missing or wrong can be given. */
function fail(error) {
  if (!(error instanceof ApiError)) console.error(error);
  byId("error").textContent = error.message;
  if (error.status !== 401) return;
  byId("unlock").hidden = false;
  byId("key").focus();
}

const say = (text) => (byId("status").textContent = text);

async function ask(text) {
  const settings = readSettings();
  if (!settings) return;
  byId("welcome").hidden = true;
  const turns = exchanges.filter(({ answer }) => answer.text);
  const messages = [
    ...systemTurn(),
    ...turns.flatMap(({ text, answer }) => [
      { role: "user", content: text },
      { role: "assistant", content: answer.text },
    ]),
    { role: "user", content: text },
  ];
  const answer = new Answer(byId("drafts").checked);
  const question = element("p", { className: "question", role: "article", "aria-label": "You" }, text);
  const node = element("div", {}, question, answer.node);
  const exchange = { text, answer, node, request: { ...settings, messages } };
  exchanges.push(exchange);
  log.append(node);
  log.scrollTop = log.scrollHeight;
  say("Answering.");
  const ended = await receive(exchange.request, answer, "Stopped.");
  if (exchanges.at(-1) !== exchange) return; // a new chat has begun
  keepingTheEnd(offerActions);
  if (ended) say(`Answer: ${answer.whole}`);
}

/** Change the conversation. Who reads its end sees the new end; who has scrolled up stays there. */
function keepingTheEnd(change) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

/** Receive an answer. Returns whether it is complete. */
async function receive(request, answer, stopped) {
  begin();
  const { signal } = running;
  let frame = 0;
  const refresh = () => {
    keepingTheEnd(() => answer.refresh());
    frame = 0;
  };
  let note = "";
  answer.refresh();
  try {
    for await (const event of streamChat(request, apiKey(), signal)) {
      answer.read(event);
      frame ||= requestAnimationFrame(refresh);
    }
  } catch (error) {
    note = signal.aborted ? stopped : "Not complete.";
    if (signal.aborted) say(stopped);
    else fail(error);
  }
  cancelAnimationFrame(frame);
  refresh();
  answer.end(note);
  finish(signal);
  return !note;
}

function begin() {
  byId("error").textContent = "";
  running = new AbortController();
  showRunning(true);
}

function finish(signal) {
  if (running?.signal !== signal) return; // another request is under way already
  running = null;
  const lost = [byId("stop"), document.body].includes(document.activeElement); // what had the focus goes away
  showRunning(false);
  if (lost && byId("unlock").hidden) message.focus();
}

function showRunning(isRunning) {
  byId("send").hidden = isRunning;
  byId("stop").hidden = !isRunning;
  for (const button of log.querySelectorAll("button")) button.disabled = isRunning;
}

/** The last answer can be had again, and compared if it is complete. */
function offerActions() {
  for (const { answer } of exchanges) answer.actions.replaceChildren();
  const last = exchanges.at(-1);
  if (!last) return;
  const button = (text, onclick) => element("button", { type: "button", onclick }, text);
  last.answer.actions.append(button("Retry", retry));
  if (last.answer.timings) last.answer.actions.append(button("Compare with plain decoding", () => compare(last)));
}

function retry() {
  if (!readSettings()) return;
  const last = exchanges.pop();
  last.node.remove();
  message.focus();
  ask(last.text);
}

/** Have the answer again without drafts, and show both speeds. */
async function compare({ request, answer, node }) {
  node.querySelector(".comparison")?.remove();
  const plain = new Answer(false);
  plain.node.setAttribute("aria-label", "Answer without drafts");
  plain.node.classList.add("again");
  node.append(plain.node);
  message.focus();
  say("Comparing with plain decoding.");
  const isComplete = await receive({ ...request, drafter: "none" }, plain, "Comparison stopped.");
  plain.node.remove();
  if (!isComplete) return;
  node.append(comparison(request.drafter, answer, plain));
  log.scrollTop = log.scrollHeight;
  say(verdict(answer, plain));
}

function newChat() {
  running?.abort();
  for (const { node } of exchanges) node.remove();
  exchanges = [];
  byId("welcome").hidden = false;
  byId("error").textContent = "";
  say("New chat.");
  message.focus();
}

byId("composer").addEventListener("submit", async (event) => {
  event.preventDefault();
  await started; // which model to ask is known then
  const text = message.value.trim();
  if (!text || running || !readSettings()) return;
  message.value = "";
  ask(text);
});
message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("composer").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("new").addEventListener("click", newChat);
byId("model").addEventListener("change", offerDrafters);
byId("drafts").addEventListener("change", ({ target }) => {
  byId("legend").hidden = !target.checked;
  for (const { answer } of exchanges) answer.showDrafts(target.checked);
});
byId("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value);
  byId("key").value = "";
  byId("error").textContent = "";
  started = start();
});

started = start();
