/* CUDA's words for a C++ compiler of the processor: what generated kernels say, done by fibres.

   The threads of a block are fibres, each run until it waits or ends. When all of them wait at the same line, they go on; when
   some wait and others have ended, or wait elsewhere, the launch fails and says so. So it is with the threads of a warp that
   exchange values: then each has what the other one of its pair offered. They run in the order of their numbers or in
   the opposite one, so that what lacks a barrier reads what another thread has not written yet, or has written over. */
#pragma once
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
/* blocks run one after the other, each on arrays full of NaN */
#define __shared__ static __attribute__((section("rt_tiles")))
#define __syncthreads() rt_wait(rt_waiting, __LINE__)
#define __shfl_xor_sync(mask, value, other) rt_exchange(__LINE__, mask, value, other)

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

/* Integers that the text says fit 32 bits: what is computed with them is watched, and those of 64 bits are as ever. */
#ifndef RT_WIDE
#define RT_TYPE_IDX
static long long rt_largest;
struct idx {
  long long v;
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>> __forceinline__ idx(T x) : v((long long)x) {
    if (v > rt_largest) rt_largest = v;
    if (-v > rt_largest) rt_largest = -v;
  }
  __forceinline__ operator long long() const { return v; }
  __forceinline__ idx operator-() const { return -v; }
  __forceinline__ idx operator++(int) { const idx old = *this; *this = v + 1; return old; }
};
#define RT_WATCHED(op)                                                                                                        \
  static __forceinline__ idx operator op(idx a, idx b) { return a.v op b.v; }                                                 \
  template <class T, class = std::enable_if_t<std::is_integral_v<T> && sizeof(T) < 8>>                                        \
  static __forceinline__ idx operator op(idx a, T b) { return a.v op (long long)b; }                                          \
  template <class T, class = std::enable_if_t<std::is_integral_v<T> && sizeof(T) < 8>>                                        \
  static __forceinline__ idx operator op(T a, idx b) { return (long long)a op b.v; }                                          \
  template <class T, class = std::enable_if_t<std::is_integral_v<T> && sizeof(T) == 8>>                                       \
  static __forceinline__ T operator op(idx a, T b) { return (T)a.v op b; }                                                    \
  template <class T, class = std::enable_if_t<std::is_integral_v<T> && sizeof(T) == 8>>                                       \
  static __forceinline__ T operator op(T a, idx b) { return a op (T)b.v; }
RT_WATCHED(+) RT_WATCHED(-) RT_WATCHED(*) RT_WATCHED(/) RT_WATCHED(%)
#endif

enum rt_state { rt_ready, rt_waiting, rt_exchanging, rt_meeting, rt_ended };
struct rt_fibre { ucontext_t context; rt_index at; rt_state state; int line; unsigned other; char offered[8], given[8]; const void *shown; };
static const size_t rt_warp = 32, rt_warpgroup = 128;
static const size_t rt_stack_bytes = 2 << 20;
static rt_fibre *rt_fibres;
static char *rt_stacks;
static size_t rt_count, rt_room;
static ucontext_t rt_scheduler;
static rt_fibre *rt_current;
static void (*rt_body)(const char *);
static const char *rt_arguments;

static __attribute__((noinline)) void rt_wait(rt_state how, int line) {
  rt_current->state = how;
  rt_current->line = line;
  swapcontext(&rt_current->context, &rt_scheduler);
}
template <class T> static T rt_exchange(int line, unsigned mask, T value, unsigned other) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "what the machine exchanges");
  if (mask != 0xffffffffu) abort();
  rt_current->other = other;
  memcpy(rt_current->offered, &value, sizeof value);
  rt_wait(rt_exchanging, line);
  memcpy(&value, rt_current->given, sizeof value);
  return value;
}
/* What a warp does with its registers at once, spread over them as the PTX ISA says; each thread shows the others what it has. */
#define RT_WARPS
static rt_fibre *rt_show(int line, const void *what) {
  rt_current->shown = what, rt_current->other = 0;
  rt_wait(rt_exchanging, line);
  return rt_fibres + (rt_current - rt_fibres) / rt_warp * rt_warp;
}
static bool rt_is_shared(const void *p) {
  const char *const at = (const char *)p;
  return (at >= __start_rt_tiles && at < __stop_rt_tiles) || (at >= (char *)rt_shared && at < (char *)(&rt_shared + 1));
}
template <int count, bool transposed> static void rt_matrices(unsigned *r, const unsigned short *row) {
  const rt_fibre *const warp = rt_show(__LINE__, row);
  const int lane = rt_current - warp;
  if (lane < 8 * count && (!rt_is_shared(row) || (size_t)row % 16)) abort();
  for (int q = 0; q < count; q++) {
    unsigned short pair[2];
    for (int h = 0; h < 2; h++) {
      const int y = transposed ? lane % 4 * 2 + h : lane / 4, x = transposed ? lane / 4 : lane % 4 * 2 + h;
      pair[h] = ((const unsigned short *)warp[8 * q + y].shown)[x];
    }
    memcpy(r + q, pair, sizeof pair);
  }
  rt_show(__LINE__, rt_current->shown); /* all have looked */
}
struct rt_operands { unsigned a[4], b[2]; };
template <float (*value)(unsigned short)> static void rt_grow(float *c, long long r, const unsigned *a, const unsigned *b) {
  const rt_operands mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  const rt_fibre *const warp = rt_show(__LINE__, &mine);
  const int lane = rt_current - warp;
  float sums[4];
  for (int e = 0; e < 4; e++) {
    const int y = lane / 4 + e / 2 * 8, x = lane % 4 * 2 + e % 2;
    sums[e] = c[e / 2 * r + e % 2];
    for (int k = 0; k < 16; k++) {
      const unsigned left = ((const rt_operands *)warp[y % 8 * 4 + k % 8 / 2].shown)->a[y / 8 + k / 8 * 2];
      const unsigned right = ((const rt_operands *)warp[x * 4 + k % 8 / 2].shown)->b[k / 8];
      sums[e] += value(left >> k % 2 * 16) * value(right >> k % 2 * 16);
    }
  }
  rt_show(__LINE__, rt_current->shown); /* all have looked */
  for (int e = 0; e < 4; e++) c[e / 2 * r + e % 2] = sums[e];
}
static float rt_value_f16(unsigned short h) {
  const int exponent = h >> 10 & 31, fraction = h & 1023;
  const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                                    : exponent ? ldexpf(1024 + fraction, exponent - 25) : ldexpf(fraction, -24);
  return h >> 15 ? -size : size;
}
static float rt_value_bf16(unsigned short h) { return __int_as_float((int)h << 16); }
static void rt_grow_f16(float *c, long long r, const unsigned *a, const unsigned *b) { rt_grow<rt_value_f16>(c, r, a, b); }
static void rt_grow_bf16(float *c, long long r, const unsigned *a, const unsigned *b) { rt_grow<rt_value_bf16>(c, r, a, b); }
/* Copies that arrive as late as they may, when a thread waits for them; where threads run backwards, as early: at once. */
struct rt_late { char *to; const char *from; size_t bytes, room; };
struct rt_lots { std::vector<rt_late> copies; std::vector<size_t> ends; };
static std::vector<rt_lots> rt_on_their_way;
static bool rt_early;
static void rt_arrive(rt_lots &lots, size_t count) {
  for (size_t k = 0; k < count; k++) {
    const rt_late &c = lots.copies[k];
    memcpy(c.to, c.from, c.bytes);
    memset(c.to + c.bytes, 0, c.room - c.bytes);
  }
  lots.copies.erase(lots.copies.begin(), lots.copies.begin() + count);
  for (size_t &end : lots.ends) end = end > count ? end - count : 0;
}
static rt_lots &rt_own_lots() { return rt_on_their_way[rt_current - rt_fibres]; }
template <int N, class T> static void rt_copy(T *to, const T *from, int count) {
  if (count < 0 || count > N || (size_t)to % (N * sizeof(T)) || (size_t)from % (N * sizeof(T))) abort();
  rt_lots &lots = rt_own_lots();
  lots.copies.push_back({(char *)to, (const char *)from, count * sizeof(T), N * sizeof(T)});
  if (rt_early) rt_arrive(lots, lots.copies.size());
}
static void rt_sent() { rt_own_lots().ends.push_back(rt_own_lots().copies.size()); }
/* What four warps do together, by themselves: as late as they may, or at once where threads run backwards. Matrices are where descriptors
   say, in a window of 256 KB. NaN comes of what is not there, of copies that have arrived and their threads have not shown, and of products
   that nobody said begin. */
struct rt_product { void (*add)(const rt_product &); float *c; long long r, j; unsigned long long a, b; };
struct rt_works { bool begun = false, hidden = false; std::vector<rt_product> waiting; };
static std::vector<rt_works> rt_working;
static rt_works &rt_own_works() { return rt_working[rt_current - rt_fibres]; }
static const char *rt_window;
static unsigned __cvta_generic_to_shared(const void *p) {
  if (!rt_window) rt_window = (const char *)p - (100 << 10);
  const size_t at = (const char *)p - rt_window;
  if (!rt_is_shared(p) || (size_t)p % 16 || at >= 256 << 10) abort();
  return at;
}
static void rt_meet(int line, unsigned long long a, unsigned long long b) {
  const unsigned long long mine[] = {a, b};
  rt_current->shown = mine;
  rt_wait(rt_meeting, line);
  if (memcmp(rt_fibres[(rt_current - rt_fibres) / rt_warpgroup * rt_warpgroup].shown, mine, sizeof mine)) abort(); /* all say the same */
  rt_wait(rt_meeting, line);
}
template <float (*value)(unsigned short)> static float rt_element(unsigned long long described, bool beside, int other, int step) {
  const size_t at = (described & 0x3fff) << 4, steps = (described >> 16 & 0x3fff) << 4, others = (described >> 32 & 0x3fff) << 4;
  const int row = beside ? step % 8 : other % 8, place = beside ? other % 8 : step % 8;
  const char *const p = rt_window + at + step / 8 * steps + other / 8 * others + row * 16 + place * 2;
  const bool plain = !(described >> 46); /* no offset of patterns, no swizzling */
  return plain && rt_is_shared(p) ? value(*(const unsigned short *)p) : NAN;
}
template <float (*value)(unsigned short), int n, int transposed, int flat> static void rt_multiply(const rt_product &p) {
  const int lane = (rt_current - rt_fibres) % rt_warpgroup;
  bool there = rt_own_works().begun;
  for (const rt_works &works : rt_working) there = there && !works.hidden;
  for (int j = 0; j < n; j++)
    for (int e = 0; e < 4; e++) {
      const int row = lane / 32 * 16 + e / 2 * 8 + lane % 32 / 4, column = j * 8 + lane % 4 * 2 + e % 2;
      for (int k = 0; k < 16; k++)
        p.c[j * p.j + e / 2 * p.r + e % 2] += there ? rt_element<value>(p.a, transposed, row, k) * rt_element<value>(p.b, flat, column, k) : NAN;
    }
}
template <float (*value)(unsigned short), int n, int transposed, int flat> struct rt_multiply_any {
  static void add(float *c, long long r, long long j, unsigned long long a, unsigned long long b) {
    rt_works &works = rt_own_works();
    works.waiting.push_back({rt_multiply<value, n, transposed, flat>, c, r, j, a, b});
    if (rt_early) rt_multiply<value, n, transposed, flat>(works.waiting.back()), works.waiting.clear();
    rt_meet(__LINE__, a, b);
  }
};
template <int n, int transposed, int flat> using rt_multiply_f16 = rt_multiply_any<rt_value_f16, n, transposed, flat>;
template <int n, int transposed, int flat> using rt_multiply_bf16 = rt_multiply_any<rt_value_bf16, n, transposed, flat>;
template <int n> static void rt_pin(float *, long long, long long) {}
static void rt_begin_products() { rt_own_works().begun = true; }
static void rt_end_products() {
  rt_works &works = rt_own_works();
  for (const rt_product &p : works.waiting) p.add(p);
  works.waiting.clear(), works.begun = false;
  rt_meet(__LINE__, 0, 0);
}
static void rt_proxy_fence() { rt_own_works().hidden = false; }
template <int most> static void rt_arrived() {
  rt_lots &lots = rt_own_lots();
  rt_own_works().hidden = true;
  if (!most) rt_arrive(lots, lots.copies.size()), lots.ends.clear();
  else if (lots.ends.size() > most) {
    const size_t gone = lots.ends.size() - most;
    rt_arrive(lots, lots.ends[gone - 1]);
    lots.ends.erase(lots.ends.begin(), lots.ends.begin() + gone);
  }
}
static void rt_enter() {
  rt_body(rt_arguments);
  rt_current->state = rt_ended;
  swapcontext(&rt_current->context, &rt_scheduler);
}

static char rt_message[200];
/* Runs the threads of one warp until none can go on, those that exchange values as soon as all of them do; what went wrong, or nothing.
   Other warps have not moved meanwhile, so that what lacks a barrier between warps shows. */
static const char *rt_run(size_t first, bool backwards) {
  rt_fibre *const warp = rt_fibres + first;
  const size_t size = rt_count - first < rt_warp ? rt_count - first : rt_warp;
  for (;;) {
    size_t there = 0;
    const rt_fibre *one = nullptr;
    for (size_t k = 0; k < size; k++) {
      rt_fibre &f = warp[backwards ? size - 1 - k : k];
      if (f.state == rt_ready) {
        rt_current = &f;
        threadIdx = f.at;
        swapcontext(&rt_scheduler, &f.context);
      }
      if (f.state == rt_exchanging) one = one ? one : &f, there += f.line == one->line && f.other == one->other;
    }
    if (!one) return nullptr;
    if (there != rt_warp) {
      snprintf(rt_message, sizeof rt_message, "an exchange in line %d that %zu of %zu threads of a warp never reach", one->line,
               rt_warp - there, rt_warp);
      return rt_message;
    }
    for (size_t k = 0; k < rt_warp; k++) memcpy(warp[k].given, warp[k ^ one->other].offered, sizeof warp[k].given);
    for (size_t k = 0; k < rt_warp; k++) warp[k].state = rt_ready;
  }
}

/* Runs the threads of one block; what went wrong, or nothing. */
static const char *rt_block(bool backwards) {
  char *const message = rt_message;
  const size_t count = rt_count;
  rt_on_their_way.assign(count, rt_lots());
  rt_working.assign(count, rt_works());
  rt_early = backwards;
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
    const size_t warps = (count + rt_warp - 1) / rt_warp;
    for (size_t w = 0; w < warps; w++)
      if (const char *wrong = rt_run((backwards ? warps - 1 - w : w) * rt_warp, backwards)) return wrong;
    bool met = false;
    for (size_t first = 0; first < count; first += rt_warpgroup) {
      const rt_fibre *one = nullptr;
      size_t there = 0;
      for (size_t k = first; k < count && k < first + rt_warpgroup; k++)
        if (rt_fibres[k].state == rt_meeting) one = one ? one : rt_fibres + k, there += rt_fibres[k].line == one->line;
      if (one && there != rt_warpgroup) {
        snprintf(message, sizeof rt_message, "a product of four warps in line %d that %zu of %zu threads never reach", one->line,
                 rt_warpgroup - there, rt_warpgroup);
        return message;
      }
      for (size_t k = first; one && k < first + rt_warpgroup; k++) rt_fibres[k].state = rt_ready;
      met = met || one;
    }
    if (met) continue;
    for (size_t k = 0; k < count; k++) {
      const rt_fibre &f = rt_fibres[k];
      if (f.state == rt_ended) { ended++; continue; }
      if (line && line != f.line) {
        snprintf(message, sizeof rt_message, "threads of a block wait at different barriers, in lines %d and %d", line, f.line);
        return message;
      }
      line = f.line;
    }
    if (ended == count) return nullptr;
    if (ended) {
      snprintf(message, sizeof rt_message, "a barrier in line %d that %zu of %zu threads never reach", line, ended, count);
      return message;
    }
    for (size_t k = 0; k < count; k++) rt_fibres[k].state = rt_ready;
  }
}

/* A launch: every argument takes eight bytes. */
template <bool waits, bool narrow, class... P, size_t... I>
static const char *rt_launch(void (*)(P...), void (*body)(const char *), const char *arguments, const unsigned *grid,
                             const unsigned *block, int backwards, std::index_sequence<I...>) {
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block[0], block[1], block[2]};
  rt_body = body;
  rt_arguments = arguments;
  rt_window = nullptr;
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
#ifndef RT_WIDE
  rt_largest = 0;
#endif
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
#ifndef RT_WIDE
  long long most = 0x7fffffff;
  if (narrow) memcpy(&most, arguments + 8 * (sizeof...(P) - 1), 8);
  static char message[200];
  if (rt_largest > most) {
    snprintf(message, sizeof message, "an index of %lld where the launch says there are at most %lld", rt_largest, most);
    return message;
  }
#endif
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

#define RT_EMULATED(kernel, waits, narrow)                                                                                            \
  extern "C" __attribute__((visibility("default"))) const char *rt_run_##kernel(                                              \
      const char *arguments, const unsigned *grid, const unsigned *block, int backwards) {                                    \
    typedef decltype(rt_places(&kernel)) places;                                                                              \
    return rt_launch<waits, narrow>(&kernel, rt_call<&kernel, std::pair<decltype(&kernel), places>>::body, arguments, grid, block,    \
                            backwards, places());                                                                             \
  }
