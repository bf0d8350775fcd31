"""What is counted of one model's requests over the whole cluster: for `Counted`, and per window for `Observed`.

`serving` adds, `telling` takes. Tokens of answers under way are known only as far as time says: those that run are
taken to draw tokens at the pace of those that ended lately, and the number is put right when they end.
"""

from __future__ import annotations

from janus_server.orders import Counts

# How fast the pace follows the requests that end: each counts for so much.
_PACE_SHARE = 0.1
_FIRST_PACE_S = 0.03


class Tally:
    """Since the run began (input_tokens …) and since the last window was taken (inputs …): counts, sums, squares."""

    __slots__ = (
        "_decoding", "_first_sum_s", "_late", "_out_tokens", "_pace_s", "_promised", "_requests", "_told_out", "came",
        "changed", "in_squares", "in_total", "input_tokens", "judged", "on_time", "out_count", "out_squares",
        "out_total",
    )  # fmt: skip

    def __init__(self) -> None:
        self.input_tokens = self._out_tokens = self._told_out = self._promised = self._late = self._requests = 0
        self._decoding, self._first_sum_s, self._pace_s = 0, 0.0, _FIRST_PACE_S
        self.changed = False
        self.clear()
        self.clear_ended()

    def clear(self) -> None:
        """A new window of arrivals begins."""
        self.came = self.in_total = self.in_squares = 0

    def clear_ended(self) -> None:
        """What ended was told; until then it waits for a window in which something comes."""
        self.out_count = self.out_total = self.out_squares = self.judged = self.on_time = 0

    def arrived(self, tokens: int) -> None:
        self.input_tokens += tokens
        self.came += 1
        self._requests += 1
        self.in_total += tokens
        self.in_squares += tokens * tokens
        self.changed = True

    def began(self, first_s: float) -> None:
        """Its first token came."""
        self._decoding += 1
        self._first_sum_s += first_s
        self.changed = True

    def left(self, first_s: float) -> None:
        """One of those that began is over."""
        self._decoding -= 1
        self._first_sum_s = self._first_sum_s - first_s if self._decoding else 0.0
        self.changed = True

    def ended(self, tokens: int, tpot_s: float, on_time: bool) -> None:
        self._out_tokens += tokens
        self.out_count += 1
        self.out_total += tokens
        self.out_squares += tokens * tokens
        self.judged += 1
        self.on_time += on_time
        self._promised += 1
        self._late += not on_time
        if tpot_s > 0.0:
            self._pace_s += _PACE_SHARE * (tpot_s - self._pace_s)

    @property
    def moving(self) -> bool:
        """Something was counted since it was last told, or is being drawn."""
        return self.changed or self._decoding > 0

    def counts(self, now: float) -> Counts:
        drawing = max(0.0, self._decoding * now - self._first_sum_s) / self._pace_s
        self._told_out = max(self._told_out, self._out_tokens + int(drawing))
        self.changed = False
        return Counts(self.input_tokens, self._told_out, self._promised, self._late, self._requests)
