// What the leader ordered and found, with its sentences, newest first, with those of leaders before it.
const MOST_DECISIONS = 500;
const DRAWN_DECISIONS = 200;

class DecisionsSection {
  constructor() {
    this.known = new Map(); // by what they say: {key, ...decision}
    this.model = "";
    this.words = "";
    this.list = new Keyed($("decisions"), (one) => this.make(one));
    $("by-model").addEventListener("change", (event) => { this.model = event.target.value; this.draw(); });
    $("by-words").addEventListener("input", (event) => { this.words = event.target.value.trim().toLowerCase(); this.draw(); });
  }

  make(one) {
    const about = el("span", { class: "what" }, one.model ? dot(one.model) : null, el("span", { class: "name" }, one.model || one.node || "cluster"));
    if (one.model && one.node) about.append(el("span", { class: "soft" }, `on ${one.node}`));
    const time = el("time", { datetime: new Date(one.time * 1000).toISOString(), title: `term ${one.term}` }, clock(one.time));
    const what = one.verb && one.kind !== "order" && one.kind !== "decided" ? `${one.verb} ${one.kind}` : one.verb || one.kind;
    const node = el("li", { class: one.kind }, time, el("span", { class: `kind ${one.kind}` }, what), about, el("p", {}, one.why));
    return { node, update: () => {} };
  }

  update(view) {
    for (const node of view.nodes) for (const one of [...node.decided, ...(node.leads ? node.leads.decisions : [])]) {
      const key = JSON.stringify([one.time, one.term, one.kind, one.model, one.node, one.verb, one.why]);
      if (!this.known.has(key)) this.known.set(key, { key, ...one });
    }
    const sorted = [...this.known.values()].sort((a, b) => b.time - a.time || (a.key < b.key ? 1 : -1)).slice(0, MOST_DECISIONS);
    this.known = new Map(sorted.map((one) => [one.key, one]));
    this.choices(view);
    this.draw();
  }

  choices(view) {
    const names = [...new Set(view.nodes.flatMap((node) => node.models.map((one) => one.model)))].sort();
    const before = [...$("by-model").options].slice(1).map((option) => option.value);
    if (JSON.stringify(before) === JSON.stringify(names)) return;
    $("by-model").replaceChildren(el("option", { value: "" }, "all models"), ...names.map((name) => el("option", { value: name }, name)));
    $("by-model").value = names.includes(this.model) ? this.model : "";
    this.model = $("by-model").value;
  }

  draw() {
    const meant = (one) => (!this.model || one.model === this.model)
      && (!this.words || `${one.model} ${one.node} ${one.verb} ${one.kind} ${one.why}`.toLowerCase().includes(this.words));
    const shown = [...this.known.values()].filter(meant);
    this.list.update(shown.slice(0, DRAWN_DECISIONS), (one) => one.key);
    $("no-decisions").hidden = shown.length > 0;
    say($("no-decisions"), this.known.size ? "None of the decisions is about that." : "Nothing was decided yet.");
    say($("how-many"), shown.length > DRAWN_DECISIONS ? `the last ${DRAWN_DECISIONS} of ${shown.length}` : counted(shown.length, "decision", "decisions"));
  }
}
