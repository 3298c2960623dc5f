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
typedef struct { uint64_t counter; uint32_t k0, k1; int32_t turned; } Noise;     /* turned: numbers run down columns */
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

/* y = round(x / by or x * by) * back, n elements, each with a `by` and a `back` of its own. */
INLINE void rounded(const float *restrict x, float *restrict y, long n, const float *restrict by, int divide,
                    const float *restrict back, const Grid *g, int noisy, uint32_t first, uint32_t step,
                    uint32_t k0, uint32_t k1) {
    const float lowest = g->lowest, largest = g->largest, zero = g->has_negative_zero ? -0.0f : 0.0f;
    const int32_t first_normal = (g->min_exponent + 127) << 23, m = g->mantissa_bits << 23;
    const int32_t up = (23 << 23) - m;
    for (long i = 0; i < n; i++) {
        float v = divide ? x[i] / by[i] : x[i] * by[i];
        v = v > largest ? largest : v;      /* in this order a NaN stays */
        v = v < lowest ? lowest : v;
        int32_t b = bits_of(v), a = b & 0x7FFFFFFF, e = a & 0x7F800000;
        e = e > first_normal ? e : first_normal;    /* below, the spacing no longer shrinks */
        float size = float_of(a), r;
        if (noisy) {    /* q: in spacings, 2^(e - m); up where a uniform number is below its fraction */
            float q = size * float_of((254 << 23) - (e - m)), down = (float)(int32_t)q;
            float u = ((float)(int32_t)random_bits(first + (uint32_t)i * step, k0, k1) + 0.5f) * 0x1p-24f;
            r = (down + (u < q - down ? 1.0f : 0.0f)) * float_of(e - m);
            r = a > NAN_BITS ? size : r;
        } else {
            /* The last bit of a float32 as large as `magic` is the grid's spacing here, so adding it
             * rounds to the grid, to nearest-even, and taking it away is exact. */
            float magic = float_of((int32_t)((uint32_t)e + (uint32_t)up));
            r = (size + magic) - magic;
        }
        /* -0 + -0 stays -0 and -0 + 0 is 0: integers have no negative zero. */
        y[i] = (float_of(bits_of(r) | (b & (int32_t)0x80000000)) + zero) * back[i];
    }
}

/* n elements that lie side by side, from x at `at` to out. `index` is the number of the first in the
 * stream of noise, `step` from there to the next. */
static void round_span(const void *x, int kind, void *out, int out_kind, long at, long n, const float *by,
                       int divide, const float *back, const Grid *g, const Noise *noise, uint64_t index, long step) {
    float in[TILE], tile[TILE];
    const float *from = load(x, kind, at, n, in);
    float *to = target(out, out_kind, at, tile);
    if (!noise && divide) rounded(from, to, n, by, 1, back, g, 0, 0, 0, 0, 0);
    else if (!noise) rounded(from, to, n, by, 0, back, g, 0, 0, 0, 0, 0);
    else
        /* The hash takes 32 bits, which vectors hold, and the index has 64. Its upper half goes into the
         * keys and must be constant in each part: a part ends where the lower half would wrap. */
        for (long done = 0, part; done < n; done += part, index += (uint64_t)part * (uint64_t)step) {
            uint64_t left = (0x100000000ull - (index & 0xFFFFFFFF) + (uint64_t)step - 1) / (uint64_t)step;
            uint32_t high = (uint32_t)(index >> 32), k0 = noise->k0 + high * 0x85EBCA6Bu, k1 = noise->k1 ^ high;
            part = (uint64_t)(n - done) < left ? n - done : (long)left;
            if (divide) rounded(from + done, to + done, part, by + done, 1, back + done, g, 1,
                                (uint32_t)index, (uint32_t)step, k0, k1);
            else rounded(from + done, to + done, part, by + done, 0, back + done, g, 1,
                         (uint32_t)index, (uint32_t)step, k0, k1);
        }
    finish(to, out, out_kind, at, n, g);
}

/* ---- blocks ---------------------------------------------------------------------------------- */

/* A matrix (R, C) of blocks (r, c). What blocks share is spread over their columns first, so that one
 * loop over a row serves blocks of any shape, columns of one block each (r, 1) too. */
typedef struct { long R, C, r, c; } Shape;

/* Blocks of one row each: all rows are one, as they lie. */
INLINE Shape as_it_lies(long R, long C, long r, long c) {
    return r == 1 ? (Shape){1, R * C, 1, c} : (Shape){R, C, r, c};
}

/* Columns j to j + n, each with what its block has. */
INLINE void spread(const float *restrict row, long j, long n, long c, float *restrict to) {
    if (c == 1) memcpy(to, row + j, (size_t)n * 4);
    else
        for (long k = 0, left = c - j % c, block = j / c; k < n; left = c, block++) {
            const float value = row[block];
            const long end = least(n, k + left);
            for (; k + 16 <= end; k += 16)      /* of a known length: a few stores */
                for (long i = 0; i < 16; i++) to[k + i] = value;
            for (; k < end; k++) to[k] = value;
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

/* The largest magnitudes of n columns over r rows, and from them those of their blocks, whole ones or
 * a part of one: what is in tops already stays if it is larger. */
static void tops_of(const void *x, int kind, long at, Shape s, long n, float *tops) {
    float in[TILE], most[TILE];
    const float *from = most;
    if (s.r == 1) from = load(x, kind, at, n, in);
    else {
        memset(most, 0, (size_t)n * 4);
        for (long i = 0; i < s.r; i++) {
            const float *row = load(x, kind, at + i * s.C, n, in);
            for (long k = 0; k < n; k++) {
                int32_t a = bits_of(row[k]) & 0x7FFFFFFF, m = bits_of(most[k]);
                most[k] = float_of(a > m ? a : m);
            }
        }
    }
    if (s.c == 1)
        for (long k = 0; k < n; k++) tops[k] = float_of(bits_of(from[k]) & 0x7FFFFFFF);
    else
        for (long k = 0, some; k < n; k += some, tops++) {
            some = least(n - k, s.c);
            int32_t a = some == 16 ? top_of(from + k, 16) : some == 32 ? top_of(from + k, 32)
                : top_of(from + k, some), before = bits_of(*tops);
            *tops = float_of(a > before ? a : before);
        }
}

/* Columns of whole blocks that are taken at once: as many as a tile has, or a block, or so few that
 * their rows stay in the cache or that every thread has some. */
INLINE long columns_at_once(Shape s, int threads) {
    const long few = s.R > s.r * threads ? 4 * GRAIN / s.r : s.C / threads;
    const long many = least(s.C, least(TILE, few > 16 ? few : 16)) / s.c * s.c;
    return many ? many : s.c;
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
        const Shape s = as_it_lies(R, C, r, c);
        const long many = columns_at_once(s, threads), across = (s.C + many - 1) / many;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1 + GRAIN / (s.r * many)) reduction(+ : bad)
        for (long unit = 0; unit < s.R / s.r * across; unit++) {
            const long band = unit / across, start = unit % across * many, end = least(start + many, s.C);
            float *tops = out + band * (s.C / s.c) + start / s.c;
            memset(tops, 0, (size_t)((end - start) / s.c) * 4);
            for (long j = start; j < end; j += TILE)
                tops_of(x, kind, band * s.r * s.C + j, s, least(TILE, end - j), tops);
            for (long k = 0; k < (end - start) / s.c; k++)
                if (bits_of(tops[k]) >= NAN_BITS)
                    for (long i = band * s.r; i < (band + 1) * s.r; i++)
                        bad += seen_in(x, kind, i * s.C + start + k * s.c, s.c).nonfinite;
        }
    }
    *nonfinite = bad;
}

/* ---- one scale for each block of (r, c) ------------------------------------------------------ */

/* Divides, where a multiplication by the inverse would be faster: it would round twice. By a power of
 * two it does not, and a division is the slowest instruction of the loop. Under a scale of 0, to which
 * one of a second level may round, everything is 0. */
INLINE int divisors(float *by, long n) {
    int32_t not_powers = 0;
    for (long i = 0; i < n; i++) {
        int32_t b = bits_of(by[i]), e = b >> 23;
        not_powers |= (b & 0x7FFFFF) | (e < 1) | (e > 253);
    }
    for (long i = 0; i < n; i++) {
        int32_t b = bits_of(by[i]);
        by[i] = float_of(not_powers ? (b == 0 ? NAN_BITS : b) : (254 << 23) - b);
    }
    return not_powers != 0;
}

/* `back` is by what a rounded value is multiplied: a matrix like `scales`, or NULL for 1. */
void lp_qdq(const void *x, int kind, void *out, int out_kind, long R, long C, long r, long c, const float *scales,
            const float *back, const Grid *g, const Noise *noise, int threads) {
    const long down = noise && noise->turned ? 1 : C, over = noise && noise->turned ? R : 1;
    const Shape s = noise && noise->turned ? (Shape){R, C, r, c} : as_it_lies(R, C, r, c);
    const long wide = least(s.C, GRAIN), high = GRAIN / wide, across = (s.C + wide - 1) / wide;
    threads = (int)least(threads, 1 + R * C / GRAIN);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (long unit = 0; unit < (s.R + high - 1) / high * across; unit++) {
        const long top = unit / across * high, bottom = least(top + high, s.R);
        const long start = unit % across * wide, end = least(start + wide, s.C);
        float by[TILE], behind[TILE];
        for (long j = start, n; j < end; j += n) {
            int divide = 0;
            n = least(TILE, end - j);
            if (!back || out_kind == 2)     /* a bit pattern is that of the value before */
                for (long k = 0; k < n; k++) behind[k] = 1.0f;
            for (long i = top; i < bottom; i++) {
                if (i == top || i % s.r == 0) {
                    const long row = i / s.r * (s.C / s.c);
                    if (back && out_kind != 2) spread(back + row, j, n, s.c, behind);
                    spread(scales + row, j, n, s.c, by);
                    divide = divisors(by, n);
                }
                round_span(x, kind, out, out_kind, i * s.C + j, n, by, divide, behind, g, noise,
                           noise ? noise->counter + (uint64_t)(i * down + j * over) : 0, over);
            }
        }
    }
}

/* ---- block formats: the scale is found and used while the block is in the cache -------------- */

/* A scale's code is the exponent field of the amax, after `added` has rounded it up or not at all,
 * minus the element's largest exponent. Multiplying by a power of two is exact, so here the inverse
 * serves; 254 - code is its code. */
void lp_mx(const void *x, int kind, void *out, int out_kind, long R, long C, long r, long c, uint8_t *scales,
           int32_t added, int32_t emax, const Grid *g, const Noise *noise, int64_t *nonfinite, int threads) {
    const long down = noise && noise->turned ? 1 : C, over = noise && noise->turned ? R : 1;
    const Shape s = noise && noise->turned ? (Shape){R, C, r, c} : as_it_lies(R, C, r, c);
    const long many = columns_at_once(s, 1), across = (s.C + many - 1) / many;
    int64_t bad = 0;
    threads = (int)least(threads, 1 + R * C / GRAIN);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1 + GRAIN / (s.r * many)) reduction(+ : bad)
    for (long unit = 0; unit < s.R / s.r * across; unit++) {
        const long first = unit / across * s.r, j = unit % across * many, n = least(many, s.C - j);
        const long at = first / s.r * (s.C / s.c) + j / s.c, blocks = n / s.c;
        float tops[TILE], factors[TILE], backs[TILE], by[TILE], behind[TILE];
        int32_t not_finite = 0;
        memset(tops, 0, (size_t)blocks * 4);
        tops_of(x, kind, first * s.C + j, s, n, tops);
        for (long k = 0; k < blocks; k++) {
            const int32_t top = bits_of(tops[k]), is_nan = top >= NAN_BITS;
            int32_t code = (int32_t)(((uint32_t)top + (uint32_t)added) >> 23) - emax;
            code = code < 0 ? 0 : code > 254 ? 254 : code;
            not_finite += is_nan;
            scales[at + k] = (uint8_t)(is_nan ? 255 : code);
            backs[k] = is_nan ? NAN : out_kind == 2 ? 1.0f : power(code);
            factors[k] = is_nan ? NAN : power(254 - code);
        }
        bad += not_finite;
        spread(factors, 0, n, s.c, by);
        spread(backs, 0, n, s.c, behind);
        for (long i = first; i < first + s.r; i++)
            round_span(x, kind, out, out_kind, i * s.C + j, n, by, 0, behind, g, noise,
                       noise ? noise->counter + (uint64_t)(i * down + j * over) : 0, over);
    }
    *nonfinite = bad;
}

/* ---- the Hadamard transform ------------------------------------------------------------------ */

/* Sixteen elements times the matrix of cast.py, by sums and differences of pairs: of the columns of 16
 * rows where it runs down, else of the rows themselves. */
void lp_hadamard(const void *x, int kind, float *out, long R, long C, int down, const float *signs, int threads) {
    const long apart = down ? 1 : 16, groups = down ? R / 16 : (R * C / 16 + 127) / 128;
    threads = (int)least(threads, 1 + R * C / GRAIN);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 8)
    for (long group = 0; group < groups; group++) {
        const long first = group * (down ? 16 * C : TILE), all = down ? C : least(128, R * C / 16 - group * 128);
        float in[TILE], y[16][128];
        for (long j = 0, n; j < all; j += n) {
            n = least(128, all - j);
            if (!down) {
                const float *from = load(x, kind, first, n * 16, in);
                for (long k = 0; k < 16; k++)
                    for (long i = 0; i < n; i++) y[k][i] = from[i * 16 + k] * signs[k];
            } else
                for (long k = 0; k < 16; k++) {
                    const float *from = load(x, kind, first + k * C + j, n, in);
                    for (long i = 0; i < n; i++) y[k][i] = from[i] * signs[k];
                }
            for (long half = 1; half < 16; half *= 2)
                for (long k = 0; k < 16; k++) {
                    float *a = y[k], *b = y[k ^ half];
                    if (a < b)
                        for (long i = 0; i < n; i++) {
                            float sum = a[i] + b[i];
                            b[i] = a[i] - b[i];
                            a[i] = sum;
                        }
                }
            for (long k = 0; k < 16; k++)
                for (long i = 0; i < n; i++) out[first + k * (down ? C : 1) + (j + i) * apart] = y[k][i];
        }
    }
}

/* ---- before the library is trusted ----------------------------------------------------------- */

/* A call of each, on -32 ... 31 as E4M3: how many results are not what they must be. The spacing is
 * 2 from 16 on, so the odd numbers there are rounded, eight on each side. */
int lp_check(void) {
    const Grid e4m3 = {3, -6, 7, 8, 0x7F, 1, -448.0f, 448.0f};
    const float scale[2] = {1.0f, 3.0f}, signs[16] = {1.0f, 2.0f};
    float x[64], y[64], top = 0;
    uint8_t scales[2];
    int64_t bad[2] = {1, 1};
    int wrong = 0, rounded_away = 0;
    for (int i = 0; i < 64; i++) x[i] = (float)(i - 32);
    lp_amax(x, 0, 1, 64, 1, 64, &top, &bad[0], 1);
    lp_qdq(x, 0, y, 0, 1, 64, 1, 64, scale, scale, &e4m3, NULL, 1);
    for (int i = 0; i < 64; i++) rounded_away += x[i] != y[i];
    lp_qdq(x, 0, y, 0, 2, 32, 2, 16, scale, NULL, &e4m3, NULL, 1);      /* -13 / 3 is -4.33 */
    wrong += (y[3] != -28.0f) + (y[19] != -4.5f);
    lp_mx(x, 0, y, 0, 2, 32, 1, 32, scales, 0, 8, &e4m3, NULL, &bad[1], 1);
    wrong += (scales[0] != 124) + (scales[1] != 123);
    lp_hadamard(x, 0, y, 1, 64, 0, signs, 1);       /* the first of 16, and twice the second */
    wrong += (y[0] != -94.0f) + (y[1] != 30.0f) + (y[63] != -18.0f);
    return wrong + (top != 32.0f) + (rounded_away != 16) + (bad[0] != 0) + (bad[1] != 0);
}
