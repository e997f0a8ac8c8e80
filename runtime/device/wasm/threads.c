/* Runs the parallel loops of kernels on the workers of a page: what clang's code for OpenMP calls, over shared memory.

One thread at a time is the host, which runs the program; the others wait in threads_serve. A parallel loop is a region: the host
tells all what to run, runs its own part, and waits for theirs. A region holds one loop, and no region is within another. */

#include <stdarg.h>
#include <stdint.h>

enum { MOST_ARGUMENTS = @MOST@, SPINS = 1 << 14 };

typedef void *A;

static struct {
  int team;              /* threads, the host among them */
  int alone;             /* the host runs a region by itself */
  int round;             /* number of the region */
  int left;              /* threads that still run it */
  int failed;            /* one was stopped in it */
  int count;             /* of its arguments */
  A body, arguments[MOST_ARGUMENTS];
  int64_t next;          /* index of the next iterations that a dynamic loop hands out */
} pool = {.team = 1};

void threads_team(int team) { pool.team = team; }

/* Wait until a word is no longer `old`. A thread that sleeps takes long to wake, so it spins for a while. */
static int changed(int *word, int old) {
  for (;;) {
    for (int k = 0; k < SPINS; k++) {
      int now = __atomic_load_n(word, __ATOMIC_ACQUIRE);
      if (now != old) return now;
    }
    __builtin_wasm_memory_atomic_wait32(word, old, -1);
  }
}

static void run(int number) {
  A a[MOST_ARGUMENTS], f = pool.body;
  int *n = &number;
  for (int k = 0; k < pool.count; k++) a[k] = pool.arguments[k];
  switch (pool.count) {
@CASES@
  default: __builtin_trap();
  }
}

static void done(void) {
  if (__atomic_sub_fetch(&pool.left, 1, __ATOMIC_ACQ_REL) == 0) __builtin_wasm_memory_atomic_notify(&pool.left, 1);
}

/* What thread `number` does until its worker ends. */
void threads_serve(int number) {
  for (int seen = 0;;) {
    seen = changed(&pool.round, seen);
    run(number);
    done();
  }
}

/* Say that this thread's code was stopped: the host, which waits for it, is stopped, too. */
void threads_fail(void) {
  __atomic_store_n(&pool.failed, 1, __ATOMIC_RELAXED);
  done();
}

void __kmpc_fork_call(void *where, int count, A body, ...) {
  va_list rest;
  va_start(rest, body);
  if (count > MOST_ARGUMENTS) __builtin_trap();
  for (int k = 0; k < count; k++) pool.arguments[k] = va_arg(rest, A);
  va_end(rest);
  pool.count = count;
  pool.body = body;
  pool.next = 0;
  int others = pool.team - 1;
  if (others) {
    __atomic_store_n(&pool.left, others, __ATOMIC_RELAXED);
    int round = pool.round == INT32_MAX ? 1 : pool.round + 1;
    __atomic_store_n(&pool.round, round, __ATOMIC_RELEASE);
    __builtin_wasm_memory_atomic_notify(&pool.round, (unsigned)-1);
  }
  run(0);
  for (int left; (left = __atomic_load_n(&pool.left, __ATOMIC_ACQUIRE)); changed(&pool.left, left)) {
  }
  if (__atomic_load_n(&pool.failed, __ATOMIC_RELAXED)) __builtin_trap();
}

int __kmpc_global_thread_num(void *where) { return 0; }
void __kmpc_serialized_parallel(void *where, int number) { pool.alone = 1; }
void __kmpc_end_serialized_parallel(void *where, int number) { pool.alone = 0; pool.next = 0; }

/* Give a thread one part of the whole range, as even as can be: [*lower, *upper], both inclusive. */
#define STATIC(name, type)                                                                                              \
  void name(void *where, int number, int kind, int32_t *last, type *lower, type *upper, type *step, type by, type chunk) { \
    type first = *lower, count = *upper < first ? 0 : (type)((*upper - first) / by + 1);                                 \
    type team = pool.alone ? 1 : pool.team, each = count / team, more = count % team;                                                                                                 \
    type begin = each * number + (number < more ? number : more), length = each + (number < more);                       \
    *lower = first + begin * by;                                                                                         \
    *upper = first + (begin + length - 1) * by;                                                                          \
    *step = count * by + by;                                                                                             \
    *last = length && begin + length == count;                                                                           \
  }
STATIC(__kmpc_for_static_init_4, int32_t)
STATIC(__kmpc_for_static_init_8, int64_t)
void __kmpc_for_static_fini(void *where, int number) {}

/* Hand out the iterations of a range one by one. Every thread says the same range, which `next` is then given. */
static struct { int64_t first, count, by; } handed;

#define DYNAMIC(bits, type)                                                                                             \
  void __kmpc_dispatch_init_##bits(void *where, int number, int kind, type first, type last, type by, type chunk) {      \
    __atomic_store_n(&handed.first, first, __ATOMIC_RELAXED);                                                            \
    __atomic_store_n(&handed.by, by, __ATOMIC_RELAXED);                                                                  \
    __atomic_store_n(&handed.count, last < first ? 0 : ((int64_t)last - first) / by + 1, __ATOMIC_RELAXED);              \
  }                                                                                                                      \
  int __kmpc_dispatch_next_##bits(void *where, int number, int32_t *last, type *lower, type *upper, type *step) {        \
    int64_t mine = __atomic_fetch_add(&pool.next, 1, __ATOMIC_RELAXED);                                                  \
    if (mine >= handed.count) return 0;                                                                                  \
    *lower = *upper = (type)(handed.first + mine * handed.by);                                                           \
    *step = (type)handed.by;                                                                                             \
    *last = mine + 1 == handed.count;                                                                                    \
    return 1;                                                                                                            \
  }
DYNAMIC(4, int32_t)
DYNAMIC(8, int64_t)
