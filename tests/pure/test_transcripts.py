"""Every transcript comes out as it is written: what the deciding code does about a story that a reader can follow."""

from __future__ import annotations

from pathlib import Path

import pytest
from transcript_reader import read

HERE = Path(__file__).parent / "transcripts"


@pytest.mark.parametrize("path", sorted(set(HERE.glob("*.txt")) - set(HERE.glob("fleet*"))), ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    """Those of the whole Brain are read by `fleet_reader`."""
    written, played = read(path)
    assert played == written


def test_there_are_transcripts() -> None:
    assert {"burst", "shortage", "pools", "plans", "nonsense"} <= {path.stem for path in HERE.glob("*.txt")}
