/* Where the calls of `gcc -fsanitize=thread` go instead of to its own library: every load and store of a kernel is checked
   against the buffers that were announced. Found: accesses outside every buffer, stores to constants, loads of bytes nothing
   has stored, and bytes that two iterations of one parallel loop touch with at least one store (a race under some schedule;
   the iterations run one after another here, so nothing depends on timing). Not thread-safe. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  uintptr_t start, end;
  int id, constant;
  unsigned char *known;                /* per byte: something was stored */
  uint32_t *writer, *reader, *another; /* per byte: iterations that touched it */
} Region;

static Region *regions;
static int count, room;
static uint32_t serial, first, now; /* iterations are numbered through; `first` of this loop; 0 outside of loops */
static const char *kernel = "";
static char report[1 << 16];
static size_t used;
static int found;

static void complain(const char *what, int id, long offset) {
  if (found++ < 50 && used + 300 < sizeof report)
    used += snprintf(report + used, sizeof report - used, "%.60s: %s, buffer %d, byte %ld\n", kernel, what, id, offset);
}

static Region *find(uintptr_t a) {
  int low = 0, high = count;
  while (low < high) {
    int middle = (low + high) / 2;
    if (regions[middle].end <= a) low = middle + 1; else high = middle;
  }
  return low < count && regions[low].start <= a ? &regions[low] : 0;
}

void rec_register(void *start, uint64_t size, int id) {
  if (count == room) regions = realloc(regions, sizeof *regions * (room = 2 * room + 16));
  int at = count++;
  for (; at && regions[at - 1].start > (uintptr_t)start; at--) regions[at] = regions[at - 1];
  Region r = {(uintptr_t)start, (uintptr_t)start + size, id, 0, calloc(size + 1, 1), 0, 0, 0};
  r.writer = calloc(size + 1, 4), r.reader = calloc(size + 1, 4), r.another = calloc(size + 1, 4);
  regions[at] = r;
}

static Region *exactly(void *start) {
  for (int k = 0; k < count; k++) if (regions[k].start == (uintptr_t)start) return &regions[k];
  abort();
}

void rec_forget(void *start) {
  Region *r = exactly(start);
  free(r->known), free(r->writer), free(r->reader), free(r->another);
  memmove(r, r + 1, sizeof *r * (size_t)(regions + --count - r));
}

void rec_stored(void *start, uint64_t size) { memset(exactly(start)->known, 1, size); }
void rec_constant(void *start) { exactly(start)->constant = 1; }
void rec_launch(const char *name) { kernel = name; }

/* The host reads the first bytes. */
void rec_wanted(void *start, uint64_t size) {
  Region *r = exactly(start);
  unsigned char *hole = memchr(r->known, 0, size);
  if (hole) complain("never stored, but wanted by the host or a library", r->id, hole - r->known);
}

const char *rec_report(int *complaints) {
  *complaints = found, found = 0, used = 0;
  return report;
}

void rec_begin(void) { first = serial + 1; }
void rec_step(void) { now = ++serial; }
void rec_end(void) { now = 0; }

static void access(uintptr_t a, uint64_t size, int store) {
  Region *r = find(a);
  uintptr_t stack = (uintptr_t)__builtin_frame_address(0);
  if (!r) {
    if (a - stack >= 8u << 20) complain(store ? "store outside every buffer" : "load outside every buffer", -1, (long)a);
    return;
  }
  if (a + size > r->end) {
    complain(store ? "store behind the end" : "load behind the end", r->id, (long)(a - r->start));
    size = r->end - a;
  }
  if (store && r->constant) complain("store to a constant", r->id, (long)(a - r->start));
  for (uint64_t k = a - r->start; size--; k++) {
    uint32_t w = r->writer[k], x = r->reader[k], y = r->another[k];
    int conflict = now && w >= first && w != now;
    if (store) {
      conflict |= now && ((x >= first && x != now) || (y >= first && y != now));
      r->known[k] = 1, r->writer[k] = now;
    } else {
      if (!r->known[k]) complain("load of what nothing has stored", r->id, (long)k);
      if (now && x < first) r->reader[k] = now;
      else if (now && x != now) r->another[k] = now;
    }
    if (conflict) {
      complain(store ? "race: store" : "race: load", r->id, (long)k);
      break;
    }
  }
}

#define BOTH(size) \
  void __tsan_read##size(void *a) { access((uintptr_t)a, size, 0); } \
  void __tsan_write##size(void *a) { access((uintptr_t)a, size, 1); } \
  void __tsan_unaligned_read##size(void *a) { access((uintptr_t)a, size, 0); } \
  void __tsan_unaligned_write##size(void *a) { access((uintptr_t)a, size, 1); } \
  void __tsan_volatile_read##size(void *a) { access((uintptr_t)a, size, 0); } \
  void __tsan_volatile_write##size(void *a) { access((uintptr_t)a, size, 1); }
BOTH(1) BOTH(2) BOTH(4) BOTH(8) BOTH(16)
void __tsan_read_range(void *a, uint64_t size) { access((uintptr_t)a, size, 0); }
void __tsan_write_range(void *a, uint64_t size) { access((uintptr_t)a, size, 1); }
void __tsan_init(void) {}
void __tsan_func_entry(void *a) { (void)a; }
void __tsan_func_exit(void) {}
