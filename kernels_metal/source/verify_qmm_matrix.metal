// x @ dequantised(weights)^T for up to 32 rows through 8x8 matrices; each weight is read once.
//
// A SIMD-group takes COLS tiles of eight columns of the result, all TILES tiles of eight rows, and
// every `parts`-th quantisation group along K. Weights are the left factor as they lie in their
// word, `word & (mask << BITS * s)`, which is exact as a float; x is the right factor, multiplied by
// 2^-(BITS * s), which is exact too. Scale and bias come once a quantisation group: the bias times
// the sum of x. The order of summation is the same for every number of rows.
//
// The order along K inside a tile is free. A lane's first number of step s in its e-th eight is
// weight 8e + s of its quarter of the group, its second 8e + 4 + s, so that words and x are read in runs.
//
// If GATED, half of the columns are gates for the other half: y is silu(x @ first) * (x @ second), and
// a SIMD-group takes half of its tiles from each.
//
// x: [M, K]. weights: [N, K * BITS / 32] uint. scales, biases: [N, K / GROUP].
// sizes: M, K, columns of y, parts (1, 2, 4 or 8). y: [M, N], or [M, N / 2] if GATED.

constexpr int SIMD_GROUPS = 8;
constexpr int ROWS = TILES * 8;
constexpr int WIDTH = COLS * 8;             // columns of a SIMD-group
constexpr int HALVES = GATED ? 2 : 1;
constexpr int HELD = WIDTH / HALVES;        // columns of y of a SIMD-group
constexpr int WORDS = GROUP * BITS / 128;   // of one lane: a quarter of a quantisation group
constexpr int EIGHTS = GROUP / 32;          // weights of one lane, by eight
constexpr int SECOND = BITS == 4 ? 0 : 1;   // words from a lane's first number to its second
constexpr int APART = BITS == 4 ? 16 : 0;   // and bits
constexpr uint MASK = (1u << BITS) - 1;
constexpr float STEP = 1.0f / float(1u << BITS);
threadgroup float partial[SIMD_GROUPS * WIDTH * ROWS];

const int lane = thread_index_in_simdgroup;
const int group = simdgroup_index_in_threadgroup;
const int rows = sizes[0];
const int depth = sizes[1];
const int columns = sizes[2];
const int parts = sizes[3];
const int groups = depth / GROUP;
const int part = group % parts;
const int begin = threadgroup_position_in_grid.x * (SIMD_GROUPS / parts) * HELD;
const int r = matrix_row(lane);
const int c = matrix_column(lane);

// Columns and rows behind the last are computed as copies of it, and not stored.
uint places[COLS];
#pragma clang loop unroll(full)
for (int j = 0; j < COLS; ++j) {
  const int n = min(begin + group / parts * HELD + j * 8 % HELD + r, columns - 1);
  places[j] = (n + j * 8 / HELD * columns) * groups;
}
int x_at[TILES * 2];
#pragma clang loop unroll(full)
for (int i = 0; i < TILES * 2; ++i) {
  x_at[i] = min(i / 2 * 8 + c + i % 2, rows - 1) * depth + r / 2 * (GROUP / 4) + r % 2 * 4;
}
const float first_factor = APART != 0 && r % 2 != 0 ? 1.0f / 65536.0f : 1.0f;
const float4 factors = float4(1.0f, STEP, STEP * STEP, STEP * STEP * STEP) * first_factor;

float2 totals[COLS * TILES];
#pragma clang loop unroll(full)
for (int i = 0; i < COLS * TILES; ++i) {
  totals[i] = float2(0.0f);
}
for (int g = part; g < groups; g += parts) {
  uint words[COLS * 8];
  #pragma clang loop unroll(full)
  for (int j = 0; j < COLS; ++j) {
    const device uint* from = weights + (places[j] + g) * (4 * WORDS) + c / 2 * WORDS;
    if (WORDS == 1) {
      words[j * 8] = from[0];
    } else if (WORDS == 2) {
      const uint2 two = *(const device uint2*)from;
      words[j * 8] = two[0];
      words[j * 8 + 1] = two[1];
    } else {
      #pragma clang loop unroll(full)
      for (int w = 0; w < WORDS; w += 4) {
        const uint4 four = *(const device uint4*)(from + w);
        #pragma clang loop unroll(full)
        for (int i = 0; i < 4; ++i) {
          words[j * 8 + w + i] = four[i];
        }
      }
    }
  }

  float2 sums[COLS * TILES];
  float2 x_sums[TILES];
  #pragma clang loop unroll(full)
  for (int i = 0; i < COLS * TILES; ++i) {
    sums[i] = float2(0.0f);
  }
  #pragma clang loop unroll(full)
  for (int t = 0; t < TILES; ++t) {
    x_sums[t] = float2(0.0f);
  }
  #pragma clang loop unroll(full)
  for (int e = 0; e < EIGHTS; ++e) {
    float4 fours[TILES * 2];
    #pragma clang loop unroll(full)
    for (int i = 0; i < TILES * 2; ++i) {
      const float4 four = widen<T>(*(const device vec<T, 4>*)(x + x_at[i] + g * GROUP + e * 8));
      x_sums[i / 2][i % 2] += (four[0] + four[1]) + (four[2] + four[3]);
      fours[i] = four * factors;
    }
    #pragma clang loop unroll(full)
    for (int s = 0; s < 4; ++s) {
      #pragma clang loop unroll(full)
      for (int j = 0; j < COLS; ++j) {
        const uint first = words[j * 8 + e * (1 + SECOND)] & (MASK << (BITS * s));
        const uint second = words[j * 8 + e * (1 + SECOND) + SECOND] & (MASK << (BITS * s + APART));
        const float2 pair = float2(float(first), float(second));
        #pragma clang loop unroll(full)
        for (int t = 0; t < TILES; ++t) {
          const float2 right = float2(fours[t * 2][s], fours[t * 2 + 1][s]);
          sums[j * TILES + t] = multiply_add<float>(pair, right, sums[j * TILES + t]);
        }
      }
    }
  }

  // With ones on the left every row of the product holds the sums over K.
  #pragma clang loop unroll(full)
  for (int t = 0; t < TILES; ++t) {
    x_sums[t] = multiply_add<float>(float2(1.0f), x_sums[t], float2(0.0f));
  }
  #pragma clang loop unroll(full)
  for (int j = 0; j < COLS; ++j) {
    const float2 scale = float2(float(scales[places[j] + g]));
    const float2 bias = float2(float(biases[places[j] + g]));
    #pragma clang loop unroll(full)
    for (int t = 0; t < TILES; ++t) {
      const int i = j * TILES + t;
      totals[i] = fma(bias, x_sums[t], fma(scale, sums[i], totals[i]));
    }
  }
}

#pragma clang loop unroll(full)
for (int i = 0; i < COLS * TILES; ++i) {
  const int at = (group * WIDTH + i / TILES * 8 + r) * ROWS + i % TILES * 8 + c;
  partial[at] = totals[i][0];
  partial[at + 1] = totals[i][1];
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
        const int column = (n / HELD * parts + p) * WIDTH + h * HELD + n % HELD;
        both[h] += partial[column * ROWS + m];
      }
    }
    y[m * columns + begin + n] = T(GATED ? swish(both[0]) * both[HALVES - 1] : both[0]);
  }
}
