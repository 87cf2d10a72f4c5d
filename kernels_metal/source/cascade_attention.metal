// All query rows against one split of the keys, which is read once for all of them.
//
// A threadgroup takes one key/value head and one split, tile by tile through threadgroup memory.
// Each SIMD-group keeps ROWS query rows in registers: largest score, sum, weighted values. Where the
// rows of all heads are more than the threadgroup keeps, the wrapper makes a split one tile long, and
// the rows pass over the tile one set after the other.
//
// queries: [1, heads * G, R, D]. keys, values: [1, heads, slots, D], any strides.
// visible: [>= R, 1 + words]: first key of the prefix a row sees, then a bit for each local key.
// sizes: R, G, first key, keys of the prefix, keys in all, keys in a split, words.
// partial: [splits, heads * G * R, D]. sums: [splits, heads * G * R, 2]: largest score, sum.

constexpr int SIMD_GROUPS = 8;
constexpr int THREADS = SIMD_GROUPS * 32;
constexpr int HELD = (D + 31) / 32;  // dimensions of the result in one lane
constexpr int SHARES = 32 / KEYS;    // lanes that share the dot product of one key
constexpr int SHARE = D / SHARES;
constexpr int FOURS = D / 4;
constexpr int STRIDE = FOURS + 1;    // so that the lanes' keys begin in different banks
threadgroup vec<T, 4> tile_keys[KEYS * STRIDE];
threadgroup vec<T, 4> tile_values[KEYS * FOURS];
threadgroup float4 tile_weights[SIMD_GROUPS * ROWS * KEYS / 4];
const threadgroup T* value = (const threadgroup T*)tile_values;
threadgroup float* weights = (threadgroup float*)tile_weights;

const int thread_id = thread_index_in_threadgroup;
const int lane = thread_index_in_simdgroup;
const int group = simdgroup_index_in_threadgroup;
const int64_t head = threadgroup_position_in_grid.x;
const int split = threadgroup_position_in_grid.y;
const int rows = sizes[0] * sizes[1];
const int prefix = sizes[3];
const int words = sizes[6];
const int begin = sizes[2] + split * sizes[5];
const int end = min(begin + sizes[5], sizes[4]);
const int key = lane % KEYS;
const int share = lane / KEYS * SHARE;

float peak[ROWS];
float total[ROWS];
float held[ROWS * HELD];
for (int tile = begin; tile < end; tile += KEYS) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = thread_id; i < KEYS * FOURS; i += THREADS) {
    const int64_t slot = tile + i / FOURS;
    const int64_t d = i % FOURS * 4;
    vec<T, 4> k = vec<T, 4>(T(0));
    vec<T, 4> v = vec<T, 4>(T(0));
    if (slot < end) {
      for (int j = 0; j < 4; ++j) {
        k[j] = keys[head * keys_strides[1] + slot * keys_strides[2] + (d + j) * keys_strides[3]];
        v[j] =
            values[head * values_strides[1] + slot * values_strides[2] + (d + j) * values_strides[3]];
      }
    }
    tile_keys[i / FOURS * STRIDE + i % FOURS] = k;
    tile_values[i] = v;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (int block = 0; block < rows; block += SIMD_GROUPS * ROWS) {
    // This SIMD-group's rows are first, first + SIMD_GROUPS, ...
    const int first = block + group;
    const int count = clamp((rows - first + SIMD_GROUPS - 1) / SIMD_GROUPS, 0, ROWS);
    float scores[ROWS];
    for (int i = 0; i < ROWS; ++i) {
      scores[i] = 0.0f;
      if (tile == begin) {
        peak[i] = -INFINITY;
        total[i] = 0.0f;
        for (int j = 0; j < HELD; ++j) {
          held[i * HELD + j] = 0.0f;
        }
      }
    }
    for (int d = share; d < share + SHARE; d += 4) {
      const float4 k = widen<T>(tile_keys[key * STRIDE + d / 4]);
      for (int i = 0; i < ROWS; ++i) {
        if (i < count) {
          const device T* row = queries + (head * rows + first + i * SIMD_GROUPS) * D;
          scores[i] += dot(widen<T>(*(const device vec<T, 4>*)(row + d)), k);
        }
      }
    }

    for (int i = 0; i < ROWS; ++i) {
      if (i < count) {
        float score = scores[i];
        for (int apart = KEYS; apart < 32; apart *= 2) {
          score += simd_shuffle_xor(score, apart);
        }
        const int seen = (first + i * SIMD_GROUPS) % sizes[0] * (1 + words);
        const int slot = tile + key;
        bool shown = false;
        if (slot < min(prefix, end)) {
          shown = slot >= int(visible[seen]);
        } else if (slot < end) {
          const int local = slot - prefix;
          shown = (visible[seen + 1 + local / 32] >> (local % 32)) & 1;
        }
        score = shown ? score * scale[0] : -INFINITY;
        const float top = max(peak[i], simd_max(score));
        const float keep = peak[i] == top ? 1.0f : exp(peak[i] - top);
        const float weight = shown ? exp(score - top) : 0.0f;
        if (lane < KEYS) {
          weights[(group * ROWS + i) * KEYS + key] = weight;
        }
        total[i] = total[i] * keep + simd_sum(lane < KEYS ? weight : 0.0f);
        peak[i] = top;
        for (int j = 0; j < HELD; ++j) {
          held[i * HELD + j] *= keep;
        }
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);

    for (int k = 0; k < KEYS; k += 4) {
      float4 weight[ROWS];
      for (int i = 0; i < ROWS; ++i) {
        if (i < count) {
          weight[i] = tile_weights[((group * ROWS + i) * KEYS + k) / 4];
        }
      }
      for (int j = 0; j < HELD; ++j) {
        const int d = lane + 32 * j;
        if (d < D) {
          const threadgroup T* v = value + k * D + d;
          const float4 four = float4(float(v[0]), float(v[D]), float(v[2 * D]), float(v[3 * D]));
          for (int i = 0; i < ROWS; ++i) {
            if (i < count) {
              held[i * HELD + j] += dot(weight[i], four);
            }
          }
        }
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);

    if (tile + KEYS >= end) {
      for (int i = 0; i < ROWS; ++i) {
        if (i < count) {
          const int64_t row = first + i * SIMD_GROUPS;
          const int64_t place = (int64_t(split) * threadgroups_per_grid.x + head) * rows + row;
          for (int j = 0; j < HELD; ++j) {
            if (lane + 32 * j < D) {
              partial[place * D + lane + 32 * j] = held[i * HELD + j];
            }
          }
          if (lane == 0) {
            sums[place * 2] = peak[i];
            sums[place * 2 + 1] = total[i];
          }
        }
      }
    }
  }
}
