"""What was said lately of what cannot be done, or is not believed: each such sentence once while it holds. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from janus_server.orders import Action, Decided
from janus_server.sched.placement import Note

# A cluster that is well has none, a bad one dozens.
_MANY: Final = 256


class Notebook:
    """What nobody noted for keep_s is forgotten, and said anew when it is noted again; so is what was noted before some
    hundred others.
    """

    def __init__(self, keep_s: float, known: Mapping[str, float]) -> None:
        """known: when each sentence was noted last, as another one remembered it (`memory`)."""
        self._keep_s = keep_s
        self._noted = dict(known)

    def memory(self) -> dict[str, float]:
        """What it knows now, as a copy."""
        return dict(self._noted)

    def say(self, notes: Iterable[Note], now: float, actions: list[Action]) -> None:
        for note in notes:
            said = f"{note.subject}: {note.why}"
            if said not in self._noted:
                actions.append(Decided(note.subject, said))
            self._noted[said] = now
        kept = [(said, at_s) for said, at_s in self._noted.items() if at_s > now - self._keep_s]
        self._noted = dict(sorted(kept, key=lambda entry: entry[1])[-_MANY:] if len(kept) > _MANY else kept)
