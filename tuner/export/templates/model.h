/* @TITLE@

   Made by relax-tune @VERSION@ from @ARTIFACT@. C11, usable from C++.
   Functions return 0, or 1 where @NAME@_error says in one sentence what was expected and what was given. */
#ifndef @NAME@_H
#define @NAME@_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A model, used by one thread at a time. Models may share the memory of weights. */
typedef struct @NAME@ @NAME@;

typedef struct {
  const char *weights_file; /* path; NULL: `weights`, or the weights that are linked in */
  const void *weights;      /* contents of that file, aligned to 64 bytes, which outlive the model */
  size_t weights_bytes;
  size_t workspace_bytes; /* memory of calls; 0: enough for every call within the bounds, where all symbols have some */
  int threads; /* of all models of this library, as the first one opened asks; 0: the least of processors, CPU quota, $OMP_NUM_THREADS */
} @NAME@_options;

typedef struct {
  const char *name;
  int64_t lower, upper; /* bounds; upper is 2147483647 where none is declared */
} @NAME@_symbol;

typedef struct {
  const char *name, *type; /* type: float32, int64 ... */
  int32_t rank, item_bytes;
  const char *shape; /* dims over the symbols, in the order in memory, outermost first */
} @NAME@_tensor;

typedef struct {
  const char *name;
  int32_t symbols, inputs, outputs; /* their numbers */
  const @NAME@_symbol *symbol;
  const @NAME@_tensor *input, *output;
} @NAME@_function;

/* The functions, in the order of their numbers. */
enum { @ENUM@ };
extern const @NAME@_function @NAME@_functions[@COUNT@];

/* Open a model, from the file "@NAME@.weights" or the weights linked in where `options` is NULL. On failure `*model` holds only
   its error, and is to be destroyed too. */
int @NAME@_create(@NAME@ **model, const @NAME@_options *options);

/* Enlarge the memory of calls, outside of a call, so that one with these values of the symbols fits. */
int @NAME@_reserve(@NAME@ *model, int32_t function, const int64_t *symbols);

/* Ask the dims, or the bytes, of a result under these values of the symbols. */
int @NAME@_output_dims(@NAME@ *model, int32_t function, const int64_t *symbols, int32_t output, int64_t *dims);
int @NAME@_output_bytes(@NAME@ *model, int32_t function, const int64_t *symbols, int32_t output, size_t *bytes);

/* Ask the bytes of an argument. */
int @NAME@_input_bytes(@NAME@ *model, int32_t function, const int64_t *symbols, int32_t input, size_t *bytes);

/* Call a function: arrays in C order, which do not overlap. Nothing is allocated. */
int @NAME@_run(@NAME@ *model, int32_t function, const int64_t *symbols, const void *const *inputs, void *const *outputs);

/* Why the last call failed; of NULL, why a model could not be made. */
const char *@NAME@_error(const @NAME@ *model);

void @NAME@_destroy(@NAME@ *model);

@CALLS@
#ifdef __cplusplus
}
#endif
#endif
