// The micro-kernels: rows of activations times panels of plain weights, f32 or bf16.
//
// Panels have 32 outputs; inside a panel, for each input k (f32) or pair of inputs (bf16), the 32 outputs' values lie side
// by side, 128 bytes. A micro-kernel holds R rows x 2 vectors of outputs in registers and walks all of k in order, so each
// output is one chain of fused multiply-adds whatever the number of rows: that is the determinism contract. No horizontal
// sums.
//
// bf16 weights are widened and multiplied in f32. On AMD Zen 4 `vdpbf16ps` would reach 217 GFLOP/s a core against 95 for
// f32; on the Intel machines at hand it is slower than f32 (90 against 175), so a second micro-kernel is for later.
#pragma once

#include <algorithm>

#include "janus_simd.h"

namespace janus {

// n outputs, k inputs.
struct Panels {
    const char* data;
    int64_t n, k;
    bool bf16;  // false: f32
};

#if defined(__AVX512F__)
constexpr int RMAX = 12;  // 24 accumulators of 32 registers
constexpr int strips_for(int r) { return r <= 2 ? 4 : r <= 6 ? 2 : 1; }
#else
constexpr int RMAX = 6;  // 12 of 16
constexpr int strips_for(int r) { return r == 1 ? 4 : r <= 3 ? 2 : 1; }
#endif
constexpr int64_t STEP = PANEL * 4;  // bytes of one k (f32) or pair of k (bf16) in a panel

// How far ahead of use a weight line is asked for when a few rows walk several panels at once.
constexpr int64_t AHEAD = 1024;

// What a micro-kernel does with its sums: out[r * stride + column] = sum (+ bias) (+ what was there).
struct Target {
    float* out;
    int64_t stride;
    const float* bias;
    bool add;
    int64_t ahead, ahead_step;  // bytes past the strip, and bytes a step, of what to bring close meanwhile
    const float* from = nullptr;  // [r][PANEL]: sums to go on from
    Target at(int64_t column) const {
        return {out + column, stride, bias ? bias + column : nullptr, add, ahead, ahead_step, from ? from + column : from};
    }
};

// Row r of a strip of V vectors.
template <int V>
static JANUS_ALWAYS inline void finish(const vf (&acc)[V], int r, const Target& to) {
#pragma GCC unroll 2
    for (int v = 0; v < V; v++) {
        float* out = to.out + r * to.stride + v * W;
        vf sum = acc[v];
        if (to.bias) sum += load(to.bias + v * W);
        if (to.add) sum = load(out) + sum;
        store(out, sum);
    }
}

// R rows times S strips. act is [k][R]; strip s starts at w + strip_offset(s) and writes columns s * STRIP ….
template <int R, int S, bool BF16>
static void dot_strips(const float* act, const char* w, int64_t panel, int64_t k, const Target& to) {
    vf acc[S][R][2];
    const char* strip[S];
#pragma GCC unroll 8
    for (int s = 0; s < S; s++) {
        int64_t column = (int64_t)s * STRIP;  // w points at a strip; S > 1 only from a panel's first strip
        strip[s] = w + column / PANEL * panel + column % PANEL * 4;
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) acc[s][r][h] = to.from ? load(to.from + r * PANEL + s * STRIP + h * W) : vf{};
    }
    auto multiply = [&](const float* a, int s, vf w0, vf w1) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            vf x = splat(a[r]);
            acc[s][r][0] = fma(x, w0, acc[s][r][0]);
            acc[s][r][1] = fma(x, w1, acc[s][r][1]);
        }
    };
    const int64_t steps = BF16 ? k / 2 : k;
    // What comes next is asked for in four places at once: with 4 KiB pages the hardware prefetcher follows each of four
    // streams, which took 8 rows on cold weights from 8 to 13 GB/s a core, the most that one core reads here.
    const int64_t quarter = steps / 4 * to.ahead_step;
    for (int64_t i = 0; i < steps; i++) {
#pragma GCC unroll 8
        for (int s = 0; s < S; s++) {
            const char* p = strip[s] + i * STEP;
            if (S > 1 || R <= 4) {
                __builtin_prefetch(p + AHEAD);
                if (W == 16) __builtin_prefetch(p + AHEAD + 64);
            } else {
                const char* line = strip[s] + to.ahead + (i & 3) * quarter + (i >> 2) * to.ahead_step;
                __builtin_prefetch(line, 0, 2);
                if (to.ahead_step > 64) __builtin_prefetch(line + 64, 0, 2);
            }
            if (BF16) {
                vi w0 = load_bits(p), w1 = load_bits(p + W * 4);
                multiply(act + 2 * i * R, s, (vf)(w0 << 16), (vf)(w1 << 16));
                multiply(act + (2 * i + 1) * R, s, (vf)(w0 & (int32_t)0xffff0000), (vf)(w1 & (int32_t)0xffff0000));
            } else {
                multiply(act + i * R, s, load((const float*)p), load((const float*)(p + W * 4)));
            }
        }
    }
    if (BF16 && k % 2)
        for (int s = 0; s < S; s++) {
            const char* p = strip[s] + steps * STEP;
            multiply(act + 2 * steps * R, s, (vf)(load_bits(p) << 16), (vf)(load_bits(p + W * 4) << 16));
        }
#pragma GCC unroll 8
    for (int s = 0; s < S; s++)
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) finish(acc[s][r], r, to.at(s * STRIP));
}

// Calls dot(to) where all columns of strips of that width exist; at a ragged end dot writes a whole strip to a corner, and
// what exists goes out.
template <class Dot>
static inline void whole_strips(int rows, int64_t columns, int width, const Target& to, const Dot& dot) {
    if (columns % width == 0) return dot(to);
    float corner[16 * STRIP], bias[STRIP] = {};
    if (to.bias) memcpy(bias, to.bias, columns * 4);
    dot(Target{corner, STRIP, to.bias ? bias : nullptr, false, 0, 0, to.from});
    for (int r = 0; r < rows; r++)
        for (int64_t j = 0; j < columns; j++) {
            float* out = to.out + r * to.stride + j;
            *out = to.add ? *out + corner[r * STRIP + j] : corner[r * STRIP + j];
        }
}

typedef void (*DotStrips)(const float*, const char*, int64_t, int64_t, const Target&);

constexpr int at_most_2(int strips) { return strips < 2 ? strips : 2; }

// The kernel for this many rows and strips: 1, or strips_for(rows), or 2 where that is 4.
template <bool BF16>
static DotStrips dot_kernel(int rows, int strips) {
#define JANUS_ROWS(R)                                                   \
    case R:                                                             \
        return strips == 4   ? dot_strips<R, strips_for(R), BF16>       \
               : strips == 2 ? dot_strips<R, at_most_2(strips_for(R)), BF16> \
                             : dot_strips<R, 1, BF16>;
    switch (rows) {
        JANUS_ROWS(1) JANUS_ROWS(2) JANUS_ROWS(3) JANUS_ROWS(4) JANUS_ROWS(5) JANUS_ROWS(6)
#if defined(__AVX512F__)
        JANUS_ROWS(7) JANUS_ROWS(8) JANUS_ROWS(9) JANUS_ROWS(10) JANUS_ROWS(11) JANUS_ROWS(12)
#endif
    }
#undef JANUS_ROWS
    return nullptr;
}

static inline DotStrips dot_kernel(int rows, int strips, bool bf16) {
    return bf16 ? dot_kernel<true>(rows, strips) : dot_kernel<false>(rows, strips);
}

// R rows times the strips first … last-1 of plain panels; column 0 is at to.out.
static inline void dot_rows(int rows, const float* act, const Panels& m, int64_t first, int64_t last, const Target& to) {
    const int64_t panel = plain_panel_bytes(m.k, m.bf16);
    const int wide = strips_for(rows);
    for (int64_t s = first; s < last;) {
        const int64_t column = s * STRIP, left = m.n - column;
        const char* w = m.data + column / PANEL * panel + column % PANEL * 4;
        const Target at = to.at(column);
        int take = wide;
        while (take > 1 && (s + take > last || column % PANEL || left < take * STRIP)) take /= 2;
        const DotStrips dot = dot_kernel(rows, take, m.bf16);
        const int64_t columns = std::min<int64_t>(left, take * STRIP);
        whole_strips(rows, columns, STRIP, at, [&](const Target& t) { dot(act, w, panel, m.k, t); });
        s += take;
    }
}

// N rows cut into blocks of nearly equal size, none above RMAX.
struct RowBlocks {
    explicit RowBlocks(int64_t rows)
        : count((rows + RMAX - 1) / RMAX), base(count ? rows / count : 0), extra(count ? rows % count : 0) {}
    int64_t start(int64_t i) const { return i * base + std::min(i, extra); }
    int rows(int64_t i) const { return (int)(base + (i < extra)); }
    int64_t count, base, extra;
};

// rows x k becomes [k][rows], what a micro-kernel broadcasts from.
static inline void pack_rows(const float* act, int64_t stride, int rows, int64_t k, float* out) {
    int64_t i = 0;
#if defined(__SSE2__)
    for (; rows >= 4 && i + 4 <= k; i += 4)
        for (int r = 0; r < rows; r += 4) {
            const int at = r + 4 <= rows ? r : rows - 4;  // the last four may overlap those before
            const float* from = act + at * stride + i;
            __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + stride);
            __m128 c = _mm_loadu_ps(from + 2 * stride), d = _mm_loadu_ps(from + 3 * stride);
            _MM_TRANSPOSE4_PS(a, b, c, d);
            float* to = out + i * rows + at;
            _mm_storeu_ps(to, a);
            _mm_storeu_ps(to + rows, b);
            _mm_storeu_ps(to + 2 * rows, c);
            _mm_storeu_ps(to + 3 * rows, d);
        }
#endif
    for (; i < k; i++)
        for (int r = 0; r < rows; r++) out[i * rows + r] = act[r * stride + i];
}

}  // namespace janus
