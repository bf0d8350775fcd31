"""The life of a model on this node: from checkpoint to served. Called by `node`, on a worker thread.

`open_models` reads headers and checks that everything fits before a byte of weights is read; `fill` reserves pages,
maps a window, fills it and commits, or rolls back wholly; `attach` makes the two sides that serve.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from janus_server.api.dialect import MARKERS, Dialect, dialect_of, markers_of
from janus_server.api.plan import Target
from janus_server.config import DTypeChoice, ServeConfig
from janus_server.errors import BadConfig, require
from janus_server.executor import DeviceThread, Engine
from janus_server.instance import ServedModel, Streams
from janus_server.kernels.table import DType, Kernels
from janus_server.kv.blocks import KvPages, pages_for
from janus_server.kv.prefix import PrefixCache
from janus_server.kv.xtensor import KvLayout, XTensor, kv_layout
from janus_server.model.decoder import Decoder
from janus_server.model.load import Checkpoint, load_weights, open_checkpoint, plan_layout
from janus_server.model.pooling import pooling_of
from janus_server.model.runner import Runner
from janus_server.model.spec import ModelSpec, SamplingDefaults
from janus_server.model.weights import Layout, Weights, form_names
from janus_server.modelref import ModelEntry
from janus_server.observe.log import decision
from janus_server.sched.batcher import Batcher, BatcherLimits
from janus_server.sched.scarcity import Scarcity
from janus_server.tokens.render import Renderers
from janus_server.tokens.tokenizer import Tokenizer
from janus_server.types import ModelCard, Sampling
from janus_server.units import format_bytes

log = logging.getLogger("janus.lifecycle")

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedModel:
    """A checkpoint whose headers are checked, with what it will take: known to fit, nothing allocated yet.

    kv_pages are the pages that the weights of all models leave; context_tokens is the longest sequence served.
    """

    entry: ModelEntry
    checkpoint: Checkpoint
    placed: Layout
    kv: KvLayout
    kv_pages: int
    context_tokens: int

    @property
    def spec(self) -> ModelSpec:
        return self.checkpoint.spec


@dataclasses.dataclass(frozen=True, slots=True)
class FilledModel:
    """Weights in their pages, and the tokenizer."""

    opened: OpenedModel
    weights: Weights
    tokenizer: Tokenizer


def open_models(config: ServeConfig, kernels: Kernels) -> tuple[OpenedModel, ...]:
    """Open every checkpoint of the configuration and check that all fit together. BadModel or BadConfig when not."""
    checkpoints = [open_checkpoint(entry.path, _dtype(config)) for entry in config.models]
    placed = [plan_layout(checkpoint, kernels) for checkpoint in checkpoints]
    weights = sum(pages_for(one.total_bytes, config.page_bytes) for one in placed)
    kv_pages = config.memory_bytes // config.page_bytes - weights
    if kv_pages <= 0:
        need = format_bytes(weights * config.page_bytes)
        raise BadConfig(
            f"the weights take {need} and --memory is {format_bytes(config.memory_bytes)}; give more (the KV cache "
            "needs some too) or serve fewer models"
        )
    opened = []
    for entry, checkpoint, one in zip(config.models, checkpoints, placed, strict=True):
        spec = checkpoint.spec
        kv = kv_layout(config.page_bytes, spec.n_layers, spec.kv_heads, spec.head_dim, spec.dtype.bytes)
        context = _context_tokens(entry.name, spec.context_tokens, config, kv, kv_pages)
        opened.append(OpenedModel(entry, checkpoint, one, kv, kv_pages, context))
    return tuple(opened)


def fill(
    model: OpenedModel, xtensor: XTensor, kernels: Kernels, renderers: Renderers, threads: int, progress: Progress
) -> FilledModel:
    """Read the weights into pages of their own; the tokenizer is made meanwhile. Nothing is left behind on failure."""
    name, start_s = model.entry.name, time.perf_counter()
    transaction = xtensor.open_weights(name, model.placed.total_bytes)
    require(transaction is not None, f"{name}: pages that were counted free are not there")
    with ThreadPoolExecutor(1, "janus-tokenizer") as aside:
        tokenizer = aside.submit(_tokenizer, model.checkpoint, renderers)
        try:
            weights = load_weights(
                model.checkpoint, model.placed, kernels, transaction.array,
                lambda done, total: progress(name, done, total), threads=threads,
            )  # fmt: skip
            filled = FilledModel(model, weights, tokenizer.result())
        except BaseException:
            transaction.rollback()
            raise
    transaction.commit()
    took_s, weights_bytes = time.perf_counter() - start_s, model.placed.total_bytes
    decision(
        f"{name}: {format_bytes(weights_bytes)} loaded in {took_s:.2f} s", kind="load", model=name,
        weight_bytes=weights_bytes, seconds=round(took_s, 3),
    )  # fmt: skip
    return filled


def engine_of(
    model: FilledModel, config: ServeConfig, xtensor: XTensor, kernels: Kernels, scarcity: Scarcity
) -> Engine:
    """The device side of a filled model."""
    opened = model.opened
    name, spec, kv = opened.entry.name, opened.spec, opened.kv
    cache = tuple(
        kernels.cache_layer(
            xtensor.slab, layer * kv.layer_bytes, config.page_bytes, spec.kv_heads, kv.page_tokens, spec.head_dim,
            spec.dtype,
        )
        for layer in range(spec.n_layers)
    )  # fmt: skip
    step_tokens = max(config.max_num_batched_tokens, config.max_num_seqs)
    decoder = Decoder(spec, model.weights, kernels, cache, opened.context_tokens, step_tokens)
    pages = KvPages(xtensor.pool, name, kv.page_tokens)
    limits = BatcherLimits(
        context_tokens=opened.context_tokens,
        capacity_pages=opened.kv_pages,
        step_tokens=step_tokens,
        sequences=config.max_num_seqs,
        one_prompt_at_a_time=config.one_prompt_at_a_time,
        prefix_caching=config.prefix_cache,
    )
    batcher = Batcher(pages, PrefixCache(pages, secrets.token_bytes(32)), scarcity, limits)
    return Engine(name, batcher, Runner(decoder, kernels, xtensor.slab, config.page_bytes))


def served(model: FilledModel, config: ServeConfig, device: DeviceThread, streams: Streams) -> ServedModel:
    """The loop side of a filled model."""
    opened, spec = model.opened, model.opened.spec
    card = ModelCard(
        id=opened.entry.name,
        created_s=int(time.time()),
        context_tokens=opened.context_tokens,
        parameters=sum(slot.n * slot.k for slot in opened.placed.entries),
        weight_bytes=opened.placed.total_bytes,
        dtype=form_names(opened.placed),
        family=spec.family.value,
        kv_page_tokens=opened.kv.page_tokens,
        kv_pages=opened.kv_pages,
        kv_dtype=spec.dtype.name.lower(),
        prefix_caching=config.prefix_cache,
    )
    # A tokenizer may know ids that the model has no row for; such an id can never be drawn.
    eos_ids = (i for i in dict.fromkeys([*spec.eos_ids, *model.tokenizer.eos_ids]) if i < spec.vocab)
    defaults = _defaults(spec.sampling, opened.entry.sampling)
    dialect, pooling = _dialect(model.tokenizer), pooling_of(opened.checkpoint)
    target = Target(card.id, card.context_tokens, spec.vocab, tuple(eos_ids), defaults, dialect, spec.hidden, pooling)
    return ServedModel(card, target, model.tokenizer, device, streams)


def _dtype(config: ServeConfig) -> DType | None:
    """What to store weights as; None follows the checkpoint."""
    match config.dtype:
        case DTypeChoice.FLOAT32:
            return DType.F32
        case DTypeChoice.BFLOAT16:
            return DType.BF16
        case DTypeChoice.AUTO:
            return None


def _tokenizer(checkpoint: Checkpoint, renderers: Renderers) -> Tokenizer:
    """The tokenizer with its chat template compiled: the first chat would wait 80 ms for that."""
    folder = checkpoint.tokenizer_folder
    if folder is None:
        tokenizer = Tokenizer.from_gguf(checkpoint.metadata, renderers)
    else:
        tokenizer = Tokenizer.from_folder(folder, renderers)
    tokenizer.compile_templates()
    return tokenizer


def _dialect(tokenizer: Tokenizer) -> Dialect:
    """How the model speaks beyond plain text, from its template and vocabulary."""
    markers = markers_of(tokenizer.added(MARKERS))
    return dialect_of(tokenizer.chat_template, tokenizer.tool_template, markers)


def _defaults(suggested: SamplingDefaults, otherwise: Sampling) -> Sampling:
    """How to sample where a client says nothing: as the checkpoint suggests, else as the entry does."""
    given = {name: value for name, value in msgspec.structs.asdict(suggested).items() if value is not None}
    return msgspec.structs.replace(otherwise, **given)


def _context_tokens(name: str, supported: int, config: ServeConfig, kv: KvLayout, kv_pages: int) -> int:
    """The longest sequence served: what was asked for, else what model and memory allow."""
    holds = kv_pages * kv.page_tokens
    asked = config.max_model_len
    if asked is None:
        if holds < 2:
            raise BadConfig(f"{name}: {holds} tokens of KV memory are left; raise --memory or serve fewer models")
        return min(supported, holds)
    if asked > supported:
        raise BadConfig(f"max-model-len {asked} is more than {name} supports ({supported} tokens)")
    if pages_for(asked, kv.page_tokens) > kv_pages:
        raise BadConfig(
            f"max-model-len {asked} needs {format_bytes(asked * kv.token_bytes)} of KV memory for {name}; "
            f"{holds} tokens fit: lower it or raise memory"
        )
    return asked
