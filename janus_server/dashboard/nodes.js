// The map of the cluster: one card a node, its device's pages as areas in the colours of their models, what is being
// copied, who leads. A node that was there and is not any more stays for a while, greyed.
const GONE_S = 120;

// Areas of one device: a column a model, as wide as its pages; KV cache above weights.
class Device {
  constructor() {
    this.node = el("div", { class: "device", role: "img" });
    this.areas = new Keyed(this.node, (area) => this.make(area));
  }
  make(area) {
    const name = el("span", { class: "area-name" }), size = el("span", { class: "area-size" });
    const kv = el("div", { class: "area-kv" });
    const node = el("div", { class: `area-box ${area.kind}` }, kv, el("div", { class: "area-text" }, name, size));
    if (area.kind === "model") style(node, "--m", colours.of(area.name));
    const update = (now) => {
      style(node, "flex-grow", String(now.pages));
      style(kv, "height", `${now.pages ? (100 * now.kv) / now.pages : 0}%`);
      say(name, now.name);
      say(size, bytes(now.bytes));
      mark(node, "slim", now.share < 0.12);
      hint(node, now.title);
    };
    return { node, update };
  }
  update(view) {
    const size = (pages) => bytes(pages * view.page_bytes);
    const areas = view.models.filter((one) => one.weight_pages + one.kv_pages > 0).map((one) => ({
      key: `m ${one.model}`, kind: "model", name: one.model, pages: one.weight_pages + one.kv_pages, kv: one.kv_pages,
      title: `${one.model}: weights ${size(one.weight_pages)}, KV cache ${size(one.kv_pages)}`,
    }));
    if (view.scratch_pages) areas.push({ key: "s", kind: "scratch", name: "scratch", pages: view.scratch_pages, kv: 0, title: `scratch ${size(view.scratch_pages)}` });
    areas.push({ key: "f", kind: "free", name: "free", pages: view.free_pages, kv: 0, title: `free ${size(view.free_pages)}` });
    const total = sum(areas.map((area) => area.pages)) || 1;
    this.areas.update(areas.map((area) => ({ ...area, bytes: area.pages * view.page_bytes, share: area.pages / total })), (area) => area.key);
    this.node.setAttribute("aria-label", areas.map((area) => area.title).join("; "));
  }
}

// What one model does on one node, in a line; a bar below it while something is under way.
function resident(first) {
  const facts = el("span", { class: "soft" }), stage = el("span", { class: "stage" });
  const bar = el("i", {}), why = el("span", { class: "soft" });
  const way = el("div", { class: "way" }, el("div", { class: "progress", role: "progressbar" }, bar), why);
  const trouble = el("div", { class: "trouble" });
  const node = el("li", {}, el("div", { class: "resident" }, dot(first.model), el("span", { class: "name" }, first.model), stage, facts), way, trouble);
  const update = (one) => {
    say(stage, one.draining ? "draining" : one.stage);
    stage.className = `stage ${one.draining ? "draining" : one.stage}`;
    const words = [];
    if (one.kv_pages) words.push(`KV ${bytes(one.kv_pages * one.page_bytes)}`);
    if (one.host_copy_bytes && one.stage === "warm") words.push(`copy ${bytes(one.host_copy_bytes)}`);
    if (one.running) words.push(`${whole(one.running)} running`);
    if (one.held) words.push(`${whole(one.held)} waiting`);
    if (one.pinned) words.push("pinned");
    say(facts, words.join(" · "));
    way.hidden = !one.under_way;
    if (one.under_way) underWay(one.under_way, way.firstChild, bar, why);
    trouble.hidden = !one.trouble;
    say(trouble, one.trouble || "");
  };
  return { node, update };
}

function underWay(order, progress, bar, why) {
  const known = order.total_bytes > 0, share = known ? Math.min(1, order.done_bytes / order.total_bytes) : 0;
  mark(progress, "unknown", !known);
  style(bar, "width", known ? `${(100 * share).toFixed(1)}%` : "30%");
  if (known) progress.setAttribute("aria-valuenow", Math.round(100 * share));
  else progress.removeAttribute("aria-valuenow");
  progress.setAttribute("aria-label", `${order.verb}: ${order.why}`);
  const far = known ? `${Math.floor(100 * share)} % of ${bytes(order.total_bytes)}` : `for ${lasting(order.for_s)}`;
  say(why, `${order.verb}, ${far}: ${order.why}`);
}

class NodeCard {
  constructor(first, actions) {
    this.device = new Device();
    this.crown = crown();
    this.badge = el("span", { class: "badge" });
    this.drain = actions.nodeButton(first.node);
    this.about = el("p", { class: "soft about" });
    this.link = el("a", { rel: "noreferrer", class: "soft" });
    this.trouble = el("p", { class: "trouble" });
    this.used = el("p", { class: "soft used" });
    this.host = el("div", { class: "host" });
    this.copies = new Keyed(this.host, (copy) => {
      const node = el("i", {});
      style(node, "--m", colours.of(copy.model));
      return { node, update: (now) => { style(node, "width", `${100 * now.share}%`); hint(node, now.title); } };
    });
    const list = el("ul", { class: "residents" });
    this.residents = new Keyed(list, resident);
    this.cold = el("p", { class: "faint others" });
    this.body = el("div", { class: "card-body" }, this.device.node, this.host, this.used, list, this.cold);
    this.node = el("article", { class: "card", "aria-label": first.node },
      el("header", {}, this.crown, el("h3", {}, first.node), this.badge, el("span", { class: "spring" }), this.drain.node),
      el("p", { class: "soft about" }, this.link, this.about), this.trouble, this.body);
  }

  update(view) {
    const dead = Boolean(view.gone || view.trouble);
    this.crown.toggleAttribute("hidden", !view.isLeader);
    mark(this.node, "leads", view.isLeader);
    mark(this.node, "dead", dead);
    say(this.badge, view.gone ? "gone" : view.trouble ? "no answer" : view.leaving ? "leaving" : view.draining ? (view.empty ? "empty: it can be stopped" : "draining") : view.isLeader ? "leads" : "");
    this.badge.className = `badge ${dead ? "bad" : view.leaving || view.draining ? "warn" : ""}`;
    this.badge.hidden = !this.badge.textContent;
    this.where(view);
    this.trouble.hidden = !dead;
    say(this.trouble, view.gone ? `left the cluster ${lasting(view.gone)} ago` : view.trouble || "");
    this.body.hidden = dead;
    this.drain.update(view, dead);
    if (!dead) this.inside(view);
  }

  where(view) {
    const asked = view.isAsked ? "this page's node" : "";
    const page = /^https?:\/\//.test(view.url) && !view.isAsked;
    say(this.link, page ? view.url.replace(/^https?:\/\//, "") : "");
    if (page) this.link.setAttribute("href", `${view.url.replace(/\/$/, "")}/dashboard`);
    this.link.hidden = !page;
    const words = [asked, view.up_s ? `up ${lasting(view.up_s)}` : "", view.version === "unknown" ? "" : view.version].filter(Boolean);
    say(this.about, words.join(" · "));
  }

  inside(view) {
    this.device.update(view);
    const used = view.pool_pages - view.free_pages;
    const share = view.pool_pages ? used / view.pool_pages : 0;
    const copied = view.models.filter((one) => one.host_copy_bytes > 0);
    const copies = bytes(sum(copied.map((one) => one.host_copy_bytes)));
    const host = view.host_budget_bytes ? ` · host copies ${copies}` : "";
    say(this.used, `${Math.round(100 * share)} % of ${bytes(view.pool_pages * view.page_bytes)} in use${host}`);
    this.copies.update(copied.map((one) => ({
      model: one.model, share: Math.min(1, one.host_copy_bytes / (view.host_budget_bytes || one.host_copy_bytes)),
      title: `copy of ${one.model} in host memory: ${bytes(one.host_copy_bytes)} of ${bytes(view.host_budget_bytes)}`,
    })), (copy) => copy.model);
    this.host.hidden = !view.host_budget_bytes;
    hint(this.host, `host memory: ${copies} of ${bytes(view.host_budget_bytes)} hold copies of weights`);
    const shown = view.models.filter((one) => one.stage !== "cold" || one.under_way || one.trouble || one.held || one.kv_pages || one.weight_pages);
    this.residents.update(shown.map((one) => ({ ...one, page_bytes: view.page_bytes })), (one) => one.model);
    const cold = view.models.length - shown.length;
    this.cold.hidden = !cold;
    say(this.cold, `${counted(cold, "model is", "models are")} cold here`);
  }
}

function crown() {
  const drawn = svg("svg", { class: "crown", viewBox: "0 0 24 18", width: 20, height: 15, role: "img", "aria-label": "leads" });
  drawn.append(svg("path", { d: "M2 4l5 5 5-8 5 8 5-5-2 11H4z" }), svg("rect", { x: 4, y: 16, width: 16, height: 2 }));
  return drawn;
}

class NodesSection {
  constructor(actions) {
    this.met = new Map(); // by node: {view, at}
    this.groups = new Keyed($("nodes"), (group) => {
      const title = el("h3", { class: "group" }), cards = el("div", { class: "cards" });
      const list = new Keyed(cards, (view) => { const card = new NodeCard(view, actions); return { node: card.node, update: (now) => card.update(now) }; });
      const update = (now) => { title.hidden = !now.titled; say(title, now.host || "host unknown"); list.update(now.nodes, (view) => view.node); };
      return { node: el("div", {}, title, cards), update };
    });
  }

  update(view, now) {
    for (const node of view.nodes) {
      const before = this.met.get(node.node)?.view;
      // Of one that does not answer nothing is known but what it was.
      const shown = node.trouble && before ? { ...node, host: node.host || before.host, url: node.url || before.url } : node;
      this.met.set(node.node, { view: shown, at: now });
    }
    const draining = new Set(view.nodes.flatMap((node) => (node.leads ? node.leads.draining : [])));
    const shown = [];
    for (const [name, { view: node, at }] of this.met) {
      if (now - at > GONE_S) { this.met.delete(name); continue; }
      const gone = at < now ? Math.max(1, now - at) : 0;
      shown.push({
        ...node, gone, isLeader: !gone && name === view.leader, isAsked: name === view.asked, draining: draining.has(name),
        known: Boolean(view.leader), others: view.nodes.length > 1,
      });
    }
    shown.sort((a, b) => a.node.localeCompare(b.node, "en", { numeric: true }));
    const hosts = [...new Set(shown.map((node) => node.host))].sort((a, b) => !a - !b || a.localeCompare(b));
    this.groups.update(hosts.map((host) => ({ host, titled: hosts.length > 1, nodes: shown.filter((node) => node.host === host) })), (group) => group.host);
  }
}
