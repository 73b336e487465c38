// What requests ask for: model, drafter, sampling.

import { byId, element } from "./dom.js";

const NUMBERS = ["temperature", "seed", "max_tokens"];
const FIELDS = ["model", "drafter", "system", ...NUMBERS];

let models = [];

/** Offer these models, and the drafters of the chosen one. */
export function offerModels(served, { model, drafter } = {}) {
  models = served.filter(({ type }) => type === "llm");
  byId("model").replaceChildren(...models.map(({ id }) => element("option", { value: id }, id)));
  if (models.some(({ id }) => id === model)) byId("model").value = model;
  offerDrafters(drafter);
}

/** Offer the drafters of the chosen model. The last choice stays if this model has it too. */
export function offerDrafters(wanted = byId("drafter").value) {
  const names = chosen()?.drafters ?? [];
  byId("attach").firstChild.data = sees() ? "Add images or text files " : "Add text files (200 kB at most) ";
  byId("drafter").replaceChildren(
    element("option", { value: "auto" }, "auto"),
    ...names.map((name) => element("option", { value: name }, name)),
    element("option", { value: "none" }, "none (plain decoding)"),
  );
  byId("drafter").value = ["auto", "none", ...names].includes(wanted) ? wanted : "auto";
}

const chosen = () => models.find(({ id }) => id === byId("model").value);

/** Whether the chosen model sees images. */
export const sees = () => chosen()?.vision ?? false;

/** What is filled in, by name. */
export const filledIn = () => Object.fromEntries(FIELDS.map((name) => [name, byId(name).value]));

/** Fill in what was saved. Model and drafter are chosen when they are offered. */
export function fillIn(saved) {
  for (const name of ["system", ...NUMBERS]) byId(name).value = saved[name] ?? "";
}

/** The fields of a request; null if one of them has a wrong value, which is then pointed out. */
export function readSettings() {
  const wrong = NUMBERS.map(byId).find((input) => !input.checkValidity());
  if (wrong) {
    pointOut(wrong.id, wrong.validationMessage);
    return null;
  }
  const given = NUMBERS.filter((name) => byId(name).value !== "").map((name) => [name, byId(name).valueAsNumber]);
  const seed = crypto.getRandomValues(new Uint32Array(1))[0]; // known, so that a comparison can have it too
  return { model: byId("model").value, drafter: byId("drafter").value, seed, ...Object.fromEntries(given) };
}

/** Show an error, and mark the field that it is about, if it is one of ours. Without a message: no error. */
export function pointOut(name, message) {
  for (const field of FIELDS.map(byId)) field.removeAttribute("aria-invalid");
  const field = FIELDS.includes(name) ? byId(name) : null;
  byId("error").textContent = field && message ? `${field.labels[0].firstChild.data.trim()}: ${message}` : message;
  if (!field || !message) return;
  openSettings(true);
  field.setAttribute("aria-invalid", "true");
  field.focus();
}

/** Show the settings, or hide them. */
export function openSettings(isOpen) {
  byId("menu").setAttribute("aria-expanded", `${isOpen}`);
}

/** The system's turn, if there is a text for it. */
export function systemTurn() {
  const content = byId("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}
