"""Ten times more requests than a real server can carry: refused early and correctly, the others served, nothing left.

Seconds here; a minute, and the goodput with it: `janus bench soak --overload`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from server_process import tiny_model

from bench import soak


def test_overload_is_refused_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model(tmp_path)
    flags = [f"--serve={word}" for word in ("--memory", "16MiB", "--page-size", "64KiB", "--threads", "1")]
    load = ["--overload", "--seconds", "5", "--tokens", "300", "--sequences", "4", "--queue", "12"]
    # Rates depend on the machine's mood, so goodput is only reported here.
    out = ["--goodput", "0", "--json", str(tmp_path / "soak.json")]
    code = soak.main(["--model", str(model), *load, *flags, *out])
    assert code == 0, capsys.readouterr().out
    statuses = json.loads((tmp_path / "soak.json").read_text())["figures"]["by status"]
    assert set(statuses) <= {"200", "429", "503"}
