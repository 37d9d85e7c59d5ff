// The controls of one way to make an answer, and what they say as the API's `outrider` object.

const WORDS = {
  latency: "latency: the cloud never waits",
  balanced: "balanced: it waits for guesses on their way",
  cost: "cost: few forwards",
  freerun: "freerun: the target never waits",
  stream: "stream: guesses ahead, the target waits",
  sync: "sync: a block of guesses, then wait",
  pearl: "pearl: a block ahead, its first guess first",
  plc: "plc: as pearl, in a growing window",
  multiplex: "multiplex: requests take turns at the draft",
  hybrid: "hybrid: multiplex, ahead where it pays",
  "cloud-only": "cloud-only: no guesses",
  colocated: "colocated: the cloud's own draft",
  coupled: "coupled: same seed, same text",
  ratio: "ratio: the same distribution",
  relaxed: "relaxed: lossy, within a budget",
};
const RULES = {
  relaxed: "relaxed: within T, or the same token",
  fsd: "fsd: within T",
  e2sci: "e2sci: within the block's own T",
  typical: "typical: likely enough to the target",
};

function select(label, values, first, words = WORDS) {
  const field = document.createElement("select");
  if (first) field.append(new Option(first, ""));
  for (const value of values) field.append(new Option(words[value] ?? value, value));
  return labelled(label, field);
}

function number(label, value, range) {
  const field = document.createElement("input");
  Object.assign(field, { type: "number", placeholder: String(value), ...range });
  return labelled(label, field);
}

function labelled(text, field) {
  const label = document.createElement("label");
  label.append(`${text} `, field);
  return { label, field };
}

export class Settings {
  constructor(fieldset, facts) {
    this.facts = facts;
    const { defaults } = facts;
    const parts = {
      objective: select("Objective", Object.keys(facts.objectives), "none: as chosen below"),
      schedule: select("Schedule", facts.schedules, ""),
      controller: select("Controller", facts.controllers, ""),
      verify: select("Acceptance rule", facts.rules),
      draft_length: number("Draft length K", defaults.draft_length, { min: 1, max: 64, step: 1 }),
      window: number("Window", defaults.window, { min: 1, max: 256, step: 1 }),
      rule: select("Relaxed rule", facts.relaxed_rules, "", RULES),
      threshold: number("Threshold T, nats", defaults.threshold, { min: 0, max: 0.693, step: "any" }),
      budget: number("Budget, total variation", defaults.budget, { min: 0, step: "any" }),
    };
    const grid = document.createElement("div");
    grid.className = "grid";
    for (const [name, { label }] of Object.entries(parts)) {
      if (["objective", "schedule", "controller", "verify", "rule"].includes(name)) label.className = "wide";
      grid.append(label);
    }
    fieldset.append(grid);
    this.parts = parts;
    parts.schedule.field.prepend(new Option(`as the gateway: ${defaults.schedule}`, ""));
    parts.controller.field.prepend(new Option(`as the gateway: ${defaults.controller}`, ""));
    for (const name of ["schedule", "controller"]) parts[name].field.value = "";
    for (const name of ["verify", "rule"]) parts[name].field.value = defaults[name];
    fieldset.addEventListener("change", () => this.#follow());
    this.#follow();
  }

  #value(name) {
    return this.parts[name].field.value;
  }

  // What can have no effect is not offered.
  #follow() {
    const relaxed = this.#value("verify") === "relaxed";
    for (const name of ["rule", "threshold", "budget"]) this.parts[name].label.hidden = !relaxed;
    const idle = ["cloud-only", "colocated"].includes(this.schedule) || !this.facts.draft;
    this.parts.controller.field.disabled = idle;
    const chosen = this.facts.objectives[this.#value("objective")];
    const { defaults } = this.facts;
    const from = chosen ? "by the objective" : "as the gateway";
    for (const name of ["schedule", "controller"]) {
      this.parts[name].field.options[0].text = `${from}: ${(chosen ?? defaults)[name]}`;
    }
  }

  get schedule() {
    const chosen = this.facts.objectives[this.#value("objective")] ?? this.facts.defaults;
    return this.#value("schedule") || chosen.schedule;
  }

  get controller() {
    if (this.parts.controller.field.disabled) return "fixed";
    const chosen = this.facts.objectives[this.#value("objective")] ?? this.facts.defaults;
    return this.#value("controller") || chosen.controller;
  }

  get verify() {
    return this.#value("verify");
  }

  get name() {
    return `${this.schedule}, ${this.controller}, ${this.verify}`;
  }

  set(values) {
    for (const [name, value] of Object.entries(values)) this.parts[name].field.value = value;
    this.#follow();
  }

  // The request's `outrider` object: only what was chosen.
  get wishes() {
    const wishes = { verify: this.verify };
    for (const name of ["objective", "schedule", "controller", "draft_length", "window", "rule", "threshold", "budget"]) {
      const { field, label } = this.parts[name];
      if (!field.value || field.disabled || label.hidden) continue;
      wishes[name] = field.type === "number" ? Number(field.value) : field.value;
    }
    return wishes;
  }
}
