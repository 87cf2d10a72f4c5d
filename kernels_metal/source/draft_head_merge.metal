// Joins the parts of each row; one SIMD-group per row, one part per lane.
//
// best_values, best_ids: [rows, parts, TOP]. sums: [rows, parts, 2]. parts <= 32.
// ids: [rows, TOP]. logprobs: [rows, TOP]. normal: [rows], the log of the sum of exponentials.

const int lane = thread_index_in_simdgroup;
const int row = threadgroup_position_in_grid.y;
const int parts = best_ids_shape[1];

float values[TOP];
int part_ids[TOP];
clear_list(values, part_ids, TOP);
float peak = -INFINITY;
float total = 0.0f;
if (lane < parts) {
  const int64_t place = int64_t(row) * parts + lane;
  #pragma clang loop unroll(full)
  for (int n = 0; n < TOP; ++n) {
    values[n] = best_values[place * TOP + n];
    part_ids[n] = best_ids[place * TOP + n];
  }
  peak = sums[place * 2];
  total = sums[place * 2 + 1];
}
const float row_peak = simd_max(peak);
const float row_normal = row_peak + log(simd_sum(total * rescale(peak, row_peak)));
if (lane == 0) {
  normal[row] = row_normal;
}
#pragma clang loop unroll(full)
for (int n = 0; n < TOP; ++n) {
  float value;
  const int id = take_best(values, part_ids, TOP, &value);
  if (lane == 0) {
    ids[row * TOP + n] = id;
    logprobs[row * TOP + n] = value - row_normal;
  }
}
