/* Kernels written by hand for OpenCL on processors: what generated code is held to there (bar.py). One group is one work-item
   that does ROWS rows (or CHUNK elements) of a problem whose sizes are literals: -D LANES, ROWS, WIDTH, CHUNK. No builtin is called. */

typedef float vf __attribute__((ext_vector_type(LANES)));
typedef int vi __attribute__((ext_vector_type(LANES)));
typedef float uvf __attribute__((ext_vector_type(LANES), aligned(4)));
#define INLINE static inline __attribute__((always_inline))

INLINE vf ld(const global float *p) { return *(const global uvf *)p; }
INLINE void st(global float *p, vf x) { *(global uvf *)p = x; }
INLINE vi bits(vf x) { union { vf f; vi i; } u; u.f = x; return u.i; }
INLINE vf floats(vi x) { union { vf f; vi i; } u; u.i = x; return u.f; }
INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }

INLINE float hsum(vf x) {
#if LANES == 16
  float8 a = x.lo + x.hi;
#else
  float8 a = x;
#endif
  float4 b = a.lo + a.hi;
  return (b.x + b.y) + (b.z + b.w);
}
INLINE float hmax(vf x) {
#if LANES == 16
  float8 a = x.lo > x.hi ? x.lo : x.hi;
#else
  float8 a = x;
#endif
  float4 b = a.lo > a.hi ? a.lo : a.hi;
  float l = b.x > b.y ? b.x : b.y, r = b.z > b.w ? b.z : b.w;
  return l > r ? l : r;
}

/* 2^n enters by adding n to the exponent of the polynomial's value; below -87.3 it is 0. */
INLINE vf vexp(vf x) {
  vf t = x * 1.44269504f + 12582912.0f;
  vf n = t - 12582912.0f;
  vf r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vf p = r * 1.3813144760e-3f + 8.3694187924e-3f;
  p = p * r + 4.1668456047e-2f;
  p = p * r + 1.6666515171e-1f;
  p = p * r + 4.9999994039e-1f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return x < -87.3f ? (vf)(0.0f) : floats(bits(p) + (bits(t) << 23));
}

/* erf by Abramowitz and Stegun 7.1.26, 1.5e-7. */
INLINE vf verf(vf x) {
  vi sign = bits(x) & (int)0x80000000;
  vf a = floats(bits(x) & 0x7fffffff);
  vf t = 1.0f / (a * 0.3275911f + 1.0f);
  vf p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  vf y = 1.0f - p * t * vexp(-a * a);
  return floats(bits(y) | sign);
}

kernel void silu(const global float *restrict x, global float *restrict y) {
  const long from = (long)get_group_id(0) * CHUNK;
  for (long i = from; i < from + CHUNK; i += LANES) {
    vf a = ld(x + i);
    st(y + i, a / (vexp(0.0f - a) + 1.0f));
  }
}

kernel void gelu(const global float *restrict x, global float *restrict y) {
  const long from = (long)get_group_id(0) * CHUNK;
  for (long i = from; i < from + CHUNK; i += LANES) {
    vf a = ld(x + i);
    st(y + i, a * 0.5f * (verf(a * 0.70710678f) + 1.0f));
  }
}

#if WIDTH
#ifndef NORM
#define NORM 0
#define EPSILON 0.0f
#endif
#define WHOLE (WIDTH / LANES)
#define REST (WIDTH % LANES)
/* What is left of a row after its whole vectors, `other` beyond its end. */
INLINE vf rest_of(const global float *p, float other) {
  float t[LANES];
  for (int k = 0; k < LANES; k++) t[k] = k < REST ? p[k] : other;
  vf r;
  for (int k = 0; k < LANES; k++) r[k] = t[k];
  return r;
}
INLINE void st_rest(global float *p, vf x) {
  for (int k = 0; k < REST; k++) p[k] = x[k];
}

kernel void softmax(const global float *restrict x, global float *restrict y) {
  const long first = (long)get_group_id(0) * ROWS;
  for (long r = first; r < first + ROWS; r++) {
    const global float *a = x + r * WIDTH;
    global float *b = y + r * WIDTH;
#if WIDTH <= 112
    vf v[WHOLE + 1], m, s;
#pragma unroll
    for (int k = 0; k < WHOLE; k++) v[k] = ld(a + k * LANES);
    if (REST) v[WHOLE] = rest_of(a + WHOLE * LANES, -INFINITY);
    m = v[0];
#pragma unroll
    for (int k = 1; k < WHOLE + (REST > 0); k++) m = vmax(m, v[k]);
    const float top = hmax(m);
    s = (vf)(0.0f);
#pragma unroll
    for (int k = 0; k < WHOLE + (REST > 0); k++) v[k] = vexp(v[k] - top), s += v[k];
    const float scale = 1.0f / hsum(s);
#pragma unroll
    for (int k = 0; k < WHOLE; k++) st(b + k * LANES, v[k] * scale);
    if (REST) st_rest(b + WHOLE * LANES, v[WHOLE] * scale);
#else
    vf m0 = ld(a), m1 = m0, s0 = (vf)(0.0f), s1 = s0;
    for (long k = 0; k < WIDTH; k += 2 * LANES) m0 = vmax(m0, ld(a + k)), m1 = vmax(m1, ld(a + k + LANES));
    const float top = hmax(vmax(m0, m1));
    for (long k = 0; k < WIDTH; k += 2 * LANES) {
      vf e0 = vexp(ld(a + k) - top), e1 = vexp(ld(a + k + LANES) - top);
      st(b + k, e0), st(b + k + LANES, e1);
      s0 += e0, s1 += e1;
    }
    const float scale = 1.0f / hsum(s0 + s1);
    for (long k = 0; k < WIDTH; k += LANES) st(b + k, ld(b + k) * scale);
#endif
  }
}

/* Means are subtracted before squares are summed; NORM 1 takes the mean square of the elements themselves and adds nothing. */
kernel void norm(const global float *restrict x, const global float *restrict gamma, const global float *restrict beta,
                 global float *restrict y) {
  const long first = (long)get_group_id(0) * ROWS;
  for (long r = first; r < first + ROWS; r++) {
    const global float *a = x + r * WIDTH;
    global float *b = y + r * WIDTH;
    float mean = 0.0f;
    vf s0 = (vf)(0.0f), s1 = s0, s2 = s0, s3 = s0;
#if NORM == 0
    for (long k = 0; k < WIDTH; k += 4 * LANES)
      s0 += ld(a + k), s1 += ld(a + k + LANES), s2 += ld(a + k + 2 * LANES), s3 += ld(a + k + 3 * LANES);
    mean = hsum((s0 + s1) + (s2 + s3)) / WIDTH;
    s0 = s1 = s2 = s3 = (vf)(0.0f);
#endif
    for (long k = 0; k < WIDTH; k += 4 * LANES) {
      vf d0 = ld(a + k) - mean, d1 = ld(a + k + LANES) - mean, d2 = ld(a + k + 2 * LANES) - mean, d3 = ld(a + k + 3 * LANES) - mean;
      s0 = d0 * d0 + s0, s1 = d1 * d1 + s1, s2 = d2 * d2 + s2, s3 = d3 * d3 + s3;
    }
    const float scale = 1.0f / __builtin_sqrtf(hsum((s0 + s1) + (s2 + s3)) / WIDTH + EPSILON);
    for (long k = 0; k < WIDTH; k += LANES) {
      vf v = (ld(a + k) - mean) * scale * ld(gamma + k);
      st(b + k, NORM == 0 ? v + ld(beta + k) : v);
    }
  }
}

/* Eight rows of weights (N, K) against one vector of K. */
kernel void gemv(const global float *restrict x, const global float *restrict w, global float *restrict y) {
  const long first = (long)get_group_id(0) * ROWS;
  for (long r = first; r < first + ROWS; r += 8) {
    const global float *a = w + r * WIDTH;
    vf s0 = (vf)(0.0f), s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0;
    for (long k = 0; k < WIDTH; k += LANES) {
      vf b = ld(x + k);
      s0 = ld(a + k) * b + s0, s1 = ld(a + k + WIDTH) * b + s1, s2 = ld(a + k + 2 * WIDTH) * b + s2, s3 = ld(a + k + 3 * WIDTH) * b + s3;
      s4 = ld(a + k + 4 * WIDTH) * b + s4, s5 = ld(a + k + 5 * WIDTH) * b + s5, s6 = ld(a + k + 6 * WIDTH) * b + s6,
      s7 = ld(a + k + 7 * WIDTH) * b + s7;
    }
    y[r] = hsum(s0), y[r + 1] = hsum(s1), y[r + 2] = hsum(s2), y[r + 3] = hsum(s3);
    y[r + 4] = hsum(s4), y[r + 5] = hsum(s5), y[r + 6] = hsum(s6), y[r + 7] = hsum(s7);
  }
}
#endif

kernel void partial_sums(const global float *restrict x, global float *restrict parts) {
  const global float *a = x + (long)get_group_id(0) * CHUNK;
  vf s0 = (vf)(0.0f), s1 = s0, s2 = s0, s3 = s0;
  for (long k = 0; k < CHUNK; k += 4 * LANES)
    s0 += ld(a + k), s1 += ld(a + k + LANES), s2 += ld(a + k + 2 * LANES), s3 += ld(a + k + 3 * LANES);
  parts[get_group_id(0)] = hsum((s0 + s1) + (s2 + s3));
}

kernel void total(const global float *restrict parts, global float *restrict y, const int count) {
  float s = 0.0f;
  for (int k = 0; k < count; k++) s += parts[k];
  y[0] = s;
}

/* (b, n, h, 64) to (b, h, n, 64), a group for each (b, h). */
kernel void permute(const global float *restrict x, global float *restrict y, const int n, const int h) {
  const long g = get_group_id(0), from = g / h * n * h + g % h;
  for (long r = 0; r < n; r++) {
    const global float *a = x + (from + r * h) * 64;
    global float *b = y + (g * n + r) * 64;
#pragma unroll
    for (int k = 0; k < 64; k += LANES) st(b + k, ld(a + k));
  }
}
