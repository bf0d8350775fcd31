"""A fake model that says what a test wrote down, piece by piece; and one that knows tools and reasoning."""

from __future__ import annotations

import msgspec
from fake_engine import FakeModel

from janus_server import types
from janus_server.api.dialect import Dialect
from janus_server.api.speech import ToolForm

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
DIALECT = Dialect(reasoning=True, thinking_switch=True, reads_tools=True, tools=ToolForm.HERMES)


class ScriptedModel(FakeModel):
    """Says `script`, a piece a token, then ends by itself unless max_tokens came first."""

    def __init__(self, *script: str) -> None:
        super().__init__()
        self.script = script
        self.target = msgspec.structs.replace(self.target, dialect=DIALECT)

    def _delta(self, request: types.Request, index: int, step: int) -> types.Delta:
        if step in (self.fail_at, self.bug_at):
            return super()._delta(request, index, step)
        if step == len(self.script):
            return types.Delta(index, "", (1,), finish=types.FinishReason.STOP, cached_tokens=3)
        finish = types.FinishReason.LENGTH if step + 1 == request.max_tokens else None
        text = self.script[step]
        return types.Delta(index, text, (1,), finish=finish, cached_tokens=3)


def letters(text: str) -> list[str]:
    """The text in pieces of three characters, so that markup is cut in its midst."""
    return [text[i : i + 3] for i in range(0, len(text), 3)]
