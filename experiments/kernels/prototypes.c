/* Kernels written by hand for processors with 512-bit vectors: what generated code is held to (bar.py).
   Built with -O3 -march=native -ffp-contract=fast -fno-math-errno -fno-trapping-math -fopenmp. All arrays are float32, row-major. */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef float vf __attribute__((vector_size(64)));
typedef float uvf __attribute__((vector_size(64), aligned(4)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef int8_t b16 __attribute__((vector_size(16)));
typedef int64_t idx;

static inline vf ld(const float *p) { return *(const uvf *)p; }
static inline void st(float *p, vf x) { *(uvf *)p = x; }
static inline vf splat(float x) { return x - (vf){}; }
static inline vf pick(vi m, vf a, vf b) { return (vf)(((vi)a & m) | ((vi)b & ~m)); }
static inline vf vmax(vf a, vf b) { return pick(a > b, a, b); }
/* The first `count` < 16 elements, the others as given; and storing no more than those. */
static inline vf first(const float *p, idx count, float other) {
  return (vf)__builtin_ia32_loadups512_mask(p, splat(other), (1u << count) - 1);
}
static inline void st_first(float *p, idx count, vf x) { __builtin_ia32_storeups512_mask(p, x, (1u << count) - 1); }
static inline float hsum(vf x) {
  x += __builtin_shuffle(x, (vi){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
  x += __builtin_shuffle(x, (vi){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
  x += __builtin_shuffle(x, (vi){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
  return x[0] + x[1];
}
static inline float hmax(vf x) {
  x = vmax(x, __builtin_shuffle(x, (vi){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
  x = vmax(x, __builtin_shuffle(x, (vi){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
  x = vmax(x, __builtin_shuffle(x, (vi){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
  return x[0] > x[1] ? x[0] : x[1];
}

/* exp: 2^round(x log2 e) times a polynomial of the rest; below -87.3 it is 0. */
static inline vf vexp(vf x) {
  const vf magic = splat(12582912.0f);
  vf y = x * 1.44269504f;
  vf n = (y + magic) - magic;
  vf r = y - n;
  vf p = splat(1.5403530e-4f);
  p = p * r + 1.3333558e-3f;
  p = p * r + 9.6181291e-3f;
  p = p * r + 5.5504109e-2f;
  p = p * r + 2.4022651e-1f;
  p = p * r + 6.9314718e-1f;
  p = p * r + 1.0f;
  vi e = (__builtin_convertvector(n, vi) + 127) << 23;
  return pick(x > -87.3f, p * (vf)e, (vf){});
}

/* erf by Abramowitz and Stegun 7.1.26, 1.5e-7. */
static inline vf verf(vf x) {
  vi sign = (vi)x & (int32_t)0x80000000;
  vf a = (vf)((vi)x & 0x7fffffff);
  vf t = 1.0f / (1.0f + 0.3275911f * a);
  vf p = splat(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  vf y = 1.0f - p * t * vexp(-a * a);
  return (vf)((vi)y | sign);
}

/* ---- rows -------------------------------------------------------------------------------------------------------------- */

static void softmax_row(const float *x, float *y, idx width) {
  idx whole = width & ~15, j;
  vf m0 = splat(-INFINITY), m1 = m0;
  for (j = 0; j + 32 <= whole; j += 32) m0 = vmax(m0, ld(x + j)), m1 = vmax(m1, ld(x + j + 16));
  for (; j < whole; j += 16) m0 = vmax(m0, ld(x + j));
  float m = hmax(vmax(m0, m1));
  for (j = whole; j < width; j++) m = x[j] > m ? x[j] : m;
  vf s0 = {}, s1 = {};
  float total;
  for (j = 0; j + 32 <= whole; j += 32) {
    vf a = vexp(ld(x + j) - m), b = vexp(ld(x + j + 16) - m);
    st(y + j, a), st(y + j + 16, b);
    s0 += a, s1 += b;
  }
  for (; j < whole; j += 16) {
    vf a = vexp(ld(x + j) - m);
    st(y + j, a);
    s0 += a;
  }
  if (whole < width) {
    vf a = vexp(first(x + whole, width - whole, -INFINITY) - m);
    st_first(y + whole, width - whole, a);
    s0 += a;
  }
  total = 1.0f / hsum(s0 + s1);
  for (j = 0; j < whole; j += 16) st(y + j, ld(y + j) * total);
  for (; j < width; j++) y[j] *= total;
}

/* Rows of 16: sixteen rows at a time, so that sums over a row are sums of vectors. */
static void softmax_16(const float *x, float *y) {
  vf v[16], m, s = {};
  for (int k = 0; k < 16; k++)
    for (int r = 0; r < 16; r++) v[k][r] = x[r * 16 + k];
  m = v[0];
  for (int k = 1; k < 16; k++) m = vmax(m, v[k]);
  for (int k = 0; k < 16; k++) v[k] = vexp(v[k] - m), s += v[k];
  s = 1.0f / s;
  for (int k = 0; k < 16; k++) {
    v[k] *= s;
    for (int r = 0; r < 16; r++) y[r * 16 + k] = v[k][r];
  }
}

/* Rows of at most 112: loaded once, kept in registers. */
#define SHORT(N)                                                                                                               \
  static inline void softmax_##N(const float *x, float *y, idx width) {                                                       \
    vf v[N], m, s = {};                                                                                                        \
    idx last = width - 16 * (N - 1);                                                                                           \
    _Pragma("GCC unroll 8") for (int u = 0; u < N - 1; u++) v[u] = ld(x + 16 * u);                                             \
    v[N - 1] = last < 16 ? first(x + 16 * (N - 1), last, -INFINITY) : ld(x + 16 * (N - 1));                                    \
    m = v[0];                                                                                                                  \
    _Pragma("GCC unroll 8") for (int u = 1; u < N; u++) m = vmax(m, v[u]);                                                     \
    float top = hmax(m);                                                                                                       \
    _Pragma("GCC unroll 8") for (int u = 0; u < N; u++) v[u] = vexp(v[u] - top), s += v[u];                                    \
    float scale = 1.0f / hsum(s);                                                                                              \
    _Pragma("GCC unroll 8") for (int u = 0; u < N - 1; u++) st(y + 16 * u, v[u] * scale);                                      \
    if (last < 16) st_first(y + 16 * (N - 1), last, v[N - 1] * scale);                                                         \
    else st(y + 16 * (N - 1), v[N - 1] * scale);                                                                               \
  }
SHORT(1) SHORT(2) SHORT(3) SHORT(4) SHORT(5) SHORT(6) SHORT(7)

void softmax(const float *x, float *y, idx rows, idx width) {
  if (width <= 112) {
    void (*const kinds[])(const float *, float *, idx) = {softmax_1, softmax_2, softmax_3, softmax_4, softmax_5, softmax_6, softmax_7};
    void (*const one)(const float *, float *, idx) = kinds[(width - 1) / 16];
#pragma omp parallel for schedule(static)
    for (idx r = 0; r < rows; r++) one(x + r * width, y + r * width, width);
    return;
  }
#pragma omp parallel for schedule(static)
  for (idx r = 0; r < rows; r++) softmax_row(x + r * width, y + r * width, width);
}

static inline vf row_tail(const float *x, idx from, idx width) {
  float rest[16] = {0};
  memcpy(rest, x + from, (width - from) * 4);
  return ld(rest);
}

void layer_norm(const float *x, const float *add, const float *gamma, const float *beta, float *y, idx rows, idx width) {
#pragma omp parallel for schedule(static)
  for (idx r = 0; r < rows; r++) {
    const float *p = x + r * width, *q = add ? add + r * width : 0;
    float *o = y + r * width;
    vf s0 = {}, s1 = {}, v0 = {}, v1 = {};
    idx j;
    if (q) {
      for (j = 0; j + 16 <= width; j += 16) {
        vf a = ld(p + j) + ld(q + j);
        st(o + j, a);
        s0 += a;
      }
      p = o;
    } else {
      for (j = 0; j + 32 <= width; j += 32) s0 += ld(p + j), s1 += ld(p + j + 16);
      for (; j + 16 <= width; j += 16) s0 += ld(p + j);
    }
    float mean = hsum(s0 + s1) / width;
    for (j = 0; j + 32 <= width; j += 32) {
      vf a = ld(p + j) - mean, b = ld(p + j + 16) - mean;
      v0 += a * a, v1 += b * b;
    }
    float scale = 1.0f / sqrtf(hsum(v0 + v1) / width + 1e-5f);
    for (j = 0; j + 16 <= width; j += 16) st(o + j, (ld(p + j) - mean) * scale * ld(gamma + j) + ld(beta + j));
  }
}

void rms_norm(const float *x, const float *gamma, float *y, idx rows, idx width) {
#pragma omp parallel for schedule(static)
  for (idx r = 0; r < rows; r++) {
    const float *p = x + r * width;
    vf v0 = {}, v1 = {};
    for (idx j = 0; j + 32 <= width; j += 32) v0 += ld(p + j) * ld(p + j), v1 += ld(p + j + 16) * ld(p + j + 16);
    float scale = 1.0f / sqrtf(hsum(v0 + v1) / width + 1e-6f);
    for (idx j = 0; j + 16 <= width; j += 16) st(y + r * width + j, ld(p + j) * scale * ld(gamma + j));
  }
}

/* ---- elementwise, movement, sums --------------------------------------------------------------------------------------- */

void gelu(const float *x, float *y, idx n) {
#pragma omp parallel for schedule(static)
  for (idx j = 0; j < n; j += 16) {
    vf a = ld(x + j);
    st(y + j, a * 0.5f * (verf(a * 0.70710678f) + 1.0f));
  }
}

void silu(const float *x, float *y, idx n) {
#pragma omp parallel for schedule(static)
  for (idx j = 0; j < n; j += 16) {
    vf a = ld(x + j);
    st(y + j, a / (1.0f + vexp(-a)));
  }
}

void sum(const float *x, float *y, idx n) {
  float total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total)
  for (idx b = 0; b < n; b += 4096) {
    vf s[8] = {};
    for (idx j = b; j < b + 4096; j += 128)
      for (int u = 0; u < 8; u++) s[u] += ld(x + j + 16 * u);
    total += hsum(((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7])));
  }
  *y = total;
}

/* (b, n, h, 64) to (b, h, n, 64). */
void permute(const float *x, float *y, idx batch, idx n, idx heads) {
#pragma omp parallel for schedule(static) collapse(2)
  for (idx b = 0; b < batch; b++)
    for (idx h = 0; h < heads; h++)
      for (idx i = 0; i < n; i++)
        for (int u = 0; u < 4; u++)
          st(y + ((b * heads + h) * n + i) * 64 + 16 * u, ld(x + ((b * n + i) * heads + h) * 64 + 16 * u));
}

void gather(const float *table, const int64_t *rows, float *y, idx n, idx width) {
#pragma omp parallel for schedule(static)
  for (idx i = 0; i < n; i++)
    for (idx j = 0; j < width; j += 16) st(y + i * width + j, ld(table + rows[i] * width + j));
}

void mean_pool(const float *x, const float *mask, float *y, idx batch, idx n, idx width) {
#pragma omp parallel for schedule(static)
  for (idx b = 0; b < batch; b++) {
    float count = 0;
    for (idx i = 0; i < n; i++) count += mask[b * n + i];
    float scale = 1.0f / (count > 1e-9f ? count : 1e-9f);
    for (idx j = 0; j < width; j += 128) {
      vf s[8] = {};
      for (idx i = 0; i < n; i++)
        for (int u = 0; u < 8; u++) s[u] += ld(x + (b * n + i) * width + j + 16 * u) * mask[b * n + i];
      for (int u = 0; u < 8; u++) st(y + b * width + j + 16 * u, s[u] * scale);
    }
  }
}

/* ---- matrix times vector, weights (N, K) ------------------------------------------------------------------------------ */

static inline vf widened(b16 x) { return __builtin_convertvector((vi)__builtin_ia32_pmovsxbd512_mask((__attribute__((vector_size(16))) char)x, (vi){}, -1), vf); }

void gemv(const float *x, const float *w, float *y, idx n, idx k) {
#pragma omp parallel for schedule(static)
  for (idx r = 0; r < n; r += 4) {
    vf s[4][2] = {};
    for (idx j = 0; j < k; j += 32) {
      vf a = ld(x + j), b = ld(x + j + 16);
      for (int u = 0; u < 4; u++) s[u][0] += a * ld(w + (r + u) * k + j), s[u][1] += b * ld(w + (r + u) * k + j + 16);
    }
    for (int u = 0; u < 4; u++) y[r + u] = hsum(s[u][0] + s[u][1]);
  }
}

void gemv_int8(const float *x, const int8_t *w, const float *scale, float *y, idx n, idx k) {
#pragma omp parallel for schedule(static)
  for (idx r = 0; r < n; r += 4) {
    vf s[4] = {};
    for (idx j = 0; j < k; j += 16) {
      vf a = ld(x + j);
      for (int u = 0; u < 4; u++) s[u] += a * widened(*(const b16 *)(w + (r + u) * k + j));
    }
    for (int u = 0; u < 4; u++) y[r + u] = hsum(s[u]) * scale[r + u];
  }
}

/* Groups of 32 along K in 16 bytes: low halves are the first 16 numbers, high halves the next; scale (N, K / 32). */
void gemv_int4(const float *x, const int8_t *w, const float *scale, float *y, idx n, idx k) {
#pragma omp parallel for schedule(static)
  for (idx r = 0; r < n; r += 4) {
    vf s[4] = {};
    for (idx g = 0; g < k / 32; g++) {
      vf a = ld(x + g * 32), b = ld(x + g * 32 + 16);
      for (int u = 0; u < 4; u++) {
        vi v = (vi)__builtin_ia32_pmovsxbd512_mask(
            *(const __attribute__((vector_size(16))) char *)(w + ((r + u) * (k / 32) + g) * 16), (vi){}, -1);
        vf low = __builtin_convertvector((v << 28) >> 28, vf), high = __builtin_convertvector(v >> 4, vf);
        s[u] += (a * low + b * high) * scale[(r + u) * (k / 32) + g];
      }
    }
    for (int u = 0; u < 4; u++) y[r + u] = hsum(s[u]);
  }
}

/* ---- products, B packed as (N / 48, K, 48) ---------------------------------------------------------------------------- */

#define TILE(ROWS)                                                                                                             \
  static inline void tile_##ROWS(const float *a, const float *b, float *c, idx k, idx n) {                                    \
    vf s[ROWS][3] = {};                                                                                                        \
    for (idx j = 0; j < k; j++) {                                                                                              \
      vf b0 = ld(b + j * 48), b1 = ld(b + j * 48 + 16), b2 = ld(b + j * 48 + 32);                                              \
      _Pragma("GCC unroll 8") for (int u = 0; u < ROWS; u++) {                                                                 \
        float x = a[u * k + j];                                                                                                \
        s[u][0] += x * b0, s[u][1] += x * b1, s[u][2] += x * b2;                                                               \
      }                                                                                                                        \
    }                                                                                                                          \
    _Pragma("GCC unroll 8") for (int u = 0; u < ROWS; u++) for (int v = 0; v < 3; v++) st(c + u * n + 16 * v, s[u][v]);        \
  }
TILE(8)
TILE(4)
TILE(2)
TILE(1)

void matmul(const float *a, const float *b, float *c, idx m, idx n, idx k) {
  idx panels = n / 48;
#pragma omp parallel for schedule(static)
  for (idx p = 0; p < panels; p++) {
    const float *w = b + p * k * 48;
    float *o = c + p * 48;
    idx i = 0;
    for (; i + 8 <= m; i += 8) tile_8(a + i * k, w, o + i * n, k, n);
    if (m - i >= 4) tile_4(a + i * k, w, o + i * n, k, n), i += 4;
    if (m - i >= 2) tile_2(a + i * k, w, o + i * n, k, n), i += 2;
    if (m - i >= 1) tile_1(a + i * k, w, o + i * n, k, n);
  }
}

/* ---- attention: 16 queries are the lanes of a vector; blocks of 64 keys with a running maximum ------------------------- */

void attention(const float *q, const float *k, const float *v, float *y, idx heads, idx n) {
  enum { D = 64, BLOCK = 64 };
  const float scale = 0.125f;
  idx tiles = (n + 15) / 16;
#pragma omp parallel for schedule(static)
  for (idx job = 0; job < heads * tiles; job++) {
    idx h = job / tiles, first = job % tiles * 16, rows = n - first < 16 ? n - first : 16;
    const float *kh = k + h * n * D, *vh = v + h * n * D;
    vf qt[D], o[D], s[BLOCK], m = splat(-INFINITY), l = {};
    for (int d = 0; d < D; d++) {
      vf t = {};
      for (int r = 0; r < rows; r++) t[r] = q[(h * n + first + r) * D + d] * scale;
      qt[d] = t;
      o[d] = (vf){};
    }
    for (idx from = 0; from < n; from += BLOCK) {
      idx keys = n - from < BLOCK ? n - from : BLOCK, j;
      vf top = m;
      for (j = 0; j + 8 <= keys; j += 8) {
        vf a[8] = {};
        const float *row = kh + (from + j) * D;
        for (int d = 0; d < D; d++)
          for (int u = 0; u < 8; u++) a[u] += qt[d] * row[u * D + d];
        for (int u = 0; u < 8; u++) s[j + u] = a[u], top = vmax(top, a[u]);
      }
      for (; j < keys; j++) {
        vf a = {};
        for (int d = 0; d < D; d++) a += qt[d] * kh[(from + j) * D + d];
        s[j] = a, top = vmax(top, a);
      }
      vf shrink = vexp(m - top);
      m = top;
      l *= shrink;
      for (j = 0; j < keys; j++) s[j] = vexp(s[j] - m), l += s[j];
      for (int d = 0; d < D; d += 8) {
        vf a[8];
        for (int u = 0; u < 8; u++) a[u] = o[d + u] * shrink;
        for (j = 0; j < keys; j++)
          for (int u = 0; u < 8; u++) a[u] += s[j] * vh[(from + j) * D + d + u];
        for (int u = 0; u < 8; u++) o[d + u] = a[u];
      }
    }
    l = 1.0f / l;
    for (int d = 0; d < D; d++) {
      o[d] *= l;
      for (int r = 0; r < rows; r++) y[(h * n + first + r) * D + d] = o[d][r];
    }
  }
}

void softmax_of_16(const float *x, float *y, idx rows) {
#pragma omp parallel for schedule(static)
  for (idx r = 0; r < rows / 16; r++) softmax_16(x + r * 256, y + r * 256);
}
