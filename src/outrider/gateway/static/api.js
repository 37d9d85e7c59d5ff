// The gateway's API: facts, and one streamed answer. The key lives in this module's memory alone.

let key = "";

export function useKey(value) {
  key = value.trim();
}

export class ApiError extends Error {
  constructor(status, error, retryAfter = null) {
    super(error.message ?? "the gateway gave no reason");
    this.status = status; // 0: within a stream that had begun
    this.code = error.code ?? null;
    this.param = error.param ?? null;
    this.retryAfter = retryAfter;
  }
}

function headers() {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function checked(response) {
  if (response.ok) return response;
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    error = { message: `HTTP ${response.status}` };
  }
  throw new ApiError(response.status, error, response.headers.get("Retry-After"));
}

export async function facts() {
  const response = await checked(await fetch("/v1/outrider", { headers: headers() }));
  return response.json();
}

// Yields the JSON events of a streamed chat completion, with details; ends at [DONE].
export async function* answer(body, signal) {
  const response = await checked(
    await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { ...headers(), "Content-Type": "application/json", "X-Outrider-Details": "1" },
      body: JSON.stringify({ ...body, stream: true }),
      signal,
    }),
  );
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError(0, { message: "the stream ended before the answer did" });
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (part.startsWith(":")) continue; // how it stands with the cloud: no event
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(0, event.error);
      yield event;
    }
  }
}
