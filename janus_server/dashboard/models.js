// One row a model: where it is in which state, what runs and waits, what is expected of it; opened, what can be asked.
class ModelRow {
  constructor(name, actions) {
    this.name = name;
    const places = el("div", { class: "places" });
    this.places = new Keyed(places, (place) => this.place(place));
    this.running = el("td", { class: "number" });
    this.waiting = el("td", { class: "number" });
    this.served = el("td", {});
    this.expected = el("b", {});
    this.wanted = el("span", { class: "soft" });
    this.spark = svg("path", { class: "line strong" });
    const spark = svg("svg", { class: "spark", viewBox: "0 0 100 26", preserveAspectRatio: "none", role: "img" });
    spark.append(this.spark);
    this.sparkBox = spark;
    this.says = el("p", { class: "soft" });
    this.bench = actions.modelButtons(name);
    const opener = el("button", { type: "button", class: "opener", "aria-expanded": "false", onclick: () => this.toggle() }, dot(name), el("span", { class: "name" }, name));
    this.opener = opener;
    style(spark, "--m", colours.of(name));
    this.more = el("tr", { class: "more", hidden: true }, el("td", { colspan: 7 }, this.says, this.bench.node));
    this.row = el("tr", {}, el("th", { scope: "row" }, opener), el("td", {}, places), el("td", {}, spark), this.running, this.waiting, this.served,
      el("td", { class: "forecast" }, this.expected, this.wanted));
    // Rows of one model stay together: each has a table body of its own.
    this.node = el("tbody", { "data-model": name }, this.row, this.more);
  }

  toggle() {
    this.more.hidden = !this.more.hidden;
    this.opener.setAttribute("aria-expanded", String(!this.more.hidden));
  }

  place(first) {
    const node = el("span", { class: "place" });
    style(node, "--m", colours.of(this.name));
    const update = (now) => {
      say(node, now.node);
      node.className = `place ${now.stage}${now.served ? " served" : ""}${now.draining ? " draining" : ""}`;
      hint(node, `${now.stage} on ${now.node}${now.draining ? ", draining" : ""}${now.served ? ", requests go there" : ""}${now.under_way ? `, ${now.under_way.verb} under way` : ""}`);
      mark(node, "moving", now.under_way);
    };
    return { node, update };
  }

  update(one) {
    this.places.update(one.places, (place) => place.node);
    say(this.running, whole(one.running));
    say(this.waiting, whole(one.waiting));
    mark(this.waiting, "warn", one.waiting > 0);
    say(this.served, one.served.length ? [...one.served].sort().join(", ") : "nowhere");
    mark(this.served, "faint", !one.served.length);
    const said = one.prediction;
    say(this.expected, said ? `${percent(said.predicted)} expected` : "–");
    say(this.wanted, said ? `${goal(said.target)} wanted, at ${rate(said.requests_per_s)} requests/s` : "");
    mark(this.expected, "missed", said && said.predicted < said.target);
    say(this.says, said ? said.says : "Nothing is expected of it: it has no promise yet, or was not measured.");
    this.sparkle(one.points, one.places.length);
    this.bench.update(one);
  }

  // How many replicas were active.
  sparkle(points, most) {
    if (!points.length) return;
    const until = points[points.length - 1].t, since = Math.min(points[0].t, until - 60);
    const x = (t) => ((t - since) / (until - since)) * 100, y = (count) => 24 - (22 * count) / Math.max(1, most);
    let drawn = "", before = null;
    for (const point of points) {
      if (before === null) drawn = `M${x(point.t).toFixed(1)} ${y(point.active).toFixed(1)}`;
      else if (before.active !== point.active) drawn += `H${x(point.t).toFixed(1)}V${y(point.active).toFixed(1)}`;
      before = point;
    }
    this.spark.setAttribute("d", `${drawn}H100`);
    this.sparkBox.setAttribute("aria-label", `${before.active} of ${most} active; the line is of the last minutes`);
  }
}

// What a model is on all nodes together. Those that wait at a front also wait at the leader: they are counted once.
function gathered(view, name, points) {
  const leads = view.nodes.map((node) => node.leads).find(Boolean);
  const places = [];
  let running = 0, held = 0;
  for (const node of view.nodes) for (const one of node.models) {
    if (one.model !== name) continue;
    const served = Boolean(leads && (named(leads.served, name) || []).includes(node.node));
    places.push({ ...one, node: node.node, served });
    running += one.running;
    held += one.held;
  }
  return {
    name, places, running, points, served: (leads && named(leads.served, name)) || [],
    waiting: Math.max(held, (leads && named(leads.waiting, name)) || 0),
    prediction: (leads && named(leads.predictions, name)) || null,
  };
}

class ModelsSection {
  constructor(actions) {
    this.list = new Keyed($("models"), (one) => { const row = new ModelRow(one.name, actions); return { node: row.node, update: (now) => row.update(now) }; });
  }
  update(view, history) {
    const names = [...new Set(view.nodes.flatMap((node) => node.models.map((one) => one.model)))].sort();
    this.list.update(names.map((name) => gathered(view, name, history.replicas.get(name) || [])), (one) => one.name);
    $("no-models").hidden = names.length > 0;
  }
}
