// What stays in this browser when the page is reloaded: the conversation and the settings.

const KEY = "outrider-conversation";

/** What was kept; null if there is nothing that can be read. */
export function kept() {
  try {
    return JSON.parse(localStorage.getItem(KEY));
  } catch {
    return null; // the browser keeps nothing for this page, or another version has written it
  }
}

/** Keep this in place of what was kept. Returns whether there was room. */
export function keep(content) {
  try {
    localStorage.setItem(KEY, JSON.stringify(content));
    return true;
  } catch {
    return false;
  }
}
