"""Experiments of the simulator: lead-ins, sweeps, whole days, tables, and rules of dispatch in another small world."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bench import dispatch_world, simulate_day, simulate_sweep
from bench.simulator import report, scenario
from bench.simulator.attempts import How, attempt
from bench.simulator.batching import Rules
from bench.simulator.run import physics_of
from bench.simulator.summary import summarise
from bench.simulator.sweep import search
from janus_server.errors import BadConfig
from janus_server.sched.jobs import Job

SMALL = """
[cluster]
hosts = 1
devices = 2
host_memory = "400GB"
[workload]
source = "apps"
duration_s = 20
[[apps]]
name = "a"
model = "Qwen3-1.7B"
per_second = 20
lengths = "200/10"
[[workload.bursts]]
app = "a"
at_s = 5
multiple = 3
"""


def written(folder: Path, text: str = SMALL) -> str:
    path = folder / "small.toml"
    path.write_text(text)
    return str(path)


# A lead-in


def test_what_is_quiet_comes_first_and_what_leads_in_is_not_counted(tmp_path: Path) -> None:
    file = written(tmp_path)
    plain = scenario.read(file, 0, {})
    led = scenario.read(file, 0, {"quiet_s": "7", "since_s": "4"})
    assert (led.duration_s, led.since_s, led.bursts_s) == (27.0, 11.0, (12.0,))
    assert (plain.duration_s, plain.since_s, plain.bursts_s) == (20.0, 0.0, (5.0,))
    later = [call._replace(at_s=call.at_s + 7.0) for call in plain.calls]
    assert [tuple(call) for call in led.calls] == [pytest.approx(tuple(call)) for call in later]
    found = summarise(attempt(led, "static", How(quiet=True)))
    assert found["requests"] == sum(call.at_s >= 11.0 for call in later) < len(later)
    assert found["attainment"]["of_all"]["overall"] == 1.0  # the cluster was in place
    with pytest.raises(BadConfig, match="counted from second 20"):
        scenario.read(file, 0, {"since_s": "20"})


# Sweeps


@given(st.floats(0.3, 500.0), st.booleans(), st.floats(0.01, 0.5))
def test_a_sweep_ends_beside_the_limit(limit: float, rising: bool, within: float) -> None:
    """Whatever is the farthest at which enough is kept, upwards and downwards."""
    easy, hard = (1.0, 100.0) if rising else (100.0, 1.0)
    found = search(lambda x: 1.0 if (x <= limit if rising else x >= limit) else 0.5, 0.9, easy=easy, hard=hard,
                   within=within)  # fmt: skip
    kept = [x for x, share in found.tried.items() if share >= 0.9]
    if found.value is None:
        assert not kept and found.beyond == easy
        return
    assert found.value == (max(kept) if rising else min(kept))
    if found.beyond is None:
        assert found.value == hard
    else:
        ratio = max(found.beyond / found.value, found.value / found.beyond)
        assert ratio <= (1.0 + within) * 1.01  # three digits are kept of what is between


def test_a_sweep_that_makes_no_sense_is_a_sentence() -> None:
    for easy, hard, target in ((1.0, 1.0, 0.9), (0.0, 4.0, 0.9), (1.0, 4.0, 1.5)):
        with pytest.raises(BadConfig):
            search(lambda x: 1.0, target, easy=easy, hard=hard, within=0.1)


def test_the_sweep_command_answers_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heavy = SMALL.replace("per_second = 20", "per_second = 2").replace("200/10", "4000/1")
    file = written(tmp_path, heavy.replace("duration_s = 20", "duration_s = 10"))
    arguments = ["--scenario", file, "--policy", "static", "dispatch-turns", "--hard", "64", "--within", "0.9"]
    assert simulate_sweep.main([*arguments, "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "is too much" in shown and "the first bears" in shown
    kept = json.loads((tmp_path / "out" / "sweep.json").read_text())["policies"]["static"]
    tried = dict(kept["tried"])
    assert tried[kept["value"]] >= 0.9 > tried[kept["beyond"]]
    with pytest.raises(BadConfig, match="is what is swept"):
        simulate_sweep.main(["--set", "factor=2"])


# Days


def test_the_day_command_sizes_the_cluster_and_names_what_it_is_compared_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--scenario", written(tmp_path), "--policy", "static", "--quiet", "--out", str(tmp_path / "out")]
    assert simulate_day.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "what its peaks take" in shown and "less than whole hosts (2)" in shown and "kept by hour" in shown
    assert (tmp_path / "out" / "hours.png").stat().st_size > 1000
    with pytest.raises(BadConfig, match="--devices"):
        simulate_day.main(["--set", "hosts=2"])


# Tables


def test_a_narrow_terminal_gets_several_tables_and_no_cell_is_cut(tmp_path: Path) -> None:
    record = attempt(scenario.read(written(tmp_path), 0, {}), "static", How(quiet=True))
    found = {f"policy-number-{i}": summarise(record) for i in range(7)}
    for width, tables in ((80, 3), (400, 1)):
        out = io.StringIO()
        report.show(found, Console(file=out, width=width, highlight=False))
        text = out.getvalue()
        assert text.count("TTFT p50 ") == tables and "…" not in text
        assert all(text.count(name) >= 1 for name in found)
        assert "held on average" in " ".join(text.split())


# Rules of dispatch, in two worlds that share nothing but the planners


RULES = {
    "dispatch-edf": "EDF",
    "dispatch-prism": "Prism",
    "dispatch-least": "least load",
    "dispatch-turns": "round robin",
}


@pytest.mark.parametrize("rule", RULES)
def test_rules_of_dispatch_do_as_in_a_world_of_prompts_alone(rule: str, tmp_path: Path) -> None:
    """With answers of one token there is nothing but prompts: overload must do to each rule what it does there."""
    file = written(
        tmp_path,
        '[cluster]\nhosts = 1\ndevices = 3\nhost_memory = "400GB"\n[workload]\nsource = "apps"\nduration_s = 30\n'
        'quiet_s = 10\n[[apps]]\nname = "short"\nmodel = "Qwen3-8B"\nttft_s = 1\nper_second = 24\nlengths = "600/1"\n'
        '[[apps]]\nname = "long"\nmodel = "Qwen3-8B"\nttft_s = 4\nper_second = 1.2\nlengths = "16000/1"\n',
    )
    asked = scenario.read(file, 1, {})
    how = How(rules=Rules(one_prompt_at_a_time=True), quiet=True)
    here = summarise(attempt(asked, rule, how))["attainment"]["of_all"]["ttft"]
    work_s, ttft_s = physics_of(asked).work_s, [app.ttft_s for app in asked.apps]
    there = []
    for call in asked.calls:
        takes_s = work_s("Qwen3-8B", call.input_tokens)
        job = Job(f"j{call.id:06}", takes_s, call.at_s + ttft_s[call.app], call.at_s)
        there.append(dispatch_world.Arrival(job, takes_s))
    busy = sum(one.takes_s for one in there) / 30.0 / 3.0
    assert 1.05 < busy < 1.5
    kept = dispatch_world.on_time(there, 3, dispatch_world.policies()[RULES[rule]]) / len(there)
    assert here == pytest.approx(kept, abs=0.1)
