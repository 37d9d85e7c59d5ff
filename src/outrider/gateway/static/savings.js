// Money and energy against the cloud alone, by the reader's own prices. Negative is shown as it is.

const input = (id) => document.getElementById(id);
const AMOUNTS = ["price", "watts-cloud", "watts-edge"];

const prices = {}; // as of the last `refresh`: a field is not read again for each round
let wrong = null; // name of a field that holds no such number

// Reads what the reader typed; an empty field is 0.
export function refresh() {
  wrong = null;
  for (const id of AMOUNTS) {
    const { value, validity, labels } = input(id);
    input(id).setAttribute("aria-invalid", String(!validity.valid));
    if (!validity.valid) wrong ??= labels[0].textContent.trim();
    prices[id] = Number(value);
  }
}

const UNITS = {
  hour: {
    money: (run, price) => [(run.tokens * run.plain * price) / 3600, (run.steps * price) / 3600],
    words: "Money: the cloud alone takes N plain steps of t seconds, an answer here the seconds its forwards took: (N t - sum of steps) x price / 3600.",
    timed: true,
  },
  forward: {
    money: (run, price) => [(run.tokens * price) / 1000, (run.forwards * price) / 1000],
    words: "Money: the cloud alone takes one forward a token, an answer here as many as it had rounds: (N - rounds) x price / 1000.",
  },
  row: {
    money: (run, price) => [(run.tokens * price) / 1e6, (run.rows * price) / 1e6],
    words: "Money: who bills every token that the target judges bills guesses that fall, too: (N - sum of (guesses + 1)) x price / 1000000. Never positive.",
  },
};

const ENERGY =
  "Energy: N t W(cloud) - (sum of steps x W(cloud) + seconds of drafting x W(edge)), in joules. What the machines draw while they wait is not in it.";
const WORDS =
  "N: tokens of the answer. t: a plain step of the target, as the cloud measured it when it started. A forward that several answers share counts whole for each.";

function line(name, value, unit, alone) {
  const row = document.createElement("div");
  const bold = document.createElement("b");
  bold.textContent = `${value < 0 ? "\u2212" : ""}${Math.abs(value).toPrecision(3)} ${unit}`;
  bold.className = value < 0 ? "minus" : "plus";
  const share = alone > 0 ? ` (${((100 * value) / alone).toFixed(0)} %)` : "";
  row.append(`${name}: `, bold, `${share}${value < 0 ? ": it costs more" : ""}`);
  return row;
}

// `sums`: answers as {tokens, forwards, rows, steps, draft, plain}; plain: seconds or null.
export function savings(sum) {
  const unit = UNITS[input("unit").value];
  if (wrong || !sum.tokens || (unit.timed && sum.plain == null)) return null;
  const [alone, here] = unit.money(sum, prices.price);
  const energy =
    sum.plain == null
      ? null
      : [
          sum.tokens * sum.plain * prices["watts-cloud"],
          sum.steps * prices["watts-cloud"] + sum.draft * prices["watts-edge"],
        ];
  return { alone, money: alone - here, energy };
}

export function runOf(row, plain) {
  return {
    tokens: row.tokens, forwards: row.forwards, rows: row.rows, steps: row.steps,
    draft: row.draft_s ?? 0, plain,
  };
}

function parts(title, run) {
  const found = run && savings(run);
  const heading = document.createElement("strong");
  heading.textContent = title;
  if (!found) {
    const none = document.createElement("div");
    none.textContent = run?.tokens ? "The cloud has not told what a plain step takes." : "Nothing yet.";
    return [heading, none];
  }
  const lines = [heading, line("Money", found.money, "", found.alone)];
  if (found.energy) lines.push(line("Energy", found.energy[0] - found.energy[1], "J", found.energy[0]));
  return lines;
}

// `answers`: [title, run] of those on show; `chat`: the sum of all.
export function show(answers, chat) {
  const unit = UNITS[input("unit").value];
  const box = document.getElementById("saved");
  if (wrong) box.textContent = `${wrong}: give a number from 0 to 1000000000.`;
  else box.replaceChildren(...answers.flatMap(([title, run]) => parts(title, run)), ...parts("This chat", chat));
  document.getElementById("formula").replaceChildren(
    ...[unit.words, ENERGY, WORDS].map((text) => {
      const paragraph = document.createElement("p");
      paragraph.textContent = text;
      return paragraph;
    }),
  );
}

export function listen(redraw) {
  for (const id of [...AMOUNTS, "unit"]) input(id).addEventListener("input", redraw);
}
