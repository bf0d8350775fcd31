"""One model run in the test's own thread: the real pool, batcher, decoder and sampler, no loop, threads or HTTP."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import numpy as np

from janus_server.kernels.table import DType, Kernels
from janus_server.kv.blocks import KvPages
from janus_server.kv.prefix import PrefixCache
from janus_server.kv.vmm_cpu import CpuMemory
from janus_server.kv.xtensor import XTensor, kv_layout
from janus_server.model.decoder import Decoder
from janus_server.model.load import load_weights, open_checkpoint, plan_layout
from janus_server.model.runner import Runner
from janus_server.model.scratch import READ_ROWS, StepSize, scratch_bytes, scratch_of
from janus_server.sched.batcher import Batcher, BatcherLimits
from janus_server.sched.scarcity import Scarcity
from janus_server.types import Batch, Chunk, Emit, FinishReason, Request, Sampled, SampleSpec, Sampling, TokenLogprob

GREEDY = Sampling(temperature=0.0)


class LocalEngine:
    """A checkpoint loaded into its own xTensor; `batcher` is made anew by `reset`."""

    def __init__(
        self,
        path: Path,
        kernels: Kernels,
        *,
        dtype: DType | None = None,
        rest: DType | None = None,
        page_bytes: int = 1 << 16,
        memory_bytes: int = 64 << 20,
        context_tokens: int = 256,
        max_rows: int = 512,
        window: np.ndarray | None = None,
    ) -> None:
        """window is the scratch that steps compute in, where it is to be shared with others."""
        checkpoint = open_checkpoint(path, dtype)
        if rest is not None:  # what is not quantised, and the cache
            spec = msgspec.structs.replace(checkpoint.spec, dtype=rest)
            checkpoint = dataclasses.replace(checkpoint, spec=spec)
        self.spec = spec = checkpoint.spec
        self.xtensor = XTensor(CpuMemory(max(1, memory_bytes // page_bytes), page_bytes))
        plan = plan_layout(checkpoint, kernels)
        self.memory = self.xtensor.weights("m", plan.total_bytes)
        assert self.memory.reserve()
        self.memory.map()
        self.weights = load_weights(checkpoint, plan, kernels, self.memory.array, lambda done, total: None)
        self.memory.commit()
        kv = kv_layout(page_bytes, spec.n_layers, spec.kv_heads, spec.head_dim, spec.dtype.bytes)
        cache = tuple(
            kernels.cache_layer(
                self.xtensor.slab, i * kv.layer_bytes, page_bytes, spec.kv_heads, kv.page_tokens, spec.head_dim,
                spec.dtype,
            )
            for i in range(spec.n_layers)
        )  # fmt: skip
        self.kernels = kernels
        self.context_tokens = context_tokens
        self.kv = KvPages(self.xtensor.pool, "m", kv.page_tokens)
        size = StepSize(max_rows, min(128, max_rows), min(READ_ROWS, max_rows))
        if window is None:
            window = aligned(scratch_bytes(spec, kernels, size))
        self.runner = Runner(
            Decoder(spec, self.weights, kernels, cache, context_tokens, scratch_of(spec, kernels, size, window)),
            kernels,
            self.xtensor.slab,
            page_bytes,
        )
        self.rows: dict[tuple[str, int], list[np.ndarray]] = {}
        self.emits: list[Emit] = []
        self.reset()

    def reset(self, **limits: object) -> None:
        """A fresh batcher and prefix cache with other limits; all pages must be back."""
        if hasattr(self, "prefix"):
            self.prefix.clear()
        self.scarcity = Scarcity(self.xtensor.pool)
        self.prefix = PrefixCache(self.kv, b"test")
        settings = {
            "context_tokens": self.context_tokens,
            "capacity_pages": self.xtensor.pool.n_pages,
            "prefix_caching": False,
            **limits,
        }
        self.batcher = Batcher(self.kv, self.prefix, self.scarcity, BatcherLimits(**settings))
        self.scarcity.join(self.batcher)

    def poison(self, token: int) -> None:
        """Make a token's embedding NaN. The loader refuses such a checkpoint; memory can still go bad."""
        rows = self.kernels.read_rows(self.weights.embed)
        rows[token] = np.nan
        self.kernels.store_rows(rows, 0, self.weights.embed)

    def generate(
        self, *requests: Request, forced: dict[str, list[int]] | None = None
    ) -> dict[tuple[str, int], list[int]]:
        """Run requests to their end; tokens by (id, index). Logits of every sampled row are kept in `rows`, all news in
        `emits`.

        `forced` replaces the sampled token of a request's position by a given one (teacher forcing).
        """
        out: dict[tuple[str, int], list[int]] = {}
        self.rows, self.emits = {}, []
        for request in requests:
            self.batcher.add(request, 0.0)
        while not self.batcher.idle:
            for emit in self.step(forced or {}):
                if emit.token is not None:
                    out.setdefault((emit.request_id, emit.index), []).append(emit.token)
        self.xtensor.pool.check()
        return out

    def step(self, forced: dict[str, list[int]] | None = None) -> list[Emit]:
        """Plan, run and commit one step."""
        batch = self.batcher.plan(0.0)
        assert batch is not None
        names = self._names(batch)
        logits = self.runner.forward(self.runner.stage(batch)).copy()
        readings = self.runner.read(batch)
        results = self._draw(batch, logits, names, forced or {})
        for name, row in zip(names, logits, strict=False):
            self.rows.setdefault(name, []).append(row)
        emits = self.batcher.commit(batch, results, readings)
        self.emits += emits
        return emits

    def scores(self, name: str) -> list[TokenLogprob]:
        """The log probabilities of a request's prompt, as far as they came."""
        return [one for e in self.emits if e.request_id == name for one in e.prompt_logprobs]

    def embedding(self, name: str) -> np.ndarray:
        (found,) = [e.embedding for e in self.emits if e.request_id == name and e.embedding is not None]
        return np.array(found, np.float32)

    def finish(self, name: str, index: int = 0) -> FinishReason:
        (found,) = [e.finish for e in self.emits if (e.request_id, e.index) == (name, index) and e.finish is not None]
        return found

    def logits_of(self, tokens: list[int], chunks: list[int]) -> np.ndarray:
        """Logits [len(chunks), vocab] at the end of each chunk of one sequence, laid over pages in no order."""
        found, start = [], 0
        size = self.kv.page_tokens
        held = self.kv.take(len(tokens) // size + 1)
        assert held is not None
        pages = (*held[1::2], *held[::2])
        spec = SampleSpec(GREEDY, 0)
        for step, count in enumerate(chunks):
            used = pages[: -(-(start + count) // size)]
            chunk = Chunk(1, start, tuple(tokens[start : start + count]), used, spec)
            found.append(self.runner.forward(self.runner.stage(Batch(step, (chunk,))))[0].copy())
            start += count
        for page in held:
            self.kv.drop(page)
        return np.stack(found)

    def _names(self, batch: Batch) -> list[tuple[str, int]]:
        by_number = {s.number: s for s in self.batcher.running}
        sequences = [by_number[c.sequence] for c in batch.chunks if c.sample is not None]
        return [(s.request.id, s.index) for s in sequences]

    def _draw(
        self, batch: Batch, logits: np.ndarray, names: list[tuple[str, int]], forced: dict[str, list[int]]
    ) -> list[Sampled]:
        from janus_server.model.sample import sample

        specs = [c.sample for c in batch.chunks if c.sample is not None]
        drawn = sample(logits, specs) if specs else []
        return [
            Sampled(forced[name[0]][spec.position]) if name[0] in forced else one
            for one, name, spec in zip(drawn, names, specs, strict=True)
        ]


def aligned(size_bytes: int) -> np.ndarray:
    """Flat uint8 memory that begins at a multiple of 64 bytes, full of what NaN looks like."""
    memory = np.full(size_bytes + 64, 0xFF, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size_bytes]


def request(name: str, prompt: list[int], max_tokens: int, **fields: object) -> Request:
    settings = {"sampling": GREEDY, **fields}
    return Request(id=name, model="m", prompt=tuple(prompt), max_tokens=max_tokens, **settings)
