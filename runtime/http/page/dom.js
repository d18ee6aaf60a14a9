// Elements from data. Text only ever becomes text nodes and attributes: there is no markup from strings here.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function makeSvg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Set text only where it changed, so that screen readers and selections are left alone.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// A <dl> of [name, value, class] rows, rebuilt in place: elements are kept when the names stay the same.
export function describe(list, rows) {
  const names = rows.map(([name]) => name).join("\n");
  if (list.dataset.names !== names) {
    list.dataset.names = names;
    list.replaceChildren(
      ...rows.map(([name, , kind]) => make("div", kind ? { class: kind } : {}, make("dt", {}, name), make("dd"))),
    );
  }
  rows.forEach(([, value], at) => say(list.children[at].lastChild, value));
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  let at = 0;
  for (; count >= 1024 && at < UNITS.length - 1; at++) count /= 1024;
  return `${count >= 100 || Number.isInteger(count) ? Math.round(count) : count.toFixed(1)} ${UNITS[at]}`;
}

export const whole = (count) => count.toLocaleString("en-US", { maximumFractionDigits: 0 });

export const rate = (value) => (value >= 100 || Number.isInteger(value) ? whole(value) : value.toFixed(1));
