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
// FORM: 0 for integers with scales and biases, 1 for floats with scales of 8 bits (mxfp4, mxfp8), 2 with
// two of them in each GROUP (nvfp4), 3 for weights as they are, of type T. Floats come as they lie in a
// half, so they need no conversion and no places; what a form lacks is bound to another array.
//
// x: [M, K]. weights: [N, K * BITS / 32] uint. scales, biases: [N, K / GROUP].
// sizes: M, K, columns of y, parts (1, 2, 4 or 8). y: [M, N], or [M, N / 2] if GATED.

constexpr int SIMD_GROUPS = 8;
constexpr int ROWS = TILES * 8;
constexpr int WIDTH = COLS * 8;             // columns of a SIMD-group
constexpr int HALVES = GATED ? 2 : 1;
constexpr int HELD = WIDTH / HALVES;        // columns of y of a SIMD-group
constexpr int WORDS = GROUP * BITS / 128;   // of one lane: a quarter of a group
constexpr int EIGHTS = GROUP / 32;          // weights of one lane, by eight
constexpr bool FLOATS = FORM == 1 || FORM == 2;
constexpr float LARGER = !FLOATS ? 1.0f : BITS == 4 ? 16384.0f : 256.0f;  // than they come, see lanes
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
const float4 factors = per_place<BITS, FLOATS>(r % 2 != 0);

float2 totals[COLS * TILES];
#pragma clang loop unroll(full)
for (int i = 0; i < COLS * TILES; ++i) {
  totals[i] = float2(0.0f);
}
for (int g = part; g < groups; g += parts) {
  if (FORM == 3) {
    vec<T, 4> left[COLS * 2];
    #pragma clang loop unroll(full)
    for (int i = 0; i < COLS * 2; ++i) {
      const device T* from = (const device T*)weights + (places[i / 2] + g) * GROUP;
      left[i] = *(const device vec<T, 4>*)(from + c * 4 + i % 2 * 4);
    }
    vec<T, 4> right[TILES * 2];
    #pragma clang loop unroll(full)
    for (int i = 0; i < TILES * 2; ++i) {
      right[i] = *(const device vec<T, 4>*)(x + x_at[i] + g * GROUP);
    }
    #pragma clang loop unroll(full)
    for (int s = 0; s < 4; ++s) {
      #pragma clang loop unroll(full)
      for (int i = 0; i < COLS * TILES; ++i) {
        const int j = i / TILES * 2;
        const int t = i % TILES * 2;
        const vec<T, 2> pair = vec<T, 2>(left[j][s], left[j + 1][s]);
        totals[i] = multiply_add<T>(pair, vec<T, 2>(right[t][s], right[t + 1][s]), totals[i]);
      }
    }
    continue;
  }

  uint words[COLS * 8];
  #pragma clang loop unroll(full)
  for (int j = 0; j < COLS; ++j) {
    const device uint* from = (const device uint*)weights;
    from += (places[j] + g) * (4 * WORDS) + c / 2 * WORDS;
    #pragma clang loop unroll(full)
    for (int w = 0; w < WORDS; w += WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1) {
      if (WORDS % 4 == 0) {
        const uint4 four = *(const device uint4*)(from + w);
        #pragma clang loop unroll(full)
        for (int i = 0; i < 4; ++i) {
          words[j * 8 + w + i] = four[i];
        }
      } else if (WORDS % 2 == 0) {
        const uint2 two = *(const device uint2*)(from + w);
        words[j * 8 + w] = two[0];
        words[j * 8 + w + 1] = two[1];
      } else {
        words[j * 8 + w] = from[w];
      }
    }
  }
  float own[COLS];  // the scale of this lane's quarter, where a group has two
  if (FORM == 2) {
    #pragma clang loop unroll(full)
    for (int j = 0; j < COLS; ++j) {
      own[j] = scale_of<FORM>(scales[(places[j] + g) * 2 + c / 4]);
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
        // Of 6 bits eight weights take a word and a half
        const int at = j * 8 + (BITS == 4 ? e : BITS == 8 ? e * 2 : e / 2 * 3);
        const uint first = BITS != 6 || e % 2 == 0 ? words[at]
                                                   : words[at + 1] >> 16 | words[at + 2] << 16;
        const uint second = BITS == 4   ? first
                            : BITS == 8 ? words[at + 1]
                            : e % 2 == 0 ? words[at] >> 24 | words[at + 1] << 8
                                         : words[at + 2] >> 8;
        float2 pair = two_weights<BITS, FLOATS>(first, second, s);
        if (FORM == 2) {
          pair *= own[j];
        }
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
    if (FORM == 0) {
      x_sums[t] = multiply_add<float>(float2(1.0f), x_sums[t], float2(0.0f));
    }
  }
  #pragma clang loop unroll(full)
  for (int j = 0; j < COLS; ++j) {
    const uint place = places[j] + g;
    const float scale = FORM == 2 ? 1.0f : scale_of<FORM>(scales[place]);
    const float bias = FORM == 0 ? float(biases[place]) : 0.0f;
    #pragma clang loop unroll(full)
    for (int t = 0; t < TILES; ++t) {
      const int i = j * TILES + t;
      totals[i] = fma(float2(scale), sums[i], totals[i]);
      if (FORM == 0) {
        totals[i] = fma(float2(bias), x_sums[t], totals[i]);
      }
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
      both[h] *= LARGER;
    }
    y[m * columns + begin + n] = T(GATED ? swish(both[0]) * both[HALVES - 1] : both[0]);
  }
}
