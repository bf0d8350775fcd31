// The native CPU path: the C entry points that kernels/cpu.py calls through ctypes, and the row by row operations.
//
// Pointers are trusted to hold what the Python side sized; indices that come from data (token ids, page ids) are checked here, and
// a call that finds one out of range does nothing and returns -1. Nothing throws across the boundary and nothing keeps state
// but the pool handle.
#include <cmath>

#include "janus_attention.h"

using namespace janus;

namespace {

constexpr int64_t GRAIN = 8192;  // elements below which a row-wise task is not worth handing to another core

template <class Body>
void for_rows(Pool& pool, int64_t rows, int64_t width, const Body& body) {
    const int64_t step = std::max<int64_t>(1, GRAIN / std::max<int64_t>(width, 1));
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

void rotate_row(const float* x, const float* cos, const float* sin, int64_t half, float* out) {
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[half + i];
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

void write_cache_row(const Cache& c, const float* from, char* to) {
    if (!c.bf16) {
        memcpy(to, from, c.head_dim * 4);
        return;
    }
    uint16_t* bits = (uint16_t*)to;
    for (int64_t i = 0; i < c.head_dim; i++) bits[i] = to_bf16(from[i]);
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

}  // namespace

extern "C" {

int64_t janus_abi() { return 1; }

void* janus_pool_new(int64_t threads) { return new Pool((int)std::max<int64_t>(1, threads)); }

void janus_pool_free(void* pool) { delete (Pool*)pool; }

int64_t janus_matrix_bytes(int64_t n, int64_t k, int64_t bf16) { return (n + PANEL - 1) / PANEL * panel_bytes(k, bf16); }

int64_t janus_store_rows(const Matrix* m, const char* rows, int64_t count, int64_t start) {
    return store_rows(*m, rows, count, start);
}

void janus_read_rows(const Matrix* m, char* rows) {
    for (int64_t r = 0; r < m->n; r++) read_row_bits(*m, r, rows + r * m->k * (m->bf16 ? 2 : 4));
}

int64_t janus_embed(void* pool, const int32_t* ids, int64_t rows, const Matrix* m, float* x) {
    if (!all_below(ids, rows, m->n)) return -1;
    for_rows(*(Pool*)pool, rows, m->k * 4, [&](int64_t r) { read_row(*m, ids[r], x + r * m->k); });
    return 0;
}

void janus_rms_norm(void* pool, const float* x, const float* weight, double eps, int64_t rows, int64_t k, float* out) {
    for_rows(*(Pool*)pool, rows, k, [&](int64_t r) { norm_row(x + r * k, weight, (float)eps, k, out + r * k); });
}

void janus_linear(void* pool, const float* act, int64_t rows, const Matrix* m, const float* bias, float* out, int64_t add) {
    linear(*(Pool*)pool, act, rows, *m, bias, out, add != 0);
}

int64_t janus_rope_and_cache(void* pool, const float* qkv, const float* q_norm, const float* k_norm, double eps,
                             const float* cos, const float* sin, int64_t max_positions, int64_t rows, int64_t heads,
                             const int32_t* positions, const int32_t* row_sequence, const int32_t* page_table,
                             int64_t table_width, const Cache* cache, float* q) {
    const Cache& c = *cache;
    const int64_t d = c.head_dim, half = d / 2, width = (heads + 2 * c.kv_heads) * d;
    if (!all_below(positions, rows, max_positions)) return -1;
    for (int64_t r = 0; r < rows; r++)
        if (!pages_good(page_table + row_sequence[r] * table_width, table_width, positions[r], positions[r], c)) return -1;
    for_rows(*(Pool*)pool, rows, width, [&](int64_t r) {
        const float* row = qkv + r * width;
        const int64_t position = positions[r], slot = position % c.page_tokens;
        const int64_t page = page_table[row_sequence[r] * table_width + position / c.page_tokens];
        const float *co = cos + position * half, *si = sin + position * half;
        float normed[1024], rotated[1024];  // head_dim is at most 1024: checked where the cache layer is made
        auto turn = [&](const float* x, const float* weight, float* out) {
            if (weight) norm_row(x, weight, (float)eps, d, normed);
            rotate_row(weight ? normed : x, co, si, half, out);
        };
        for (int64_t h = 0; h < heads; h++) turn(row + h * d, q_norm, q + (r * heads + h) * d);
        for (int64_t h = 0; h < c.kv_heads; h++) {
            turn(row + (heads + h) * d, k_norm, rotated);
            write_cache_row(c, rotated, c.row(page, 0, h, slot));
            write_cache_row(c, row + (heads + c.kv_heads + h) * d, c.row(page, 1, h, slot));
        }
    });
    return 0;
}

int64_t janus_attention(void* pool, const float* q, const int32_t* positions, const int32_t* query_start, int64_t sequences,
                        const int32_t* page_table, int64_t table_width, int64_t heads, const Cache* cache, double scale,
                        float* out) {
    for (int64_t s = 0; s < sequences; s++) {
        if (query_start[s + 1] <= query_start[s]) continue;
        const int64_t last = positions[query_start[s + 1] - 1];
        if (last < 0 || !pages_good(page_table + s * table_width, table_width, 0, last, *cache)) return -1;
    }
    const AttentionJob job{q, positions, page_table, table_width, heads, *cache, (float)scale, out};
    attention(*(Pool*)pool, job, query_start, sequences);
    return 0;
}

void janus_silu_mul(void* pool, const float* gate_up, int64_t rows, int64_t f, float* out) {
    for_rows(*(Pool*)pool, rows, f * 2, [&](int64_t r) {
        silu_mul_row(gate_up + r * 2 * f, gate_up + r * 2 * f + f, f, out + r * f);
    });
}

int64_t janus_take_rows(const float* x, int64_t x_rows, const int32_t* rows, int64_t count, int64_t k, float* out) {
    if (!all_below(rows, count, x_rows)) return -1;
    for (int64_t i = 0; i < count; i++) memcpy(out + i * k, x + rows[i] * k, k * 4);
    return 0;
}

void janus_copy(char* slab, int64_t source, int64_t target, int64_t bytes) { memmove(slab + target, slab + source, bytes); }

}  // extern "C"
