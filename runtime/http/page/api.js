// Requests to the server that this page came from. Addresses are relative: a proxy may add a path in front.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let key = ""; // in this variable and nowhere else

export function useKey(given) {
  key = given.trim();
}

export async function ask(path, { body, signal } = {}) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const method = body ? "POST" : "GET";
  const options = { method, headers, signal, credentials: "omit", cache: "no-store" };
  const answer = await fetch(path, body ? { ...options, body: JSON.stringify(body) } : options);
  if (answer.ok) return answer;
  const said = (await answer.json().catch(() => null))?.error?.message;
  throw new Refused(answer.status, said ?? `the server answered ${answer.status}`);
}

// The JSON of each server-sent event of an answer. Throws what the stream says, or that it broke off.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Refused(0, "the answer broke off");
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue; // a comment
      const text = block.slice(6);
      if (text === "[DONE]") return;
      const event = JSON.parse(text);
      if (event.error) throw new Refused(0, event.error.message);
      yield event;
    }
  }
}
