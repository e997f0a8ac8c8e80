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

