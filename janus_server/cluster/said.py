"""What a request has said so far, so that another node can go on from there when the one that ran it is lost. Pure."""

from __future__ import annotations

from typing import Any

from janus_server.sched.sequence import Begun
from janus_server.types import Emit, FinishReason, Request
from janus_server.wire.frames import Known


class Said:
    """Of one request, by choice: the tokens that it has drawn so far, and which are over."""

    __slots__ = ("_ended", "_scored", "_tokens", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self._tokens: dict[int, list[int]] = {}
        self._ended: set[int] = set()
        self._scored = False

    def hear(self, emit: Emit) -> None:
        if emit.token is not None:
            self._tokens.setdefault(emit.index, []).append(emit.token)
        if emit.finish is not None:
            self._ended.add(emit.index)
        self._scored = self._scored or bool(emit.prompt_logprobs)

    def end(self, index: int) -> None:
        """Nobody wants more of that choice."""
        self._ended.add(index)

    @property
    def begun(self) -> bool:
        return bool(self._tokens or self._ended or self._scored)

    @property
    def over(self) -> bool:
        return len(self._ended) == self.request.n

    @property
    def can_go_on(self) -> bool:
        """Scores of a part of its prompt would be told twice."""
        return not self._scored or bool(self._tokens.get(0)) or 0 in self._ended

    def known(self) -> tuple[Known, ...]:
        """Of the choices that go on."""
        return tuple(
            Known(index, tuple(tokens)) for index, tokens in sorted(self._tokens.items()) if index not in self._ended
        )

    def ended(self) -> tuple[int, ...]:
        return tuple(sorted(self._ended))

    def rest(self) -> list[Emit]:
        """The end of every choice that has none, as an error."""
        lacking = [index for index in range(self.request.n) if index not in self._ended]
        return [Emit(self.request.id, index, finish=FinishReason.ERROR) for index in lacking]


def going_on(request: Request, known: tuple[Known, ...], ended: tuple[int, ...], matcher: Any) -> tuple[Begun, ...]:
    """The choices that are not over, each with a matcher that has followed what it has said."""
    tokens = {one.index: one.tokens for one in known}
    found = []
    for index in range(request.n):
        if index not in ended:
            said = tokens.get(index, ())
            followed = None
            if matcher is not None:
                followed = matcher.copy()
                for token in said:
                    followed.accept(token)
            found.append(Begun(index, said, followed))
    return tuple(found)
