// Live plots over the tokens of an answer; of two answers A is solid and B dashed.

import uPlot from "/static/vendor/uPlot.esm.js";
import { runOf, savings } from "./savings.js";

const share = (value) => (value == null ? "-" : value.toFixed(2));
const whole = (value) => (value == null ? "-" : String(Math.round(value)));
const ms = (value) => (value == null ? "-" : `${value.toFixed(value < 10 ? 1 : 0)} ms`);
const milli = (value) => (value == null ? null : 1000 * value);

// Each line: name, colour variable, value of a round, how it is written.
const PANELS = [
  ["Acceptance", [
    ["mean", "--draft-line", (r) => (r.drafted ? r.accepted / r.drafted : null), share],
    ["credit r", "--bonus-line", (r) => r.credit, share],
    ["threshold T", "--relaxed-line", (r) => r.threshold, share],
  ], [0, 1]],
  ["Window and K", [
    ["unjudged", "--bonus-line", (r) => r.window, whole],
    ["decided", "--correction-line", (r) => r.length, whole],
  ]],
  ["Milliseconds", [
    ["round trip", "--bonus-line", (r) => milli(r.network_s), ms],
    ["queue", "--correction-line", (r) => milli(r.queue_s), ms],
    ["step", "--draft-line", (r) => milli(r.step_s), ms],
  ]],
  ["Forwards a token", [["so far", "--draft-line", (r) => r.forwards / r.tokens, share]]],
  ["Bytes a token", [
    ["up", "--bonus-line", (r) => r.bytes_up / r.tokens, whole],
    ["down", "--correction-line", (r) => r.bytes_down / r.tokens, whole],
  ]],
  ["Saved, in percent", [
    ["money", "--draft-line", (r, plain) => percent(savings(runOf(r, plain)), (s) => [s.money, s.alone]), whole],
    ["energy", "--relaxed-line", (r, plain) => percent(savings(runOf(r, plain)), (s) => s.energy && [s.energy[0] - s.energy[1], s.energy[0]]), whole],
  ]],
];

function percent(found, pick) {
  const pair = found && pick(found);
  return pair && pair[1] > 0 ? (100 * pair[0]) / pair[1] : null;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

class Panel {
  constructor(title, lines, range) {
    this.lines = lines;
    this.range = range;
    this.figure = document.createElement("figure");
    this.caption = document.createElement("figcaption");
    this.caption.textContent = title;
    this.now = document.createElement("span");
    this.now.className = "now";
    this.caption.append(" ", this.now);
    this.canvas = document.createElement("div");
    this.canvas.className = "canvas";
    this.canvas.setAttribute("aria-hidden", "true"); // the caption says the newest values
    this.figure.append(this.caption, this.canvas);
    this.plot = null;
  }

  build() {
    this.plot?.destroy();
    const ink = colour("--muted");
    const grid = { stroke: colour("--edge"), width: 1 };
    const series = ([name, stroke], dash) => ({
      label: name, stroke: colour(stroke), width: 2, spanGaps: true, dash, points: { show: false },
    });
    this.plot = new uPlot(
      {
        width: Math.max(200, this.canvas.clientWidth || 300),
        height: 120,
        cursor: { show: false },
        legend: { show: false },
        scales: { x: { time: false }, y: { range: this.range ?? ((_, low, high) => [Math.min(0, low), high > 0 ? high * 1.1 : 1]) } },
        axes: [
          { stroke: ink, grid, ticks: grid, size: 26 },
          { stroke: ink, grid, ticks: grid, size: 60 },
        ],
        series: [{}, ...this.lines.map((l) => series(l)), ...this.lines.map((l) => series(l, [5, 4]))],
      },
      [[], ...this.lines.map(() => []), ...this.lines.map(() => [])],
      this.canvas,
    );
  }

  draw(answers, plain) {
    const tables = answers.map((rounds) => [
      rounds.map((r) => r.tokens),
      ...this.lines.map(([, , value]) => rounds.map((r) => value(r, plain) ?? null)),
    ]);
    const nothing = [[], ...this.lines.map(() => [])];
    const data = uPlot.join([tables[0] ?? nothing, tables[1] ?? nothing]);
    this.plot.setData(data.map((column) => Array.from(column, (value) => value ?? null)));
    this.now.replaceChildren(...this.lines.flatMap((line) => this.#newest(line, answers, plain)));
  }

  #newest([name, stroke, value, write], answers, plain) {
    const known = answers.map((rounds) => rounds.map((r) => value(r, plain) ?? null).findLast((v) => v !== null) ?? null);
    if (known.every((v) => v === null)) return [];
    const mark = document.createElement("i");
    mark.style.background = colour(stroke);
    const item = document.createElement("span");
    item.append(mark, `${name} ${known.map(write).join(" / ")}`);
    return [item, " "];
  }
}

export class Plots {
  constructor(root) {
    this.panels = PANELS.map((panel) => new Panel(...panel));
    root.append(...this.panels.map((panel) => panel.figure));
    this.args = [[], null];
    this.rebuild();
    new ResizeObserver(() => this.#fit()).observe(root);
  }

  #fit() {
    for (const panel of this.panels) {
      const width = panel.canvas.clientWidth;
      if (width && width !== panel.plot.width) panel.plot.setSize({ width, height: 120 });
    }
  }

  // After a change of theme: colours are read when a plot is made.
  rebuild() {
    for (const panel of this.panels) panel.build();
    this.draw(...this.args);
  }

  // `answers`: rounds of A and perhaps of B; `plain`: seconds of a plain step, or null.
  draw(answers, plain) {
    this.args = [answers, plain];
    for (const panel of this.panels) panel.draw(answers, plain);
  }
}
