"""The ceiling benchmark of the API layer measures what it says: whole answers, the same bytes from every side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import http


@pytest.mark.parametrize("chat", [[], ["--chat"]])
def test_every_side_writes_whole_answers(tmp_path: Path, chat: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "http.json"
    sizes = ["--streams", "5", "--tokens", "20", "--rounds", "2"]
    assert http.main([*sizes, *chat, "--json", str(out)]) == 0
    figures = json.loads(out.read_text())
    assert all(figures[side]["tokens_s"] > 0 for side in ("ours", "bare", "fed"))
    assert set(figures["ratios"]) == {"bare", "fed"}
    assert "of it, with" in capsys.readouterr().out


def test_the_sides_say_the_same() -> None:
    path, request = http._request(20, chat=False)
    with http._server("ours", 3) as ours, http._server("bare", 3) as bare, http._server("fed", 3) as fed:
        sample = http._exchange(ours.port, [request] * 3)[0]
        body = sample.partition(b"\r\n\r\n")[2]
        assert body.count(b"data: {") == 20
        assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        for side in (bare, fed):
            http._teach(side.port, sample)
            answers = http._exchange(side.port, [request.replace(path, b"/stream", 1)] * 3)
            assert [answer.partition(b"\r\n\r\n")[2] for answer in answers] == [body] * 3


def test_a_refusal_is_no_sample() -> None:
    with http._server("bare", 1) as bare, pytest.raises(SystemExit, match="refused"):
        http._teach(bare.port, b"HTTP/1.1 400 Bad Request\r\n\r\n")
