"""Sizes, durations and counts as people write them ("8GiB", "1.5h", "32k"), to numbers in base units and back.

Called by `config` for every setting that carries a unit, and by whoever prints one. Pure: no I/O, no clock, no state.
A text that cannot be read raises ValueError with a sentence that shows what would have been understood; `config` adds
the name of the setting.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Final

LONG_AGO_S: Final = -1e15
"""Before any clock began; unlike minus infinity it can be written down as JSON."""
_SIZE: Final = MappingProxyType(
    {
        "": 1, "b": 1,
        "k": 1 << 10, "kib": 1 << 10, "kb": 10**3,
        "m": 1 << 20, "mib": 1 << 20, "mb": 10**6,
        "g": 1 << 30, "gib": 1 << 30, "gb": 10**9,
        "t": 1 << 40, "tib": 1 << 40, "tb": 10**12,
    }
)  # fmt: skip
_DURATION: Final = MappingProxyType({"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0})
# As vLLM reads --max-model-len: 1k = 1000 tokens, 1K = 1024 tokens.
_COUNT: Final = MappingProxyType({"": 1, "k": 1000, "K": 1 << 10, "m": 10**6, "M": 1 << 20})
# ASCII digits and a bounded length: int() of a long text is quadratic, and other scripts' digits are never meant.
_QUANTITY: Final = re.compile(r"\s*([0-9]{1,24}(?:\.[0-9]{1,12})?)\s*([A-Za-z]{0,8})\s*", re.ASCII)
_NAMES: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def parse_bytes(value: str | int) -> int:
    """Bytes from "8GiB", "512MB" (decimal), "2M" (binary), "4096" or a plain integer; at least one, rounded down."""
    number, unit = _split(value, 'a size such as "8GiB", "512MB" or a number of bytes')
    factor = _SIZE.get(unit.lower())
    if factor is None:
        raise ValueError(f'{value!r} has the unit "{unit}"; sizes take B, KB, MB, GB, TB, KiB, MiB, GiB, TiB')
    size_bytes, part = _scaled(number, factor)
    if size_bytes <= 0 or (part and factor == 1):
        raise ValueError(f"{value!r} is not a positive whole number of bytes")
    return size_bytes


def parse_seconds(value: str | int | float) -> float:
    """Seconds from "30", 30, 2.5, "500ms", "2min" or "1h"; zero or more, finite."""
    if isinstance(value, float):
        if not 0.0 <= value < float("inf"):
            raise ValueError(f"{value!r} is not a duration; write zero or more seconds")
        return value
    number, unit = _split(value, 'a duration such as "30s", "500ms" or a number of seconds')
    factor = _DURATION.get(unit.lower())
    if factor is None:
        raise ValueError(f'{value!r} has the unit "{unit}"; durations take us, ms, s, min, h')
    return float(number) * factor


def parse_count(value: str | int) -> int:
    """A whole number from 4096, "4096", "4k" (4000) or "4K" (4096); zero or more."""
    number, unit = _split(value, 'a whole number such as 4096, "4k" (4000) or "4K" (4096)')
    factor = _COUNT.get(unit)
    count, part = (0, True) if factor is None else _scaled(number, factor)
    if part:
        raise ValueError(f'{value!r} is not a whole number; write 4096, "4k" (4000) or "4K" (4096)')
    return count


def format_bytes(size_bytes: int) -> str:
    """The shortest reading with three significant digits: 2097152 → "2 MiB", 1610612736 → "1.5 GiB"."""
    size, power = float(size_bytes), 0
    while abs(size) >= 1024 and power < len(_NAMES) - 1:
        size, power = size / 1024, power + 1
    digits = 0 if power == 0 or abs(size) >= 100 else 1 if abs(size) >= 10 else 2
    text = f"{size:.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {_NAMES[power]}"


def format_seconds(duration_s: float) -> str:
    """A duration in the unit that reads best: 0.0000213 → "21.3 µs", 0.25 → "250 ms", 95 → "95 s"."""
    for limit_s, factor, name in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if abs(duration_s) < limit_s:
            return f"{duration_s * factor:.3g} {name}"
    return f"{duration_s:.3g} s" if abs(duration_s) < 1000 else f"{duration_s:.0f} s"


def _split(value: str | int, wanted: str) -> tuple[str, str]:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{value!r} is not {wanted}")
    found = _QUANTITY.fullmatch(str(value))
    if found is None:
        raise ValueError(f"{value!r} is not {wanted}")
    return found[1], found[2]


def _scaled(number: str, factor: int) -> tuple[int, bool]:
    """number × factor rounded down, and whether anything was lost; in integers, so that 24 digits stay exact."""
    whole, _, fraction = number.partition(".")
    scaled, rest = divmod(int(whole + fraction) * factor, 10 ** len(fraction))
    return scaled, rest != 0
