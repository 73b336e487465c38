// What requests ask for: model, drafter, sampling.

import { byId, element } from "./dom.js";

const NUMBERS = ["temperature", "seed", "max_tokens"];

let models = [];

/** Offer these models, and the drafters of the chosen one. */
export function offerModels(served) {
  models = served;
  byId("model").replaceChildren(...models.map(({ id }) => element("option", { value: id }, id)));
  offerDrafters();
}

/** Offer the drafters of the chosen model. The last choice stays if this model has it too. */
export function offerDrafters() {
  const select = byId("drafter"), before = select.value;
  const names = models.find(({ id }) => id === byId("model").value)?.drafters ?? [];
  select.replaceChildren(
    element("option", { value: "auto" }, "auto"),
    ...names.map((name) => element("option", { value: name }, name)),
    element("option", { value: "none" }, "none (plain decoding)"),
  );
  select.value = ["auto", "none", ...names].includes(before) ? before : "auto";
}

/** The fields of a request; null if one of them has a wrong value, which is then pointed out. */
export function readSettings() {
  const wrong = NUMBERS.map(byId).find((input) => !input.checkValidity());
  if (wrong) {
    byId("settings").open = true;
    wrong.reportValidity();
    return null;
  }
  const given = NUMBERS.filter((name) => byId(name).value !== "").map((name) => [name, byId(name).valueAsNumber]);
  const seed = crypto.getRandomValues(new Uint32Array(1))[0]; // known, so that a comparison can have it too
  return { model: byId("model").value, drafter: byId("drafter").value, seed, ...Object.fromEntries(given) };
}

/** The system's turn, if there is a text for it. */
export function systemTurn() {
  const content = byId("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}
