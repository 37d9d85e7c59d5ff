// The box beside a token: who wrote it, where it stands, how likely it was, and what else was.

import { ORIGINS, tokenOf } from "./answer.js";

const tip = document.getElementById("tip");
let shown = null;

function line(text, tag = "div") {
  const element = document.createElement(tag);
  element.textContent = text;
  return element;
}

const percent = (logprob) => {
  const p = 100 * Math.exp(logprob);
  return p >= 0.1 ? `${p.toFixed(1)} %` : p > 0 ? `${p.toExponential(1)} %` : "0 %";
};

const visible = (text) =>
  text.replaceAll("\n", "\u23ce").replaceAll("\t", "\u21e5").replaceAll(" ", "\u2423") || "\u2205";

function rows(alternatives, chosen) {
  const table = document.createElement("table");
  for (const entry of alternatives) {
    const row = table.insertRow();
    const name = line(visible(entry.token), "code");
    if (entry.token === chosen) name.append(" \u2190");
    row.insertCell().append(name);
    const meter = document.createElement("meter");
    meter.value = Math.exp(entry.logprob);
    meter.setAttribute("aria-hidden", "true");
    row.insertCell().append(meter);
    row.insertCell().textContent = percent(entry.logprob);
  }
  return table;
}

function content(token) {
  const parts = [line(visible(token.text), "code"), line(ORIGINS[token.origin].words)];
  parts.push(line(`Position ${token.position}, id ${token.id}`));
  const { drafted, accepted } = token.round;
  if (drafted) parts.push(line(`Round: ${accepted} of ${drafted} guesses stand`));
  if (token.entry) {
    const { logprob, top_logprobs: top, token: name } = token.entry;
    parts.push(line(`Target: ${percent(logprob)} (log-probability ${logprob.toFixed(3)})`));
    if (top?.length) parts.push(rows(top, name));
  } else if (token.logprob != null) {
    parts.push(line(`Target: ${percent(token.logprob)} (log-probability ${token.logprob.toFixed(3)})`));
  }
  return parts;
}

export function hide() {
  tip.hidden = true;
  shown?.removeAttribute("aria-describedby");
  shown?.classList.remove("current");
  shown = null;
}

export function show(span) {
  const token = tokenOf(span);
  if (!token) return hide();
  hide();
  shown = span;
  tip.replaceChildren(...content(token));
  tip.hidden = false;
  span.classList.add("current");
  span.setAttribute("aria-describedby", "tip");
  const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const box = tip.getBoundingClientRect();
  const below = at.bottom + 8 + box.height < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(at.left, innerWidth - box.width - 8))}px`;
  tip.style.top = `${below ? at.bottom + 8 : Math.max(8, at.top - box.height - 8)}px`;
}

// Arrow keys walk through the tokens of an answer; Home and End go to its ends.
function walk(event) {
  const text = event.target.closest?.(".text");
  const spans = text ? [...text.children] : [];
  if (!spans.length) return;
  const place = spans.indexOf(event.target);
  const places = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: spans.length - 1 };
  const next = places[event.key];
  if (next === undefined) return;
  event.preventDefault();
  spans[Math.max(0, Math.min(next, spans.length - 1))].focus();
}

export function listen(log) {
  const over = (event) => {
    const span = event.target.closest?.(".t");
    if (span) show(span);
    else if (shown !== document.activeElement) hide();
  };
  log.addEventListener("pointerover", over);
  log.addEventListener("pointerleave", hide);
  log.addEventListener("focusin", (event) => (event.target.matches(".t") ? show(event.target) : hide()));
  log.addEventListener("focusout", hide);
  log.addEventListener("keydown", walk);
  log.addEventListener("scroll", hide);
}
