// What happened over time, made of counts that only grow: differences, a sliding minute, and the shares and percentiles
// in it. Pure: it is given the view and the time, and draws nothing.
const WINDOW_S = 60;
const KEPT_S = 600;
const STEP_S = 10;
const FACTS = ["requests", "failed", "ended", "attained"];

// The value that the share q of a histogram lies below, linear within a bucket. null without values. What lies beyond
// the last bound is said to lie on it: more is not known.
function quantile(bounds, counts, q) {
  const wanted = q * sum(counts);
  let seen = 0;
  for (let i = 0; i < counts.length; i += 1) {
    if (counts[i] && seen + counts[i] >= wanted) {
      if (i === bounds.length) return bounds[bounds.length - 1];
      const low = i ? bounds[i - 1] : 0;
      return low + ((bounds[i] - low) * (wanted - seen)) / counts[i];
    }
    seen += counts[i];
  }
  return null;
}

// now - before of every count, or null where one fell: another process counts there.
function grown(before, now) {
  const made = {};
  for (const fact of FACTS) made[fact] = now[fact] - before[fact];
  for (const spread of ["ttft", "tpot"]) {
    if (String(before[spread].bounds_s) !== String(now[spread].bounds_s)) return null;
    made[spread] = now[spread].counts.map((count, i) => count - before[spread].counts[i]);
  }
  const all = [...FACTS.map((fact) => made[fact]), ...made.ttft, ...made.tpot];
  return all.some((value) => value < 0) ? null : made;
}

// All of its counts, as a difference: from nothing.
function entire(now) { return { ...now, ttft: now.ttft.counts, tpot: now.tpot.counts }; }

// total + sign * part, in place. Counts are whole numbers: what was added can be taken off again without a rest.
function tally(total, part, sign) {
  for (const fact of FACTS) total[fact] += sign * part[fact];
  for (const spread of ["ttft", "tpot"]) part[spread].forEach((count, i) => { total[spread][i] = (total[spread][i] || 0) + sign * count; });
}
const nothing = () => ({ ...Object.fromEntries(FACTS.map((fact) => [fact, 0])), ttft: [], tpot: [] });

class History {
  constructor() {
    this.last = new Map(); // by node: {up_s, apps by name}
    this.apps = new Map(); // by name: {app, samples, their total, points}
    this.replicas = new Map(); // by model: points of how many are active
    this.began = null;
    this.seen = null;
  }

  // What came to nodes before the page was opened, in steps: as if it had been seen then. Before the first `add`.
  recall(view, now) {
    const apps = new Map(view.nodes.flatMap((node) => node.applications.map((app) => [app.application, app])));
    const stretches = view.nodes.flatMap((node) => node.past).map((one) => (
      { since: now - one.ago_s - one.over_s, until: now - one.ago_s, came: new Map(one.came.map((come) => [come.application, come])) }
    )).filter((one) => one.until > one.since && one.until > now - KEPT_S).sort((a, b) => a.until - b.until);
    if (!stretches.length) return;
    this.began = Math.max(now - KEPT_S, Math.min(...stretches.map((one) => one.since)));
    for (const [name, app] of apps) {
      const one = this.known(name, app);
      let next = 0;
      for (let t = this.began + STEP_S; t < now + STEP_S; t += STEP_S) {
        const at = Math.min(t, now);
        for (; next < stretches.length && stretches[next].until <= at; next += 1) this.sample(one, stretches[next], [stretches[next].came.get(name) || nothing()]);
        this.slide(one, at);
        if (at < now) one.points.push(this.point(one, at));
      }
    }
  }

  known(name, app) {
    if (!this.apps.has(name)) this.apps.set(name, { name, app, samples: [], total: nothing(), points: [] });
    return this.apps.get(name);
  }

  // What came between `since` and `until`.
  sample(one, { since, until }, parts) {
    const sample = { since, until, ...nothing() };
    for (const part of parts) tally(sample, part, 1);
    one.samples.push(sample);
    tally(one.total, sample, 1);
  }

  slide(one, now) {
    while (one.samples.length && one.samples[0].until <= now - WINDOW_S) tally(one.total, one.samples.shift(), -1);
  }

  // Takes a view in. now is the page's own time in seconds.
  add(view, now) {
    const since = this.seen;
    this.began = this.began ?? now;
    this.seen = now;
    const fresh = new Map();
    for (const node of view.nodes) if (!node.trouble) this.differ(node, fresh);
    for (const name of new Set([...this.apps.keys(), ...fresh.keys()])) this.extend(name, fresh.get(name), since, now);
    this.count(view, now);
  }

  differ(node, fresh) {
    const before = this.last.get(node.node);
    const same = before && before.up_s <= node.up_s;
    const apps = new Map(node.applications.map((app) => [app.application, app]));
    for (const [name, app] of apps) {
      if (!fresh.has(name)) fresh.set(name, { app, parts: [] });
      // Another process, or an application that is new there, has counted all of it since.
      const old = same && before.apps.get(name);
      const part = old ? grown(old, app) : before && entire(app);
      if (part) fresh.get(name).parts.push(part);
    }
    this.last.set(node.node, { up_s: node.up_s, apps });
  }

  extend(name, fresh, since, now) {
    const one = this.known(name, fresh && fresh.app);
    if (fresh) one.app = fresh.app;
    if (since !== null && fresh && fresh.parts.length) this.sample(one, { since, until: now }, fresh.parts);
    this.slide(one, now);
    while (one.points.length && one.points[0].t <= now - KEPT_S) one.points.shift();
    one.points.push(this.point(one, now));
  }

  // What the last minute says. Shares and percentiles are null where nothing ended in it.
  point(one, now) {
    const { ttft, tpot } = one.app;
    const total = one.total;
    if (!one.samples.length) return { t: now, rate: 0, ended: 0, failed: 0, kept: null, ttft50: null, ttft99: null, tpot50: null, tpot99: null };
    const over = Math.max(1, now - one.samples[0].since);
    return {
      t: now, rate: total.requests / over, ended: total.ended, failed: total.failed,
      kept: total.ended ? total.attained / total.ended : null,
      ttft50: quantile(ttft.bounds_s, total.ttft, 0.5), ttft99: quantile(ttft.bounds_s, total.ttft, 0.99),
      tpot50: quantile(tpot.bounds_s, total.tpot, 0.5), tpot99: quantile(tpot.bounds_s, total.tpot, 0.99),
    };
  }

  count(view, now) {
    const active = new Map();
    for (const node of view.nodes) for (const model of node.models) {
      active.set(model.model, (active.get(model.model) || 0) + (model.stage === "active"));
    }
    for (const name of new Set([...this.replicas.keys(), ...active.keys()])) {
      const kept = (this.replicas.get(name) || []).filter((point) => point.t > now - KEPT_S);
      kept.push({ t: now, active: active.get(name) || 0 });
      this.replicas.set(name, kept);
    }
  }

  // Requests a second of all together over the last ten seconds, and the share of the last minute's that was kept.
  pace(now) {
    const all = [...this.apps.values()].flatMap((one) => one.samples);
    const late = ({ since, until }) => (since < now - 10 ? Math.max(0, until - now + 10) / (until - since) : 1);
    const over = Math.max(1, Math.min(10, now - this.began));
    const ended = sum(all.map((sample) => sample.ended));
    return {
      rate: sum(all.map((sample) => sample.requests * late(sample))) / over,
      kept: ended ? sum(all.map((sample) => sample.attained)) / ended : null,
      ended,
    };
  }

  // From when the charts are drawn: as far as there is something, in round steps.
  span() { return [60, 120, 300, KEPT_S].find((step) => this.seen - this.began <= step) || KEPT_S; }
}
