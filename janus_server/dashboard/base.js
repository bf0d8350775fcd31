// What every part of the page uses: elements, lists that keep their elements, and numbers as people read them.
// Names and sentences come from elsewhere: they only ever enter through textContent, never as markup.
const NS = "http://www.w3.org/2000/svg";
const $ = (id) => document.getElementById(id);

function el(tag, attributes, ...children) { return fill(document.createElement(tag), attributes, children); }
function svg(tag, attributes, ...children) { return fill(document.createElementNS(NS, tag), attributes, children); }
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== null && value !== false && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// What did not change is not touched: a selection, a focus or a screen reader's place stays where it is.
function say(node, text) { if (node.textContent !== text) node.textContent = text; }
function mark(node, name, on) { node.classList.toggle(name, Boolean(on)); }
function hint(node, text) { if ((node.getAttribute("title") || "") !== (text || "")) text ? node.setAttribute("title", text) : node.removeAttribute("title"); }
function style(node, name, value) { if (node.style.getPropertyValue(name) !== value) node.style.setProperty(name, value); }

// A list whose elements live as long as their keys: make(item) gives {node, update}, update(item) is called each time.
class Keyed {
  constructor(parent, make) { this.parent = parent; this.make = make; this.parts = new Map(); }
  update(items, keyOf) {
    const wanted = new Set(items.map(keyOf));
    for (const [key, part] of this.parts) if (!wanted.has(key)) { part.node.remove(); this.parts.delete(key); }
    let before = this.parent.firstElementChild;
    for (const item of items) {
      const key = keyOf(item);
      if (!this.parts.has(key)) this.parts.set(key, this.make(item));
      const part = this.parts.get(key);
      if (part.node === before) before = before.nextElementSibling;
      else this.parent.insertBefore(part.node, before);
      part.update(item);
    }
  }
}

// Colours are by model, the same everywhere. Names are sorted before they get theirs, so all nodes show the same ones.
class Colours {
  constructor() { this.given = new Map(); }
  meet(names) {
    for (const name of [...names].sort()) if (!this.given.has(name)) this.given.set(name, this.given.size);
  }
  of(name) { return this.given.has(name) ? `var(--c${this.given.get(name) % 12})` : "var(--other)"; }
}
const colours = new Colours();
function dot(model) {
  const node = el("i", { class: "dot", "aria-hidden": "true" });
  style(node, "--m", colours.of(model));
  return node;
}

// What an answer says of a name. A model may be called `constructor`, which every object has something for.
const named = (answer, name) => (answer && Object.hasOwn(answer, name) ? answer[name] : undefined);
const sum = (values) => values.reduce((total, value) => total + value, 0);
const whole = (value) => Math.round(value).toLocaleString("en");
const rate = (value) => (value >= 100 ? whole(value) : value >= 10 ? value.toFixed(1) : value.toFixed(2).replace(/\.?0+$/, ""));
// Rounded down: what is just missed must not read as kept.
const percent = (share) => (share === null || share === undefined ? "–" : `${(Math.floor(share * 1000 + 1e-6) / 10).toFixed(1)} %`);
const goal = (share) => `${+(share * 100).toFixed(2)} %`;
function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 100 ? `${value.toFixed(2)} s` : `${Math.round(value)} s`;
}
function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${unit && value < 100 ? +value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}
function lasting(value) {
  if (value < 120) return `${Math.floor(value)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min`;
  if (value < 172800) return `${Math.floor(value / 3600)} h`;
  return `${Math.floor(value / 86400)} days`;
}
function clock(unix) { return new Date(unix * 1000).toLocaleTimeString("en-GB"); }
function counted(count, one, many) { return `${whole(count)} ${count === 1 ? one : many}`; }
