"""Bodies for chat and completions by grammar-aware mutation, as the bytes that a client would send.

A case keeps what is known of it: whether it is JSON at all,
and its fields as the standard library reads them. `MARK` is
in every value that a client would call its own; an answer that repeats it has quoted the client. `NAME` is in the names
that it made up, which an answer may repeat to name a field.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Callable
from typing import Any

from harness import scribble

from janus_server.api.bodies import ChatBody, CompletionBody

MARK = "zqxvalue"
NAME = "zqxname"

KNOWN = frozenset((*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__))

# Values by what they are like, each wrong for most fields.
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3.0, 0.5, -0.0, 1e-300, 1e300, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1,
    2**64, 10**40, "", MARK, "1", "true", "\x00", "\U0001f600", "é" * 600, "x" * 2000, [], {}, [[]], [{}], [None],
    [True], [1], [-1], [1.5], [MARK], ["", MARK], [[1, 2], [3]], [[1], "a"], [1, "a"], {"type": "text"}, {NAME: 1},
    {"1": 1.0}, {"1": True}, {"-1": 5}, {"1": 1000}, {"999999": 1}, {"1e2": 1}, {"type": MARK}, {"include_usage": 1},
    list(range(300)), ["s"] * 17, {str(i): 1.0 for i in range(1100)}, [[]] * 1100,
)  # fmt: skip

# Numbers and strings that only a text can hold.
RAW: tuple[bytes, ...] = (
    b"NaN", b"-NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"9" * 400, b"-" + b"9" * 400, b"1.0e0", b"1e2",
    b"01", b"+1", b"1.", b".5", b"0x10", b"-0", b"1e", b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\u0000"', b'"\xff"',
    b'"\xed\xa0\x80"', b"'a'", b"undefined", b"[" * 600 + b"]" * 600, b'{"a":' * 600 + b"1" + b"}" * 600, b"tru",
)  # fmt: skip

BOUNDS: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 2, 2.0000001, -1e-9, 1e-320), "top_p": (0, 1, 1.0000001, -0.0), "min_p": (0, 1, 1.1),
    "top_k": (-1, 0, -2, 10**9), "n": (1, 0, 128, 129), "max_tokens": (1, 0, 511, 512, 10**9, 2**62),
    "max_completion_tokens": (1, 0, 511, 10**18), "min_tokens": (0, 1, 16, 17, 10**9), "seed": (-(2**63), 2**63 - 1),
    "presence_penalty": (-2, 2, 2.1), "frequency_penalty": (-2.0, 2.1), "repetition_penalty": (0.01, 0.0, 100, 101),
    "logprobs": (0, 20, 21, True), "top_logprobs": (0, 20, 21), "best_of": (1, 2, 20), "stop_token_ids": ([299], [300]),
    "stop": ([], ["a"] * 16, ["a"] * 17, [""], "x" * 1024, "x" * 1025), "logit_bias": ({"299": 100}, {"300": 0}),
}  # fmt: skip

BASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("chat", {"model": "fake", "messages": [{"role": "user", "content": f"hi {MARK}"}]}),
    ("chat", {
        "model": "fake", "max_completion_tokens": 4, "temperature": 0.5, "stop": ["\n"], "seed": 7, "n": 2,
        "stream": False, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2,
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": f"{MARK} a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": MARK, "type": "function",
            "function": {"name": MARK, "arguments": "{}"}}]},
            {"role": "tool", "content": MARK, "tool_call_id": MARK}, {"role": "user", "content": "x", "name": MARK},
        ],
    }),
    ("completion", {"model": "fake", "prompt": f"a {MARK}", "max_tokens": 3}),
    ("completion", {"model": "fake", "prompt": ["a", MARK], "n": 2, "best_of": 2, "echo": True, "max_tokens": 2}),
    ("completion", {"model": "fake", "prompt": [[1, 2, 3], [4]], "logprobs": 2, "logit_bias": {"5": -1.5}, "top_k": 3,
                    "min_tokens": 1, "stop_token_ids": [9], "ignore_eos": True, "max_tokens": 2}),
    ("completion", {"model": "fake", "prompt": [1, 2], "repetition_penalty": 1.1, "presence_penalty": 0.5}),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Body:
    """kind is "chat" or "completion". fields are what a forgiving reader finds, None where that is no object; strict
    says that a strict one finds the same.
    """

    kind: str
    raw: bytes
    fields: dict[str, Any] | None
    strict: bool
    untouched: bool

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.kind == "chat" else "/v1/completions"


def make(rng: random.Random) -> Body:
    kind, base = rng.choice(BASES)
    value = json.loads(json.dumps(base))
    steps = rng.choice((0, 1, 1, 1, 2, 3))
    for _ in range(steps):
        rng.choice((_set_known, _set_known, _set_bound, _set_bound, _set_nested, _drop, _unknown))(rng, value, kind)
    raw = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    damage = rng.random()
    if damage < 0.15:
        raw = _raw_value(rng, raw)
    elif damage < 0.22:
        raw = _twice(rng, raw)
    elif damage < 0.30:
        raw = scribble(rng, raw)
    elif damage < 0.32:
        raw = rng.choice(
            (b"", b"[]", b"null", b"3", b'"x"', b"\xef\xbb\xbf" + raw, raw + raw, raw + b"\x00", b" " + raw)
        )
    fields = _read(raw, errors="replace", constant=float)
    strict = fields is not None and _read(raw, errors="strict", constant=_refuse) is not None
    return Body(kind, raw, fields, strict, steps == 0 and damage >= 0.32)


def _odd(rng: random.Random) -> Any:
    """A fresh copy, since it may be put inside another."""
    return copy.deepcopy(rng.choice(ODD))


def _set_known(rng: random.Random, value: dict[str, Any], kind: str) -> None:
    names = (ChatBody if kind == "chat" else CompletionBody).__struct_fields__
    value[rng.choice(names)] = _odd(rng)


def _set_bound(rng: random.Random, value: dict[str, Any], kind: str) -> None:
    name = rng.choice(tuple(BOUNDS))
    value[name] = rng.choice(BOUNDS[name])


def _set_nested(rng: random.Random, value: dict[str, Any], kind: str) -> None:
    """Change something somewhere inside."""
    places: list[Callable[[Any], None]] = []

    def walk(holder: Any) -> None:
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            places.append(lambda new, holder=holder, key=key: holder.__setitem__(key, new))
            if isinstance(holder[key], dict | list):
                walk(holder[key])

    walk(value)
    if places:
        rng.choice(places)(_odd(rng))


def _drop(rng: random.Random, value: dict[str, Any], kind: str) -> None:
    if value:
        del value[rng.choice(list(value))]


def _unknown(rng: random.Random, value: dict[str, Any], kind: str) -> None:
    value[rng.choice((NAME, "", "mesages", "\x00", "Model", "n ", NAME * 50))] = _odd(rng)


def _raw_value(rng: random.Random, raw: bytes) -> bytes:
    """Put a text that no JSON writer makes where a value stands."""
    at = [i for i, byte in enumerate(raw) if byte in b":["]
    if not at:
        return raw
    start = rng.choice(at) + 1
    end = start
    while end < len(raw) and raw[end] not in b",]}":
        end += 1
    return raw[:start] + rng.choice(RAW) + raw[end:]


def _twice(rng: random.Random, raw: bytes) -> bytes:
    """The same field once more, with another value."""
    name = rng.choice(("model", "n", "max_tokens", "messages", "prompt", "stream", NAME))
    return raw[:-1] + b', "%b": %b}' % (name.encode(), json.dumps(rng.choice(ODD)).encode())


def _refuse(word: str) -> Any:
    raise ValueError(word)


def _read(raw: bytes, errors: str, constant: Callable[[str], Any]) -> dict[str, Any] | None:
    try:
        value = json.loads(raw.decode("utf-8", errors), parse_constant=constant)
        if errors == "strict":
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # no lone surrogates
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
