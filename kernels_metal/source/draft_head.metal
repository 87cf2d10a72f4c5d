// One part of one row of logits, read once: its TOP best, its largest value and sum of exponentials.
//
// logits: [rows, V]. sizes: logits in a part. best_values, best_ids: [rows, parts, TOP].
// sums: [rows, parts, 2]: largest value, sum of exp(logit - largest).

constexpr int SIMD_GROUPS = 8;
threadgroup float group_values[SIMD_GROUPS * TOP];
threadgroup int group_ids[SIMD_GROUPS * TOP];
threadgroup float group_sums[SIMD_GROUPS * 2];

const int thread_id = thread_index_in_threadgroup;
const int lane = thread_index_in_simdgroup;
const int group = simdgroup_index_in_threadgroup;
const int row = threadgroup_position_in_grid.y;
const int part = threadgroup_position_in_grid.x;
const int vocabulary = logits_shape[1];
const int begin = part * sizes[0];
const int end = min(begin + sizes[0], vocabulary);

float values[TOP];
int ids[TOP];
clear_list(values, ids, TOP);
float peak = -INFINITY;
float total = 0.0f;
for (int i = begin + thread_id; i < end; i += SIMD_GROUPS * 32) {
  const float x = float(logits[int64_t(row) * vocabulary + i]);
  if (x > peak) {
    total = total * exp(peak - x) + 1.0f;
    peak = x;
  } else if (x > -INFINITY) {
    total += exp(x - peak);
  }
  if (x > values[TOP - 1] || ids[TOP - 1] == EMPTY) {
    insert_value(values, ids, TOP, x, i);
  }
}

// The best of the SIMD-group, ...
const float group_peak = simd_max(peak);
const float group_total = simd_sum(total * rescale(peak, group_peak));
if (lane == 0) {
  group_sums[group * 2] = group_peak;
  group_sums[group * 2 + 1] = group_total;
}
#pragma clang loop unroll(full)
for (int n = 0; n < TOP; ++n) {
  float value;
  const int id = take_best(values, ids, TOP, &value);
  if (lane == 0) {
    group_values[group * TOP + n] = value;
    group_ids[group * TOP + n] = id;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

// ... then the best of all of them.
if (group == 0) {
  clear_list(values, ids, TOP);
  peak = -INFINITY;
  total = 0.0f;
  if (lane < SIMD_GROUPS) {
    #pragma clang loop unroll(full)
    for (int n = 0; n < TOP; ++n) {
      values[n] = group_values[lane * TOP + n];
      ids[n] = group_ids[lane * TOP + n];
    }
    peak = group_sums[lane * 2];
    total = group_sums[lane * 2 + 1];
  }
  const int64_t place = int64_t(row) * threadgroups_per_grid.x + part;
  const float part_peak = simd_max(peak);
  const float part_total = simd_sum(total * rescale(peak, part_peak));
  if (lane == 0) {
    sums[place * 2] = part_peak;
    sums[place * 2 + 1] = part_total;
  }
  #pragma clang loop unroll(full)
  for (int n = 0; n < TOP; ++n) {
    float value;
    const int id = take_best(values, ids, TOP, &value);
    if (lane == 0) {
      best_values[place * TOP + n] = value;
      best_ids[place * TOP + n] = id;
    }
  }
}
