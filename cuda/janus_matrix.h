// Weight matrices: bands of rows, each in one form, and the product of activations with them.
//
// Plain forms are panels for the micro-kernels of janus_dot.h, quantised ones are blocks as janus_quant.h packs them. A few
// rows take quantised weights straight from their blocks. More rows share weights that were expanded to float32 a stretch
// of a panel at a time; sums then rest in memory between two stretches, which changes no bit. Either way each output is the
// chain of fused multiply-adds that a plain float32 panel of the same values gives.
#pragma once

#include <vector>

#include "janus_dot.h"
#include "janus_pool.h"
#include "janus_quant.h"

namespace janus {

// Rows of a matrix that share one form. All but a matrix's last band have whole panels.
struct Band {
    char* data;
    int64_t n, k, form;
    bool bf16() const { return form == BF16; }
    Panels plain() const { return {data, n, k, bf16()}; }
};

struct Matrix {
    const Band* bands;
    int64_t count, n, k;
};

static inline int64_t panel_bytes(int64_t k, int64_t form) {
    int64_t bytes = plain_panel_bytes(k, form == BF16);
    with_quant(form, [&](auto f) { bytes = k / f.BLOCK * f.PACKED; });
    return bytes;
}

// Up to here rows take quantised weights straight from their blocks: registers hold all their sums at once.
#if defined(__AVX512F__)
constexpr int QROWS = 16;
#else
constexpr int QROWS = 4;
#endif
// Inputs that are expanded at a time: with a row block's activations the first-level cache holds them.
constexpr int64_t STRETCH = 256;

// A few rows: one row block, [k][n0], or two. Kernels for more rows than there are read on, into what follows, and drop
// what comes of it.
struct Few {
    const float *act0, *act1;
    int n0, n1;
    int total() const { return n0 + n1; }
};

// How R rows take quantised weights: strips of so many vectors of outputs, so many strips in turns, so many rows of the
// first row block.
template <int R>
struct Shape {
    static constexpr int VECTORS = R <= 8 ? 2 : 1, STRIPS = R <= 4 ? 4 : 1, FIRST = R <= RMAX ? R : R / 2;
};

// Up to R rows times `strips` strips, from a column of a quantised band on, straight from the blocks.
template <int R, class F>
static void dot_blocks(const Few& rows, const Band& m, int64_t column, int strips, const Target& to) {
    constexpr int V = Shape<R>::VECTORS, MOST = Shape<R>::STRIPS, FIRST = Shape<R>::FIRST, WIDE = V * W;
    const int64_t panel = m.k / F::BLOCK * F::PACKED, n0 = rows.n0, n1 = rows.n1;
    vf sums[MOST][R][V] = {};
    // At a panel's end comes not its neighbour, which another strip has at hand, but the one that follows all of them.
    const int64_t next = BLOCKS_AHEAD + std::max<int64_t>(strips * WIDE / PANEL - 1, 0) * panel;
    const int64_t late = (panel - BLOCKS_AHEAD) / F::PACKED;
    for (int64_t b = 0; b < m.k / F::BLOCK; b++)
        for (int s = 0; s < (MOST == 1 ? 1 : strips); s++) {
            const int64_t at = column + s * WIDE;
            const char* block = m.data + at / PANEL * panel + b * F::PACKED;
            const float *a0 = rows.act0 + b * F::BLOCK * n0, *a1 = rows.act1 + b * F::BLOCK * n1;
            vf acc[R][V];
            memcpy(acc, sums[s], sizeof acc);
            F::template walk<V>(block, at % PANEL, b < late ? BLOCKS_AHEAD : next, [&](int64_t k, const vf* w) JANUS_ALWAYS {
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) {
                    const vf x = splat(r < FIRST ? a0[k * n0 + r] : a1[k * n1 + r - FIRST]);
#pragma GCC unroll 2
                    for (int v = 0; v < V; v++) acc[r][v] = fma(x, w[v], acc[r][v]);
                }
            });
            memcpy(sums[s], acc, sizeof acc);
        }
    for (int s = 0; s < strips; s++) {
        const int64_t at = column + s * WIDE, left = std::min<int64_t>(WIDE, m.n - at);
        if (left <= 0) break;
        whole_strips(rows.total(), left, WIDE, to.at(at), [&](const Target& t) {
            for (int r = 0; r < rows.n0; r++) finish(sums[s][r], r, t);
            for (int r = 0; r < rows.n1; r++) finish(sums[s][FIRST + r], rows.n0 + r, t);
        });
    }
}

template <int R, class F>
static void dot_columns(const Few& rows, const Band& m, int64_t column, int64_t end, const Target& to) {
    constexpr int64_t WIDE = Shape<R>::VECTORS * W, MOST = Shape<R>::STRIPS;
    for (; column < end; column += WIDE * MOST)
        dot_blocks<R, F>(rows, m, column, (int)std::min(MOST, (end - column) / WIDE), to);
}

// A few rows times the outputs from column to end-1 of a quantised band.
template <class F>
static void dot_columns(const Few& rows, const Band& m, int64_t column, int64_t end, const Target& to) {
    switch (rows.total()) {
        case 1: return dot_columns<1, F>(rows, m, column, end, to);
        case 2: return dot_columns<2, F>(rows, m, column, end, to);
        case 3: return dot_columns<3, F>(rows, m, column, end, to);
        case 4: return dot_columns<4, F>(rows, m, column, end, to);
    }
#if defined(__AVX512F__)
    if (rows.total() <= 6) return dot_columns<6, F>(rows, m, column, end, to);
    if (rows.total() <= 8) return dot_columns<8, F>(rows, m, column, end, to);
    if (rows.total() <= 12) return dot_columns<12, F>(rows, m, column, end, to);
    dot_columns<16, F>(rows, m, column, end, to);
#endif
}

// N rows as micro-kernels want them: block b's activations are [k][rows of b].
struct Rows {
    const float* packed;
    RowBlocks blocks;
    int64_t first, last;  // the blocks of this pass

    const float* of(int64_t b, int64_t k) const { return packed + blocks.start(b) * k; }
    int64_t count() const { return last - first; }
    int64_t total() const { return blocks.start(last) - blocks.start(first); }
};

// The strips of one panel of a quantised band, expanded a stretch of inputs at a time for all row blocks.
template <class F>
static void dot_expanded(const Rows& rows, const Band& m, int64_t column, const Target& to, Scratch& scratch) {
    constexpr int64_t STEPS = STRETCH / F::BLOCK;
    const int64_t base = rows.blocks.start(rows.first);
    const int64_t panel = m.k / F::BLOCK * F::PACKED, n = std::min<int64_t>(PANEL, m.n - column);
    float* wide = (float*)scratch.reserve((STRETCH + rows.total()) * PANEL * 4);
    float* sums = wide + STRETCH * PANEL;
    const char* from = m.data + column / PANEL * panel;
    for (int64_t b0 = 0, blocks = m.k / F::BLOCK; b0 < blocks; b0 += STEPS) {
        const int64_t b1 = std::min(b0 + STEPS, blocks), k = (b1 - b0) * F::BLOCK;
        expand<F>(from, b0, b1, wide);
        const Panels stretch{(const char*)wide, b1 < blocks ? PANEL : n, k, false};
        for (int64_t b = rows.first; b < rows.last; b++) {
            const int64_t row = rows.blocks.start(b);
            const int count = rows.blocks.rows(b);
            float* kept = sums + (row - base) * PANEL;
            Target at{kept, PANEL, nullptr, false, 0, 0};
            if (b1 == blocks) at = to.at(column), at.out += row * to.stride;
            at.from = b0 ? kept : nullptr;
            // Each row block brings its share of the stretch that will be expanded next.
            at.ahead_step = F::PACKED / F::BLOCK / rows.count();
            at.ahead = from + b1 * F::PACKED - (const char*)wide + (b - rows.first) * k * at.ahead_step;
            dot_rows(count, rows.of(b, m.k) + b0 * F::BLOCK * count, stretch, 0, (stretch.n + STRIP - 1) / STRIP, at);
        }
    }
}

// All rows of a pass times the strips first … last-1 of a band; its column 0 is at to.out. to's ahead is filled in here.
static void dot_band(const Rows& rows, const Band& m, int64_t first, int64_t last, const Target& to, Scratch& scratch) {
    const int most = rows.blocks.rows(rows.first);
    const int64_t total = rows.total();
    const bool direct = total <= QROWS && rows.count() == (total > RMAX ? 2 : 1);
    const int64_t second = std::min(rows.first + 1, rows.last - 1);
    const Few few{rows.of(rows.first, m.k), rows.of(second, m.k), most, (int)total - most};
    Target of_pass = to;  // few rows may be the last of many: what passes before them wrote lies above
    of_pass.out += rows.blocks.start(rows.first) * to.stride;
    const bool quantised = with_quant(m.form, [&](auto form) {
        using F = decltype(form);
        if (direct) return dot_columns<F>(few, m, first * STRIP, last * STRIP, of_pass);
        for (int64_t s = first; s < last;) {
            const int64_t column = s * STRIP / PANEL * PANEL;
            dot_expanded<F>(rows, m, column, to, scratch);
            s = column / STRIP + PANEL / STRIP;
        }
    });
    if (quantised) return;
    const int64_t panel = plain_panel_bytes(m.k, m.bf16());
    const int wide = strips_for(most);
    for (int64_t s = first; s < last; s += wide)  // a panel stays close while all row blocks pass over it
        for (int64_t b = rows.first; b < rows.last; b++) {  // each brings its share of the next panel
            const int64_t row = rows.blocks.start(b);
            Target at = to;
            at.out += row * to.stride;
            at.ahead = panel + (b - rows.first) * panel / rows.count(), at.ahead_step = STEP / rows.count();
            dot_rows(rows.blocks.rows(b), rows.of(b, m.k), m.plain(), s, std::min(s + wide, last), at);
        }
}

static void linear(Pool& pool, const float* act, int64_t rows, const Matrix& m, const float* bias, float* out, bool add) {
    const RowBlocks blocks(rows);
    const float* packed = act;
    if (rows > 1) {
        float* to = (float*)pool.shared.reserve(rows * m.k * 4 + 64);  // a kernel may read some floats on, see Few
        auto pack = [&](int64_t b, int) {
            pack_rows(act + blocks.start(b) * m.k, m.k, blocks.rows(b), m.k, to + blocks.start(b) * m.k);
        };
        if (rows * m.k > 32768) pool.run(blocks.count, pack);
        else for (int64_t b = 0; b < blocks.count; b++) pack(b, 0);
        packed = to;
    }
    // Rows are taken in chunks whose activations stay in the second-level cache while panels stream by.
    const int64_t chunk = std::max<int64_t>(1, (768 << 10) / (RMAX * m.k * 4));
    const int64_t strips = (m.n + STRIP - 1) / STRIP;
    for (int64_t b0 = 0; b0 < blocks.count; b0 += chunk) {
        const Rows pass{packed, blocks, b0, std::min(b0 + chunk, blocks.count)};
        const int wide = strips_for(blocks.rows(b0));
        const int64_t cost = m.k * std::max<int64_t>(4, blocks.start(pass.last) - blocks.start(b0));  // cycles a strip, about
        int64_t grain = std::max(strips / (pool.threads() * 6), 12000 / cost);
        const int64_t unit = std::max<int64_t>(wide, PANEL / STRIP);
        grain = (std::max<int64_t>(grain, 1) + unit - 1) / unit * unit;
        pool.run((strips + grain - 1) / grain, [&](int64_t task, int worker) {
            const int64_t first = task * grain, last = std::min(first + grain, strips);
            int64_t start = 0;  // of the band, in strips
            for (int64_t i = 0; i < m.count; start += (m.bands[i++].n + STRIP - 1) / STRIP) {
                const int64_t low = std::max(first - start, (int64_t)0);
                const int64_t high = std::min(last - start, (m.bands[i].n + STRIP - 1) / STRIP);
                const Target to{out, m.n, bias, add, 0, 0};
                if (low < high) dot_band(pass, m.bands[i], low, high, to.at(start * STRIP), pool.scratch[worker]);
            }
        });
    }
}

static inline int64_t count_nonfinite(const char* data, int64_t values, bool bf16) {
    int64_t bad = 0;
    if (bf16) {
        const uint16_t* v = (const uint16_t*)data;
        for (int64_t i = 0; i < values; i++) bad += (v[i] & 0x7f80) == 0x7f80;
    } else {
        for (int64_t i = 0; i < values; i++) {
            uint32_t u;
            memcpy(&u, data + i * 4, 4);
            bad += (u & 0x7f800000) == 0x7f800000;
        }
    }
    return bad;
}

// Rows start … start+count-1 of a band from rows in its form; start is a multiple of PANEL. Returns how many values (of a
// quantised form: scales) are not finite.
static int64_t store_rows(const Band& m, const char* rows, int64_t count, int64_t start) {
    int64_t row_bytes = m.k * (m.bf16() ? 2 : 4), bad = 0;
    with_quant(m.form, [&](auto f) { row_bytes = m.k / f.BLOCK * f.STORED; });
    const std::vector<char> zeros(row_bytes, 0);
    const char* lanes[PANEL];
    for (int64_t r = 0; r < count; r += PANEL) {
        for (int64_t i = 0; i < PANEL; i++) lanes[i] = r + i < count ? rows + (r + i) * row_bytes : zeros.data();
        char* to = m.data + (start + r) / PANEL * panel_bytes(m.k, m.form);
        if (!with_quant(m.form, [&](auto f) { bad += pack_quant_panel<decltype(f)>(lanes, m.k, to); }))
            pack_panel(lanes, m.k, m.bf16(), to);
    }
    return m.form == F32 || m.bf16() ? count_nonfinite(rows, count * m.k, m.bf16()) : bad;
}

// One of a panel's rows as floats. Words lie in lines of their own, far apart: little else, so that many are awaited.
static void read_plain_row(const char* panel, int lane, int64_t k, bool bf16, float* out) {
    const char* words = panel + lane * 4;
    if (!bf16)
        for (int64_t i = 0; i < k; i++) memcpy(out + i, words + i * STEP, 4);
    for (int64_t i = 0; bf16 && i < k; i += 2) {
        uint32_t pair;
        memcpy(&pair, words + i / 2 * STEP, 4);
        out[i] = from_bf16((uint16_t)pair);
        if (i + 1 < k) out[i + 1] = from_bf16((uint16_t)(pair >> 16));
    }
}

// One row's values as float32.
static void read_row(const Matrix& matrix, int64_t row, float* out) {
    const Band* m = matrix.bands;
    while (row >= m->n) row -= m++->n;
    const char* panel = m->data + row / PANEL * panel_bytes(m->k, m->form);
    const int lane = row % PANEL;
    if (!with_quant(m->form, [&](auto f) { read_quant_row<decltype(f)>(panel, lane, m->k, out); }))
        read_plain_row(panel, lane, m->k, m->bf16(), out);
}

}  // namespace janus
