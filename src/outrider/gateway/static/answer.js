// One answer on the page: its tokens, who wrote each, and the account of its rounds.

export const ORIGINS = {
  draft: { name: "Draft", words: "Guessed by the draft, accepted" },
  correction: { name: "Correction", words: "The target's own, after a guess fell" },
  bonus: { name: "Bonus", words: "The target's own, after a block that stood whole" },
  target: { name: "Target", words: "The target's own, nothing was guessed" },
  relaxed: { name: "Relaxed", words: "Guessed, and let stand although the target chose another", lossy: true },
  truncated: { name: "Cut off", words: "A correction from a cut-off list, and charged for it", lossy: true },
};

const tokens = new WeakMap();

export const tokenOf = (span) => tokens.get(span);

const element = (tag, name, text = "") => {
  const made = document.createElement(tag);
  made.className = name;
  made.textContent = text; // never markup: it is a model's
  return made;
};

export class Answer {
  constructor(label, settings) {
    this.settings = settings;
    this.seed = null;
    this.tokens = [];
    this.rounds = []; // one row a round, sums so far in each
    this.summary = null;
    this.counts = {};
    this.began = performance.now();
    this.first = null; // ms
    this.node = element("div", "answer busy");
    this.node.append(element("h2", "", label));
    this.body = element("div", "text");
    this.body.tabIndex = 0;
    this.body.setAttribute("role", "group");
    this.body.setAttribute("aria-label", `Answer${label ? ` ${label}` : ""}; arrow keys go from token to token`);
    this.facts = element("p", "facts");
    this.node.append(this.body, this.facts);
  }

  get text() {
    return this.tokens.map((token) => token.text).join("");
  }

  get last() {
    return this.rounds.at(-1) ?? null;
  }

  // Takes an event of the stream; returns the text that it added.
  push(event) {
    const told = event.outrider;
    if (told?.summary) {
      this.summary = told.summary;
      return "";
    }
    if (!told) return "";
    this.first ??= performance.now() - this.began;
    const entries = event.choices[0]?.logprobs?.content ?? [];
    told.tokens.forEach((token, place) => {
      this.#show({ ...token, round: told.round, entry: entries[place] ?? null });
    });
    this.#count(told.round, told.tokens.length);
    return told.tokens.map((token) => token.text).join("");
  }

  #show(token) {
    // A blank before a word stays outside: at the end of a line its tint would stand alone.
    const blank = /^ (?=\S)/.test(token.text) ? " " : "";
    const span = element("span", `t ${token.origin}`, token.text.slice(blank.length));
    if (!token.text) span.classList.add("empty");
    span.tabIndex = -1;
    tokens.set(span, token);
    token.span = span;
    this.tokens.push(token);
    this.counts[token.origin] = (this.counts[token.origin] ?? 0) + 1;
    this.body.append(blank, span);
  }

  #count(round, made) {
    const before = this.last ?? { tokens: 0, drafted: 0, accepted: 0, steps: 0, rows: 0 };
    this.rounds.push({
      ...round,
      forwards: this.rounds.length + 1,
      tokens: before.tokens + made,
      drafted: before.drafted + round.drafted,
      accepted: before.accepted + round.accepted,
      rate: round.drafted ? round.accepted / round.drafted : null,
      steps: before.steps + (round.step_s ?? 0),
      rows: before.rows + round.drafted + 1,
      seconds: (performance.now() - this.began) / 1000,
    });
  }

  end(note = "") {
    this.node.classList.remove("busy");
    const parts = [`${this.tokens.length} tokens`];
    const { summary, last } = this;
    if (last?.drafted) parts.push(`${Math.round((100 * last.accepted) / last.drafted)} % of guesses stand`);
    if (last) parts.push(`${(last.forwards / last.tokens).toFixed(2)} forwards a token`);
    if (summary?.timing.tpot_s != null) parts.push(`${(1000 * summary.timing.tpot_s).toFixed(0)} ms a token`);
    if (summary?.relaxed) parts.push(`${summary.relaxed.relaxed ?? this.counts.relaxed ?? 0} relaxed`);
    if (this.seed != null) parts.push(`seed ${this.seed}`);
    if (summary?.confirmed) parts.push("ids confirmed by the cloud");
    if (note) parts.push(note);
    this.facts.textContent = parts.join(" \u00b7 ");
  }
}

// Place of the first token that differs; null where both are the same to the end.
export function firstDifference(one, other) {
  const most = Math.max(one.tokens.length, other.tokens.length);
  for (let i = 0; i < most; i++) {
    if (one.tokens[i]?.id !== other.tokens[i]?.id) return i;
  }
  return null;
}

export function verdict(one, other, whole) {
  const place = firstDifference(one, other);
  const box = element("p", "verdict");
  box.setAttribute("role", "status");
  if (place === null) {
    box.textContent = `identical: ${one.tokens.length} tokens${whole ? "" : " so far (stopped)"}`;
    return box;
  }
  for (const answer of [one, other]) answer.tokens[place]?.span.classList.add("differs");
  const cut = !whole && (place >= one.tokens.length || place >= other.tokens.length);
  if (cut) {
    box.textContent = `identical up to token ${place}, where one was stopped`;
    return box;
  }
  box.classList.add("differ");
  const odd = [one, other].filter((answer) => answer.settings.verify !== "coupled");
  const why = odd.length ? `: expected, since the rule ${odd[0].settings.verify} was in force` : "";
  box.textContent = `different from token ${place + 1} on${why}`;
  return box;
}
