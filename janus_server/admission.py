"""Who may add work now: limits of each key, and a bounded queue. Pure; `http.admit` calls it with the time.

One interface, behind which keys, rates and the queue stand: `admit` takes a ticket and answers with a grant or a
refusal, `start` says that the call has its first token, `finish` ends it. It counts and compares; it never waits.

A call waits from its grant to its first token. What waits is counted in choices and in prompt tokens, for the server
and for each model, and never passes its bound. Rates are buckets that hold a minute's allowance and fill evenly, in
whole numbers, so that nothing is lost to rounding: in t seconds a key gets at most limit · (1 + t / 60).

A worked example: a key may have 60,000 tokens a minute. A call with a prompt of 1,000 tokens and two choices of at
most 4,500 tokens is charged 10,000 at once, and 50,000 are left. It makes 2,000 tokens in 4 s: the bucket has gained
4,000, and 10,000 - 3,000 = 7,000 come back, but it never holds more than 60,000. Charged more than a minute's
allowance, a call waits for a full bucket and takes it all; what it used beyond that is owed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from janus_server.errors import Refused, require

_NS = 10**9
_MINUTE_NS = 60 * _NS
_LONGEST_RETRY_S = 60.0
_STARTS_KEPT = 64
ANYBODY = ""


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one key may use; None is no limit. requests counts calls in progress; tokens are prompt and answer.

    tokens_per_request bounds the prompts and answers of one call; models None allows all of them.
    """

    requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_request: int | None = None
    models: frozenset[str] | None = None


class QueueBounds(msgspec.Struct, frozen=True):
    """What may wait for its first token: choices, and prompt tokens."""

    choices: int
    tokens: int


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """What a call asks for. prompt_tokens over all its prompts; most_tokens is what its choices may make together.

    param is the field of the body that holds the prompts.
    """

    key: str
    model: str
    param: str
    prompt_tokens: int
    most_tokens: int
    choices: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.most_tokens


class Grant(msgspec.Struct, frozen=True):
    """The right to run one call, to be given back once."""

    number: int


class Queued(msgspec.Struct):
    """What waits; changed by `Admission` alone."""

    choices: int = 0
    tokens: int = 0


class Bucket:
    """An allowance that fills evenly up to a minute's worth. A unit of `_level` is a 60·10⁹th part of one token.

    So each nanosecond brings exactly `per_minute` units, and sums stay exact however long it runs.
    """

    def __init__(self, per_minute: int, now_ns: int) -> None:
        self.per_minute = per_minute
        self._level = per_minute * _MINUTE_NS
        self._at_ns = now_ns

    def wait_ns(self, amount: int, now_ns: int) -> int:
        """How long until `amount`, or all it can hold, is there; 0 when it is."""
        self._fill(now_ns)
        short = min(amount, self.per_minute) * _MINUTE_NS - self._level
        return -(-short // self.per_minute) if short > 0 else 0

    def take(self, amount: int) -> int:
        """Take what `wait_ns` found to be there; the amount taken, at most all that the bucket can hold."""
        taken = min(amount, self.per_minute)
        self._level -= taken * _MINUTE_NS
        return taken

    def settle(self, taken: int, used: int, now_ns: int) -> None:
        """What was taken becomes what was used: the rest comes back, and what is missing is owed."""
        self._fill(now_ns)
        self._level = min(self._level + (taken - used) * _MINUTE_NS, self.per_minute * _MINUTE_NS)

    def _fill(self, now_ns: int) -> None:
        gained = max(0, now_ns - self._at_ns) * self.per_minute
        self._level = min(self._level + gained, self.per_minute * _MINUTE_NS)
        self._at_ns = max(self._at_ns, now_ns)


class _KeyState:
    """What one key uses."""

    def __init__(self, limits: KeyLimits, now_ns: int) -> None:
        self.limits = limits
        self.running = 0
        self.requests = _bucket(limits.requests_per_minute, now_ns)
        self.tokens = _bucket(limits.tokens_per_minute, now_ns)

    def change(self, limits: KeyLimits, now_ns: int) -> None:
        """Other limits from now on. A rate that stays keeps its bucket, so that a reload is no way to a full one."""
        if limits.requests_per_minute != self.limits.requests_per_minute:
            self.requests = _bucket(limits.requests_per_minute, now_ns)
        if limits.tokens_per_minute != self.limits.tokens_per_minute:
            self.tokens = _bucket(limits.tokens_per_minute, now_ns)
        self.limits = limits


class _Open(msgspec.Struct):
    """A granted call: whose it is, what its bucket was charged, and whether it still waits."""

    ticket: Ticket
    key: _KeyState
    bucket: Bucket | None
    taken: int
    waiting: bool = True


class Admission:
    """The one door. Times are monotonic seconds and never go back."""

    def __init__(
        self, server: QueueBounds, model: QueueBounds, keys: Mapping[str, KeyLimits] = MappingProxyType({})
    ) -> None:
        self._server = server
        self._model = model
        # Whoever is not named here shares one state, so that names without end cannot fill memory.
        self._anybody = _KeyState(KeyLimits(), 0)
        self._keys = {name: _KeyState(limits, 0) for name, limits in keys.items()}
        self._open: dict[int, _Open] = {}
        self._waiting = Queued()
        self._waiting_of: dict[str, Queued] = {}
        self._starts: deque[tuple[float, int, int]] = deque(maxlen=_STARTS_KEPT)
        self._next = 0

    def admit(self, ticket: Ticket, now: float) -> Grant | Refused:
        """Let a call in, or say why not and when to come again. Nothing is charged for what is refused."""
        key = self._keys.get(ticket.key, self._anybody)
        now_ns = round(now * _NS)
        refused = self._hopeless(ticket, key) or self._limited(ticket, key, now_ns) or self._crowded(ticket, now)
        if refused is not None:
            return refused
        if key.requests is not None:
            key.requests.take(1)
        taken = key.tokens.take(ticket.total_tokens) if key.tokens is not None else 0
        key.running += 1
        for queued in (self._waiting, self._waiting_of.setdefault(ticket.model, Queued())):
            queued.choices += ticket.choices
            queued.tokens += ticket.prompt_tokens
        self._next += 1
        self._open[self._next] = _Open(ticket, key, key.tokens, taken)
        return Grant(self._next)

    def start(self, grant: Grant, now: float) -> None:
        """The call has its first token: it waits no longer. Only the first time counts."""
        call = self._open.get(grant.number)
        require(call is not None, "a call that is not open has started")
        if call is not None and call.waiting:
            self._leave_queue(call)
            self._starts.append((now, call.ticket.choices, call.ticket.prompt_tokens))

    def finish(self, grant: Grant, used_tokens: int, now: float) -> None:
        """The call is over, whatever the reason, and has used so many tokens. Exactly once for each grant."""
        call = self._open.pop(grant.number, None)
        if call is None:
            require(False, "a call was finished that is not open")
            return
        if call.waiting:
            self._leave_queue(call)
        call.key.running -= 1
        if call.bucket is not None:
            call.bucket.settle(call.taken, used_tokens, round(now * _NS))

    def rekey(self, keys: Mapping[str, KeyLimits], now: float) -> None:
        """Other keys or limits from now on. Calls in progress are finished under the key they came with."""
        now_ns = round(now * _NS)
        kept = {name: self._keys.get(name) or _KeyState(limits, now_ns) for name, limits in keys.items()}
        for name, state in kept.items():
            state.change(keys[name], now_ns)
        self._keys = kept

    def queued(self, model: str | None = None) -> tuple[int, int]:
        """Choices and prompt tokens that wait, for one model or for all."""
        queued = self._waiting if model is None else self._waiting_of.get(model, Queued())
        return queued.choices, queued.tokens

    @property
    def open_calls(self) -> int:
        return len(self._open)

    def _hopeless(self, ticket: Ticket, key: _KeyState) -> Refused | None:
        """What no waiting can help."""
        most = key.limits.tokens_per_request
        if most is not None and ticket.total_tokens > most:
            return Refused(
                f"prompts and answers may have {ticket.total_tokens} tokens together, and this key allows {most} in "
                "one call; lower max_tokens, n or the number of prompts",
                param="max_tokens", code="key_budget_exceeded",
            )  # fmt: skip
        bound = QueueBounds(
            min(self._server.choices, self._model.choices), min(self._server.tokens, self._model.tokens)
        )
        if ticket.choices > bound.choices or ticket.prompt_tokens > bound.tokens:
            return Refused(
                f"one call may have {bound.choices} choices and {bound.tokens} prompt tokens here, and this one has "
                f"{ticket.choices} and {ticket.prompt_tokens}; send it in parts",
                param=ticket.param, code="call_too_large",
            )  # fmt: skip
        return None

    def _limited(self, ticket: Ticket, key: _KeyState, now_ns: int) -> Refused | None:
        """A limit of the key that time will lift."""
        limits = key.limits
        if limits.requests is not None and key.running >= limits.requests:
            return _rate_limited(f"this key may have {limits.requests} requests in progress", 1.0)
        if key.requests is not None and (wait_ns := key.requests.wait_ns(1, now_ns)):
            return _rate_limited(f"this key may send {limits.requests_per_minute} requests a minute", wait_ns / _NS)
        if key.tokens is not None and (wait_ns := key.tokens.wait_ns(ticket.total_tokens, now_ns)):
            return _rate_limited(f"this key may use {limits.tokens_per_minute} tokens a minute", wait_ns / _NS)
        return None

    def _crowded(self, ticket: Ticket, now: float) -> Refused | None:
        """The queue has no room for it."""
        over_choices = over_tokens = 0
        of_model = self._waiting_of.get(ticket.model, Queued())
        for queued, bounds in ((self._waiting, self._server), (of_model, self._model)):
            over_choices = max(over_choices, queued.choices + ticket.choices - bounds.choices)
            over_tokens = max(over_tokens, queued.tokens + ticket.prompt_tokens - bounds.tokens)
        if over_choices <= 0 and over_tokens <= 0:
            return None
        return Refused(
            "too many requests wait for this server; come again later", status=429, kind="server_error",
            code="server_overloaded", retry_after_s=self._drained_s(over_choices, over_tokens, now),
        )  # fmt: skip

    def _drained_s(self, choices: int, tokens: int, now: float) -> float:
        """When so many choices and tokens will have left the queue, if it goes on as it went lately."""
        if len(self._starts) < 2:
            return 1.0
        span_s = max(now - self._starts[0][0], 1e-3)
        started = list(self._starts)[1:]  # the first one marks where the span begins
        choices_s = choices * span_s / max(1, sum(one[1] for one in started))
        tokens_s = tokens * span_s / max(1, sum(one[2] for one in started))
        return min(max(choices_s, tokens_s, 0.1), _LONGEST_RETRY_S)

    def _leave_queue(self, call: _Open) -> None:
        call.waiting = False
        of_model = self._waiting_of[call.ticket.model]
        for queued in (self._waiting, of_model):
            queued.choices -= call.ticket.choices
            queued.tokens -= call.ticket.prompt_tokens
        if of_model.choices == 0:
            del self._waiting_of[call.ticket.model]


def queue_bounds(
    requests: int | None, tokens: int | None, *, sequences: int, step_tokens: int, models: int
) -> tuple[QueueBounds, QueueBounds]:
    """The bounds of the server and of each model: what was asked for, else what `sequences` can work off.

    With several models no single one may fill more than half of the queue.
    """
    choices = requests or max(4096, 32 * sequences)
    server = QueueBounds(choices, tokens or choices * step_tokens)
    return server, server if models == 1 else QueueBounds(math.ceil(choices / 2), math.ceil(server.tokens / 2))


def _bucket(per_minute: int | None, now_ns: int) -> Bucket | None:
    return Bucket(per_minute, now_ns) if per_minute is not None else None


def _rate_limited(limit: str, wait_s: float) -> Refused:
    return Refused(
        f"{limit}, and it has; try again in {wait_s:.1f} s", status=429, kind="rate_limit_error",
        code="rate_limit_exceeded", retry_after_s=wait_s,
    )  # fmt: skip
