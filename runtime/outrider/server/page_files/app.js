// The chat: what is sent when, and what the buttons do.

import { Answer } from "./answer.js";
import { ApiError, listModels, loadOf, streamChat } from "./api.js";
import { comparison, verdict } from "./compare.js";
import { byId, copyText, element } from "./dom.js";
import { keep, kept } from "./kept.js";
import {
  fillIn, filledIn, offerDrafters, offerModels, openSettings, pointOut, readSettings, systemTurn,
} from "./settings.js";

const KEY = "outrider-api-key";
const log = byId("log"), message = byId("message");

let exchanges = []; // {text, answer, request, node}: what was asked and answered, in order
let edited = null; // the exchange whose question is being written anew
let running = null; // the AbortController of the request under way
let started; // settles when the models are listed, or cannot be

const apiKey = () => sessionStorage.getItem(KEY) ?? "";

async function start() {
  try {
    offerModels(await listModels(apiKey()), kept()?.settings);
    byId("unlock").hidden = true;
    message.focus();
    followLoad((doing) => (byId("load").textContent = doing), () => running).catch(() => {}); // requests say why
  } catch (error) {
    fail(error);
  }
}

/** Show what a load of the chosen model is doing, each second, until it has ended or nobody wants to know. */
async function followLoad(show, isOver) {
  for (;;) {
    const doing = await loadOf(byId("model").value, apiKey());
    if (doing === null || isOver()) return show("");
    show(`${doing || "The model is being loaded"} …`);
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

/** Show a failure. A key that is missing or wrong can be given. */
function fail(error) {
  if (!(error instanceof ApiError)) console.error(error);
  pointOut(error.field, error.message);
  if (error.status !== 401) return;
  byId("unlock").hidden = false;
  byId("key").focus();
}

const say = (text) => (byId("status").textContent = text);

/** Keep conversation and settings in the browser. */
function save() {
  const saved = exchanges.map(({ text, answer, request }) => ({ text, request, answer: answer.saved }));
  const isKept = keep({ exchanges: saved, settings: filledIn(), drafts: byId("drafts").checked });
  if (!isKept && saved.length) say("This conversation is too long to be kept in the browser.");
}

function restore() {
  const { exchanges: saved = [], settings = {}, drafts = false } = kept() ?? {};
  fillIn(settings);
  byId("drafts").checked = drafts;
  byId("legend").hidden = !drafts;
  for (const { text, request, answer } of saved) show(text, request).answer.restore(answer);
  offerActions();
  log.scrollTop = log.scrollHeight;
}

/** Add a question to the conversation, and the place for its answer. */
function show(text, request) {
  const answer = new Answer(byId("drafts").checked);
  const question = element("p", { className: "question", role: "article", "aria-label": "You" }, text);
  const actions = element("div", { className: "actions" });
  const exchange = { text, answer, request, actions, node: element("div", {}, question, actions, answer.node) };
  exchanges.push(exchange);
  byId("welcome").hidden = true;
  log.append(exchange.node);
  log.scrollTop = log.scrollHeight;
  return exchange;
}

const turnOf = ({ text, thoughts }) => (
  { role: "assistant", content: text, ...(thoughts && { reasoning_content: thoughts }) }
);

async function ask(text) {
  const settings = readSettings();
  if (!settings) return;
  const turns = exchanges.filter(({ answer }) => answer.text);
  const messages = [
    ...systemTurn(),
    ...turns.flatMap(({ text, answer }) => [
      { role: "user", content: text },
      turnOf(answer),
    ]),
    { role: "user", content: text },
  ];
  const exchange = show(text, { ...settings, messages });
  save();
  say("Answering.");
  const ended = await receive(exchange.request, exchange.answer, "Stopped.");
  if (exchanges.at(-1) !== exchange) return; // a new chat has begun
  keepingTheEnd(offerActions);
  save();
  if (ended) say(`Answer: ${exchange.answer.whole}`);
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
  const showLoad = (doing) => {
    if (doing) answer.waiting = doing;
    frame ||= requestAnimationFrame(refresh);
  };
  const isOver = () => answer.tokens.length || running?.signal !== signal;
  const late = setTimeout(() => followLoad(showLoad, isOver).catch(() => {}), 1000);
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
  clearTimeout(late);
  finish(signal);
  cancelAnimationFrame(frame);
  keepingTheEnd(() => answer.end(note));
  return !note;
}

function begin() {
  pointOut(null, "");
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

/** All messages can be copied and edited. The last answer can be had again, and compared if it is complete. */
function offerActions() {
  const button = (text, onclick) => element("button", { type: "button", onclick }, text);
  const copies = (text) => button("Copy", ({ target }) => copy(target, text));
  for (const exchange of exchanges) {
    exchange.actions.replaceChildren(copies(exchange.text), button("Edit", () => edit(exchange)));
    exchange.answer.actions.replaceChildren(...(exchange.answer.whole ? [copies(exchange.answer.whole)] : []));
  }
  const last = exchanges.at(-1);
  if (!last) return;
  last.answer.actions.append(button("Retry", retry));
  if (last.answer.text && !last.answer.calls.length && last.answer.reason !== "stop") {
    last.answer.actions.append(button("Continue", goOn));
  }
  if (last.answer.timings && last.request.drafter !== "none") {
    last.answer.actions.append(button("Compare with plain decoding", () => compare(last)));
  }
}

async function copy(button, text) {
  button.textContent = (await copyText(text)) ? "Copied" : "Not copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

/** Write a question anew. */
function edit(exchange) {
  edited = exchange;
  byId("editing").hidden = !exchange;
  message.value = exchange?.text ?? "";
  fit();
  message.focus();
}

/** Take an exchange and all behind it out of the conversation. */
function cut(exchange) {
  for (const { node } of exchanges.splice(exchanges.indexOf(exchange))) node.remove();
}

function retry() {
  if (!readSettings()) return;
  const last = exchanges.at(-1);
  cut(last);
  if (edited === last) edit(null);
  message.focus();
  ask(last.text);
}

/** Go on with an answer that was stopped, or cut by its limit. */
async function goOn() {
  const { request, answer } = exchanges.at(-1);
  message.focus();
  say("Answering.");
  const messages = [...request.messages, turnOf(answer)];
  answer.goOn();
  const ended = await receive({ ...request, messages, continue_final_message: true }, answer, "Stopped.");
  if (exchanges.at(-1)?.answer !== answer) return;
  keepingTheEnd(offerActions);
  save();
  if (ended) say(`Answer: ${answer.whole}`);
}

/** Have the answer again, with drafts and without, and show both speeds. An answer that was given before is not copied. */
async function compare({ request, node }) {
  node.querySelector(".comparison")?.remove();
  message.focus();
  say("Comparing with plain decoding.");
  const answers = [];
  for (const drafter of [request.drafter, "none"]) {
    const again = new Answer(false);
    again.node.setAttribute("aria-label", `Answer again, with ${drafter === "none" ? "no" : ""} drafts`);
    again.node.classList.add("again");
    node.append(again.node);
    const isComplete = await receive({ ...request, drafter, earlier_answers: false }, again, "Comparison stopped.");
    again.node.remove();
    if (!isComplete) return;
    answers.push(again);
  }
  node.append(comparison(request.drafter, ...answers));
  log.scrollTop = log.scrollHeight;
  say(verdict(...answers));
}

function newChat() {
  running?.abort();
  for (const { node } of exchanges) node.remove();
  exchanges = [];
  byId("welcome").hidden = false;
  pointOut(null, "");
  save();
  say("New chat.");
  edit(null);
}

/** Make the message's field as high as its text. */
function fit() {
  message.style.height = "auto";
  message.style.height = `${message.scrollHeight + message.offsetHeight - message.clientHeight}px`;
}

byId("composer").addEventListener("submit", async (event) => {
  event.preventDefault();
  await started; // which model to ask is known then
  const text = message.value.trim();
  if (!text || running || !readSettings()) return;
  if (edited) cut(edited);
  edit(null);
  openSettings(false);
  ask(text);
});
message.addEventListener("input", fit);
message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("composer").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) running.abort();
  else if (edited) edit(null);
});
byId("stop").addEventListener("click", () => running?.abort());
byId("new").addEventListener("click", newChat);
byId("menu").addEventListener("click", ({ currentTarget }) => {
  openSettings(currentTarget.getAttribute("aria-expanded") === "false");
});
byId("model").addEventListener("change", () => offerDrafters());
byId("drafts").addEventListener("change", ({ target }) => {
  byId("legend").hidden = !target.checked;
  for (const { answer } of exchanges) answer.showDrafts(target.checked);
});
byId("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value);
  byId("key").value = "";
  pointOut(null, "");
  started = start();
});
addEventListener("pagehide", save);

try {
  restore();
} catch (error) { // another version has kept it
  console.error(error);
  newChat();
}
started = start();
