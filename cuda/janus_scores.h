// Products of a few query rows with the keys of a span and of their weights with its values: attention's micro-kernels.
//
// R rows share every load, and each has its own chains, in an order that does not depend on R. Memory is the limit of a
// decode step, and a core reads most (16 GB/s of cold 4 KiB pages against 13) when several streams are asked for early:
// while keys are multiplied their values are fetched, in as many streams as there are vectors of keys, and while values
// are added the keys that this worker reads next.
#pragma once

#include "janus_cache.h"
#include "janus_matrix.h"

namespace janus {

constexpr int COLUMNS = SPAN / W;

// Loads the first words of a vector where no more exist.
struct Lanes {
#if defined(__AVX512F__)
    explicit Lanes(int64_t n) : mask((__mmask16)(n >= W ? 0xffff : (1 << std::max<int64_t>(n, 0)) - 1)) {}
    vi load(const void* p) const { return (vi)_mm512_maskz_loadu_epi32(mask, p); }
    __mmask16 mask;
#elif defined(__AVX2__)
    explicit Lanes(int64_t n) {
        for (int i = 0; i < W; i++) mask[i] = i < n ? -1 : 0;
    }
    vi load(const void* p) const { return (vi)_mm256_maskload_epi32((const int*)p, (__m256i)mask); }
    vi mask;
#else
    explicit Lanes(int64_t n) : count(std::min<int64_t>(W, std::max<int64_t>(n, 0))) {}
    vi load(const void* p) const {
        vi v = {};
        memcpy(&v, p, count * 4);
        return v;
    }
    int64_t count;
#endif
};

// Vectors of keys that are read alike: of the same panel width, with the same number of keys.
struct ColumnGroup {
    int64_t step = 0, keys = W;
    int count = 0;
    const char *at[COLUMNS + 8], *values[COLUMNS + 8];
    int32_t slot[COLUMNS + 8];
};

// The keys of a span as the kernels take them. Slot i of a row of scores belongs to lane i % W of column i / W.
struct Columns {
    Columns(const Cache& c, const Runs& runs) {
        for (int i = 0, first = 0; i < runs.count; first += (int)runs.run[i].tokens, i++) {
            const Run& run = runs.run[i];
            for (int64_t t = 0; t < run.tokens; t += W, count++) {
                const int64_t slot = run.page_slot + t, exist = std::min<int64_t>(W, c.page_tokens - slot);
                ColumnGroup& g = group[c.key_step(slot) == PANEL * 4 ? 0 : exist == W ? 1 : 2];
                g.step = c.key_step(slot);
                g.keys = exist;
                g.at[g.count] = run.keys + c.key_offset(slot) - c.key_offset(run.page_slot);
                g.values[g.count] = run.values + t * c.row_bytes();
                g.slot[g.count++] = count * W;
                first_key[count] = first + (int)t;
                keys[count] = (int)exist;
            }
        }
        // Kernels take several columns at once: past the last one they compute that one again.
        for (ColumnGroup& g : group)
            for (int i = g.count; g.count && i < g.count + 7; i++) {
                g.at[i] = g.at[g.count - 1];
                g.values[i] = g.values[g.count - 1];
                g.slot[i] = g.slot[g.count - 1];
            }
    }
    int count = 0;
    int first_key[COLUMNS];  // of each column, counted from the span's first
    int keys[COLUMNS];       // that exist in it
    ColumnGroup group[3];    // of whole panels; of the last panel, whole vectors; of the last panel, what is left
};

#if defined(__AVX512F__)
constexpr int columns_for(int r) { return r == 1 ? 8 : r <= 6 ? 4 : 2; }
#else
constexpr int columns_for(int r) { return r == 1 ? 8 : r <= 3 ? 4 : 2; }
#endif

// Scores of R queries and C vectors of keys: one chain over the words of a key. q is [head_dim][R].
template <int R, bool BF16, bool SOME>
static void score_columns(const float* q, const ColumnGroup& g, int first, int64_t words, float* scores) {
    constexpr int C = columns_for(R);
    vf acc[C][R];
    const char *at[C], *values[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {
        at[c] = g.at[first + c];
        values[c] = g.values[first + c];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) acc[c][r] = vf{};
    }
    const Lanes lanes(g.keys);
    const int64_t step = g.step;
    for (int64_t i = 0; i < words; i++) {
        const float* x = q + (BF16 ? 2 : 1) * i * R;
#pragma GCC unroll 4
        for (int c = 0; c < C; c += 2) {  // a query's element is broadcast once for two vectors of keys
            vi w[2];
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                const char* p = at[c + h] + i * step;
                w[h] = SOME ? lanes.load(p) : load_bits(p);
                __builtin_prefetch(values[c + h] + i * W * 4, 0, 2);
            }
            auto multiply = [&](const float* a, vf k0, vf k1) __attribute__((always_inline)) {
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) {
                    const vf e = splat(a[r]);
                    acc[c][r] = fma(e, k0, acc[c][r]);
                    acc[c + 1][r] = fma(e, k1, acc[c + 1][r]);
                }
            };
            if (BF16) {
                multiply(x, (vf)(w[0] << 16), (vf)(w[1] << 16));
                multiply(x + R, (vf)(w[0] & (int32_t)0xffff0000), (vf)(w[1] & (int32_t)0xffff0000));
            } else {
                multiply(x, (vf)w[0], (vf)w[1]);
            }
        }
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; c++)
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) store(scores + r * SPAN + g.slot[first + c], acc[c][r]);
}

// acc[r][column] += sum over keys, in order, of p[r][key] * value row key, for S strips from column `at`.
// A strip of bf16 values is read as pairs: even columns in one vector, odd ones in the other, and so kept in acc.
template <int R, int S, bool BF16, bool SOME>
static void add_values(const float* p, const Runs& runs, const Runs& next, const Cache& c, int64_t at, int64_t width,
                       float* acc) {
    constexpr int64_t LINE = STRIP * (BF16 ? 2 : 4);  // bytes of a strip of one value row
    vf sum[S][R][2];
#pragma GCC unroll 8
    for (int s = 0; s < S; s++)
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) sum[s][r][h] = load(acc + r * width + at + s * STRIP + h * W);
    const int64_t row_bytes = c.row_bytes(), left = c.words() - at / (BF16 ? 2 : 1);
    const Lanes lanes(left), more(left - W);
    for (int i = 0; i < runs.count; i++) {
        const char* row = runs.run[i].values + at / STRIP * LINE;
        const float* weight = p + runs.run[i].slot;
        const int64_t coming = i < next.count ? std::min(runs.run[i].tokens, next.run[i].tokens) : 0;
        const char* ahead = i < next.count ? next.run[i].keys + at / STRIP * coming * LINE : row;
        for (int64_t key = 0; key < runs.run[i].tokens; key++, row += row_bytes, weight++) {
            if (key < coming)
                for (int s = 0; s < S; s++) __builtin_prefetch(ahead + (s * coming + key) * LINE, 0, 2);
#pragma GCC unroll 8
            for (int s = 0; s < S; s++) {
                const char* strip = row + s * LINE;
                const vi w = SOME ? lanes.load(strip) : load_bits(strip);
                vf v0 = (vf)w, v1;
                if (BF16) {
                    v0 = (vf)(w << 16);
                    v1 = (vf)(w & (int32_t)0xffff0000);
                } else {
                    v1 = (vf)(SOME ? more.load(strip + W * 4) : load_bits(strip + W * 4));
                }
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) {
                    const vf x = splat(weight[r * SPAN]);
                    sum[s][r][0] = fma(x, v0, sum[s][r][0]);
                    sum[s][r][1] = fma(x, v1, sum[s][r][1]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int s = 0; s < S; s++)
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) store(acc + r * width + at + s * STRIP + h * W, sum[s][r][h]);
}

// The kernels for R rows: some vectors of keys (columns_for(R) of them, from `first` on), and whole value rows.
struct RowKernels {
    void (*score)(const float* q, const ColumnGroup& g, int first, int64_t words, float* scores);
    void (*add)(const float* p, const Runs& runs, const Runs& next, const Cache& c, int64_t width, float* acc);
};

template <int R, bool BF16>
static void score_some(const float* q, const ColumnGroup& g, int first, int64_t words, float* scores) {
    if (g.keys == W) score_columns<R, BF16, false>(q, g, first, words, scores);
    else score_columns<R, BF16, true>(q, g, first, words, scores);
}

template <int R, bool BF16>
static void add_rows(const float* p, const Runs& runs, const Runs& next, const Cache& c, int64_t width, float* acc) {
    constexpr int MOST = strips_for(R), HALF = MOST > 2 ? 2 : 1;
    const int64_t d = c.head_dim;
    int64_t at = 0;
    for (; at + MOST * STRIP <= d; at += MOST * STRIP)
        add_values<R, MOST, BF16, false>(p, runs, next, c, at, width, acc);
    for (; at + HALF * STRIP <= d; at += HALF * STRIP)
        add_values<R, HALF, BF16, false>(p, runs, next, c, at, width, acc);
    for (; at + STRIP <= d; at += STRIP) add_values<R, 1, BF16, false>(p, runs, next, c, at, width, acc);
    if (at < d) add_values<R, 1, BF16, true>(p, runs, next, c, at, width, acc);
}

template <bool BF16>
static RowKernels row_kernels(int rows) {
#define JANUS_ROWS(R) \
    case R:           \
        return {score_some<R, BF16>, add_rows<R, BF16>};
    switch (rows) {
        JANUS_ROWS(1) JANUS_ROWS(2) JANUS_ROWS(3) JANUS_ROWS(4) JANUS_ROWS(5) JANUS_ROWS(6)
#if defined(__AVX512F__)
        JANUS_ROWS(7) JANUS_ROWS(8) JANUS_ROWS(9) JANUS_ROWS(10) JANUS_ROWS(11) JANUS_ROWS(12)
#endif
    }
#undef JANUS_ROWS
    return {};
}

static inline RowKernels row_kernels(int rows, bool bf16) {
    return bf16 ? row_kernels<true>(rows) : row_kernels<false>(rows);
}

// One row's scores of a span become weights of its visible keys; sets their maximum and their sum.
static inline void soften(float* scores, const Columns& keys, int64_t visible, float& top, float& total) {
    vi lane;
    for (int i = 0; i < W; i++) lane[i] = i;
    const vf hidden = splat(-__builtin_inff());
    vf highest = hidden, sum[4] = {};
    int columns = 0, i = 0;
    for (; columns < keys.count && keys.first_key[columns] < visible; columns++) {
        const int64_t seen = std::min<int64_t>(keys.keys[columns], visible - keys.first_key[columns]);
        vf s = load(scores + columns * W);
        if (seen < W) {
            s = lane < splat_bits((int32_t)seen) ? s : hidden;
            store(scores + columns * W, s);
        }
        highest = highest > s ? highest : s;
    }
    top = max_lanes(highest);
    auto weigh = [&](int column, vf& to) {
        const vf e = exp(load(scores + column * W) - splat(top));
        store(scores + column * W, e);
        to += e;
    };
    for (; i + 4 <= columns; i += 4)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) weigh(i + j, sum[j]);
    for (; i < columns; i++) weigh(i, sum[i & 3]);
    total = sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

}  // namespace janus
