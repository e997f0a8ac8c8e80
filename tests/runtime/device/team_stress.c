/* Runs loops on a team and checks that every iteration ran once: THREADS LOOPS, of a program that is linked with team.c. */
#define _GNU_SOURCE
#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef void part(const void *data, int64_t from, int64_t to);
int relax_tune_team_start(int threads);
int relax_tune_team_use(int threads);
int relax_tune_team_size(void);
void relax_tune_team_run(part *, const void *data, int64_t count, int how);

enum { EVEN, UNEVEN, MOST = 3000 };
static const int64_t COUNTS[] = {0, 1, 2, 3, 5, 7, 64, 100, MOST};

static void add(const void *data, int64_t from, int64_t to) {
  int *sums = *(int *const *)data;
  for (int64_t i = from; i < to; i++) {
    sums[i]++;
    if (i % 1000 == 999) sched_yield(); /* a thread that is held up in the middle of a chunk */
  }
}

struct held {
  int64_t done, count, late; /* iterations that ran, all of them, and the one that waits for the others */
};

static void wait_for_others(const void *data, int64_t from, int64_t to) {
  struct held *held = *(struct held *const *)data;
  for (int64_t i = from; i < to; i++) {
    while (i == held->late && __atomic_load_n(&held->done, __ATOMIC_ACQUIRE) < held->count - 1) sched_yield();
    __atomic_add_fetch(&held->done, 1, __ATOMIC_ACQ_REL);
  }
}

static void check(const int *sums, int64_t count, int wanted, const char *what) {
  for (int64_t i = 0; i < MOST; i++)
    if (sums[i] != (i < count ? wanted : 0)) {
      printf("%s: iteration %ld of %ld ran %d times, not %d\n", what, (long)i, (long)count, sums[i], wanted);
      exit(1);
    }
}

static void *use_others(void *given) {
  for (int n = 0; n < 200; n++) relax_tune_team_use(1 + n % *(int *)given);
  return 0;
}

static void *many_loops(void *given) {
  int loops = *(int *)given, *sums = calloc(MOST, sizeof *sums);
  for (unsigned k = 0; k < sizeof COUNTS / sizeof *COUNTS; k++)
    for (int how = EVEN; how <= UNEVEN; how++) {
      memset(sums, 0, MOST * sizeof *sums);
      for (int n = 0; n < loops; n++) relax_tune_team_run(add, &sums, COUNTS[k], how);
      check(sums, COUNTS[k], loops, "loops");
    }
  free(sums);
  return 0;
}

/* Threads are moved between processors, and may use as many afterwards as before. */
static void check_processors(const cpu_set_t *wanted) {
  DIR *tasks = opendir("/proc/self/task");
  if (tasks == NULL) exit(4);
  for (struct dirent *task; (task = readdir(tasks));) {
    cpu_set_t allowed;
    const int thread = atoi(task->d_name);
    if (thread == 0 || sched_getaffinity(thread, sizeof allowed, &allowed)) continue;
    if (!CPU_EQUAL(&allowed, wanted)) {
      printf("thread %d may use %d processors, not %d\n", thread, CPU_COUNT(&allowed), CPU_COUNT(wanted));
      exit(1);
    }
  }
  closedir(tasks);
}

int main(int count, char **given) {
  cpu_set_t usable;
  sched_getaffinity(0, sizeof usable, &usable);
  int threads = count > 1 ? atoi(given[1]) : 2, loops = count > 2 ? atoi(given[2]) : 100;
  int size = relax_tune_team_start(threads);
  if (size != threads || relax_tune_team_start(threads + 1) != threads || relax_tune_team_size() != threads) return 2;
  many_loops(&loops);

  int *sums = calloc(MOST, sizeof *sums);
  for (int n = 0; n < loops; n++) {
    relax_tune_team_run(add, &sums, MOST, EVEN);
    usleep(n % 10 == 0 ? 300 : 0); /* so that threads sleep now and then */
  }
  check(sums, MOST, loops, "loops after sleep");

  for (int n = 0; threads > 1 && n < loops; n++) { /* whichever iteration is held up, others do what its thread had left */
    struct held held = {0, 4 * threads, n % (4 * threads)}, *given_held = &held;
    relax_tune_team_run(wait_for_others, &given_held, held.count, EVEN);
  }

  for (int n = 0; n < loops; n++) { /* fewer threads, more, and again as many */
    const int used = 1 + n % (threads + 2);
    if (relax_tune_team_use(used) != used || relax_tune_team_size() != used) return 5;
    memset(sums, 0, MOST * sizeof *sums);
    for (int again = 0; again < 3; again++) relax_tune_team_run(add, &sums, MOST, EVEN);
    check(sums, MOST, 3, "loops of another number of threads");
    if (n % 10 == 0) usleep(300);
  }
  if (relax_tune_team_use(threads) != threads) return 5;

  pthread_t callers[3]; /* several callers at once */
  for (int k = 0; k < 3; k++) pthread_create(&callers[k], 0, many_loops, &loops);
  use_others(&threads);
  for (int k = 0; k < 3; k++) pthread_join(callers[k], 0);
  relax_tune_team_use(threads);

  pid_t child = fork(); /* which has no threads but this one */
  if (child == 0) {
    alarm(60);
    many_loops(&loops);
    _exit(0);
  }
  int status;
  waitpid(child, &status, 0);
  if (status != 0) return 3;
  many_loops(&loops);
  free(sums);
  usleep(20000); /* until the last move is over */
  check_processors(&usable);
  puts("all ran once");
  return 0;
}
