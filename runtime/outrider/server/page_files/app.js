// The chat: what is sent when, and what the buttons do.

import { Answer } from "./answer.js";
import { ApiError, listModels, loadOf, streamChat } from "./api.js";
import { comparison, verdict } from "./compare.js";
import { byId, copyText, element } from "./dom.js";
import { contentOf, inWords, readFiles, textOf } from "./files.js";
import { forget, keepConversation, keepSettings, keptConversation, keptSettings, listed, newId } from "./kept.js";
import {
  fillIn, filledIn, offerDrafters, offerModels, openSettings, pointOut, readSettings, sees, systemTurn,
} from "./settings.js";

const KEY = "outrider-api-key";
const log = byId("log"), message = byId("message");

let chat = { id: newId(), title: "", changed: 0 }; // the conversation that is shown; its title is given, or its beginning
let exchanges = []; // {text, files, answer, request, node}: what was asked and answered, in order
let attached = []; // {name, size, content}: files of the message that is being written
let edited = null; // the exchange whose question is being written anew
let running = null; // the AbortController of the request under way
let started; // settles when the models are listed, or cannot be

const apiKey = () => sessionStorage.getItem(KEY) ?? "";

async function start() {
  try {
    offerModels(await listModels(apiKey()), keptSettings()?.settings);
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
  keepSettings({ settings: filledIn(), drafts: byId("drafts").checked, chat: chat.id });
  const saved = exchanges.map(({ text, files, answer, request }) => ({ text, files, request, answer: answer.saved }));
  if (!saved.length) forget(chat.id);
  else if (!keepConversation(chat.id, { title: titleOf(), changed: chat.changed, exchanges: saved })) {
    say("This conversation is too long to be kept in the browser. Delete others, or begin a new one.");
  }
  offerChats();
}

const titleOf = () => chat.title || textOf(exchanges[0].text, exchanges[0].files).trim().slice(0, 40).split("\n")[0];

/** Offer the conversations that are kept, with the one that is shown. */
function offerChats() {
  const all = listed();
  byId("chats").hidden = !all.length;
  const isNew = all.every(({ id }) => id !== chat.id);
  const options = all.map(({ id, title }) => element("option", { value: id }, title || "Untitled"));
  byId("chat").replaceChildren(...(isNew ? [element("option", { value: chat.id }, "New chat")] : []), ...options);
  byId("chat").value = chat.id;
  byId("rename").disabled = byId("delete").disabled = isNew;
}

function restore() {
  const { settings = {}, drafts = false, chat: last } = keptSettings() ?? {};
  fillIn(settings);
  byId("drafts").checked = drafts;
  byId("legend").hidden = !drafts;
  showChat(last);
}

/** Show a conversation that is kept, or else a new one. */
function showChat(id) {
  const kept = keptConversation(id);
  clear();
  try {
    if (kept) {
      chat = { id, title: kept.title, changed: kept.changed };
      for (const { text, files, request, answer } of kept.exchanges) show(text, files, request).answer.restore(answer);
    }
  } catch (error) { // another version has kept it
    console.error(error);
    clear();
  }
  offerActions();
  offerChats();
  log.scrollTop = log.scrollHeight;
}

/** Take the conversation off the page. What is kept of it stays. */
function clear() {
  running?.abort();
  for (const { node } of exchanges) node.remove();
  exchanges = [];
  chat = { id: newId(), title: "", changed: 0 };
  byId("welcome").hidden = false;
  pointOut(null, "");
  edit(null);
}

/** Add a question to the conversation, and the place for its answer. */
function show(text, files, request) {
  const answer = new Answer(byId("drafts").checked);
  const names = (files ?? []).map((file) => (
    file.image ? element("img", { src: file.image, alt: file.name }) : element("small", {}, inWords(file))
  ));
  const question = element("p", { className: "question", role: "article", "aria-label": "You" }, text, ...names);
  const actions = element("div", { className: "actions" });
  const exchange = { text, files, answer, request, actions, node: element("div", {}, question, actions, answer.node) };
  exchanges.push(exchange);
  byId("welcome").hidden = true;
  log.append(exchange.node);
  log.scrollTop = log.scrollHeight;
  return exchange;
}

const turnOf = ({ text, thoughts }) => (
  { role: "assistant", content: text, ...(thoughts && { reasoning_content: thoughts }) }
);

async function ask(text, files) {
  const settings = readSettings();
  if (!settings) return;
  const turns = exchanges.filter(({ answer }) => answer.text);
  const messages = [
    ...systemTurn(),
    ...turns.flatMap(({ text, files, answer }) => [
      { role: "user", content: contentOf(text, files) },
      turnOf(answer),
    ]),
    { role: "user", content: contentOf(text, files) },
  ];
  const exchange = show(text, files, { ...settings, messages });
  chat.changed = Date.now();
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
    exchange.actions.replaceChildren(copies(textOf(exchange.text, exchange.files)), button("Edit", () => edit(exchange)));
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
  edited?.node.classList.remove("edited");
  exchange?.node.classList.add("edited");
  edited = exchange;
  byId("editing").hidden = !exchange;
  message.value = exchange?.text ?? "";
  attach(exchange?.files ?? []);
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
  ask(last.text, last.files);
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
  save(); // what was answered so far, also if the answer is not complete
  clear();
  save();
  say("New chat.");
}

function rename() {
  const title = prompt("Title of this chat", titleOf())?.trim();
  if (!title) return;
  chat.title = title.slice(0, 80);
  save();
}

function remove() {
  if (!confirm(`Delete the chat “${titleOf()}”?`)) return;
  forget(chat.id);
  showChat(listed()[0]?.id);
  save();
  say("Chat deleted.");
}

/** Have these files with the message that is being written. */
function attach(files) {
  attached = files;
  byId("attached").hidden = !files.length;
  byId("attached").replaceChildren(...files.map((file) => {
    const onclick = () => attach(attached.filter((each) => each !== file));
    const button = element("button", { type: "button", "aria-label": `Leave out ${file.name}`, onclick }, "×");
    return element("li", {}, inWords(file), button);
  }));
}

async function addFiles(files) {
  try {
    pointOut(null, "");
    attach([...attached, ...(await readFiles(files, attached, sees()))]);
  } catch (error) {
    pointOut(null, error.message);
  }
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
  const files = attached;
  if (!(text || files.length) || running || !readSettings()) return;
  if (edited) cut(edited);
  edit(null);
  openSettings(false);
  ask(text, files);
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
byId("rename").addEventListener("click", rename);
byId("delete").addEventListener("click", remove);
byId("chat").addEventListener("change", ({ target: { value } }) => {
  save();
  showChat(value);
  save();
});
byId("files").addEventListener("change", async ({ target }) => {
  await addFiles(target.files);
  target.value = "";
});
byId("menu").addEventListener("click", ({ currentTarget }) => {
  openSettings(currentTarget.getAttribute("aria-expanded") === "false");
});
byId("model").addEventListener("change", () => offerDrafters());
message.addEventListener("paste", async ({ clipboardData }) => {
  if (clipboardData.files.length) await addFiles(clipboardData.files);
});
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

restore();
started = start();
