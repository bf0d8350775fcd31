"""Load of the simulator: the generator's shape, copies of recorded requests, traces, and scenarios read from TOML."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import workload as rows
from bench.simulator import generator, models, scenario, spec
from bench.simulator.blocks import Block, Calls, joined, merged, sliced
from bench.simulator.generator import AppLoad, Burst, Tide, burst_factor
from bench.simulator.lengths import fixed, named, of_logs, zipf
from bench.simulator.records import FaultKind, Scenario
from bench.simulator.workload import Chosen, Mapped, Split, mapped, repeated, requests62
from janus_server.errors import BadConfig

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
DAY62 = TRACES / "workload62"
needs_traces = pytest.mark.skipif(not DAY62.is_dir(), reason=f"{DAY62} is not there")


def block(at_s: Sequence[float], apps: Sequence[int] | None = None) -> Block:
    n = len(at_s)
    ones = np.ones(n, dtype=np.int64)
    return Block(np.array(at_s, dtype=float), np.array(apps or [0] * n, dtype=np.int64), ones * 10, ones)


def whole(s: Scenario) -> Block:
    assert isinstance(s.calls, Calls)
    return joined(list(s.calls.blocks()))


def app(per_second: float, **more: object) -> AppLoad:
    return AppLoad("a", "Qwen3-8B", per_second, fixed(10), fixed(2), **more)  # type: ignore[arg-type]


# Blocks


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.lists(st.floats(0, 100), max_size=5), max_size=5), max_size=4))
def test_merged_is_the_sorted_whole(sources: list[list[list[float]]]) -> None:
    """However each source is cut into blocks, some of them empty."""
    cut = []
    for pieces in sources:
        flat = sorted(itertools.chain(*pieces))
        lengths = [len(piece) for piece in pieces]
        edges = [0, *itertools.accumulate(lengths)]
        cut.append([flat[low:high] for low, high in itertools.pairwise(edges)])
    found = [at for part in merged([iter([block(b) for b in pieces]) for pieces in cut]) for at in part.at_s.tolist()]
    assert found == sorted(itertools.chain(*(itertools.chain(*pieces) for pieces in sources)))


def test_a_slice_counts_from_its_start() -> None:
    parts = list(sliced(iter([block([1, 5]), block([6, 9, 10]), block([30])]), 5, 5))
    assert [part.at_s.tolist() for part in parts] == [[0.0], [1.0, 4.0]]


def test_calls_are_numbered_and_the_same_each_time() -> None:
    calls = Calls(lambda: iter([block([1, 2]), block([3])]))
    first, second = list(calls), list(calls)
    assert first == second and [(call.id, call.at_s) for call in first] == [(0, 1.0), (1, 2.0), (2, 3.0)]
    assert type(first[0].at_s) is float and type(first[0].app) is int


# The generator


def test_popularity_and_lengths_are_those_published() -> None:
    """12 % of applications have 80 % of requests, 30 % have 80 % of tokens: within two points at any seed."""
    for seed in range(2):
        load = rows.measure("g", generator.blocks(generator.shape62(), seed, 0.0, 86_400.0), 62)
        assert rows.share_of(load.requests, 0.12) == pytest.approx(0.80, abs=0.02)
        assert rows.share_of(load.tokens, 0.30) == pytest.approx(0.80, abs=0.03)
        assert load.requests.sum() == pytest.approx(603_000, rel=0.01)
        # Irregular arrivals of another application look like a burst now and then.
        given, found = {0, 2, 3, 5, 8, 11, 14, 19}, set(load.bursts.apps)
        assert len(found & given) >= 4 and len(found - given) <= 2
        assert 5.0 <= np.median(load.bursts.multiples) <= 10.0 and np.median(load.bursts.rises_s) <= 10.0


def test_a_slice_is_that_part_of_the_day() -> None:
    """Whatever the blocks; and at any volume the seed alone decides."""
    profile = generator.shape62(200_000)
    day = joined(list(generator.blocks(profile, 4, 0.0, 20_000.0)))
    part = joined(list(generator.blocks(profile, 4, 7000.25, 1234.0)))
    low, high = np.searchsorted(day.at_s, [7000.25, 8234.25])
    assert part.n == high - low > 1000
    np.testing.assert_allclose(part.at_s + 7000.25, day.at_s[low:high], rtol=0, atol=1e-6)
    np.testing.assert_array_equal(part.inputs, day.inputs[low:high])
    assert not np.array_equal(part.at_s[:50], joined(list(generator.blocks(profile, 5, 7000.0, 1234.0))).at_s[:50])


def test_blocks_rise_and_stay_small() -> None:
    """A thousand times the load makes more blocks, not larger ones."""
    last_s, sizes = 0.0, []
    for part in itertools.islice(generator.blocks(generator.shape62(603e6), 0, 0.0, 86_400.0), 4):
        assert (np.diff(part.at_s) >= 0).all() and part.at_s[0] >= last_s
        last_s = float(part.at_s[-1])
        sizes.append(part.n)
    assert max(sizes) < 100_000


@pytest.mark.parametrize("cv", [0.3, 1.0, 2.0])
def test_arrivals_are_as_irregular_as_asked(cv: float) -> None:
    at_s = joined(list(generator.blocks((app(5.0, cv=cv),), 1, 0.0, 20_000.0))).at_s
    gaps = np.diff(at_s)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)
    assert len(at_s) == pytest.approx(100_000, rel=0.03)


def test_a_given_burst_comes_on_top_and_a_tide_has_its_cycles() -> None:
    burst = Burst(100.0, 8.0, 3.0, 45.0)
    at_s = joined(list(generator.blocks((app(50.0, bursts=(burst,)),), 0, 0.0, 300.0))).at_s
    assert np.sum(at_s < 100) == pytest.approx(5000, rel=0.1)
    assert np.sum((at_s > 105) & (at_s < 145)) == pytest.approx(8 * 50 * 40, rel=0.1)
    tide = generator.rate(app(10.0, tide=Tide(1.5, 0.4, 120.0)), 0, 0, np.arange(0.0, 120.0, 0.5))
    assert tide.max() == pytest.approx(14.0, rel=0.02) and tide.min() == pytest.approx(6.0, rel=0.02)


def test_a_burst_rises_holds_and_decays() -> None:
    at_s = np.array([9.0, 11.0, 12.0, 20.0, 42.0, 62.0, 300.0])
    made = burst_factor([Burst(10.0, 6.0, 2.0, 30.0)], at_s)
    np.testing.assert_allclose(made, [1.0, 3.5, 6.0, 6.0, 6.0, 1.0 + 5.0 / np.e, 1.0])


def test_of_bursts_that_overlap_the_larger_counts() -> None:
    at_s = np.arange(0.0, 100.0)
    both = burst_factor([Burst(0.0, 3.0, 1.0, 50.0), Burst(20.0, 7.0, 1.0, 5.0)], at_s)
    assert both[10] == 3.0 and both[23] == 7.0


@pytest.mark.parametrize(("mean", "spread"), [(20.0, 0.03), (2500.0, 1.2), (16_000.0, 1.1)])
def test_lengths_have_the_mean_that_was_asked_for(mean: float, spread: float) -> None:
    sizes = of_logs([0, 0.1, 0.5, 0.9, 1], [-3, -1.28, 0, 1.28, 4], mean, spread, 32_768)
    drawn = sizes.at(np.random.default_rng(0).random(50_000))
    assert drawn.mean() == pytest.approx(mean, rel=0.03) and drawn.max() <= 32_768 and drawn.min() >= 1


def test_zipf_has_as_many_in_each_octave() -> None:
    drawn = zipf(20, 8000).at(np.random.default_rng(0).random(40_000))
    low, high = np.sum((drawn >= 100) & (drawn < 200)), np.sum((drawn >= 1000) & (drawn < 2000))
    assert low / high == pytest.approx(1.0, abs=0.1)


def test_named_lengths() -> None:
    sizes = named("mooncake", (8192, 1000))
    assert sizes[0].most == 8192 and sizes[1].most == 1000
    assert named("70/5", (100, 100)) == (fixed(70), fixed(5))
    with pytest.raises(BadConfig, match='did you mean "sharegpt"'):
        named("sharegpd", (1, 1))


# Copies


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 500), max_size=80), st.floats(0.1, 9.0), st.integers(1, 20))
def test_copies_are_in_order_near_their_request_and_as_many(at_s: list[float], factor: float, size: int) -> None:
    at_s = sorted(at_s)
    pieces = [block(at_s[i : i + size]) for i in range(0, len(at_s), size)]
    out = joined(list(repeated(pieces, np.array([factor]), np.array([10.0]), 1)))
    assert (np.diff(out.at_s) >= 0).all()
    assert int(factor) * len(at_s) <= out.n <= (int(factor) + 1) * len(at_s)
    if out.n:
        assert min(abs(out.at_s[:, None] - np.array(at_s)).min(1).tolist(), default=0) <= 10.0
        assert abs(out.at_s[:, None] - np.array(at_s)).min(1).max() <= 10.0 + 1e-9
    if factor <= 1.0:
        assert set(out.at_s.tolist()) <= set(at_s)


def test_copies_keep_what_they_hold_small() -> None:
    """A stream that never ends comes out as it goes in."""
    endless = (block([float(i), i + 0.5]) for i in itertools.count())
    made = list(itertools.islice(repeated(endless, np.array([75.6]), np.array([10.0]), 0), 50))
    assert max(part.n for part in made) < 5000 and sum(part.n for part in made) == pytest.approx(50 * 151.2, rel=0.25)


# Recorded


def _folder(tmp_path: Path, lines: str) -> Path:
    (tmp_path / "requests.csv.gz").write_text("t_ms,app,input_tokens,output_tokens\n" + lines)
    return tmp_path


CHOSEN = Chosen(np.array([0, -1, 1]), np.ones(3), np.full(3, 10.0))


def test_a_recorded_day_keeps_the_chosen_applications(tmp_path: Path) -> None:
    day = joined(list(requests62(_folder(tmp_path, "5,0,7,3\n9,1,8,4\n20,2,0,0\n"), CHOSEN, 0)))
    assert (day.at_s.tolist(), day.app.tolist()) == ([0.005, 0.02], [0, 1])
    assert (day.inputs.tolist(), day.outputs.tolist()) == ([7, 1], [3, 1])


@pytest.mark.parametrize(("lines", "said"), [
    ("5,0,7,3\n4,0,7,3\n", "line 3: '4,0,7,3' comes 1 ms before"),
    ("5,0,-7,3\n", "line 2: '5,0,-7,3' has a negative number"),
    ("5,0,7,3\n6,3,7,3\n", "line 3: '6,3,7,3' is of application 3, and there are 3"),
    ("5,0,7,3\n6,x,7,3\n", "line 3: '6,x,7,3' is not four whole numbers"),
    ("5,0,7,3\n6,1,7\n", "line 3: '6,1,7' is not four whole numbers"),
    ("5,0,7,3\n\n7,0,1,1\n", "line 3: '' is not four whole numbers"),
])  # fmt: skip
def test_a_bad_line_is_named(tmp_path: Path, lines: str, said: str) -> None:
    with pytest.raises(BadConfig, match=r".*") as error:
        list(requests62(_folder(tmp_path, lines), CHOSEN, 0))
    assert said in str(error.value)


def _azure(tmp_path: Path, *seconds: int) -> Path:
    path = tmp_path / "azure.csv"
    lines = [f"2023-11-16 18:15:{at:02d}.0000000,{100 + at},5" for at in seconds]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(lines) + "\n")
    return path


def test_a_trace_is_dealt_out(tmp_path: Path) -> None:
    path = _azure(tmp_path, 10, 11, 13, 20)
    dealt = joined(list(mapped(Mapped(path, (2, 0)), ["x", "y", "z"], 0)))
    assert (dealt.at_s.tolist(), dealt.app.tolist()) == ([0.0, 1.0, 3.0, 10.0], [2, 0, 2, 0])
    late = joined(list(mapped(Mapped(path, (1,), start_s=2.0), ["x", "y"], 0)))
    assert late.at_s.tolist() == [1.0, 8.0]


def test_a_trace_is_dealt_by_a_power_law(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    lines = [f"{i},ChatGPT,{i + 1},9" for i in range(3000)]
    path.write_text("Timestamp,Model,Request tokens,Response tokens\n" + "\n".join(lines))
    dealt = joined(list(mapped(Mapped(path, tuple(range(9)), Split.POWER), list("abcdefghi"), 0)))
    counts = np.bincount(dealt.app)
    assert counts[0] / counts[1] == pytest.approx(2**generator.EXPONENT, rel=0.2) and (np.diff(counts[:4]) < 0).all()
    with pytest.raises(BadConfig, match="line 2: no application here is named 'ChatGPT'"):
        list(mapped(Mapped(path, (0,), Split.NAMES), ["chat"], 0))


def test_a_trace_out_of_order_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"line 4: it comes 2 s before the line above it"):
        list(mapped(Mapped(_azure(tmp_path, 10, 13, 11), (0,)), ["x"], 0))


def test_a_negative_length_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 5}\n'
                    '{"timestamp": 10, "input_length": -5, "output_length": 5}\n')  # fmt: skip
    with pytest.raises(BadConfig, match="line 2"):
        list(mapped(Mapped(path, (0,)), ["x"], 0))


@needs_traces
def test_workload62_at_its_own_and_at_more_volume() -> None:
    """Its busiest hour has the 29,484 requests that its recipe counts, and three times as many at factor 3."""
    cut = {"source": "workload62", "start_s": "49535", "duration_s": "3600"}
    once = whole(scenario.read("day62", 0, cut))
    assert once.n == 29_484
    thrice = whole(scenario.read("day62", 0, {**cut, "factor": "3"}))
    assert thrice.n == pytest.approx(3 * 29_484, rel=0.01)
    half = whole(scenario.read("day62", 0, {**cut, "factor": "0.5"}))
    assert half.n == pytest.approx(29_484 / 2, rel=0.03) and set(half.at_s.tolist()) <= set(once.at_s.tolist())


@needs_traces
def test_the_generators_table_is_what_the_trace_gives() -> None:
    made = rows.derive(DAY62, TRACES / "servegen" / "clients.csv")
    kept = [line for line in generator.SHAPE.read_text().splitlines() if not line.startswith("#")]
    assert made.strip().splitlines() == kept


@needs_traces
def test_public_traces_go_through(tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_text(
        f'[workload]\nsource = "apps"\nduration_s = 600\n'
        f'[[workload.traces]]\npath = "{TRACES}/azure/AzureLLMInferenceTrace2023_code.csv.gz"\napps = ["code"]\n'
        f'[[workload.traces]]\npath = "{TRACES}/mooncake/conversation_trace.jsonl.gz"\napps = ["chat"]\nfactor = 2\n'
        '[memory]\ncontext_tokens = 130000\n'
        '[[apps]]\nname = "code"\nmodel = "Qwen3-4B"\n[[apps]]\nname = "chat"\nmodel = "Qwen3-8B"\n'
    )  # fmt: skip
    day = whole(scenario.read(str(file), 0, {}))
    assert (np.diff(day.at_s) >= 0).all() and day.at_s[-1] < 600.0
    counts = np.bincount(day.app)
    assert 400 < counts[0] < 3000 and counts[1] == pytest.approx(2 * 3.4 * 600, rel=0.3)


# Scenarios


@pytest.mark.parametrize("name", sorted(spec.names()))
def test_every_built_in_scenario_reads(name: str) -> None:
    s = scenario.read(name, 3, {})
    assert s.name == name and s.seed == 3 and spec.names()[name]
    first = next(iter(s.calls))
    assert first.id == 0 and 0.0 <= first.at_s < s.duration_s and 0 <= first.app < len(s.apps)
    assert {app.model for app in s.apps} == {m.known.model for m in s.models} == set(s.subjects)
    for model in s.models:
        assert model.known.weight_pages + model.known.longest_pages <= min(node.pool_pages for node in s.nodes)
        assert model.known.floor_pages <= model.known.longest_pages and model.known.shards <= len(s.nodes)


def test_generated_requests_fit_in_the_context() -> None:
    day = whole(scenario.read("day62", 0, {"memory.context_tokens": "5000", "duration_s": "3600"}))
    assert int((day.inputs + day.outputs).max()) <= 5000 and int(day.inputs.max()) > 3000


def test_the_published_cuts_are_what_they_say() -> None:
    dual = scenario.read("dual", 0, {})
    day = whole(dual)
    assert (dual.duration_s, dual.since_s, dual.bursts_s) == (180.0, 60.0, (100.0,))
    rate = np.bincount((day.at_s // 10).astype(int), minlength=18) / 10
    assert rate[12:14].mean() / rate[:10].mean() == pytest.approx(8.0, rel=0.25)
    steady = np.isin(day.app, [i for i, a in enumerate(dual.apps) if a.name not in ("app00", "app02", "app03")])
    halves = np.histogram(day.at_s[steady], [0, 90, 180])[0]
    assert len(dual.apps) == 23 and halves[0] / halves[1] == pytest.approx(1.0, abs=0.25)
    four = scenario.read("four17", 0, {})
    assert len(four.nodes) == 1 and len({m.known.model for m in four.models}) == 4
    assert {m.shape.parameters for m in four.models} == {1.72e9}


def test_scaling_promises_and_load() -> None:
    plain, tight = scenario.read("slo", 0, {}), scenario.read("slo", 0, {"scale": "0.5"})
    assert [a.ttft_s / 2 for a in plain.apps] == [a.ttft_s for a in tight.apps]
    assert [a.tpot_s / 2 for a in plain.apps] == [a.tpot_s for a in tight.apps]
    one, two = (whole(scenario.read("rate", 0, {"factor": f, "start_s": "0"})).n for f in ("1", "2"))
    assert two / one == pytest.approx(2.0, rel=0.1)
    tidal = scenario.read("tidal", 0, {})
    assert all(a.tpot_s == 0.1 for a in tidal.apps) and tidal.apps[0].ttft_s == pytest.approx(
        2 * (0.1 + 0.2664), rel=0.02
    )


def test_host_memory_is_shared_where_all_models_fit() -> None:
    day = scenario.read("day62", 0, {})
    assert all(node.host_bytes == 2400 * 10**9 and len(day.copies[node.name]) == 14 for node in day.nodes)
    small = scenario.read("day62", 0, {"cluster.host_memory": "1600GB"})
    sizes = {model.known.model: model.known.host_bytes for model in small.models}
    kept = [sum(sizes[name] for name in small.copies[node.name]) for node in small.nodes]
    assert all(node.host_bytes == 100 * 10**9 for node in small.nodes) and 50e9 < min(kept) <= max(kept) <= 100e9
    assert scenario.read("day62", 0, {"cluster.warm": "false"}).copies == {}


def test_pages_and_shards_follow_from_dimensions() -> None:
    s = scenario.read("day62", 0, {})
    by_name = {m.known.model: m for m in s.models}
    eight, huge = by_name["Qwen3-8B"].known, by_name["DeepSeek-V3-671B"].known
    assert (eight.shards, huge.shards, by_name["Qwen3-32B"].known.shards) == (1, 16, 2)
    assert eight.weight_pages == -(-int(2 * 8.19e9) // (2 << 20))
    # 14 tokens of 147,456 bytes go into a page of 2 MiB.
    assert eight.longest_pages == -(-40_960 // 14) and eight.floor_pages == -(-8192 // 14)
    assert huge.host_bytes == pytest.approx(671.03e9 / 16, rel=1e-6)
    assert huge.wake_s == pytest.approx(2.71, abs=0.02)
    assert s.subjects["Qwen3-8B"].promise.ttft_s == 1.0 and len(s.nodes) == 128
    assert len({node.host for node in s.nodes}) == 8 and len({node.name for node in s.nodes}) == 128


def test_all_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        '[cluster]\nhosts = 2\ndevices = 2\nkind = "H100 SXM"\ndomain = ""\nhost_memory = "100GB"\n'
        '[[cluster.more]]\nhosts = 1\ndevices = 1\nkind = "L40S"\n'
        '[workload]\nsource = "apps"\nduration_s = 50\n'
        '[[apps]]\nname = "a"\nmodel = "mine"\nper_second = 4\nlengths = "50/5"\nattain = 0.9\npriority = 2\n'
        '[[models]]\nname = "mine"\nshards = 2\nparams_b = 3\nactive_params_b = 3\nlayers = 36\nhidden = 2048\n'
        'heads = 16\nkv_heads = 2\nhead_dim = 128\n'
        '[[faults]]\nat_s = 30\nkind = "leader"\n[[faults]]\nat_s = 20\nkind = "node"\nnode = "h002d00"\nlasts_s = 5\n'
    )  # fmt: skip
    s = scenario.read(str(file), 0, {})
    assert [n.shape.name for n in s.nodes] == ["H100 SXM"] * 4 + ["L40S"]
    assert [n.domain for n in s.nodes] == ["h000", "h000", "h001", "h001", "one"]
    assert s.nodes[0].host_bytes == 10**11
    known = s.models[0].known
    assert (known.shards, known.attain, known.priority) == (2, 0.9, 2) and s.models[0].shape.kv_bytes == 36_864
    assert [(f.kind, f.at_s) for f in s.faults] == [(FaultKind.NODE, 20.0), (FaultKind.LEADER, 30.0)]
    assert s.subjects["mine"].device.name == "L40S"


@pytest.mark.parametrize(("text", "said"), [
    ("[cluster]\nhostz = 2\n", "'cluster.hostz' is not known in a scenario; did you mean \"hosts\""),
    ("[workload]\nfactor = 0\n", "factor"),
    ("[workload]\nfactor = nan\n", "factor"),
    ("[workload]\nduration_s = -1\n", "duration_s"),
    ("[workload]\nsource = \"generatr\"\n", "generatr"),
    ("[workload]\napps = [62]\n", "workload.apps[0]: Expected `int` <= 61, not 62"),
    ("[workload]\nrates = { app99 = 2 }\n", "no application is named 'app99'"),
    ("[workload]\n[[workload.bursts]]\napp = \"app1\"\nat_s = 1\nmultiple = 2\n",
     "no application is named 'app1'; did you mean"),
    ("[workload]\n[[workload.bursts]]\napp = \"app01\"\nat = 1\nmultiple = 2\n", "'workload.bursts.at' is not known"),
    ("[workload]\nsource = \"apps\"\n", "nobody asks for anything"),
    ("[workload]\nsource = \"apps\"\n[[apps]]\nname = \"a\"\nmodel = \"Qwen3-8B\"\n", "no request lies"),
    ("[[apps]]\nname = \"a\"\nmodel = \"Qwen3-9B\"\nper_second = 1\n",
     "its model 'Qwen3-9B' is not known; did you mean"),
    ("[[apps]]\nname = \"app00\"\nmodel = \"Qwen3-8B\"\nper_second = 1\n", "two applications are named 'app00'"),
    ("[[models]]\nname = \"Qwen3-8B\"\nshards = 0\n", "shards"),
    ("[[models]]\nname = \"other\"\nshards = 2\n", "'other' has no dimensions"),
    ("[[models]]\nname = \"other\"\nparams_b = 2\n", "lacks layers"),
    ("[[models]]\nname = \"other\"\nlike = \"Qwen3-8\"\n", "did you mean \"Qwen3-8B\""),
    ("[cluster]\nkind = \"H100\"\n", "no device is named 'H100'"),
    ("[cluster]\nmemory = \"1GB\"\n", "has no room for models"),
    ("[cluster]\npage = \"many\"\n", "cluster.page: 'many'"),
    ("[cluster]\nhosts = 1\ndevices = 8\n", "DeepSeek-R1-671B needs 16 devices at once and the cluster has 8"),
    ("[cluster]\nmemory = \"8GB\"\nhosts = 99\n", "is too large for"),
    ("[memory]\ncontext_tokens = 400000\n", "is too large for"),
    ("[[faults]]\nat_s = 5\nkind = \"node\"\nnode = \"h000d99\"\n", "no node is named 'h000d99'"),
    ("[[faults]]\nat_s = 1e9\nkind = \"leader\"\n", "comes after the end"),
    ("[workload]\nsource = \"workload62\"\nfolder = \"/nowhere\"\n", "/nowhere/apps.csv: No such file"),
    ("[workload]\n[[workload.traces]]\npath = \"/nowhere.csv\"\n", "/nowhere.csv: No such file"),
    ("[workload]\nlevel = [\n", "line"),
    ("[memory]\ncontext_tokens = 8000\n[workload]\nsource = \"apps\"\n[[workload.traces]]\npath = \"HERE/azure.csv\"\n"
     "[[apps]]\nname = \"a\"\nmodel = \"Qwen3-8B\"\n", "request 2 has 9004 tokens, prompt and answer, where"),
    ("[cluster]\nmore = 3\n", "more"),
])  # fmt: skip
def test_what_is_wrong_is_said_before_anything_runs(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "bad.toml"
    body = (
        text if "hosts" in text else f"{text}[cluster]\nhosts = 8\ndevices = 16\n" if "[cluster]" not in text else text
    )
    (tmp_path / "azure.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:01.0,5,5\n"
                                        "2023-11-16 18:15:02.0,9000,4\n")  # fmt: skip
    file.write_text(body.replace("HERE", str(tmp_path)))
    with pytest.raises(BadConfig) as error:
        scenario.read(str(file), 0, {"cluster.hosts": "99"} if "memory =" in text and "hosts" not in text else {})
    assert said in str(error.value)


@pytest.mark.parametrize(("name", "options", "said"), [
    ("day63", {}, "no scenario is named 'day63'"), ("smoke", {"factr": "2"}, 'did you mean "factor"'),
    ("smoke", {"workload.facto": "2"}, 'did you mean "factor"'), ("smoke", {"factor": "two"}, "workload.factor"),
    ("/nowhere/x.toml", {}, "No such file"),
])  # fmt: skip
def test_bad_names_and_options(name: str, options: dict[str, str], said: str) -> None:
    with pytest.raises(BadConfig) as error:
        scenario.read(name, 0, options)
    assert said in str(error.value)


def test_every_known_model_has_dimensions_that_add_up() -> None:
    """Parameters of the embedding and the layers' matrices are most of what is published, and never more."""
    for name, shape in models.builtin().items():
        assert shape.active_parameters <= shape.parameters and shape.kv_bytes > 0, name
        assert shape.expert_parameters < shape.parameters, name
    assert len(models.builtin()) == 18


# The rows


def test_bursts_are_found_where_they_are() -> None:
    counts = np.full((2, 1000), 10, dtype=np.int32)
    counts[0, 500:540] = 70
    found = rows.bursts_of(counts)
    assert found.apps == (0,) and found.seen == 2
    assert found.multiples == (pytest.approx(7.0),) and found.rises_s[0] <= 4


def test_shares_interpolate() -> None:
    assert rows.share_of(np.array([1.0, 1.0, 2.0]), 1 / 3) == 0.5
    assert rows.share_of(np.array([1.0, 1.0, 2.0]), 0.5) == pytest.approx(0.625)
