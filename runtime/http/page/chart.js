// A small stacked area chart over the last minutes: areas grow from below in the order of `kinds`.

import { make, makeSvg, say } from "./dom.js";

const [WIDTH, HEIGHT] = [300, 96];
const LEAST = 60; // samples, one a second, that the axis has room for; it grows with them

export class Chart {
  // `kinds` are classes that colour an area; `unit` writes a value; the chart holds `most` samples.
  constructor(place, { title, kinds, unit, most }) {
    this._most = most;
    this._title = title;
    this._unit = unit;
    this._areas = kinds.map((kind) => makeSvg("path", { class: kind }));
    const grid = [0.25, 0.5, 0.75].map((at) =>
      makeSvg("line", { x1: 0, x2: WIDTH, y1: HEIGHT * at, y2: HEIGHT * at }),
    );
    this._svg = makeSvg(
      "svg",
      { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      ...grid,
      ...this._areas,
      makeSvg("line", { x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT }),
    );
    this._top = make("span");
    this._since = make("span");
    place.append(
      make("div", { class: "axis", "aria-hidden": "true" }, this._top),
      this._svg,
      make("div", { class: "axis", "aria-hidden": "true" }, this._since, make("span", {}, "now")),
    );
  }

  // `samples`: newest last, each a list with one value per kind.
  draw(samples) {
    const shown = samples.slice(-this._most);
    const sum = (values) => values.reduce((a, b) => a + b, 0);
    const highest = Math.max(...shown.map(sum), 0);
    const top = ceiling(highest);
    const span = Math.max(LEAST, shown.length);
    const x = (at) => ((span - shown.length + at) / (span - 1)) * WIDTH;
    const y = (value) => HEIGHT - (value / top) * HEIGHT;
    const below = shown.map(() => 0);
    this._areas.forEach((area, kind) => {
      const floor = below.map((value, at) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).reverse();
      const roof = shown.map((values, at) => `${x(at).toFixed(1)},${y((below[at] += values[kind])).toFixed(1)}`);
      area.setAttribute("d", shown.length ? `M${roof.join("L")}L${floor.join("L")}Z` : "");
    });
    say(this._top, this._unit(top));
    say(this._since, `${Math.round(span / 6) / 10} min ago`);
    const now = shown.length ? this._unit(sum(shown.at(-1))) : "nothing yet";
    this._svg.setAttribute("aria-label", `${this._title}: now ${now}, at most ${this._unit(highest)} in this window`);
  }
}

// A power of two with some room over the highest value.
const ceiling = (highest) => 2 ** Math.ceil(Math.log2(Math.max(highest * 1.05, 1)));
