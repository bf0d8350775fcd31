"""The life of a model on this node: from checkpoint to served. Called by `node`, on a worker thread.

A load reserves pages, maps a window, fills it and commits, or rolls back wholly.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from janus_server.config import DTypeChoice, ServeConfig
from janus_server.errors import BadConfig
from janus_server.executor import DeviceThread, Engine
from janus_server.instance import ServedModel, Streams
from janus_server.kernels.table import DType, Kernels
from janus_server.kv.blocks import KvPages, pages_for
from janus_server.kv.prefix import PrefixCache
from janus_server.kv.xtensor import KvLayout, XTensor, kv_layout
from janus_server.model.decoder import Decoder
from janus_server.model.load import Checkpoint, load_weights, open_checkpoint
from janus_server.model.runner import Runner
from janus_server.model.spec import SamplingDefaults
from janus_server.model.weights import layout
from janus_server.modelref import ModelEntry
from janus_server.sched.batcher import Batcher, BatcherLimits
from janus_server.sched.scarcity import Scarcity
from janus_server.tokens.render import Renderers
from janus_server.tokens.tokenizer import Tokenizer
from janus_server.types import ModelCard, PageKind, Sampling
from janus_server.units import format_bytes

log = logging.getLogger("janus.lifecycle")

Progress = Callable[[str, int, int], None]


class Loading:
    """One model on its way from checkpoint to served: reserve, map, fill, commit; rolled back wholly on failure."""

    def __init__(
        self, entry: ModelEntry, config: ServeConfig, kernels: Kernels, xtensor: XTensor, renderers: Renderers,
        progress: Progress,
    ) -> None:  # fmt: skip
        self.entry = entry
        self._config = config
        self._kernels = kernels
        self._xtensor = xtensor
        start = time.perf_counter()
        self._checkpoint = checkpoint = open_checkpoint(entry.path, _dtype(config))
        plan = layout(checkpoint.spec, kernels.matrix_bytes)
        transaction = xtensor.open_weights(entry.name, plan.total_bytes)
        if transaction is None:
            raise BadConfig(_too_small(entry.name, plan.total_bytes, xtensor))
        with ThreadPoolExecutor(1, "janus-tokenizer") as aside:
            tokenizer = aside.submit(_tokenizer, checkpoint, renderers)
            try:
                self._weights = load_weights(
                    checkpoint, plan, kernels, transaction.array, lambda done, total: progress(entry.name, done, total),
                    threads=config.threads,
                )  # fmt: skip
                self._tokenizer = tokenizer.result()
            except BaseException:
                transaction.rollback()
                raise
        transaction.commit()
        self._plan = plan
        log.info("%s: %s in %.2f s", entry.name, format_bytes(plan.total_bytes), time.perf_counter() - start)

    def engine(self, scarcity: Scarcity) -> Engine:
        """The device side, with the KV memory that all models' weights leave."""
        config, spec, xtensor = self._config, self._checkpoint.spec, self._xtensor
        kv = kv_layout(config.page_bytes, spec.n_layers, spec.kv_heads, spec.head_dim, spec.dtype.bytes)
        weights = sum(n for owner, n in xtensor.pool.held().items() if owner.kind is PageKind.WEIGHTS)
        kv_pages = xtensor.pool.n_pages - weights
        self._context = _context_tokens(self.entry.name, spec.context_tokens, config, kv, kv_pages)
        cache = tuple(
            self._kernels.cache_layer(
                xtensor.slab, layer * kv.layer_bytes, config.page_bytes, spec.kv_heads, kv.page_tokens, spec.head_dim,
                spec.dtype,
            )
            for layer in range(spec.n_layers)
        )  # fmt: skip
        step_tokens = max(config.max_num_batched_tokens, config.max_num_seqs)
        decoder = Decoder(spec, self._weights, self._kernels, cache, self._context, step_tokens)
        pages = KvPages(xtensor.pool, self.entry.name, kv.page_tokens)
        prefix = PrefixCache(pages, secrets.token_bytes(32))
        limits = BatcherLimits(
            context_tokens=self._context,
            capacity_pages=kv_pages,
            step_tokens=step_tokens,
            sequences=config.max_num_seqs,
            one_prompt_at_a_time=config.one_prompt_at_a_time,
            prefix_caching=config.prefix_cache,
        )
        batcher = Batcher(pages, prefix, scarcity, limits)
        runner = Runner(decoder, self._kernels, xtensor.slab, config.page_bytes)
        return Engine(self.entry.name, batcher, pages, prefix, runner)

    def served(self, engine: Engine, device: DeviceThread, streams: Streams) -> ServedModel:
        spec = self._checkpoint.spec
        card = ModelCard(
            id=self.entry.name,
            created_s=int(time.time()),
            context_tokens=self._context,
            parameters=sum(slot.n * slot.k for slot in self._plan.entries),
            weight_bytes=self._plan.total_bytes,
            dtype=spec.dtype.value,
            family=spec.family.value,
        )
        eos_ids = tuple(dict.fromkeys([*spec.eos_ids, *self._tokenizer.eos_ids]))
        return ServedModel(
            card=card,
            defaults=_defaults(spec.sampling, self.entry.sampling),
            tokenizer=self._tokenizer,
            eos_ids=eos_ids,
            vocab=spec.vocab,
            refuse_unfit=engine.batcher.refuse_unfit,
            device=device,
            streams=streams,
        )


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
            raise BadConfig(f"{name}: no memory is left for its KV cache; raise memory or serve fewer models")
        return min(supported, holds)
    if asked > supported:
        raise BadConfig(f"max-model-len {asked} is more than {name} supports ({supported} tokens)")
    if pages_for(asked, kv.page_tokens) > kv_pages:
        raise BadConfig(
            f"max-model-len {asked} needs {format_bytes(asked * kv.token_bytes)} of KV memory for {name}; "
            f"{holds} tokens fit: lower it or raise memory"
        )
    return asked


def _too_small(name: str, need_bytes: int, xtensor: XTensor) -> str:
    free = xtensor.pool.free_pages * xtensor.page_bytes
    return (
        f"{name}: its weights take {format_bytes(need_bytes)} and {format_bytes(free)} of memory are left; "
        f"start with a larger --memory, or serve fewer models"
    )
