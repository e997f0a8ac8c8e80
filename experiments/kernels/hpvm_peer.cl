// HPVM's programs in OpenCL, written by hand for devices that are processors: an item computes a vector, or a row of vectors.

#define CLAMP_STORE(to, value, left) \
    if (left >= 16) vstore16(value, 0, to); \
    else { float part[16]; vstore16(value, 0, part); for (long e_ = 0; e_ < left; e_++) (to)[e_] = part[e_]; }

// b as panels of 32 columns, the last filled with zeros: item (panel, row)
kernel void sgemm_pack(long k, long n, global const float *restrict b, global float *restrict packed)
{
    long panel = get_global_id(0), p = get_global_id(1), first = panel * 32;
    global float *to = packed + (panel * k + p) * 32;
    for (long j = 0; j < 32; j++) to[j] = first + j < n ? b[p * n + first + j] : 0;
}

#if ROWS == 8
#define EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#else
#define EACH(X) X(0) X(1) X(2)
#endif

// ROWS x 32 of the result an item, sums in registers
kernel void sgemm(long m, long k, long n, float alpha, float beta, global const float *restrict a, global const float *restrict packed,
                  global const float *restrict c, global float *restrict out)
{
    long panel = get_global_id(1), top = get_global_id(0) * ROWS, first = panel * 32;
    global const float *restrict b = packed + panel * k * 32;
    long last = m - 1;
#define DECLARE(i) float16 s##i = 0, t##i = 0; global const float *restrict a##i = a + min(top + i, last) * k;
    EACH(DECLARE)
    for (long p = 0; p < k; p++) {
        float16 b0 = vload16(0, b + p * 32), b1 = vload16(0, b + p * 32 + 16);
#define STEP(i) s##i += a##i[p] * b0; t##i += a##i[p] * b1;
        EACH(STEP)
    }
#define STORE(i) if (top + i < m) { \
        long at = (top + i) * n + first, left = n - first; \
        float part[32]; \
        vstore16(s##i, 0, part); vstore16(t##i, 0, part + 16); \
        for (long e = 0; e < min(left, 32L); e++) out[at + e] = alpha * part[e] + beta * c[at + e]; }
    EACH(STORE)
}

// an item computes a row: (row, plane)
kernel void stencil(long z, long y, long x, float around, float center, global const float *restrict a, global float *restrict out)
{
    long i = get_global_id(1), j = get_global_id(0), row = x + 2, plane = (y + 2) * row;
    global const float *at = a + (i + 1) * plane + (j + 1) * row + 1;
    global float *to = out + (i * y + j) * x;
    for (long k = 0; k + 16 <= x; k += 16)
        vstore16(around * (vload16(0, at + k - plane) + vload16(0, at + k + plane) + vload16(0, at + k - row) + vload16(0, at + k + row)
                           + vload16(0, at + k - 1) + vload16(0, at + k + 1)) - center * vload16(0, at + k), 0, to + k);
    for (long k = x / 16 * 16; k < x; k++)
        to[k] = around * (at[k - plane] + at[k + plane] + at[k - row] + at[k + row] + at[k - 1] + at[k + 1]) - center * at[k];
}

kernel void spmv(long n, global const int *restrict start, global const int *restrict column, global const float *restrict value,
                 global const float *restrict x, global float *restrict y)
{
    long i = get_global_id(0);
    if (i >= n) return;
    float sum = 0;
    for (int j = start[i]; j < start[i + 1]; j++) sum += value[j] * x[column[j]];
    y[i] = sum;
}

// an item computes a row of cells, 16 at a time, all directions in registers
kernel void lbm(long z, long y, long x, float omega, global const long *restrict ways, global const float *restrict share,
                global const float *restrict f, global float *restrict out)
{
    long i = get_global_id(1), j = get_global_id(0), row = x + 2, plane = (y + 2) * row, all = (z + 2) * plane, cells = z * y * x;
    global float *to = out + (i * y + j) * x;
    for (long first = 0; first < x; first += 16) {
        long left = x - first, back = left < 16 && x >= 16 ? 16 - left : 0;  // the last vector of a row begins earlier
        float16 cell[19], rho = 0, u0 = 0, u1 = 0, u2 = 0;
        for (int q = 0; q < 19; q++) {
            float e0 = ways[q * 3], e1 = ways[q * 3 + 1], e2 = ways[q * 3 + 2];
            global const float *at = f + q * all + (i + 1 - ways[q * 3]) * plane + (j + 1 - ways[q * 3 + 1]) * row + 1 - ways[q * 3 + 2]
                + first - back;
            float16 v;
            if (left >= 16 || back) v = vload16(0, at);
            else { float part[16]; for (long e = 0; e < 16; e++) part[e] = e < left ? at[e] : 1; v = vload16(0, part); }
            cell[q] = v;
            rho += v;
            u0 += e0 * v;
            u1 += e1 * v;
            u2 += e2 * v;
        }
        float16 square = 1.5f * (u0 * u0 + u1 * u1 + u2 * u2), over = 1 / fmax(rho, 0.5f);
        for (int q = 0; q < 19; q++) {
            float e0 = ways[q * 3], e1 = ways[q * 3 + 1], e2 = ways[q * 3 + 2];
            float16 along = e0 * u0 + e1 * u1 + e2 * u2;
            float16 made = (1 - omega) * cell[q] + omega * share[q] * (rho + 3 * along + (4.5f * along * along - square) * over);
            global float *put = to + q * cells + first - back;
            long some = back ? 16 : left;
            CLAMP_STORE(put, made, some)
        }
    }
}

// the stages of edge detection; an item computes a row
kernel void smooth(long h, long w, global const float *restrict image, global float *restrict out)
{
    long i = get_global_id(0), row = w + 8;
    global const float *at = image + i * row;
    global float *to = out + i * (w + 4);
    for (long j = 0; j < w + 4; j += 16) {
        long left = w + 4 - j;
        if (left >= 16) {
            float16 sum = 0;
            for (int r = 0; r < 5; r++) {
                float weight = r == 2 ? 6 / 16.f : r % 2 ? 4 / 16.f : 1 / 16.f;
                global const float *p = at + r * row + j;
                sum += weight * (1 / 16.f * (vload16(0, p) + vload16(0, p + 4)) + 4 / 16.f * (vload16(0, p + 1) + vload16(0, p + 3))
                                 + 6 / 16.f * vload16(0, p + 2));
            }
            vstore16(sum, 0, to + j);
        } else
            for (long e = j; e < w + 4; e++) {
                float sum = 0;
                for (int r = 0; r < 5; r++) {
                    float weight = r == 2 ? 6 / 16.f : r % 2 ? 4 / 16.f : 1 / 16.f;
                    global const float *p = at + r * row + e;
                    sum += weight * (1 / 16.f * (p[0] + p[4]) + 4 / 16.f * (p[1] + p[3]) + 6 / 16.f * p[2]);
                }
                to[e] = sum;
            }
    }
}

#define NINE(function, load) \
    function(function(function(function(load(a, 0), load(a, 1)), function(load(a, 2), load(b, 0))), \
                      function(function(load(b, 1), load(b, 2)), function(load(c, 0), load(c, 1)))), load(c, 2))
#define WIDE(p, o) vload16(0, p + j + o)
#define ONE(p, o) p[j + o]

kernel void laplace(long h, long w, global const float *restrict smooth, global float *restrict out)
{
    long i = get_global_id(0), row = w + 4, j = 0;
    global const float *a = smooth + i * row, *b = a + row, *c = b + row;
    global float *to = out + i * (w + 2);
    for (; j + 16 <= w + 2; j += 16) vstore16(NINE(fmax, WIDE) + NINE(fmin, WIDE) - 2 * WIDE(b, 1), 0, to + j);
    for (; j < w + 2; j++) to[j] = NINE(fmax, ONE) + NINE(fmin, ONE) - 2 * ONE(b, 1);
}

kernel void crossing(long h, long w, global const float *restrict laplace, global float *restrict out)
{
    long i = get_global_id(0), row = w + 2, j = 0;
    global const float *a = laplace + i * row, *b = a + row, *c = b + row;
    global float *to = out + i * w;
    for (; j + 16 <= w; j += 16)
        vstore16(select((float16)0, (float16)1, (NINE(fmin, WIDE) < 0) & (NINE(fmax, WIDE) > 0)), 0, to + j);
    for (; j < w; j++) to[j] = (NINE(fmin, ONE) < 0) & (NINE(fmax, ONE) > 0) ? 1 : 0;
}

#define GX(load) (load(a, 2) - load(a, 0) + 2 * (load(b, 2) - load(b, 0)) + load(c, 2) - load(c, 0))
#define GY(load) (load(c, 0) - load(a, 0) + 2 * (load(c, 1) - load(a, 1)) + load(c, 2) - load(a, 2))

// the gradient and the largest one of each row
kernel void gradient(long h, long w, global const float *restrict smooth, global float *restrict out, global float *restrict most)
{
    long i = get_global_id(0), row = w + 4, j = 0;
    global const float *a = smooth + (i + 1) * row + 1, *b = a + row, *c = b + row;
    global float *to = out + i * w;
    float16 top = 0;
    for (; j + 16 <= w; j += 16) {
        float16 gx = GX(WIDE), gy = GY(WIDE), g = sqrt(gx * gx + gy * gy);
        vstore16(g, 0, to + j);
        top = fmax(top, g);
    }
    float8 t8 = fmax(top.lo, top.hi);
    float4 t4 = fmax(t8.lo, t8.hi);
    float2 t2 = fmax(t4.lo, t4.hi);
    float t = fmax(t2.x, t2.y);
    for (; j < w; j++) {
        float gx = GX(ONE), gy = GY(ONE), g = sqrt(gx * gx + gy * gy);
        to[j] = g;
        t = fmax(t, g);
    }
    most[i] = t;
}

kernel void largest(long h, global const float *restrict rows, global float *restrict most)
{
    float t = 0;
    for (long i = 0; i < h; i++) t = fmax(t, rows[i]);
    most[0] = t;
}

kernel void reject(long h, long w, float theta, global const float *restrict crossing, global const float *restrict gradient,
                   global const float *restrict most, global float *restrict out)
{
    long i = get_global_id(0);
    float least = theta * most[0];
    for (long j = 0; j < w; j++) out[i * w + j] = gradient[i * w + j] > least ? crossing[i * w + j] : 0;
}
