// Paged causal attention: one task is one sequence, one kv head and a tile of query rows with all heads of the group.
//
// Keys come in blocks of 64 absolute positions. A block's keys are packed like a weight panel (32 keys side by side) and
// multiplied by the same micro-kernel as a matrix; its values are read where they lie. Both are shared by all rows of the
// tile, yet each row's sums run in the same order as if it were alone: a score over head_dim in order, the softmax over
// the 64 lanes as a fixed tree, the output over keys in order. A key that a row may not see weighs exactly 0. Hence a
// row's bits do not depend on tile, chunk or pages (as long as values are finite: 0 times infinity is not 0).
#pragma once

#include "janus_matrix.h"

namespace janus {

struct Cache {
    char* base;  // layer's part of page 0: [2][kv_heads][page_tokens][head_dim]
    int64_t page_stride, pages, kv_heads, page_tokens, head_dim;
    int64_t bf16;

    int64_t row_bytes() const { return head_dim * (bf16 ? 2 : 4); }
    char* row(int64_t page, int64_t value, int64_t head, int64_t slot) const {
        return base + page * page_stride + ((value * kv_heads + head) * page_tokens + slot) * row_bytes();
    }
};

constexpr int64_t KEYS = 64;
constexpr int64_t TILE = 96;  // query rows x heads of the group that share a block of keys

struct AttentionJob {
    const float* q;
    const int32_t *positions, *page_table;
    int64_t table_width, heads;
    const Cache& cache;
    float scale;
    float* out;
};

struct AttentionTile {
    int64_t sequence, first, rows;
};

// acc[r][columns] = acc * fade[r] + sum over keys of p[r][key] * value row key: S strips from byte `at` of the value rows.
// A strip of bf16 values is read as pairs: even columns in the first vector, odd ones in the second, and so kept in acc.
template <int R, int S, bool BF16>
static void add_values(const float* p, const char* const* values, int64_t at, int64_t width, int64_t keys,
                       const float* fade, float* acc) {
    vf sum[S][R][2];
#pragma GCC unroll 8
    for (int s = 0; s < S; s++)
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) sum[s][r][h] = load(acc + r * width + s * STRIP + h * W) * splat(fade[r]);
    for (int64_t key = 0; key < keys; key++) {
        const char* row = values[key] + at;
#pragma GCC unroll 8
        for (int s = 0; s < S; s++) {
            vf v0, v1;
            if (BF16) {
                const vi pairs = load_bits(row + s * STRIP * 2);
                v0 = (vf)(pairs << 16);
                v1 = (vf)(pairs & (int32_t)0xffff0000);
            } else {
                v0 = load((const float*)row + s * STRIP);
                v1 = load((const float*)row + s * STRIP + W);
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                vf x = splat(p[r * KEYS + key]);
                sum[s][r][0] = fma(x, v0, sum[s][r][0]);
                sum[s][r][1] = fma(x, v1, sum[s][r][1]);
            }
        }
    }
#pragma GCC unroll 8
    for (int s = 0; s < S; s++)
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) store(acc + r * width + s * STRIP + h * W, sum[s][r][h]);
}

typedef void (*AddValues)(const float*, const char* const*, int64_t, int64_t, int64_t, const float*, float*);

template <bool BF16>
static AddValues values_kernel(int rows, bool wide) {
#define JANUS_ROWS(R) \
    case R:           \
        return wide ? add_values<R, strips_for(R), BF16> : add_values<R, 1, BF16>;
    switch (rows) {
        JANUS_ROWS(1) JANUS_ROWS(2) JANUS_ROWS(3) JANUS_ROWS(4) JANUS_ROWS(5) JANUS_ROWS(6)
#if defined(__AVX512F__)
        JANUS_ROWS(7) JANUS_ROWS(8) JANUS_ROWS(9) JANUS_ROWS(10) JANUS_ROWS(11) JANUS_ROWS(12)
#endif
    }
#undef JANUS_ROWS
    return nullptr;
}

static inline AddValues values_kernel(int rows, bool wide, bool bf16) {
    return bf16 ? values_kernel<true>(rows, wide) : values_kernel<false>(rows, wide);
}

// One row of acc over its total, columns back in order when they were kept as even and odd ones.
static inline void finish_row(const float* acc, float total, int64_t columns, bool bf16, float* out) {
    for (int64_t i = 0; i < columns; i += STRIP) {
        float kept[2][W], line[STRIP];
        for (int h = 0; h < 2; h++) store(kept[h], load(acc + i + h * W) / splat(total));
        for (int j = 0; j < W; j++) {
            line[bf16 ? 2 * j : j] = kept[0][j];
            line[bf16 ? 2 * j + 1 : W + j] = kept[1][j];
        }
        memcpy(out + i, line, std::min<int64_t>(STRIP, columns - i) * 4);
    }
}

// One row's scores of a block become weights; max and total are carried along. Returns the factor for what was summed
// before.
static inline float soften(float* scores, int64_t visible, float scale, float& top, float& total) {
    constexpr int N = KEYS / W;
    vf s[N];
    vi lane;
    for (int i = 0; i < W; i++) lane[i] = i;
    const vf hidden = splat(-__builtin_inff());
    vf highest = hidden;
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
        vi seen = lane + i * W < splat_bits((int32_t)std::min(visible, KEYS));
        s[i] = seen ? load(scores + i * W) * splat(scale) : hidden;
        highest = highest > s[i] ? highest : s[i];
    }
    const float now = std::max(top, max_lanes(highest));
    vf sum[N];
#pragma GCC unroll 8
    for (int i = 0; i < N; i++) {
        sum[i] = exp(s[i] - splat(now));
        store(scores + i * W, sum[i]);
    }
#pragma GCC unroll 4
    for (int h = N / 2; h; h /= 2)
#pragma GCC unroll 4
        for (int i = 0; i < h; i++) sum[i] += sum[i + h];
    const float fade = exp(splat(top - now))[0];
    total = total * fade + sum_lanes(sum[0]);
    top = now;
    return fade;
}

// The buffers of one tile, carved from a worker's scratch.
struct TileMemory {
    TileMemory(Scratch& scratch, int64_t queries, const Cache& c) : width((c.head_dim + STRIP - 1) / STRIP * STRIP) {
        const int64_t key_floats = KEYS / PANEL * panel_bytes(c.head_dim, c.bf16) / 4;
        const int64_t q_floats = (queries * c.head_dim + 15) / 16 * 16, lines = (queries + 15) / 16 * 16;
        const int64_t floats = key_floats + q_floats + KEYS * width + queries * (KEYS + width) + 3 * lines;
        float* at = (float*)scratch.reserve(floats * 4);
        auto take = [&](int64_t count) { float* here = at; at += count; return here; };
        keys = take(key_floats);
        q = take(q_floats);
        padded = (char*)take(KEYS * width);
        scores = take(queries * KEYS);
        acc = take(queries * width);
        top = take(lines);
        total = take(lines);
        fade = take(lines);
    }
    int64_t width;  // head_dim rounded up to whole strips
    float *keys, *q, *scores, *acc, *top, *total, *fade;
    char* padded;              // value rows copied out where whole strips would read past a row's end
    const char* values[KEYS];  // the value rows of the block at hand
};

// Packs keys first … first+count-1 of one head and finds their values.
static void gather_block(const AttentionJob& job, int64_t sequence, int64_t head, int64_t first, int64_t count,
                         TileMemory& mem) {
    const Cache& c = job.cache;
    const int32_t* table = job.page_table + sequence * job.table_width;
    const char* keys[KEYS];
    const int64_t row_bytes = c.row_bytes(), value_offset = c.row(0, 1, 0, 0) - c.row(0, 0, 0, 0);
    for (int64_t i = 0; i < count;) {  // a page at a time: its rows of one head are contiguous
        const int64_t slot = (first + i) % c.page_tokens, rows = std::min(c.page_tokens - slot, count - i);
        const char* key = c.row(table[(first + i) / c.page_tokens], 0, head, slot);
        for (int64_t r = 0; r < rows; r++, i++, key += row_bytes) {
            keys[i] = key;
            mem.values[i] = key + value_offset;
        }
    }
    // Lanes past the last key repeat the first one: finite, and masked later.
    for (int64_t i = count; i < KEYS; i++) keys[i] = keys[0];
    for (int64_t p = 0; p * PANEL < count; p++)
        pack_panel(keys + p * PANEL, c.head_dim, c.bf16, (char*)mem.keys + p * panel_bytes(c.head_dim, c.bf16));
    if (c.head_dim == mem.width) return;
    for (int64_t i = 0; i < count; i++) {
        char* to = mem.padded + i * mem.width * 4;
        memcpy(to, mem.values[i], row_bytes);
        mem.values[i] = to;
    }
}

static void attend_tile(const AttentionJob& job, const AttentionTile& tile, int64_t head, Scratch& scratch) {
    const Cache& c = job.cache;
    const int64_t group = job.heads / c.kv_heads, queries = tile.rows * group, d = c.head_dim;
    TileMemory mem(scratch, queries, c);
    const RowBlocks blocks(queries);
    auto query = [&](int64_t g) {  // offset of query g = row * group + head in group, in q and out
        return ((tile.first + g / group) * job.heads + head * group + g % group) * d;
    };
    for (int64_t b = 0; b < blocks.count; b++)
        for (int r = 0; r < blocks.rows(b); r++) {
            const float* from = job.q + query(blocks.start(b) + r);
            float* to = mem.q + blocks.start(b) * d + r;
            for (int64_t i = 0; i < d; i++) to[i * blocks.rows(b)] = from[i];
        }
    std::fill(mem.acc, mem.acc + queries * mem.width, 0.0f);
    std::fill(mem.total, mem.total + queries, 0.0f);
    std::fill(mem.top, mem.top + queries, -__builtin_inff());
    memset(mem.padded, 0, KEYS * mem.width * 4);
    const int64_t end = job.positions[tile.first + tile.rows - 1] + 1;
    for (int64_t first = 0; first < end; first += KEYS) {
        const int64_t count = std::min(KEYS, end - first), strips = mem.width / STRIP;
        gather_block(job, tile.sequence, head, first, count, mem);
        const Matrix keys{(char*)mem.keys, (count + PANEL - 1) / PANEL * PANEL, d, c.bf16};
        for (int64_t b = 0; b < blocks.count; b++) {
            const int64_t g0 = blocks.start(b);
            const int rows = blocks.rows(b);
            const Target scores{mem.scores + g0 * KEYS, KEYS, nullptr, false, 0, 0};
            dot_rows(rows, mem.q + g0 * d, keys, 0, keys.n / STRIP, scores);
            for (int64_t g = g0; g < g0 + rows; g++) {
                const int64_t visible = job.positions[tile.first + g / group] + 1 - first;
                mem.fade[g] = soften(mem.scores + g * KEYS, visible, job.scale, mem.top[g], mem.total[g]);
            }
            const int wide = strips_for(rows);
            for (int64_t s = 0; s < strips;) {
                const bool many = s + wide <= strips;
                const AddValues add = values_kernel(rows, many, c.bf16);
                add(mem.scores + g0 * KEYS, mem.values, s * STRIP * (c.bf16 ? 2 : 4), mem.width, count, mem.fade + g0,
                    mem.acc + g0 * mem.width + s * STRIP);
                s += many ? wide : 1;
            }
        }
    }
    for (int64_t g = 0; g < queries; g++)
        finish_row(mem.acc + g * mem.width, mem.total[g], d, c.bf16, job.out + query(g));
}

static void attention(Pool& pool, const AttentionJob& job, const int32_t* query_start, int64_t sequences) {
    const int64_t rows = std::max<int64_t>(1, TILE / (job.heads / job.cache.kv_heads));
    std::vector<AttentionTile> tiles;
    for (int64_t s = 0; s < sequences; s++)
        for (int64_t r = query_start[s]; r < query_start[s + 1]; r += rows)
            tiles.push_back({s, r, std::min<int64_t>(rows, query_start[s + 1] - r)});
    // The longest tiles are the last of a prompt: begin with them, so that no worker is left with one at the end.
    const int64_t tasks = (int64_t)tiles.size() * job.cache.kv_heads;
    pool.run(tasks, [&](int64_t task, int worker) {
        const int64_t t = tasks - 1 - task;
        attend_tile(job, tiles[t / job.cache.kv_heads], t % job.cache.kv_heads, pool.scratch[worker]);
    });
}

}  // namespace janus
