/* Casts to low-precision formats and back. cast.py defines what each function computes (`reference`), and
 * the tests compare the results bit for bit. The grid of a format is the set of its values.
 *
 * Two things make this code fast:
 * - The inner loops have no branch and no call, so the compiler turns them into vector instructions. An
 *   option (`divide`, `noisy`) is an argument that is constant wherever the function is inlined.
 * - A tensor is read once, one tile at a time, and all passes over a tile run in the first-level cache.
 *
 * The code splits floats as integers: sign (1 bit), exponent (8), mantissa (23). Without the sign bit,
 * larger integers are larger magnitudes, and NaN is larger than infinity.
 *
 * Arguments of the functions:
 *   x, out          input and output tensors, contiguous (cast.py checks this, and all sizes)
 *   kind, out_kind  their dtypes: 0 float32, 1 bf16, 2 bit patterns of the format (uint8)
 *   R, C, r, c      x is a matrix (R, C), whose blocks are (r, c)
 *   at              index of the first element to process; n: the number of elements
 *   threads         the largest number of threads that the function may use
 * The sign of zero is kept, and NaN stays NaN. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define TILE 2048L              /* elements; 8 KiB of float32 */
#define GRAIN 32768L            /* one more thread is used for each GRAIN elements, as in PyTorch */
#define NAN_BITS 0x7F800000     /* the bits of infinity; larger magnitudes are NaN */

typedef struct {
    int32_t mantissa_bits, min_exponent, bias, bits, nan, has_negative_zero;
    float lowest, largest;
} Grid;
/* The stream of random numbers. turned: elements are numbered down the columns of x, not along its rows. */
typedef struct { uint64_t counter; uint32_t k0, k1; int32_t turned; } Noise;
typedef struct { int64_t nonfinite; int32_t top; } Seen;       /* top: bits of the largest magnitude */

INLINE int32_t bits_of(float x) { int32_t b; memcpy(&b, &x, 4); return b; }
INLINE float float_of(int32_t b) { float x; memcpy(&x, &b, 4); return x; }
INLINE long least(long a, long b) { return a < b ? a : b; }

/* Return 2^(code - 127) for code >= 0. The code is the exponent field of the float32, except that 2^-127
 * (code 0) is a subnormal number. */
INLINE float power(int32_t code) { return float_of(code > 0 ? code << 23 : 1 << 22); }

/* ---- loading and storing a tile -------------------------------------------------------------- */

/* Return n elements as float32. bf16 is the upper half of a float32, and is converted into `tile`. float32
 * needs no copy: the result points into the tensor. */
INLINE const float *load(const void *x, int kind, long at, long n, float *tile) {
    if (kind == 0) return (const float *)x + at;
    const uint16_t *from = (const uint16_t *)x + at;
    for (long i = 0; i < n; i++) tile[i] = float_of((int32_t)((uint32_t)from[i] << 16));
    return tile;
}

/* Round to nearest-even: add just less than half of the last bit that stays, plus that bit. For a NaN the
 * addition could carry and give infinity or zero. So a NaN is truncated, and 0x40 sets a mantissa bit, so
 * that it stays a NaN. */
static void store_bf16(const float *restrict y, uint16_t *restrict out, long n) {
    for (long i = 0; i < n; i++) {
        uint32_t b = (uint32_t)bits_of(y[i]), even = (b + 0x7FFF + ((b >> 16) & 1)) >> 16;
        out[i] = (uint16_t)((b & 0x7FFFFFFF) > NAN_BITS ? (b >> 16) | 0x40 : even);
    }
}

/* Store the codes of y, whose elements are on the grid. The code of a normal number is its float32 bits
 * without the mantissa bits that the format lacks, and with the exponent bias of the format. The code of a
 * subnormal number is its multiple of the smallest spacing, y * scale. Integer formats have only
 * subnormals, and their codes are stored in two's complement. */
static void store_codes(const float *restrict y, uint8_t *restrict out, long n, const Grid *g) {
    const int32_t m = g->mantissa_bits, drop = 23 - m, offset = (127 - g->bias) << m;
    const int32_t sign_at = g->bits - 1, all = (int32_t)(1u << g->bits) - 1, nan = g->nan;
    const int32_t first_normal = (g->min_exponent + 127) << 23, twos = m == sign_at;
    const float scale = ldexpf(1.0f, m - g->min_exponent);
    for (long i = 0; i < n; i++) {
        int32_t b = bits_of(y[i]), a = b & 0x7FFFFFFF, negative = (int32_t)((uint32_t)b >> 31);
        /* Compute both codes and select one, without a branch. A large `a` is replaced by 0 first, because
         * its multiple of the spacing would overflow an int. */
        int32_t small = (int32_t)(float_of(a < first_normal ? a : 0) * scale);
        int32_t code = a < first_normal ? small : (a >> drop) - offset;
        code = a > NAN_BITS ? nan : code;
        int32_t floats = code | (negative << sign_at), integers = (negative ? -code : code) & all;
        out[i] = (uint8_t)(twos ? integers : floats);
    }
}

/* Return where to write rounded values: the output itself if it is float32, otherwise `tile`, from which
 * `finish` converts them to the output. */
INLINE float *target(void *out, int kind, long at, float *tile) {
    return kind == 0 ? (float *)out + at : tile;
}

INLINE void finish(const float *tile, void *out, int kind, long at, long n, const Grid *g) {
    if (kind == 1) store_bf16(tile, (uint16_t *)out + at, n);
    if (kind == 2) store_codes(tile, (uint8_t *)out + at, n, g);
}

/* ---- rounding -------------------------------------------------------------------------------- */

/* Return 24 random bits: a hash of the element's number i, after Wang and Wellons. A generator with a state
 * would fix the order of elements. With a hash, any number of threads can round in any order. */
INLINE uint32_t random_bits(uint32_t i, uint32_t k0, uint32_t k1) {
    uint32_t h = i * 0x9E3779B1u + k0;
    h = (h ^ (h >> 16)) * 0x7FEB352Du;
    h = (h ^ (h >> 15)) * 0x846CA68Bu;
    h = ((h ^ (h >> 16)) + k1) * 0x7FEB352Du;
    return (h ^ (h >> 15)) >> 8;
}

/* y[i] = round(x[i] / by[i]) * back[i] if `divide`, otherwise round(x[i] * by[i]) * back[i], for n elements.
 * noisy: round stochastically; element i then has the number first + i * step in the stream (k0, k1). */
INLINE void rounded(const float *restrict x, float *restrict y, long n, const float *restrict by, int divide,
                    const float *restrict back, const Grid *g, int noisy, uint32_t first, uint32_t step,
                    uint32_t k0, uint32_t k1) {
    const float lowest = g->lowest, largest = g->largest, zero = g->has_negative_zero ? -0.0f : 0.0f;
    const int32_t first_normal = (g->min_exponent + 127) << 23, m = g->mantissa_bits << 23;
    const int32_t up = (23 << 23) - m;
    for (long i = 0; i < n; i++) {
        float v = divide ? x[i] / by[i] : x[i] * by[i];
        v = v > largest ? largest : v;      /* a comparison with NaN is false, so a NaN stays */
        v = v < lowest ? lowest : v;
        int32_t b = bits_of(v), a = b & 0x7FFFFFFF, e = a & 0x7F800000;
        e = e > first_normal ? e : first_normal;    /* subnormals all have the same spacing */
        float size = float_of(a), r;
        if (noisy) {    /* q: size in units of the spacing. Round up if a random number is below its fraction. */
            float q = size * float_of((254 << 23) - (e - m)), down = (float)(int32_t)q;
            float u = ((float)(int32_t)random_bits(first + (uint32_t)i * step, k0, k1) + 0.5f) * 0x1p-24f;
            r = (down + (u < q - down ? 1.0f : 0.0f)) * float_of(e - m);
            r = a > NAN_BITS ? size : r;
        } else {
            /* The last bit of a float32 as large as `magic` equals the spacing of the grid at `size`. So
             * adding `magic` rounds to the grid, to nearest-even, and subtracting it is exact. */
            float magic = float_of((int32_t)((uint32_t)e + (uint32_t)up));
            r = (size + magic) - magic;
        }
        /* Adding zero turns -0 into 0 for integer formats (zero is 0), and keeps -0 for others (zero is -0). */
        y[i] = (float_of(bits_of(r) | (b & (int32_t)0x80000000)) + zero) * back[i];
    }
}

/* Round n adjacent elements of x, from index `at` on, and store them in `out` at the same index. `index` is
 * the number of the first element in the stream of random numbers, and `step` the distance to the next. */
static void round_span(const void *x, int kind, void *out, int out_kind, long at, long n, const float *by,
                       int divide, const float *back, const Grid *g, const Noise *noise, uint64_t index, long step) {
    float in[TILE], tile[TILE];
    const float *from = load(x, kind, at, n, in);
    float *to = target(out, out_kind, at, tile);
    if (!noise && divide) rounded(from, to, n, by, 1, back, g, 0, 0, 0, 0, 0);
    else if (!noise) rounded(from, to, n, by, 0, back, g, 0, 0, 0, 0, 0);
    else
        /* The hash takes a 32-bit number, because vector instructions are fast for 32 bits, but an index has
         * 64 bits. The upper half of the index changes the keys, so it must be constant within a part: a part
         * ends where the lower half would overflow. */
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

/* A matrix (R, C) of blocks (r, c). The scales of blocks are first repeated over their columns (`spread`).
 * Then one loop over a row works for blocks of any shape, also for blocks of one column (r, 1). */
typedef struct { long R, C, r, c; } Shape;

/* Return the shape to process. If each block is in one row, the rows are joined into one long row. */
INLINE Shape as_it_lies(long R, long C, long r, long c) {
    return r == 1 ? (Shape){1, R * C, 1, c} : (Shape){R, C, r, c};
}

/* Fill to[0 .. n) with the numbers of the blocks of columns j to j + n. `row` has one number for each block
 * of c columns. */
INLINE void spread(const float *restrict row, long j, long n, long c, float *restrict to) {
    if (c == 1) memcpy(to, row + j, (size_t)n * 4);
    else
        for (long k = 0, left = c - j % c, block = j / c; k < n; left = c, block++) {
            const float value = row[block];
            const long end = least(n, k + left);
            for (; k + 16 <= end; k += 16)      /* a known length becomes a few vector stores */
                for (long i = 0; i < 16; i++) to[k + i] = value;
            for (; k < end; k++) to[k] = value;
        }
}

/* ---- largest magnitudes ---------------------------------------------------------------------- */

/* Return the bits of the largest magnitude. The maximum is of integers, because vector instructions have no
 * maximum of floats that keeps NaN. */
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
        if (top >= NAN_BITS)    /* count infinities and NaNs only if the tile has any, which is rare */
            for (long i = 0; i < part; i++) bad += (bits_of(from[i]) & 0x7FFFFFFF) >= NAN_BITS;
        seen.top = top > seen.top ? top : seen.top;
        seen.nonfinite += bad;
    }
    return seen;
}

/* Compute the largest magnitude of n columns over r rows, and from these the largest magnitudes of blocks,
 * `tops`. If the columns are only a part of a block, its number in `tops` is kept if it is larger. */
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

/* Return how many columns, of whole blocks, are processed together: at most a tile, but few enough that
 * their rows stay in the cache and that every thread gets some; and at least one block. */
INLINE long columns_at_once(Shape s, int threads) {
    const long few = s.R > s.r * threads ? 4 * GRAIN / s.r : s.C / threads;
    const long many = least(s.C, least(TILE, few > 16 ? few : 16)) / s.c * s.c;
    return many ? many : s.c;
}

void lp_amax(const void *x, int kind, long R, long C, long r, long c, float *out, int64_t *nonfinite, int threads) {
    int64_t bad = 0;
    int32_t top = 0;
    threads = (int)least(threads, 1 + R * C / GRAIN);
    if (r == R && c == C) {     /* one block: the threads divide it, in units of four tiles */
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

/* ---- qdq: one scale for each block (r, c) ---------------------------------------------------- */

/* Prepare the scales `by` of n elements, and return whether `rounded` must divide by them. A multiplication
 * by the inverse is faster than a division, the slowest instruction of the loop, but it rounds twice unless
 * the scale is a power of two. So if all scales are powers of two, replace them by their inverses and
 * return 0. Otherwise replace scales of 0 by infinity, so that their elements become 0, and return 1. (An
 * E4M3 scale of a two-level recipe may have rounded to 0.) */
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

/* Store round(x / scale) * back. scales: (R / r, C / c); back: the factors after rounding, of the same
 * shape, or NULL for 1. */
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
            if (!back || out_kind == 2)     /* bit patterns are of the rounded value, before `back` */
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

/* ---- mx: the scale of a block is computed and used while the block is in the cache ----------- */

/* Cast blocks under scales that are powers of two, and store their E8M0 codes in `scales` (R / r, C / c).
 * The code of a scale is the exponent field of (amax bits + added), minus emax, the exponent of the format's
 * largest value. `added` rounds the exponent up, according to the rule. Multiplying by a power of two is
 * exact, so elements are multiplied by the inverse scale, whose code is 254 - code. *nonfinite: the number
 * of blocks that have an infinity or a NaN. */
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

/* Multiply every 16 elements by the Hadamard matrix of cast.py, by sums and differences of pairs. down: the
 * 16 elements are in one column of 16 rows; otherwise they are adjacent in a row. */
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

/* ---- the check that compile_c runs before it uses a new library ------------------------------ */

/* Call each function on the numbers -32 ... 31 in E4M3, and return how many results are wrong. From 16 to
 * 32 the spacing of E4M3 is 2, so the odd numbers are rounded: 8 positive and 8 negative numbers. */
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
    lp_qdq(x, 0, y, 0, 2, 32, 2, 16, scale, NULL, &e4m3, NULL, 1);      /* y[19]: -13 / 3 = -4.33 */
    wrong += (y[3] != -28.0f) + (y[19] != -4.5f);
    lp_mx(x, 0, y, 0, 2, 32, 1, 32, scales, 0, 8, &e4m3, NULL, &bad[1], 1);
    wrong += (scales[0] != 124) + (scales[1] != 123);
    lp_hadamard(x, 0, y, 1, 64, 0, signs, 1);       /* y[0]: x[0] + 2 x[1]; other signs are 0 */
    wrong += (y[0] != -94.0f) + (y[1] != 30.0f) + (y[63] != -18.0f);
    return wrong + (top != 32.0f) + (rounded_away != 16) + (bad[0] != 0) + (bad[1] != 0);
}
