/* An ONNX model of ids and mask, called through ONNX Runtime's C interface; for `c_export.py`.

     onnxruntime_peer MODEL IDS MASK RESULT THREADS REPEAT TOKENS OUT

   IDS, MASK and RESULT are names in the model. It prints the median of the seconds of REPEAT calls after the first, and writes the first result. The package of Python has the
   library without its header, so functions are named by their places in the table `OrtApi`, which only ever grows at its end. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef struct {
  const void *const *(*api)(uint32_t version);
  const char *(*version)(void);
} ApiBase;

const ApiBase *OrtGetApiBase(void);

enum { MESSAGE = 2, CREATE_ENV = 3, CREATE_SESSION = 7, RUN = 9, CREATE_OPTIONS = 10, INTRA_THREADS = 24 };
enum { TENSOR_WITH_DATA = 49, TENSOR_DATA = 51, CPU_MEMORY = 69 };
enum { INT64 = 7, WARNING = 2, ARENA = 1, DEFAULT = 0 };

static const void *const *api;

static void check(void *status) {
  if (status == NULL) return;
  fprintf(stderr, "error: %s\n", ((const char *(*)(const void *))api[MESSAGE])(status));
  exit(1);
}

static double now(void) {
  struct timespec t;
  timespec_get(&t, TIME_UTC);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int later(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

int main(int count, char **given) {
  if (count != 9) return 2;
  const int64_t n = strtoll(given[7], NULL, 10);
  const long repeat = strtol(given[6], NULL, 10);
  api = OrtGetApiBase()->api(17);
  void *env, *options, *session, *memory;
  check(((void *(*)(int, const char *, void **))api[CREATE_ENV])(WARNING, "peer", &env));
  check(((void *(*)(void **))api[CREATE_OPTIONS])(&options));
  check(((void *(*)(void *, int))api[INTRA_THREADS])(options, (int)strtol(given[5], NULL, 10)));
  check(((void *(*)(void *, const char *, const void *, void **))api[CREATE_SESSION])(env, given[1], options, &session));
  check(((void *(*)(int, int, void **))api[CPU_MEMORY])(ARENA, DEFAULT, &memory));
  int64_t *ids = malloc((size_t)n * sizeof *ids), *mask = malloc((size_t)n * sizeof *mask);
  for (int64_t i = 0; i < n; i++) ids[i] = 1000 + i * 7, mask[i] = 1;
  const int64_t shape[] = {1, n};
  void *inputs[2];
  int64_t *arrays[] = {ids, mask};
  for (int i = 0; i < 2; i++)
    check(((void *(*)(void *, void *, size_t, const int64_t *, size_t, int, void **))api[TENSOR_WITH_DATA])(
        memory, arrays[i], (size_t)n * sizeof *ids, shape, 2, INT64, &inputs[i]));
  const char *names[] = {given[2], given[3]}, *results[] = {given[4]};
  double *seconds = malloc((size_t)(repeat + 1) * sizeof *seconds);
  for (long r = 0; r <= repeat; r++) {
    void *result = NULL;
    const double start = now();
    check(((void *(*)(void *, const void *, const char *const *, void *const *, size_t, const char *const *, size_t, void **))
               api[RUN])(session, NULL, names, inputs, 2, results, 1, &result));
    seconds[r] = now() - start;
    if (r > 0) continue;
    void *data;
    check(((void *(*)(void *, void **))api[TENSOR_DATA])(result, &data));
    FILE *file = fopen(given[8], "wb");
    if (file == NULL || fwrite(data, 4, 384, file) != 384 || fclose(file) != 0) return 2;
  }
  qsort(seconds + 1, (size_t)repeat, sizeof *seconds, later);
  if (repeat > 0) printf("%.9f\n", seconds[1 + repeat / 2]);
}
