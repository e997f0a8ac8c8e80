/* CUDA's words for a C++ compiler of the processor: what generated kernels say, done by fibres.

   The threads of a block are fibres, each run until it waits or ends. When all of them wait at the same line, they go on; when
   some wait and others have ended, or wait elsewhere, the launch fails and says so. They run in the order of their numbers or in
   the opposite one, so that what lacks a barrier reads what another thread has not written yet, or has written over. */
#pragma once
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
/* blocks run one after the other, each on arrays full of NaN */
#define __shared__ static __attribute__((section("rt_tiles")))
#define __syncthreads() rt_wait(__LINE__)

struct rt_index { unsigned x, y, z; };
static rt_index threadIdx, blockIdx, blockDim, gridDim;
/* what launches ask for */
__attribute__((visibility("hidden"), aligned(16))) unsigned char rt_shared[228 << 10];
extern "C" __attribute__((weak, visibility("hidden"))) char __start_rt_tiles[], __stop_rt_tiles[];

static inline int __float_as_int(float a) { int r; memcpy(&r, &a, sizeof r); return r; }
static inline float __int_as_float(int a) { float r; memcpy(&r, &a, sizeof r); return r; }
static inline long long __double_as_longlong(double a) { long long r; memcpy(&r, &a, sizeof r); return r; }
static inline double __longlong_as_double(long long a) { double r; memcpy(&r, &a, sizeof r); return r; }
static inline float rsqrtf(float a) { return 1 / sqrtf(a); }
static inline double rsqrt(double a) { return 1 / sqrt(a); }

enum rt_state { rt_ready, rt_waiting, rt_ended };
struct rt_fibre { ucontext_t context; rt_index at; rt_state state; int line; };
static const size_t rt_stack_bytes = 256 << 10;
static rt_fibre *rt_fibres;
static char *rt_stacks;
static size_t rt_count, rt_room;
static ucontext_t rt_scheduler;
static rt_fibre *rt_current;
static void (*rt_body)(const char *);
static const char *rt_arguments;

static __attribute__((noinline)) void rt_wait(int line) {
  rt_current->state = rt_waiting;
  rt_current->line = line;
  swapcontext(&rt_current->context, &rt_scheduler);
}
static void rt_enter() {
  rt_body(rt_arguments);
  rt_current->state = rt_ended;
  swapcontext(&rt_current->context, &rt_scheduler);
}

/* Runs the threads of one block; what went wrong, or nothing. */
static const char *rt_block(bool backwards) {
  static char message[200];
  const size_t count = rt_count;
  for (size_t k = 0; k < count; k++) {
    rt_fibre &f = rt_fibres[k];
    f.state = rt_ready;
    f.at = {unsigned(k % blockDim.x), unsigned(k / blockDim.x % blockDim.y), unsigned(k / blockDim.x / blockDim.y)};
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = rt_stacks + k * rt_stack_bytes;
    f.context.uc_stack.ss_size = rt_stack_bytes;
    f.context.uc_link = nullptr;
    makecontext(&f.context, rt_enter, 0);
  }
  for (;;) {
    size_t ended = 0;
    int line = 0;
    for (size_t k = 0; k < count; k++) {
      rt_fibre &f = rt_fibres[backwards ? count - 1 - k : k];
      if (f.state == rt_ready) {
        rt_current = &f;
        threadIdx = f.at;
        swapcontext(&rt_scheduler, &f.context);
      }
      if (f.state == rt_ended) { ended++; continue; }
      if (line && line != f.line) {
        snprintf(message, sizeof message, "threads of a block wait at different barriers, in lines %d and %d", line, f.line);
        return message;
      }
      line = f.line;
    }
    if (ended == count) return nullptr;
    if (ended) {
      snprintf(message, sizeof message, "a barrier in line %d that %zu of %zu threads never reach", line, ended, count);
      return message;
    }
    for (size_t k = 0; k < count; k++) rt_fibres[k].state = rt_ready;
  }
}

/* A launch: every argument takes eight bytes. */
template <bool waits, class... P, size_t... I>
static const char *rt_launch(void (*)(P...), void (*body)(const char *), const char *arguments, const unsigned *grid,
                             const unsigned *block, int backwards, std::index_sequence<I...>) {
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block[0], block[1], block[2]};
  rt_body = body;
  rt_arguments = arguments;
  const size_t threads = size_t(block[0]) * block[1] * block[2], blocks = size_t(grid[0]) * grid[1] * grid[2];
  if (waits) {
    rt_count = threads;
    if (rt_room < threads) {
      rt_room = threads;
      free(rt_fibres), free(rt_stacks);
      rt_fibres = (rt_fibre *)malloc(threads * sizeof(rt_fibre));
      rt_stacks = (char *)malloc(threads * rt_stack_bytes);
    }
  }
  for (size_t b = 0; b < blocks; b++) {
    const size_t n = backwards ? blocks - 1 - b : b;
    blockIdx = {unsigned(n % grid[0]), unsigned(n / grid[0] % grid[1]), unsigned(n / grid[0] / grid[1])};
    memset(rt_shared, 0xFF, sizeof rt_shared);
    if (__start_rt_tiles) memset(__start_rt_tiles, 0xFF, __stop_rt_tiles - __start_rt_tiles);
    if (waits) {
      if (const char *wrong = rt_block(backwards)) return wrong;
      continue;
    }
    for (size_t k = 0; k < threads; k++) {
      const size_t t = backwards ? threads - 1 - k : k;
      threadIdx = {unsigned(t % block[0]), unsigned(t / block[0] % block[1]), unsigned(t / block[0] / block[1])};
      body(arguments);
    }
  }
  return nullptr;
}

template <class T> static inline T rt_argument(const char *arguments, size_t at) {
  static_assert(sizeof(T) == 8, "pointers and 64-bit integers");
  T value;
  memcpy(&value, arguments + 8 * at, 8);
  return value;
}
template <auto kernel, class S> struct rt_call;
template <auto kernel, class... P, size_t... I> struct rt_call<kernel, std::pair<void (*)(P...), std::index_sequence<I...>>> {
  static void body(const char *arguments) { kernel(rt_argument<P>(arguments, I)...); }
};
template <class... P> constexpr std::index_sequence_for<P...> rt_places(void (*)(P...)) { return {}; }

#define RT_EMULATED(kernel, waits)                                                                                            \
  extern "C" __attribute__((visibility("default"))) const char *rt_run_##kernel(                                              \
      const char *arguments, const unsigned *grid, const unsigned *block, int backwards) {                                    \
    typedef decltype(rt_places(&kernel)) places;                                                                              \
    return rt_launch<waits>(&kernel, rt_call<&kernel, std::pair<decltype(&kernel), places>>::body, arguments, grid, block,    \
                            backwards, places());                                                                             \
  }
