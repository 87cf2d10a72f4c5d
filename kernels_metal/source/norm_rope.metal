// Queries and keys, normalised head by head and turned to their rows' positions (RMS norm, rotary
// embedding of halves). A SIMD-group takes one head of one row; a lane both numbers of a pair.
//
// queries, keys: [1, R, heads * D], rows at any stride; STEP from a head of the queries to the next,
// behind which a gate may stand. query_weight, key_weight: [D]. positions: [R] or more. periods:
// [TURNED], positions a radian; the D - 2 * TURNED last numbers of a head stay. epsilon: [1].
// turned_queries, turned_keys: [1, heads, R, D]; HEADS of the queries.

constexpr int HALF = D / 2;
constexpr int EACH = (HALF + 31) / 32;  // pairs of one lane

const int lane = thread_index_in_simdgroup;
const int row = threadgroup_position_in_grid.z;
const int rows = threadgroups_per_grid.z;
const bool is_query = threadgroup_position_in_grid.y < HEADS;
const int head = threadgroup_position_in_grid.y - (is_query ? 0 : HEADS);
const device T* from = is_query ? queries + row * queries_strides[1] + head * STEP
                                : keys + row * keys_strides[1] + head * D;
const device T* weight = is_query ? query_weight : key_weight;
device T* to = is_query ? turned_queries : turned_keys;

float2 pairs[EACH];
float squares = 0.0f;
#pragma clang loop unroll(full)
for (int i = 0; i < EACH; ++i) {
  const int at = i * 32 + lane;
  pairs[i] = float2(0.0f);
  if (at < HALF) {
    const int first = at < TURNED ? at : TURNED + at;
    const int second = first + (at < TURNED ? TURNED : HALF - TURNED);
    pairs[i] = float2(float(from[first]), float(from[second]));
    squares += pairs[i][0] * pairs[i][0] + pairs[i][1] * pairs[i][1];
  }
}
const float size = rsqrt(simd_sum(squares) / D + epsilon[0]);
#pragma clang loop unroll(full)
for (int i = 0; i < EACH; ++i) {
  const int at = i * 32 + lane;
  if (at < HALF) {
    const int first = at < TURNED ? at : TURNED + at;
    const int second = first + (at < TURNED ? TURNED : HALF - TURNED);
    const float a = pairs[i][0] * size * float(weight[first]);
    const float b = pairs[i][1] * size * float(weight[second]);
    float c = 1.0f;
    float s = 0.0f;
    if (at < TURNED) {
      const float angle = float(positions[row]) * (1.0f / periods[at]);
      c = precise::cos(angle);
      s = precise::sin(angle);
    }
    device T* place = to + (head * rows + row) * D;
    place[first] = T(a * c - b * s);
    place[second] = T(a * s + b * c);
  }
}
