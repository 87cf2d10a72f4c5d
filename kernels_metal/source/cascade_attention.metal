// All query rows against one split of the keys, which is read once for all of them.
//
// A threadgroup takes one key/value head, one split and eight rows for each of its SIMD-groups. At a
// head dim of 256 two SIMD-groups share eight rows, half of the dimensions each, since one has no
// registers for all: they add up each other's scores. Keys and values come tile by tile through
// threadgroup memory, where quantised ones are unpacked. A SIMD-group holds its rows, their largest
// score, sum and weighted values in registers, and multiplies through 8x8 matrices: a lane has two
// keys of one row.
//
// Which dimension stands where in a matrix is free as long as both factors agree: a lane's are
// 2 * STEPS in a run of each block, for queries, values and the result.
//
// queries: [1, heads * G, R, D], any strides. keys, values: [1, heads, slots, D], any strides; with
// BITS [1, heads, slots, D * BITS / 32] uint, and scales and biases [1, heads, slots, D / GROUP].
// visible: [>= R, 1 + words]: first key of the prefix a row sees, then a bit for each local key.
// sizes: R, G, first key, first key from which on all rows see the prefix, keys of the prefix, keys in
// all, keys in a split, words. sinks: [>= heads * G], see cascade_merge.
// result: [splits, heads * G * R, D]: weighted values; where there is one split, all done.
// sums: [splits, heads * G * R, 2]: largest score in powers of two, sum.

constexpr int STEPS = D % 32 == 0 ? 4 : 2;  // matrix products for one block of dimensions
constexpr int BLOCK = 8 * STEPS;
constexpr int HALVES = D > 128 ? 2 : 1;
constexpr int WIDTH = D / HALVES;           // dimensions of one SIMD-group
constexpr int BLOCKS = WIDTH / BLOCK;
constexpr int HELD = WIDTH / 8;             // pairs of weighted values in one lane
constexpr int EIGHTS = D / 8;               // lanes that load one key
constexpr int AT_ONCE = 32 / EIGHTS;        // keys that a SIMD-group loads at a time
constexpr int STRIDE = D + 8;               // so that keys begin in different banks,
constexpr int VALUE_STRIDE = D % 32 == 0 ? D + 12 : D + 8;  // and values, read eight at a time
constexpr int PAIRS = KEYS / 8;             // of keys in one lane
constexpr uint MASK = (1u << BITS) - 1;
constexpr float NOTHING = -1e30f;           // the score of a key that a row does not see
threadgroup vec<T, 4> tile_keys[KEYS * STRIDE / 4];
threadgroup vec<T, 4> tile_values[KEYS * VALUE_STRIDE / 4];
threadgroup float2 halves[HALVES == 2 ? 12 * 32 * PAIRS : 1];  // of scores, 12 SIMD-groups at most
const threadgroup T* shared_keys = (const threadgroup T*)tile_keys;

const int lane = thread_index_in_simdgroup;
const int group = simdgroup_index_in_threadgroup;
const int groups = simdgroups_per_threadgroup;
const int64_t head = threadgroup_position_in_grid.x;
const int split = threadgroup_position_in_grid.y;
const int rows = sizes[0] * sizes[1];
const int clear = sizes[3];
const int prefix = sizes[4];
const int words = sizes[7];
const int begin = sizes[2] + split * sizes[6];
const int end = min(begin + sizes[6], sizes[5]);
const bool runs = keys_strides[3] == 1 && values_strides[3] == 1 &&
    (keys_strides[1] | keys_strides[2] | values_strides[1] | values_strides[2]) % 4 == 0;
const int r = matrix_row(lane);
const int c = matrix_column(lane);
const int lane_key = lane / EIGHTS;
const int eight = lane % EIGHTS;

// Rows behind the last are computed as copies of it, and not stored.
const int first = (threadgroup_position_in_grid.z * groups + group) / HALVES * 8;
const int side = group % HALVES * WIDTH;
const bool busy = first < rows;
const int row = min(first + r, rows - 1);
const int64_t query_head = head * sizes[1] + row / sizes[0];
const int seen = row % sizes[0] * (1 + words);
const int window = visible[seen];

T query[WIDTH / 4];
float2 held[HELD];
float peak = NOTHING;
float total = 0.0f;
#pragma clang loop unroll(full)
for (int b = 0; b < BLOCKS; ++b) {
  #pragma clang loop unroll(full)
  for (int i = 0; i < 2 * STEPS; ++i) {
    const int64_t d = side + b * BLOCK + STEPS * c + i;
    query[b * 2 * STEPS + i] =
        queries[query_head * queries_strides[1] + row % sizes[0] * queries_strides[2] +
                d * queries_strides[3]];
  }
}
#pragma clang loop unroll(full)
for (int i = 0; i < HELD; ++i) {
  held[i] = float2(0.0f);
}
const float unit = scale[0] * 1.44269504f;  // scores are powers of two

for (int tile = begin; tile < end; tile += KEYS) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int k = group * AT_ONCE + lane_key; k < KEYS; k += groups * AT_ONCE) {
    const int64_t slot = tile + k;
    const int64_t key = head * keys_strides[1] + slot * keys_strides[2];
    const int64_t value = head * values_strides[1] + slot * values_strides[2];
    const int key_at = (k * STRIDE + eight * 8) / 4;
    const int value_at = (k * VALUE_STRIDE + eight * 8) / 4;
    vec<T, 4> four_keys[2] = {vec<T, 4>(T(0)), vec<T, 4>(T(0))};
    vec<T, 4> four_values[2] = {vec<T, 4>(T(0)), vec<T, 4>(T(0))};
    if (lane_key < AT_ONCE && slot < end) {
      if (BITS != 0) {
        const int64_t key_group = head * key_scales_strides[1] + slot * key_scales_strides[2] +
            eight * 8 / GROUP * key_scales_strides[3];
        const int64_t value_group = head * value_scales_strides[1] +
            slot * value_scales_strides[2] + eight * 8 / GROUP * value_scales_strides[3];
        const float2 scales =
            float2(float(key_scales[key_group]), float(value_scales[value_group]));
        const float2 biases =
            float2(float(key_biases[key_group]), float(value_biases[value_group]));
        uint2 packed = uint2(0u);
        #pragma clang loop unroll(full)
        for (int i = 0; i < 8; ++i) {
          if (i * BITS % 32 == 0) {
            const int64_t word = (eight * 8 + i) * BITS / 32;
            packed[0] = uint(keys[key + word * keys_strides[3]]);
            packed[1] = uint(values[value + word * values_strides[3]]);
          }
          const float2 numbers = float2(float(packed[0] & MASK), float(packed[1] & MASK));
          const float2 whole = fma(numbers, scales, biases);
          four_keys[i / 4][i % 4] = T(whole[0]);
          four_values[i / 4][i % 4] = T(whole[1]);
          packed = packed >> BITS;
        }
      } else if (runs) {
        #pragma clang loop unroll(full)
        for (int i = 0; i < 2; ++i) {
          four_keys[i] = *(const device vec<T, 4>*)(keys + key + eight * 8 + i * 4);
          four_values[i] = *(const device vec<T, 4>*)(values + value + eight * 8 + i * 4);
        }
      } else {
        #pragma clang loop unroll(full)
        for (int i = 0; i < 8; ++i) {
          four_keys[i / 4][i % 4] = T(keys[key + (eight * 8 + i) * keys_strides[3]]);
          four_values[i / 4][i % 4] = T(values[value + (eight * 8 + i) * values_strides[3]]);
        }
      }
    }
    if (lane_key < AT_ONCE) {
      tile_keys[key_at] = four_keys[0];
      tile_keys[key_at + 1] = four_keys[1];
      tile_values[value_at] = four_values[0];
      tile_values[value_at + 1] = four_values[1];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (!busy && HALVES == 1) {
    continue;
  }

  float2 scores[PAIRS];
  #pragma clang loop unroll(full)
  for (int p = 0; p < PAIRS; ++p) {
    scores[p] = float2(0.0f);
    #pragma clang loop unroll(full)
    for (int b = 0; b < BLOCKS; ++b) {
      const int at = (p * 8 + c) * STRIDE + side + b * BLOCK + STEPS * r;
      const threadgroup T* from = shared_keys + at;
      const vec<T, STEPS> one = *(const threadgroup vec<T, STEPS>*)from;
      const vec<T, STEPS> two = *(const threadgroup vec<T, STEPS>*)(from + STRIDE);
      #pragma clang loop unroll(full)
      for (int s = 0; s < STEPS; ++s) {
        const vec<T, 2> left = {query[b * 2 * STEPS + s], query[b * 2 * STEPS + STEPS + s]};
        const vec<T, 2> right = {one[s], two[s]};
        scores[p] = multiply_add<T>(left, right, scores[p]);
      }
    }
  }
  if (HALVES == 2) {
    #pragma clang loop unroll(full)
    for (int p = 0; p < PAIRS; ++p) {
      halves[(group * PAIRS + p) * 32 + lane] = scores[p];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    #pragma clang loop unroll(full)
    for (int p = 0; p < PAIRS; ++p) {
      scores[p] += halves[((group ^ 1) * PAIRS + p) * 32 + lane];
    }
  }
  #pragma clang loop unroll(full)
  for (int p = 0; p < PAIRS; ++p) {
    scores[p] *= unit;
  }

  if (tile < clear || tile + KEYS > min(prefix, end)) {
    #pragma clang loop unroll(full)
    for (int i = 0; i < 2 * PAIRS; ++i) {
      const int slot = tile + i / 2 * 8 + c + i % 2;
      bool shown = false;
      if (slot < min(prefix, end)) {
        shown = slot >= window;
      } else if (slot < end) {
        const uint local = slot - prefix;
        shown = (visible[seen + 1 + local / 32] >> (local % 32)) & 1;
      }
      if (!shown) {
        scores[i / 2][i % 2] = NOTHING;
      }
    }
  }

  // A row's keys are in the four lanes that differ in bits 0 and 3.
  float top = peak;
  #pragma clang loop unroll(full)
  for (int p = 0; p < PAIRS; ++p) {
    top = max(top, max(scores[p][0], scores[p][1]));
  }
  top = max(top, simd_shuffle_xor(top, 1));
  top = max(top, simd_shuffle_xor(top, 8));
  const float base = top == NOTHING ? 0.0f : top;
  const float keep = fast::exp2(peak - base);
  peak = top;
  total *= keep;
  #pragma clang loop unroll(full)
  for (int i = 0; i < HELD; ++i) {
    held[i] *= keep;
  }
  #pragma clang loop unroll(full)
  for (int p = 0; p < PAIRS; ++p) {
    const float2 weights = float2(fast::exp2(scores[p][0] - base), fast::exp2(scores[p][1] - base));
    total += weights[0] + weights[1];
    #pragma clang loop unroll(full)
    for (int b = 0; b < BLOCKS; ++b) {
      const int at = ((p * 8 + r) * VALUE_STRIDE + side + b * BLOCK + STEPS * c) / 4;
      #pragma clang loop unroll(full)
      for (int i = 0; i < STEPS / 2; ++i) {
        const float4 four = widen<T>(tile_values[at + i]);
        const int two = b * STEPS + i * 2;
        held[two] = multiply_add<float>(weights, float2(four[0], four[1]), held[two]);
        held[two + 1] = multiply_add<float>(weights, float2(four[2], four[3]), held[two + 1]);
      }
    }
  }
}

if (!busy) {
  return;
}
total += simd_shuffle_xor(total, 1);
total += simd_shuffle_xor(total, 8);
const bool last = threadgroups_per_grid.y == 1;
const float sink = last ? sinks[query_head] * 1.44269504f : -INFINITY;
const float top = max(peak, sink);
const float whole = total * exp2(peak - top) + exp2(sink - top);
const float factor = last ? exp2(peak - top) / whole : 1.0f;
const int64_t place = (int64_t(split) * threadgroups_per_grid.x + head) * rows + row;
if (first + r < rows) {
  #pragma clang loop unroll(full)
  for (int i = 0; i < HELD; ++i) {
    const int d = side + i / STEPS * BLOCK + STEPS * c + i % STEPS * 2;
    result[place * D + d] = O(held[i][0] * factor);
    result[place * D + d + 1] = O(held[i][1] * factor);
  }
  if (c == 0 && side == 0) {
    sums[place * 2] = peak;
    sums[place * 2 + 1] = total;
  }
}
