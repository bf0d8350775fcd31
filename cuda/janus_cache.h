// The KV cache on CPU: how keys and values of one layer lie in pages, how they are written, and in which runs attention
// reads them.
//
// The form is private to the native table; whoever moves or copies pages moves them whole. Values lie as plain rows.
// Keys lie as attention multiplies them, interleaved as in a weight panel: no step ever packs them.
#pragma once

#include <algorithm>

#include "janus_simd.h"

namespace janus {

constexpr int64_t SPAN = 256;           // most keys of a span, counting a page's last vector as whole
constexpr int64_t MAX_HEAD_DIM = 1024;  // checked where the cache layer is made

// One layer. Of each page: the keys of every kv head, then the values of every kv head.
// Values are [page_tokens][head_dim]. Keys are panels of 32 tokens, the last panel of a page has those that are left;
// in a panel, each element (f32) or pair of elements (bf16) of all its tokens lies side by side.
struct Cache {
    char* base;  // the layer's part of page 0
    int64_t page_stride, pages, kv_heads, page_tokens, head_dim;
    int64_t bf16;

    int64_t row_bytes() const { return head_dim * (bf16 ? 2 : 4); }
    int64_t words() const { return row_bytes() / 4; }
    char* keys(int64_t page, int64_t head) const {
        return base + page * page_stride + head * page_tokens * row_bytes();
    }
    char* values(int64_t page, int64_t head) const { return keys(page, kv_heads + head); }
    // The first word of one key, and the bytes from each of its words to the next.
    int64_t key_offset(int64_t slot) const { return slot / PANEL * PANEL * row_bytes() + slot % PANEL * 4; }
    int64_t key_step(int64_t slot) const { return std::min<int64_t>(PANEL, page_tokens - slot / PANEL * PANEL) * 4; }
};

// W floats become bf16.
static inline void round_vector(vf x, char* to) {
    typedef uint32_t vu __attribute__((vector_size(W * 4)));
    typedef uint16_t vh __attribute__((vector_size(W * 2)));
    const vu bits = (vu)x;
    const vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const vh half = __builtin_convertvector((bits & 0x7fffffff) > 0x7f800000 ? (vu)splat_bits(0x7fc0) : rounded, vh);
    memcpy(to, &half, sizeof half);
}

// A row in the cache's type.
static inline void round_row(const Cache& c, const float* from, char* to) {
    if (!c.bf16) {
        memcpy(to, from, c.head_dim * 4);
        return;
    }
    int64_t i = 0;
    for (; i + W <= c.head_dim; i += W) round_vector(load(from + i), to + i * 2);
    for (; i < c.head_dim; i++) {
        const uint16_t bits = to_bf16(from[i]);
        memcpy(to + i * 2, &bits, 2);
    }
}

// A key's words go to as many lines, which attention reads next anyway: fetching them is most of what this costs.
static inline void write_key(const Cache& c, const float* from, int64_t slot, char* keys) {
    char row[MAX_HEAD_DIM * 4];
    round_row(c, from, row);
    char* to = keys + c.key_offset(slot);
    const int64_t step = c.key_step(slot), words = c.words();
#pragma GCC unroll 8
    for (int64_t i = 0; i < words; i++) memcpy(to + i * step, row + i * 4, 4);
}

static inline void write_value(const Cache& c, const float* from, int64_t slot, char* values) {
    round_row(c, from, values + slot * c.row_bytes());
}

// How positions fall into spans: whole pages, or pieces of one that is larger. A function of page_tokens only.
struct Spans {
    explicit Spans(int64_t tokens)
        : page_tokens(tokens), page_slots((tokens + 15) / 16 * 16), pages(std::max<int64_t>(1, SPAN / page_slots)),
          pieces((page_slots + SPAN - 1) / SPAN) {}
    int64_t first(int64_t span) const {
        return pieces > 1 ? span / pieces * page_tokens + span % pieces * SPAN : span * pages * page_tokens;
    }
    int64_t count(int64_t end) const {  // spans of positions 0 … end-1
        const int64_t last = end - 1;
        if (pieces > 1) return last / page_tokens * pieces + last % page_tokens / SPAN + 1;
        return last / (pages * page_tokens) + 1;
    }
    int64_t page_tokens, page_slots, pages, pieces;
};

// Tokens of one page: its slot of the first, that one's key and value, and where in a span's scores they begin.
struct Run {
    const char *keys, *values;
    int64_t page_slot, slot, tokens;
};

// The runs of one head's span up to position `end`, in order. A page begins at a multiple of W slots.
struct Runs {
    Runs() : count(0) {}
    Runs(const Cache& c, const int32_t* table, int64_t head, const Spans& spans, int64_t span, int64_t end) : count(0) {
        const int64_t stop = std::min(end, spans.first(span + 1));
        for (int64_t at = spans.first(span), slot = 0; at < stop;) {
            const int64_t page = table[at / c.page_tokens], from = at % c.page_tokens;
            const int64_t tokens = std::min(c.page_tokens - from, stop - at);
            run[count++] = {c.keys(page, head) + c.key_offset(from), c.values(page, head) + from * c.row_bytes(), from,
                            slot, tokens};
            slot += (tokens + W - 1) / W * W;
            at += tokens;
        }
    }
    // Only the values of the span's tokens from … to-1.
    Runs clip(int64_t from, int64_t to, int64_t row_bytes) const {
        Runs some;
        for (int i = 0; i < count; from -= run[i].tokens, to -= run[i].tokens, i++) {
            const int64_t a = std::max<int64_t>(from, 0), b = std::min(to, run[i].tokens);
            if (a < b) some.run[some.count++] = {nullptr, run[i].values + a * row_bytes, 0, run[i].slot + a, b - a};
        }
        return some;
    }
    int count;
    Run run[SPAN / 16];
};

}  // namespace janus
