"""Compiles grammars in a process of its own, so that the kernel bounds what they cost. A program, not a module.

`compile` starts it and asks whether a client's grammar is sound; the answer is the text to compile, or what is wrong
with it in fixed words. It compiles over a vocabulary of its own, and then walks a little way into what the grammar
allows, so that one which allows nothing or costs too much is refused before it runs. Imports the library, the limits,
the records and `bounded_child`; nothing else of the server.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import sys
import threading
import time
from types import MappingProxyType
from typing import Any, Final

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from janus_server.bounded_child import serve
from janus_server.grammar.limits import NO_FORCING, WHITESPACE, parser_limits
from janus_server.types import GrammarKind

WALKS, STEPS = 3, 40
# What is ordinary takes 1 ms at most over this vocabulary.
STEP_S = 0.02
TABLES_KEPT = 8
TEXT_BYTES: Final = (256 + 95 * 95) // 8  # of a mask, for the tokens that have a text
STRUCTURE: Final = frozenset(b"{}[](),:;\"' \n0a")

# What the library says when it refuses, and what the client reads. Nothing that it quotes is repeated.
COSTLY: Final = "needs more work than the server does for one request"
REASONS: Final = MappingProxyType({
    r"look-?around|look-ahead": "uses look-around, which is not supported",
    r"backreferences": "uses back-references, which are not supported",
    r"regex parse error|invalid regex": "holds a regular expression that is not valid",
    r"too deep|recursion limit": COSTLY,
    r"lexer error|expecting |Expected .* \(at |no start rule": "has a mistake in its syntax",
    r"[Tt]oken range|special token": "names a token that the model does not have; ordinary text goes in quotes",
    r"unknown name|unknown grammar": "uses a rule that it does not define",
    r"Unknown format|[Uu]nsupported format": "uses a format that is not supported",
    r"oneOf": "uses oneOf with alternatives that may hold together; use anyOf",
    r"maxProperties": "uses minProperties or maxProperties beside optional properties, which is not supported",
    r"Resource|retriev": "refers to another document; only references within the schema are supported",
    r"Pointer|\$ref": "holds a reference that leads nowhere",
    r"[Uu]nsatisfiable": "allows no text at all",
    r"Invalid type|must be|Expected|invalid multiple": "gives a keyword a value of the wrong kind",
    r"too large|too big|too many|Too many|max is|fuel|size limit": COSTLY,
    r" range": "gives a number a range that is not supported",
})  # fmt: skip


def main(cpu_s: float, memory_bytes: int) -> None:
    tables: dict[int, llguidance.LLTokenizer] = {}
    check(tables, {"kind": "json_object", "source": "", "vocab": 512})  # what is imported late cannot be, later
    check(tables, {"kind": "lark", "source": 'root ::= "a"', "vocab": 512})

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        try:
            return check(tables, question)
        except (MemoryError, RecursionError):
            return {"refused": COSTLY}

    # The library recurses. What this stack holds, those of the server's threads do, eight times over.
    threading.stack_size(1 << 20)
    thread = threading.Thread(target=serve, args=(answer, cpu_s, memory_bytes))
    thread.start()
    thread.join()


def check(tables: dict[int, llguidance.LLTokenizer], question: dict[str, Any]) -> dict[str, Any]:
    """The "grammar" that `compile` may compile for a kind and source over that many tokens, or what is "refused"."""
    kind = GrammarKind(question["kind"])
    text = as_lark(kind, question["source"])
    if text is None:
        return {"refused": "is not a valid GBNF grammar" if kind is GrammarKind.LARK else "is not a JSON object"}
    vocab = max(question["vocab"], 512)
    if vocab not in tables:
        if len(tables) >= TABLES_KEPT:
            tables.clear()
        tables[vocab] = _table(vocab)
    # As a list of one, since a text that starts like JSON would be read as such.
    grammar = json.dumps({"grammars": [{"lark_grammar": NO_FORCING + text + "\n" + NO_FORCING}]})
    matcher = llguidance.LLMatcher(tables[vocab], grammar, log_level=0, limits=parser_limits(kind))
    refused = why(matcher.get_error()) if matcher.is_error() else _walk(matcher)
    return {"grammar": grammar} if refused is None else {"refused": refused}


def as_lark(kind: GrammarKind, source: str) -> str | None:
    """The source in the one language that the library is given; None for GBNF or JSON that cannot be read."""
    match kind:
        case GrammarKind.REGEX:
            return f"start: /{llguidance.regex_to_lark(source)}/"
        case GrammarKind.JSON_OBJECT:
            return "start: %json " + _spaced('{"type":"object"}')
        case GrammarKind.JSON_SCHEMA:
            with contextlib.suppress(ValueError):
                return "start: %json " + _spaced(source) if isinstance(json.loads(source), dict) else None
            return None
        case GrammarKind.TOOLS:
            return source
    if is_lark_syntax(source) or "::=" not in source:
        return source
    with contextlib.suppress(Exception):  # the library raises bare ones
        return str(gbnf_to_lark(source))
    return None


def _spaced(schema: str) -> str:
    """The schema with our white space. Of two equal keys the last counts, so the client's own settings do not."""
    body = schema.strip().removesuffix("}").rstrip()
    comma = "" if body.endswith("{") else ","
    return f'{body}{comma}"x-guidance":{json.dumps({"whitespace_pattern": WHITESPACE})}}}'


def why(error: str) -> str:
    """What the library complains about, in words of ours and names of JSON Schema."""
    line = error.split("\n   1 | ")[0]  # what follows shows the grammar
    unknown = re.search(r"Unimplemented keys: \[(.*?)\]", line)
    if unknown:
        keys = [key for key in re.findall(r'"([A-Za-z$]{1,40})"', unknown.group(1))][:8]
        return "uses keywords that are not supported: " + ", ".join(keys)
    return next((text for pattern, text in REASONS.items() if re.search(pattern, line)), "could not be read")


def _walk(start: llguidance.LLMatcher) -> str | None:
    """What is wrong with the first steps of what the grammar allows, preferring the ways that structure opens."""
    for seed in range(WALKS):
        draw, matcher = random.Random(seed), start.deep_copy()
        for step in range(STEPS):
            before_s = time.thread_time()
            mask = matcher.compute_bitmask()
            if matcher.is_error():
                if "NoExtension" in matcher.get_error():  # a dead end: the whole grammar, or this way into it
                    return "allows no text at all" if step == 0 else None
                return COSTLY
            if matcher.is_stopped():
                break
            token = _drawn(mask, draw)
            if not matcher.consume_token(token):
                return COSTLY
            if time.thread_time() - before_s > STEP_S:
                return COSTLY
    return None


def _drawn(mask: bytes, draw: random.Random) -> int:
    """One of the tokens that a mask of bits allows."""
    spelled = [8 * at + bit for at, byte in enumerate(mask[:TEXT_BYTES]) if byte for bit in range(8) if byte >> bit & 1]
    structure = [token for token in spelled if token in STRUCTURE]
    if structure and draw.random() < 0.5:
        return draw.choice(structure)
    bits = int.from_bytes(mask, "little")
    return draw.choice(spelled) if spelled else (bits & -bits).bit_length() - 1  # without a text: whichever is first


def _table(vocab: int) -> llguidance.LLTokenizer:
    """Every byte, pairs of printable ones as far as they fit, and then tokens without a text, up to `vocab`."""
    printable = [bytes([byte]) for byte in range(0x20, 0x7F)]
    tokens = [bytes([byte]) for byte in range(256)] + [a + b for a in printable for b in printable]
    return llguidance.LLTokenizer(_Vocabulary((tokens + [b""] * vocab)[:vocab]), slices=[])  # type: ignore[arg-type]


class _Vocabulary:
    """What the library asks of a tokenizer. One more token, which none of the model's is, ends the text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = [*tokens, b"<end>"]
        self.eos_token_id = len(tokens)
        self.special_token_ids = (self.eos_token_id,)

    def __call__(self, text: str) -> list[int]:
        raise TypeError("no text is encoded here")


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
