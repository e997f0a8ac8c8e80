/* Calls a function of @NAME@ on files of raw arrays in C order:

     @NAME@_main [--weights FILE] [--repeat N] FUNCTION [SYMBOL=VALUE | INPUT=FILE | OUTPUT=FILE]...

   With --repeat it prints the median of the seconds that N further calls take. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "@NAME@.h"

static double now(void) {
  struct timespec t;
  timespec_get(&t, TIME_UTC);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int later(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static int stop(const char *wanted, const char *found) {
  fprintf(stderr, "error: expected %s, got %s\n", wanted, found);
  return 2;
}

static const char *value_of(int count, char **given, const char *name) {
  const size_t length = strlen(name);
  for (int i = 0; i < count; i++)
    if (strncmp(given[i], name, length) == 0 && given[i][length] == '=') return given[i] + length + 1;
  return NULL;
}

static void *read_array(const char *path, size_t bytes) {
  FILE *file = fopen(path, "rb");
  unsigned char *data = malloc(bytes + 1);
  const size_t found = file == NULL || data == NULL ? bytes + 1 : fread(data, 1, bytes + 1, file);
  if (file != NULL) fclose(file);
  if (found == bytes) return data;
  free(data);
  fprintf(stderr, "%s: expected a file of %zu bytes, got another\n", path, bytes);
  return NULL;
}

static int write_array(const char *path, const void *data, size_t bytes) {
  FILE *file = fopen(path, "wb");
  if (file == NULL) return 1;
  const size_t written = fwrite(data, 1, bytes, file);
  return fclose(file) != 0 || written != bytes;
}

static int call(@NAME@ *model, int32_t number, int count, char **given, long repeat) {
  const @NAME@_function *f = &@NAME@_functions[number];
  int64_t symbols[16] = {0};
  const void *inputs[1024] = {NULL};
  void *outputs[1024] = {NULL};
  if (f->symbols > 16 || f->inputs > 1024 || f->outputs > 1024) return stop("a function of fewer arrays", f->name);
  for (int32_t i = 0; i < f->symbols; i++) {
    const char *value = value_of(count, given, f->symbol[i].name);
    if (value == NULL) return stop("SYMBOL=VALUE for each symbol", f->symbol[i].name);
    symbols[i] = strtoll(value, NULL, 10);
  }
  if (@NAME@_reserve(model, number, symbols)) return 1;
  for (int32_t i = 0; i < f->inputs; i++) {
    size_t bytes;
    const char *path = value_of(count, given, f->input[i].name);
    if (path == NULL) return stop("INPUT=FILE for each parameter", f->input[i].name);
    if (@NAME@_input_bytes(model, number, symbols, i, &bytes)) return 1;
    if ((inputs[i] = read_array(path, bytes)) == NULL) return 2;
  }
  for (int32_t o = 0; o < f->outputs; o++) {
    size_t bytes;
    if (@NAME@_output_bytes(model, number, symbols, o, &bytes)) return 1;
    if ((outputs[o] = malloc(bytes + 1)) == NULL) return stop("memory for a result", f->output[o].name);
  }
  if (@NAME@_run(model, number, symbols, inputs, outputs)) return 1;
  double *seconds = repeat > 0 ? malloc((size_t)repeat * sizeof *seconds) : NULL;
  for (long r = 0; seconds != NULL && r < repeat; r++) {
    const double start = now();
    if (@NAME@_run(model, number, symbols, inputs, outputs)) return 1;
    seconds[r] = now() - start;
  }
  if (seconds != NULL) {
    qsort(seconds, (size_t)repeat, sizeof *seconds, later);
    printf("%.9f\n", seconds[repeat / 2]);
  }
  free(seconds);
  for (int32_t o = 0; o < f->outputs; o++) {
    size_t bytes;
    const char *path = value_of(count, given, f->output[o].name);
    if (@NAME@_output_bytes(model, number, symbols, o, &bytes)) return 1;
    if (path != NULL && write_array(path, outputs[o], bytes)) return stop("to write a result", path);
    free(outputs[o]);
  }
  for (int32_t i = 0; i < f->inputs; i++) free((void *)inputs[i]);
  return 0;
}

int main(int count, char **given) {
  @NAME@_options options = {.workspace_bytes = 1};
  long repeat = 0;
  int at = 1;
  for (; at + 1 < count && strncmp(given[at], "--", 2) == 0; at += 2) {
    if (strcmp(given[at], "--weights") == 0) options.weights_file = given[at + 1];
    else if (strcmp(given[at], "--repeat") == 0) repeat = strtol(given[at + 1], NULL, 10);
    else return stop("--weights FILE or --repeat N", given[at]);
  }
  int32_t number = 0;
  while (at < count && number < @COUNT@ && strcmp(@NAME@_functions[number].name, given[at]) != 0) number++;
  if (at >= count || number == @COUNT@) return stop("the name of a function", at < count ? given[at] : "none");
  @NAME@ *model;
  int failed = @NAME@_create(&model, &options);
  if (!failed) failed = call(model, number, count - at - 1, given + at + 1, repeat);
  if (failed == 1) fprintf(stderr, "error: %s\n", @NAME@_error(model));
  @NAME@_destroy(model);
  return failed;
}
