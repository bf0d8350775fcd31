"""What the Brain hears and what it orders: the events and actions of placement, as frozen records.

`sched/brain` turns an event into actions; `leader` carries both; `lifecycle` executes orders. Every order carries its
term and id, so that a node may be told twice and does it once. Times are seconds on the leader's monotonic clock.
"""

from __future__ import annotations

import enum

import msgspec

from janus_server.duty import Assigned, Awaited, Count, Duty
from janus_server.sched.cost import PromptCost
from janus_server.sched.oracle_records import Fitted, Observation, Subject
from janus_server.sched.prefixes import Cached, PrefixKey


class Stage(enum.Enum):
    """Where a model stands on one node: only its checkpoint's path, a host copy, or weights in device pages."""

    COLD = "cold"
    WARM = "warm"
    ACTIVE = "active"


class Verb(enum.Enum):
    """What a node can be told to do with one model.

    LOAD reads the checkpoint, WAKE copies from the host copy, FORK copies from another holder: all three end ACTIVE.
    DRAIN holds new requests while running ones finish, SERVE takes them again. SLEEP frees the device pages and keeps
    a host copy (WARM), UNLOAD frees them and keeps nothing (COLD). EVICT frees the host copy: of a WARM model, which
    is COLD then, or of an ACTIVE one, which stays ACTIVE.
    """

    LOAD = "load"
    WAKE = "wake"
    FORK = "fork"
    DRAIN = "drain"
    SERVE = "serve"
    SLEEP = "sleep"
    UNLOAD = "unload"
    EVICT = "evict"

    @property
    def raises(self) -> bool:
        """It brings the model onto the device."""
        return self in (Verb.LOAD, Verb.WAKE, Verb.FORK)

    @property
    def lowers(self) -> bool:
        """It takes the model from the device."""
        return self in (Verb.SLEEP, Verb.UNLOAD)

    @property
    def ends(self) -> bool:
        """It ends with Done or Failed; the others take effect at once."""
        return self not in (Verb.DRAIN, Verb.SERVE)


class Wish(enum.Enum):
    """What an operator asks of one model; the Brain decides what that takes."""

    LOAD = "load"
    WAKE = "wake"
    SLEEP = "sleep"
    EVICT = "evict"
    FORK = "fork"
    PIN = "pin"
    UNPIN = "unpin"

    @property
    def goal(self) -> Stage | None:
        """The stage it aims at; None for those that change how a model is treated, not where it stands."""
        match self:
            case Wish.LOAD | Wish.WAKE | Wish.FORK:
                return Stage.ACTIVE
            case Wish.SLEEP:
                return Stage.WARM
            case Wish.EVICT:
                return Stage.COLD
            case Wish.PIN | Wish.UNPIN:
                return None


class KnownModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the catalogue, with what it takes on a node.

    A replica of several shards has each on a node of its own, which takes as many pages. longest_pages is what its
    longest sequence needs; floor_pages of KV are kept for it while it is Active. load_s and wake_s are predictions,
    from bytes over measured bandwidths until the first of each was timed. preload asks for it to be loaded at start, if
    it fits beside those before it. attain is the share of its requests that are to be on time, None where nothing is
    promised; models of a higher priority get their devices first. checkpoint is a digest of its files: nodes of one
    cluster have the same. kv_token_bytes are the keys and values of one token; a sequence has context_tokens at most.
    numbers are the forms that its weights and its keys and values are held in.
    """

    model: str
    weight_pages: int
    host_bytes: int
    longest_pages: int
    floor_pages: int = 0
    shards: int = 1
    attain: float | None = None
    priority: int = 0
    load_s: float = 1.0
    wake_s: float = 0.1
    idle_s: float | None = None
    pinned: bool = False
    preload: bool = True
    checkpoint: str = ""
    kv_token_bytes: int = 0
    context_tokens: int = 0
    numbers: str = ""


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """A request that waits to be begun, as the leader sees it: no tokens, only how many.

    work_s is what its prompt is predicted to take, ttft_s the promise for its first token, counted from arrived_s; None
    where there is none. prefix stands for the start of its prompt, the shortest first; least_s is what it takes where
    all but its last token is cached.
    """

    id: str
    model: str
    prompt_tokens: int
    work_s: float
    arrived_s: float
    ttft_s: float | None = None
    priority: int = 0
    prefix: tuple[PrefixKey, ...] = ()
    least_s: float = 0.0


# Events


class Joined(msgspec.Struct, frozen=True, tag=True):
    """A node with its pool, its budget for host copies, the catalogue, and what its peers offer (as in `Offered`).

    Nodes of one host share its memory, nodes of one domain have fast links to each other. duty is what an operator has
    it do, as it was told last, and since as in `Charge`; process is another one for each that has the node's name.
    """

    node: str
    pool_pages: int
    host_bytes: int
    models: tuple[KnownModel, ...]
    offers: dict[str, tuple[str, ...]] = {}
    host: str = ""
    domain: str = ""
    duty: Duty = Duty.SERVE
    since: tuple[Count, Count] = (0, 0)
    process: str = ""


class Offered(msgspec.Struct, frozen=True, tag=True):
    """What other nodes hold Active and let be copied: nodes by model, the best first. Models not named have none."""

    offers: dict[str, tuple[str, ...]]


class Wanted(msgspec.Struct, frozen=True, tag=True):
    """A request came for a model that is not Active, or that is being drained; it waits."""

    model: str


class Unwanted(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for the model any more: the clients left, or were refused."""

    model: str


class Busy(msgspec.Struct, frozen=True):
    """How one model on a node stands: requests in its batch and queue, and how long since the last one ended."""

    running: int
    waiting: int
    idle_for_s: float


class Traffic(msgspec.Struct, frozen=True, tag=True):
    """What happened at the front since it was last told: requests that came, whose prompt is computed, that are gone.

    started and left are ids of tickets; who left before its prompt was computed is told of as left, others may be.
    """

    arrived: tuple[Ticket, ...] = ()
    started: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


class Left(msgspec.Struct, frozen=True, tag=True):
    """A node is gone, and all that was on it; who waits for what it had begun is told of anew, as `Traffic`."""

    node: str


class Report(msgspec.Struct, frozen=True, tag=True):
    """How busy the models are that are Active on the node, others left out.

    It is told before every other event, so that what is decided is true when it is decided.
    """

    node: str
    models: dict[str, Busy]


class Phases(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Seconds of a transition by what they went into; the rest is waiting for threads and for each other.

    reserve: room was made and pages taken. touch: pages and host memory that were never used were provided by the
    system. map and unmap: addresses. copy: the bytes moved. verify: samples of them were compared. commit: the device
    thread took the model in, or let it go.
    """

    reserve_s: float = 0.0
    touch_s: float = 0.0
    map_s: float = 0.0
    copy_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    unmap_s: float = 0.0


class Done(msgspec.Struct, frozen=True, tag=True):
    """An order was carried out; took_s teaches what the next one will take, phases say what it went into.

    stage is where the model stands now, copy whether the host holds its weights.
    """

    order: int
    stage: Stage
    copy: bool
    took_s: float
    phases: Phases = Phases()


class Failed(msgspec.Struct, frozen=True, tag=True):
    """An order failed and was rolled back: the model stands at `stage`. lasting means that trying again is no use."""

    order: int
    stage: Stage
    copy: bool
    reason: str
    lasting: bool = False


class Lost(msgspec.Struct, frozen=True, tag=True):
    """A model's instance on a node was torn down by an error: it is Cold or Warm again without an order."""

    node: str
    model: str
    stage: Stage
    copy: bool


class Asked(msgspec.Struct, frozen=True, tag=True):
    """An operator's wish. To fork it takes the name of the node to copy from.

    Without a node it goes to where it makes sense: the best one for a model to be brought onto, all that have it
    otherwise.
    """

    model: str
    wish: Wish
    source: str | None = None
    node: str | None = None


class Observed(msgspec.Struct, frozen=True, tag=True):
    """What was measured of the models that had traffic, over the period that ends now.

    subjects are models with a promise that have run long enough for it to be known how they run here: told once.
    Observations with no replicas are of periods in which the model was not Active all the time.
    """

    models: dict[str, Observation]
    subjects: dict[str, Subject] = {}


class Counts(msgspec.Struct, frozen=True):
    """Of one model, over all nodes since the leader leads: tokens of the prompts that came and of the answers so far,
    of the requests that a promise was made for those that ended and those of them that were late, and how many came.
    prompt: what one node has learnt of its prompts."""

    input_tokens: int
    output_tokens: int
    ended: int = 0
    late: int = 0
    requests: int = 0
    prompt: PromptCost | None = None


class Counted(msgspec.Struct, frozen=True, tag=True):
    """Twice a second: what was counted of the models of which anything changed since it was last told."""

    models: dict[str, Counts]


class Tick(msgspec.Struct, frozen=True, tag=True):
    """Time passed: `Brain.next_wake` asked for it."""


Event = (
    Joined
    | Awaited
    | Left
    | Offered
    | Traffic
    | Wanted
    | Unwanted
    | Report
    | Done
    | Failed
    | Lost
    | Asked
    | Assigned
    | Observed
    | Counted
    | Cached
    | Fitted
    | Tick
)
"""`Fitted` brings what came of a `Refit`."""

Wished = Asked | Assigned
"""Events that bring an operator's wish: the Brain has one `Answer` to each."""


# Actions


class Order(msgspec.Struct, frozen=True, tag=True):
    """One step for one model on one node, with the sentence that explains it. FORK has a source: a node's name.

    replica are all nodes of the replica where it has several shards, its head first, which requests are handed to.
    """

    term: int
    id: int
    node: str
    model: str
    verb: Verb
    why: str
    source: str | None = None
    replica: tuple[str, ...] = ()


class Helper(msgspec.Struct, frozen=True, array_like=True):
    """A node that computes the first tokens of a prompt for the one that runs its request, or has them cached."""

    node: str
    tokens: int
    cached: bool = False


class Dispatch(msgspec.Struct, frozen=True, tag=True):
    """Begin these requests on a node, in this order; requests are ids of tickets. helper may compute their prompts."""

    node: str
    requests: tuple[str, ...]
    why: str
    helper: Helper | None = None


class Refuse(msgspec.Struct, frozen=True, tag=True):
    """End the requests that wait for a model: it cannot be had. retry_after_s None means never, as things stand."""

    model: str
    why: str
    retry_after_s: float | None


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The immediate answer to an operator's wish: accepted, or a conflict with the present state."""

    model: str
    accepted: bool
    why: str


class Refit(msgspec.Struct, frozen=True, tag=True):
    """Fit what was observed of a model anew, from what `Brain.fit_request` says: it would double the journal here."""

    model: str
    why: str


class Decided(msgspec.Struct, frozen=True, tag=True):
    """Something was decided that orders follow from later, or found impossible: what is to be known of it."""

    subject: str
    why: str


Action = Order | Dispatch | Refuse | Answer | Refit | Decided
