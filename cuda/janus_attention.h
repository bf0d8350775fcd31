// Paged causal attention: a task is one sequence, one kv head and a tile of query rows with all heads of the group.
//
// Keys come in spans: runs of pages, or pieces of a large page, that depend on page_tokens alone. Within a span a score
// is one chain over head_dim, the softmax goes over whole vectors of keys, the output over keys in order; spans are
// folded in order. None of that depends on which rows share a tile, on chunks, page ids or threads: hence a row's bits
// do not either. A value that a row may not see is not multiplied by a weight of zero, for it may be infinite.
#pragma once

#include <atomic>
#include <tuple>

#include "janus_scores.h"

namespace janus {

constexpr int64_t TILE = 96;  // query rows x heads of the group that share a span of keys

struct AttentionTile {
    int64_t sequence, first, rows, end;  // end: one past the last position that its last row sees
};

struct AttentionJob {
    const float* q;
    const int32_t *positions, *page_table;
    int64_t table_width, heads;
    const Cache& cache;
    float scale;
    float* out;

    int64_t group() const { return heads / cache.kv_heads; }
    Runs runs(const AttentionTile& tile, int64_t head, const Spans& spans, int64_t span) const {
        return Runs(cache, page_table + tile.sequence * table_width, head, spans, span, tile.end);
    }
};

static inline int64_t padded_width(int64_t columns) { return (columns + STRIP - 1) / STRIP * STRIP; }

// What some keys gave the queries of a tile: sums of weighted values [queries][width], each query's maximum and sum.
struct Partial {
    float *acc, *top, *total;
    static int64_t floats(int64_t queries, int64_t width) { return queries * (width + 2); }
    static Partial at(float* memory, int64_t queries, int64_t width) {
        return {memory, memory + queries * width, memory + queries * (width + 1)};
    }
};

// One query's sums of a later span join those of the spans before it.
static inline void fold(const Partial& sum, const Partial& span, int64_t query, int64_t width) {
    const float now = std::max(sum.top[query], span.top[query]);
    const float fade = exp(splat(sum.top[query] - now))[0], share = exp(splat(span.top[query] - now))[0];
    float* to = sum.acc + query * width;
    const float* from = span.acc + query * width;
    for (int64_t i = 0; i < width; i += W)
        store(to + i, fma(load(from + i), splat(share), load(to + i) * splat(fade)));
    sum.total[query] = sum.total[query] * fade + span.total[query] * share;
    sum.top[query] = now;
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

// A tile of one kv head: its queries as the kernels want them and the buffers of a worker. Query g is row g / group.
struct HeadTile {
    HeadTile(const AttentionJob& job, const AttentionTile& tile, int64_t head, Scratch& scratch)
        : job(job), tile(tile), head(head), queries(tile.rows * job.group()), blocks(queries),
          width(padded_width(job.cache.head_dim)), spans(job.cache.page_tokens) {
        const int64_t d = job.cache.head_dim, q_floats = (queries * d + 15) / 16 * 16;
        const int64_t part = (Partial::floats(queries, width) + 15) / 16 * 16;
        q = (float*)scratch.reserve((q_floats + 2 * part + queries * SPAN) * 4);
        sum = Partial::at(q + q_floats, queries, width);
        span = Partial::at(q + q_floats + part, queries, width);
        scores = q + q_floats + 2 * part;
    }
    int64_t query(int64_t g) const {  // where query g lies in q and out
        return ((tile.first + g / job.group()) * job.heads + head * job.group() + g % job.group()) * job.cache.head_dim;
    }
    Runs runs(int64_t number) const { return job.runs(tile, head, spans, number); }
    int64_t visible(int64_t g, int64_t start) const { return job.positions[tile.first + g / job.group()] + 1 - start; }

    const AttentionJob& job;
    const AttentionTile& tile;
    int64_t head, queries;
    RowBlocks blocks;
    int64_t width;  // head_dim rounded up to whole strips
    Spans spans;
    float *q, *scores;  // [head_dim][rows] a block of rows; [queries][SPAN]
    Partial sum, span;
};

static void pack_queries(const HeadTile& t) {
    const int64_t d = t.job.cache.head_dim;
    for (int64_t b = 0; b < t.blocks.count; b++)
        for (int r = 0; r < t.blocks.rows(b); r++) {
            const float* from = t.job.q + t.query(t.blocks.start(b) + r);
            float* to = t.q + t.blocks.start(b) * d + r;
            for (int64_t i = 0; i < d; i++) to[i * t.blocks.rows(b)] = from[i] * t.job.scale;
        }
}

// Sums of one span for every query of the tile that sees any of it. `next`: the keys that this worker reads after it.
static void attend_span(const HeadTile& t, int64_t number, const Runs& next, const Partial& out) {
    const Cache& c = t.job.cache;
    const int64_t start = t.spans.first(number);
    const Runs runs = t.runs(number);
    const Columns keys(c, runs);
    const RowKernels single = row_kernels(1, c.bf16);
    const int wide = columns_for(t.blocks.rows(0));  // blocks differ by one row at most, and then have one answer
    for (const ColumnGroup& g : keys.group)
        for (int i = 0; i < g.count; i += wide)
            for (int64_t b = 0; b < t.blocks.count; b++) {
                const int64_t g0 = t.blocks.start(b);
                const int rows = t.blocks.rows(b);
                if (t.visible(g0 + rows - 1, start) <= 0) continue;
                row_kernels(rows, c.bf16).score(t.q + g0 * c.head_dim, g, i, c.words(), t.scores + g0 * SPAN);
            }
    for (int64_t b = 0; b < t.blocks.count; b++) {
        const int64_t g0 = t.blocks.start(b), g1 = g0 + t.blocks.rows(b);
        if (t.visible(g1 - 1, start) <= 0) continue;
        const RowKernels kernels = row_kernels((int)(g1 - g0), c.bf16);
        float* scores = t.scores + g0 * SPAN;
        for (int64_t g = g0; g < g1; g++)
            soften(t.scores + g * SPAN, keys, t.visible(g, start), out.top[g], out.total[g]);
        std::fill(out.acc + g0 * t.width, out.acc + g1 * t.width, 0.0f);
        const int64_t common = t.visible(g0, start);  // what the first row sees, all see; then each goes on alone
        kernels.add(scores, runs.clip(0, common, c.row_bytes()), b ? Runs() : next, c, t.width, out.acc + g0 * t.width);
        for (int64_t g = g0; g < g1; g++) {
            if (t.visible(g, start) <= common) continue;
            const Runs own = runs.clip(common, t.visible(g, start), c.row_bytes());
            single.add(t.scores + g * SPAN, own, Runs(), c, t.width, out.acc + g * t.width);
        }
    }
}

// Folds a later span into what came before, for the queries that see any of it.
static void fold_span(const HeadTile& t, int64_t number, const Partial& sum, const Partial& span) {
    const int64_t start = t.spans.first(number);
    for (int64_t g = 0; g < t.queries; g++)
        if (t.visible(g, start) > 0) fold(sum, span, g, t.width);
}

static void finish(const HeadTile& t, const Partial& sum) {
    const Cache& c = t.job.cache;
    for (int64_t g = 0; g < t.queries; g++)
        finish_row(sum.acc + g * t.width, sum.total[g], c.head_dim, c.bf16, t.job.out + t.query(g));
}

// A tile of one head as one task, or one span of it. The task that ends last of a divided tile folds the others.
struct AttentionTask {
    int64_t tile, head, span;  // span -1: all of them
    int64_t cost;
    int64_t partials, counter;  // where the first span's sums lie among all; which count of spans left is theirs
};

static void run_task(const AttentionJob& job, const AttentionTile& tile, const AttentionTask& task, const Runs& after,
                     float* partials, std::atomic<int64_t>* left, Scratch& scratch) {
    const HeadTile t(job, tile, task.head, scratch);
    const int64_t spans = t.spans.count(tile.end), floats = Partial::floats(t.queries, t.width);
    auto partial = [&](int64_t span) { return Partial::at(partials + span * floats, t.queries, t.width); };
    pack_queries(t);
    if (task.span < 0) {
        for (int64_t i = 0; i < spans; i++) {
            attend_span(t, i, i + 1 < spans ? t.runs(i + 1) : after, i ? t.span : t.sum);
            if (i) fold_span(t, i, t.sum, t.span);
        }
        return finish(t, t.sum);
    }
    attend_span(t, task.span, after, partial(task.span));
    if (left->fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    for (int64_t i = 1; i < spans; i++) fold_span(t, i, partial(0), partial(i));
    finish(t, partial(0));
}

static inline int64_t cost(const AttentionTile& tile, int64_t group) {
    return (tile.rows * group + 8) * tile.end;  // a span's keys are read once, whatever the number of rows
}

static std::vector<AttentionTile> cut_tiles(const AttentionJob& job, const int32_t* query_start, int64_t sequences,
                                            int threads) {
    const int64_t group = job.group(), fair = query_start[sequences] * job.cache.kv_heads / (4 * threads);
    const int64_t rows = std::max<int64_t>(1, std::min(TILE / group, std::max<int64_t>(RMAX / group, fair)));
    std::vector<AttentionTile> tiles;
    for (int64_t s = 0; s < sequences; s++)
        for (int64_t r = query_start[s]; r < query_start[s + 1]; r += rows) {
            const int64_t last = std::min<int64_t>(r + rows, query_start[s + 1]);
            tiles.push_back({s, r, last - r, job.positions[last - 1] + 1});
        }
    return tiles;
}

static void attention(Pool& pool, const AttentionJob& job, const int32_t* query_start, int64_t sequences) {
    const int64_t group = job.group(), heads = job.cache.kv_heads, width = padded_width(job.cache.head_dim);
    const Spans spans(job.cache.page_tokens);
    const std::vector<AttentionTile> tiles = cut_tiles(job, query_start, sequences, pool.threads());
    int64_t total = 0, floats = 0, divided = 0;
    for (const AttentionTile& t : tiles) total += cost(t, group) * heads;
    // A few rows over so many keys that their heads would keep some workers waiting for others are divided by spans.
    auto divide = [&](const AttentionTile& t) {
        return pool.threads() > 1 && cost(t, group) > total / (4 * pool.threads()) && t.end > spans.first(1) &&
               t.rows * group <= std::max<int64_t>(group, RMAX);
    };
    std::vector<AttentionTask> tasks;
    for (int64_t i = 0; i < (int64_t)tiles.size(); i++)
        for (int64_t head = 0; head < heads; head++) {
            const AttentionTile& t = tiles[i];
            if (!divide(t)) {
                tasks.push_back({i, head, -1, cost(t, group), 0, 0});
                continue;
            }
            const int64_t count = spans.count(t.end);
            for (int64_t span = 0; span < count; span++)
                tasks.push_back({i, head, span, cost(t, group) / count, floats, divided});
            floats += count * Partial::floats(t.rows * group, width);
            divided++;
        }
    // The most expensive first, so that no worker is left with one at the end.
    std::sort(tasks.begin(), tasks.end(), [](const AttentionTask& a, const AttentionTask& b) {
        return a.cost != b.cost ? a.cost > b.cost : std::tie(a.head, a.tile, a.span) < std::tie(b.head, b.tile, b.span);
    });
    float* partials = (float*)pool.shared.reserve(floats * 4);
    std::vector<std::atomic<int64_t>> left(divided);
    for (const AttentionTask& t : tasks)
        if (t.span >= 0) left[t.counter]++;
    // A worker takes a few at once, where there are enough: it then knows which keys to bring close next.
    const int64_t count = (int64_t)tasks.size();
    const int64_t step = std::min<int64_t>(4, std::max<int64_t>(1, count / (6 * pool.threads())));
    pool.run((count + step - 1) / step, [&](int64_t chunk, int worker) {
        for (int64_t i = chunk * step, last = std::min(count, i + step); i < last; i++) {
            const AttentionTask& t = tasks[i];
            Runs after;
            if (i + 1 < last) {
                const AttentionTask& n = tasks[i + 1];
                after = job.runs(tiles[n.tile], n.head, spans, std::max<int64_t>(0, n.span));
            }
            run_task(job, tiles[t.tile], t, after, partials + t.partials, t.span < 0 ? nullptr : &left[t.counter],
                     pool.scratch[worker]);
        }
    });
}

}  // namespace janus
