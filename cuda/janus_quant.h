// Block-quantised weights: the packed forms of GGUF's Q4_1, Q8_0, Q4_K and Q6_K, and the walks over them.
//
// A panel of 32 outputs is a row of blocks; a block holds its scales side by side (one an output) and then the integers,
// moved but not changed: every bit of what the file holds is kept. A walk gives each weight as float32, `q * scale` or
// `q * scale + offset`, equal to the reference dequantisation bit for bit: q * scale is exact wherever an offset follows,
// so a fused multiply-add rounds as two operations do. Products over such weights therefore equal, bit for bit, those over
// the same weights stored as float32, for any number of rows and on either path (straight from the blocks, or expanded).
#pragma once

#include "janus_simd.h"

namespace janus {

enum Form : int64_t { F32, BF16, Q4_1, Q8_0, Q4_K, Q6_K };  // mirrors kernels/table.py

// How far ahead of use a line of blocks is asked for; a walk is told the distance, which jumps where panels end.
constexpr int64_t BLOCKS_AHEAD = 2560;

static JANUS_ALWAYS inline void ask(const char* p, int lines) {
    for (int i = 0; i < lines; i++) __builtin_prefetch(p + i * 64);
}

static inline float from_half(uint16_t h) {
    const uint32_t u = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
    float f;
    memcpy(&f, &u, 4);
    f *= 0x1p112f;  // puts the exponent right, of subnormal halves too; infinities were refused when rows were stored
    uint32_t bits;
    memcpy(&bits, &f, 4);
    bits |= sign;
    memcpy(&f, &bits, 4);
    return f;
}

static inline float half_at(const char* p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return from_half(h);
}

static inline bool bad_half(const char* p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return (h & 0x7c00) == 0x7c00;
}

static JANUS_ALWAYS inline vf load_halves(const char* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    float f[W];
    for (int i = 0; i < W; i++) f[i] = half_at(p + i * 2);
    return load(f);
#endif
}

// W bytes as floats: signed (int8_t) or not (uint8_t).
template <class Byte>
static JANUS_ALWAYS inline vf load_bytes(const char* p) {
#if defined(__AVX512F__)
    const __m128i b = _mm_loadu_si128((const __m128i*)p);
    return (vf)_mm512_cvtepi32_ps((Byte)-1 < 0 ? _mm512_cvtepi8_epi32(b) : _mm512_cvtepu8_epi32(b));
#elif defined(__AVX2__)
    const __m128i b = _mm_loadl_epi64((const __m128i*)p);
    return (vf)_mm256_cvtepi32_ps((Byte)-1 < 0 ? _mm256_cvtepi8_epi32(b) : _mm256_cvtepu8_epi32(b));
#else
    vi v;
    for (int i = 0; i < W; i++) v[i] = (Byte)p[i];
    return __builtin_convertvector(v, vf);
#endif
}

// Four bits of each 32-bit word, from bit `shift` on, as floats.
template <int SHIFT>
static JANUS_ALWAYS inline vf load_nibbles(const char* p) {
#if defined(__AVX512F__)  // a permute reads the low four bits of its index: mask and conversion in one instruction
    const __m512 counts = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (vf)_mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)load_bits(p), SHIFT), counts);
#else
    return __builtin_convertvector(load_bits(p) >> SHIFT & 15, vf);
#endif
}

// What integers of one group are multiplied by, and what is added, for the V vectors of outputs of a walk.
template <int V>
struct Scales {
    vf s[V], o[V];
};

template <int SHIFT, int V, class Sink>
static JANUS_ALWAYS inline void give_nibbles(const char* row, const Scales<V>& c, int64_t k, const Sink& sink) {
    vf w[V];
    for (int v = 0; v < V; v++) w[v] = fma(load_nibbles<SHIFT>(row + v * W * 4), c.s[v], c.o[v]);
    sink(k, w);
}

// Rows of 32 words, four inputs a word; sink(k, w) gets V vectors of weights for each of the inputs k0 … in order.
template <int SHIFT, int V, class Sink>
static JANUS_ALWAYS inline void walk_nibbles(const char* rows, int count, const Scales<V>& c, int64_t ahead, int64_t k0,
                                             const Sink& sink) {
    for (int d = 0; d < count; d++) {
        const char* row = rows + d * PANEL * 4;
        const int64_t k = k0 + d * 4;
        if (SHIFT == 0) ask(row + ahead, V);
        give_nibbles<SHIFT>(row, c, k, sink);
        give_nibbles<SHIFT + 8>(row, c, k + 1, sink);
        give_nibbles<SHIFT + 16>(row, c, k + 2, sink);
        give_nibbles<SHIFT + 24>(row, c, k + 3, sink);
    }
}

// Rows of 32 bytes, one input a row.
template <int V, class Sink>
static JANUS_ALWAYS inline void walk_bytes(const char* rows, int count, const Scales<V>& c, int64_t ahead, int64_t k0,
                                           const Sink& sink) {
    for (int d = 0; d < count; d += 4) {
        const char* p = rows + d * PANEL;
        ask(p + ahead, 2);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            vf w[V];
            for (int v = 0; v < V; v++) w[v] = load_bytes<int8_t>(p + j * PANEL + v * W) * c.s[v];
            sink(k0 + d + j, w);
        }
    }
}

static inline void pack_bytes(const uint8_t* values, int64_t count, int lane, char* rows) {
    for (int64_t i = 0; i < count; i++) rows[i * PANEL + lane] = (char)values[i];
}

// Each form: inputs a block (BLOCK) and a group that shares a scale (GROUP), bytes of a stored row's block (STORED) and
// of a panel's (PACKED); pack: 32 stored blocks, one an output, into a panel's, giving the scales that are not finite;
// walk: the weights of a block for V vectors of outputs from `lane` on, asking for what lies `ahead` bytes on; scale,
// level: one output's, for single rows.

// Packed: 32 half scales, 32 half offsets, 4 rows of words. Inputs 0 … 15 are the low nibbles, 16 … 31 the high ones.
struct FormQ41 {
    static constexpr int64_t BLOCK = 32, GROUP = 32, STORED = 20, PACKED = 640;
    static int64_t pack(const char* const* from, char* out) {
        const char* words[PANEL];
        int64_t bad = 0;
        for (int i = 0; i < PANEL; i++) {
            bad += bad_half(from[i]) + bad_half(from[i] + 2);
            memcpy(out + i * 2, from[i], 2);
            memcpy(out + 64 + i * 2, from[i] + 2, 2);
            words[i] = from[i] + 4;
        }
        for (int i = 0; i < PANEL; i += W) transpose_rows(words + i, 4, out + 128 + i * 4);
        return bad;
    }
    template <int V, class Sink>
    static JANUS_ALWAYS inline void walk(const char* block, int lane, int64_t ahead, const Sink& sink) {
        const char *h = block + lane * 2, *rows = block + 128 + lane * 4;
        ask(block + ahead, 2);
        Scales<V> c;
        for (int v = 0; v < V; v++) c.s[v] = load_halves(h + v * W * 2), c.o[v] = load_halves(h + 64 + v * W * 2);
        walk_nibbles<0>(rows, 4, c, ahead, 0, sink);
        walk_nibbles<4>(rows, 4, c, ahead, 16, sink);
    }
    static void scale(const char* block, int lane, int64_t, float& s, float& o) {
        s = half_at(block + lane * 2);
        o = half_at(block + 64 + lane * 2);
    }
    static int level(const char* block, int lane, int64_t i) {
        return (uint8_t)block[128 + i % 16 / 4 * PANEL * 4 + lane * 4 + i % 4] >> (i / 16 * 4) & 15;
    }
};

// Packed: 32 half scales, then for each of 32 inputs the outputs' bytes.
struct FormQ80 {
    static constexpr int64_t BLOCK = 32, GROUP = 32, STORED = 34, PACKED = 1088;
    static int64_t pack(const char* const* from, char* out) {
        const char* words[PANEL];
        char turned[PANEL * 32];
        int64_t bad = 0;
        for (int i = 0; i < PANEL; i++) {
            bad += bad_half(from[i]);
            memcpy(out + i * 2, from[i], 2);
            words[i] = from[i] + 2;
        }
        for (int i = 0; i < PANEL; i += W) transpose_rows(words + i, 8, turned + i * 4);
        for (int word = 0; word < 8; word++)
            for (int j = 0; j < 4; j++)
                for (int i = 0; i < PANEL; i++)
                    out[64 + (word * 4 + j) * PANEL + i] = turned[(word * PANEL + i) * 4 + j];
        return bad;
    }
    template <int V, class Sink>
    static JANUS_ALWAYS inline void walk(const char* block, int lane, int64_t ahead, const Sink& sink) {
        Scales<V> c;
        for (int v = 0; v < V; v++) c.s[v] = load_halves(block + (lane + v * W) * 2);
        ask(block + ahead, 1);
        walk_bytes(block + 64 + lane, 32, c, ahead, 0, sink);
    }
    static void scale(const char* block, int lane, int64_t, float& s, float& o) {
        s = half_at(block + lane * 2);
        o = -0.0f;  // what changes no product, not even a negative zero
    }
    static int level(const char* block, int lane, int64_t i) { return (int8_t)block[64 + i * PANEL + lane]; }
};

// Packed: 32 half scales of scales, 32 of minima; for each group of 32 inputs the outputs' scale bytes and minimum bytes;
// 32 rows of words. Groups 2g and 2g + 1 are the low and the high nibbles of rows 8g … 8g + 7.
struct FormQ4K {
    static constexpr int64_t BLOCK = 256, GROUP = 32, STORED = 144, PACKED = 128 + 512 + 4096;
    static int64_t pack(const char* const* from, char* out) {
        const char* words[PANEL];
        int64_t bad = 0;
        for (int i = 0; i < PANEL; i++) {
            bad += bad_half(from[i]) + bad_half(from[i] + 2);
            memcpy(out + i * 2, from[i], 2);
            memcpy(out + 64 + i * 2, from[i] + 2, 2);
            const uint8_t* six = (const uint8_t*)from[i] + 4;  // eight scales and eight minima of six bits each
            for (int g = 0; g < 4; g++) {
                char* low = out + 128 + g * 64 + i;
                low[0] = six[g] & 63;
                low[32] = six[g + 4] & 63;
                low[256] = (six[g + 8] & 15) | (six[g] >> 6 << 4);
                low[256 + 32] = (six[g + 8] >> 4) | (six[g + 4] >> 6 << 4);
            }
            words[i] = from[i] + 16;
        }
        for (int i = 0; i < PANEL; i += W) transpose_rows(words + i, 32, out + 640 + i * 4);
        return bad;
    }
    template <int V, class Sink>
    static JANUS_ALWAYS inline void walk(const char* block, int lane, int64_t ahead, const Sink& sink) {
        const char* h = block + lane * 2;
        vf d[V], m[V];
        for (int v = 0; v < V; v++) d[v] = load_halves(h + v * W * 2), m[v] = -load_halves(h + 64 + v * W * 2);
        ask(block + ahead, 10);
        auto scales = [&](int g) JANUS_ALWAYS {
            const char* b = block + 128 + g * 64 + lane;
            Scales<V> c;
            for (int v = 0; v < V; v++) {
                c.s[v] = load_bytes<uint8_t>(b + v * W) * d[v];
                c.o[v] = load_bytes<uint8_t>(b + 32 + v * W) * m[v];
            }
            return c;
        };
        for (int g = 0; g < 8; g += 2) {
            const char* rows = block + 640 + g * 4 * PANEL * 4 + lane * 4;
            walk_nibbles<0>(rows, 8, scales(g), ahead, g * 32, sink);
            walk_nibbles<4>(rows, 8, scales(g + 1), ahead, g * 32 + 32, sink);
        }
    }
    static void scale(const char* block, int lane, int64_t i, float& s, float& o) {
        const uint8_t* b = (const uint8_t*)block + 128 + i / 32 * 64 + lane;
        s = b[0] * half_at(block + lane * 2);
        o = b[32] * -half_at(block + 64 + lane * 2);
    }
    static int level(const char* block, int lane, int64_t i) {
        return (uint8_t)block[640 + (i / 64 * 8 + i % 32 / 4) * PANEL * 4 + lane * 4 + i % 4] >> (i / 32 % 2 * 4) & 15;
    }
};

// Packed: 32 half scales of scales; for each group of 16 inputs the outputs' signed scale bytes; for each of 256 inputs
// the outputs' bytes. Six bits are kept as eight: taking them apart would cost more time than reading them saves.
struct FormQ6K {
    static constexpr int64_t BLOCK = 256, GROUP = 16, STORED = 210, PACKED = 64 + 512 + 8192;
    static int64_t pack(const char* const* from, char* out) {
        int64_t bad = 0;
        for (int i = 0; i < PANEL; i++) {
            bad += bad_half(from[i] + 208);
            memcpy(out + i * 2, from[i] + 208, 2);
            pack_bytes((const uint8_t*)from[i] + 192, 16, i, out + 64);
            uint8_t levels[256];
            for (int half = 0; half < 2; half++) {
                const uint8_t *low = (const uint8_t*)from[i] + half * 64, *high = (const uint8_t*)from[i] + 128 + half * 32;
                for (int j = 0; j < 4; j++)
                    for (int l = 0; l < 32; l++) {
                        const int four = low[j % 2 * 32 + l] >> (j / 2 * 4) & 15, two = high[l] >> (j * 2) & 3;
                        levels[half * 128 + j * 32 + l] = (uint8_t)((four | two << 4) - 32);
                    }
            }
            pack_bytes(levels, 256, i, out + 576);
        }
        return bad;
    }
    template <int V, class Sink>
    static JANUS_ALWAYS inline void walk(const char* block, int lane, int64_t ahead, const Sink& sink) {
        vf d[V];
        for (int v = 0; v < V; v++) d[v] = load_halves(block + (lane + v * W) * 2);
        ask(block + ahead, 9);
        for (int g = 0; g < 16; g++) {
            const char* b = block + 64 + g * PANEL + lane;
            Scales<V> c;
            for (int v = 0; v < V; v++) c.s[v] = load_bytes<int8_t>(b + v * W) * d[v];
            walk_bytes(block + 576 + g * 16 * PANEL + lane, 16, c, ahead, g * 16, sink);
        }
    }
    static void scale(const char* block, int lane, int64_t i, float& s, float& o) {
        s = (int8_t)block[64 + i / 16 * PANEL + lane] * half_at(block + lane * 2);
        o = -0.0f;
    }
    static int level(const char* block, int lane, int64_t i) { return (int8_t)block[576 + i * PANEL + lane]; }
};

// body(form) for a quantised form, with the form as a type; false for the plain ones.
template <class Body>
static inline bool with_quant(int64_t form, const Body& body) {
    switch (form) {
        case Q4_1: return body(FormQ41{}), true;
        case Q8_0: return body(FormQ80{}), true;
        case Q4_K: return body(FormQ4K{}), true;
        case Q6_K: return body(FormQ6K{}), true;
    }
    return false;
}

// Blocks first … last-1 of a panel as float32, [inputs][32]: the stored form of a float32 panel.
template <class F>
static void expand(const char* panel, int64_t first, int64_t last, float* out) {
    for (int64_t b = first; b < last; b++)
        for (int lane = 0; lane < PANEL; lane += STRIP) {
            float* to = out + (b - first) * F::BLOCK * PANEL + lane;
            F::template walk<2>(panel + b * F::PACKED, lane, BLOCKS_AHEAD, [&](int64_t i, const vf* w) JANUS_ALWAYS {
                store(to + i * PANEL, w[0]);
                store(to + i * PANEL + W, w[1]);
            });
        }
}

// One output's weights, k of them.
template <class F>
static void read_quant_row(const char* panel, int lane, int64_t k, float* out) {
    for (int64_t b = 0; b < k / F::BLOCK; b++, panel += F::PACKED)
        for (int64_t g = 0; g < F::BLOCK; g += F::GROUP) {
            float s, o;
            F::scale(panel, lane, g, s, o);
            for (int64_t i = g; i < g + F::GROUP; i++) *out++ = (float)F::level(panel, lane, i) * s + o;
        }
}

// 32 stored rows of blocks become one panel; the scales in them that are not finite.
template <class F>
static int64_t pack_quant_panel(const char* const* rows, int64_t k, char* out) {
    const char* at[PANEL];
    int64_t bad = 0;
    memcpy(at, rows, sizeof at);
    for (int64_t b = 0; b < k / F::BLOCK; b++, out += F::PACKED) {
        bad += F::pack(at, out);
        for (int i = 0; i < PANEL; i++) at[i] += F::STORED;
    }
    return bad;
}

}  // namespace janus
