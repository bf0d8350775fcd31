// Small charts over the last minutes, with the promise drawn as a line and one cursor that all of them share.
const TOP = 8, BOTTOM = 18, LEFT = 46, RIGHT = 6;

class Cursor {
  constructor() {
    this.charts = new Set();
    this.tip = $("tip");
  }
  show(event, t, parts) {
    for (const chart of this.charts) chart.point(t);
    this.tip.replaceChildren(...parts);
    this.tip.hidden = false;
    const box = this.tip.getBoundingClientRect();
    const right = event.clientX + 16 + box.width > innerWidth;
    style(this.tip, "left", `${Math.max(8, right ? event.clientX - box.width - 14 : event.clientX + 16)}px`);
    style(this.tip, "top", `${Math.max(8, Math.min(event.clientY + 14, innerHeight - box.height - 8))}px`);
  }
  hide() {
    for (const chart of this.charts) chart.point(null);
    this.tip.hidden = true;
  }
}
const cursor = new Cursor();

// Round numbers between 0 and high, about as many as wanted.
function ticks(high, wanted) {
  const rough = high / wanted || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((size) => size >= rough * 0.999);
  const found = [];
  for (let k = 0; k * step <= high * 1.0001; k += 1) found.push(k * step);
  return found;
}

const brief = (value) => (value >= 1 ? `${+value.toFixed(2)} s` : value ? `${+(value * 1000).toFixed(1)} ms` : "0");
function agoOf(t, now) {
  const back = Math.round(now - t);
  if (back < 1) return "now";
  return back < 60 || back % 60 ? `${Math.floor(back / 60) ? `${Math.floor(back / 60)} min ` : ""}${back % 60} s ago` : `${back / 60} min ago`;
}

// One point a step: each is of a whole minute, so those between say the same.
function thinned(points, since, step) {
  let before = null;
  return points.filter((point, i) => {
    const place = Math.floor(point.t / step);
    if (point.t < since || (place === before && i < points.length - 1)) return false;
    before = place;
    return true;
  });
}

// series are {name, value: (point) => number | null, strong}. The axis is of seconds, or of shares where `share` says so.
class Chart {
  constructor(title, series, share) {
    this.series = series;
    this.share = share;
    this.data = null;
    this.head = el("div", { class: "chart-head" }, el("span", {}, title), this.value = el("b", {}));
    this.root = svg("svg", { role: "img", height: 104 });
    this.node = el("div", { class: "chart" }, this.head, this.root);
    this.grid = svg("g", {});
    this.area = svg("path", { class: "area" });
    this.paths = series.map((one) => svg("path", { class: one.strong ? "line strong" : "line" }));
    this.limit = svg("line", { class: "promise" });
    this.rule = svg("line", { class: "rule", y1: TOP, visibility: "hidden" });
    this.root.append(this.grid, this.area, this.limit, ...this.paths, this.rule);
    this.width = 0;
    new ResizeObserver(([entry]) => { this.width = entry.contentRect.width; this.draw(); }).observe(this.node);
    // What nobody sees is not drawn: a page of sixty applications has a hundred and eighty charts.
    this.seen = false;
    new IntersectionObserver(([entry]) => { this.seen = entry.isIntersecting; this.draw(); }, { rootMargin: "300px" }).observe(this.node);
    this.root.addEventListener("pointermove", (event) => this.look(event));
    this.root.addEventListener("pointerleave", () => cursor.hide());
    cursor.charts.add(this);
  }

  // points of a History; promise is a number or null; until and span say what is shown.
  update(points, promise, until, span, value) {
    this.data = { points, promise, until, span };
    say(this.value, value);
    this.draw();
  }

  draw() {
    if (!this.data || !this.width || !this.seen) return;
    const { points, promise, until, span } = this.data;
    const height = 104, shown = thinned(points, until - span, span / 200);
    const values = shown.flatMap((point) => this.series.map((one) => one.value(point))).filter((value) => value !== null);
    const high = this.share ? 1 : this.ceiling(shown, values, promise);
    // Shares of a well-kept promise are all near 1: the axis begins below the lowest, not at 0.
    const low = this.share ? Math.max(0, Math.min(0.8, Math.floor((Math.min(...values, promise ?? 1) - 0.05) * 10) / 10)) : 0;
    this.x = (t) => LEFT + ((t - until + span) / span) * (this.width - LEFT - RIGHT);
    this.y = (value) => height - BOTTOM - ((value - low) / (high - low)) * (height - TOP - BOTTOM);
    this.axes(low, high, height);
    this.series.forEach((one, i) => this.paths[i].setAttribute("d", this.trace(shown, one.value)));
    this.area.setAttribute("d", this.filled(shown, height - BOTTOM));
    fill(this.limit, promise === null ? { visibility: "hidden" } : {
      visibility: "visible", x1: LEFT, x2: this.width - RIGHT, y1: this.y(promise), y2: this.y(promise),
    }, []);
    this.rule.setAttribute("y2", height - BOTTOM);
    this.root.setAttribute("viewBox", `0 0 ${this.width} ${height}`);
  }

  // One request that waited for a minute must not press all others and their promise to the ground: it leaves the picture.
  ceiling(shown, values, promise) {
    if (promise === null) return Math.max(...values, 0.001) * 1.08;
    const usual = Math.max(...shown.map((point) => this.series[0].value(point) ?? 0));
    return Math.min(Math.max(...values, promise * 1.25, 0.001) * 1.08, Math.max(promise * 4, usual * 1.4));
  }

  axes(low, high, height) {
    const parts = [];
    const label = (text, x, y, anchor) => { const node = svg("text", { x, y, "text-anchor": anchor }); node.textContent = text; parts.push(node); };
    const levels = this.share ? [low, (low + 1) / 2, 1] : ticks(high, 3.6);
    for (const level of levels) {
      parts.push(svg("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: this.y(level), y2: this.y(level) }));
      label(this.share ? `${Math.round(level * 100)} %` : brief(level), LEFT - 6, this.y(level) + 4, "end");
    }
    const { until, span } = this.data;
    label(span < 120 ? `−${span} s` : `−${span / 60} min`, LEFT, height - 4, "start");
    label("now", this.x(until), height - 4, "end");
    this.grid.replaceChildren(...parts);
  }

  trace(points, value) {
    let made = "", before = null;
    for (const point of points) {
      const v = value(point);
      if (v === null) { before = null; continue; }
      // A page that slept has a hole, which is no line.
      const joined = before !== null && point.t - before < 20;
      made += `${joined ? "L" : "M"}${this.x(point.t).toFixed(1)} ${this.y(Math.max(0, v)).toFixed(1)}`;
      before = point.t;
    }
    return made;
  }

  filled(points, floor) {
    const line = this.trace(points, this.series[0].value);
    return line.split("M").filter(Boolean).map((run) => {
      const spots = run.split("L"), first = spots[0].split(" ")[0], last = spots[spots.length - 1].split(" ")[0];
      return spots.length < 2 ? "" : `M${first} ${floor}L${spots.join("L")}L${last} ${floor}Z`;
    }).join("");
  }

  look(event) {
    if (!this.data || !this.x) return;
    const { points, promise, until, span } = this.data;
    const box = this.root.getBoundingClientRect();
    const t = until - span + ((event.clientX - box.left - LEFT) / (this.width - LEFT - RIGHT)) * span;
    const near = points.reduce((best, point) => (!best || Math.abs(point.t - t) < Math.abs(best.t - t) ? point : best), null);
    if (!near) return;
    const words = this.share ? percent : seconds;
    const row = (name, value) => el("div", { class: "row" }, el("span", {}, name), el("span", {}, value));
    const rows = this.series.map((one) => row(one.name, words(one.value(near))));
    if (promise !== null) rows.push(row("promised", this.share ? goal(promise) : seconds(promise)));
    cursor.show(event, near.t, [el("b", {}, `${clock(near.t)}, ${agoOf(near.t, until)}`), ...rows]);
  }

  point(t) {
    const inside = t !== null && this.data && this.x && t >= this.data.until - this.data.span;
    this.rule.setAttribute("visibility", inside ? "visible" : "hidden");
    if (inside) fill(this.rule, { x1: this.x(t), x2: this.x(t) }, []);
  }
}
