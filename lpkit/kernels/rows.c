/* Operations on rows of numbers between the matmuls of a training step: GELU, the softmax of attention,
 * cross-entropy. rows.py and cross_entropy.py define what each function computes.
 *
 * Each function makes one pass over memory and computes in float32. bf16 numbers are uint16_t, the upper
 * half of a float32. Tensors must be contiguous: the Python caller checks this, and all sizes. NaN stays
 * NaN. `threads` is the largest number of threads that a function may use. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define TILE 1024L              /* numbers of a row that are processed together */
#define GRAIN 32768L            /* one more thread is used for each GRAIN elements, as in PyTorch */
#define IGNORED -100            /* lpkit.contracts.IGNORED: a target that does not count */
#define MAGIC 12582912.0f       /* 1.5 * 2^23: adding it to a number rounds the number to an integer */

INLINE int32_t bits_of(float x) { int32_t b; memcpy(&b, &x, 4); return b; }
INLINE float float_of(int32_t b) { float x; memcpy(&x, &b, 4); return x; }
INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE int share(int threads, long n) { return (int)least(threads, 1 + n / GRAIN); }

/* a b + c, by a fused multiply-add (one rounding) if the processor has one. Otherwise it rounds twice,
 * which is within the tolerance of the tests. */
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define MADD(a, b, c) __builtin_fmaf(a, b, c)
#else
#define MADD(a, b, c) ((a) * (b) + (c))
#endif

INLINE float wide(uint16_t x) { return float_of((int32_t)((uint32_t)x << 16)); }

/* float32 to bf16, rounded to nearest-even. A NaN here comes from bf16 numbers or from arithmetic, so its
 * low bits are 0, and the addition cannot carry into its exponent. */
INLINE uint16_t narrow(float x) {
    uint32_t b = (uint32_t)bits_of(x);
    return (uint16_t)((b + 0x7FFF + ((b >> 16) & 1)) >> 16);
}

/* Return e^x with an error of up to 2 ulp (Moshier, Cephes): x = n ln 2 + r, so e^x = 2^n e^r. e^r is a
 * polynomial, and n is added to the exponent of the float. The result is 0 below -87.6 and infinity above
 * 88.3. The compiler turns each line into vector instructions, which it cannot do with a call of expf. */
INLINE float exp_of(float x) {
    float z = x < -88.0f ? -88.0f : x;
    z = z > 89.0f ? 89.0f : z;
    float t = MADD(z, 1.44269504088896341f, MAGIC), n = t - MAGIC;
    float r = MADD(n, 2.12194440e-4f, MADD(n, -0.693359375f, z));
    float p = MADD(1.9875691500e-4f, r, 1.3981999507e-3f);
    p = MADD(p, r, 8.3334519073e-3f);
    p = MADD(p, r, 4.1665795894e-2f);
    p = MADD(p, r, 1.6666665459e-1f);
    p = MADD(p, r, 5.0000001201e-1f);
    p = MADD(p, r * r, r) + 1.0f;
    return p * float_of((int32_t)((uint32_t)(bits_of(t) - bits_of(MAGIC) + 127) << 23));
}

/* ---- GELU, tanh approximation: x / (1 + e^(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3) ---------- */

#define TWO_K 1.5957691216057308f       /* 2 sqrt(2 / pi) */
#define CUBE 0.044715f

/* By default, gcc uses only half of the width of AVX-512 registers, which is slower for these loops. */
#if defined(__AVX512F__) && !defined(__clang__)
#define WIDEST __attribute__((target("prefer-vector-width=512")))
#else
#define WIDEST
#endif

WIDEST
void lp_gelu(const uint16_t *restrict x, uint16_t *restrict y, long n, int threads) {
    threads = share(threads, n);
#pragma omp parallel for simd num_threads(threads)
    for (long i = 0; i < n; i++) {
        float v = wide(x[i]);
        y[i] = narrow(v / (1.0f + exp_of(v * MADD(v * v, -TWO_K * CUBE, -TWO_K))));
    }
}

WIDEST
void lp_gelu_backward(const uint16_t *restrict dy, const uint16_t *restrict x, uint16_t *restrict dx, long n,
                      int threads) {
    threads = share(threads, n);
#pragma omp parallel for simd num_threads(threads)
    for (long i = 0; i < n; i++) {
        float v = wide(x[i]), s = 1.0f / (1.0f + exp_of(v * MADD(v * v, -TWO_K * CUBE, -TWO_K)));
        float inner = v * MADD(v * v, 3.0f * TWO_K * CUBE, TWO_K);
        dx[i] = narrow(wide(dy[i]) * MADD(inner, s * (1.0f - s), s));
    }
}

/* ---- attention weights from scores, in place ---------------------------------------------------------- */

#define NO_SCORE (-INFINITY)

typedef struct { long low, high; int holes; } Seen;

/* Return which columns of one row are seen. All columns before `low` and from `high` on are hidden. With
 * `holes`, some columns between them are hidden, too. `seen` is the mask of the columns from `free` on; the
 * columns before `free` are seen. If `seen` is NULL, all columns are seen. */
INLINE Seen seen_of(const uint8_t *seen, long columns, long free) {
    Seen s = {0, columns, 0};
    if (!seen) return s;
    while (s.high > free && !seen[s.high - 1 - free]) s.high--;
    while (!free && s.low < s.high && !seen[s.low]) s.low++;
    const long from = free ? free : s.low;
    s.holes = s.high > from && memchr(seen + from - free, 0, (size_t)(s.high - from)) != NULL;
    return s;
}

/* score_of returns the scaled score of a product x, capped by cap * tanh(score / cap) unless cap is 0. The
 * derivative of the capped score by the score is 1 - tanh^2. */
INLINE float tanh_of(float x) { return 1.0f - 2.0f / (1.0f + exp_of(2.0f * x)); }
INLINE float score_of(float x, float scale, float cap) {
    if (cap == 0) return x * scale;
    return x == NO_SCORE ? NO_SCORE : cap * tanh_of(x * scale / cap);
}

#define HIDE(row, hidden)                                                                                 \
    for (long j = free > s.low ? free : s.low; s.holes && j < s.high; j++)                                \
        row[j] = seen[j - free] ? row[j] : hidden;
#define ZERO(row)                                                                                         \
    memset(row, 0, (size_t)s.low * sizeof *row);                                                          \
    memset(row + s.high, 0, (size_t)(columns - s.high) * sizeof *row);

/* ATTENTION defines two functions for one dtype (TYPE; WIDE converts to float32, NARROW converts back).
 *
 * NAME overwrites the scores x (N, rows, columns) by attention weights. BACKWARD overwrites x by weights,
 * and the gradients d of the weights by the gradients of the products.
 *   seen   mask (rows, columns - free), the same for all N; NULL: all columns are seen
 *   sinks  N scores without a column, or NULL
 *   sums   (N, rows), log-sums of exponentials
 *   dots   (N, rows), sums of weight * gradient, from which the caller computes the gradient of a sink
 * The sum of a row adds the exponentials in float32, before they are rounded to TYPE. If a score is NaN,
 * the sum is NaN, and so are all weights of the row. The weights of a row that sees no column are 0. */
#define ATTENTION(NAME, BACKWARD, TYPE, WIDE, NARROW)                                                     \
    INLINE float NAME##_row(TYPE *restrict row, long columns, const uint8_t *seen, long free,             \
                            float scale, float cap, float sink) {                                         \
        const Seen s = seen_of(seen, columns, free);                                                      \
        const long n = s.high - s.low;                                                                    \
        TYPE *restrict x = row + s.low;                                                                   \
        float tile[TILE], top = NO_SCORE, sum = 0;                                                        \
        HIDE(row, NARROW(NO_SCORE))                                                                       \
        _Pragma("omp simd reduction(max : top)")                                                          \
        for (long j = 0; j < n; j++) top = WIDE(x[j]) > top ? WIDE(x[j]) : top;                           \
        top = score_of(top, scale, cap);                                                                  \
        top = sink > top ? sink : top;                                                                    \
        if (n <= TILE) {                                                                                  \
            _Pragma("omp simd reduction(+ : sum)")                                                        \
            for (long j = 0; j < n; j++) {                                                                \
                tile[j] = exp_of(score_of(WIDE(x[j]), scale, cap) - top);                                 \
                sum += tile[j];                                                                           \
            }                                                                                             \
        } else {                                                                                          \
            _Pragma("omp simd reduction(+ : sum)")                                                        \
            for (long j = 0; j < n; j++) sum += exp_of(score_of(WIDE(x[j]), scale, cap) - top);           \
        }                                                                                                 \
        sum += sink == NO_SCORE ? 0 : exp_of(sink - top);                                                 \
        const float part = 1.0f / sum;                                                                    \
        if (n <= TILE)                                                                                    \
            for (long j = 0; j < n; j++) x[j] = NARROW(tile[j] * part);                                   \
        else                                                                                              \
            for (long j = 0; j < n; j++) x[j] = NARROW(exp_of(score_of(WIDE(x[j]), scale,                 \
                cap) - top) * part);                                                                      \
        ZERO(row)                                                                                         \
        return n ? top + logf(sum) : sink;                                                                \
    }                                                                                                     \
                                                                                                          \
    /* x: scores, overwritten by weights. d: gradients of weights, overwritten by gradients of products */\
    INLINE float BACKWARD##_row(TYPE *restrict row, TYPE *restrict grad, long columns,                    \
                                const uint8_t *seen, long free, float scale, float cap, float total) {    \
        const Seen s = seen_of(seen, columns, free);                                                      \
        const long n = s.high - s.low;                                                                    \
        TYPE *restrict x = row + s.low, *restrict d = grad + s.low;                                       \
        float dot = 0;                                                                                    \
        HIDE(row, NARROW(NO_SCORE))                                                                       \
        if (cap == 0) {                                                                                   \
            _Pragma("omp simd reduction(+ : dot)")                                                        \
            for (long j = 0; j < n; j++) {                                                                \
                x[j] = NARROW(exp_of(WIDE(x[j]) * scale - total));                                        \
                dot += WIDE(d[j]) * WIDE(x[j]);                                                           \
            }                                                                                             \
            for (long j = 0; j < n; j++) d[j] = NARROW((WIDE(d[j]) - dot) * WIDE(x[j]) * scale);          \
        } else {                                                                                          \
            _Pragma("omp simd reduction(+ : dot)")                                                        \
            for (long j = 0; j < n; j++) dot += WIDE(d[j]) * exp_of(score_of(WIDE(x[j]), scale,           \
                cap) - total);                                                                            \
            for (long j = 0; j < n; j++) {                                                                \
                const float t = tanh_of(WIDE(x[j]) * scale / cap);                                        \
                const float p = exp_of(score_of(WIDE(x[j]), scale, cap) - total);                         \
                d[j] = NARROW((WIDE(d[j]) - dot) * p * scale * (1.0f - t * t));                           \
                x[j] = NARROW(p);                                                                         \
            }                                                                                             \
        }                                                                                                 \
        ZERO(row)                                                                                         \
        ZERO(grad)                                                                                        \
        return dot;                                                                                       \
    }                                                                                                     \
                                                                                                          \
    void NAME(TYPE *restrict x, const uint8_t *seen, const float *sinks, float *restrict sums, long N,    \
              long rows, long columns, long free, float scale, float cap, int threads) {                  \
        threads = share(threads, N * rows * columns);                                                     \
        _Pragma("omp parallel for num_threads(threads)")                                                  \
        for (long i = 0; i < N * rows; i++) {                                                             \
            const uint8_t *mask = seen ? seen + i % rows * (columns - free) : NULL;                       \
            const float sink = sinks ? sinks[i / rows] : NO_SCORE;                                        \
            TYPE *row = x + i * columns;                                                                  \
            sums[i] = cap == 0 ? NAME##_row(row, columns, mask, free, scale, 0, sink)                     \
                               : NAME##_row(row, columns, mask, free, scale, cap, sink);                  \
        }                                                                                                 \
    }                                                                                                     \
                                                                                                          \
    void BACKWARD(TYPE *restrict x, TYPE *restrict d, const uint8_t *seen, const float *restrict sums,    \
                  float *restrict dots, long N, long rows, long columns, long free, float scale,          \
                  float cap, int threads) {                                                               \
        threads = share(threads, N * rows * columns);                                                     \
        _Pragma("omp parallel for num_threads(threads)")                                                  \
        for (long i = 0; i < N * rows; i++) {                                                             \
            const uint8_t *mask = seen ? seen + i % rows * (columns - free) : NULL;                       \
            TYPE *row = x + i * columns, *grad = d + i * columns;                                         \
            dots[i] = cap == 0 ? BACKWARD##_row(row, grad, columns, mask, free, scale, 0, sums[i])        \
                               : BACKWARD##_row(row, grad, columns, mask, free, scale, cap, sums[i]);     \
        }                                                                                                 \
    }

#define SAME(x) (x)
ATTENTION(lp_attention_bf16, lp_attention_backward_bf16, uint16_t, wide, narrow)
ATTENTION(lp_attention_fp32, lp_attention_backward_fp32, float, SAME, SAME)

/* ---- cross-entropy, logits become their gradient ------------------------------------------------ */

/* CROSS_ENTROPY defines a function for one dtype. It stores the nats of each of `rows` rows of V logits x,
 * and overwrites x by the gradient of the sum of weight * nats.
 *   y        targets. IGNORED: nats and gradient are 0. Outside of 0 .. V - 1: both are NaN
 *   weights  (rows), or NULL for weights of 1. A weight of 0 makes the gradient 0, also if x has a NaN
 * float32 rows store the exponentials until the sum is known. bf16 rows compute them a second time,
 * because storing them in bf16 would round twice. The sums of tiles are added in double precision: a
 * float32 sum of 50,000 numbers loses five bits. */
#define CROSS_ENTROPY(NAME, TYPE, WIDE, NARROW)                                                           \
    void NAME(TYPE *restrict x, const int64_t *restrict y, const float *restrict weights,                 \
              float *restrict nats, long rows, long V, int threads) {                                     \
        threads = share(threads, rows * V);                                                               \
        _Pragma("omp parallel for num_threads(threads)")                                                  \
        for (long i = 0; i < rows; i++) {                                                                 \
            TYPE *restrict row = x + i * V;                                                               \
            const int known = y[i] >= 0 && y[i] < V, counts = y[i] != IGNORED;                            \
            const float weight = !counts ? 0 : weights ? weights[i] : 1.0f;                               \
            const float hit = known ? WIDE(row[y[i]]) : NAN;                                              \
            float top = -INFINITY;                                                                        \
            double sum = 0;                                                                               \
            _Pragma("omp simd reduction(max : top)")                                                      \
            for (long j = 0; j < V; j++) top = WIDE(row[j]) > top ? WIDE(row[j]) : top;                   \
            for (long done = 0; done < V; done += TILE) {                                                 \
                float part = 0;                                                                           \
                _Pragma("omp simd reduction(+ : part)")                                                   \
                for (long j = done; j < least(done + TILE, V); j++) {                                     \
                    const float e = exp_of(WIDE(row[j]) - top);                                           \
                    part += e;                                                                            \
                    if (sizeof(TYPE) == 4) row[j] = NARROW(e);                                            \
                }                                                                                         \
                sum += part;                                                                              \
            }                                                                                             \
            nats[i] = counts ? (float)log(sum) - (hit - top) : 0;                                         \
            if (weight == 0) { memset(row, 0, (size_t)V * sizeof(TYPE)); continue; }                      \
            const float factor = known ? weight / (float)sum : NAN, p = exp_of(hit - top) * factor;       \
            for (long j = 0; j < V; j++) {                                                                \
                const float e = sizeof(TYPE) == 4 ? WIDE(row[j]) : exp_of(WIDE(row[j]) - top);            \
                row[j] = NARROW(e * factor);                                                              \
            }                                                                                             \
            if (known) row[y[i]] = NARROW(p - weight);                                                    \
        }                                                                                                 \
    }
CROSS_ENTROPY(lp_cross_entropy_bf16, uint16_t, wide, narrow)
CROSS_ENTROPY(lp_cross_entropy_fp32, float, SAME, SAME)

/* ---- the check that compile_c runs before it uses a new library ------------------------------------- */

/* Return how many of some known results are wrong. bf16 bit patterns: 0x3F80 is 1, 0x3F00 is 1/2, 0x3E80 is
 * 1/4, 0xBE80 is -1/4, 0xBF80 is -1. */
int lp_check(void) {
    uint16_t x[2] = {0x3F80, 0xBF80}, y[2], p[4] = {0, 0x3F80, 0x3F80, 0x3F80}, d[4] = {0x3F80, 0, 0x3F80, 0};
    uint16_t q[4] = {0, 0x3F80, 0x3F80, 0x3F80};
    const uint8_t seen[4] = {1, 0, 1, 1};
    float logits[2] = {2.0f, 2.0f}, nats, sums[2], dots[2];
    const int64_t target = 1;
    int wrong = 0;
    lp_gelu(x, y, 2, 1);
    wrong += fabsf(wide(y[0]) - 0.8412f) > 0.005f || fabsf(wide(y[1]) + 0.1588f) > 0.001f;
    lp_gelu_backward(x, x, y, 2, 1);
    wrong += fabsf(wide(y[0]) - 1.083f) > 0.005f;
    lp_attention_bf16(p, seen, NULL, sums, 1, 2, 2, 0, 1.0f, 0, 1);
    wrong += p[0] != 0x3F80 || p[1] != 0 || p[2] != 0x3F00 || p[3] != 0x3F00;
    lp_attention_backward_bf16(q, d, seen, sums, dots, 1, 2, 2, 0, 1.0f, 0, 1);
    wrong += memcmp(p, q, sizeof p) != 0;
    wrong += d[0] != 0 || d[2] != 0x3E80 || d[3] != 0xBE80;
    lp_cross_entropy_fp32(logits, &target, NULL, &nats, 1, 2, 1);
    return wrong + (fabsf(nats - 0.6931472f) > 1e-6f) + (logits[0] != 0.5f) + (logits[1] != -0.5f);
}
