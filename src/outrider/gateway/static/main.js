// Puts the page together: what is typed becomes requests, what comes becomes answers and plots.

import { Answer, ORIGINS, verdict } from "./answer.js";
import { ApiError, answer as ask, facts as askFacts, useKey } from "./api.js";
import { Plots } from "./plots.js";
import * as saving from "./savings.js";
import { Reader, say } from "./say.js";
import { Settings } from "./settings.js";
import * as tip from "./tip.js";

const $ = (id) => document.getElementById(id);
const ALTERNATIVES = 5;
const FRAME_MS = 100; // between two drawings at least; a drawing may take a quarter of the time
const BREATH_MS = 50; // of work on a stream, then whatever else the page has to do
const NEAR_END_PX = 200; // who is so near the end of the log wants to stay there

const state = {
  facts: null,
  a: null, // Settings
  b: null,
  messages: [],
  shown: [], // the answers in plots and tiles
  all: [], // every answer of this chat
  abort: null,
  drawing: false,
  cost: 0, // ms of the last drawing
  pinned: true, // the log shows its end, and goes on to
  early: false, // sent before the facts were there
};

// ---------------------------------------------------------------- facts

function plainStep() {
  const rows = state.facts?.row_ms ?? [];
  const one = rows.find(([count]) => count === 1) ?? rows[0];
  return one ? one[1] / 1000 : null;
}

async function begin() {
  try {
    state.facts = await askFacts();
  } catch (error) {
    if (error.status === 401) return wantKey(error.message);
    return complain(error, begin);
  }
  const { facts } = state;
  if (!state.a) {
    state.a = new Settings($("set-a"), facts);
    state.b = new Settings($("set-b"), facts);
    state.b.set({ schedule: "cloud-only" });
    $("model").replaceChildren(...facts.models.map((name) => new Option(name, name)));
    $("model-row").hidden = facts.models.length < 2;
  }
  describe();
  redraw();
  if (state.early) {
    state.early = false;
    $("composer").requestSubmit();
  }
}

function describe() {
  const { facts } = state;
  const parts = [`target ${facts.target ?? facts.models[0]}`, `draft ${facts.draft ?? "none"}`];
  if (facts.link) parts.push(`link ${facts.link}`);
  if (facts.target_pace_ms) parts.push(`each forward ${facts.target_pace_ms} ms slower on purpose`);
  if (facts.cloud !== "up") parts.push("cloud not connected yet");
  $("who").textContent = parts.join(" \u00b7 ");
  $("link").textContent = facts.link
    ? `Shaped: ${facts.link}. It was set when the gateway was started; to change it, start it with another --link.`
    : "As it is. To shape it, start the gateway with --link, as in --link rtt=50ms.";
}

// ---------------------------------------------------------------- errors, in words

function fix(error) {
  if (error instanceof TypeError) return "The gateway does not answer. Is outrider serve (or outrider edge) still running?";
  if (error.code === "cloud_unreachable") return "The cloud is out of reach: look at the verifier and the network between.";
  if (error.status === 503) return `There is no room now. Try again in ${error.retryAfter ?? 2} s.`;
  if (error.code === "context_length_exceeded") return "The conversation is too long for the model: start a new chat.";
  if (error.code === "wrong_host") return "Open the page under the gateway's own address, 127.0.0.1.";
  if (error.status === 0) return "What stands above is right as far as it goes. Send again to get a whole answer.";
  if (error.param) return "Change that under Settings.";
  return "";
}

function complain(error, retry) {
  const box = $("alert");
  const what = document.createElement("strong");
  what.textContent = error instanceof TypeError ? "No connection. " : `${error.message} `;
  box.replaceChildren(what, fix(error));
  if (retry) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Try again";
    button.addEventListener("click", () => {
      box.hidden = true;
      retry();
    });
    box.append(document.createElement("br"), button);
  }
  box.hidden = false;
}

function wantKey(why) {
  $("key-why").textContent = why;
  if (!$("key").open) $("key").showModal();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key-value").value);
  $("key-value").value = "";
  $("key").close();
  begin();
});

// ---------------------------------------------------------------- a message

function number(id) {
  const { value } = $(id);
  return value === "" ? undefined : Number(value);
}

function request(settings, seed) {
  const system = $("system").value.trim();
  const body = {
    model: $("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...state.messages],
    temperature: number("temperature"),
    top_p: number("top-p"),
    max_tokens: number("max-tokens"),
    seed,
    outrider: settings.wishes,
  };
  if ($("logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES });
  return body;
}

const drawnSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];

function turn(text) {
  $("welcome").hidden = true;
  const node = document.createElement("div");
  node.className = "turn";
  const mine = document.createElement("div");
  mine.className = "mine";
  mine.textContent = text;
  const pair = document.createElement("div");
  pair.className = "pair";
  node.append(mine, pair);
  $("log").append(node);
  return { node, pair };
}

async function run(answer, settings, body, signal, reader) {
  answer.began = performance.now();
  let rested = answer.began;
  try {
    for await (const event of ask(body, signal)) {
      const text = answer.push(event);
      reader?.push(text);
      soon();
      if (performance.now() - rested < BREATH_MS) continue;
      await new Promise((resume) => setTimeout(resume)); // a fast stream alone never lets go
      rested = performance.now();
    }
  } finally {
    reader?.end(); // what came of a broken answer is read out, too
  }
}

// A number field that holds none reads as empty, and empty means "as it is": that would be silence.
function nonsense() {
  const field = [...document.querySelectorAll("#how input")].find((each) => each.validity.badInput);
  return field && new ApiError(400, { message: `${field.labels[0].textContent.trim()}: not a number.`, param: field.id });
}

async function send(text) {
  if (state.abort || !state.facts || !text.trim()) return;
  const wrong = nonsense();
  if (wrong) {
    $("message").value ||= text;
    return complain(wrong);
  }
  const both = $("compare").checked;
  const seed = number("seed") ?? drawnSeed();
  const { messages } = state;
  messages.push({ role: "user", content: text });
  const place = turn(text);
  state.pinned = true;
  follow();
  place.pair.classList.toggle("two", both);
  const ways = both ? [["A", state.a], ["B", state.b]] : [["", state.a]];
  const jobs = ways.map(([name, settings]) => {
    const frozen = { verify: settings.verify, name: settings.name };
    const answer = new Answer(name ? `${name}: ${settings.name}` : settings.name, frozen);
    answer.seed = seed;
    return { answer, settings: frozen, body: request(settings, seed), name };
  });
  state.shown = jobs.map((job) => job.answer);
  busy(new AbortController());
  const failed = await answers(jobs, place.pair);
  busy(null);
  if (messages === state.messages) settle(text, jobs, place, both, failed);
  // else a new chat was begun in mid-answer, and this one is forgotten
}

// One after the other, so that neither answer slows the other. Returns what went wrong, or null.
async function answers(jobs, pair) {
  let failed = null;
  for (const { answer } of jobs) pair.append(answer.node);
  for (const { answer, settings, body } of jobs) {
    try {
      if (!failed) await run(answer, settings, body, state.abort.signal, answer === jobs[0].answer ? new Reader() : null);
    } catch (error) {
      failed = error;
    }
    answer.end(failed ? (failed.name === "AbortError" ? "stopped" : "broken off") : "");
  }
  return failed;
}

function settle(text, jobs, place, both, failed) {
  const made = jobs.filter((job) => job.answer.tokens.length);
  state.all.push(...made.map((job) => job.answer));
  if (made.length) state.messages.push({ role: "assistant", content: made[0].answer.text });
  else {
    state.messages.pop(); // nothing came: the message is the writer's again
    place.node.remove();
    $("welcome").hidden = state.messages.length > 0;
    $("message").value ||= text;
  }
  if (both && made.length === 2) {
    const box = verdict(jobs[0].answer, jobs[1].answer, !failed);
    place.node.append(box);
    say(box.textContent);
  }
  if (failed && failed.name !== "AbortError") {
    if (failed.status === 401) wantKey(failed.message);
    else complain(failed);
  } else if (failed) say("Stopped.");
  redraw();
  follow();
  if (state.facts.cloud !== "up" || !state.facts.target) begin();
  if (document.body.dataset.view === "chat") $("message").focus();
}

function busy(abort) {
  state.abort = abort;
  $("send").hidden = abort !== null;
  $("stop").hidden = abort === null;
  if (abort) $("alert").hidden = true;
}

const stop = () => state.abort?.abort();

// Reading a height lays the whole log out, so this is done once a drawing and not once a token.
function follow() {
  if (state.pinned) $("log").scrollTop = $("log").scrollHeight;
}

$("log").addEventListener("scroll", () => {
  const log = $("log");
  state.pinned = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PX;
});

// ---------------------------------------------------------------- tiles, legend, plots, savings

function soon() {
  if (state.drawing) return;
  state.drawing = true;
  setTimeout(() => {
    state.drawing = false;
    const began = performance.now();
    redraw();
    follow();
    state.cost = performance.now() - began;
  }, Math.max(FRAME_MS, 3 * state.cost));
}

const fixed = (value, digits = 2) => (value == null || Number.isNaN(value) ? "-" : value.toFixed(digits));

function tiles() {
  const each = (read) => state.shown.map((answer) => (answer.last ? read(answer.last, answer) : "-")).join(" / ") || "-";
  const values = {
    Tokens: each((r) => String(r.tokens)),
    Accepted: each((r) => (r.drafted ? `${Math.round((100 * r.accepted) / r.drafted)} %` : "-")),
    "Forwards a token": each((r) => fixed(r.forwards / r.tokens)),
    "ms a token": each((r, a) => (r.forwards > 1 ? fixed((1000 * r.seconds - a.first) / (r.tokens - a.rounds[0].tokens), 0) : "-")),
    "First token": each((r, a) => `${fixed(a.first, 0)} ms`),
    "Bytes a token": each((r) => fixed((r.bytes_up + r.bytes_down) / r.tokens, 0)),
  };
  $("tiles").replaceChildren(
    ...Object.entries(values).map(([name, value]) => {
      const tile = document.createElement("div");
      const term = document.createElement("dt");
      const data = document.createElement("dd");
      term.textContent = name;
      data.textContent = value;
      tile.append(term, data);
      return tile;
    }),
  );
}

function legend() {
  const counts = {};
  for (const answer of state.all.concat(state.shown.filter((a) => !state.all.includes(a)))) {
    for (const [origin, count] of Object.entries(answer.counts)) counts[origin] = (counts[origin] ?? 0) + count;
  }
  $("legend").replaceChildren(
    ...Object.entries(ORIGINS)
      .filter(([origin]) => origin !== "truncated" || counts[origin])
      .map(([origin, { name, words }]) => {
        const item = document.createElement("li");
        const sample = document.createElement("span");
        sample.className = `t ${origin}`;
        sample.textContent = name;
        const count = document.createElement("span");
        count.className = "count";
        count.textContent = ` ${counts[origin] ?? 0}`;
        item.title = words;
        item.append(sample, count);
        return item;
      }),
  );
}

function sumOf(runs) {
  if (!runs.length) return null;
  const sum = { plain: plainStep() };
  for (const name of ["tokens", "forwards", "rows", "steps", "draft"]) {
    sum[name] = runs.reduce((total, each) => total + each[name], 0);
  }
  return sum;
}

function redraw() {
  saving.refresh();
  tiles();
  legend();
  $("key-b").hidden = state.shown.length < 2;
  state.plots.draw(state.shown.map((answer) => answer.rounds), plainStep());
  const runs = (list) => list.filter((answer) => answer.last).map((answer) => saving.runOf(answer.last, plainStep()));
  const names = state.shown.length > 1 ? ["A", "B"] : ["This answer"];
  saving.show(names.map((name, i) => [name, runs(state.shown.slice(i, i + 1))[0]]), sumOf(runs(state.all)));
}

// ---------------------------------------------------------------- what people touch

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("message").value;
  state.early = !state.facts;
  if (state.early) begin(); // nothing was heard yet, or the key was not given
  if (state.abort || !state.facts || !text.trim()) return;
  $("message").value = "";
  send(text);
});

$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || $("key").open) return;
  tip.hide();
  stop();
});

$("stop").addEventListener("click", stop);

$("new").addEventListener("click", () => {
  stop();
  for (const node of document.querySelectorAll(".turn")) node.remove();
  Object.assign(state, { messages: [], shown: [], all: [] });
  $("welcome").hidden = false;
  $("alert").hidden = true;
  redraw();
  say("A new chat.");
  $("message").focus();
});

for (const button of $("starters").children) {
  button.addEventListener("click", () => send(button.textContent));
}

$("compare").addEventListener("change", () => {
  $("set-b").hidden = !$("compare").checked;
  $("set-a").querySelector("legend").textContent = $("compare").checked ? "A" : "How it is made";
});

for (const button of document.querySelectorAll("[data-go]")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.go;
    for (const other of document.querySelectorAll("[data-go]")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
  });
}

const THEMES = ["system", "light", "dark"];

$("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const next = THEMES[(THEMES.indexOf(root.dataset.theme ?? "system") + 1) % THEMES.length];
  if (next === "system") delete root.dataset.theme;
  else root.dataset.theme = next;
  $("theme").lastElementChild.textContent = `Theme: ${next}`;
  state.plots.rebuild();
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => state.plots.rebuild());

state.plots = new Plots($("plots"));
tip.listen($("log"));
saving.listen(redraw);
await begin();
$("message").focus();
