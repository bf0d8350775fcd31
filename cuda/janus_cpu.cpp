// The native CPU path: the C entry points that kernels/cpu.py calls through ctypes, and the row by row operations.
//
// A step is a list of operations that `janus_run` executes in one call: Python records the list once and then only
// changes what differs from step to step. Pointers are trusted to hold what the Python side sized; indices that come from
// data (token ids, positions, page ids) are checked here. Nothing throws across the boundary, no state but the pool's.
#include <cmath>

#include "janus_attention.h"
#include "janus_copy.h"

using namespace janus;

namespace {

constexpr int64_t GRAIN = 8192;  // elements below which a row-wise task is not worth handing to another core

template <class Body>
void for_rows(Pool& pool, int64_t rows, int64_t width, const Body& body) {
    // Neighbours stay together where rows are many: keys of one panel share lines.
    const int64_t step = std::max({(int64_t)1, GRAIN / std::max<int64_t>(width, 1), rows / (8 * pool.threads())});
    pool.run((rows + step - 1) / step, [&](int64_t task, int) {
        for (int64_t r = task * step; r < std::min(rows, (task + 1) * step); r++) body(r);
    });
}

// Sum of squares of one row: four chains of vectors, a fixed tree, then the ragged end in order.
float sum_squares(const float* x, int64_t k) {
    vf sum[4] = {};
    int64_t i = 0;
    for (; i + 4 * W <= k; i += 4 * W)
        for (int j = 0; j < 4; j++) {
            vf v = load(x + i + j * W);
            sum[j] = fma(v, v, sum[j]);
        }
    float total = sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
    for (; i < k; i++) total += x[i] * x[i];
    return total;
}

void norm_row(const float* x, const float* weight, float eps, int64_t k, float* out) {
    const float scale = 1.0f / std::sqrt(sum_squares(x, k) / (float)k + eps);
    for (int64_t i = 0; i < k; i++) out[i] = x[i] * scale * weight[i];
}

// One head: normalised when a weight is given, then its halves turned against each other.
void turn_head(const float* x, const float* weight, float eps, const float* cos, const float* sin, int64_t d,
               float* out) {
    const int64_t half = d / 2;
    const float scale = weight ? 1.0f / std::sqrt(sum_squares(x, d) / (float)d + eps) : 1.0f;
    int64_t i = 0;
    for (; i + W <= half; i += W) {
        vf a = load(x + i), b = load(x + half + i);
        if (weight) {
            a = a * splat(scale) * load(weight + i);
            b = b * splat(scale) * load(weight + half + i);
        }
        const vf c = load(cos + i), s = load(sin + i);
        store(out + i, a * c - b * s);
        store(out + half + i, b * c + a * s);
    }
    for (; i < half; i++) {
        const float a = weight ? x[i] * scale * weight[i] : x[i];
        const float b = weight ? x[half + i] * scale * weight[half + i] : x[half + i];
        out[i] = a * cos[i] - b * sin[i];
        out[half + i] = b * cos[i] + a * sin[i];
    }
}

void silu_mul_row(const float* gate, const float* up, int64_t n, float* out) {
    auto one = [](vf g, vf u) { return g / (splat(1.0f) + exp(-g)) * u; };
    int64_t i = 0;
    for (; i + W <= n; i += W) store(out + i, one(load(gate + i), load(up + i)));
    if (i == n) return;
    float g[W] = {}, u[W] = {}, o[W];
    memcpy(g, gate + i, (n - i) * 4);
    memcpy(u, up + i, (n - i) * 4);
    store(o, one(load(g), load(u)));
    memcpy(out + i, o, (n - i) * 4);
}

bool all_below(const int32_t* ids, int64_t count, int64_t limit) {
    bool good = true;
    for (int64_t i = 0; i < count; i++) good &= ids[i] >= 0 && ids[i] < limit;
    return good;
}

// Every position's page is inside the table and inside the slab.
bool pages_good(const int32_t* table, int64_t width, int64_t first, int64_t last, const Cache& c) {
    if (first < 0 || last / c.page_tokens >= width) return false;
    return all_below(table + first / c.page_tokens, last / c.page_tokens - first / c.page_tokens + 1, c.pages);
}

// One operation of a step: which, its fixed sizes, and where its operands lie. Mirrors kernels/cpu.py.
enum Kind : int64_t { EMBED, NORM, LINEAR, LINEAR_ADD, ROPE, ATTEND, SILU, TAKE };
struct Op {
    int64_t kind;
    int64_t size[3];
    double real;
    const void* at[7];
};

// What changes from step to step. Operations work on `rows` rows; after TAKE on the `taken` rows whose logits are wanted.
struct Step {
    int64_t rows, sequences, table_width, taken;
    const int32_t *ids, *positions, *query_start, *page_table, *row_sequence, *take;
};

bool embed(Pool& pool, const Op& op, const Step& step) {
    const Matrix& m = *(const Matrix*)op.at[0];
    float* x = (float*)op.at[1];
    if (!all_below(step.ids, step.rows, m.n)) return false;
    for_rows(pool, step.rows, m.k * 4, [&](int64_t r) { read_row(m, step.ids[r], x + r * m.k); });
    return true;
}

void norm(Pool& pool, const Op& op, int64_t rows) {
    const float *x = (const float*)op.at[0], *weight = (const float*)op.at[1];
    float* out = (float*)op.at[2];
    const int64_t k = op.size[0];
    for_rows(pool, rows, k, [&](int64_t r) { norm_row(x + r * k, weight, (float)op.real, k, out + r * k); });
}

// size: heads, positions in the rotary tables. at: qkv, q_norm, k_norm, cos, sin, cache, q.
bool rope_and_cache(Pool& pool, const Op& op, const Step& step) {
    const Cache& c = *(const Cache*)op.at[5];
    const float *qkv = (const float*)op.at[0], *q_norm = (const float*)op.at[1], *k_norm = (const float*)op.at[2];
    float* q = (float*)op.at[6];
    const int64_t heads = op.size[0], d = c.head_dim, half = d / 2, width = (heads + 2 * c.kv_heads) * d;
    if (!all_below(step.positions, step.rows, op.size[1]) || !all_below(step.row_sequence, step.rows, step.sequences)) return false;
    for (int64_t r = 0; r < step.rows; r++)
        if (!pages_good(step.page_table + step.row_sequence[r] * step.table_width, step.table_width, step.positions[r],
                        step.positions[r], c))
            return false;
    for_rows(pool, step.rows, width, [&](int64_t r) {
        const float* row = qkv + r * width;
        const int64_t position = step.positions[r], slot = position % c.page_tokens;
        const int64_t page = step.page_table[step.row_sequence[r] * step.table_width + position / c.page_tokens];
        const float *co = (const float*)op.at[3] + position * half, *si = (const float*)op.at[4] + position * half;
        float turned[MAX_HEAD_DIM];
        const float eps = (float)op.real;
        for (int64_t h = 0; h < heads; h++) turn_head(row + h * d, q_norm, eps, co, si, d, q + (r * heads + h) * d);
        for (int64_t h = 0; h < c.kv_heads; h++) {
            turn_head(row + (heads + h) * d, k_norm, eps, co, si, d, turned);
            write_key(c, turned, slot, c.keys(page, h));
            write_value(c, row + (heads + c.kv_heads + h) * d, slot, c.values(page, h));
        }
    });
    return true;
}

// size: heads. at: q, cache, out.
bool attend(Pool& pool, const Op& op, const Step& step) {
    const Cache& c = *(const Cache*)op.at[1];
    if (step.query_start[step.sequences] != step.rows) return false;
    for (int64_t s = 0; s < step.sequences; s++) {
        if (step.query_start[s + 1] <= step.query_start[s]) continue;
        const int64_t last = step.positions[step.query_start[s + 1] - 1];
        if (last < 0 || !pages_good(step.page_table + s * step.table_width, step.table_width, 0, last, c)) return false;
    }
    const AttentionJob job{(const float*)op.at[0], step.positions, step.page_table, step.table_width, op.size[0], c,
                           (float)op.real, (float*)op.at[2]};
    attention(pool, job, step.query_start, step.sequences);
    return true;
}

void silu_mul(Pool& pool, const Op& op, int64_t rows) {
    const float* gate_up = (const float*)op.at[0];
    float* out = (float*)op.at[1];
    const int64_t f = op.size[0];
    for_rows(pool, rows, f * 2, [&](int64_t r) {
        silu_mul_row(gate_up + r * 2 * f, gate_up + r * 2 * f + f, f, out + r * f);
    });
}

bool take_rows(const Op& op, const Step& step) {
    const int64_t k = op.size[0];
    if (!all_below(step.take, step.taken, step.rows)) return false;
    for (int64_t i = 0; i < step.taken; i++)
        memcpy((float*)op.at[1] + i * k, (const float*)op.at[0] + step.take[i] * k, k * 4);
    return true;
}

bool run_one(Pool& pool, const Op& op, const Step& step, int64_t& rows) {
    switch (op.kind) {
        case EMBED: return embed(pool, op, step);
        case NORM: return norm(pool, op, rows), true;
        case LINEAR:
        case LINEAR_ADD:
            linear(pool, (const float*)op.at[0], rows, *(const Matrix*)op.at[1], (const float*)op.at[2], (float*)op.at[3],
                   op.kind == LINEAR_ADD);
            return true;
        case ROPE: return rope_and_cache(pool, op, step);
        case ATTEND: return attend(pool, op, step);
        case SILU: return silu_mul(pool, op, rows), true;
        case TAKE: rows = step.taken; return take_rows(op, step);
    }
    return false;
}

}  // namespace

extern "C" {

int64_t janus_abi() { return 4; }

void* janus_pool_new(int64_t threads) { return new Pool((int)std::max<int64_t>(1, threads)); }

void janus_pool_free(void* pool) { delete (Pool*)pool; }

int64_t janus_band_bytes(int64_t n, int64_t k, int64_t form) { return (n + PANEL - 1) / PANEL * panel_bytes(k, form); }

int64_t janus_store_rows(const Band* band, const char* rows, int64_t count, int64_t start) {
    return store_rows(*band, rows, count, start);
}

void janus_read_rows(const Matrix* m, float* rows) {
    for (int64_t r = 0; r < m->n; r++) read_row(*m, r, rows + r * m->k);
}

// Runs operations one after the other; the number of the first that found an index out of range, or -1.
int64_t janus_run(void* pool, const Op* ops, int64_t count, const Step* step) {
    int64_t rows = step->rows;
    for (int64_t i = 0; i < count; i++)
        if (!run_one(*(Pool*)pool, ops[i], *step, rows)) return i;
    return -1;
}

void janus_copy(char* slab, int64_t source, int64_t target, int64_t bytes) { memmove(slab + target, slab + source, bytes); }

void janus_stream(char* to, const char* from, int64_t bytes) { stream_copy(to, from, bytes); }

}  // extern "C"
