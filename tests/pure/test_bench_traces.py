"""Timed traces: small samples of every format, the real files where they are, and what a bad line is answered with."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from bench.traces import TraceRow, TraceSlice, parse_trace, read_trace
from janus_server.errors import BadConfig

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:05,1,0
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118.5,GPT-4,417,276,693,API log
"""
MOONCAKE = """\
{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}

{"timestamp": 3000, "input_length": 7322, "output_length": 490, "hash_ids": [0, 14, 15]}
{"timestamp": 27482, "input_length": 5, "output_length": 1}
"""
MULTI = """\
t_ms,app,input_tokens,output_tokens
0,2,27,2
250,17,279,74
"""


def parse(text: str) -> list[TraceRow]:
    return list(parse_trace(text.splitlines()))


def test_azure() -> None:
    rows = parse(AZURE)
    assert [(r.input_tokens, r.output_tokens) for r in rows] == [(4808, 10), (3180, 8), (1, 1)]
    assert rows[1].t_s - rows[0].t_s == pytest.approx(0.052, abs=1e-6)
    assert rows[2].t_s - rows[0].t_s == pytest.approx(1.02004, abs=1e-6)
    assert {r.app for r in rows} == {""}


def test_burstgpt_leaves_out_what_had_failed_when_it_was_recorded() -> None:
    assert parse(BURSTGPT) == [TraceRow(5.0, "ChatGPT", 472, 18), TraceRow(118.5, "GPT-4", 417, 276)]


def test_mooncake() -> None:
    assert parse(MOONCAKE) == [
        TraceRow(0.0, "", 6758, 500, (0, 1, 2)),
        TraceRow(3.0, "", 7322, 490, (0, 14, 15)),
        TraceRow(27.482, "", 5, 1),
    ]


def test_several_models() -> None:
    assert parse(MULTI) == [TraceRow(0.0, "2", 27, 2), TraceRow(0.25, "17", 279, 74)]


def test_columns_may_stand_in_any_order_and_have_a_mark_before_them() -> None:
    assert parse("\ufeffOutput_tokens, app,t_ms,more,input_tokens\n4,x,1000,?,3\n") == [TraceRow(1.0, "x", 3, 4)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a,b\n1,2\n", "first line"),
        ("", "first line"),
        (AZURE + "2023-11-16 18:17:05,x,1\n", "line 5: .*'x'"),
        (AZURE + "2023-11-16 18:17:05,1\n", "line 5"),
        (AZURE + "yesterday,1,1\n", "line 5"),
        (MULTI + "-nan,1,1,1\n", "line 4: a time or a length"),
        (MULTI + "5,1,-1,1\n", "line 4: a time or a length"),
        (MOONCAKE + "{\n", "line 5"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 1}\n', "line 5: KeyError 'output_length'"),
        (MOONCAKE + "[]\n", "line 5"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(text: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=expected):
        parse(text)
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(BadConfig, match=f"(?s)trace: .*{expected}"):
        read_trace(file, TraceSlice())


def test_a_slice_by_time_and_application(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv.gz"
    rows = [(t, t // 1000 % 3) for t in range(7000, 17000, 1000)]
    with gzip.open(file, "wt") as out:
        out.write("t_ms,app,input_tokens,output_tokens\n" + "".join(f"{t},{a},1,1\n" for t, a in reversed(rows)))
    whole = read_trace(file, TraceSlice())
    assert [r.t_s for r in whole] == [float(t) for t in range(10)]
    part = read_trace(file, TraceSlice(2.0, 5.0, frozenset({"0"})))
    assert [(r.t_s, r.app) for r in part] == [(0.0, "0"), (3.0, "0")]
    with pytest.raises(BadConfig, match="no request"):
        read_trace(file, TraceSlice(100.0))


@pytest.mark.parametrize(
    ("name", "requests", "mean_input", "mean_output"),
    [
        ("azure/AzureLLMInferenceTrace2023_code.csv.gz", 8_819, 2048, 28),
        ("mooncake/synthetic_trace.jsonl.gz", 3_993, 15_325, 149),
    ],
)
def test_the_real_traces_have_their_published_figures(
    shared: Path, name: str, requests: int, mean_input: int, mean_output: int
) -> None:
    rows = read_trace(shared / "traces" / name, TraceSlice())
    assert len(rows) == requests
    assert sum(r.input_tokens for r in rows) / len(rows) == pytest.approx(mean_input, abs=1)
    assert sum(r.output_tokens for r in rows) / len(rows) == pytest.approx(mean_output, abs=1)
    if "mooncake" in name:
        blocks = [b for r in rows for b in r.blocks]
        assert 1 - len(set(blocks)) / len(blocks) == pytest.approx(0.64, abs=0.005)
