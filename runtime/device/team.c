/* A team of threads that runs the parallel loops of kernels, one loop at a time.

Work stealing: each thread owns an equal share of a loop's iterations and takes them in chunks from the front; a thread that has finished
steals chunks from the back of the others' shares. The caller takes part, and waits only for threads that have started.

On a busy machine the system preempts threads for milliseconds at a time, far longer than a loop takes. Three rules limit the cost:
 - A thread without work spins for some tens of microseconds, then sleeps. A thread that spins longer uses up its time slice on a busy
   processor, and is then preempted when the next loop begins.
 - A thread that waits for a preempted one lends it its processor (Linux): the late thread is moved to the processor of the waiting one,
   which then sleeps. So a thread that is preempted within a chunk delays the others only by microseconds.
 - A thread that runs on the caller's processor moves to another one. */

#if !defined(_GNU_SOURCE) && defined(__linux__)
#define _GNU_SOURCE
#elif !defined(_POSIX_C_SOURCE)
#define _POSIX_C_SOURCE 200809L
#endif

#include <stdint.h>

typedef void team_part(const void *data, int64_t from, int64_t to);

enum { EVEN, UNEVEN };
enum { MOST_THREADS = 1024, OPEN = 1 << 30, SPIN_NANOSECONDS = 50000, LOOK_NANOSECONDS = 100000, LONGEST_LOOK_NANOSECONDS = 3200000 };
#if defined(__wasm__)
enum { LEAST_SPINS = 1 << 14 };
#else
enum { LEAST_SPINS = 100 };
#endif

struct seat {
  _Alignas(64) uint64_t left; /* units of work that are not taken: the first in the low word, one past the last in the high word */
  int32_t thread;             /* the system's id of the thread, 0 if unknown */
  int32_t processor;          /* where the thread was when it entered the loop */
  int32_t inside;             /* it is in the loop */
};

static struct {
  _Alignas(64) int32_t round; /* number of loops so far; threads without work wait for it to change */
  int32_t sleeping;           /* threads that sleep until it changes */
  _Alignas(64) int32_t gate;  /* OPEN while threads may enter the loop, and how many are inside */
  int32_t caller_sleeps;      /* the caller sleeps until the gate is 0 */
  _Alignas(64) int32_t busy;  /* a loop is being run */
  int32_t decided;            /* the number of threads was stated */
  int32_t started;            /* a thread was created */
  int32_t created;            /* threads of the team, the caller among them */
  int32_t threads;            /* of these, the ones that take part in loops; the others sleep until `changes` changes */
  int32_t changes;            /* of `threads` */
  int32_t spins;              /* polls of a word before sleeping */
  int32_t moving;             /* a thread is being moved to another processor, or a late one is searched for */
  int32_t failed;             /* a thread was stopped in the loop */
  int32_t how;
  team_part *part;
  const void *data;
  int64_t count, unit;        /* iterations, and iterations of one unit of work */
  struct seat seats[MOST_THREADS];
} team = {.created = 1, .threads = 1, .spins = LEAST_SPINS};

/* Exported names and their linkage, so that each of several libraries can have a team. */
#ifndef TEAM
#define TEAM(name) relax_tune_team_##name
#define TEAM_LINKAGE
#endif

#if defined(__wasm__)

/* Sleep until the word is no longer `old`. While a loop is being run, sleep for `look` nanoseconds at most: whenever a processor becomes
   idle, the system migrates a waiting thread to it. A web page cannot move threads itself. */
static void sleep_while(int32_t *word, int32_t old, int32_t look) {
  const int running = __atomic_load_n(&team.gate, __ATOMIC_RELAXED) != 0;
  __builtin_wasm_memory_atomic_wait32(word, old, running ? look : -1);
}

static void wake(int32_t *word, int count) { __builtin_wasm_memory_atomic_notify(word, (unsigned)count); }
static void pause_briefly(void) {}
static void enter_seat(int number) { (void)number; }
static void lend_processor(int number) { (void)number; }

#else

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if defined(__linux__)

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>

/* Sleep until the word is no longer `old`; while a loop is being run, for `look` nanoseconds at most, so that late threads are searched
   for again. */
static void sleep_while(int32_t *word, int32_t old, int32_t look) {
  const struct timespec most = {0, look};
  const int running = __atomic_load_n(&team.gate, __ATOMIC_RELAXED) != 0;
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, old, running ? &most : 0, 0, 0);
}

static void wake(int32_t *word, int count) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, 0, 0, 0); }

#else

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed_word = PTHREAD_COND_INITIALIZER;

static void sleep_while(int32_t *word, int32_t old, int32_t look) {
  (void)look;
  pthread_mutex_lock(&lock);
  while (__atomic_load_n(word, __ATOMIC_ACQUIRE) == old) pthread_cond_wait(&changed_word, &lock);
  pthread_mutex_unlock(&lock);
}

static void wake(int32_t *word, int count) {
  (void)word, (void)count;
  pthread_mutex_lock(&lock);
  pthread_cond_broadcast(&changed_word);
  pthread_mutex_unlock(&lock);
}

#endif

static void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__) || defined(__arm__)
  __asm__ volatile("yield");
#endif
}

#if defined(__linux__)

static _Thread_local int32_t own_thread; /* what gettid returns */

/* Move a thread to one of the processors `to`; it may leave them afterwards. The caller must have set `team.moving`: of two concurrent
   moves, one would read the other's temporary affinity mask as the thread's own, and restore that. */
static int move(int32_t thread, const cpu_set_t *to) {
  cpu_set_t allowed, both;
  if (sched_getaffinity(thread, sizeof allowed, &allowed)) return 0;
  CPU_AND(&both, &allowed, to);
  if (CPU_COUNT(&both) == 0 || sched_setaffinity(thread, sizeof both, &both)) return 0;
  sched_setaffinity(thread, sizeof allowed, &allowed);
  return 1;
}

static int move_to(int32_t thread, int processor) {
  cpu_set_t one;
  if (processor < 0 || processor >= CPU_SETSIZE) return 0;
  CPU_ZERO(&one);
  CPU_SET(processor, &one);
  return move(thread, &one);
}

/* Record that this thread is in the loop, and on which processor. A thread on the processor of the loop's caller leaves it. */
static void enter_seat(int number) {
  struct seat *seat = &team.seats[number];
  const int processor = sched_getcpu();
  if (own_thread == 0) own_thread = (int32_t)syscall(SYS_gettid);
  __atomic_store_n(&seat->thread, own_thread, __ATOMIC_RELAXED);
  __atomic_store_n(&seat->inside, 1, __ATOMIC_RELAXED);
  __atomic_store_n(&seat->processor, processor, __ATOMIC_RELAXED);
  if (number == 0 || processor < 0 || processor >= CPU_SETSIZE) return;
  if (processor != __atomic_load_n(&team.seats[0].processor, __ATOMIC_RELAXED)) return;
  if (__atomic_exchange_n(&team.moving, 1, __ATOMIC_ACQUIRE)) return;
  cpu_set_t others;
  memset(&others, 0xFF, sizeof others);
  CPU_CLR(processor, &others);
  move(own_thread, &others);
  __atomic_store_n(&team.moving, 0, __ATOMIC_RELEASE);
}

/* Return the processor time that a thread has used, in nanoseconds; -1 where it cannot be read. */
static int64_t time_of(int32_t thread) {
  struct timespec used;
  const clockid_t clock = (clockid_t)(~(unsigned)thread << 3 | 6); /* as pthread_getcpuclockid */
  if (thread == 0 || clock_gettime(clock, &used)) return -1;
  return used.tv_sec * INT64_C(1000000000) + used.tv_nsec;
}

/* Give this thread's processor to a preempted thread of the loop, if there is one: its processor time does not advance. */
static void lend_processor(int number) {
  enum { PAUSES = 300, RUNNING_NANOSECONDS = 1000 };
  if (__atomic_load_n(&team.gate, __ATOMIC_RELAXED) == 0 || __atomic_exchange_n(&team.moving, 1, __ATOMIC_ACQUIRE)) return;
  const int threads = __atomic_load_n(&team.threads, __ATOMIC_RELAXED);
  for (int k = 0; k < threads; k++) {
    struct seat *seat = &team.seats[k];
    if (k == number || !__atomic_load_n(&seat->inside, __ATOMIC_RELAXED)) continue;
    const int32_t thread = __atomic_load_n(&seat->thread, __ATOMIC_RELAXED);
    const int64_t before = time_of(thread);
    for (int n = 0; n < PAUSES && __atomic_load_n(&seat->inside, __ATOMIC_RELAXED); n++) pause_briefly();
    const int64_t after = time_of(thread);
    if (!__atomic_load_n(&seat->inside, __ATOMIC_RELAXED)) continue;
    if (before < 0 || after < 0 || after - before > RUNNING_NANOSECONDS) continue;
    const int there = __atomic_load_n(&seat->processor, __ATOMIC_RELAXED), here = sched_getcpu();
    if (here != there && move_to(thread, here) && number != 0) move_to(own_thread, there); /* the loop's caller stays near */
    break;
  }
  __atomic_store_n(&team.moving, 0, __ATOMIC_RELEASE);
}

#else

static void enter_seat(int number) { (void)number; }
static void lend_processor(int number) { (void)number; }

#endif

#endif

/* Record that a thread is no longer in the loop. */
static void leave_seat(int number) { __atomic_store_n(&team.seats[number].inside, 0, __ATOMIC_RELAXED); }

/* Wait as thread `number` until a word is no longer `old`. `sleeps` counts the threads that must be woken. */
static void wait_while(int number, int32_t *word, int32_t old, int32_t *sleeps) {
  for (int k = 0; k < team.spins; k++) {
    if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != old) return;
    pause_briefly();
  }
  /* Sequentially consistent, as is the change of the word before `sleeps` is read (Dekker): at least one side sees the other's write,
     so no wake-up is lost. */
  __atomic_add_fetch(sleeps, 1, __ATOMIC_SEQ_CST);
  for (int32_t look = LOOK_NANOSECONDS; __atomic_load_n(word, __ATOMIC_SEQ_CST) == old;) {
    lend_processor(number);
    sleep_while(word, old, look);
    if (look < LONGEST_LOOK_NANOSECONDS) look *= 2;
  }
  __atomic_sub_fetch(sleeps, 1, __ATOMIC_RELAXED);
}

/* Take a chunk of a thread's share, from its front or its back. Return 0 if nothing is left. */
static int take(struct seat *seat, int back, int64_t *from, int64_t *to) {
  uint64_t left = __atomic_load_n(&seat->left, __ATOMIC_RELAXED), taken;
  uint32_t first, end, size;
  do {
    first = (uint32_t)left, end = (uint32_t)(left >> 32);
    if (first >= end) return 0;
    size = (end - first) >> (team.how == EVEN ? 2 : 4);
    if (size == 0) size = 1;
    if (back) {
      taken = (uint64_t)(end - size) << 32 | first;
    } else {
      taken = (uint64_t)end << 32 | (first + size);
    }
  } while (!__atomic_compare_exchange_n(&seat->left, &left, taken, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  if (back) first = end - size;
  *from = first * team.unit;
  *to = *from + size * team.unit;
  if (*to > team.count) *to = team.count;
  return 1;
}

/* Run iterations of the open loop, as its thread `number`, until none is left. */
static void work(int number) {
  int64_t from, to;
  while (take(&team.seats[number], 0, &from, &to)) team.part(team.data, from, to);
  const int threads = __atomic_load_n(&team.threads, __ATOMIC_RELAXED);
  for (int k = 1; k < threads; k++) {
    struct seat *other = &team.seats[(number + k) % threads];
    while (take(other, 1, &from, &to)) team.part(team.data, from, to);
  }
}

static void leave(void) {
  int32_t left = __atomic_sub_fetch(&team.gate, 1, __ATOMIC_SEQ_CST);
  if (left == 0 && __atomic_load_n(&team.caller_sleeps, __ATOMIC_SEQ_CST)) wake(&team.gate, 1);
}

/* Set how many threads take part in loops. */
static void take_part(int threads) {
  __atomic_store_n(&team.threads, threads, __ATOMIC_SEQ_CST);
  __atomic_add_fetch(&team.changes, 1, __ATOMIC_SEQ_CST);
  wake(&team.changes, MOST_THREADS);
}

/* Return whether thread `number` takes part in loops. */
static int takes_part(int number) { return number < __atomic_load_n(&team.threads, __ATOMIC_SEQ_CST); }

/* Run parts of loops as thread `number` of the team, forever. */
static void serve(int number) {
  for (int32_t last = 0;;) {
    for (;;) {
      const int32_t changes = __atomic_load_n(&team.changes, __ATOMIC_SEQ_CST);
      if (takes_part(number)) break;
      sleep_while(&team.changes, changes, LONGEST_LOOK_NANOSECONDS);
    }
    wait_while(number, &team.round, last, &team.sleeping);
    last = __atomic_load_n(&team.round, __ATOMIC_ACQUIRE);
    int32_t gate = __atomic_load_n(&team.gate, __ATOMIC_RELAXED);
    while (gate & OPEN && takes_part(number)) {
      if (!__atomic_compare_exchange_n(&team.gate, &gate, gate + 1, 1, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) continue;
      enter_seat(number);
      work(number);
      leave_seat(number);
      leave();
      break;
    }
  }
}

/* Return how many threads take part in loops. */
TEAM_LINKAGE int TEAM(size)(void) { return __atomic_load_n(&team.threads, __ATOMIC_ACQUIRE); }

/* Call part(data, from, to) for ranges that make up 0 to count, on all threads, and return when all are done.

`how` is EVEN, or UNEVEN where iterations differ in work. A loop that begins while another one runs is run by its caller only. */
TEAM_LINKAGE void TEAM(run)(team_part *part, const void *data, int64_t count, int how) {
  if (count <= 0) return;
  if (TEAM(size)() == 1 || count == 1 || __atomic_exchange_n(&team.busy, 1, __ATOMIC_ACQUIRE)) {
    part(data, 0, count);
    return;
  }
  const int threads = TEAM(size)(); /* changes only while no loop is run */
  team.part = part, team.data = data, team.count = count, team.how = how;
  team.unit = 1 + (count - 1) / INT32_MAX;
  int64_t units = 1 + (count - 1) / team.unit;
  for (int k = 0; k < threads; k++) {
    int64_t first = units * k / threads, end = units * (k + 1) / threads;
    __atomic_store_n(&team.seats[k].left, (uint64_t)end << 32 | (uint64_t)first, __ATOMIC_RELAXED);
  }
  enter_seat(0);
  __atomic_store_n(&team.gate, OPEN, __ATOMIC_RELEASE);
  int32_t round = team.round == INT32_MAX ? 1 : team.round + 1;
  __atomic_store_n(&team.round, round, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&team.sleeping, __ATOMIC_SEQ_CST)) {
    /* Threads that no longer take part may still sleep until the next loop; all are woken then. */
    wake(&team.round, team.created > threads ? team.created : (int)(units < threads ? units : threads) - 1);
  }
  work(0);
  leave_seat(0);
  int32_t gate = __atomic_and_fetch(&team.gate, ~OPEN, __ATOMIC_SEQ_CST);
  while (gate) {
    wait_while(0, &team.gate, gate, &team.caller_sleeps);
    gate = __atomic_load_n(&team.gate, __ATOMIC_ACQUIRE);
  }
#if defined(__wasm__)
  if (__atomic_load_n(&team.failed, __ATOMIC_RELAXED)) __builtin_trap();
#endif
  __atomic_store_n(&team.busy, 0, __ATOMIC_RELEASE);
}

#if defined(__wasm__)

/* The page starts the threads: it passes each its number, and the caller's instance how many there are. */
void threads_team(int threads) {
  team.created = threads;
  take_part(threads);
}

void threads_serve(int number) { serve(number); }

/* Report that this thread trapped: the caller, which waits for it, traps too. */
void threads_fail(void) {
  __atomic_store_n(&team.failed, 1, __ATOMIC_RELAXED);
  leave();
}

#else

static void *serve_thread(void *number) {
  serve((int)(intptr_t)number);
  return 0;
}

/* A forked process has none of the threads: its loops are run by their callers. */
static void after_fork(void) {
  team.created = team.threads = 1;
  team.busy = team.gate = team.sleeping = team.caller_sleeps = team.moving = 0;
#if defined(__linux__)
  own_thread = 0;
#endif
}

/* Return how many times a thread polls a word before it sleeps. */
static int spins_of_this_processor(void) {
  enum { PAUSES = 200 };
  int64_t least = INT64_MAX;
  for (int again = 0; again < 9; again++) {
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int k = 0; k < PAUSES; k++) pause_briefly();
    clock_gettime(CLOCK_MONOTONIC, &end);
    int64_t nanoseconds = (end.tv_sec - begin.tv_sec) * INT64_C(1000000000) + end.tv_nsec - begin.tv_nsec;
    if (nanoseconds < least) least = nanoseconds;
  }
  int64_t spins = (int64_t)SPIN_NANOSECONDS * PAUSES / (least + 1);
  return spins < LEAST_SPINS ? LEAST_SPINS : spins > INT32_MAX ? INT32_MAX : (int)spins;
}

#if defined(__linux__)
enum { PATH_LIMIT = 4096 };
#if !defined(TEAM_GROUPS) /* tests state others */
#define TEAM_GROUPS "/sys/fs/cgroup"
#define TEAM_OWN_GROUPS "/proc/self/cgroup"
#endif

/* Return the whole processors of a control group's quota; 0 without a limit. Version 2 has one file, version 1 two. */
static int quota_of(const char *folder) {
  char path[2 * PATH_LIMIT + 64];
  long long allowed = 0, period = 0;
  snprintf(path, sizeof path, "%s/cpu.max", folder);
  FILE *file = fopen(path, "r");
  if (file) {
    if (fscanf(file, "%lld %lld", &allowed, &period) != 2) allowed = 0;
    fclose(file);
  } else {
    snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", folder);
    if (!(file = fopen(path, "r"))) return 0;
    if (fscanf(file, "%lld", &allowed) != 1) allowed = 0;
    fclose(file);
    snprintf(path, sizeof path, "%s/cpu.cfs_period_us", folder);
    if (!(file = fopen(path, "r"))) return 0;
    if (fscanf(file, "%lld", &period) != 1) period = 0;
    fclose(file);
  }
  if (allowed <= 0 || period <= 0) return 0;
  return allowed < period ? 1 : allowed / period < MOST_THREADS ? (int)(allowed / period) : MOST_THREADS;
}

/* Return the least quota of the control groups of this process and of the groups around them; 0 without a limit. */
static int quota_threads(void) {
  char line[PATH_LIMIT], folder[2 * PATH_LIMIT + 32];
  int least = 0;
  FILE *own = fopen(TEAM_OWN_GROUPS, "r");
  while (own && fgets(line, sizeof line, own)) {
    char *controllers = strchr(line, ':');
    char *path = controllers ? strchr(controllers + 1, ':') : 0;
    if (!path) continue;
    *path++ = 0;
    path[strcspn(path, "\n")] = 0;
    controllers++;
    int counts = !*controllers; /* version 2 */
    for (const char *c = controllers; *c; c += strcspn(c, ","), c += *c == ',') counts |= strcspn(c, ",") == 3 && !strncmp(c, "cpu", 3);
    if (!counts) continue;
    const char *name = !*controllers ? "" : access(TEAM_GROUPS "/cpu", F_OK) ? controllers : "cpu";
    for (;;) {
      snprintf(folder, sizeof folder, TEAM_GROUPS "/%s/%s", name, path);
      int quota = quota_of(folder);
      if (quota && (!least || quota < least)) least = quota;
      char *end = strrchr(path, '/');
      if (!end) break;
      *end = 0;
    }
  }
  if (own) fclose(own);
  return least;
}
#endif

/* Return the least of the processors that this process may use, of the whole processors of its quota, and of $OMP_NUM_THREADS. */
static int usual_threads(void) {
  const char *setting = getenv("OMP_NUM_THREADS");
  int asked = setting ? atoi(setting) : 0, threads = (int)sysconf(_SC_NPROCESSORS_ONLN);
#if defined(__linux__)
  cpu_set_t usable;
  if (sched_getaffinity(0, sizeof usable, &usable) == 0) threads = CPU_COUNT(&usable);
  int quota = quota_threads();
  if (quota && quota < threads) threads = quota;
#endif
  return asked > 0 && asked < threads ? asked : threads;
}

/* Let this number of threads take part in loops, the caller among them; 0: the usual number. Missing ones are created. The caller has
   set `team.busy`. */
static void use_threads(int threads) {
  if (threads <= 0) threads = usual_threads();
  if (threads > MOST_THREADS) threads = MOST_THREADS;
  if (threads > 1 && !team.started) {
    team.started = 1;
    team.spins = spins_of_this_processor();
    pthread_atfork(0, 0, after_fork);
  }
  sigset_t all, before; /* signals are delivered to the program's other threads */
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (pthread_t thread; team.created < threads; team.created++) {
    if (pthread_create(&thread, 0, serve_thread, (void *)(intptr_t)team.created)) break;
    pthread_detach(thread);
  }
  pthread_sigmask(SIG_SETMASK, &before, 0);
  take_part(threads < team.created ? threads : team.created);
}

/* Start the threads of the team and return how many take part in loops. The first call decides. */
TEAM_LINKAGE int TEAM(start)(int threads) {
  while (__atomic_exchange_n(&team.busy, 1, __ATOMIC_ACQUIRE)) pause_briefly();
  if (!team.decided) use_threads(threads);
  team.decided = 1;
  __atomic_store_n(&team.busy, 0, __ATOMIC_RELEASE);
  return TEAM(size)();
}

/* Change how many threads take part in loops, once the team is started, and return how many do. */
TEAM_LINKAGE int TEAM(use)(int threads) {
  while (__atomic_exchange_n(&team.busy, 1, __ATOMIC_ACQUIRE)) pause_briefly();
  use_threads(threads);
  __atomic_store_n(&team.busy, 0, __ATOMIC_RELEASE);
  return TEAM(size)();
}

#endif
