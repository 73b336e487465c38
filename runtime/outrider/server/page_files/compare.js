// A drafted answer beside the same one without drafts.

import { tokensPerRound } from "./answer.js";
import { element } from "./dom.js";

/** A table of two answers' speeds, and whether their texts are the same. drafter: of the first. */
export function comparison(drafter, drafted, plain) {
  const rows = [
    ["Tokens a second", (timings) => timings.predicted_per_second.toFixed(1)],
    ["Tokens a round", (timings) => tokensPerRound(timings).toFixed(2)],
    ["Tokens", (timings) => timings.predicted_n],
    ["Draft tokens accepted", (timings) => `${timings.draft_n_accepted} of ${timings.draft_n}`],
  ];
  const heads = ["", `Drafter ${drafter}`, "No drafts"].map((text) => element("th", { scope: "col" }, text));
  const lines = rows.map(([name, value]) => {
    const cells = [drafted, plain].map((each) => element("td", {}, `${value(each.timings)}`));
    return element("tr", {}, element("th", { scope: "row" }, name), ...cells);
  });
  const table = element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...lines));
  const text = element("p", { className: isShort(drafted, plain) ? "how" : "" }, verdict(drafted, plain));
  const how = "Both answers were generated now, and nothing was copied from earlier answers.";
  const note = element("p", { className: "how" }, how);
  return element("section", { className: "comparison", "aria-label": "Comparison" }, table, text, note);
}

const FEWEST = 50; // tokens whose times say something
const isShort = (...answers) => answers.some(({ timings }) => timings.predicted_n < FEWEST);

/** The result in words. */
export function verdict(drafted, plain) {
  const times = drafted.timings.predicted_per_second / plain.timings.predicted_per_second;
  let speed = Number.isFinite(times) && times ? `${times.toFixed(2)} times as fast as plain decoding. ` : "";
  if (isShort(drafted, plain)) speed = `Fewer than ${FEWEST} tokens say little about speed. `;
  if (drafted.text === plain.text) return `${speed}The texts are the same.`;
  let i = 0;
  while (drafted.text[i] === plain.text[i]) i += 1;
  return `${speed}The texts differ from character ${i + 1} on.`;
}
