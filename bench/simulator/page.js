"use strict";
// Draws the charts of a report from the JSON in the page. Text only ever enters through textContent.
const DATA = JSON.parse(document.getElementById("data").textContent);
const NS = "http://www.w3.org/2000/svg";
const SPAN = DATA.duration_s;
// What comes long after the trace is not drawn: it would squash the rest.
const END = Math.max(SPAN, Math.min(1.25 * SPAN, Math.max(...DATA.policies.map((p) => p.closed_s || SPAN))));
const KINDS = ["load", "wake", "fork", "serve", "drain", "sleep", "unload", "evict", "refuse", "decided", "refit", "answer"];
const KIND_COLOUR = { load: 5, wake: 1, fork: 0, serve: 2, drain: 7, refuse: 5, decided: 8, refit: 9, answer: 9 };
const tip = document.getElementById("tip");
// Everything drawn: {node, draw, move}. What is no longer on the page is forgotten.
let drawn = [];
const colour = (i) => (i < 0 ? "var(--other)" : `var(--c${i % 12})`);

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  return fill(node, attributes, children);
}
function svg(tag, attributes, ...children) {
  const node = document.createElementNS(NS, tag);
  return fill(node, attributes, children);
}
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  for (const child of children) node.append(child);
  return node;
}
function clock(t, fine) {
  if (SPAN < 600) return `${t.toFixed(fine ? 1 : 0)} s`;
  const whole = Math.floor(t), pad = (n) => String(n).padStart(2, "0");
  const h = Math.floor(whole / 3600), m = Math.floor(whole / 60) % 60, s = whole % 60;
  if (SPAN < 7200) return `${h * 60 + m}:${pad(s)}`;
  return fine ? `${pad(h)}:${pad(m)}:${pad(s)}` : `${pad(h)}:${pad(m)}`;
}
const percent = (v) => (v == null ? "–" : `${(Math.floor(v * 1000) / 10).toFixed(1)} %`);
const whole = (v) => (v == null ? "–" : Math.round(v).toLocaleString("en"));
const number = (v) => (v == null ? "–" : v >= 100 ? Math.round(v).toLocaleString("en") : v >= 10 ? v.toFixed(1) : v.toFixed(2).replace(/\.?0+$/, ""));
const seconds = (v) => (v == null ? "–" : v < 1 ? `${Math.round(v * 1000)} ms` : v < 100 ? `${v.toFixed(2)} s` : `${Math.round(v)} s`);

function steps(low, high, wanted) {
  const rough = (high - low) / wanted || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= rough);
  const found = [];
  for (let v = Math.ceil(low / step) * step; v <= high + 1e-9; v += step) found.push(v);
  return found;
}
function hours(wanted) {
  const step = [1, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 14400, 21600, 43200, 86400].find((s) => END / s <= wanted) || 172800;
  const found = [];
  for (let t = 0; t <= END; t += step) found.push(t);
  return found;
}
function show(event, ...parts) {
  tip.replaceChildren(...parts);
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, event.clientX + 16 + box.width > innerWidth ? event.clientX - box.width - 14 : event.clientX + 16)}px`;
  tip.style.top = `${Math.max(8, Math.min(event.clientY + 14, innerHeight - box.height - 8))}px`;
}
function hide() { tip.style.display = "none"; moveAll(null); }
function alive() { return (drawn = drawn.filter((chart) => chart.node.isConnected)); }
function moveAll(t) { alive().forEach((chart) => chart.move(t)); }
function repaintAll() { alive().forEach((chart) => chart.draw()); }
function register(node, draw) {
  const chart = { node, draw, move: () => {} };
  drawn.push(chart);
  draw(chart);
  return chart;
}
function line(name, value, fillColour) {
  const label = el("span", {});
  if (fillColour) label.append(el("i", { style: `background:${fillColour}` }));
  label.append(name);
  const row = el("div", { class: "row" }, label, el("span", {}, value));
  return row;
}
function at(values, width, t) {
  const i = Math.floor(t / width);
  return i >= 0 && i < values.length ? values[i] : null;
}

/* An empty chart over time: axes, the end of the trace, and a cursor shared by all. paint(frame) draws into it. */
function frame(host, options) {
  const height = options.height || 200, left = 58, right = 12, top = 10, bottom = 22;
  const root = svg("svg", { role: "img", "aria-label": options.label, height });
  host.append(root);
  let chart = null;
  function draw(self) {
    chart = self || chart;
    root.replaceChildren();
    const width = Math.max(280, root.getBoundingClientRect().width || 900);
    root.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const x = (t) => left + (t / END) * (width - left - right);
    const y = (v) => height - bottom - ((v - options.low) / (options.high - options.low || 1)) * (height - top - bottom);
    for (const v of options.ticks || steps(options.low, options.high, 4)) {
      root.append(svg("line", { x1: left, x2: width - right, y1: y(v), y2: y(v), stroke: "var(--grid)" }));
      const text = svg("text", { x: left - 7, y: y(v) + 4, "text-anchor": "end" });
      text.textContent = (options.tick || options.format)(v);
      root.append(text);
    }
    for (const t of hours(width / 90)) {
      const text = svg("text", { x: x(t), y: height - 5, "text-anchor": t === 0 ? "start" : "middle" });
      text.textContent = clock(t);
      root.append(text);
    }
    if (END > SPAN * 1.002) root.append(svg("rect", { x: x(SPAN), y: top, width: x(END) - x(SPAN), height: height - top - bottom, fill: "var(--shade)" }));
    options.paint({ root, x, y, width, height, left, right, top, bottom });
    const rule = svg("line", { y1: top, y2: height - bottom, stroke: "var(--faint)", "stroke-dasharray": "3 3", visibility: "hidden" });
    root.append(rule);
    chart.move = (t) => {
      rule.setAttribute("visibility", t == null || t > END ? "hidden" : "visible");
      if (t != null) { rule.setAttribute("x1", x(t)); rule.setAttribute("x2", x(t)); }
    };
    if (!options.tip) return;
    const cover = svg("rect", { x: left, y: top, width: width - left - right, height: height - top - bottom, fill: "transparent" });
    cover.addEventListener("pointermove", (event) => {
      const box = root.getBoundingClientRect();
      const t = Math.max(0, Math.min(END, (((event.clientX - box.left) / box.width) * width - left) / (width - left - right) * END));
      moveAll(t);
      show(event, el("b", {}, clock(t, true)), ...options.tip(t));
    });
    cover.addEventListener("pointerleave", hide);
    root.insertBefore(cover, rule);
  }
  register(root, draw);
  return root;
}
function path(values, width, f) {
  let d = "", pen = false;
  values.forEach((v, i) => {
    const t = (i + 0.5) * width;
    if (v == null || t > END) { pen = false; return; }
    d += `${pen ? "L" : "M"}${f.x(t).toFixed(1)} ${f.y(v).toFixed(1)}`;
    pen = true;
  });
  return d;
}
function lines(host, series, options) {
  return frame(host, {
    ...options,
    paint(f) {
      // The first is the one that is looked for: it lies on top.
      series.map((s, i) => svg("path", { d: path(s.values, s.width_s, f), fill: "none", stroke: s.colour, "stroke-width": i ? 1.5 : 2.2, "stroke-linejoin": "round" }))
        .reverse().forEach((drawn) => f.root.append(drawn));
      for (const value of options.rules || []) rule(f, value);
    },
    tip: (t) => series.map((s) => line(s.name, options.format(at(s.values, s.width_s, t)), s.colour)),
  });
}
function rule(f, value) {
  f.root.append(svg("line", { x1: f.left, x2: f.width - f.right, y1: f.y(value), y2: f.y(value), stroke: "var(--soft)", "stroke-dasharray": "6 4" }));
}
/* Layers one upon the other, as steps; each bin is as wide as all others. */
function stack(host, layers, width, options) {
  return frame(host, {
    ...options,
    paint(f) {
      const count = Math.max(0, ...layers.map((l) => l.values.length));
      let floor = new Array(count).fill(0);
      for (const layer of layers) {
        const roof = floor.map((v, i) => v + (layer.values[i] || 0));
        let up = "", down = "";
        for (let i = 0; i < count && i * width < END; i++) {
          const a = f.x(i * width).toFixed(1), b = f.x(Math.min(END, (i + 1) * width)).toFixed(1);
          up += `${i ? "L" : "M"}${a} ${f.y(roof[i]).toFixed(1)}L${b} ${f.y(roof[i]).toFixed(1)}`;
          down = `L${b} ${f.y(floor[i]).toFixed(1)}L${a} ${f.y(floor[i]).toFixed(1)}` + down;
        }
        if (up) f.root.append(svg("path", { d: `${up}${down}Z`, fill: layer.colour, "fill-opacity": layer.faint ? 0.45 : 0.9 }));
        floor = roof;
      }
      for (const value of options.rules || []) rule(f, value);
    },
    tip: (t) => layers.filter((l) => at(l.values, width, t) > 0.005).reverse().map((l) => line(l.name, number(at(l.values, width, t)), l.colour)),
  });
}
function legend(entries, thin) {
  return el("div", { class: "legend" }, ...entries.map(([name, c]) => el("span", {}, el("i", { style: `background:${c}`, class: thin ? "thin" : "" }), name)));
}
function tabs(names, chosen, pick) {
  const box = el("div", { class: "tabs", role: "group" });
  const buttons = names.map((name) => el("button", { type: "button", "aria-pressed": name === chosen }, name));
  buttons.forEach((button, i) => button.addEventListener("click", () => {
    buttons.forEach((b) => b.setAttribute("aria-pressed", b === button));
    pick(names[i]);
  }));
  box.append(...buttons);
  return box;
}
function section(title, text, aside) {
  const box = el("section", {});
  box.append(el("div", { class: "bar-row" }, el("div", {}, el("h2", {}, title), el("p", { class: "soft" }, text)), aside || ""));
  document.getElementById("charts").append(box);
  return box;
}
/* Rows of coloured cells over time. rows: {name, value, cells}, cells of null are empty. */
function heat(host, rows, width, shade, say) {
  const grid = el("div", { class: "heat" });
  const map = el("canvas", {});
  const first = el("div", { class: "map", style: `grid-row: 1 / span ${rows.length}; grid-column: 2` }, map);
  rows.forEach((row, i) => {
    grid.append(el("div", { title: row.name, style: `grid-row:${i + 1};grid-column:1` }, row.name));
    grid.append(el("div", { class: `value ${row.bad ? "missed" : ""}`, style: `grid-row:${i + 1};grid-column:3` }, row.value));
  });
  grid.append(first);
  host.append(grid);
  const columns = Math.max(1, Math.ceil(END / width - 1e-9)), axis = el("div", { class: "times", style: `grid-row:${rows.length + 1};grid-column:2` });
  const span = columns * width;
  for (const t of hours(6).filter((v) => v < span)) axis.append(el("span", { style: `left:${(100 * t) / span}%` }, clock(t)));
  grid.append(axis);
  map.width = columns;
  map.height = rows.length * 15;
  map.style.height = `${rows.length * 15}px`;
  function draw() {
    const pen = map.getContext("2d"), style = getComputedStyle(document.documentElement);
    pen.clearRect(0, 0, map.width, map.height);
    rows.forEach((row, r) => row.cells.forEach((v, c) => {
      if (v == null || c >= columns) return;
      pen.fillStyle = shade(v, style, row);
      pen.fillRect(c, r * 15 + 1, 1, 13);
    }));
  }
  register(map, draw);
  map.addEventListener("pointermove", (event) => {
    const box = map.getBoundingClientRect();
    const c = Math.floor(((event.clientX - box.left) / box.width) * columns), row = rows[Math.floor((event.clientY - box.top) / 15)];
    if (!row) return hide();
    moveAll((c + 0.5) * width);
    show(event, el("b", {}, row.name), line(clock(c * width, true), say(row.cells[c] ?? null, row)));
  });
  map.addEventListener("pointerleave", hide);
}
function mix(a, b, share) {
  const part = (hex) => [1, 3, 5].map((i) => parseInt(hex.trim().slice(i, i + 2), 16));
  const [p, q] = [part(a), part(b)];
  return `rgb(${p.map((v, i) => Math.round(v + (q[i] - v) * share)).join(",")})`;
}
/* Attainment: green from 99 % on, amber below, red from 80 % down. */
function shadeOfShare(v, style) {
  const ink = (name) => style.getPropertyValue(name);
  if (v >= 0.99) return ink("--kept");
  return mix(ink("--short"), ink("--broken"), Math.min(1, (0.99 - v) / 0.19));
}
function table(head, rows) {
  const body = el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((cell) => (cell instanceof Node ? cell : el("td", {}, String(cell)))))));
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...head.map((h) => el("th", {}, h)))), body));
}

function attainment() {
  const box = section("Promises kept over time", `Share of the requests that came in each window of ${number(DATA.window_s)} s; the dashed line is 95 %.`,
    tabs(["overall", "ttft", "tpot"], "overall", (kind) => paint(kind)));
  const entries = DATA.policies.map((p, i) => [p.name, colour(i)]);
  const host = el("div", {});
  box.append(legend(entries, true), host, el("h3", {}, "Requests a second"));
  const load = DATA.policies[0].load;
  lines(box, [{ name: "requests a second", values: load, width_s: DATA.policies[0].column_s, colour: "var(--soft)" }],
    { label: "requests a second", height: 90, low: 0, high: Math.max(1e-9, ...load) * 1.05, format: number });
  function paint(kind) {
    const known = DATA.policies.flatMap((p) => p.attainment[kind]).filter((v) => v != null);
    const worst = Math.min(0.9, ...known), low = Math.max(0, Math.floor(worst * 10) / 10);
    host.replaceChildren();
    lines(host, DATA.policies.map((p, i) => ({ name: p.name, values: p.attainment[kind], width_s: p.column_s, colour: colour(i) })),
      { label: `attainment over time, ${kind}`, height: 240, low, high: 1, format: percent, tick: (v) => `${Math.round(v * 100)} %`, rules: [0.95] });
  }
  paint("overall");
}
function devices() {
  const held = DATA.policies.map((p, i) => ({ name: p.name, values: p.timeline.held, width_s: p.timeline.width_s, colour: colour(i) }));
  const box = section("Devices held over time", `Of the ${DATA.nodes} in the cluster: those that hold a model, or have one on its way or draining.`);
  box.append(legend(DATA.policies.map((p, i) => [`${p.name}, ${number(p.device_hours)} device-hours`, colour(i)]), true));
  lines(box, held, { label: "devices held over time", height: 190, low: 0, high: Math.max(1, ...held.flatMap((s) => s.values)) * 1.06, format: number });
}
/* Where a policy stands between keeping promises and holding devices. */
function trade() {
  if (DATA.policies.length < 2) return;
  const box = section("What it costs", "Up is more promises kept, left is fewer device-hours.");
  const points = DATA.policies.map((p, i) => ({ x: p.device_hours, y: p.overall, name: p.name, colour: colour(i) })).filter((p) => p.y != null);
  const most = Math.max(1e-9, ...points.map((p) => p.x)) * 1.12, least = Math.min(0.9, Math.max(0, Math.floor(Math.min(...points.map((p) => p.y)) * 10 - 0.5) / 10));
  const height = 250, root = svg("svg", { role: "img", "aria-label": "attainment against device-hours", height });
  box.append(root);
  function draw() {
    root.replaceChildren();
    const width = Math.max(280, root.getBoundingClientRect().width || 900);
    root.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const x = (v) => 52 + (v / most) * (width - 80), y = (v) => height - 36 - ((v - least) / (1 - least)) * (height - 56);
    for (const v of steps(least, 1, 4)) {
      root.append(svg("line", { x1: 52, x2: width - 20, y1: y(v), y2: y(v), stroke: "var(--grid)" }));
      root.append(label(45, y(v) + 4, `${Math.round(v * 100)} %`, "end"));
    }
    for (const v of steps(0, most, 6)) root.append(label(x(v), height - 16, number(v), "middle"));
    root.append(label(width - 20, height - 2, "device-hours", "end"));
    const taken = [];
    for (const p of [...points].sort((a, b) => b.y - a.y)) {
      let ty = y(p.y) + 4;
      while (taken.some(([a, b]) => Math.abs(a - x(p.x)) < 130 && Math.abs(b - ty) < 14)) ty += 14;
      taken.push([x(p.x), ty]);
      const dot = svg("circle", { cx: x(p.x), cy: y(p.y), r: 6.5, fill: p.colour, stroke: "var(--card)", "stroke-width": 2 });
      dot.addEventListener("pointermove", (e) => show(e, el("b", {}, p.name), line("promises kept", percent(p.y)), line("device-hours", number(p.x))));
      dot.addEventListener("pointerleave", hide);
      const right = x(p.x) > width - 150;
      root.append(dot, label(x(p.x) + (right ? -12 : 12), ty, p.name, right ? "end" : "start", "strong"));
    }
  }
  function label(px, py, text, anchor, kind) {
    const node = svg("text", { x: px, y: py, "text-anchor": anchor, class: kind || "" });
    node.textContent = text;
    return node;
  }
  register(root, draw);
}
function decisions(host, policy) {
  const kinds = KINDS.filter((k) => policy.sentences.some((s) => s[1] === k));
  if (!kinds.length) { host.append(el("p", { class: "soft" }, "It decided nothing but whom to begin where.")); return; }
  const rowHeight = 17, height = kinds.length * rowHeight + 34;
  frame(host, {
    label: "decisions over time", height, low: 0, high: 1, ticks: [], format: () => "",
    paint(f) {
      kinds.forEach((kind, k) => {
        const text = svg("text", { x: f.left - 7, y: f.top + k * rowHeight + 13, "text-anchor": "end" });
        text.textContent = kind;
        f.root.append(text, svg("line", { x1: f.left, x2: f.width - f.right, y1: f.top + k * rowHeight + 9, y2: f.top + k * rowHeight + 9, stroke: "var(--grid)" }));
      });
      for (const [t, kind, model, node, why] of policy.sentences) {
        if (t > END) continue;
        const dot = svg("circle", { cx: f.x(t).toFixed(1), cy: f.top + kinds.indexOf(kind) * rowHeight + 9, r: 3.6, fill: kind in KIND_COLOUR ? colour(KIND_COLOUR[kind]) : "var(--faint)", "fill-opacity": 0.75, class: "said" });
        dot.addEventListener("pointermove", (event) => {
          moveAll(t);
          show(event, el("b", {}, `${clock(t, true)} · ${kind}${model ? ` · ${model}` : ""}${node ? ` on ${node}` : ""}`), el("div", {}, why));
        });
        dot.addEventListener("pointerleave", hide);
        f.root.append(dot);
      }
    },
  });
}
function sentences(policy) {
  const box = el("details", {}, el("summary", {}, `Decisions in words (${policy.sentences.length.toLocaleString("en")} of ${policy.decided.toLocaleString("en")})`));
  box.addEventListener("toggle", () => {
    if (!box.open || box.querySelector("input")) return;
    const search = el("input", { type: "search", placeholder: "a model, a node, a word", "aria-label": "filter decisions" }), host = el("div", { class: "said" });
    const paint = () => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const found = policy.sentences.filter((s) => words.every((w) => s.join(" ").toLowerCase().includes(w)));
      host.replaceChildren(table(["when", "what", "model", "node", "why"], found.slice(0, 300).map(([t, kind, model, node, why]) =>
        [clock(t, true), kind, model, node, el("td", { class: "wrap" }, why)])));
      if (found.length > 300) host.append(el("p", { class: "soft" }, `… and ${found.length - 300} more`));
    };
    search.addEventListener("input", paint);
    box.append(search, host);
    paint();
  });
  return box;
}
function one(policy, host) {
  const line_ = policy.timeline, index = new Map(policy.layers.map((l, i) => [l.name, l.other ? -1 : i]));
  const rising = { name: "on its way, or leaving", values: line_.held.map((v, i) => Math.max(0, v - line_.serving[i])), colour: "var(--faint)", faint: true };
  const byModel = policy.layers.map((l) => ({ name: l.name, values: l.values, colour: colour(index.get(l.name)) }));
  const byPool = policy.pools.map((l, i) => ({ name: `${l.name} pool`, values: l.values, colour: colour(i) }));
  const chart = el("div", {}), high = Math.max(1, ...line_.held) * 1.06;
  const paint = (kind) => {
    const layers = [...(kind === "by pool" ? byPool : byModel).filter((l) => l.values.some((v) => v > 0)), rising];
    chart.replaceChildren();
    chart.append(legend(layers.map((l) => [l.name, l.colour])));
    stack(chart, layers, line_.width_s, { label: `devices ${kind}`, height: 250, low: 0, high, format: number });
  };
  host.append(el("div", { class: "bar-row" }, el("h3", {}, "Devices"), byPool.length ? tabs(["by model", "by pool"], "by model", paint) : ""), chart);
  paint("by model");
  host.append(el("h3", {}, "Decisions"), el("p", { class: "soft" }, "Point at one for its reason."));
  decisions(host, policy);
  host.append(el("h3", {}, "Replicas by model"), el("p", { class: "soft" }, "Darker is more; the most of each at the right."));
  heat(host, policy.replicas.map((r) => ({ name: r.name, value: `${number(r.most)} at most`, cells: r.values.map((v) => v || null), most: r.most })), line_.width_s * policy.replica_bins,
    (v, style, row) => mix(style.getPropertyValue("--card"), style.getPropertyValue("--c0"), 0.18 + 0.82 * v / Math.max(row.most, 1)), (v) => `${number(v || 0)} replicas`);
  host.append(el("h3", {}, "Promises kept by application"), el("p", { class: "soft" }, "The busiest first. Green: 99 % or more; amber: less; red: 80 % or less."));
  heat(host, policy.heat.map((r) => ({ name: r.name, value: `${percent(r.overall)} of ${whole(r.requests)}`, cells: r.cells, bad: r.missed })), policy.heat_s, shadeOfShare, (v) => (v == null ? "no request" : percent(v)));
  host.append(sentences(policy));
  host.append(el("details", {}, el("summary", {}, "How long models took to come and go"), table(["order", "model", "times", "mean", "least", "most"],
    policy.transitions.map((t) => [t.verb, el("td", { class: "left" }, t.model), t.count, seconds(t.mean_s), seconds(t.least_s), seconds(t.most_s)]))));
  host.append(el("details", {}, el("summary", {}, "Hours"), table(["from", "requests", "ended", "TTFT", "TPOT", "both", "both, of those that ended"],
    policy.hours.map((h) => [clock(h.from_s), h.requests.toLocaleString("en"), h.ended.toLocaleString("en"), percent(h.attainment.of_all.ttft), percent(h.attainment.of_all.tpot), percent(h.attainment.of_all.overall), percent(h.attainment.of_ended.overall)]))));
  host.append(el("details", {}, el("summary", {}, "Requests that missed by the most"), table(["request", "application", "came", "tokens in", "out", "first token after", "a token", "times over", "node"],
    policy.latest.map((l) => [l.id, el("td", { class: "left" }, l.app), clock(l.at_s, true), l.input_tokens, l.output_tokens, seconds(l.ttft_s), seconds(l.tpot_s), number(l.times_over), l.node]))));
  if (policy.failures.length) host.append(el("details", {}, el("summary", {}, "Requests that did not get all their tokens"), table(["why", "requests", "one of them"],
    policy.failures.map(([why, count, example]) => [el("td", { class: "wrap" }, why), count.toLocaleString("en"), example]))));
}
function policies() {
  const names = DATA.policies.map((p) => p.name), host = el("div", {});
  const pick = (name) => {
    host.replaceChildren();
    one(DATA.policies.find((p) => p.name === name), host);
  };
  const box = section("Inside the cluster", "What one policy did, and why.", names.length > 1 ? tabs(names, names[0], pick) : "");
  box.append(host);
  pick(names[0]);
}

attainment();
devices();
trade();
policies();
let waiting = 0;
addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => repaintAll(), 120); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => repaintAll());
