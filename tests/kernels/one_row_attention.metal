// The usual way, as a control: one SIMD-group for each query row, which reads all keys by itself.
//
// queries: [1, heads, R, D]. keys, values: [1, key/value heads, slots, D]. dense: [R, slots] bool.
// y: [1, heads, R, D].

const int lane = thread_index_in_simdgroup;
const int row = threadgroup_position_in_grid.y;
const int head = row / queries_shape[2];
const int slots = keys_shape[2];
const int64_t shared = int64_t(head / (queries_shape[1] / keys_shape[1])) * slots;
constexpr int HELD = D / 32;

float held[HELD];
for (int j = 0; j < HELD; ++j) {
  held[j] = 0.0f;
}
float peak = -INFINITY;
float total = 0.0f;
for (int slot = 0; slot < slots; ++slot) {
  if (dense[(row % queries_shape[2]) * slots + slot]) {
    float score = 0.0f;
    for (int j = 0; j < HELD; ++j) {
      const int d = lane + 32 * j;
      score += float(queries[row * D + d]) * float(keys[(shared + slot) * D + d]);
    }
    score = simd_sum(score) * scale[0];
    const float top = max(peak, score);
    const float keep = exp(peak - top);
    const float weight = exp(score - top);
    total = total * keep + weight;
    peak = top;
    for (int j = 0; j < HELD; ++j) {
      held[j] = held[j] * keep + weight * float(values[(shared + slot) * D + lane + 32 * j]);
    }
  }
}
for (int j = 0; j < HELD; ++j) {
  y[row * D + lane + 32 * j] = T(held[j] / total);
}
