"""`janus replay FILE…`: tells a fresh Brain what a journal's Brain was told, and says whether it decides the same.

Reads files and prints; it meets no server. A cluster leaves one file for each term, on the node that led in it: given
together, they are told in the order of their terms.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from janus_server import journal
from janus_server.journal import Entry, Heading
from janus_server.orders import Action, Answer, Decided, Dispatch, Order, Refit, Refuse, Report


class ReplayOptions(msgspec.Struct, frozen=True):
    files: tuple[Path, ...]
    sentences: bool = False


def run(options: ReplayOptions) -> int:
    """0 when every decision is the same, 1 when one differs. BadConfig where a file is no journal."""
    if len(options.files) == 1:
        return _replay(options.files[0], "", options.sentences)
    terms = sorted((_term(file), file) for file in options.files)
    codes = []
    for term, file in terms:
        codes.append(_replay(file, f"{file.name}, term {term}: ", options.sentences))
    if not any(codes):
        print(f"{len(terms)} journals, of terms {terms[0][0]} to {terms[-1][0]}, all with the same decisions")
    return max(codes)


def _replay(file: Path, name: str, sentences: bool) -> int:
    if sentences:
        if name:
            print(name.removesuffix(": "))
        _print_sentences(file)
    start_s = time.perf_counter()
    replayed = journal.replay(file)
    took_s = time.perf_counter() - start_s
    difference = replayed.difference
    if difference is None:
        pace = f", {replayed.span_s / took_s:,.0f} times as fast as they happened" if replayed.span_s > 0 else ""
        print(f"{name}{replayed.entries} events over {replayed.span_s:.1f} s lead to the same decisions{pace}")
        return 0
    print(f"{name}line {difference.line}: {difference.entry.event}", file=sys.stderr)
    for name, actions in (("journal", difference.entry.actions), ("replay ", difference.replayed)):
        for action in actions or ("nothing",):
            print(f"  {name}: {action}", file=sys.stderr)
    return 1


def _term(file: Path) -> int:
    heading = next(journal.read(file), None)
    return heading.term if isinstance(heading, Heading) else 0


def _print_sentences(file: Path) -> None:
    """Each decision's time since the first event, and its sentence."""
    first_s = None
    for entry in journal.read(file):
        if not isinstance(entry, Entry):
            continue
        first_s = entry.now if first_s is None else first_s
        if isinstance(entry.event, Report) and not entry.actions:
            continue
        for action in entry.actions:
            print(f"{entry.now - first_s:10.3f} s  {_sentence(action)}")


def _sentence(action: Action) -> str:
    match action:
        case Order():
            return f"{action.verb.value:7} {action.why}"
        case Dispatch():
            return f"begin   {action.why}"
        case Refuse():
            return f"refuse  {action.model}: {action.why}"
        case Answer():
            return f"answer  {action.why}"
        case Refit():
            return f"refit   {action.why}"
        case Decided():
            return f"decide  {action.why}"
