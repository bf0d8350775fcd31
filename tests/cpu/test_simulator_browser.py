"""The HTML report in a real browser: it draws without an error, answers the pointer, and fetches nothing.

Skipped where no Chromium is installed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bench.simulator import html
from bench.simulator.recorder import Record
from bench.simulator.records import AppSpec, Call, ModelSpec, NodeSpec, Outcome, Scenario
from bench.simulator.summary import summarise
from janus_server.orders import KnownModel, Order, Stage, Verb
from janus_server.sched.shapes import DeviceShape, ModelShape

HOSTILE = "<img src=x onerror=window.broken=1>"
# What a reader would do; what came of it is left in an element that --dump-dom shows.
ERRORS = "<script>window.failures = []; addEventListener('error', (e) => failures.push(String(e.message)));</script>"
VISIT = """<script>
const seen = {};
const move = (x, y) => new PointerEvent("pointermove", { clientX: x, clientY: y, bubbles: true });
const point = (node, x, y) => node.dispatchEvent(move(x, y));
const text = () => document.getElementById("tip").textContent;
const middle = (node) => {
  const b = node.getBoundingClientRect();
  return [b.left + b.width / 2, b.top + b.height / 2];
};
const named = (name) => [...document.querySelectorAll("button")].filter((b) => b.textContent === name);
const pick = (name) => named(name).forEach((b) => b.click());
seen.charts = document.querySelectorAll("svg").length;
seen.paths = document.querySelectorAll("svg path").length;
const cover = document.querySelector("svg rect[fill=transparent]");
point(cover, ...middle(cover));
seen.attainment = text();
seen.rules = [...document.querySelectorAll("svg line[visibility=visible]")].length;
const dot = document.querySelector("circle.said");
point(dot, ...middle(dot));
seen.sentence = text();
seen.dots = document.querySelectorAll("circle.said").length;
const maps = [...document.querySelectorAll("canvas")];
const box = maps[1].getBoundingClientRect();
point(maps[1], box.left + 3, box.top + 3);
seen.cell = text();
const pixels = maps[1].getContext("2d").getImageData(0, 0, maps[1].width, maps[1].height).data;
seen.painted = [...pixels].some((v) => v > 0);
const details = document.querySelector("details");
details.open = true;
pick("second");
seen.other = document.querySelectorAll("circle.said").length;
pick("by pool");
seen.pools = [...document.querySelectorAll(".legend")].map((l) => l.textContent).join("|");
pick("tpot");
seen.resources = performance.getEntriesByType("resource").length;
seen.broken = window.broken === 1;
seen.failures = failures;
const said = document.createElement("pre");
said.id = "seen";
said.textContent = JSON.stringify(seen);
document.body.append(said);
</script>"""


@pytest.fixture
def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell"):
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium is installed")


def recorded(decisions: int) -> Record:
    shape = DeviceShape(name="x", flops=1e14, memory_bytes=6.4e10, bandwidth_bytes_s=1e12, link_bytes_s=1e11)
    model = ModelShape(name="m", parameters=1e9, layers=1, hidden=1, kv_bytes=1, pair_flops=1)
    known = KnownModel(model="m", weight_pages=1, host_bytes=1, longest_pages=1)
    made = Scenario(
        name=HOSTILE, duration_s=100.0, calls=(), subjects={},
        nodes=(NodeSpec(name="n0", host="h", domain="d", shape=shape, pool_pages=9, page_bytes=1, host_bytes=1),),
        models=(ModelSpec(known=known, shape=model),),
        apps=(AppSpec(name=HOSTILE, model="m", ttft_s=1.0, tpot_s=0.1),),
    )  # fmt: skip
    record = Record(made)
    record.timeline.ask_pools = lambda: {"m": "steady"}
    record.stage("n0", "m", Stage.ACTIVE, 0.0)
    record.moment(0.0, ["n0"])
    for i in range(200):
        record.outcome(Outcome(Call(i, i / 2, 0, 10, 10), 0.5 + (i % 10 == 0), 0.05, i / 2 + 1, "n0"))
    for k in range(decisions):
        record.decision(Order(term=1, id=k, node="n0", model="m", verb=Verb.WAKE, why=f"{HOSTILE} asked {k}"), 10.0 * k)
    record.closed(101.0)
    return record


def dumped(browser: str, page: Path, profile: Path) -> str:
    asked = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,2000",
             f"--user-data-dir={profile}", "--virtual-time-budget=4000", "--dump-dom", page.as_uri()]  # fmt: skip
    return subprocess.run(asked, capture_output=True, text=True, timeout=120, check=True).stdout


def test_the_report_is_drawn_and_answers_the_pointer(tmp_path: Path, chromium: str) -> None:
    records = {"first": recorded(3), "second": recorded(5)}
    text = html.page(records, {name: summarise(record) for name, record in records.items()})
    page = tmp_path / "report.html"
    page.write_text(text.replace("<body>", f"<body>{ERRORS}").replace("</body>", f"{VISIT}</body>"), encoding="utf-8")
    shown = re.search(r'<pre id="seen">(.*?)</pre>', dumped(chromium, page, tmp_path / "profile"), re.DOTALL)
    assert shown is not None, "the page did not run to its end"
    seen = json.loads(shown[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert seen["failures"] == [] and not seen["broken"] and seen["resources"] == 0
    assert seen["charts"] >= 6 and seen["paths"] >= 5 and seen["painted"]
    assert "first" in seen["attainment"] and "90.0 %" in seen["attainment"] and seen["rules"] >= 3
    assert (seen["dots"], seen["other"]) == (3, 5)
    assert f"wake · m on n0{HOSTILE} asked 0" in seen["sentence"]
    assert HOSTILE in seen["cell"] and "%" in seen["cell"]
    assert "steady pool" in seen["pools"]
