// What stays in this browser: conversations and the settings, each after its checksum. What is damaged is not there.

const SETTINGS = "outrider-settings", CONVERSATION = "outrider-conversation-";

/** A new conversation's id. */
export const newId = () => `${Date.now()}-${crypto.getRandomValues(new Uint32Array(1))[0]}`;

/** The settings, with the id of the conversation that was shown; null if there are none. */
export const keptSettings = () => read(SETTINGS);

/** Keep the settings. Returns whether there was room. */
export const keepSettings = (content) => write(SETTINGS, content);

/** A conversation: {title, changed, exchanges}; null if it is not there. */
export function keptConversation(id) {
  const content = read(CONVERSATION + id);
  return typeof content?.title === "string" && Array.isArray(content.exchanges) ? content : null;
}

/** Keep a conversation in place of what was kept by this id. Returns whether there was room. */
export const keepConversation = (id, content) => write(CONVERSATION + id, content);

/** Delete a conversation. */
export function forget(id) {
  try {
    localStorage.removeItem(CONVERSATION + id);
  } catch {} // the browser keeps nothing for this page
}

/** All conversations as {id, title}, the last one first. */
export function listed() {
  let names = [];
  try {
    names = Object.keys(localStorage).filter((name) => name.startsWith(CONVERSATION));
  } catch {} // the browser keeps nothing for this page
  const ids = names.map((name) => name.slice(CONVERSATION.length));
  const found = ids.map((id) => ({ id, ...keptConversation(id) })).filter(({ exchanges }) => exchanges);
  found.sort((one, other) => (other.changed || 0) - (one.changed || 0));
  return found.map(({ id, title }) => ({ id, title }));
}

function read(name) {
  try {
    const [, checksum, text] = /^([0-9a-f]{8}) (.*)$/s.exec(localStorage.getItem(name));
    return checksum === checksumOf(text) ? JSON.parse(text) : null;
  } catch {
    return null; // the browser keeps nothing for this page, or another version has written it
  }
}

function write(name, content) {
  try {
    const text = JSON.stringify(content);
    localStorage.setItem(name, `${checksumOf(text)} ${text}`);
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
