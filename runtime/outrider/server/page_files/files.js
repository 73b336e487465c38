// Text files that are sent with a message.

export const MOST_KILOBYTES = 200; // of all files of a message

/** Read files as {name, content}, beside those that are there. Throws an Error whose message says which cannot be sent. */
export async function readFiles(files, there) {
  const sizeOf = (all) => all.reduce((sum, { size }) => sum + size, 0);
  if (sizeOf([...files]) + sizeOf(there) > MOST_KILOBYTES * 1000) {
    throw new Error(`The files of a message may have ${MOST_KILOBYTES} kB together. Leave some out, or send a part.`);
  }
  return Promise.all([...files].map(async (file) => ({ name: file.name, size: file.size, content: await textOf(file) })));
}

async function textOf(file) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch {} // the error below says it
  throw new Error(`${file.name} is not a text file in UTF-8. Only text can be sent.`);
}

/** What is sent for a message and its files: each file in a block of code, below its name. */
export const contentOf = (text, files = []) => [text, ...files.map(blockOf)].filter(Boolean).join("\n\n");

function blockOf({ name, content }) {
  const longest = Math.max(2, ...(content.match(/`+/g) ?? []).map((ticks) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${content.replace(/\n$/, "")}\n${fence}`;
}

/** Files in words: their names and sizes. */
export const inWords = ({ name, size }) => `${name}, ${size < 1000 ? `${size} bytes` : `${Math.round(size / 1000)} kB`}`;
