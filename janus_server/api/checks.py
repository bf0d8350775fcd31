"""The checks that bodies have in common: what a field must be, what is not supported, and how large and deep JSON is.

Pure, and a leaf: `parse`, `tools`, `structured`, `plan` and the other bodies call it. Nothing here may recurse into a
client's value, nor quote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from janus_server.errors import Refused


def need(condition: bool, param: str, allowed: str) -> None:
    """Refuse `param` unless the condition holds: it must be what `allowed` says."""
    if not condition:
        raise Refused(f"{param} must be {allowed}", param=param, code="invalid_value")


def refuse_given(body: msgspec.Struct, names: Sequence[str], why: str = "is not supported yet") -> None:
    """Refuse the fields of these names that ask for something.

    null, false and what is empty are how clients say "no"; 0 is a request for some of these (prompt_logprobs).
    """
    for name in names:
        value = getattr(body, name)
        if not (value is None or value is False or value in ("", [], {})):
            raise Refused(f"{name} {why}", param=name, code="unsupported_parameter")


def json_of(value: Any, param: str, most_bytes: int, depth: int) -> str:
    """A value as JSON text of at most that many bytes. Its depth is the caller's to check, now that it is small."""
    try:
        encoded = msgspec.json.encode(value)
    except RecursionError:
        raise Refused(f"{param} must be nested at most {depth} deep", param=param, code="invalid_value") from None
    need(len(encoded) <= most_bytes, param, f"at most {most_bytes} bytes of JSON")
    return encoded.decode()


def deeper(tree: Any, levels: int) -> bool:
    """Whether objects and lists are nested more than `levels` deep; without recursion, in time that its size bounds."""
    layer = [tree]
    for _ in range(levels):
        layer = [
            item
            for node in layer
            for item in (node.values() if isinstance(node, dict) else node)
            if isinstance(item, dict | list)
        ]
        if not layer:
            return False
    return True
