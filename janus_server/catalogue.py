"""The models that a node may serve: headers read, layouts planned, sizes known. Nothing of the weights is read here.

`node` opens the catalogue at start on a worker thread. A model enters it only if it can be served on this node, alone
at least; which of them share the device is the Brain's to decide.
"""

from __future__ import annotations

import dataclasses
import time

import msgspec

from janus_server.api.dialect import MARKERS, Dialect, dialect_of, markers_of
from janus_server.api.plan import Target
from janus_server.config import DTypeChoice, ServeConfig
from janus_server.errors import BadConfig
from janus_server.kernels.table import DType, Kernels
from janus_server.kv.blocks import pages_for
from janus_server.kv.host import CHUNK_BYTES, chunks_for
from janus_server.kv.xtensor import KvLayout, kv_layout
from janus_server.model.load import Checkpoint, open_checkpoint, plan_layout
from janus_server.model.pooling import pooling_of
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


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedModel:
    """A checkpoint whose headers are checked, with what it will take.

    kv_pages is the room that it may have beside the weights of the models it shares the node with; longest_pages hold
    its longest sequence of context_tokens: they and the weights fit on the node together.
    """

    entry: ModelEntry
    checkpoint: Checkpoint
    placed: Layout
    kv: KvLayout
    weight_pages: int
    kv_pages: int
    longest_pages: int
    context_tokens: int

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
            load_s=size_bytes / LOAD_BYTES_PER_S,
            wake_s=size_bytes / WAKE_BYTES_PER_S,
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


def open_models(config: ServeConfig, kernels: Kernels) -> tuple[OpenedModel, ...]:
    """Open every checkpoint of the configuration. BadModel where one is broken, BadConfig where one can never fit."""
    checkpoints = [open_checkpoint(entry.path, _dtype(config)) for entry in config.models]
    layouts = [plan_layout(checkpoint, kernels) for checkpoint in checkpoints]
    pool = config.memory_bytes // config.page_bytes
    weights = [pages_for(one.total_bytes, config.page_bytes) for one in layouts]
    shared = pool - sum(weights)
    opened = []
    for entry, checkpoint, placed, pages in zip(config.models, checkpoints, layouts, weights, strict=True):
        spec = checkpoint.spec
        kv = kv_layout(config.page_bytes, spec.n_layers, spec.kv_heads, spec.head_dim, spec.dtype.bytes)
        room = shared if shared > 0 else min(pool - pages, max(pool // SEQUENCE_SHARE, 1))
        if room <= 0:
            raise BadConfig(
                f"{entry.name}: its weights take {format_bytes(pages * config.page_bytes)} and --memory is "
                f"{format_bytes(config.memory_bytes)}; give more (the KV cache needs some too)"
            )
        context = _context_tokens(entry.name, spec.context_tokens, config, kv, room, pool - pages)
        longest = pages_for(context, kv.page_tokens)
        opened.append(OpenedModel(entry, checkpoint, placed, kv, pages, room, longest, context))
    return tuple(opened)


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


def _context_tokens(name: str, supported: int, config: ServeConfig, kv: KvLayout, room: int, most: int) -> int:
    """The longest sequence served: what was asked for, else what the model and `room` pages allow.

    An asked length may take up to `most` pages: all that the model's own weights leave of the pool.
    """
    holds = room * kv.page_tokens
    asked = config.max_model_len
    if asked is None:
        if holds < 2:
            raise BadConfig(f"{name}: {holds} tokens of KV memory are left; raise --memory or serve fewer models")
        return min(supported, holds)
    if asked > supported:
        raise BadConfig(f"max-model-len {asked} is more than {name} supports ({supported} tokens)")
    if pages_for(asked, kv.page_tokens) > most:
        raise BadConfig(
            f"max-model-len {asked} needs {format_bytes(asked * kv.token_bytes)} of KV memory for {name}; "
            f"{most * kv.page_tokens} tokens fit: lower it or raise memory"
        )
    return asked
