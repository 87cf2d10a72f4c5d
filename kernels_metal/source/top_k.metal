// Sorted lists of (value, id): larger values first, the lower id first among equal ones.

constant constexpr int EMPTY = 0x7fffffff;

inline void clear_list(thread float* values, thread int* ids, int length) {
  #pragma clang loop unroll(full)
  for (int i = 0; i < length; ++i) {
    values[i] = -INFINITY;
    ids[i] = EMPTY;
  }
}

// Puts a value into its place and drops the last.
inline void insert_value(thread float* values, thread int* ids, int length, float value, int id) {
  #pragma clang loop unroll(full)
  for (int i = 0; i < length; ++i) {
    if (value > values[i] || (value == values[i] && id < ids[i])) {
      const float next_value = values[i];
      const int next_id = ids[i];
      values[i] = value;
      ids[i] = id;
      value = next_value;
      id = next_id;
    }
  }
}

// Takes the best head of the SIMD-group's 32 lists off its list; every lane learns which it was.
inline int take_best(thread float* values, thread int* ids, int length, thread float* best) {
  *best = simd_max(values[0]);
  const int winner = simd_min(values[0] == *best ? ids[0] : int(EMPTY));
  if (ids[0] == winner) {
    #pragma clang loop unroll(full)
    for (int i = 1; i < length; ++i) {
      values[i - 1] = values[i];
      ids[i - 1] = ids[i];
    }
    values[length - 1] = -INFINITY;
    ids[length - 1] = EMPTY;
  }
  return winner;
}

// exp(peak - top) where both may be minus infinity.
inline float rescale(float peak, float top) {
  return peak == top ? 1.0f : exp(peak - top);
}
