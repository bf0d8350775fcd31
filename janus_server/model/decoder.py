"""The dense decoder that Llama, Mistral, Qwen2 and Qwen3 share, written in the order of its mathematics.

    x = embed(ids)
    for each layer:  x += o · attention(rope(norm?(qkv · norm(x))));   x += down · (silu(gate) * up)
    logits = head · norm(x)

What differs between the families is data: Qwen2 has a bias on q, k and v, Qwen3 normalises each head before rotation.
Only kernel-table operations are called, so the file is the same on every device. A Decoder belongs to a device thread.
"""

from __future__ import annotations

import numpy as np

from janus_server.kernels.table import Array, CacheLayer, DType, Kernels, Program, StepInputs
from janus_server.model.rope import rotary_tables
from janus_server.model.spec import ModelSpec
from janus_server.model.weights import LayerWeights, Weights

# Rows of a step that are read at once beside the sampled ones: logits of all 512 would be 311 MB where the vocabulary
# has 152k entries, these are 19 MB.
READ_ROWS = 32


class Decoder:
    """Weights, cache views and scratch of one model, ready to run steps of up to `step_tokens` rows."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        kernels: Kernels,
        cache: tuple[CacheLayer, ...],
        positions: int,
        step_tokens: int,
    ) -> None:
        self.spec = spec
        self._weights = weights
        self._kernels = kernels
        self._cache = cache
        cos, sin = rotary_tables(spec.rope, spec.head_dim, positions)
        self._cos, self._sin = kernels.vector(cos), kernels.vector(sin)
        self._scale = spec.head_dim**-0.5
        self._scratch = _Scratch(spec, kernels, step_tokens)
        self._step_tokens = step_tokens
        self._logits: Array = None
        self._logit_rows = 0
        self._program: Program | None = None
        self._read_logits: Array = None
        self._read_hidden: Array = None
        self._prepare(16)

    def forward(self, ids: np.ndarray, inputs: StepInputs, rows: np.ndarray) -> np.ndarray:
        """Compute ids [N] int32 at `inputs`, fill their cache, and return f32 logits [R, vocab] of the asked rows [R].

        The result is scratch: it is overwritten by the next call.
        """
        if len(rows) > self._logit_rows:
            self._prepare(max(len(rows), 2 * self._logit_rows))
        if self._program is None:
            self._compute(ids, inputs, rows)
        else:
            self._kernels.replay(self._program, ids, inputs, rows)
        return self._kernels.to_numpy(self._logits[: len(rows)])

    def logits_of(self, first: int, stop: int) -> np.ndarray:
        """Logits [stop-first, vocab] f32 of rows first … stop-1 of the last step, at most READ_ROWS of them.

        Valid until the next call of this method or of `forward`; what `forward` returned stays as it is.
        """
        if self._read_logits is None:
            self._read_logits = self._kernels.empty((READ_ROWS, self.spec.vocab), DType.F32)
        act, out = self._scratch.act[: stop - first], self._read_logits[: stop - first]
        self._kernels.rms_norm(self._scratch.x[first:stop], self._weights.final_norm, self.spec.rms_eps, act)
        self._kernels.linear(act, self._weights.head, None, out)
        return self._kernels.to_numpy(out)

    def hidden_of(self, first: int, stop: int) -> np.ndarray:
        """Hidden states [stop-first, hidden] f32 after the final norm, under the same conditions as `logits_of`."""
        if self._read_hidden is None:
            self._read_hidden = self._kernels.empty((READ_ROWS, self.spec.hidden), DType.F32)
        out = self._read_hidden[: stop - first]
        self._kernels.rms_norm(self._scratch.x[first:stop], self._weights.final_norm, self.spec.rms_eps, out)
        return self._kernels.to_numpy(out)

    def _prepare(self, logit_rows: int) -> None:
        """Make room for that many rows of logits and record the step over it.

        Grown by need: 128 rows of a 152k vocabulary are 78 MB, which most servers never use.
        """
        self._logit_rows = min(logit_rows, self._step_tokens)
        self._logits = self._kernels.empty((self._logit_rows, self.spec.vocab), DType.F32)
        ids, zeros = (np.zeros(self._step_tokens, np.int32) for _ in range(2))
        inputs = StepInputs(zeros, np.array([0, len(ids)], np.int32), np.zeros((1, 1), np.int32), zeros)
        rows = np.zeros(self._logit_rows, np.int32)
        self._program = self._kernels.capture(lambda: self._compute(ids, inputs, rows))

    def _compute(self, ids: np.ndarray, inputs: StepInputs, rows: np.ndarray) -> None:
        s = self._scratch.first(len(ids))
        self._kernels.embed(ids, self._weights.embed, s.x)
        for layer, cache in zip(self._weights.layers, self._cache, strict=True):
            self._attention(layer, cache, inputs, s)
            self._mlp(layer, s)
        self._head(s, rows)

    def _attention(self, w: LayerWeights, cache: CacheLayer, inputs: StepInputs, s: _Scratch) -> None:
        k = self._kernels
        k.rms_norm(s.x, w.attn_norm, self.spec.rms_eps, s.act)
        k.linear(s.act, w.qkv, w.qkv_bias, s.qkv)
        k.rope_and_cache(
            s.qkv, w.q_norm, w.k_norm, self.spec.rms_eps, self._cos, self._sin, inputs, cache, s.q
        )  # fmt: skip
        k.attention(s.q, inputs, cache, self._scale, s.attended)
        k.linear_add(s.attended_flat, w.o, s.x)

    def _mlp(self, w: LayerWeights, s: _Scratch) -> None:
        k = self._kernels
        k.rms_norm(s.x, w.mlp_norm, self.spec.rms_eps, s.act)
        k.linear(s.act, w.gate_up, None, s.gate_up)
        k.silu_mul(s.gate_up, s.ffn)
        k.linear_add(s.ffn, w.down, s.x)

    def _head(self, s: _Scratch, rows: np.ndarray) -> None:
        k, r = self._kernels, len(rows)
        taken, act = s.taken[:r], s.act[:r]
        k.take_rows(s.x, rows, taken)
        k.rms_norm(taken, self._weights.final_norm, self.spec.rms_eps, act)
        k.linear(act, self._weights.head, None, self._logits[:r])


class _Scratch:
    """Activations of one step, allocated once for the largest step and cut to its rows."""

    __slots__ = ("_kernels", "_spec", "act", "attended", "attended_flat", "ffn", "gate_up", "q", "qkv", "taken",
                 "x")  # fmt: skip

    def __init__(self, spec: ModelSpec, kernels: Kernels, rows: int) -> None:
        act = kernels.act_dtype(spec.dtype)
        q_width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.x = kernels.empty((rows, spec.hidden), DType.F32)
        self.taken = kernels.empty((rows, spec.hidden), DType.F32)
        self.act = kernels.empty((rows, spec.hidden), act)
        self.qkv = kernels.empty((rows, q_width + 2 * kv_width), DType.F32)
        self.q = kernels.empty((rows, spec.heads, spec.head_dim), act)
        self.attended = kernels.empty((rows, spec.heads, spec.head_dim), act)
        self.attended_flat = self.attended.reshape(rows, q_width)
        self.gate_up = kernels.empty((rows, 2 * spec.ffn), DType.F32)
        self.ffn = kernels.empty((rows, spec.ffn), act)

    def first(self, n: int) -> _Scratch:
        """The same memory, first n rows."""
        cut = object.__new__(_Scratch)
        for name in ("x", "taken", "act", "qkv", "q", "attended", "attended_flat", "gate_up", "ffn"):
            setattr(cut, name, getattr(self, name)[:n])
        return cut
