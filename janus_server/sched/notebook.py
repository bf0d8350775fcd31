"""What was said lately of what cannot be done, or is not believed: each such sentence once while it holds. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from janus_server.orders import Action, Decided
from janus_server.sched.placement import Note


class Notebook:
    """What nobody noted for keep_s is forgotten, and said anew when it is noted again: nothing stays for ever."""

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

    def forget(self, now: float) -> None:
        self._noted = {said: at_s for said, at_s in self._noted.items() if at_s > now - self._keep_s}
