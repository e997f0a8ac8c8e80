/* cuBLAS and cuBLASLt on host memory: the functions that the runtime calls, by loops.

   What they are told is checked as the libraries do, by the status they answer, and in places more strictly, by an abort: a stream and
   a workspace have to be set, in that order. A product is handed to a queue, which does it when somebody waits. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef _Float16 half;
enum { ok = 0, invalid = 7, unsupported = 15 };
enum { f32 = 0, f16 = 2, bf16 = 14 };

#define API extern "C" __attribute__((visibility("default")))
#define WANT(condition) do { if (!(condition)) { fprintf(stderr, "cublas.cpp: expected %s\n", #condition); abort(); } } while (0)

/* Products done, handles and descriptions alive, algorithms chosen. */
extern "C" { __attribute__((visibility("default"))) long rt_products, rt_alive, rt_chosen; }
static void (*rt_queue)(void (*)(void *), void *);
API void rt_set_queue(void (*queue)(void (*)(void *), void *)) { rt_queue = queue; }

static int width(int type) { return type == f32 ? 4 : 2; }
static float get(const void *at, int type, int64_t i) {
  if (type == f32) return ((const float *)at)[i];
  if (type == f16) return float(((const half *)at)[i]);
  const uint32_t bits = uint32_t(((const uint16_t *)at)[i]) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static void put(void *at, int type, int64_t i, float value) {
  if (type == f32) { ((float *)at)[i] = value; return; }
  if (type == f16) { ((half *)at)[i] = half(value); return; }
  uint32_t bits;
  memcpy(&bits, &value, 4);
  ((uint16_t *)at)[i] = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

struct matrix { char *at; int type; int64_t rows, columns, lead, stride; };
struct product {
  matrix a, b, c, d;
  bool turned_a, turned_b;
  int64_t m, n, k, batch;
  float alpha, beta;
  const char *bias;
  int epilogue;
};

static void run(void *given) {
  const product &p = *(product *)given;
  for (int64_t x = 0; x < p.batch; x++) {
    const char *a = p.a.at + x * p.a.stride * width(p.a.type), *b = p.b.at + x * p.b.stride * width(p.b.type);
    const char *c = p.c.at + x * p.c.stride * width(p.c.type);
    char *d = p.d.at + x * p.d.stride * width(p.d.type);
    for (int64_t i = 0; i < p.m; i++)
      for (int64_t j = 0; j < p.n; j++) {
        float sum = 0;
        for (int64_t k = 0; k < p.k; k++)
          sum += get(a, p.a.type, p.turned_a ? i * p.a.lead + k : k * p.a.lead + i) *
                 get(b, p.b.type, p.turned_b ? k * p.b.lead + j : j * p.b.lead + k);
        float y = p.alpha * sum;
        if (p.beta != 0) y += p.beta * get(c, p.c.type, j * p.c.lead + i);
        if (p.bias) y += get(p.bias, p.d.type, i);
        if (p.epilogue & 2) y = y > 0 ? y : 0;
        if (p.epilogue & 32) y = 0.5f * y * (1 + tanhf(0.7978845608f * (y + 0.044715f * y * y * y)));
        put(d, p.d.type, j * p.d.lead + i, y);
      }
  }
  rt_products++;
}

/* Columns of a matrix of (rows, columns) as stored, none beside another. */
static bool fits(const matrix &x, int64_t rows, int64_t columns) {
  return x.at && uintptr_t(x.at) % width(x.type) == 0 && x.rows == rows && x.columns == columns && x.lead >= rows && rows > 0 &&
         columns > 0 && x.stride >= 0;
}
static int enqueue(const product &p) {
  const bool right = fits(p.a, p.turned_a ? p.k : p.m, p.turned_a ? p.m : p.k) &&
                     fits(p.b, p.turned_b ? p.n : p.k, p.turned_b ? p.k : p.n) && fits(p.c, p.m, p.n) && fits(p.d, p.m, p.n);
  const bool typed = p.a.type == p.b.type && p.c.type == p.d.type && (p.d.type == p.a.type || p.d.type == f32);
  if (!right || p.batch < 1 || (p.batch > 1 && p.d.stride < p.n)) return invalid;
  if (!typed) return unsupported;
  rt_queue(run, new product(p)); /* a recording may do it again */
  return ok;
}

static int version(int part, int *value) {
  *value = part == 0 ? 13 : part;
  return ok;
}

/* ---- cuBLAS */
struct handle { void *stream, *workspace; size_t bytes; int mode, math; };
API int cublasCreate_v2(handle **made) { *made = new handle{nullptr, nullptr, 0, 0, 0}; rt_alive++; return ok; }
API int cublasDestroy_v2(handle *h) { delete h; rt_alive--; return ok; }
API int cublasGetProperty(int part, int *value) { return version(part, value); }
API int cublasSetStream_v2(handle *h, void *stream) { h->stream = stream; h->workspace = nullptr; return ok; }
API int cublasSetWorkspace_v2(handle *h, void *at, size_t bytes) {
  if (uintptr_t(at) % 256) return invalid;
  h->workspace = at;
  h->bytes = bytes;
  return ok;
}
API int cublasSetPointerMode_v2(handle *h, int mode) { h->mode = mode; return ok; }
API int cublasSetMathMode(handle *h, int mode) { h->math = mode; return ok; }

API int cublasGemmStridedBatchedEx(handle *h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int type_a,
                                   int lda, long long sa, const void *b, int type_b, int ldb, long long sb, const void *beta,
                                   void *c, int type_c, int ldc, long long sc, int batch, int compute, int algorithm) {
  WANT(h->stream && h->workspace && h->bytes >= (4 << 20) && h->mode == 0);
  WANT(h->math == 16 && compute == 68 && algorithm == -1); /* f32 is f32, and sums are */
  if (ta < 0 || ta > 1 || tb < 0 || tb > 1) return invalid;
  const matrix in_a{(char *)a, type_a, ta ? k : m, ta ? m : k, lda, sa}, in_b{(char *)b, type_b, tb ? n : k, tb ? k : n, ldb, sb};
  const matrix in_c{(char *)c, type_c, m, n, ldc, sc};
  return enqueue({in_a, in_b, in_c, in_c, ta == 1, tb == 1, m, n, k, batch, *(const float *)alpha, *(const float *)beta, nullptr, 1});
}
API int cublasGemmEx(handle *h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int type_a, int lda,
                     const void *b, int type_b, int ldb, const void *beta, void *c, int type_c, int ldc, int compute,
                     int algorithm) {
  return cublasGemmStridedBatchedEx(h, ta, tb, m, n, k, alpha, a, type_a, lda, 0, b, type_b, ldb, 0, beta, c, type_c, ldc, 0, 1,
                                    compute, algorithm);
}

/* ---- cuBLASLt */
struct layout { int type; uint64_t rows, columns; int64_t lead; int batch; int64_t stride; };
struct operation { int turned_a, turned_b; uint32_t epilogue; const char *bias; };
struct preference { size_t bytes; uint32_t reductions, alignments[4]; };
struct algorithm { uint64_t data[8]; };
struct heuristic { algorithm found; size_t workspace; int state; float waves; int reserved[4]; };
static const uint64_t KNOWN = 0xA160;

static int alignment(const void *at) { return int(uintptr_t(at) & -uintptr_t(at)); }

API int cublasLtCreate(handle **made) { return cublasCreate_v2(made); }
API int cublasLtDestroy(handle *h) { return cublasDestroy_v2(h); }
API int cublasLtGetProperty(int part, int *value) { return version(part, value); }
API int cublasLtMatmulDescCreate(operation **made, int compute, int scale) {
  if (compute != 68 || scale != f32) return invalid;
  *made = new operation{0, 0, 1, nullptr};
  rt_alive++;
  return ok;
}
API int cublasLtMatmulDescDestroy(operation *o) { delete o; rt_alive--; return ok; }
API int cublasLtMatmulDescSetAttribute(operation *o, int which, const void *value, size_t bytes) {
  if (which == 3 && bytes == 4) o->turned_a = *(const int32_t *)value;
  else if (which == 4 && bytes == 4) o->turned_b = *(const int32_t *)value;
  else if (which == 7 && bytes == 4) o->epilogue = *(const uint32_t *)value;
  else if (which == 8 && bytes == 8) o->bias = *(const char *const *)value;
  else return invalid;
  return ok;
}
API int cublasLtMatrixLayoutCreate(layout **made, int type, uint64_t rows, uint64_t columns, int64_t lead) {
  *made = new layout{type, rows, columns, lead, 1, 0};
  rt_alive++;
  return ok;
}
API int cublasLtMatrixLayoutDestroy(layout *x) { delete x; rt_alive--; return ok; }
API int cublasLtMatrixLayoutSetAttribute(layout *x, int which, const void *value, size_t bytes) {
  if (which == 5 && bytes == 4) x->batch = *(const int32_t *)value;
  else if (which == 6 && bytes == 8) x->stride = *(const int64_t *)value;
  else return invalid;
  return ok;
}
API int cublasLtMatmulPreferenceCreate(preference **made) {
  *made = new preference{0, 7, {256, 256, 256, 256}};
  rt_alive++;
  return ok;
}
API int cublasLtMatmulPreferenceDestroy(preference *p) { delete p; rt_alive--; return ok; }
API int cublasLtMatmulPreferenceSetAttribute(preference *p, int which, const void *value, size_t bytes) {
  if (which == 1 && bytes == 8) p->bytes = *(const size_t *)value;
  else if (which == 3 && bytes == 4) p->reductions = *(const uint32_t *)value;
  else if (which >= 5 && which <= 8 && bytes == 4) p->alignments[which - 5] = *(const uint32_t *)value;
  else return invalid;
  return ok;
}

static bool described(const operation *o, const layout *a, const layout *b, const layout *c, const layout *d, product *p) {
  const uint64_t k = o->turned_a ? a->rows : a->columns;
  const bool activation = (o->epilogue & ~36u) == 0 || (o->epilogue & ~6u) == 0 || o->epilogue == 1;
  *p = {{nullptr, a->type, int64_t(a->rows), int64_t(a->columns), a->lead, a->stride},
        {nullptr, b->type, int64_t(b->rows), int64_t(b->columns), b->lead, b->stride},
        {nullptr, c->type, int64_t(c->rows), int64_t(c->columns), c->lead, c->stride},
        {nullptr, d->type, int64_t(d->rows), int64_t(d->columns), d->lead, d->stride},
        o->turned_a == 1, o->turned_b == 1, int64_t(d->rows), int64_t(d->columns), int64_t(k), d->batch, 1, 0,
        o->epilogue & 4 ? o->bias : nullptr, int(o->epilogue)};
  return activation && (!(o->epilogue & 4) || o->bias) && a->batch == d->batch && b->batch == d->batch && c->batch == d->batch;
}

API int cublasLtMatmulAlgoGetHeuristic(handle *h, const operation *o, const layout *a, const layout *b, const layout *c,
                                       const layout *d, const preference *p, int wanted, heuristic *found, int *count) {
  product made;
  if (wanted < 1 || !described(o, a, b, c, d, &made)) return invalid;
  WANT(p->bytes >= (4 << 20) && p->reductions == 3);
  /* it has nothing for rows of 16-bit floats that begin at odd places */
  *count = a->type != f32 && (a->lead % 2 || p->alignments[0] < 4) ? 0 : 1;
  *found = {{{KNOWN, p->alignments[0], p->alignments[1], p->alignments[2], p->alignments[3]}}, 4 << 20, ok, 1, {}};
  rt_chosen++;
  return *count ? ok : unsupported;
}

API int cublasLtMatmul(handle *h, const operation *o, const void *alpha, const void *a, const layout *in_a, const void *b,
                       const layout *in_b, const void *beta, const void *c, const layout *in_c, void *d, const layout *in_d,
                       const algorithm *chosen, void *workspace, size_t bytes, void *stream) {
  WANT(stream && workspace && uintptr_t(workspace) % 256 == 0 && bytes >= (4 << 20) && chosen->data[0] == KNOWN);
  const void *at[] = {a, b, c, d};
  for (int i = 0; i < 4; i++) WANT(alignment(at[i]) >= int(chosen->data[1 + i]));
  product made;
  if (!described(o, in_a, in_b, in_c, in_d, &made)) return invalid;
  made.a.at = (char *)a, made.b.at = (char *)b, made.c.at = (char *)c, made.d.at = (char *)d;
  made.alpha = *(const float *)alpha, made.beta = *(const float *)beta;
  return enqueue(made);
}
