// Files that are sent with a message: texts, and images for a model that sees them.

const MOST_KILOBYTES = 200; // of all text files of a message
const LONGEST_SIDE = 1024; // of an image, in pixels: a larger one is made smaller
const JPEG_QUALITY = 0.9;

const isImage = ({ type }) => /^image\/(png|jpeg|webp|gif|bmp)$/.test(type);

/** Read files as {name, size, content}, images with {image}, beside those that are there.
 *  sees: whether the model sees images. Throws an Error whose message says which cannot be sent. */
export async function readFiles(files, there, sees) {
  const given = [...files];
  const sizeOf = (all) => all.reduce((sum, { size }) => sum + size, 0);
  if (sizeOf(given.filter((file) => !isImage(file))) + sizeOf(there.filter(({ image }) => !image)) > MOST_KILOBYTES * 1000) {
    throw new Error(`The text files of a message may have ${MOST_KILOBYTES} kB together. Leave some out, or send a part.`);
  }
  const blind = given.find((file) => isImage(file) && !sees);
  if (blind) throw new Error(`${blind.name} is an image, and this model sees none. Choose one that does.`);
  return Promise.all(given.map(async (file) => ({
    name: file.name, size: file.size,
    ...(isImage(file) ? { content: "", image: await imageOf(file) } : { content: await decoded(file) }),
  })));
}

async function decoded(file) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch {} // the error below says it
  throw new Error(`${file.name} is not a text file in UTF-8. Only text and images can be sent.`);
}

/** An image as a data: URL in JPEG, on white where it is transparent. */
async function imageOf(file) {
  try {
    const bitmap = await createImageBitmap(file);
    const scale = Math.min(1, LONGEST_SIDE / Math.max(bitmap.width, bitmap.height));
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
    const context = canvas.getContext("2d");
    context.fillStyle = "white";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    return canvas.toDataURL("image/jpeg", JPEG_QUALITY);
  } catch {
    throw new Error(`${file.name} cannot be read as an image.`);
  }
}

/** A message and its text files as one text: each file in a block of code, below its name. */
export const textOf = (text, files = []) => (
  [text, ...files.filter(({ image }) => !image).map(blockOf)].filter(Boolean).join("\n\n")
);

/** What is sent for a message and its files: a text, or parts if there are images. */
export function contentOf(text, files = []) {
  const whole = textOf(text, files);
  const images = files.filter(({ image }) => image).map(({ image }) => ({ type: "image_url", image_url: { url: image } }));
  return images.length ? [...images, ...(whole ? [{ type: "text", text: whole }] : [])] : whole;
}

function blockOf({ name, content }) {
  const longest = Math.max(2, ...(content.match(/`+/g) ?? []).map((ticks) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${content.replace(/\n$/, "")}\n${fence}`;
}

/** Files in words: their names and sizes. */
export const inWords = ({ name, size }) => `${name}, ${size < 1000 ? `${size} bytes` : `${Math.round(size / 1000)} kB`}`;
