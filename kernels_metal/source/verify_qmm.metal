// x @ dequantised(weights)^T for a few rows; each weight is read once for all of them.
//
// A SIMD-group takes COLS columns of the result and every `parts`-th run of 256 along K, eight
// consecutive weights per lane. A row's sums do not depend on how many rows there are: each lane adds
// in order of k, then the lanes, then the parts.
//
// If GATED, half of the columns are gates for the other half: y is silu(x @ first) * (x @ second), and
// a SIMD-group takes half of its columns from each.
//
// FORM: 0 for integers with scales and biases, 1 and 2 for floats with scales of 8 bits, mxfp4 or mxfp8
// and nvfp4, 3 for weights as they are, of type T; what a form lacks is bound to another array.
//
// x: [M, K], M * COLS <= 32. weights: [N, K * BITS / 32] uint. scales, biases: [N, K / group].
// sizes: M, K, columns of y, log2(group), parts (1, 2, 4 or 8). y: [M, N], or [M, N / 2] if GATED.

constexpr int SIMD_GROUPS = 8;
constexpr int ROWS = 32 / COLS;
constexpr int HALVES = GATED ? 2 : 1;
constexpr int HELD = COLS / HALVES;           // columns of y of one SIMD-group
constexpr bool FLOATS = FORM == 1 || FORM == 2;
constexpr float LARGER = !FLOATS ? 1.0f : BITS == 4 ? 16384.0f : 256.0f;  // than they come, see lanes
threadgroup float group_sums[SIMD_GROUPS * 32];

const int lane = thread_index_in_simdgroup;
const int group = simdgroup_index_in_threadgroup;
const int rows = sizes[0];
const int depth = sizes[1];
const int columns = sizes[2];
const int group_shift = sizes[3];
const int parts = sizes[4];
const int part = group % parts;
const int begin = threadgroup_position_in_grid.x * (SIMD_GROUPS / parts) * HELD;
const int column = begin + group / parts * HELD;

float sums[ROWS * COLS];
#pragma clang loop unroll(full)
for (int i = 0; i < ROWS * COLS; ++i) {
  sums[i] = 0.0f;
}
for (int k = part * 256 + lane * 8; k < depth; k += parts * 256) {
  float w[COLS * 8];
  #pragma clang loop unroll(full)
  for (int i = 0; i < COLS * 8; ++i) {
    w[i] = 0.0f;
  }
  #pragma clang loop unroll(full)
  for (int c = 0; c < COLS; ++c) {
    if (column + c % HELD < columns) {
      const int64_t n = column + c % HELD + c / HELD * columns;
      if (FORM == 3) {
        const device vec<T, 4>* from = (const device vec<T, 4>*)(weights + n * depth + k);
        #pragma clang loop unroll(full)
        for (int j = 0; j < 8; ++j) {
          w[c * 8 + j] = float(from[j / 4][j % 4]);
        }
        continue;
      }
      const int64_t place = n * (depth >> group_shift) + (k >> group_shift);
      const float scale = scale_of<FORM>(scales[place]);
      const float bias = FORM == 0 ? float(biases[place]) : 0.0f;
      const int64_t eight = (n * depth + k) / 8;
      uint first = 0;
      uint second = 0;
      if (BITS == 6) {
        const device ushort* from = (const device ushort*)weights + eight * 3;
        first = from[0] | uint(from[1]) << 16;
        second = from[1] >> 8 | uint(from[2]) << 8;
      } else {
        first = uint(weights[eight * (BITS / 4)]);
        second = BITS == 4 ? first : uint(weights[eight * 2 + 1]);
      }
      const float4 firsts = per_place<BITS, FLOATS>(false) * scale;
      const float4 seconds = per_place<BITS, FLOATS>(true) * scale;
      #pragma clang loop unroll(full)
      for (int s = 0; s < 4; ++s) {
        const float2 pair = two_weights<BITS, FLOATS>(first, second, s);
        w[c * 8 + s] = fma(firsts[s], pair[0], bias);
        w[c * 8 + 4 + s] = fma(seconds[s], pair[1], bias);
      }
    }
  }
  #pragma clang loop unroll(full)
  for (int m = 0; m < ROWS; ++m) {
    if (m < rows) {
      #pragma clang loop unroll(full)
      for (int half_run = 0; half_run < 8; half_run += 4) {
        const float4 four = widen<T>(*(const device vec<T, 4>*)(x + m * depth + k + half_run));
        #pragma clang loop unroll(full)
        for (int c = 0; c < COLS; ++c) {
          #pragma clang loop unroll(full)
          for (int j = 0; j < 4; ++j) {
            sums[m * COLS + c] = fma(four[j], w[c * 8 + half_run + j], sums[m * COLS + c]);
          }
        }
      }
    }
  }
}

#pragma clang loop unroll(full)
for (int m = 0; m < ROWS; ++m) {
  if (m < rows) {
    #pragma clang loop unroll(full)
    for (int c = 0; c < COLS; ++c) {
      const float sum = simd_sum(sums[m * COLS + c]);
      if (lane == 0) {
        group_sums[group * 32 + m * COLS + c] = sum;
      }
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

const int width = SIMD_GROUPS / parts * HELD;
for (int i = thread_index_in_threadgroup; i < width * rows; i += SIMD_GROUPS * 32) {
  const int m = i / width;
  const int n = i % width;
  if (begin + n < columns) {
    float both[HALVES];
    #pragma clang loop unroll(full)
    for (int h = 0; h < HALVES; ++h) {
      both[h] = 0.0f;
      for (int p = 0; p < parts; ++p) {
        both[h] += group_sums[(n / HELD * parts + p) * 32 + m * COLS + h * HELD + n % HELD];
      }
      both[h] *= LARGER;
    }
    y[m * columns + begin + n] = T(GATED ? swish(both[0]) * both[HALVES - 1] : both[0]);
  }
}
