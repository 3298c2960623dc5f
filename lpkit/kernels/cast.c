/* Casts to low-precision grids and back. cast.py defines what each function computes (`reference`),
 * and the tests compare bit for bit. Two things make it fast here:
 * - inner loops have no branch and no call, so that the compiler makes vector code of them; a choice
 *   (`divide`, `noisy`) is an argument that is constant where the function is inlined;
 * - a tensor is read once, a tile at a time, and every pass over a tile runs in the first-level cache.
 * Floats are taken apart as integers: sign (1 bit), exponent (8), mantissa (23). Without the sign,
 * larger bits are larger magnitudes, and NaN is larger than infinity.
 * Tensors are contiguous; cast.py checks that, and all sizes. Kinds: 0 float32, 1 bf16, 2 bit patterns
 * (uint8). The sign of zero is kept, NaN stays NaN. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define TILE 2048L              /* elements; 8 KiB of float32 */
#define GRAIN 32768L            /* elements that are worth a thread, as in PyTorch */
#define NAN_BITS 0x7F800000     /* magnitudes above are NaN, this one is infinity */

typedef struct {
    int32_t mantissa_bits, min_exponent, bias, bits, nan, has_negative_zero;
    float lowest, largest;
} Grid;
typedef struct { uint64_t counter; uint32_t k0, k1; } Noise;
typedef struct { int64_t nonfinite; int32_t top; } Seen;       /* top: bits of the largest magnitude */

INLINE int32_t bits_of(float x) { int32_t b; memcpy(&b, &x, 4); return b; }
INLINE float float_of(int32_t b) { float x; memcpy(&x, &b, 4); return x; }
INLINE long least(long a, long b) { return a < b ? a : b; }

/* 2^(code - 127), code >= 0. A code is the exponent field of a float32, but 2^-127 is subnormal. */
INLINE float power(int32_t code) { return float_of(code > 0 ? code << 23 : 1 << 22); }

/* ---- loading and storing a tile -------------------------------------------------------------- */

/* bf16 is the upper half of a float32. float32 needs no copy: the tile is the tensor itself. */
INLINE const float *load(const void *x, int kind, long at, long n, float *tile) {
    if (kind == 0) return (const float *)x + at;
    const uint16_t *from = (const uint16_t *)x + at;
    for (long i = 0; i < n; i++) tile[i] = float_of((int32_t)((uint32_t)from[i] << 16));
    return tile;
}

/* To nearest-even: half of the last bit that stays, less one, plus that bit. A NaN would round up to
 * infinity, or over it to zero, so it is cut, and 0x40 makes sure that a mantissa bit is left. */
static void store_bf16(const float *restrict y, uint16_t *restrict out, long n) {
    for (long i = 0; i < n; i++) {
        uint32_t b = (uint32_t)bits_of(y[i]), even = (b + 0x7FFF + ((b >> 16) & 1)) >> 16;
        out[i] = (uint16_t)((b & 0x7FFFFFFF) > NAN_BITS ? (b >> 16) | 0x40 : even);
    }
}

/* y lies on the grid. A normal number's code is its float32 bits without the mantissa bits that are
 * zero, with the other bias; a subnormal's is how many spacings it is, which `scale` counts. Integers
 * are subnormals alone and are stored in two's complement. */
static void store_codes(const float *restrict y, uint8_t *restrict out, long n, const Grid *g) {
    const int32_t m = g->mantissa_bits, drop = 23 - m, offset = (127 - g->bias) << m;
    const int32_t sign_at = g->bits - 1, all = (int32_t)(1u << g->bits) - 1, nan = g->nan;
    const int32_t first_normal = (g->min_exponent + 127) << 23, twos = m == sign_at;
    const float scale = ldexpf(1.0f, m - g->min_exponent);
    for (long i = 0; i < n; i++) {
        int32_t b = bits_of(y[i]), a = b & 0x7FFFFFFF, negative = (int32_t)((uint32_t)b >> 31);
        /* Both are computed and one is chosen: a large `a` is masked, it would overflow an int. */
        int32_t small = (int32_t)(float_of(a < first_normal ? a : 0) * scale);
        int32_t code = a < first_normal ? small : (a >> drop) - offset;
        code = a > NAN_BITS ? nan : code;
        int32_t floats = code | (negative << sign_at), integers = (negative ? -code : code) & all;
        out[i] = (uint8_t)(twos ? integers : floats);
    }
}

/* Where rounded values go: straight to the output when it is float32, else to `tile` and from there by `finish`. */
INLINE float *target(void *out, int kind, long at, float *tile) {
    return kind == 0 ? (float *)out + at : tile;
}

INLINE void finish(const float *tile, void *out, int kind, long at, long n, const Grid *g) {
    if (kind == 1) store_bf16(tile, (uint16_t *)out + at, n);
    if (kind == 2) store_codes(tile, (uint8_t *)out + at, n, g);
}

/* ---- rounding -------------------------------------------------------------------------------- */

/* A hash of the element's number in place of a generator with a state: elements may be rounded in any
 * order, by any number of threads. Multiply-shift rounds after Wang and Wellons; 24 bits are left. */
INLINE uint32_t random_bits(uint32_t i, uint32_t k0, uint32_t k1) {
    uint32_t h = i * 0x9E3779B1u + k0;
    h = (h ^ (h >> 16)) * 0x7FEB352Du;
    h = (h ^ (h >> 15)) * 0x846CA68Bu;
    h = ((h ^ (h >> 16)) + k1) * 0x7FEB352Du;
    return (h ^ (h >> 15)) >> 8;
}

/* y = round(x / factor or x * factor) * back, n elements. */
INLINE void rounded(const float *restrict x, float *restrict y, long n, float factor, int divide, float back,
                    const Grid *g, int noisy, uint64_t index, uint32_t k0, uint32_t k1) {
    const float lowest = g->lowest, largest = g->largest, zero = g->has_negative_zero ? -0.0f : 0.0f;
    const int32_t first_normal = (g->min_exponent + 127) << 23, m = g->mantissa_bits << 23;
    const int32_t up = (23 << 23) - m;
    const uint32_t first = (uint32_t)index;
    for (long i = 0; i < n; i++) {
        float v = divide ? x[i] / factor : x[i] * factor;
        v = v > largest ? largest : v;      /* in this order a NaN stays */
        v = v < lowest ? lowest : v;
        int32_t b = bits_of(v), a = b & 0x7FFFFFFF, e = a & 0x7F800000;
        e = e > first_normal ? e : first_normal;    /* below, the spacing no longer shrinks */
        float size = float_of(a), r;
        if (noisy) {    /* q: in spacings, 2^(e - m); up where a uniform number is below its fraction */
            float q = size * float_of((254 << 23) - (e - m)), down = (float)(int32_t)q;
            float u = ((float)(int32_t)random_bits(first + (uint32_t)i, k0, k1) + 0.5f) * 0x1p-24f;
            r = (down + (u < q - down ? 1.0f : 0.0f)) * float_of(e - m);
            r = a > NAN_BITS ? size : r;
        } else {
            /* The last bit of a float32 as large as `magic` is the grid's spacing here, so adding it
             * rounds to the grid, to nearest-even, and taking it away is exact. */
            float magic = float_of((int32_t)((uint32_t)e + (uint32_t)up));
            r = (size + magic) - magic;
        }
        /* -0 + -0 stays -0 and -0 + 0 is 0: integers have no negative zero. */
        y[i] = (float_of(bits_of(r) | (b & (int32_t)0x80000000)) + zero) * back;
    }
}

INLINE void round_span(const float *x, float *y, long n, float factor, int divide, float back, const Grid *g,
                       const Noise *noise, uint64_t at) {
    if (!noise) {
        rounded(x, y, n, factor, divide, back, g, 0, 0, 0, 0);
        return;
    }
    /* The hash takes 32 bits, which vectors hold, and the index has 64. Its upper half goes into the
     * keys and must be constant in each part: a part ends where the lower half would wrap. */
    for (long done = 0, part; done < n; done += part) {
        uint64_t index = noise->counter + at + (uint64_t)done;
        uint64_t left = 0x100000000ull - (index & 0xFFFFFFFF);
        uint32_t high = (uint32_t)(index >> 32);
        part = (uint64_t)(n - done) < left ? n - done : (long)left;
        rounded(x + done, y + done, part, factor, divide, back, g, 1, index,
                noise->k0 + high * 0x85EBCA6Bu, noise->k1 ^ high);
    }
}

/* ---- largest magnitudes ---------------------------------------------------------------------- */

/* As integers: a maximum of floats that keeps NaN is no vector instruction, and of integers it is. */
INLINE int32_t top_of(const float *x, long n) {
    int32_t top = 0;
    for (long i = 0; i < n; i++) {
        int32_t a = bits_of(x[i]) & 0x7FFFFFFF;
        top = a > top ? a : top;
    }
    return top;
}

static Seen seen_in(const void *x, int kind, long at, long n) {
    float tile[TILE];
    Seen seen = {0, 0};
    for (long done = 0, part; done < n; done += part) {
        part = least(n - done, TILE);
        const float *from = load(x, kind, at + done, part, tile);
        int32_t top = top_of(from, part), bad = 0;
        if (top >= NAN_BITS)    /* counted only where there is one, which is rare */
            for (long i = 0; i < part; i++) bad += (bits_of(from[i]) & 0x7FFFFFFF) >= NAN_BITS;
        seen.top = top > seen.top ? top : seen.top;
        seen.nonfinite += bad;
    }
    return seen;
}

void lp_amax(const void *x, int kind, long R, long C, long r, long c, float *out, int64_t *nonfinite, int threads) {
    int64_t bad = 0;
    int32_t top = 0;
    threads = (int)least(threads, 1 + R * C / GRAIN);
    if (r == R && c == C) {     /* one block: threads share it, four tiles at a time */
        const long n = R * C, tiles = (n + 4 * TILE - 1) / (4 * TILE);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 8) reduction(+ : bad) reduction(max : top)
        for (long t = 0; t < tiles; t++) {
            Seen seen = seen_in(x, kind, t * 4 * TILE, least(4 * TILE, n - t * 4 * TILE));
            bad += seen.nonfinite;
            top = seen.top > top ? seen.top : top;
        }
        out[0] = float_of(top);
    } else {
        const long across = C / c;
#pragma omp parallel for num_threads(threads) schedule(dynamic) reduction(+ : bad)
        for (long band = 0; band < R / r; band++) {
            float *row = out + band * across;
            for (long j = 0; j < across; j++) row[j] = 0;
            for (long i = band * r; i < (band + 1) * r; i++)    /* as the rows lie in memory */
                for (long j = 0; j < across; j++) {
                    Seen seen = seen_in(x, kind, i * C + j * c, c);
                    row[j] = float_of(seen.top > bits_of(row[j]) ? seen.top : bits_of(row[j]));
                    bad += seen.nonfinite;
                }
        }
    }
    *nonfinite = bad;
}

/* ---- one scale for each block of (r, c) ------------------------------------------------------ */

/* Divides, where a multiplication by the inverse would be faster: it would round twice. By 1 it does
 * not, and a division is the slowest instruction of the loop. */
static void qdq_span(const void *x, int kind, void *out, int out_kind, long at, long n, float scale,
                     float back, const Grid *g, const Noise *noise) {
    float in[TILE], tile[TILE];
    for (long done = 0, part; done < n; done += part, at += part) {
        part = least(n - done, TILE);
        const float *from = load(x, kind, at, part, in);
        float *to = target(out, out_kind, at, tile);
        if (scale == 1.0f) round_span(from, to, part, 1.0f, 0, back, g, noise, (uint64_t)at);
        else round_span(from, to, part, scale, 1, back, g, noise, (uint64_t)at);
        finish(to, out, out_kind, at, part, g);
    }
}

void lp_qdq(const void *x, int kind, void *out, int out_kind, long R, long C, long r, long c,
            const float *scales, int rescale, const Grid *g, const Noise *noise, int threads) {
    const long piece = least(c, 8 * TILE), pieces = (c + piece - 1) / piece, across = C / c;
    rescale = rescale && out_kind != 2;     /* a bit pattern is that of the value before */
    threads = (int)least(threads, 1 + R * C / GRAIN);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (long unit = 0; unit < R * across * pieces; unit++) {
        const long i = unit / (across * pieces), j = unit / pieces % across, start = unit % pieces * piece;
        const float scale = scales[i / r * across + j];
        qdq_span(x, kind, out, out_kind, i * C + j * c + start, least(piece, c - start), scale,
                 rescale ? scale : 1.0f, g, noise);
    }
}

/* ---- block formats: the scale is found and used while the block is in the cache -------------- */

/* A loop of a known length is unrolled whole; 32 is the length that hardware has. */
INLINE void round_block(const float *x, float *y, long size, float factor, float back, const Grid *g,
                        const Noise *noise, uint64_t at) {
    if (size == 32) round_span(x, y, 32, factor, 0, back, g, noise, at);
    else round_span(x, y, size, factor, 0, back, g, noise, at);
}

INLINE int32_t top_of_block(const float *x, long size) {
    return size == 32 ? top_of(x, 32) : top_of(x, size);
}

/* A scale's code is the exponent field of (amax / divisor), after `added` has rounded it up or not at
 * all, less the element's largest exponent. Multiplying by a power of two is exact, so here the inverse
 * serves; 254 - code is its code. */
void lp_mx(const void *x, int kind, void *out, int out_kind, long blocks, long size, uint8_t *scales,
           float divisor, int32_t added, int32_t emax, const Grid *g, const Noise *noise,
           int64_t *nonfinite, int threads) {
    const long many = least(TILE / size, blocks), tiles = (blocks + many - 1) / many;
    int64_t bad = 0;
    threads = (int)least(threads, 1 + blocks * size / GRAIN);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 8) reduction(+ : bad)
    for (long t = 0; t < tiles; t++) {
        float in[TILE], tile[TILE];
        const long first = t * many, here = least(many, blocks - first), at = first * size;
        const float *from = load(x, kind, at, here * size, in);
        float *to = target(out, out_kind, at, tile);
        for (long j = 0; j < here; j++) {
            int32_t top = top_of_block(from + j * size, size);
            int32_t code = ((bits_of(float_of(top) / divisor) + added) >> 23) - emax;
            code = code < 0 ? 0 : code > 254 ? 254 : code;
            bad += top >= NAN_BITS;
            const int is_nan = top > NAN_BITS;
            scales[first + j] = (uint8_t)(is_nan ? 255 : code);
            float back = is_nan ? NAN : out_kind == 2 ? 1.0f : power(code);
            round_block(from + j * size, to + j * size, size, power(254 - code), back, g, noise,
                        (uint64_t)(at + j * size));
        }
        finish(to, out, out_kind, at, here * size, g);
    }
    *nonfinite = bad;
}

/* ---- before the library is trusted ----------------------------------------------------------- */

/* A call of each, on -32 ... 31 as E4M3: how many results are not what they must be. The spacing is
 * 2 from 16 on, so the odd numbers there are rounded, eight on each side. */
int lp_check(void) {
    const Grid e4m3 = {3, -6, 7, 8, 0x7F, 1, -448.0f, 448.0f};
    const float one = 1.0f;
    float x[64], y[64], top = 0;
    uint8_t scales[2];
    int64_t bad[2] = {1, 1};
    int rounded_away = 0;
    for (int i = 0; i < 64; i++) x[i] = (float)(i - 32);
    lp_amax(x, 0, 1, 64, 1, 64, &top, &bad[0], 1);
    lp_qdq(x, 0, y, 0, 1, 64, 1, 64, &one, 1, &e4m3, NULL, 1);
    for (int i = 0; i < 64; i++) rounded_away += x[i] != y[i];
    lp_mx(x, 0, y, 0, 2, 32, scales, 1.0f, 0, 8, &e4m3, NULL, &bad[1], 1);
    return (top != 32.0f) + (rounded_away != 16) + (scales[0] != 124) + (scales[1] != 123)
        + (bad[0] != 0) + (bad[1] != 0);
}
