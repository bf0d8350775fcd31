"""`janus bench live` in short: paced nodes answer a scenario's requests at the pace of its device, beside a twin."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import pytest

from bench import live
from bench.simulator import scenario
from bench.simulator.physics import Speed
from janus_server.errors import BadConfig

SMALL = """
[cluster]
kind = "A100 SXM"
hosts = 1
devices = 2
page = "400MiB"
host_memory = "200GB"

[memory]
context_tokens = 2048
floor_tokens = 512

[workload]
source = "apps"
duration_s = 12

[[apps]]
name = "one"
model = "small"
per_second = 3
lengths = "200/20"

[[apps]]
name = "two"
model = "small"
per_second = 1
lengths = "600/10"
tpot_s = 0.2

[[models]]
name = "small"
params_b = 3.0
layers = 40
hidden = 5120
heads = 40
kv_heads = 40
head_dim = 128
"""


def test_paced_nodes_answer_all_and_no_faster_than_their_device(tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    out, pictures = tmp_path / "out", tmp_path / "pictures"
    out.mkdir()
    plots = ["--plot", str(pictures)] if _has_matplotlib() else []
    assert live.main(["shadow", "--scenario", str(file), "--out", str(out), *plots]) == 0
    told = json.loads((out / "live_shadow.json").read_text())
    ran, simulated = told["runs"]
    asked = scenario.read(str(file), 0, {})
    calls = list(asked.calls)
    assert len(ran["answers"]) == len(simulated["answers"]) == len(calls)
    assert [one[4] for one in ran["answers"]] == [""] * len(calls)
    # Both answered the same requests; a step takes at least what reading the weights does, and a copy what it should.
    mine, theirs = (sorted(one[1] for one in run["answers"]) for run in (ran, simulated))
    assert mine == pytest.approx(theirs, abs=1e-3)
    least_s = Speed(asked.models[0], asked.nodes[0].shape).decode_s(1, 200)
    tokens = {index: calls[0].output_tokens for index in range(2)} | {call.app: call.output_tokens for call in calls}
    for app, _, ttft_s, tpot_s, _ in ran["answers"]:
        assert ttft_s + tpot_s * (tokens[app] - 1) >= 0.98 * least_s * tokens[app]
    loads = [one for one in ran["orders"] if one["verb"] == "load"]
    assert loads
    assert all(one["end_s"] - one["at_s"] >= 0.5 + 6e9 / 3e9 for one in loads)
    assert len(ran["notes"]) == 2  # each node says how well it kept its pace
    assert any(model[3] == "active" for model in ran["moved"])
    by_front = _predicted(out / "live_shadow_shadow", tokens=200)
    assert len(by_front) == 2
    one, other = (median(works) for works in by_front.values())
    assert 0.5 < one / other < 2.0  # also where the model never ran, the leader knows what its prompts take
    if plots:
        assert (pictures / "live_shadow.png").stat().st_size > 10_000


def test_a_scenario_that_live_nodes_cannot_stand_for_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.toml"
    file.write_text(SMALL.replace("400MiB", "64MiB"))
    with pytest.raises(BadConfig, match="must hold 512 tokens"):
        live.main(["shadow", "--scenario", str(file)])


def _predicted(folder: Path, tokens: int) -> dict[str, list[float]]:
    """By the node that requests came in at, what the leader took their prompts for, of the later half."""
    lines = [json.loads(line) for path in folder.glob("journal.*") for line in path.read_bytes().splitlines()]
    arrived = [ticket for line in lines for ticket in line.get("event", {}).get("arrived", ())]
    alike = [ticket for ticket in arrived if ticket["prompt_tokens"] == tokens]
    found: dict[str, list[float]] = {}
    for ticket in alike[len(alike) // 2 :]:
        found.setdefault(ticket["id"].partition(":")[0], []).append(ticket["work_s"])
    return found


def _has_matplotlib() -> bool:
    return find_spec("matplotlib") is not None
