"""What the admin routes answer, as records, and how memory and events are put into them. Pure.

`operate` fills the records from the node, `http/admin` writes them, `terminal` reads them; /openapi.json describes
them. Sizes are in bytes and pages, times in seconds. A field that may be missing has the default UNSET.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from janus_server.api.answers import Count, ErrorDetails
from janus_server.orders import Action, Answer, Done, Event, Failed, Lost, Order, Phases, Refuse, Wish
from janus_server.types import Owner

StageName = Literal["cold", "warm", "active"]
VerbName = Literal["load", "wake", "fork", "drain", "serve", "sleep", "unload", "evict"]
PageUse = Literal["weights", "kv", "scratch", "free"]

# What can be asked for here.
WISHES = (Wish.LOAD, Wish.WAKE, Wish.SLEEP, Wish.EVICT, Wish.FORK, Wish.PIN, Wish.UNPIN)

LOST = "it failed while it ran; the server's log says why"
HOW = (
    "external: free pages that no mapping could use, over all pages; every mapping takes pages one by one from "
    "wherever they are free, so none is ever useless. contiguous: what it would be if a request needed its pages in "
    "one run: free pages in runs shorter than the largest request, over all pages. The largest request is the weights "
    "of the largest model that is not on the device, else one page of KV cache."
)


class UnderWay(msgspec.Struct, kw_only=True):
    """An order that is being carried out, and how far it is; total_bytes is null until the first bytes have moved."""

    order: Count
    verb: VerbName
    why: str
    for_s: float
    done_bytes: Count
    total_bytes: Count | None


class Prediction(msgspec.Struct, kw_only=True):
    """What is expected of a model with a promise at the traffic of the last period that had any, which ended age_s ago.

    target, attained and predicted are shares of requests that keep all that was promised: wanted, seen in that period
    (null where none ended), and expected; predicted_least and needs_most are what a cautious guess counts with. hbm,
    compute and bandwidth are expected shares of what models may have of the device, needs is the largest of them;
    busy_share is the time that it spent on this model in the last period. periods counts what was observed; fitted says
    that this was learnt from, not only derived from the model's size and step times.
    """

    says: str
    age_s: float
    requests_per_s: float
    tokens_per_s: float
    target: float
    attained: float | None
    predicted: float
    predicted_least: float
    needs: float
    needs_most: float
    hbm: float
    compute: float
    bandwidth: float
    busy_share: float | None
    periods: Count
    fitted: bool


class ManagedModel(msgspec.Struct, kw_only=True):
    """Where one model stands. goal is the stage that an operator asked for and that is not reached yet.

    running counts its requests, held the calls that wait for it to become active. weight_pages and weight_bytes are
    what its weights take while it is active; held_pages and kv_pages are pages of the pool that it holds now. idle_s is
    null while it has requests or is not active. trouble is why the last order failed; null once one succeeded.
    prepared says that its tokenizer is read: a request need not wait for that. origin is how it became active, source
    the node that it was copied from then. prediction is null for a model without a promise, and until it was measured.
    """

    model: str
    stage: StageName
    goal: StageName | None
    under_way: UnderWay | None
    pinned: bool
    draining: bool
    running: Count
    held: Count
    idle_s: float | None
    weight_pages: Count
    weight_bytes: Count
    held_pages: Count
    kv_pages: Count
    host_copy_bytes: Count
    load_s: float
    wake_s: float
    trouble: str | None
    prepared: bool
    origin: Literal["load", "wake", "fork"] | None
    source: str | None
    prediction: Prediction | None = None


class ManagedList(msgspec.Struct, kw_only=True):
    """Every model of the catalogue, in its order."""

    object: Literal["list"]
    data: list[ManagedModel]


class ForkBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which node to copy the model from; without one, the peer that holds it and is read least."""

    source: Annotated[str, msgspec.Meta(max_length=64)] | None = None


class PeerModel(msgspec.Struct, kw_only=True):
    """A model that a peer holds active. why says why it is of no use here; null where it can be copied."""

    model: str
    bytes: Count
    readers: Count
    why: str | None


class PeerNode(msgspec.Struct, kw_only=True):
    """Another server of this user on this machine. trouble is null unless it did not say what it holds."""

    node: str
    models: list[PeerModel]
    trouble: str | None


class PeerList(msgspec.Struct, kw_only=True):
    """Every peer that is seen now; node is this server's own name, null where it has none and shares nothing."""

    object: Literal["list"]
    node: str | None
    data: list[PeerNode]


class Wished(msgspec.Struct, kw_only=True):
    """A wish that was accepted: why says what comes of it, state is how the model stands now."""

    model: str
    why: str
    state: ManagedModel


class AdminErrorDetails(ErrorDetails, kw_only=True):
    """With the model as it stands, where a wish conflicts with that or was not fulfilled in time."""

    state: ManagedModel | UnsetType = UNSET


class AdminError(msgspec.Struct, kw_only=True):
    """The body of every answer of an admin route that is not a success."""

    error: AdminErrorDetails


class PageRun(msgspec.Struct, array_like=True):
    """Pages first … first+count-1 belong to the model for that use; free ones to nobody."""

    first: Count
    count: Count
    model: str | None
    kind: PageUse


class Total(msgspec.Struct, kw_only=True):
    """What one model holds for one use."""

    model: str
    kind: PageUse
    pages: Count
    bytes: Count


class ModelMemory(msgspec.Struct, kw_only=True):
    """How well one model fills the pages that it holds.

    weight_extents are runs of neighbouring pages that its weights lie in. weight_waste_bytes follow them in the last
    page; kv_waste_bytes are what is left of KV pages after the tokens that fit, and positions that hold no token yet.
    prefix_pages hold beginnings of prompts that no request uses now: they are given up when somebody needs room.
    """

    model: str
    weight_extents: Count
    weight_waste_bytes: Count
    kv_waste_bytes: Count
    prefix_pages: Count


class Fragmentation(msgspec.Struct, kw_only=True):
    """Shares of the pool. `how` says how both are computed."""

    external: float
    contiguous: float
    largest_request_pages: Count
    longest_free_run_pages: Count
    how: str


class HostCopyBytes(msgspec.Struct, kw_only=True):
    model: str
    bytes: Count


class HostMemory(msgspec.Struct, kw_only=True):
    """Copies of weights in host memory, whole chunks, and what all of them may take together."""

    budget_bytes: Count
    held_bytes: Count
    copies: list[HostCopyBytes]


class MemoryMap(msgspec.Struct, kw_only=True):
    """Every page of the pool at one moment between two steps. The runs cover all pages, the free ones too, in order."""

    page_bytes: Count
    pool_pages: Count
    free_pages: Count
    runs: list[PageRun]
    totals: list[Total]
    models: list[ModelMemory]
    fragmentation: Fragmentation
    host: HostMemory


class ModelEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The JSON of one event: what was ordered, how far it is, how it ended, and what was answered to whom.

    order: an order was given. progress: bytes moved for it. done, failed: it ended, the model stands at `stage`;
    phases are the seconds of took_s by what they went into.
    lost: the model was torn down by an error. refused: who waited for it was sent away. answer: to an operator's wish.
    gap: this reader was too slow, `count` events are missing here. time is Unix time.
    """

    type: Literal["order", "progress", "done", "failed", "lost", "refused", "answer", "gap"]
    time: float
    model: str | UnsetType = UNSET
    order: Count | UnsetType = UNSET
    verb: VerbName | UnsetType = UNSET
    why: str | UnsetType = UNSET
    stage: StageName | UnsetType = UNSET
    copy: bool | UnsetType = UNSET
    took_s: float | UnsetType = UNSET
    phases: Phases | UnsetType = UNSET
    done_bytes: Count | UnsetType = UNSET
    total_bytes: Count | UnsetType = UNSET
    accepted: bool | UnsetType = UNSET
    retry_after_s: float | UnsetType | None = UNSET
    count: Count | UnsetType = UNSET


def told(news: Event | Action, order: Order | None, now: float) -> ModelEvent | None:
    """The event for what the leader saw; None for what concerns nobody outside. order is the one that ended."""
    match news:
        case Order(id=number, model=model, verb=verb, why=why):
            return ModelEvent(type="order", time=now, model=model, order=number, verb=verb.value, why=why)
        case Done(stage=stage, copy=copy, took_s=took_s, phases=phases) if order is not None:
            return ModelEvent(
                type="done", time=now, model=order.model, order=order.id, verb=order.verb.value, stage=stage.value,
                copy=copy, took_s=took_s, phases=phases,
            )  # fmt: skip
        case Failed(stage=stage, copy=copy, reason=reason) if order is not None:
            return ModelEvent(
                type="failed", time=now, model=order.model, order=order.id, verb=order.verb.value, stage=stage.value,
                copy=copy, why=reason,
            )  # fmt: skip
        case Lost(_, model, stage, copy):
            return ModelEvent(type="lost", time=now, model=model, stage=stage.value, copy=copy, why=LOST)
        case Refuse(model, why, retry_after_s):
            return ModelEvent(type="refused", time=now, model=model, why=why, retry_after_s=retry_after_s)
        case Answer(model, accepted, why):
            return ModelEvent(type="answer", time=now, model=model, accepted=accepted, why=why)
    return None


class Taking(msgspec.Struct, frozen=True):
    """What a model takes on the device: bytes and pages of its weights, pages of KV of how many tokens of how much."""

    model: str
    weight_bytes: int
    weight_pages: int
    page_tokens: int
    token_bytes: int


class KvUse(msgspec.Struct, frozen=True):
    """Positions in a model's KV pages that hold no token yet, and pages that only its prefix cache holds."""

    empty_tokens: int = 0
    prefix_pages: int = 0


class Survey(msgspec.Struct, frozen=True):
    """The pool as it was between two steps: the holder of each page, and how the models on the device use theirs."""

    owners: tuple[Owner | None, ...]
    kv: Mapping[str, KvUse]


def memory_map(
    survey: Survey, models: Sequence[Taking], page_bytes: int, host: Mapping[str, int], host_budget_bytes: int
) -> MemoryMap:
    """The whole map; host is the bytes of host copies by model."""
    runs = list(runs_of(survey.owners))
    held: dict[tuple[str, str], int] = {}
    extents: dict[tuple[str, str], int] = {}
    for run in runs:
        if run.model is not None:
            held[run.model, run.kind] = held.get((run.model, run.kind), 0) + run.count
            extents[run.model, run.kind] = extents.get((run.model, run.kind), 0) + 1
    totals = [
        Total(model=model, kind=_use(kind), pages=pages, bytes=pages * page_bytes)
        for (model, kind), pages in sorted(held.items())
    ]
    measured = []
    for one in models:
        weights, kv = held.get((one.model, "weights"), 0), held.get((one.model, "kv"), 0)
        use = survey.kv.get(one.model, KvUse())
        measured.append(ModelMemory(
            model=one.model,
            weight_extents=extents.get((one.model, "weights"), 0),
            weight_waste_bytes=weights * page_bytes - one.weight_bytes if weights else 0,
            kv_waste_bytes=kv * (page_bytes - one.page_tokens * one.token_bytes) + use.empty_tokens * one.token_bytes,
            prefix_pages=use.prefix_pages,
        ))  # fmt: skip
    absent = [one.weight_pages for one in models if (one.model, "weights") not in held]
    return MemoryMap(
        page_bytes=page_bytes,
        pool_pages=len(survey.owners),
        free_pages=sum(run.count for run in runs if run.model is None),
        runs=runs,
        totals=totals,
        models=measured,
        fragmentation=fragmentation(runs, len(survey.owners), max(absent, default=1)),
        host=HostMemory(
            budget_bytes=host_budget_bytes,
            held_bytes=sum(host.values()),
            copies=[HostCopyBytes(model=model, bytes=size) for model, size in sorted(host.items())],
        ),
    )


def runs_of(owners: Sequence[Owner | None]) -> Iterator[PageRun]:
    """Neighbouring pages of one holder as one run. Example: holders a a – a give [0, 2, a], [2, 1, free], [3, 1, a]."""
    first = 0
    for page in range(1, len(owners) + 1):
        if page == len(owners) or owners[page] != owners[first]:
            owner = owners[first]
            kind: PageUse = "free" if owner is None else _use(owner.kind.value)
            yield PageRun(first, page - first, None if owner is None else owner.model, kind)
            first = page


def fragmentation(runs: Sequence[PageRun], pool_pages: int, largest_pages: int) -> Fragmentation:
    """As `HOW` says. Example: free runs of 2 and 5 in a pool of 10, largest request 4: external 0, contiguous 0.2."""
    free = [run.count for run in runs if run.model is None]
    return Fragmentation(
        external=sum(count % _MAPPED_AT_ONCE for count in free) / pool_pages,
        contiguous=sum(count for count in free if count < largest_pages) / pool_pages,
        largest_request_pages=largest_pages,
        longest_free_run_pages=max(free, default=0),
        how=HOW,
    )


# A mapping takes single pages, so a free page is of use wherever it lies; were it two, odd ones would be lost.
_MAPPED_AT_ONCE = 1


def _use(kind: str) -> PageUse:
    """A page kind's word, for the type checker."""
    match kind:
        case "weights" | "kv" | "scratch":
            return kind
    return "free"
