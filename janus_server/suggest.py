"""The nearest known word to one that was mistyped, as the end of a sentence.

Called wherever a name is refused (settings, flags, models). Pure; difflib is imported only when something is wrong,
so a correct start does not pay for it.
"""

from __future__ import annotations

from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean "port"?` for the closest of `known`, or an empty text when nothing is close."""
    import difflib

    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f'; did you mean "{found[0]}"?' if found else ""
