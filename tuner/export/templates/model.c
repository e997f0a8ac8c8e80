/* Made by relax-tune @VERSION@ from @ARTIFACT@: plans, memory and calls of a model. */
#if defined(__unix__) && !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L
#endif

#include "@NAME@.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if (defined(__unix__) || defined(__APPLE__)) && !defined(__wasm__)
#define MAPS_FILES 1
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#else
#define MAPS_FILES 0
#endif

#include "@NAME@_internal.h"

enum { ALIGNMENT = 64, HEADER = 64, MOST_VALUES = @MOST_VALUES@ };
static const size_t WEIGHTS_BYTES = @WEIGHTS_BYTES@;
static const size_t PACKED_BYTES = @PACKED_BYTES@;
/* Enough for every call within the bounds; 0 where a symbol has none. */
static const uint64_t WORKSPACE_BYTES = UINT64_C(@WORKSPACE_BYTES@);
static const unsigned char IDENTITY[32] = {@IDENTITY@};

struct @NAME@ {
  unsigned char *packed; /* packed weights */
  unsigned char *workspace; /* of calls */
  size_t workspace_bytes;
  const unsigned char *weights;
  unsigned char *own_weights; /* memory to free or unmap */
  int ready;
  int64_t values[MOST_VALUES];
  char error[512];
};

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static int fail(@NAME@ *m, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(m->error, sizeof m->error, format, arguments);
  va_end(arguments);
  return 1;
}

@PLANS@
struct function {
  int32_t (*evaluate)(const int64_t *symbols, int64_t *values);
  int (*call)(@NAME@ *m, const int64_t *v, const void *const *in, void *const *out);
  const int32_t *dims;  /* places of values: dims of inputs, then of outputs */
  const int32_t *bytes; /* of inputs, then of outputs */
  const int32_t *kept;  /* of each input the output that may lie in its memory, or -1 */
  int32_t workspace;
};

@FUNCTIONS@
static int known(@NAME@ *m, int32_t function) {
  if (m == NULL) return 0;
  m->error[0] = 0;
  if (function >= 0 && function < @COUNT@) return 1;
  fail(m, "expected the number of a function, below @COUNT@, got %" PRId32, function);
  return 0;
}

/* Check the symbols and compute everything that depends on them. */
static int bind(@NAME@ *m, int32_t function, const int64_t *symbols) {
  const @NAME@_function *f = &@NAME@_functions[function];
  for (int32_t i = 0; i < f->symbols; i++) {
    const @NAME@_symbol *s = &f->symbol[i];
    if (symbols[i] < s->lower)
      return fail(m, "%s: expected %s >= %" PRId64 ", got %" PRId64 "; pad the input, or build for smaller ones", f->name,
                  s->name, s->lower, symbols[i]);
    if (symbols[i] > s->upper)
      return fail(m, "%s: expected %s <= %" PRId64 ", got %" PRId64 "; give a smaller input, or build for larger ones",
                  f->name, s->name, s->upper, symbols[i]);
  }
  if (implementations[function].evaluate(symbols, m->values))
    return fail(m, "%s: expected sizes of at least 0 and within 64 bits, got others; give other shapes", f->name);
  return 0;
}

int @NAME@_output_dims(@NAME@ *m, int32_t function, const int64_t *symbols, int32_t output, int64_t *dims) {
  if (!known(m, function) || bind(m, function, symbols)) return 1;
  const @NAME@_function *f = &@NAME@_functions[function];
  if (output < 0 || output >= f->outputs)
    return fail(m, "%s: expected an output below %" PRId32 ", got %" PRId32, f->name, f->outputs, output);
  const int32_t *at = implementations[function].dims;
  for (int32_t i = 0; i < f->inputs; i++) at += f->input[i].rank;
  for (int32_t i = 0; i < output; i++) at += f->output[i].rank;
  for (int32_t d = 0; d < f->output[output].rank; d++) dims[d] = m->values[at[d]];
  return 0;
}

static int array_bytes(@NAME@ *m, int32_t function, const int64_t *symbols, int32_t array, int32_t first, int32_t count, size_t *bytes) {
  if (array < 0 || array >= count)
    return fail(m, "%s: expected an array below %" PRId32 ", got %" PRId32, @NAME@_functions[function].name, count, array);
  if (bind(m, function, symbols)) return 1;
  *bytes = (size_t)m->values[implementations[function].bytes[first + array]];
  return 0;
}

int @NAME@_output_bytes(@NAME@ *m, int32_t function, const int64_t *symbols, int32_t output, size_t *bytes) {
  if (!known(m, function)) return 1;
  const @NAME@_function *f = &@NAME@_functions[function];
  return array_bytes(m, function, symbols, output, f->inputs, f->outputs, bytes);
}

int @NAME@_input_bytes(@NAME@ *m, int32_t function, const int64_t *symbols, int32_t input, size_t *bytes) {
  if (!known(m, function)) return 1;
  return array_bytes(m, function, symbols, input, 0, @NAME@_functions[function].inputs, bytes);
}

static int overlap(const void *a, int64_t a_bytes, const void *b, int64_t b_bytes) {
  const uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
  return a_bytes > 0 && b_bytes > 0 && x < y + (uintptr_t)b_bytes && y < x + (uintptr_t)a_bytes;
}

static int check_arrays(@NAME@ *m, int32_t function, const void *const *in, void *const *out) {
  const @NAME@_function *f = &@NAME@_functions[function];
  const int32_t *bytes = implementations[function].bytes, *kept = implementations[function].kept;
  for (int32_t i = 0; i < f->inputs; i++)
    if (in[i] == NULL && m->values[bytes[i]] > 0)
      return fail(m, "%s: parameter %s: expected an array, got NULL", f->name, f->input[i].name);
  for (int32_t o = 0; o < f->outputs; o++) {
    const int64_t size = m->values[bytes[f->inputs + o]];
    if (out[o] == NULL && size > 0)
      return fail(m, "%s: result %s: expected memory for it, got NULL", f->name, f->output[o].name);
    for (int32_t i = 0; i < f->inputs; i++)
      if (overlap(out[o], size, in[i], m->values[bytes[i]]) && !(kept[i] == o && out[o] == in[i]))
        return fail(m, "%s: result %s: expected separate memory, but parameter %s lies in it", f->name,
                    f->output[o].name, f->input[i].name);
    for (int32_t p = 0; p < o; p++)
      if (overlap(out[o], size, out[p], m->values[bytes[f->inputs + p]]))
        return fail(m, "%s: result %s: expected separate memory, but result %s lies in it", f->name,
                    f->output[o].name, f->output[p].name);
  }
  return 0;
}

int @NAME@_run(@NAME@ *m, int32_t function, const int64_t *symbols, const void *const *in, void *const *out) {
  if (!known(m, function)) return 1;
  const struct function *i = &implementations[function];
  if (!m->ready) return fail(m, "expected a model that is open, got one whose opening failed");
  if (bind(m, function, symbols) || check_arrays(m, function, in, out)) return 1;
  if ((uint64_t)m->values[i->workspace] > m->workspace_bytes)
    return fail(m, "%s: expected %" PRId64 " bytes of workspace, got %zu; call @NAME@_reserve with these symbols first",
                @NAME@_functions[function].name, m->values[i->workspace], m->workspace_bytes);
  return i->call(m, m->values, in, out);
}

/* Take a number of bytes, rounded up; NULL for none. */
static int take(@NAME@ *m, unsigned char **place, uint64_t wanted, const char *what) {
  *place = NULL;
  if (wanted > SIZE_MAX / 2 - ALIGNMENT) return fail(m, "expected %" PRIu64 " bytes for %s, got no such memory", wanted, what);
  const size_t bytes = ((size_t)wanted + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  if (bytes == 0) return 0;
  *place = aligned_alloc(ALIGNMENT, bytes);
  return *place != NULL ? 0 : fail(m, "expected %zu bytes for %s, got too little memory; declare smaller bounds", bytes, what);
}

/* Replace the workspace by a larger one. Where there is no memory for it, calls ask for a workspace again. */
static int grow(@NAME@ *m, uint64_t wanted) {
  free(m->workspace);
  m->workspace_bytes = 0;
  if (take(m, &m->workspace, wanted, "calls")) return 1;
  m->workspace_bytes = (size_t)wanted;
  return 0;
}

int @NAME@_reserve(@NAME@ *m, int32_t function, const int64_t *symbols) {
  if (!known(m, function) || bind(m, function, symbols)) return 1;
  const uint64_t wanted = (uint64_t)m->values[implementations[function].workspace];
  return wanted <= m->workspace_bytes ? 0 : grow(m, wanted);
}

static int check_weights(@NAME@ *m, const char *where, const unsigned char *data, uint64_t bytes) {
  if (bytes >= HEADER && memcmp(data, "RTWEIGHT", 8) != 0)
    return fail(m, "%s: expected weights of @NAME@, got another kind of file", where);
  if (bytes >= HEADER && memcmp(data + 16, IDENTITY, sizeof IDENTITY) != 0)
    return fail(m, "%s: expected the weights exported with this code, got those of another model", where);
  if (bytes != WEIGHTS_BYTES)
    return fail(m, "%s: expected %zu bytes of weights, got %" PRIu64 "; copy the file again", where, WEIGHTS_BYTES, bytes);
  if ((uintptr_t)data % ALIGNMENT != 0) return fail(m, "%s: expected weights aligned to %d bytes, got others", where, ALIGNMENT);
  m->weights = data;
  return 0;
}

#if MAPS_FILES
static int open_weights(@NAME@ *m, const char *path) {
  struct stat found;
  const int file = open(path, O_RDONLY);
  if (file < 0) return fail(m, "%s: expected the file of weights, got none that can be read", path);
  if (fstat(file, &found) != 0 || !S_ISREG(found.st_mode)) {
    close(file);
    return fail(m, "%s: expected the file of weights, got another kind of thing", path);
  }
  if ((uint64_t)found.st_size != WEIGHTS_BYTES) {
    close(file);
    return fail(m, "%s: expected %zu bytes of weights, got %" PRId64 "; copy the file again", path, WEIGHTS_BYTES, (int64_t)found.st_size);
  }
  void *mapped = mmap(NULL, WEIGHTS_BYTES, PROT_READ, MAP_PRIVATE, file, 0);
  close(file);
  if (mapped == MAP_FAILED) return fail(m, "%s: expected it in memory, got too little", path);
  m->own_weights = mapped;
  return check_weights(m, path, mapped, WEIGHTS_BYTES);
}

static void close_weights(@NAME@ *m) {
  if (m->own_weights != NULL) munmap(m->own_weights, WEIGHTS_BYTES);
}
#else
static int open_weights(@NAME@ *m, const char *path) {
  FILE *file = fopen(path, "rb");
  if (file == NULL) return fail(m, "%s: expected the file of weights, got none that can be read", path);
  m->own_weights = aligned_alloc(ALIGNMENT, (WEIGHTS_BYTES + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
  if (m->own_weights == NULL) {
    fclose(file);
    return fail(m, "%s: expected %zu bytes of memory, got too little", path, WEIGHTS_BYTES);
  }
  size_t found = fread(m->own_weights, 1, WEIGHTS_BYTES, file);
  if (found == WEIGHTS_BYTES && fgetc(file) != EOF) found++;
  fclose(file);
  return check_weights(m, path, m->own_weights, found);
}

static void close_weights(@NAME@ *m) { free(m->own_weights); }
#endif

#ifdef @NAME@_LINKED_WEIGHTS
extern const unsigned char @NAME@_weights[];
extern const unsigned char @NAME@_weights_end[];
#endif

static int find_weights(@NAME@ *m, const @NAME@_options *options) {
  if (options != NULL && options->weights_file != NULL) return open_weights(m, options->weights_file);
  if (options != NULL && options->weights != NULL)
    return check_weights(m, "options.weights", options->weights, options->weights_bytes);
#ifdef @NAME@_LINKED_WEIGHTS
  return check_weights(m, "linked weights", @NAME@_weights, (uint64_t)(@NAME@_weights_end - @NAME@_weights));
#else
  return open_weights(m, "@NAME@.weights");
#endif
}

#if defined(@NAME@_TEAM) && !defined(__wasm__)
__attribute__((visibility("hidden"))) int @NAME@_team_start(int threads);
#endif

int @NAME@_create(@NAME@ **model, const @NAME@_options *options) {
  struct @NAME@ *m = *model = calloc(1, sizeof *m); /* the model may be named `model` */
  if (m == NULL || find_weights(m, options)) return 1;
  const uint64_t wanted = options == NULL ? 0 : options->workspace_bytes;
  if (take(m, &m->packed, PACKED_BYTES, "packed weights") || grow(m, wanted == 0 ? WORKSPACE_BYTES : wanted)) return 1;
#if defined(@NAME@_TEAM) && !defined(__wasm__)
  @NAME@_team_start(options == NULL ? 0 : options->threads);
#endif
  prepare(m->weights, m->packed);
  m->ready = 1;
  return 0;
}

const char *@NAME@_error(const @NAME@ *m) { return m == NULL ? "expected memory for a model, got none" : m->error; }

void @NAME@_destroy(@NAME@ *m) {
  if (m == NULL) return;
  close_weights(m);
  free(m->packed);
  free(m->workspace);
  free(m);
}
