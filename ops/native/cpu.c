/* A decoder's step on a CPU in float32: few token rows, every weight read once.

   T token rows, D input width, O output width, N query heads, K key/value heads, G = N / K, H head
   size, S slices of O or sampled rows, P adapter rows, V vocabulary. Matrices are row-major and
   contiguous. The sums of a row run in an order that its own sizes decide, so its bits depend on
   no other row, not on the number of threads, and on no address. Nothing is allocated, and nothing
   is read but what a contract names. Contracts in full are those of the Python ops. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __FMA__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define ROWS 4 /* 4 x 3 sums, 3 weights and one input fill the 16 registers of AVX2 */
#define OUTS 3
#define DEPTH 768   /* inputs of a tile: 4 rows of them stay in a level 1 cache */
#define BLOCK 48    /* outputs that a thread takes at a time */
#define KEYS 64     /* keys that a query meets at a time */
#define RANKS 8     /* adapter rows that a token meets at a time */
#define CHUNK 16    /* adapter rows: see ops/lora_linear.py */
#define SMALL 16384 /* numbers that are not worth a second thread */

#define INLINE static inline __attribute__((always_inline))
#define PRAGMA(text) _Pragma(#text)
#define PARALLEL(...) PRAGMA(omp parallel for num_threads(threads) __VA_ARGS__)

typedef int64_t i64;
typedef int32_t i32;
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef i32 ivec __attribute__((vector_size(4 * LANES)));
typedef float vec4 __attribute__((vector_size(16)));
typedef i32 ivec4 __attribute__((vector_size(16)));
typedef vec loose __attribute__((aligned(4), may_alias));

#ifdef __clang__
#define SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, (ivec4){i, j, k, l})
#endif
#ifdef __AVX__ /* gcc reads an operand from memory anew for each of its products otherwise */
#define KEEP(v) __asm__("" : "+v"(v))
#else
#define KEEP(v)
#endif

INLINE i64 least(i64 a, i64 b) { return a < b ? a : b; }
INLINE vec load(const float *p) { return *(const loose *)p; }
INLINE void store(float *p, vec v) { *(loose *)p = v; }
INLINE vec all(float x) { return (vec){0} + x; }

/* a b + c, rounded once. A compiler left to itself does so in one copy of a loop and not in the
   next, which shows in the bits of a row that meets other numbers of rows. */
INLINE vec fused(vec a, vec b, vec c) {
#ifdef __AVX512F__
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

INLINE vec pick(ivec where, vec a, vec b) { return (vec)((where & (ivec)a) | (~where & (ivec)b)); }

/* The first n < LANES numbers; the others are `fill`. */
INLINE vec load_some(const float *p, i64 n, float fill) {
    vec v = all(fill);
    memcpy(&v, p, 4 * n);
    return v;
}

/* exp within 2 units in the last place; 0 below -87.3, infinity above 88, NaN for NaN. */
INLINE vec exps(vec x) {
    ivec low = x < -87.3f, high = x > 88.0f;
    vec c = pick(low, all(-87.3f), pick(high, all(88.0f), x));
    vec n = c * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: what is left of a fraction is rounded */
    n -= 12582912.0f;
    vec r = c - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    p *= (vec)((__builtin_convertvector(n, ivec) + 127) << 23);
    return pick(low, all(0), pick(high, all(INFINITY), p));
}

INLINE vec4 folded(vec v) {
    vec4 part[LANES / 4];
    memcpy(part, &v, sizeof v);
    for (int n = LANES / 8; n; n /= 2)
        for (int i = 0; i < n; i++) part[i] += part[i + n];
    return part[0];
}

/* The sums of four vectors' lanes. */
INLINE vec4 sums(vec a, vec b, vec c, vec d) {
    vec4 p = folded(a), q = folded(b), r = folded(c), s = folded(d);
    p = SHUFFLE(p, q, 0, 4, 1, 5) + SHUFFLE(p, q, 2, 6, 3, 7);
    r = SHUFFLE(r, s, 0, 4, 1, 5) + SHUFFLE(r, s, 2, 6, 3, 7);
    return SHUFFLE(p, r, 0, 1, 4, 5) + SHUFFLE(p, r, 2, 3, 6, 7);
}

INLINE float sum(vec v) { return sums(v, v, v, v)[0]; }

/* y[t][o] = x[t] . w[o], added to what is there if `add`; T <= ROWS and O <= OUTS are constants.
   Meanwhile `next` is fetched, as many numbers as a row of w has. */
INLINE void tile(const int T, const int O, const float *const *x, const float *w, i64 ldw, i64 D,
                 float *const *y, int add, const float *next) {
    vec acc[OUTS][ROWS] = {0};
    i64 k = 0;
    for (; k + LANES <= D; k += LANES) {
        vec v[OUTS];
        if (next) __builtin_prefetch(next + k);
#pragma GCC unroll 4
        for (int o = 0; o < O; o++) {
            v[o] = load(w + o * ldw + k);
            KEEP(v[o]);
        }
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) {
            vec u = load(x[t] + k);
            KEEP(u);
#pragma GCC unroll 4
            for (int o = 0; o < O; o++) acc[o][t] = fused(u, v[o], acc[o][t]);
        }
    }
    if (k < D)
        for (int t = 0; t < T; t++)
            for (int o = 0; o < O; o++)
                acc[o][t] = fused(load_some(x[t] + k, D - k, 0),
                                  load_some(w + o * ldw + k, D - k, 0), acc[o][t]);
#pragma GCC unroll 4
    for (int o = 0; o < O; o++) {
        vec4 s = sums(acc[o][0], acc[o][1], acc[o][2], acc[o][3]);
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) y[t][o] = add ? y[t][o] + s[t] : s[t];
    }
}

/* The same for any O; fetches nothing. */
static void dots(int T, const float *const *x, const float *w, i64 ldw, i64 O, i64 D,
                 float *const *y, int add, const float *next) {
#define CASE(T_, O_) \
    case 4 * O_ + T_: tile(T_, O_, x, w + o * ldw, ldw, D, at, add, next); break;
    for (i64 o = 0; o < O; o += OUTS) {
        float *at[ROWS];
        for (int t = 0; t < T; t++) at[t] = y[t] + o;
        switch (4 * (int)least(OUTS, O - o) + T) {
            CASE(1, 1) CASE(2, 1) CASE(3, 1) CASE(4, 1)
            CASE(1, 2) CASE(2, 2) CASE(3, 2) CASE(4, 2)
            CASE(1, 3) CASE(2, 3) CASE(3, 3) CASE(4, 3)
        }
    }
#undef CASE
}

/* y[t][o] += h[t][0] b[0][o] + h[t][1] b[1][o] + ..., R terms, for T <= ROWS rows. */
INLINE void mix_rows(const int T, const float *const *h, i64 R, const float *b, i64 ldb, i64 O,
                     float *const *y) {
    i64 o = 0;
    for (; o + LANES <= O; o += LANES) {
        vec acc[ROWS];
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) acc[t] = load(y[t] + o);
        for (i64 r = 0; r < R; r++) {
            vec v = load(b + r * ldb + o);
            KEEP(v);
#pragma GCC unroll 4
            for (int t = 0; t < T; t++) acc[t] = fused(all(h[t][r]), v, acc[t]);
        }
#pragma GCC unroll 4
        for (int t = 0; t < T; t++) store(y[t] + o, acc[t]);
    }
    if (o < O)
        for (int t = 0; t < T; t++) {
            vec acc = load_some(y[t] + o, O - o, 0);
            for (i64 r = 0; r < R; r++)
                acc = fused(all(h[t][r]), load_some(b + r * ldb + o, O - o, 0), acc);
            memcpy(y[t] + o, &acc, 4 * (O - o));
        }
}

static void mix(int T, const float *const *h, i64 R, const float *b, i64 ldb, i64 O,
                float *const *y) {
    switch (T) {
        case 1: mix_rows(1, h, R, b, ldb, O, y); break;
        case 2: mix_rows(2, h, R, b, ldb, O, y); break;
        case 3: mix_rows(3, h, R, b, ldb, O, y); break;
        case 4: mix_rows(4, h, R, b, ldb, O, y); break;
    }
}

/* y[T, O] = x[T, D] w[O, D]^T + bias[O], which may be null. */
void linear(const float *x, const float *w, const float *bias, float *y, i64 T, i64 D, i64 O,
            int threads) {
    PARALLEL(schedule(dynamic))
    for (i64 first = 0; first < O; first += BLOCK) {
        i64 end = least(O, first + BLOCK);
        for (i64 k = 0; k < D; k += DEPTH)
            for (i64 o = first; o < end; o += OUTS)
                for (i64 t = 0; t < T; t += ROWS) {
                    const float *from[ROWS];
                    float *to[ROWS];
                    int n = least(ROWS, T - t);
                    for (int i = 0; i < n; i++) {
                        from[i] = x + (t + i) * D + k;
                        to[i] = y + (t + i) * O + o;
                    }
                    /* These rows of w are in a cache after the first tile; each tile of the first
                       three fetches a row of the next ones, which is as fast as memory goes. */
                    i64 ahead = o + OUTS + t / ROWS;
                    int fetch = t < ROWS * OUTS && ahead < O;
                    dots(n, from, w + o * D + k, D, least(OUTS, end - o), least(DEPTH, D - k), to,
                         k > 0, fetch ? w + ahead * D + k : 0);
                }
        if (bias)
            for (i64 t = 0; t < T; t++)
                for (i64 o = first; o < end; o++) y[t * O + o] += bias[o];
    }
}

/* y[T, O] += each token's own low-rank delta. Tile i of X holds up to I tokens of one adapter in
   token_XI[i * I...], -1 where it has no more; the adapter's rows are those that row_E names in
   chunks span_X2[i + 1], but for -1. a[S, P, D], b[P, O]; slice s of O is `size_S[s]` wide. */
void add_deltas(float *y, const float *x, const float *a, const float *b, const i32 *row_E,
                const i32 *span_X2, const i32 *token_XI, const i64 *size_S, i64 S, i64 X, i64 I,
                i64 P, i64 D, i64 O, int threads) {
    const i64 groups = I / ROWS;
    PARALLEL(schedule(dynamic))
    for (i64 item = 0; item < X * groups * S; item++) {
        i64 s = item % S, group = item / S, left = 0;
        const i32 *token = token_XI + group * ROWS, *span = span_X2 + 2 * (1 + group / groups);
        const float *from[ROWS];
        float hidden[ROWS][RANKS], *h[ROWS], *to[ROWS];
        int n = 0;
        for (i64 i = 0; i < s; i++) left += size_S[i];
        for (; n < ROWS && token[n] >= 0; n++) {
            from[n] = x + token[n] * D;
            to[n] = y + token[n] * O + left;
            h[n] = hidden[n];
        }
        if (!n || span[0] == span[1]) continue;
        i64 e = (i64)span[0] * CHUNK, end = (i64)span[1] * CHUNK, ranks;
        for (; e < end; e += ranks) {
            i64 p = row_E[e];
            ranks = 1;
            if (p < 0) continue;
            while (ranks < RANKS && e + ranks < end && row_E[e + ranks] == p + ranks) ranks++;
            dots(n, from, a + (s * P + p) * D, D, ranks, D, h, 0, 0);
            mix(n, (const float *const *)h, ranks, b + p * O + left, O, size_S[s], to);
        }
    }
}

/* out = h + y (y may be null: then `out` is not written), normed = RMS norm of it times w; [T, D]. */
void add_rms_norm(const float *h, const float *y, const float *w, float *out, float *normed, i64 T,
                  i64 D, float eps, int threads) {
    PARALLEL(if (T * D > SMALL))
    for (i64 t = 0; t < T; t++) {
        const float *from = h + t * D;
        float *to = normed + t * D, square, *const squares[1] = {&square};
        if (y) {
            for (i64 d = 0; d < D; d++) out[t * D + d] = from[d] + y[t * D + d];
            from = out + t * D;
        }
        tile(1, 1, &from, from, 0, D, squares, 0, 0);
        float scale = 1.0f / sqrtf(square / D + eps);
        for (i64 d = 0; d < D; d++) to[d] = w[d] * (from[d] * scale);
    }
}

/* qkv[T, N + 2K, H]: heads are normed by norm[N + K, H] unless that is null, the first C channels
   of queries and keys turn by cos[T, C] and sin[T, C]; queries go to q[T, N, H], keys and values
   to place `index[t]` of kv[2, places, K, H], or nowhere if that is negative. */
void rope_write(const float *qkv, const float *cos, const float *sin, const float *norm,
                const i64 *index, float *q, float *kv, i64 T, i64 N, i64 K, i64 H, i64 C,
                i64 places, float eps, int threads) {
    const i64 heads = N + 2 * K, half = C / 2;
    PARALLEL(if (T * heads * H > SMALL))
    for (i64 t = 0; t < T; t++)
        for (i64 m = 0; m < (index[t] < 0 ? N : heads); m++) {
            const float *from = qkv + (t * heads + m) * H, *c = cos + t * C, *s = sin + t * C;
            float *to = m < N       ? q + (t * N + m) * H
                        : m < N + K ? kv + (index[t] * K + m - N) * H
                                    : kv + ((places + index[t]) * K + m - N - K) * H;
            if (m >= N + K || !norm)
                memcpy(to, from, 4 * H);
            else {
                float square, *const squares[1] = {&square};
                tile(1, 1, &from, from, 0, H, squares, 0, 0);
                float scale = 1.0f / sqrtf(square / H + eps);
                for (i64 i = 0; i < H; i++) to[i] = norm[m * H + i] * (from[i] * scale);
            }
            if (m < N + K)
                for (i64 i = 0; i < half; i++) {
                    float x = to[i], y = to[half + i];
                    to[i] = x * c[i] - y * s[i];
                    to[half + i] = y * c[half + i] + x * s[half + i];
                }
        }
}

/* Places `from` <= j < end of a head, which lie `ld` apart, begin their way to a cache. */
INLINE void fetch(const float *p, i64 ld, const i32 *table, i64 B, i64 from, i64 end, i64 H) {
    for (i64 j = from, part; j < end; j += part) {
        const float *at = p + (table[j / B] * B + j % B) * ld;
        part = least(B - j % B, end - j);
        for (i64 n = 0; n < part; n++, at += ld)
            for (i64 i = 0; i < H; i += 16) __builtin_prefetch(at + i);
    }
}

/* Up to ROWS queries q[T][H] of one position against keys and values first <= j < end of one head:
   place j lies in block table[j / B]. The softmax is kept up to date as keys come. */
static void attend_head(int T, const float *const *q, const float *k, const float *v, i64 ld,
                        const i32 *table, i64 B, i64 first, i64 end, i64 H, float scale,
                        float *const *o) {
    float score[ROWS][KEYS], top[ROWS], mass[ROWS], *s[ROWS];
    for (int t = 0; t < T; t++) {
        top[t] = -INFINITY, mass[t] = 0;
        memset(o[t], 0, 4 * H);
    }
    fetch(k, ld, table, B, first, least(first + KEYS, end), H);
    for (i64 at = first; at < end; at += KEYS) {
        i64 n = least(KEYS, end - at), j, part;
        fetch(v, ld, table, B, at, at + n, H);
        for (j = 0; j < n; j += part) {
            i64 offset = (at + j) % B, place = table[(at + j) / B] * B + offset;
            part = least(B - offset, n - j);
            for (int t = 0; t < T; t++) s[t] = score[t] + j;
            dots(T, q, k + place * ld, ld, part, H, s, 0, 0);
        }
        for (int t = 0; t < T; t++) {
            float most = top[t], kept;
            vec total = {0}, high = all(most);
            for (j = n; j % LANES; j++) score[t][j] = -INFINITY;
            for (j = 0; j < n; j += LANES) {
                vec p = load(score[t] + j) * scale;
                store(score[t] + j, p);
                high = pick(p > high, p, high);
            }
            for (j = 0; j < LANES; j++)
                if (high[j] > most) most = high[j];
            for (j = 0; j < n; j += LANES) {
                vec p = exps(load(score[t] + j) - most);
                store(score[t] + j, p);
                total += p;
            }
            kept = at == first ? 0.0f : exps(all(top[t] - most))[0];
            mass[t] = mass[t] * kept + sum(total);
            top[t] = most;
            for (i64 i = 0; i < H; i++) o[t][i] *= kept;
        }
        fetch(k, ld, table, B, at + n, least(at + n + KEYS, end), H);
        for (j = 0; j < n; j += part) {
            i64 offset = (at + j) % B, place = table[(at + j) / B] * B + offset;
            part = least(B - offset, n - j);
            for (int t = 0; t < T; t++) s[t] = score[t] + j;
            mix(T, (const float *const *)s, part, v + place * ld, ld, H, o);
        }
    }
    for (int t = 0; t < T; t++)
        for (i64 i = 0; i < H; i++) o[t][i] /= mass[t];
}

/* o[t] for every row r with one query, which is token t = start_R1[r]; q's tokens are ldq apart.
   Returns how many such rows there are.
   kv[2, blocks, B, K, H]; the row sees the first context_R[r] places of the blocks table_RM[r], or
   the last `window` of them. */
i64 attend(const float *q, const float *kv, const i32 *start_R1, const i32 *context_R,
            const i32 *table_RM, float *o, i64 R, i64 M, i64 N, i64 K, i64 H, i64 B, i64 blocks,
            i64 ldq, i64 window, float scale, int threads) {
    const i64 G = N / K;
    i64 lone = 0;
    for (i64 r = 0; r < R; r++) lone += start_R1[r + 1] - start_R1[r] == 1;
    PARALLEL(schedule(dynamic))
    for (i64 item = 0; item < R * K; item++) {
        i64 r = item / K, head = item % K, t = start_R1[r], end = context_R[r];
        if (start_R1[r + 1] - t != 1) continue;
        const float *k = kv + head * H, *v = k + blocks * B * K * H;
        i64 first = window && end > window ? end - window : 0;
        for (i64 g = 0; g < G; g += ROWS) {
            const float *from[ROWS];
            float *to[ROWS];
            int n = least(ROWS, G - g);
            for (int i = 0; i < n; i++) {
                from[i] = q + t * ldq + (head * G + g + i) * H;
                to[i] = o + (t * N + head * G + g + i) * H;
            }
            attend_head(n, from, k, v, K * H, table_RM + r * M, B, first, end, H, scale, to);
        }
    }
    return lone;
}

/* out[T, F] = silu(gate) up for y[T, 2F], gate and up side by side; with `gelu` its form by tanh,
   1 + tanh(z) being 2 / (1 + exp(-2z)). */
void gated_mul(const float *y, float *out, i64 T, i64 F, i64 gelu, int threads) {
    PARALLEL(if (T * F > SMALL))
    for (i64 t = 0; t < T; t++) {
        const float *gate = y + 2 * t * F, *up = gate + F;
        float *to = out + t * F;
        for (i64 f = 0; f < F; f += LANES) {
            i64 n = least(LANES, F - f);
            vec g = n == LANES ? load(gate + f) : load_some(gate + f, n, 0);
            vec u = n == LANES ? load(up + f) : load_some(up + f, n, 0);
            vec s = gelu ? 1.59576912f * (g + 0.044715f * g * g * g) : g;
            vec z = g / (1.0f + exps(-s)) * u;
            memcpy(to + f, &z, 4 * n);
        }
    }
}

/* Of each row of logits[S, V] the first of the largest (or the first NaN) and its log-softmax,
   which is NaN where the row has a NaN or an infinity. */
void greedy(const float *logits, i64 *token, float *logprob, i64 S, i64 V, int threads) {
    PARALLEL()
    for (i64 s = 0; s < S; s++) {
        const float *x = logits + s * V;
        vec high = all(-INFINITY), low = all(INFINITY), mass = {0};
        ivec sound = high == high;
        float most = -INFINITY, fewest = INFINITY;
        i64 v;
        for (v = 0; v < V; v += LANES) {
            vec u = V - v < LANES ? load_some(x + v, V - v, x[v]) : load(x + v);
            sound &= u == u;
            high = pick(u > high, u, high);
            low = pick(u < low, u, low);
        }
        int whole = 1;
        for (int i = 0; i < LANES; i++) {
            if (high[i] > most) most = high[i];
            if (low[i] < fewest) fewest = low[i];
            whole &= sound[i] != 0;
        }
        for (v = 0; v < V && (whole ? x[v] != most : x[v] == x[v]);) v++;
        token[s] = v;
        for (v = 0; v < V; v += LANES)
            mass += exps((V - v < LANES ? load_some(x + v, V - v, -INFINITY) : load(x + v)) - most);
        logprob[s] = whole && isfinite(most) && isfinite(fewest) ? -logf(sum(mass)) : NAN;
    }
}
