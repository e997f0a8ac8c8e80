/* Made by relax-tune @VERSION@: kernels of @NAME@, and what its plans and checks are computed with. */
@PLAN_ARITHMETIC@
#include <string.h>

static inline void copy(void *to, const void *from, int64_t bytes) {
  if (bytes > 0 && to != from) memcpy(to, from, (size_t)bytes);
}

static inline int64_t integer_at(const void *array, int64_t i, int type) {
  switch (type) {
    case 'b': return ((const int8_t *)array)[i];
    case 'B': return ((const uint8_t *)array)[i];
    case 'h': return ((const int16_t *)array)[i];
    case 'H': return ((const uint16_t *)array)[i];
    case 'i': return ((const int32_t *)array)[i];
    case 'I': return ((const uint32_t *)array)[i];
    case 'Q': return ((const uint64_t *)array)[i] > INT64_MAX ? INT64_MAX : (int64_t)((const uint64_t *)array)[i];
    default: return ((const int64_t *)array)[i];
  }
}

/* Return the place of the first of the elements column, column + every ... outside [low, high); -1 if there is none. */
static inline int64_t outside(const void *array, int type, int64_t count, int64_t every, int64_t column, int64_t low, int64_t high) {
  for (int64_t i = column; i < count; i += every) {
    const int64_t value = integer_at(array, i, type);
    if (value < low || value >= high) return i;
  }
  return -1;
}

typedef __INT64_TYPE__ i64;
#pragma GCC visibility push(hidden)
@PROTOTYPES@
#pragma GCC visibility pop
