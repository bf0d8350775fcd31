// What was promised to each application and what was kept of it over the last minute, drawn over time.
class ApplicationRow {
  constructor(one) {
    const { application, model } = one.app;
    const strong = (name, fact) => ({ name, value: (point) => point[fact], strong: true });
    const thin = (name, fact) => ({ name, value: (point) => point[fact], strong: false });
    this.facts = el("p", { class: "soft" });
    this.verdict = el("span", { class: "badge" });
    this.kept = new Chart("Promise kept", [strong("kept", "kept")], true);
    this.ttft = new Chart("First token (TTFT)", [strong("half of them within", "ttft50"), thin("99 % within", "ttft99")], false);
    this.tpot = new Chart("Each later token (TPOT)", [strong("half of them within", "tpot50"), thin("99 % within", "tpot99")], false);
    const charts = [this.kept, this.ttft, this.tpot];
    const title = el("h3", {}, dot(model), el("span", { class: "name" }, application));
    if (application !== model) title.append(el("span", { class: "soft" }, `of ${model}`));
    this.node = el("article", { class: "application", "data-application": application }, el("header", {}, title, this.verdict, this.facts),
      el("div", { class: "charts" }, ...charts.map((chart) => chart.node)));
    style(this.node, "--m", colours.of(model));
    this.charts = charts;
  }

  update(one, until, span) {
    const { app, points } = one, now = points[points.length - 1];
    const pair = (half, most) => (half === null ? "–" : `p50 ${seconds(half)}, p99 ${seconds(most)}`);
    this.kept.update(points, app.attain, until, span, app.attain === null ? "no promise" : percent(now.kept));
    this.ttft.update(points, app.ttft_s, until, span, pair(now.ttft50, now.ttft99));
    this.tpot.update(points, app.tpot_s, until, span, pair(now.tpot50, now.tpot99));
    const promised = [
      app.ttft_s === null ? "" : `first token in ${brief(app.ttft_s)}`, app.tpot_s === null ? "" : `${brief(app.tpot_s)} a token`,
    ].filter(Boolean).join(", ");
    const wanted = app.attain === null || !promised ? "no promise" : `promised: ${promised}, for ${goal(app.attain)}`;
    say(this.facts, `${wanted} · ${rate(now.rate)} requests/s${now.failed ? ` · ${whole(now.failed)} failed` : ""}`);
    const judged = app.attain !== null && now.kept !== null;
    const good = judged && now.kept >= app.attain;
    say(this.verdict, judged ? (good ? "kept" : "missed") : "");
    this.verdict.className = `badge ${good ? "good" : "bad"}`;
    this.verdict.hidden = !judged;
  }
}

class ApplicationsSection {
  constructor() {
    this.rows = new Keyed($("applications"), (one) => {
      const row = new ApplicationRow(one);
      return { node: row.node, update: (now) => row.update(now, this.until, this.span) };
    });
  }
  // Those without a request in the last minutes are named in a line: their charts would be empty.
  update(history, now) {
    this.until = now;
    this.span = history.span();
    const all = [...history.apps.values()].sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
    const busy = all.filter((one) => one.points.some((point) => point.rate > 0 || point.ended > 0));
    this.rows.update(busy, (one) => one.name);
    const idle = all.filter((one) => !busy.includes(one)).map((one) => one.name);
    $("idle").hidden = !idle.length;
    say($("idle"), `No request in these minutes for ${idle.join(", ")}.`);
  }
}
