// Vectors of floats, the exponential, bf16 and the panel transpose: what every native kernel is written in.
//
// Included by the other headers only. Everything here is position independent: a value's result never depends on the
// lane or the loop iteration that computes it, which is what the determinism contract of the kernel table rests on.
// The library is compiled with -ffp-contract=off, so that a fused multiply-add happens only where `fma` is written.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define JANUS_ALWAYS __attribute__((always_inline))

namespace janus {

#if defined(__AVX512F__)
constexpr int W = 16;  // floats in a vector
#else
constexpr int W = 8;
#endif
constexpr int PANEL = 32;     // outputs in a weight panel; the stored form is the same on every machine
constexpr int STRIP = 2 * W;  // outputs that one micro-kernel column holds: two vectors

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));

static inline vf load(const float* p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline vi load_bits(const void* p) {
    vi v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
static inline vf splat(float x) { return x - vf{}; }  // x - 0 keeps the sign of zero
static inline vi splat_bits(int32_t x) { return x - vi{}; }

static inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// Lanes folded by a fixed binary tree: lane i meets lane i + half, then halves again.
template <class Fold>
static inline float fold_lanes(vf v, const Fold& fold) {
    float a[W];
    memcpy(a, &v, sizeof v);
    for (int h = W / 2; h; h /= 2)
        for (int i = 0; i < h; i++) a[i] = fold(a[i], a[i + h]);
    return a[0];
}

#if defined(__AVX2__)
#if defined(__AVX512F__)
#define JANUS_HALVES(op, v)                                                        \
    _mm256_##op##_ps(_mm512_castps512_ps256((__m512)v),                            \
                     _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)v, 1)))
#else
#define JANUS_HALVES(op, v) ((__m256)v)
#endif
#define JANUS_FOLD(op)                                                                         \
    __m256 w = JANUS_HALVES(op, v);                                                            \
    __m128 x = _mm_##op##_ps(_mm256_castps256_ps128(w), _mm256_extractf128_ps(w, 1));          \
    x = _mm_##op##_ps(x, _mm_movehl_ps(x, x));                                                 \
    return _mm_cvtss_f32(_mm_##op##_ss(x, _mm_shuffle_ps(x, x, 1)));
static inline float sum_lanes(vf v) { JANUS_FOLD(add) }
static inline float max_lanes(vf v) { JANUS_FOLD(max) }
#undef JANUS_FOLD
#undef JANUS_HALVES
#else
static inline float sum_lanes(vf v) {
    return fold_lanes(v, [](float a, float b) { return a + b; });
}
static inline float max_lanes(vf v) {
    return fold_lanes(v, [](float a, float b) { return a > b ? a : b; });
}
#endif

// e^x within 2 ulp; exactly 0 below -87.33 (so that a masked score of -inf weighs nothing), capped above 88.37.
static inline vf exp(vf x) {
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
    vf capped = x > splat(88.37f) ? splat(88.37f) : x;
    vf t = fma(capped, splat(1.44269504f), magic);
    vf n = t - magic;
    vf r = fma(n, splat(-0.693359375f), capped);
    r = fma(n, splat(2.12194440e-4f), r);
    vf y = splat(1.9875691500e-4f);
    y = fma(y, r, splat(1.3981999507e-3f));
    y = fma(y, r, splat(8.3334519073e-3f));
    y = fma(y, r, splat(4.1665795894e-2f));
    y = fma(y, r, splat(1.6666665459e-1f));
    y = fma(y, r, splat(5.0000001201e-1f));
    y = fma(y * r, r, r) + splat(1.0f);
    vi power = ((vi)t - (vi)magic + 127) << 23;
    return x < splat(-87.33f) ? vf{} : y * (vf)power;
}

static inline float from_bf16(uint16_t b) {
    uint32_t u = (uint32_t)b << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

// Round to nearest even; a NaN stays a NaN.
static inline uint16_t to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

#if defined(__AVX2__)
// Words c … c+3 of rows 0, 4, 8, … side by side: the loads do the part of a transpose that crosses 128-bit lanes.
static inline vf load_quads(const char* const* rows, int64_t c) {
#if defined(__AVX512F__)
    __m512 v = _mm512_castps128_ps512(_mm_loadu_ps((const float*)rows[0] + c));
    v = _mm512_insertf32x4(v, _mm_loadu_ps((const float*)rows[4] + c), 1);
    v = _mm512_insertf32x4(v, _mm_loadu_ps((const float*)rows[8] + c), 2);
    return (vf)_mm512_insertf32x4(v, _mm_loadu_ps((const float*)rows[12] + c), 3);
#else
    __m256 v = _mm256_castps128_ps256(_mm_loadu_ps((const float*)rows[0] + c));
    return (vf)_mm256_insertf128_ps(v, _mm_loadu_ps((const float*)rows[4] + c), 1);
#endif
}
#if defined(__AVX512F__)
#define JANUS_LANES(op) _mm512_##op
#else
#define JANUS_LANES(op) _mm256_##op
#endif
#endif

// out[c * PANEL + lane] = rows[lane][c] for `words` 32-bit words of W rows; reads nothing past a row's end.
static inline void transpose_rows(const char* const* rows, int64_t words, char* out) {
    int64_t c = 0;
#if defined(__AVX2__)
    for (; c + 4 <= words; c += 4) {
        auto r0 = load_quads(rows, c), r1 = load_quads(rows + 1, c);
        auto r2 = load_quads(rows + 2, c), r3 = load_quads(rows + 3, c);
        auto a = JANUS_LANES(unpacklo_ps)(r0, r1), b = JANUS_LANES(unpackhi_ps)(r0, r1);
        auto d = JANUS_LANES(unpacklo_ps)(r2, r3), e = JANUS_LANES(unpackhi_ps)(r2, r3);
        float* to = (float*)(out + c * PANEL * 4);
        store(to, (vf)JANUS_LANES(shuffle_ps)(a, d, 0x44));
        store(to + PANEL, (vf)JANUS_LANES(shuffle_ps)(a, d, 0xee));
        store(to + 2 * PANEL, (vf)JANUS_LANES(shuffle_ps)(b, e, 0x44));
        store(to + 3 * PANEL, (vf)JANUS_LANES(shuffle_ps)(b, e, 0xee));
    }
#undef JANUS_LANES
#endif
    for (; c < words; c++)
        for (int i = 0; i < W; i++) memcpy(out + (c * PANEL + i) * 4, rows[i] + c * 4, 4);
}

// 32 rows of k values become one panel: for each k (f32) or pair of k (bf16), the 32 rows' words side by side.
static inline void pack_panel(const char* const* rows, int64_t k, bool bf16, char* out) {
    int64_t words = bf16 ? k / 2 : k;
    for (int lane = 0; lane < PANEL; lane += W) transpose_rows(rows + lane, words, out + lane * 4);
    if (!bf16 || k % 2 == 0) return;
    for (int lane = 0; lane < PANEL; lane++) {
        uint32_t word = 0;
        memcpy(&word, rows[lane] + (k - 1) * 2, 2);
        memcpy(out + (words * PANEL + lane) * 4, &word, 4);
    }
}

static inline int64_t plain_panel_bytes(int64_t k, bool bf16) { return (bf16 ? (k + 1) / 2 : k) * PANEL * 4; }

}  // namespace janus
