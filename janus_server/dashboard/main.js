// Puts the parts together: a view comes, is kept, and every part shows it.
const history_ = new History();
const feed = new Feed(take, changed);
const actions = new Actions(feed);
const nodes = new NodesSection(actions);
const models = new ModelsSection(actions);
const applications = new ApplicationsSection();
const decisions = new DecisionsSection();
let latest = null;

function take(view) {
  const now = Date.now() / 1000;
  colours.meet(view.nodes.flatMap((node) => node.models.map((one) => one.model)));
  if (!latest) history_.recall(view, now);
  history_.add(view, now);
  latest = { view, at: now };
  draw();
}

function draw() {
  const { view, at } = latest;
  document.body.classList.add("filled");
  header(view, at);
  nodes.update(view, at);
  models.update(view, history_);
  applications.update(history_, at);
  decisions.update(view);
}

function header(view, at) {
  const up = view.nodes.filter((node) => !node.trouble && !node.leaving).length;
  const pace = history_.pace(at);
  const running = sum(view.nodes.flatMap((node) => node.models.map((one) => one.running)));
  const names = new Set(view.nodes.flatMap((node) => node.models.map((one) => one.model)));
  const waiting = sum([...names].map((name) => gathered(view, name, []).waiting));
  say($("fact-leader"), view.leader || "nobody");
  say($("fact-term"), `term ${view.term}`);
  say($("fact-nodes"), `${up}`);
  say($("fact-of"), `of ${view.nodes.length} up`);
  say($("fact-rate"), rate(pace.rate));
  say($("fact-running"), whole(running));
  say($("fact-waiting"), `${whole(waiting)} waiting`);
  say($("fact-kept"), percent(pace.kept));
  say($("fact-ended"), pace.ended ? `of ${whole(pace.ended)}` : "none ended");
  document.title = `${view.leader ? "" : "! "}Janus · ${up} of ${view.nodes.length} nodes`;
  const quiet = view.nodes.filter((node) => node.trouble).map((node) => node.node);
  const words = [];
  if (!view.leader) words.push("Nobody leads at the moment: requests go where they went before, and nothing is moved.");
  const led = view.nodes.find((node) => node.node === view.leader);
  if (view.leader && (!led || led.trouble)) words.push(`${view.leader} led and is not heard of: another node takes over when its time is up.`);
  if (quiet.length) words.push(`${quiet.join(", ")} ${quiet.length === 1 ? "does" : "do"} not answer.`);
  $("alarm").hidden = !words.length;
  say($("alarm"), words.join(" "));
}

// How fresh it is. Also said again every second, as time passes without an answer.
function changed(state) {
  const live = state.kind === "live";
  document.body.dataset.state = state.kind;
  const from = latest ? `, as ${latest.view.asked} sees it` : "";
  const old = latest ? `; shown is what it said ${lasting(Date.now() / 1000 - latest.at)} ago` : "";
  const words = {
    live: `live${from}`, asking: "asking …", locked: "the admin key is needed",
    refused: "the key was refused", stale: `${state.why}${old}`, broken: state.why,
  };
  say($("freshness"), words[state.kind]);
  $("locked").hidden = state.kind !== "locked" && state.kind !== "refused";
  say($("refusal"), state.kind === "refused" ? state.why : "");
  $("forget").hidden = !feed.key;
  if (!live && latest && state.kind !== "broken") { nodes.update(latest.view, latest.at); models.update(latest.view, history_); }
}

$("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  feed.use($("key").value);
  $("key").value = "";
});
$("forget").addEventListener("click", () => { feed.use(""); $("key").focus(); });
setInterval(() => { if (feed.state.kind === "stale") changed(feed.state); }, 1000);
document.addEventListener("visibilitychange", () => { if (!document.hidden) feed.soon(0); });
changed(feed.state);
feed.soon(0);
