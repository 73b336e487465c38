// The server's API. A failure of any kind is an `ApiError` whose message is one readable line.

const ROOT = new URL("../v1/", import.meta.url);

/** A failure. status: of HTTP; 0 when the server did not answer, or broke off. field: of the request that is wrong. */
export class ApiError extends Error {
  constructor(message, status = 0, field = null) {
    super(message.replace(/\s+/g, " ").trim());
    this.status = status;
    this.field = field;
  }
}

/** The models that are served. */
export async function listModels(key) {
  const response = await request("models", { headers: headersOf(key) });
  return (await response.json()).data;
}

/** What the load of a model is doing; null when none is under way. */
export async function loadOf(model, key) {
  const response = await request(`models/${model}`, { headers: headersOf(key) });
  return (await response.json()).loading;
}

/** The events of a chat's answer as they come. body: of the request. The signal ends it with an AbortError. */
export async function* streamChat(body, key, signal) {
  const headers = { ...headersOf(key), "Content-Type": "application/json" };
  const asked = JSON.stringify({ ...body, stream: true, return_tokens: true, return_progress: true });
  const response = await request("chat/completions", { method: "POST", headers, body: asked, signal });
  for await (const data of eventsOf(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message, response.status, event.error.param);
    yield event;
  }
  throw new ApiError("The server ended its answer early.");
}

const headersOf = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

async function request(path, options) {
  const response = await reached(fetch(new URL(path, ROOT), { cache: "no-store", ...options }));
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  const { message = `The server answered with status ${response.status}.`, param } = said?.error ?? {};
  throw new ApiError(message, response.status, param);
}

/** The result, or what a failed connection means. */
async function reached(promise) {
  try {
    return await promise;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?");
  }
}

/** The data of server-sent events. */
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reached(reader.read());
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trimStart();
    }
  } finally {
    reader.cancel().catch(() => {}); // nobody reads on: the connection closes, and the server ends its answer
  }
}
