/* HPVM's programs in C with OpenMP, written by hand: one function each. Grids and images come with the border that they read.

   gcc -O3 -march=native -ffast-math -fopenmp -shared -fPIC hpvm_peer.c -o hpvm_peer.so -lm */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* a tile's sums fill three quarters of the vector registers */
#ifdef __AVX512F__
enum { LANES = 16, ROWS = 12 };
#else
enum { LANES = 8, ROWS = 6 };
#endif
enum { COLUMNS = 2 * LANES, DEPTH = 256, HEIGHT = 96 };
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* ROWS x COLUMNS of the product of packed panels: sums stay in registers */
static void tile(int64_t depth, const float *restrict a, const float *restrict b, float *restrict sums)
{
    vec acc[ROWS][2] = {{{0}}};
    for (int64_t p = 0; p < depth; p++) {
        vec b0 = *(const vec *)(b + p * COLUMNS), b1 = *(const vec *)(b + p * COLUMNS + LANES);
#pragma GCC unroll 12
        for (int i = 0; i < ROWS; i++) {
            acc[i][0] += a[p * ROWS + i] * b0;
            acc[i][1] += a[p * ROWS + i] * b1;
        }
    }
    for (int i = 0; i < ROWS; i++) {
        *(vec *)(sums + i * COLUMNS) = acc[i][0];
        *(vec *)(sums + i * COLUMNS + LANES) = acc[i][1];
    }
}

/* out = alpha a b + beta c, blocked as BLIS is: panels of b by all threads, blocks of a by each */
void sgemm(int64_t m, int64_t k, int64_t n, float alpha, float beta, const float *a, const float *b, const float *c, float *out)
{
    int64_t panels = (n + COLUMNS - 1) / COLUMNS, blocks = (m + HEIGHT - 1) / HEIGHT;
    float *packed = aligned_alloc(64, sizeof(float) * panels * COLUMNS * DEPTH);
#pragma omp parallel
    {
        float *mine = aligned_alloc(64, sizeof(float) * HEIGHT * DEPTH), sums[ROWS * COLUMNS] __attribute__((aligned(64)));
        for (int64_t from = 0; from < k; from += DEPTH) {
            int64_t depth = least(DEPTH, k - from);
#pragma omp for schedule(static)
            for (int64_t q = 0; q < panels; q++)
                for (int64_t p = 0; p < depth; p++) {
                    float *to = packed + q * COLUMNS * DEPTH + p * COLUMNS;
                    int64_t wide = least(COLUMNS, n - q * COLUMNS);
                    memcpy(to, b + (from + p) * n + q * COLUMNS, sizeof(float) * wide);
                    memset(to + wide, 0, sizeof(float) * (COLUMNS - wide));
                }
#pragma omp for schedule(dynamic)
            for (int64_t block = 0; block < blocks; block++) {
                int64_t top = block * HEIGHT, high = least(HEIGHT, m - top);
                for (int64_t r = 0; r < high; r += ROWS)
                    for (int64_t p = 0; p < depth; p++)
                        for (int64_t i = 0; i < ROWS; i++)
                            mine[r * DEPTH + p * ROWS + i] = r + i < high ? a[(top + r + i) * k + from + p] : 0;
                for (int64_t q = 0; q < panels; q++)
                    for (int64_t r = 0; r < high; r += ROWS) {
                        tile(depth, mine + r * DEPTH, packed + q * COLUMNS * DEPTH, sums);
                        int64_t wide = least(COLUMNS, n - q * COLUMNS), tall = least(ROWS, high - r);
                        for (int64_t i = 0; i < tall; i++) {
                            float *to = out + (top + r + i) * n + q * COLUMNS;
                            const float *add = c + (top + r + i) * n + q * COLUMNS, *sum = sums + i * COLUMNS;
                            if (from)
                                for (int64_t j = 0; j < wide; j++) to[j] += alpha * sum[j];
                            else
                                for (int64_t j = 0; j < wide; j++) to[j] = alpha * sum[j] + beta * add[j];
                        }
                    }
            }
        }
        free(mine);
    }
    free(packed);
}

void stencil(int64_t z, int64_t y, int64_t x, float around, float center, const float *a, float *out)
{
    int64_t row = x + 2, plane = (y + 2) * row;
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t i = 0; i < z; i++)
        for (int64_t j = 0; j < y; j++) {
            const float *restrict at = a + (i + 1) * plane + (j + 1) * row + 1;
            float *restrict to = out + (i * y + j) * x;
#pragma omp simd
            for (int64_t k = 0; k < x; k++)
                to[k] = around * (at[k - plane] + at[k + plane] + at[k - row] + at[k + row] + at[k - 1] + at[k + 1]) - center * at[k];
        }
}

void spmv(int64_t n, const int32_t *start, const int32_t *column, const float *value, const float *x, float *y)
{
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < n; i++) {
        float sum = 0;
        for (int32_t j = start[i]; j < start[i + 1]; j++) sum += value[j] * x[column[j]];
        y[i] = sum;
    }
}

/* a cell at a time, all directions in registers, vectors along x; ways as the strides from a cell to where it streams in from */
void lbm(int64_t z, int64_t y, int64_t x, float omega, const int64_t *ways, const float *share, const float *f, float *out)
{
    int64_t row = x + 2, plane = (y + 2) * row, all = (z + 2) * plane, cells = z * y * x;
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t i = 0; i < z; i++)
        for (int64_t j = 0; j < y; j++) {
            const float *from[19];
            for (int q = 0; q < 19; q++)
                from[q] = f + q * all + (i + 1 - ways[q * 3]) * plane + (j + 1 - ways[q * 3 + 1]) * row + 1 - ways[q * 3 + 2];
            float *to = out + (i * y + j) * x;
            for (int64_t first = 0; first < x; first += 64) {
                int64_t count = least(64, x - first);
                float rho[64], u[3][64], cell[19][64];
                memset(rho, 0, sizeof rho);
                memset(u, 0, sizeof u);
                for (int q = 0; q < 19; q++) {
                    float e0 = ways[q * 3], e1 = ways[q * 3 + 1], e2 = ways[q * 3 + 2];
                    const float *at = from[q] + first;
#pragma omp simd
                    for (int64_t k = 0; k < count; k++) {
                        float v = cell[q][k] = at[k];
                        rho[k] += v;
                        u[0][k] += e0 * v;
                        u[1][k] += e1 * v;
                        u[2][k] += e2 * v;
                    }
                }
                float square[64], over[64];
#pragma omp simd
                for (int64_t k = 0; k < count; k++) {
                    square[k] = 1.5f * (u[0][k] * u[0][k] + u[1][k] * u[1][k] + u[2][k] * u[2][k]);
                    over[k] = 1 / (rho[k] > 0.5f ? rho[k] : 0.5f);
                }
                for (int q = 0; q < 19; q++) {
                    float e0 = ways[q * 3], e1 = ways[q * 3 + 1], e2 = ways[q * 3 + 2], weight = omega * share[q];
                    float *put = to + q * cells + first;
#pragma omp simd
                    for (int64_t k = 0; k < count; k++) {
                        float along = e0 * u[0][k] + e1 * u[1][k] + e2 * u[2][k];
                        put[k] = (1 - omega) * cell[q][k]
                            + weight * (rho[k] + 3 * along + (4.5f * along * along - square[k]) * over[k]);
                    }
                }
            }
        }
}

static float larger(float a, float b) { return a > b ? a : b; }
static float smaller(float a, float b) { return a < b ? a : b; }

/* room: (h + 4)(w + 4) + (h + 2)(w + 2) + 2 h w elements */
void edges(int64_t h, int64_t w, float theta, const float *image, float *room, float *out)
{
    static const float gauss[5] = {1 / 16.f, 4 / 16.f, 6 / 16.f, 4 / 16.f, 1 / 16.f};
    float *smooth = room, *laplace = smooth + (h + 4) * (w + 4), *crossing = laplace + (h + 2) * (w + 2), *gradient = crossing + h * w;
    float most = 0;
#pragma omp parallel
    {
        float *line = malloc(sizeof(float) * (w + 8));
#pragma omp for schedule(static)
        for (int64_t i = 0; i < h + 4; i++) { /* separable */
            const float *at = image + i * (w + 8);
#pragma omp simd
            for (int64_t j = 0; j < w + 8; j++)
                line[j] = gauss[0] * (at[j] + at[j + 4 * (w + 8)]) + gauss[1] * (at[j + w + 8] + at[j + 3 * (w + 8)]) + gauss[2] * at[j + 2 * (w + 8)];
#pragma omp simd
            for (int64_t j = 0; j < w + 4; j++)
                smooth[i * (w + 4) + j] = gauss[0] * (line[j] + line[j + 4]) + gauss[1] * (line[j + 1] + line[j + 3]) + gauss[2] * line[j + 2];
        }
        free(line);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < h + 2; i++) {
            const float *a = smooth + i * (w + 4), *b = a + w + 4, *c = b + w + 4;
#pragma omp simd
            for (int64_t j = 0; j < w + 2; j++) {
                float high = larger(larger(larger(a[j], a[j + 1]), larger(a[j + 2], b[j])), larger(larger(b[j + 1], b[j + 2]), larger(c[j], larger(c[j + 1], c[j + 2]))));
                float low = smaller(smaller(smaller(a[j], a[j + 1]), smaller(a[j + 2], b[j])), smaller(smaller(b[j + 1], b[j + 2]), smaller(c[j], smaller(c[j + 1], c[j + 2]))));
                laplace[i * (w + 2) + j] = high + low - 2 * b[j + 1];
            }
        }
#pragma omp for schedule(static) reduction(max : most)
        for (int64_t i = 0; i < h; i++) {
            const float *a = laplace + i * (w + 2), *b = a + w + 2, *c = b + w + 2;
#pragma omp simd
            for (int64_t j = 0; j < w; j++) {
                float high = larger(larger(larger(a[j], a[j + 1]), larger(a[j + 2], b[j])), larger(larger(b[j + 1], b[j + 2]), larger(c[j], larger(c[j + 1], c[j + 2]))));
                float low = smaller(smaller(smaller(a[j], a[j + 1]), smaller(a[j + 2], b[j])), smaller(smaller(b[j + 1], b[j + 2]), smaller(c[j], smaller(c[j + 1], c[j + 2]))));
                crossing[i * w + j] = (low < 0) & (high > 0) ? 1.0f : 0.0f;
            }
            const float *p = smooth + (i + 1) * (w + 4) + 1, *q = p + w + 4, *r = q + w + 4;
#pragma omp simd reduction(max : most)
            for (int64_t j = 0; j < w; j++) {
                float gx = p[j + 2] - p[j] + 2 * (q[j + 2] - q[j]) + r[j + 2] - r[j];
                float gy = r[j] - p[j] + 2 * (r[j + 1] - p[j + 1]) + r[j + 2] - p[j + 2];
                float g = sqrtf(gx * gx + gy * gy);
                gradient[i * w + j] = g;
                most = larger(most, g);
            }
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < h; i++)
#pragma omp simd
            for (int64_t j = 0; j < w; j++) out[i * w + j] = gradient[i * w + j] > theta * most ? crossing[i * w + j] : 0.0f;
    }
}
