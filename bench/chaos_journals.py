"""What the journals of a cluster say afterwards: who led in which term, from when on, and whether all of it replays.

A journal is named FILE.NODE.TERM. The chaos bench reads them when all nodes have ended.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """first_s and last_s: when its leader first and last heard something, on the monotonic clock of the bench."""

    number: int
    node: str
    first_s: float
    last_s: float
    entries: int
    replays: bool


def read(folder: Path, stem: str, ahead_s: Mapping[str, float]) -> list[Term]:
    """In order of the terms. A disk that was full may have left a journal without any entry. ahead_s: by how much the
    clocks of nodes are ahead."""
    found = []
    for path in folder.glob(f"{stem}.*"):
        words = path.name.removeprefix(f"{stem}.").split(".")
        if len(words) == 2 and words[1].isdigit():
            times = [now - ahead_s.get(words[0], 0.0) for now in _times(path)]
            first_s, last_s = (times[0], times[-1]) if times else (0.0, 0.0)
            found.append(Term(int(words[1]), words[0], first_s, last_s, len(times), not times or _replays(path)))
    return sorted(found, key=lambda term: term.number)


def troubles(terms: Sequence[Term]) -> list[str]:
    """What does not hold: one leader a term, terms that only grow, the same decisions when replayed."""
    found = []
    leaders: dict[int, str] = {}
    for term in terms:
        if leaders.setdefault(term.number, term.node) != term.node:
            found.append(f"term {term.number} was led by {leaders[term.number]} and {term.node}")
        if not term.replays:
            found.append(f"the journal of {term.node} in term {term.number} replays to other decisions")
    heard = [term for term in terms if term.entries]
    for before, after in itertools.pairwise(heard):
        if after.first_s < before.first_s:
            found.append(f"term {after.number} began before term {before.number}")
    return found


def _times(path: Path) -> list[float]:
    """Of all entries; a last line that was cut short is none."""
    with path.open("rb") as file:
        lines = [line for line in file if line.endswith(b"\n")]
    said = [json.loads(line) for line in lines]
    return [float(line["now"]) for line in said if line["type"] == "entry"] if said else []


def _replays(path: Path) -> bool:
    done = subprocess.run(
        [sys.executable, "-m", "janus_server", "replay", str(path)], check=False, capture_output=True, text=True
    )
    return done.returncode == 0
