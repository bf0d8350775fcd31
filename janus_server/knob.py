"""One setting as a record: what `settings` and `settings_http` list, `config` resolves and `cli` makes a flag of.

A setting is data: what reads its raw value is one of `readers`. Nothing here knows what a setting is for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec


class Setting(msgspec.Struct, frozen=True):
    """One knob as a user meets it: its key in janus.toml, the field it fills, its reader, its flags and its help."""

    key: str
    field: str
    read: Callable[[Any], Any]
    flags: tuple[str, ...]
    help: str
    metavar: str | None = None
