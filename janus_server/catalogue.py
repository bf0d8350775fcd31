"""The models that a node may serve: headers read, layouts planned, sizes known. Nothing of the weights is read here.

`node` opens the catalogue at start on a worker thread. A model enters it only if it can be served on this node, alone
at least; which of them share the device is the Brain's to decide.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable

import msgspec

from janus_server.api.dialect import MARKERS, Dialect, dialect_of, markers_of
from janus_server.api.plan import Target
from janus_server.config import DTypeChoice, ServeConfig
from janus_server.errors import BadConfig, BadModel
from janus_server.kernels.table import DType, Kernels, StepShape
from janus_server.kv.blocks import pages_for
from janus_server.kv.host import CHUNK_BYTES, chunks_for
from janus_server.kv.xtensor import KvLayout, kv_layout
from janus_server.model.checkpoint import as_it_is_now, contents_of
from janus_server.model.load import Checkpoint, open_checkpoint, plan_layout
from janus_server.model.pooling import pooling_of
from janus_server.model.scratch import READ_ROWS, StepSize, scratch_bytes, step_size
from janus_server.model.spec import ModelSpec, SamplingDefaults
from janus_server.model.weights import Layout, form_names
from janus_server.modelref import ModelEntry
from janus_server.orders import KnownModel
from janus_server.tokens.render import Renderers
from janus_server.tokens.tokenizer import Tokenizer
from janus_server.types import ModelCard, Sampling
from janus_server.units import format_bytes

# Predictions until the first load and wake were timed: what a page cache and a memory copy gave on a laptop.
LOAD_BYTES_PER_S = 1e9
WAKE_BYTES_PER_S = 4e9
# Where the weights of all models do not fit together, the longest sequence of any may take this share of the pool.
SEQUENCE_SHARE = 4
# At most so small a part of what the largest model's weights leave of the pool is scratch for steps.
SCRATCH_SHARE = 4

log = logging.getLogger("janus.catalogue")


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedModel:
    """A checkpoint whose headers are checked, with what it will take.

    kv_pages is the room that it may have beside the weights and floors of the models it shares the node with;
    longest_pages hold its longest sequence of context_tokens: they and the weights fit on the node together. Its KV
    cache can count on floor_pages while it is Active and never takes more than ceiling_pages. A step has at most `step`
    rows, which take scratch_bytes of the window that all models share, and headroom_bytes are withheld from the pool
    for what kernels allocate beside it. contents tells weights of equal headers apart,
    where nodes copy from each other (`checkpoint.contents_of`).
    """

    entry: ModelEntry
    checkpoint: Checkpoint
    placed: Layout
    kv: KvLayout
    weight_pages: int
    kv_pages: int
    longest_pages: int
    context_tokens: int
    step: StepSize
    scratch_bytes: int
    headroom_bytes: int
    floor_pages: int = 0
    ceiling_pages: int | None = None
    contents: str = ""

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def spec(self) -> ModelSpec:
        return self.checkpoint.spec

    def known(self) -> KnownModel:
        """What the Brain is told of it."""
        size_bytes = self.placed.total_bytes
        return KnownModel(
            model=self.name,
            weight_pages=self.weight_pages,
            host_bytes=chunks_for(size_bytes) * CHUNK_BYTES,
            longest_pages=self.longest_pages,
            floor_pages=self.floor_pages,
            load_s=size_bytes / LOAD_BYTES_PER_S,
            wake_s=size_bytes / WAKE_BYTES_PER_S,
            idle_s=self.entry.options.idle_s,
            pinned=self.entry.options.pinned,
            preload=self.entry.options.preload,
            kv_token_bytes=self.kv.token_bytes,
            context_tokens=self.context_tokens,
            numbers=f"{form_names(self.placed)} (keys and values {self.spec.dtype.name.lower()})",
        )

    def card(self, prefix_caching: bool) -> ModelCard:
        """What clients are told of it."""
        return ModelCard(
            id=self.name,
            created_s=int(time.time()),
            context_tokens=self.context_tokens,
            parameters=sum(slot.n * slot.k for slot in self.placed.entries),
            weight_bytes=self.placed.total_bytes,
            dtype=form_names(self.placed),
            family=self.spec.family.value,
            kv_page_tokens=self.kv.page_tokens,
            kv_pages=self.kv_pages,
            kv_dtype=self.spec.dtype.name.lower(),
            prefix_caching=prefix_caching,
            fingerprint=self.checkpoint.fingerprint,
        )

    def target(self, tokenizer: Tokenizer) -> Target:
        """What requests to it are checked against."""
        # A tokenizer may know ids that the model has no row for; such an id can never be drawn.
        eos_ids = (i for i in dict.fromkeys([*self.spec.eos_ids, *tokenizer.eos_ids]) if i < self.spec.vocab)
        defaults = _defaults(self.spec.sampling, self.entry.sampling)
        return Target(
            self.name, self.context_tokens, self.spec.vocab, tuple(eos_ids), defaults, _dialect(tokenizer),
            self.spec.hidden, pooling_of(self.checkpoint),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class _Bounds:
    """Pages that one model's KV cache is to have, as its options say."""

    floor: int
    ceiling: int | None

    @classmethod
    def of(cls, entry: ModelEntry, page_bytes: int) -> _Bounds:
        """A floor is rounded up and a ceiling down, so that both are kept."""
        floor_bytes, ceiling_bytes = entry.options.kv_floor_bytes, entry.options.kv_ceiling_bytes
        floor = pages_for(floor_bytes, page_bytes)
        ceiling = None if ceiling_bytes is None else ceiling_bytes // page_bytes
        if ceiling is not None and ceiling < max(floor, 1):
            raise BadConfig(
                f"[models.{entry.name}]: kv_ceiling {format_bytes(ceiling_bytes or 0)} holds {ceiling} pages of "
                f"{format_bytes(page_bytes)}, and at least {max(floor, 1)} are wanted; raise it, or lower kv_floor or "
                "--page-size"
            )
        return cls(floor, ceiling)


def open_models(config: ServeConfig, kernels: Kernels) -> tuple[OpenedModel, ...]:
    """Open every checkpoint of the configuration. BadModel where one is broken, BadConfig where one can never fit."""
    checkpoints = [open_checkpoint(entry.path, _dtype(config)) for entry in config.models]
    layouts = [plan_layout(checkpoint, kernels) for checkpoint in checkpoints]
    weights = [pages_for(one.total_bytes, config.page_bytes) for one in layouts]
    steps = _steps([one.spec for one in checkpoints], kernels, config, max(weights, default=0))
    scratch = [scratch_bytes(one.spec, kernels, step) for one, step in zip(checkpoints, steps, strict=True)]
    spare_bytes = _scratch_bytes(config, max(weights, default=0)) - max(scratch, default=0)
    headroom = _headroom([one.spec for one in checkpoints], kernels, config, steps, max(spare_bytes, 0))
    beside = sum(pages_for(max(taken, default=0), config.page_bytes) for taken in (scratch, headroom))
    pool = config.memory_bytes // config.page_bytes - beside
    bounds = [_Bounds.of(entry, config.page_bytes) for entry in config.models]
    shared = pool - sum(weights) - sum(one.floor for one in bounds)
    opened = []
    for entry, checkpoint, placed, pages, kept, step, step_bytes, held_back in zip(
        config.models, checkpoints, layouts, weights, bounds, steps, scratch, headroom, strict=True
    ):
        spec = checkpoint.spec
        kv = kv_layout(config.page_bytes, spec.n_layers, spec.kv_heads, spec.head_dim, spec.dtype.bytes)
        _check_alone(entry.name, pages, kept, config, pool)
        # Where all are on the device together each has its own floor and what nobody's floor takes.
        together = shared + kept.floor
        room = together if shared >= 0 and together > 0 else _share_of(pool, pages, kept)
        most = pool - pages
        if kept.ceiling is not None:
            room, most = min(room, kept.ceiling), min(most, kept.ceiling)
        context = _context_tokens(entry, spec.context_tokens, config, kv, room, most)
        longest = pages_for(context, kv.page_tokens)
        one = OpenedModel(
            entry, checkpoint, placed, kv, pages, room, longest, context, step, step_bytes, held_back, kept.floor,
            kept.ceiling,
        )  # fmt: skip
        opened.append(one)
    _check_pinned(opened, config, pool)
    return tuple(opened)


def scratch_pages(opened: Iterable[OpenedModel], page_bytes: int) -> int:
    """Pages of the scratch window: the most that a step of any model takes."""
    return pages_for(max((one.scratch_bytes for one in opened), default=0), page_bytes)


def headroom_pages(opened: Iterable[OpenedModel], page_bytes: int) -> int:
    """Pages withheld for what kernels allocate in a step of any model."""
    return pages_for(max((one.headroom_bytes for one in opened), default=0), page_bytes)


def reopened(model: OpenedModel) -> OpenedModel:
    """The model with its files as they lie there now. OSError while they are gone, BadModel where they are others."""
    now = as_it_is_now(model.checkpoint)
    if now is model.checkpoint:
        return model
    if model.contents and contents_of(now) != model.contents:
        raise BadModel(f"{model.checkpoint.path.name} holds other weights now; restart the server to serve them.")
    log.warning("%s: its files were written to since they were read; samples of them are compared", model.name)
    return dataclasses.replace(model, checkpoint=now)


def tokenizer_of(model: OpenedModel, renderers: Renderers) -> Tokenizer:
    """The tokenizer with its chat template compiled: the first chat would wait 80 ms for that."""
    folder = model.checkpoint.tokenizer_folder
    if folder is None:
        tokenizer = Tokenizer.from_gguf(model.checkpoint.metadata, renderers)
    else:
        tokenizer = Tokenizer.from_folder(folder, renderers)
    tokenizer.compile_templates()
    return tokenizer


def _dialect(tokenizer: Tokenizer) -> Dialect:
    """How the model speaks beyond plain text, from its template and vocabulary."""
    markers = markers_of(tokenizer.added(MARKERS))
    return dialect_of(tokenizer.chat_template, tokenizer.tool_template, markers)


def _dtype(config: ServeConfig) -> DType | None:
    """What to store weights as; None follows the checkpoint."""
    match config.dtype:
        case DTypeChoice.FLOAT32:
            return DType.F32
        case DTypeChoice.BFLOAT16:
            return DType.BF16
        case DTypeChoice.AUTO:
            return None


def _defaults(suggested: SamplingDefaults, otherwise: Sampling) -> Sampling:
    """How to sample where a client says nothing: as the checkpoint suggests, else as the entry does."""
    given = {name: value for name, value in msgspec.structs.asdict(suggested).items() if value is not None}
    return msgspec.structs.replace(otherwise, **given)


def _share_of(pool: int, weights: int, kept: _Bounds) -> int:
    """The room of a model that cannot always be on the device together with all others."""
    return min(pool - weights, max(pool // SEQUENCE_SHARE, kept.floor, 1))


def _steps(specs: list[ModelSpec], kernels: Kernels, config: ServeConfig, weights: int) -> list[StepSize]:
    """How large a step of each model may be: as was asked for, where scratch for it leaves enough for sequences."""
    rows = max(config.max_num_batched_tokens, config.max_num_seqs)
    wanted = StepSize(rows, min(config.max_num_seqs, rows), min(READ_ROWS, rows))
    most_bytes = _scratch_bytes(config, weights)
    steps = [step_size(spec, kernels, wanted, most_bytes) for spec in specs]
    for entry, step in zip(config.models, steps, strict=True):
        if step != wanted:
            log.warning(
                "%s: --memory is short: steps of at most %d tokens (asked for: %d) and %d sequences (%d)",
                entry.name, step.rows, wanted.rows, step.drawn, wanted.drawn,
            )  # fmt: skip
    return steps


def _scratch_bytes(config: ServeConfig, weights: int) -> int:
    """The most that scratch and headroom may take: one part in SCRATCH_SHARE of what the largest model's weights, so
    many pages, leave of the pool. They need a few per cent but where memory is short: there steps are made smaller."""
    return max(1, (config.memory_bytes // config.page_bytes - weights) // SCRATCH_SHARE) * config.page_bytes


def _headroom(
    specs: list[ModelSpec], kernels: Kernels, config: ServeConfig, steps: list[StepSize], spare_bytes: int
) -> list[int]:
    """What the kernels' own allocator takes in the largest step of each model, in bytes, as far as spare_bytes cover
    it. What they do not is taken beyond --memory, and said."""
    found = []
    for entry, spec, step in zip(config.models, specs, steps, strict=True):
        context = min(spec.context_tokens, entry.options.max_model_len or config.max_model_len or spec.context_tokens)
        taken = kernels.temporary_bytes(StepShape(
            step.rows, step.drawn, context, spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim,
            spec.ffn, spec.vocab, spec.dtype,
        ))  # fmt: skip
        held_back = min(taken, spare_bytes // config.page_bytes * config.page_bytes)
        if taken > held_back:
            over, name = format_bytes(taken - held_back), entry.name
            log.warning("%s: kernels %s may take %s beyond --memory while they run", name, kernels.name, over)
        found.append(held_back)
    return found


def _check_alone(name: str, weights: int, kept: _Bounds, config: ServeConfig, pool: int) -> None:
    """BadConfig where a model does not fit even with the node to itself."""
    page_bytes = config.page_bytes
    if weights + max(kept.floor, 1) <= pool:
        return
    takes, memory = format_bytes(weights * page_bytes), format_bytes(config.memory_bytes)
    if weights < pool:
        raise BadConfig(
            f"[models.{name}]: its weights take {takes} and kv_floor {format_bytes(kept.floor * page_bytes)}; --memory "
            f"is {memory}: lower kv_floor to {format_bytes((pool - weights) * page_bytes)} or give more"
        )
    raise BadConfig(
        f"{name}: its weights take {takes} and --memory is {memory}; give more (the KV cache needs some too)"
    )


def _check_pinned(opened: list[OpenedModel], config: ServeConfig, pool: int) -> None:
    """BadConfig where models that are never to leave the device cannot be there together, or leave no room for one."""
    pinned = [one for one in opened if one.entry.options.pinned]
    others = [[*pinned, one] for one in opened if not one.entry.options.pinned] if pinned else []
    for together in (pinned, *others):
        weights, floors = sum(one.weight_pages for one in together), sum(one.floor_pages for one in together)
        # The longest sequence of any must be able to finish while the others' floors are kept.
        beside = max((max(one.longest_pages - one.floor_pages, 0) for one in together), default=0)
        needed = weights + floors + beside
        if needed <= pool:
            continue
        names = ", ".join(one.name for one in pinned)
        who = f"the pinned models ({names})" if together is pinned else f"{together[-1].name} beside the pinned {names}"
        sizes = [format_bytes(pages * config.page_bytes) for pages in (needed, weights, floors, beside)]
        raise BadConfig(
            f"{who} would need {sizes[0]}: {sizes[1]} of weights, {sizes[2]} of kv_floor and {sizes[3]} for the "
            f"longest sequence; --memory is {format_bytes(config.memory_bytes)}: give more, pin fewer, or lower "
            "kv_floor or max_model_len"
        )


def _context_tokens(entry: ModelEntry, supported: int, config: ServeConfig, kv: KvLayout, room: int, most: int) -> int:
    """The longest sequence served: what was asked for, else what the model and `room` pages allow.

    An asked length may take up to `most` pages: all that its own weights leave of the pool, or its ceiling.
    """
    name, options = entry.name, entry.options
    bound = "" if options.kv_ceiling_bytes is None else f" (kv_ceiling {format_bytes(options.kv_ceiling_bytes)})"
    holds = room * kv.page_tokens
    asked = config.max_model_len if options.max_model_len is None else options.max_model_len
    if asked is None:
        if holds < 2:
            raise BadConfig(
                f"{name}: {holds} tokens of KV memory are left{bound}; raise --memory or serve fewer models"
            )
        return min(supported, holds)
    if asked > supported:
        raise BadConfig(f"max-model-len {asked} is more than {name} supports ({supported} tokens)")
    if pages_for(asked, kv.page_tokens) > most:
        raise BadConfig(
            f"max-model-len {asked} needs {format_bytes(asked * kv.token_bytes)} of KV memory for {name}; "
            f"{most * kv.page_tokens} tokens fit{bound}: lower it or raise memory{' or kv_ceiling' if bound else ''}"
        )
    return asked
