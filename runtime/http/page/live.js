// The live view: asks /status once a second while the page is looked at.

import { Refused, ask } from "./api.js";
import { Chart } from "./chart.js";
import { byId, bytes, describe, make, rate, say, whole } from "./dom.js";

const EVERY_MS = 1000;
const AFTER_ERROR_MS = 3000;
const SAMPLES = 300; // one a second: five minutes

const amount = (count) => (blockBytes ? bytes(count) : `${whole(count)} blocks`);
const size = (blocks) => amount(blocks * (blockBytes || 1));
const samples = []; // {kv: [used, cached, free], work: [running, waiting], rate: [tokens per second]}
let before = null; // {engine, at} of the last answer
let timer = 0;
let described = ""; // the artifact that the model's facts on the page are of
let blockBytes = 0;
let charts = null;

export function startLive() {
  const chart = (id, title, kinds, unit) => new Chart(byId(id), { title, kinds, unit, most: SAMPLES });
  charts = {
    kv: chart("kv-chart", "KV memory with physical pages", ["used", "cached", "free"], amount),
    work: chart("work-chart", "Requests", ["used", "cached"], whole),
    rate: chart("rate-chart", "Generated tokens per second", ["used"], rate),
  };
  document.addEventListener("visibilitychange", refresh);
  refresh();
}

// Ask now and every second from now on, but not while the page is hidden.
export function refresh() {
  clearTimeout(timer);
  if (!document.hidden) turn();
}

async function turn() {
  let wait = EVERY_MS;
  try {
    show(await (await ask("status")).json(), performance.now());
  } catch (error) {
    wait = AFTER_ERROR_MS;
    if (error instanceof Refused) state(error.status === 401 ? "needs an API key" : error.message, "bad");
    else state("not reachable", "bad");
  }
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(turn, wait);
}

function state(text, kind) {
  const shown = byId("state");
  shown.className = `state ${kind}`;
  say(shown, text);
}

function show(status, at) {
  const { engine } = status;
  if (engine.asleep) state(`asleep, level ${engine.asleep}`, "");
  else if (status.draining) state("shutting down", "bad");
  else if (status.stalled_s > 2) state(`no step for ${Math.round(status.stalled_s)} s`, "bad");
  else state(engine.running ? "running" : "idle", "good");
  say(byId("model"), status.model);
  const per = (name) => (before ? (1000 * Math.max(0, engine[name] - before.engine[name])) / (at - before.at) : 0);
  const [tokens, replays] = [per("generated_tokens"), per("graph_replays")];
  before = { engine, at };
  if (engine.blocks_committed) blockBytes = engine.kv_bytes_committed / engine.blocks_committed;
  const free = Math.max(0, engine.blocks_committed - engine.blocks_used - engine.blocks_cached);
  const kv = [engine.blocks_used, engine.blocks_cached, free];
  samples.push({ kv: kv.map((blocks) => blocks * (blockBytes || 1)), work: [engine.running, engine.waiting], rate: [tokens] });
  if (samples.length > SAMPLES) samples.shift();
  for (const [name, chart] of Object.entries(charts)) chart.draw(samples.map((sample) => sample[name]));
  tiles(engine, tokens);
  memory(engine, kv);
  steps(status, replays);
  facts(status);
}

function tiles(engine, tokens) {
  const hits = engine.prefix_queries ? `${((100 * engine.prefix_hits) / engine.prefix_queries).toFixed(0)} %` : "–";
  const work = [["Running", whole(engine.running)], ["Waiting", whole(engine.waiting)]];
  const rows = [...work, ["Tokens per s", rate(tokens)], ["Prefix hits", hits]];
  const place = byId("tiles");
  if (!place.children.length) {
    place.append(...rows.map(([name]) => make("div", { class: "tile" }, make("span", {}, name), make("strong"))));
  }
  rows.forEach(([, value], at) => say(place.children[at].lastChild, value));
  describe(byId("work-legend"), work.map((row, at) => [...row, ["used", "cached"][at]]));
}

function memory(engine, [used, cached, free]) {
  const map = byId("kv-map");
  const away = Math.max(0, engine.blocks_capacity - engine.blocks_committed);
  bar(map, { used, cached, free });
  bar(byId("kv-range"), { held: engine.blocks_committed, away });
  const rows = [
    ["Used", size(used), "used"],
    ["Cached", size(cached), "cached"],
    ["Free", size(free), "free"],
    ["Unmapped", size(away), "away"],
    ["Committed", size(engine.blocks_committed), "held"],
    ["Capacity", size(engine.blocks_capacity), "sum"],
  ];
  describe(byId("kv-legend"), rows);
  map.setAttribute("aria-label", `Memory map: ${rows.map(([name, value]) => `${name} ${value}`).join(", ")}`);
}

function bar(place, parts) {
  const sum = Object.values(parts).reduce((a, b) => a + b, 0) || 1;
  if (!place.children.length) place.append(...Object.keys(parts).map((kind) => make("i", { class: kind })));
  Object.values(parts).forEach((part, at) => (place.children[at].style.flexBasis = `${(100 * part) / sum}%`));
}

function steps({ engine, info, compiled }, replays) {
  const rows = [["Steps", whole(engine.steps)]];
  const eager = Object.entries(engine.eager_steps);
  if (compiled?.target.device === "cuda" || engine.graph_replays || eager.length) {
    const share = engine.steps ? ` (${((100 * engine.graph_replays) / engine.steps).toFixed(1)} %)` : "";
    rows.push(["Graph replays", `${whole(engine.graph_replays)}${share}, ${rate(replays)} per second`]);
    if (info.graph_tokens !== null) rows.push(["Captured", info.graph_tokens ? `steps of up to ${whole(info.graph_tokens)} tokens` : "nothing"]);
    for (const [reason, count] of eager) rows.push([`Eager: ${reason.replaceAll("_", " ")}`, whole(count)]);
    if (!eager.length) rows.push(["Eager", "0"]);
  } else {
    rows.push(["CUDA graphs", "none: the steps run on the CPU"]);
  }
  rows.push(["Prompt tokens", whole(engine.prompt_tokens)]);
  rows.push(["Generated tokens", whole(engine.generated_tokens)]);
  rows.push(["Preemptions", whole(engine.preemptions)]);
  describe(byId("steps"), rows);
}

function facts({ model, version, info, compiled }) {
  const name = `${model}\n${compiled?.created}`;
  if (described === name) return;
  described = name;
  const rows = [["Name", model]];
  if (compiled) {
    const { facts: is, target, proof } = compiled;
    const windows = is.attention.filter((layer) => layer.window).length;
    const [layer] = is.attention;
    rows.push(["Source", compiled.source], ["Architecture", is.architecture]);
    rows.push(["Layers", `${is.attention.length}${windows ? `, ${windows} with a window` : ""}, width ${is.hidden_size}`]);
    if (layer) rows.push(["Attention", `${layer.heads} heads, ${layer.kv_heads} of KV, size ${layer.head_size}`]);
    rows.push(["Weights", bytes(compiled.weights_bytes)]);
    rows.push(["Made for", `${target.device}, ${target.machine}`]);
    const took = Object.values(compiled.compile_seconds).reduce((a, b) => a + b, 0);
    rows.push(["Compiled", `${compiled.created.slice(0, 10)} in ${took.toFixed(1)} s`]);
    rows.push(["Proof", `error ${proof.max_error.toExponential(1)} of ${proof.budget.toExponential(1)} allowed`]);
    rows.push(["Versions", `ostinato ${version}, torch ${compiled.torch}, transformers ${compiled.transformers}`]);
  } else {
    rows.push(["Version", `ostinato ${version}`]);
  }
  rows.push(["Number type", info.dtype], ["Context window", `${whole(info.max_model_len)} tokens`]);
  rows.push(["Vocabulary", whole(info.vocab_size)], ["KV block", `${info.block_tokens} tokens`]);
  rows.push(["Loaded in", `${info.load_seconds.toFixed(1)} s`]);
  describe(byId("facts"), rows);
  passes(compiled?.passes ?? []);
}

function passes(lines) {
  const rows = lines.map(({ name, matched, expected, milliseconds, refused }) => {
    const why = Object.entries(refused).map(([reason, count]) => `${count} × ${reason}`).join("; ");
    const cell = (text, kind) => make("td", kind ? { class: kind } : {}, text);
    return make(
      "tr",
      expected !== null && matched < expected ? { class: "short" } : {},
      make("th", { scope: "row" }, name),
      cell(whole(matched), "num"),
      cell(expected === null ? "–" : whole(expected), "num"),
      cell(milliseconds.toFixed(1), "num"),
      cell(why || "–"),
    );
  });
  const none = make("tr", {}, make("td", { colspan: 5 }, "There is no manifest to read it from."));
  byId("passes").replaceChildren(...(rows.length ? rows : [none]));
}
