// What stays in this browser when the page is reloaded: the conversation and the settings, after their checksum.

const KEY = "outrider-conversation";

/** What was kept; null if there is nothing, or nothing that is as it was written. */
export function kept() {
  try {
    const [, checksum, text] = /^([0-9a-f]{8}) (.*)$/s.exec(localStorage.getItem(KEY));
    return checksum === checksumOf(text) ? JSON.parse(text) : null;
  } catch {
    return null; // the browser keeps nothing for this page, or another version has written it
  }
}

/** Keep this in place of what was kept. Returns whether there was room. */
export function keep(content) {
  try {
    const text = JSON.stringify(content);
    localStorage.setItem(KEY, `${checksumOf(text)} ${text}`);
    return true;
  } catch {
    return false;
  }
}

/** FNV-1a of a text, eight hexadecimal digits. */
function checksumOf(text) {
  let hash = 0x811c9dc5;
  for (let i = 0; i < text.length; i++) hash = Math.imul(hash ^ text.charCodeAt(i), 0x01000193);
  return (hash >>> 0).toString(16).padStart(8, "0");
}
