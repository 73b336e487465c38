// Nodes without HTML: texts stay texts.

/** A new node with these properties. Children: nodes, and strings as text. */
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("aria-") || name === "role") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

/** The page's node with this id. */
export const byId = (id) => document.getElementById(id);

/** Put a text on the clipboard. Returns whether that worked. */
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const field = element("textarea", { value: text }); // a page that came over the network without TLS has no clipboard
  document.body.append(field);
  field.select();
  const worked = document.execCommand("copy");
  field.remove();
  return worked;
}
