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
