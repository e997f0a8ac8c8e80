/* Made by relax-tune @VERSION@: kernels of @NAME@. */
/* Generated text declares registers that a shape leaves unused, and vectors wider than the processor's. */
#pragma GCC diagnostic ignored "-Wunused-variable"
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wunknown-pragmas"
#pragma GCC diagnostic ignored "-Wpsabi"
#if !defined(__clang__) /* sums whose loop runs at least once, which gcc does not see */
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#if defined(__clang__) && defined(__x86_64__)
/* Kernels name gcc's builtins for these, which clang lacks; without them they use vectors that both compile. */
#undef __AVX512F__
#undef __AVX512VL__
#undef __AVX512BW__
#endif
#include "@NAME@_internal.h"

#if defined(@NAME@_TEAM)
#pragma GCC visibility push(hidden)
void @NAME@_team_run(void (*)(const void *, __INT64_TYPE__, __INT64_TYPE__), const void *, __INT64_TYPE__, int);
#pragma GCC visibility pop
#define RT_PARALLEL_FOR(part, data, count, uneven, pays) \
  ((pays) ? @NAME@_team_run(part, data, count, uneven) : part(data, 0, count))
#endif
