"""From a request's grammar to the matcher of its choices: checked in a bounded process, then compiled here.

One `Grammars` serves all models of a process; encoding threads call it, never the event loop. What the check has let
through costs here what it cost there, since both compile alike. Verdicts are kept, compiled grammars are not: the
library's copies share what their lexer has worked out, and one request must never use up another's states.
"""

from __future__ import annotations

import collections
import hashlib
import threading
import weakref
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from janus_server.bounded import Workers
from janus_server.errors import Refused
from janus_server.types import Grammar, GrammarKind

if TYPE_CHECKING:  # the library takes 75 ms to import, which a server that nobody asks for grammars never spends
    from janus_server.grammar.matcher import Matcher
    from janus_server.grammar.table import TokenSource, TokenTable

_PROGRAM: Final = Path(__file__).with_name("worker.py")
SOURCE_BYTES: Final = 1 << 20  # tools bring several schemas; what clients write themselves is bounded at the edge
_ANSWER_BYTES: Final = 16 * SOURCE_BYTES
_ENTRY_BYTES: Final = 512
_CALLED: Final = MappingProxyType({
    GrammarKind.JSON_OBJECT: "the JSON object", GrammarKind.JSON_SCHEMA: "the JSON schema",
    GrammarKind.REGEX: "the regular expression", GrammarKind.LARK: "the grammar",
})  # fmt: skip
_TOO_COSTLY: Final = "needs more work than the server does for one request"


class Verdict:
    """What is known of a source: the text to compile, or why it is refused, which may show while it runs."""

    __slots__ = ("bytes", "grammar", "refused")

    def __init__(self, grammar: str, refused: str) -> None:
        self.grammar = grammar
        self.refused = refused
        self.bytes = _ENTRY_BYTES + 4 * (len(grammar) + len(refused))  # a character takes up to four


class Grammars:
    """Compiles grammars. The checking process has `cpu_s` seconds of processor time a grammar and `memory_bytes`."""

    def __init__(
        self, *, workers: int = 1, cpu_s: float = 1.0, memory_bytes: int = 1 << 29, cache_bytes: int = 16 << 20
    ) -> None:
        self._workers = Workers(
            _PROGRAM, workers=workers, cpu_s=cpu_s, memory_bytes=memory_bytes, answer_bytes=_ANSWER_BYTES
        )
        # Encoding threads are several: one looks up at a time, and one builds.
        self._lock, self._building = threading.Lock(), threading.Lock()
        self._verdicts = _Verdicts(cache_bytes)
        self._tables: weakref.WeakKeyDictionary[TokenSource, TokenTable] = weakref.WeakKeyDictionary()

    def compile(
        self, tokenizer: TokenSource, grammar: Grammar, eos_ids: tuple[int, ...], param: str | None = None
    ) -> Matcher:
        """The matcher at the start of a text. Refused, naming `param`, when the grammar cannot be enforced.

        eos_ids are the ends that the model may draw: allowed where the grammar may end, and nowhere else. Takes 3 ms
        for an ordinary schema; 0.1 to 0.5 s more for the first of a model, 0.2 s for the first of all.
        """
        verdict = self._check(grammar, tokenizer.vocab_size)
        if verdict.refused:
            raise _refused(grammar, verdict.refused, param)
        matcher = self._compiled(tokenizer, verdict, grammar, eos_ids)
        matcher.mask()  # the first step over the real vocabulary, off the device thread
        if matcher.failed:
            raise _refused(grammar, "allows no text at all" if matcher.stuck else _TOO_COSTLY, param)
        return matcher

    def prepare(self, tokenizer: TokenSource) -> None:
        """Do now what the first grammar for this tokenizer would wait for."""
        self._table(tokenizer)

    def close(self) -> None:
        """End the checking process. What is asked afterwards is refused."""
        self._workers.close()

    def _check(self, grammar: Grammar, vocab: int) -> Verdict:
        source = grammar.source.encode()
        if len(source) > SOURCE_BYTES:
            return Verdict("", f"is longer than {SOURCE_BYTES} bytes")
        word = f"{grammar.kind.value} {vocab} ".encode() + source
        key = hashlib.blake2b(word, digest_size=32).digest()
        with self._lock:
            known = self._verdicts.get(key)
        if known is not None:
            return known
        question = {"kind": grammar.kind.value, "source": grammar.source, "vocab": vocab}
        answer = self._workers.ask(question)
        if answer is None:  # not kept: the process may have been ended by something else
            return Verdict("", _TOO_COSTLY)
        verdict = Verdict(str(answer.get("grammar", "")), str(answer.get("refused", ""))[:400])
        with self._lock:
            self._verdicts.put(key, verdict)
        return verdict

    def _compiled(
        self, tokenizer: TokenSource, verdict: Verdict, grammar: Grammar, eos_ids: tuple[int, ...]
    ) -> Matcher:
        import llguidance

        from janus_server.grammar.limits import parser_limits
        from janus_server.grammar.matcher import Budget, Matcher

        def slow() -> None:
            verdict.refused = _TOO_COSTLY

        table = self._table(tokenizer)
        inner = llguidance.LLMatcher(table.tree, verdict.grammar, log_level=0, limits=parser_limits(grammar.kind))
        return Matcher(inner, table.tokens, eos_ids, Budget(slow))

    def _table(self, tokenizer: TokenSource) -> TokenTable:
        from janus_server.grammar.table import TokenTable

        with self._building:
            table = self._tables.get(tokenizer)
            if table is None:
                table = self._tables[tokenizer] = TokenTable(tokenizer)
            return table


class _Verdicts:
    """The verdicts used last, as many as their bytes allow."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._kept: collections.OrderedDict[bytes, Verdict] = collections.OrderedDict()
        self.bytes = 0

    def get(self, key: bytes) -> Verdict | None:
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key]

    def put(self, key: bytes, verdict: Verdict) -> None:
        if verdict.bytes > self._limit_bytes or key in self._kept:
            return
        self._kept[key] = verdict
        self.bytes += verdict.bytes
        while self.bytes > self._limit_bytes:
            _, old = self._kept.popitem(last=False)
            self.bytes -= old.bytes


def _refused(grammar: Grammar, why: str, param: str | None) -> Refused:
    return Refused(f"{param or _CALLED.get(grammar.kind, 'the grammar')} {why}", param=param, code="invalid_grammar")
