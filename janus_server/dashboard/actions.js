// What an operator can ask for: wishes for models and nodes. What takes something away is asked about first; every answer
// is shown as the sentence that it came with. Nothing is sent without a key.
const WISHES = [
  { wish: "load", label: "Load", says: "Bring it in from its checkpoint" },
  { wish: "wake", label: "Wake", says: "Bring it in from its copy in host memory" },
  { wish: "fork", label: "Fork", says: "Copy it to another node from one that has it" },
  { wish: "sleep", label: "Sleep", says: "Take it off the devices, keep a copy in host memory", takes: "Its requests end first; the next one then waits until it was woken." },
  { wish: "evict", label: "Evict", says: "Take it off the devices and out of host memory", takes: "Its requests end first, and its copy in host memory is dropped; the next request has to wait for its checkpoint to be read." },
];
const NOTICE_S = 15;

class Actions {
  constructor(feed) {
    this.feed = feed;
    this.dialog = $("confirm");
    this.agreed = null;
    $("confirm-yes").addEventListener("click", () => this.dialog.close("yes"));
    $("confirm-no").addEventListener("click", () => this.dialog.close("no"));
    this.dialog.addEventListener("close", () => { if (this.agreed) this.agreed(this.dialog.returnValue === "yes"); });
  }

  // Why nothing can be asked for now; "" when something can.
  get forbidden() {
    const { kind, why } = this.feed.state;
    if (!this.feed.key) return "the admin key is needed for this: type it above";
    if (kind === "refused") return why;
    return kind === "stale" ? `not now: ${why}` : "";
  }

  // Buttons that know why they cannot be pressed.
  button(label, says, act) {
    const node = el("button", { type: "button" }, label);
    const judge = (more) => {
      const why = this.forbidden || more || "";
      // Not `disabled`: it could not be reached then, and its reason not be read.
      node.setAttribute("aria-disabled", String(Boolean(why)));
      hint(node, why || says);
      node.dataset.why = why;
    };
    node.addEventListener("click", async () => {
      if (node.dataset.why) return this.notice(`${label}: ${node.dataset.why}`, "bad");
      if (node.classList.contains("busy")) return;
      node.classList.add("busy");
      try { await act(); } finally { node.classList.remove("busy"); }
    });
    return { node, judge };
  }

  modelButtons(model) {
    const path = (wish) => `admin/models/${model.split("/").map(encodeURIComponent).join("/")}/${wish}`;
    const source = el("select", { "aria-label": "copy from" });
    const made = WISHES.map(({ wish, label, says, takes }) => this.button(label, says, async () => {
      if (takes && !(await this.confirm(`${label} ${model}?`, takes, label))) return;
      const body = wish === "fork" && source.value ? { source: source.value } : null;
      await this.send(path(wish), `${label} ${model}`, body);
    }));
    const pin = this.button("Pin", "Keep it on its devices, whatever others need", () => this.send(path(pinned ? "unpin" : "pin"), `${pinned ? "Unpin" : "Pin"} ${model}`, null));
    let pinned = false;
    const why = el("span", { class: "soft why" });
    const node = el("div", { class: "actions" }, ...made.slice(0, 3).map((one) => one.node), el("label", { class: "soft" }, "from ", source), ...made.slice(3).map((one) => one.node), pin.node, why);
    const update = (one) => {
      pinned = one.places.some((place) => place.pinned);
      say(pin.node, pinned ? "Unpin" : "Pin");
      made.forEach((button) => button.judge());
      pin.judge();
      say(why, this.forbidden);
      this.sources(source, one.places.filter((place) => place.stage === "active").map((place) => place.node));
    };
    return { node, update };
  }

  sources(select, names) {
    const before = [...select.options].slice(1).map((option) => option.value);
    if (select.options.length && JSON.stringify(before) === JSON.stringify(names)) return;
    const chosen = select.value;
    select.replaceChildren(el("option", { value: "" }, "any node"), ...names.map((name) => el("option", { value: name }, name)));
    select.value = names.includes(chosen) ? chosen : "";
  }

  nodeButton(node) {
    let drained = false, others = false;
    const button = this.button("Drain", "Empty this node, so that it can be stopped", async () => {
      const takes = "What it serves is brought up on other nodes first; then it takes no new requests. Requests that it has are finished.";
      if (!drained && !(await this.confirm(`Drain ${node}?`, takes, "Drain"))) return;
      const verb = drained ? "serve" : "drain";
      const path = `admin/nodes/${encodeURIComponent(node)}/${verb}`, what = `${drained ? "Use" : "Drain"} ${node}`;
      const end = await this.send(path, what, null);
      // Refused, since what it serves has no room elsewhere: that is the operator's to weigh.
      if (verb === "drain" && end.status === 409 && others && (await this.confirm(`Drain ${node} all the same?`, end.why, "Drain it"))) {
        await this.send(`${path}?force=true`, what, null);
      }
    });
    button.node.classList.add("small");
    const update = (view, dead) => {
      drained = view.draining;
      others = view.others;
      say(button.node, drained ? "Use again" : "Drain");
      button.judge(dead ? "it does not answer" : view.known ? "" : "nobody leads");
    };
    return { node: button.node, update };
  }

  // Whether the operator agrees; false at once while another question is open, which is not to be rewritten.
  async confirm(title, text, yes) {
    if (this.dialog.open) return false;
    say($("confirm-title"), title);
    say($("confirm-text"), text);
    say($("confirm-yes"), yes);
    this.dialog.returnValue = "no";
    this.dialog.showModal();
    return new Promise((resolve) => { this.agreed = resolve; });
  }

  async send(path, what, body) {
    const init = { method: "POST", headers: this.feed.headers(body ? { "Content-Type": "application/json" } : {}), redirect: "error" };
    if (body) init.body = JSON.stringify(body);
    try {
      const response = await fetch(path, init);
      const said = await response.json().catch(() => null);
      const why = (said && (said.why || (said.error && said.error.message))) || `the node answers ${response.status}`;
      this.notice(`${what}: ${why}`, response.ok ? "good" : "bad");
      return { status: response.status, why };
    } catch {
      this.notice(`${what}: the node did not answer; whether it was done is not known`, "bad");
      return { status: 0, why: "" };
    } finally {
      this.feed.soon(0);
    }
  }

  notice(text, kind) {
    const close = el("button", { type: "button", class: "small", "aria-label": "close", onclick: () => node.remove() }, "×");
    const node = el("li", { class: `notice ${kind}` }, el("p", {}, text), close);
    $("notices").append(node);
    while ($("notices").children.length > 5) $("notices").firstElementChild.remove();
    if (kind === "good") setTimeout(() => node.remove(), NOTICE_S * 1000);
  }
}
