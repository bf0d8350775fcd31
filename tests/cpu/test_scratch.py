"""The scratch window: how its arrays lie, how large a step fits, and two models that take turns in one window."""

from __future__ import annotations

import itertools
import json
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import open_table
from local_engine import LocalEngine, aligned, request
from server_process import tiny_model

from janus_server.errors import Bug
from janus_server.kernels.table import DType, StepShape
from janus_server.kv.vmm_cpu import CpuMemory
from janus_server.kv.xtensor import HEADROOM, SCRATCH, XTensor
from janus_server.model.scratch import SMALLEST, Scratch, StepSize, scratch_bytes, scratch_of, step_size
from janus_server.types import Owner, PageKind, Pooling

CPU = open_table("cpu", 1)
GROUPS = (("qkv", "q", "attended"), ("gate_up", "ffn"), ("taken", "logits", "read_logits", "read_hidden"))


def shape_of(hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int) -> types.SimpleNamespace:
    """What of a ModelSpec the layout depends on."""
    return types.SimpleNamespace(
        hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn, vocab=vocab, dtype=DType.BF16
    )  # fmt: skip


SMOL = shape_of(576, 9, 3, 64, 1536, 49152)
QWEN = shape_of(1024, 16, 8, 128, 3072, 151936)
shapes = st.builds(
    shape_of, st.integers(1, 40).map(lambda n: 8 * n), st.integers(1, 8), st.integers(1, 4),
    st.sampled_from([2, 16, 64]), st.integers(1, 300), st.integers(3, 900),
)  # fmt: skip


def test_what_real_models_take() -> None:
    wanted = StepSize(512, 128)
    assert [round(scratch_bytes(spec, CPU, wanted) / 1e6, 1) for spec in (SMOL, QWEN)] == [34.2, 102.1]
    assert step_size(SMOL, CPU, wanted, 16_000_000) == StepSize(512, 45, 23)
    assert step_size(SMOL, CPU, wanted, 4_000_000) == StepSize(173, 11, 5)
    assert step_size(QWEN, CPU, wanted, 1 << 30) == wanted
    assert step_size(QWEN, CPU, wanted, 1) == SMALLEST
    assert step_size(QWEN, CPU, StepSize(3, 1, 2), 1) == StepSize(3, 1, 2)


@pytest.mark.parametrize("table", ["cpu", "torch_ref"])
@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 40), st.integers(1, 20), st.integers(1, 9))
def test_arrays_that_are_used_together_never_overlap(
    table: str, spec: types.SimpleNamespace, rows: int, drawn: int, read: int
) -> None:
    kernels = open_table(table, 1)
    size = StepSize(rows, min(drawn, rows), min(read, rows))
    window = aligned(scratch_bytes(spec, kernels, size))
    made = scratch_of(spec, kernels, size, window)
    for group in GROUPS:
        spans = sorted(span_of(made, name) for name in ("x", "act", *group))
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert spans[0][0] >= window.ctypes.data and spans[-1][1] <= window.ctypes.data + window.size
        assert all(start % 64 == 0 for start, _ in spans)
    with pytest.raises(Bug):
        scratch_of(spec, kernels, size, window[:-1])


def span_of(made: Scratch, name: str) -> tuple[int, int]:
    """Addresses of an array's first byte, and of the one after its last."""
    array = getattr(made, name)
    if isinstance(array, np.ndarray):
        return array.ctypes.data, array.ctypes.data + array.nbytes
    return array.data_ptr(), array.data_ptr() + array.numel() * array.element_size()


@settings(max_examples=150, deadline=None)
@given(shapes, st.integers(1, 60), st.integers(1, 40), st.integers(0, 300_000))
def test_a_step_is_as_large_as_fits(spec: types.SimpleNamespace, rows: int, drawn: int, most_bytes: int) -> None:
    wanted = StepSize(rows, min(drawn, rows), min(8, rows))
    size = step_size(spec, CPU, wanted, most_bytes)
    least = StepSize(
        min(SMALLEST.rows, rows), min(SMALLEST.drawn, wanted.drawn), min(SMALLEST.read, wanted.read)
    )  # fmt: skip
    assert least.rows <= size.rows <= rows
    assert least.drawn <= size.drawn <= min(wanted.drawn, size.rows)
    assert least.read <= size.read <= min(wanted.read, size.rows)
    if scratch_bytes(spec, CPU, least) > most_bytes:
        assert size == least
        return
    assert scratch_bytes(spec, CPU, size) <= most_bytes
    if size.rows < rows:  # one row more does not fit, with however few drawn and read
        assert scratch_bytes(spec, CPU, StepSize(size.rows + 1, least.drawn, least.read)) > most_bytes
    if size.read < min(wanted.read, size.rows):
        assert scratch_bytes(spec, CPU, StepSize(size.rows, size.drawn, size.read + 1)) > most_bytes


@pytest.mark.parametrize("table", ["cpu", "torch_ref"])
def test_a_view_is_the_memory_itself(table: str) -> None:
    kernels = open_table(table, 1)
    memory = aligned(256)
    array = kernels.view(memory, 64, (3, 4), DType.F32)
    array[:] = 1.0
    assert memory[64:112].view(np.float32).tolist() == [1.0] * 12
    assert memory[112:].min() == 0xFF and memory[:64].min() == 0xFF
    assert tuple(kernels.view(memory, 128, (2, 32), DType.BF16).shape) == (2, 32)
    for offset, shape in ((-64, (1,)), (192, (17,)), (256, (1,))):
        with pytest.raises(Bug):
            kernels.view(memory, offset, shape, DType.F32)
    if table == "cpu":
        with pytest.raises(Bug):
            kernels.view(memory, 4, (1,), DType.F32)


def test_scratch_is_the_highest_pages_taken_first_and_for_good() -> None:
    xtensor = XTensor(CpuMemory(8, 4096))
    xtensor.reserve_scratch(3)
    assert len(xtensor.scratch) == 3 * 4096 and xtensor.pool.held() == {SCRATCH: 3}
    assert xtensor.pool.owners() == (None,) * 5 + (SCRATCH,) * 3
    xtensor.scratch[:] = 7
    assert xtensor.slab[5 * 4096 :].min() == 7 and xtensor.slab[: 5 * 4096].max() == 0
    late = XTensor(CpuMemory(8, 4096))
    assert late.pool.reserve_high(1, Owner("m", PageKind.KV))
    for pages in (3, 9):
        with pytest.raises(Bug):
            late.reserve_scratch(pages)


def test_headroom_is_withheld_below_the_window_and_never_provided() -> None:
    xtensor = XTensor(CpuMemory(8, 4096))
    xtensor.reserve_scratch(2, 3)
    assert len(xtensor.scratch) == 2 * 4096
    assert xtensor.pool.owners() == (None,) * 3 + (HEADROOM,) * 3 + (SCRATCH,) * 2
    assert xtensor.touched.missing(0, 8) == 5 and 3 in xtensor.touched and 7 not in xtensor.touched


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize(("ffn", "prompt", "chunk"), [(96, 64, 64), (700, 128, 128), (96, 600, 128)])
def test_torch_takes_no_more_than_it_says(dtype: DType, ffn: int, prompt: int, chunk: int, tmp_path: Path) -> None:
    """Every allocation of a step as torch's own profiler counts them."""
    kernels = open_table("torch_ref", 1)
    folder = tiny_model(tmp_path, intermediate_size=ffn, hidden_size=128, max_position_embeddings=1024)
    engine = LocalEngine(folder, kernels, dtype=dtype, page_bytes=1 << 14, context_tokens=1024, max_rows=chunk)
    spec = engine.spec
    shape = StepShape(
        chunk, min(128, chunk), prompt, spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim,
        spec.ffn, spec.vocab, spec.dtype,
    )  # fmt: skip
    engine.reset(step_tokens=chunk)
    engine.batcher.add(request("a", [5 + i % 200 for i in range(prompt)], 1), 0.0)
    taken = 0
    while not engine.batcher.idle:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            engine.step()
        taken = max(taken, most_at_once(profile, tmp_path / "trace.json"))
    allowed = kernels.temporary_bytes(shape)
    assert (1 << 16) < taken <= allowed
    assert allowed - (1 << 20) <= 4 * taken, "the bound is far from the truth"


def most_at_once(profile: torch.profiler.profile, path: Path) -> int:
    """Bytes allocated at most beyond what was there at first."""
    profile.export_chrome_trace(str(path))
    events = [one["args"] for one in json.loads(path.read_text())["traceEvents"] if one.get("name") == "[memory]"]
    if not events:
        return 0
    totals = [one["Total Allocated"] for one in events]
    return int(max(totals) - (totals[0] - events[0]["Bytes"]))


@pytest.mark.parametrize("table", ["cpu", "torch_ref"])
def test_two_models_that_take_turns_in_one_window_answer_as_if_alone(table: str, tmp_path: Path) -> None:
    """Generation, prompt scores and embeddings, step by step in turn: not a bit differs."""
    kernels = open_table(table, 1)
    folders = tiny_model(tmp_path / "a"), tiny_model(tmp_path / "b", seed=1, hidden_size=96, vocab_size=300)
    work = [
        request("g", [5, 6, 7, 8, 9], 6),
        request("s", list(range(10, 50)), 4, prompt_logprobs=2),
        request("e", list(range(60, 100)), 0, pooling=Pooling.MEAN),
    ]
    alone = []
    for folder in folders:
        engine = LocalEngine(folder, kernels, page_bytes=1 << 13, max_rows=16)
        engine.reset(step_tokens=16)
        tokens = engine.generate(*work)
        alone.append((tokens, engine.scores("s"), engine.embedding("e"), engine.rows))
    size = StepSize(16, 16, 16)
    specs = [LocalEngine(folder, kernels, page_bytes=1 << 13).spec for folder in folders]
    window = aligned(max(scratch_bytes(spec, kernels, size) for spec in specs))
    pair = [LocalEngine(folder, kernels, page_bytes=1 << 13, max_rows=16, window=window) for folder in folders]
    for engine in pair:
        engine.reset(step_tokens=16)
        for one in work:
            engine.batcher.add(one, 0.0)
    while any(not engine.batcher.idle for engine in pair):
        for engine in pair:
            if not engine.batcher.idle:
                engine.step()
    for engine, (tokens, scores, embedding, rows) in zip(pair, alone, strict=True):
        said = [e.token for e in engine.emits if e.request_id == "g" and e.token is not None]
        assert said == tokens["g", 0]
        assert engine.scores("s") == scores
        assert engine.embedding("e").tobytes() == embedding.tobytes()
        for name, found in rows.items():
            assert np.stack(engine.rows[name]).tobytes() == np.stack(found).tobytes()


def test_a_step_larger_than_its_scratch_is_a_bug(tmp_path: Path) -> None:
    engine = LocalEngine(tiny_model(tmp_path), CPU, page_bytes=1 << 13, max_rows=8)
    assert len(engine.logits_of([5] * 8, [8])) == 1
    with pytest.raises(Bug, match="larger than the scratch"):
        engine.logits_of([5] * 9, [9])
