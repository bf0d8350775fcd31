// Asks the node for the whole cluster about once a second, for as long as the page is open. It keeps the admin key in
// this tab alone, and says how fresh what is shown is: live, stale, or why there is nothing.
const PERIOD_S = 1;
const SLOWEST_S = 5;
const GIVEN_UP_S = 4;
const KEPT_KEY = "janus-admin-key";

// The key that `janus dashboard` writes behind the # of the address. No browser sends that anywhere, and it does not stay
// in the address bar, where it could be read or copied along.
function handed() {
  if (!location.hash.startsWith("#key=")) return "";
  let key = "";
  try { key = decodeURIComponent(location.hash.slice(5)).trim(); } catch { /* not one of ours */ }
  history.replaceState(null, "", location.pathname + location.search);
  if (key) sessionStorage.setItem(KEPT_KEY, key);
  return key;
}

class Feed {
  constructor(onView, onState) {
    this.onView = onView;
    this.onState = onState;
    // The printed address, pasted while the page is open, loads nothing.
    addEventListener("hashchange", () => { const key = handed(); if (key) this.use(key); });
    this.key = handed() || sessionStorage.getItem(KEPT_KEY) || "";
    this.state = { kind: this.key ? "asking" : "locked", why: "", since: null };
    this.timer = null;
    this.misses = 0;
    this.asking = null;
    this.began = false; // what came before the page is asked for once
  }

  // A key that was refused is asked with no more: others wait for their turn to guess behind it.
  get unlocked() { return this.key !== "" && this.state.kind !== "refused"; }

  use(key) {
    this.key = key.trim();
    if (this.key) sessionStorage.setItem(KEPT_KEY, this.key);
    else sessionStorage.removeItem(KEPT_KEY);
    this.misses = 0;
    this.become(this.key ? "asking" : "locked", "");
    this.soon(0);
  }

  headers(more) { return { ...more, Authorization: `Bearer ${this.key}` }; }

  become(kind, why) {
    const since = kind === this.state.kind ? this.state.since : Date.now() / 1000;
    this.state = { kind, why, since };
    this.onState(this.state);
  }

  soon(wait_s) {
    clearTimeout(this.timer);
    if (this.asking) this.asking.abort();
    this.asking = null;
    this.timer = setTimeout(() => this.ask(), wait_s * 1000);
  }

  async ask() {
    if (!this.unlocked) return;
    const mine = this.asking = new AbortController();
    const late = setTimeout(() => mine.abort(), GIVEN_UP_S * 1000);
    const began = performance.now();
    try {
      const response = await fetch(this.began ? "admin/cluster" : "admin/cluster?past=true", { headers: this.headers(), cache: "no-store", redirect: "error", signal: mine.signal });
      const body = await response.json().catch(() => null);
      if (mine !== this.asking) return;
      this.judge(response, body);
    } catch {
      if (mine !== this.asking) return;
      this.misses += 1;
      this.become("stale", "the node does not answer");
    } finally {
      clearTimeout(late);
    }
    if (mine !== this.asking) return;
    this.asking = null;
    if (!this.unlocked) return;
    const took_s = (performance.now() - began) / 1000;
    const period_s = this.misses ? Math.min(SLOWEST_S, PERIOD_S * 2 ** (this.misses - 1)) : PERIOD_S;
    this.soon(Math.max(0.1, period_s - took_s));
  }

  // "" or why the page cannot draw it: that is the page's fault, and not the node's.
  shown(view) {
    try {
      this.onView(view);
      return "";
    } catch (error) {
      console.error(error);
      return `this page cannot draw what the node says: ${error}`;
    }
  }

  judge(response, body) {
    const why = body && body.error && body.error.message;
    if (response.ok && body && Array.isArray(body.nodes)) {
      this.misses = 0;
      this.began = true;
      const trouble = this.shown(body);
      this.become(trouble ? "broken" : "live", trouble);
    } else if (response.status === 401 || response.status === 403) {
      this.become("refused", why || `the node refused the key (${response.status})`);
    } else {
      this.misses += 1;
      this.become("stale", why || `the node answers ${response.status}`);
    }
  }
}
