"""What the simulator's commands cannot do is said in a sentence before they run, and nothing runs for ever."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
from simulator_toys import Script, live_through, model_spec, node_spec, scenario_of

from bench import plan, simulate, simulate_agreement, simulate_day, simulate_loads, simulate_sweep, workload
from bench.simulator import lengths, scenario
from bench.simulator.records import Fault, FaultKind, Scenario
from bench.traces import TraceSlice, read_trace
from janus_server.errors import BadConfig

APPS = '[workload]\nsource = "apps"\nduration_s = 20\n'
ONE = '[[apps]]\nname = "a"\nmodel = "Qwen3-4B"\n'


def read(folder: Path, text: str) -> Scenario:
    file = folder / "asked.toml"
    file.write_text(f"[cluster]\nhosts = 1\ndevices = 2\n{text}")
    return scenario.read(str(file), 0, {})


@pytest.mark.parametrize(("main", "arguments", "says"), [
    (simulate.main, ["--seed", "-1"], "--seed"),
    (simulate.main, ["--memory-parts", "-1"], "--memory-parts"),
    (plan.main, ["--target", "nan"], "--target"),
    (plan.main, ["--first", "0"], "--first"),
    (plan.main, ["--most", "0"], "--most"),
    (plan.main, ["--seeds", "999999999"], "--seeds"),
    (simulate_sweep.main, ["--target", "nan"], "--target"),
    (simulate_sweep.main, ["--within", "nan"], "--within"),
    (simulate_sweep.main, ["--hard", "inf"], "--hard"),
    (simulate_day.main, ["--seed", "-1"], "--seed"),
    (simulate_agreement.main, ["--seed", "-1"], "--seed"),
    (simulate_agreement.main, ["--scen", "smoke"], "did you mean"),
    (simulate_loads.main, ["--jsn", "x"], "did you mean"),
    (workload.main, ["--requests", "nan"], "--requests"),
    (workload.main, ["--requests", "1e30"], "--requests"),
    (workload.main, ["--seed", "-1"], "--seed"),
])  # fmt: skip
def test_arguments_out_of_range(
    main: Callable[[list[str]], int], arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr()
    assert ended.value.code == 2 and says in said.err and not said.out


@pytest.mark.parametrize(("main", "arguments", "says"), [
    (simulate.main, ["--burst", "nan"], "--burst nan"),
    (simulate.main, ["--burst", "60"], "--burst 60"),
    (simulate.main, ["--since", "60"], "--since 60"),
    (simulate.main, ["--memory-parts", "100"], "fits in none of 100 parts"),
    (simulate.main, ["--set", "duration_s=nan"], "workload.duration_s: .*, not nan"),
    (plan.main, ["--since", "99"], "--since 99"),
    (simulate_sweep.main, ["--scenario", "smoke", "--since", "99"], "--since 99"),
    (simulate_sweep.main, ["--key", "workload.factor", "--set", "factor=3"], "what is swept"),
    (simulate_agreement.main, ["--scenario", "smoke", "--policy", "janos"], "did you mean"),
])  # fmt: skip
def test_arguments_that_do_not_go_with_the_scenario(
    main: Callable[[list[str]], int], arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BadConfig, match=says):
        main(arguments)
    assert not capsys.readouterr().out


@pytest.mark.parametrize(("main", "flag"), [
    (simulate.main, "--out"), (simulate_sweep.main, "--out"), (simulate_day.main, "--out"), (plan.main, "--json"),
    (simulate_agreement.main, "--json"), (simulate_loads.main, "--json"), (workload.main, "--json"),
    (workload.main, "--plot"),
])  # fmt: skip
def test_what_cannot_be_written_is_said_before_the_run(
    main: Callable[[list[str]], int], flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(BadConfig, match="written"):
        main([flag, str(tmp_path / "file" / "below")])
    assert not capsys.readouterr().out and (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(("text", "says"), [
    (f"{APPS}start_s = 1e11\n{ONE}per_second = 1\n", "workload.start_s"),
    (f"{APPS}quiet_s = 1e11\n{ONE}per_second = 1\n", "workload.quiet_s"),
    (f"{APPS}{ONE}per_second = 1e11\n", "a second are the most"),
    (f'{APPS}{ONE}per_second = 150_000\n[[workload.bursts]]\napp = "a"\nat_s = 1\nmultiple = 1000\n', "are the most"),
    (f"{APPS}rates = {{ a = 2 }}\n{ONE}per_second = 1\n", "workload.rates is for the 62"),
    (f'{APPS}{ONE}per_second = 1\n[[models]]\nname = "Qwen3-4"\n', 'did you mean "Qwen3-4B"'),
    (f'{APPS}{ONE}per_second = 1\n[[models]]\nname = "b"\nlike = "Qwen3-4B"\nparams_b = 3\n', "give one of them"),
    (f'{APPS}{ONE}per_second = 1\n' + '[[models]]\nname = "Qwen3-4B"\nshards = 1\n' * 2, "is there twice"),
])  # fmt: skip
def test_numbers_and_entries_of_a_scenario(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=says):
        read(tmp_path, text)


@pytest.mark.parametrize("text", ["²/3", "1" * 5000 + "/1", "0/1", "1/-1"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(BadConfig, match="write one of"):
        lengths.named(text, (10, 10))


MULTI = b"t_ms,app,input_tokens,output_tokens\n0,a,5,5\n"
MOONCAKE = b'{"timestamp": 0, "input_length": 5, "output_length": 5}\n'


@pytest.mark.parametrize("data", [
    gzip.compress(MULTI * 100)[:40], b"\x1f\x8brubbish", MULTI + b"\xff,a,5,5\n", MULTI + b"0,a,5," + b"5" * 200_000,
    MULTI + b"0,a,5\n", MULTI + b"0,a,5," + b"9" * 23, MOONCAKE + b"[" * 100_000,
    MOONCAKE + b'{"timestamp": 0, "input_length": Infinity, "output_length": 5}',
    MOONCAKE + b'{"timestamp": ' + b"9" * 400 + b', "input_length": 5, "output_length": 5}',
])  # fmt: skip
def test_broken_traces_are_refused_by_name(data: bytes, tmp_path: Path) -> None:
    trace = tmp_path / "broken.csv"
    trace.write_bytes(data)
    with pytest.raises(BadConfig, match=r"broken\.csv: "):
        read(tmp_path, f"{APPS}[[workload.traces]]\npath = '{trace}'\n{ONE}")
    with pytest.raises(BadConfig, match=r"broken\.csv: "):
        read_trace(trace, TraceSlice())


HEAD = "app,llm,requests,in_mean,ttft_slo_s,tpot_slo_ms\n"


@pytest.mark.parametrize(("name", "data"), [
    ("requests.csv.gz", gzip.compress(MULTI)[:30]),
    ("requests.csv.gz", gzip.compress(b"t_ms,app,input_tokens,output_tokens\n\xff\n")),
    ("requests.csv.gz", gzip.compress(b"t_ms,app,input_tokens,output_tokens\n0,0,9000000000000000000,5\n")),
    ("apps.csv", HEAD.encode() + b"0,Qwen3-4B\n"),
    ("apps.csv", HEAD.encode() + b"0,Qwen3-4B,10,inf,1,50\n"),
    ("apps.csv", HEAD.encode() + b"0,Qwen3-4B,10,5,nan,50\n"),
    ("models.csv", bytes(range(256))),
    ("models.csv", b"llm,params_b,layers\nx\n"),
])  # fmt: skip
def test_a_broken_recorded_day_is_refused_by_name(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / "apps.csv").write_text(f"{HEAD}0,Qwen3-4B,10,5,1,50\n")
    (tmp_path / "models.csv").write_text("llm\n")
    (tmp_path / "requests.csv.gz").write_bytes(gzip.compress(b"t_ms,app,input_tokens,output_tokens\n0,0,5,5\n"))
    text = f"[workload]\nsource = 'workload62'\nfolder = '{tmp_path}'\nduration_s = 20\n"
    assert read(tmp_path, text).apps
    (tmp_path / name).write_bytes(data)
    with pytest.raises(BadConfig, match=str(tmp_path)):
        read(tmp_path, text)
    (tmp_path / name).unlink()
    with pytest.raises(BadConfig, match=name):
        read(tmp_path, text)


def test_copies_of_recorded_requests_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "few.csv").write_bytes(MULTI)
    text = f"{APPS}factor = 200\n[[workload.traces]]\npath = '{tmp_path}/few.csv'\nfactor = 100\n{ONE}"
    with pytest.raises(BadConfig, match="10,000 copies"):
        read(tmp_path, text)


def test_a_handful_of_pages_is_refused(tmp_path: Path) -> None:
    text = f'page = "10GB"\n{APPS}{ONE}per_second = 1\n'
    with pytest.raises(BadConfig, match="need 32 at least"):
        read(tmp_path, text)


def test_a_burst_after_the_end_is_not_reported(tmp_path: Path) -> None:
    bursts = "".join(f'[[workload.bursts]]\napp = "a"\nat_s = {at}\nmultiple = 2\n' for at in (5, 30))
    assert read(tmp_path, f"{APPS}{ONE}per_second = 1\n{bursts}").bursts_s == (5.0,)


def test_a_node_that_never_comes_back_does_not_hold_the_end_up() -> None:
    faults = [Fault(at_s=1.0, kind=FaultKind.NODE, node="n0", lasts_s=1e11)]
    world, _ = live_through(scenario_of([], [node_spec("n0")], [model_spec("a")], 5.0, faults), lambda: Script())
    assert world.now_s < 1000.0


def test_an_interrupt_leaves_what_had_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = simulate.attempt

    def attempt(asked: Scenario, name: str, how: simulate.How) -> object:
        if name == "llumnix":
            raise KeyboardInterrupt
        return whole(asked, name, how)

    monkeypatch.setattr(simulate, "attempt", attempt)
    assert simulate.main(["--policy", "static", "llumnix", "--quiet", "--set", "duration_s=3"]) == 130
    said = capsys.readouterr()
    assert "llumnix was interrupted" in said.err and "static" in said.out and "llumnix" not in said.out
