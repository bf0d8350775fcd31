"""The dense decoder that Llama, Mistral, Qwen2 and Qwen3 share, written in the order of its mathematics.

    x = embed(ids)
    for each layer:  x += o · attention(rope(norm?(qkv · norm(x))));   x += down · (silu(gate) * up)
    logits = head · norm(x)

What differs between the families is data: Qwen2 has a bias on q, k and v, Qwen3 normalises each head before rotation.
Only kernel-table operations are called, so the file is the same on every device. A Decoder belongs to a device thread.
"""

from __future__ import annotations

import numpy as np

from janus_server.errors import require
from janus_server.kernels.table import CacheLayer, Kernels, Program, StepInputs
from janus_server.model.rope import rotary_tables
from janus_server.model.scratch import Scratch
from janus_server.model.spec import ModelSpec
from janus_server.model.weights import LayerWeights, Weights


class Decoder:
    """Weights, cache views and scratch of one model, ready to run steps of up to `scratch.size`.

    The scratch is shared: what a step left there is valid until another step begins, of whichever model.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        kernels: Kernels,
        cache: tuple[CacheLayer, ...],
        positions: int,
        scratch: Scratch,
    ) -> None:
        self.spec = spec
        self._weights = weights
        self._kernels = kernels
        self._cache = cache
        cos, sin = rotary_tables(spec.rope, spec.head_dim, positions)
        self._cos, self._sin = kernels.vector(cos), kernels.vector(sin)
        self._scale = spec.head_dim**-0.5
        self._scratch = scratch
        self._program = self._recorded()

    @property
    def read_rows(self) -> int:
        """The most rows that `logits_of` and `hidden_of` take at once."""
        return self._scratch.size.read

    def forward(self, ids: np.ndarray, inputs: StepInputs, rows: np.ndarray) -> np.ndarray:
        """Compute ids [N] int32 at `inputs`, fill their cache, and return f32 logits [R, vocab] of the asked rows [R].

        The result is scratch: it is overwritten by the next call, and by the next step of any other model.
        """
        size = self._scratch.size
        require(len(ids) <= size.rows and len(rows) <= size.drawn, "a step is larger than the scratch it runs in")
        if self._program is None:
            self._compute(ids, inputs, rows)
        else:
            self._kernels.replay(self._program, ids, inputs, rows)
        return self._kernels.to_numpy(self._scratch.logits[: len(rows)])

    def logits_of(self, first: int, stop: int) -> np.ndarray:
        """Logits [stop-first, vocab] f32 of rows first … stop-1 of this model's step, before any other began; at most
        `read_rows` of them.

        Valid until the next call of this method or of `forward`; what `forward` returned stays as it is.
        """
        act, out = self._scratch.act[: stop - first], self._scratch.read_logits[: stop - first]
        self._kernels.rms_norm(self._scratch.x[first:stop], self._weights.final_norm, self.spec.rms_eps, act)
        self._kernels.linear(act, self._weights.head, None, out)
        return self._kernels.to_numpy(out)

    def hidden_of(self, first: int, stop: int) -> np.ndarray:
        """Hidden states [stop-first, hidden] f32 after the final norm, under the same conditions as `logits_of`."""
        out = self._scratch.read_hidden[: stop - first]
        self._kernels.rms_norm(self._scratch.x[first:stop], self._weights.final_norm, self.spec.rms_eps, out)
        return self._kernels.to_numpy(out)

    def _recorded(self) -> Program | None:
        """The largest step as one program, where the table has such."""
        size = self._scratch.size
        ids, zeros = (np.zeros(size.rows, np.int32) for _ in range(2))
        inputs = StepInputs(zeros, np.array([0, len(ids)], np.int32), np.zeros((1, 1), np.int32), zeros)
        rows = np.zeros(size.drawn, np.int32)
        return self._kernels.capture(lambda: self._compute(ids, inputs, rows))

    def _compute(self, ids: np.ndarray, inputs: StepInputs, rows: np.ndarray) -> None:
        s = self._scratch.first(len(ids))
        self._kernels.embed(ids, self._weights.embed, s.x)
        for layer, cache in zip(self._weights.layers, self._cache, strict=True):
            self._attention(layer, cache, inputs, s)
            self._mlp(layer, s)
        self._head(s, rows)

    def _attention(self, w: LayerWeights, cache: CacheLayer, inputs: StepInputs, s: Scratch) -> None:
        k = self._kernels
        k.rms_norm(s.x, w.attn_norm, self.spec.rms_eps, s.act)
        k.linear(s.act, w.qkv, w.qkv_bias, s.qkv)
        k.rope_and_cache(
            s.qkv, w.q_norm, w.k_norm, self.spec.rms_eps, self._cos, self._sin, inputs, cache, s.q
        )  # fmt: skip
        k.attention(s.q, inputs, cache, self._scale, s.attended)
        k.linear_add(s.attended_flat, w.o, s.x)

    def _mlp(self, w: LayerWeights, s: Scratch) -> None:
        k = self._kernels
        k.rms_norm(s.x, w.mlp_norm, self.spec.rms_eps, s.act)
        k.linear(s.act, w.gate_up, None, s.gate_up)
        k.silu_mul(s.gate_up, s.ffn)
        k.linear_add(s.ffn, w.down, s.x)

    def _head(self, s: Scratch, rows: np.ndarray) -> None:
        k, r = self._kernels, len(rows)
        taken, act = s.taken[:r], s.act[:r]
        k.take_rows(s.x, rows, taken)
        k.rms_norm(taken, self._weights.final_norm, self.spec.rms_eps, act)
        k.linear(act, self._weights.head, None, s.logits[:r])
