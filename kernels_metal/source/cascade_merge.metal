// Joins the splits of each query row; one SIMD-group per row. Every row sees something, so `top` is
// finite, and a split of which the row sees nothing counts 2^-infinity = 0.
//
// partial: [splits, rows, D]. sums: [splits, rows, 2]: largest score in powers of two, sum.
// sinks: [>= query heads], a score (in powers of e) without a value that joins the sum, minus
// infinity for none. sizes: rows of one head. merged: [1, query heads, R, D].

const int lane = thread_index_in_simdgroup;
const int64_t row = threadgroup_position_in_grid.y;
const int splits = partial_shape[0];
const int rows = partial_shape[1];
const int width = partial_shape[2];
const float sink = sinks[row / sizes[0]] * 1.44269504f;

float top = sink;
for (int split = lane; split < splits; split += 32) {
  top = max(top, sums[(split * rows + row) * 2]);
}
top = simd_max(top);

float total = 0.0f;
for (int split = lane; split < splits; split += 32) {
  total += sums[(split * rows + row) * 2 + 1] * exp2(sums[(split * rows + row) * 2] - top);
}
total = simd_sum(total) + exp2(sink - top);

for (int d = lane; d < width; d += 32) {
  float sum = 0.0f;
  for (int split = 0; split < splits; ++split) {
    const int64_t place = split * rows + row;
    sum += partial[place * width + d] * exp2(sums[place * 2] - top);
  }
  merged[row * width + d] = T(sum / total);
}
