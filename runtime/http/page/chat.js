// The conversation: what was said, the form, one answer at a time.

import { Refused, ask, events } from "./api.js";
import { byId, rate, say } from "./dom.js";
import { Turn } from "./turn.js";

const ANNOUNCED = 4000; // characters of an answer that are read out
const ENDS = { length: "cut at the limit of tokens", stop: "", tool_calls: "" };

const log = byId("log");
const emptyNote = byId("empty");
const prompt = byId("prompt");
const history = []; // messages of the API
let unanswered = []; // tool calls whose result the reader has yet to type
let running = null; // AbortController of the answer that is being read

export function startChat() {
  byId("compose").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", clear);
}

function clear() {
  running?.abort();
  history.length = 0;
  expect([]);
  log.replaceChildren(emptyNote);
  complain("");
  say(byId("said"), "");
  prompt.focus();
}

function complain(text) {
  byId("problem").hidden = !text;
  say(byId("problem"), text);
}

function show(turn) {
  emptyNote.remove();
  log.append(turn.element);
  log.scrollTop = log.scrollHeight;
}

// The next messages are results of these calls.
function expect(calls) {
  unanswered = calls;
  say(byId("prompt-label"), calls.length ? `Result of ${calls[0].name}` : "Message");
}

async function send() {
  const text = prompt.value;
  if (running || !text.trim()) return;
  let body;
  try {
    body = settings();
  } catch (error) {
    complain(error.message);
    return;
  }
  const [call] = unanswered;
  const begun = history.length;
  history.push(call ? { role: "tool", tool_call_id: call.id, content: text } : { role: "user", content: text });
  const asked = new Turn(call ? "tool" : "user", text);
  show(asked);
  prompt.value = "";
  complain("");
  if (call) expect(unanswered.slice(1));
  if (unanswered.length) return;
  const system = byId("system").value;
  const first = system.trim() ? [{ role: "system", content: system }] : [];
  const took = await answer({ ...body, messages: [...first, ...history] });
  if (took || history.length === 0) return;
  history.length = begun; // nothing was answered: the message goes back for another try
  if (call) expect([call]);
  asked.element.remove();
  if (!log.children.length) log.append(emptyNote);
  prompt.value ||= text;
}

function settings() {
  const body = { stream: true, stream_options: { include_usage: true } };
  for (const [id, name] of [["temperature", "temperature"], ["max-tokens", "max_tokens"]]) {
    const field = byId(id);
    if (!field.checkValidity()) throw new Error(`${field.parentElement.firstChild.data.trim()}: ${field.validationMessage}`);
    if (field.value) body[name] = field.valueAsNumber;
  }
  const tools = byId("tools").value;
  if (tools.trim()) {
    try {
      body.tools = JSON.parse(tools);
    } catch (error) {
      throw new Error(`Tools: not JSON (${error.message})`);
    }
  }
  return body;
}

// Ask and show. False if nothing was answered.
async function answer(body) {
  const turn = new Turn("assistant");
  const mine = (running = new AbortController());
  turn.busy(true);
  waiting(true);
  const started = performance.now();
  let [first, usage, end] = [null, null, ""];
  try {
    show(turn);
    for await (const event of events(await ask("v1/chat/completions", { body, signal: mine.signal }))) {
      usage = event.usage ?? usage;
      const [choice] = event.choices;
      if (!choice) continue;
      const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      turn.add(choice.delta);
      first ??= performance.now();
      end = ENDS[choice.finish_reason] ?? choice.finish_reason ?? end;
      if (follows) log.scrollTop = log.scrollHeight;
    }
  } catch (error) {
    if (mine.signal.aborted) end = "stopped";
    else complain(explain(error));
  }
  turn.busy(false);
  running = null;
  waiting(false);
  if (!turn.element.isConnected) return true; // the chat was cleared meanwhile
  if (first === null) {
    turn.element.remove();
    return false;
  }
  history.push(turn.message());
  expect(turn.calls);
  turn.foot([end, timing(usage, started, first)].filter(Boolean).join(" · "));
  log.scrollTop = log.scrollHeight;
  const calls = turn.calls.map((call) => `Calls ${call.name}.`).join(" ");
  say(byId("said"), `Answer${end && ` (${end})`}: ${turn.text.slice(0, ANNOUNCED)} ${calls}`);
  return true;
}

function timing(usage, started, first) {
  if (!usage) return "";
  const made = usage.completion_tokens;
  const told = `${usage.prompt_tokens} + ${made} tokens, first after ${((first - started) / 1000).toFixed(2)} s`;
  const seconds = (performance.now() - first) / 1000;
  return made > 1 && seconds > 0.05 ? `${told}, then ${rate((made - 1) / seconds)} per second` : told;
}

function explain(error) {
  if (!(error instanceof Refused)) return `The server cannot be reached (${error.message}).`;
  return error.status === 401 ? `${error.message}. The field is at the top of this page.` : error.message;
}

function waiting(isWaiting) {
  byId("stop").hidden = !isWaiting;
  byId("send").disabled = isWaiting;
  log.setAttribute("aria-busy", isWaiting);
  if (isWaiting) say(byId("said"), "Waiting for the answer");
}
