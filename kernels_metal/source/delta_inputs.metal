// What a gated delta net makes of its products: convolution along each row's path, SiLU, the norms
// of queries and keys, decays and betas. A SIMD-group takes one head of one row.
//
// qkv: [1, R, C], a, b: [1, R, HV], rows at any stride. convolved: [1, TAPS - 1, C], what was
// before. weight: [C, TAPS, 1]. rates, biases: [HV]. sources: [R, TAPS] in order: rows of `window`.
// q, k: [1, R, HK, D]. v: [1, R, HV, D]. decays, beta: [1, R, HV]. window: [1, TAPS - 1 + R, C], the
// state and the rows behind it.

constexpr int EACH = D / 32;
constexpr int BEFORE = TAPS - 1;
constexpr int WIDTH = (2 * HK + HV) * D;

const int lane = thread_index_in_simdgroup;
const int head = threadgroup_position_in_grid.y;  // of queries, then of keys, then of values
const int row = threadgroup_position_in_grid.z;
const int rows = threadgroups_per_grid.z;
const int place = head * D + lane * EACH;
const int step = qkv_strides[1];

float found[EACH];
float squares = 0.0f;
#pragma clang loop unroll(full)
for (int i = 0; i < EACH; ++i) {
  float sum = 0.0f;
  for (int tap = 0; tap < TAPS; ++tap) {
    const int from = sources[row * TAPS + tap];
    const T x = from < BEFORE ? convolved[from * WIDTH + place + i]
                              : qkv[(from - BEFORE) * step + place + i];
    sum += float(x) * float(weight[(place + i) * TAPS + tap]);
  }
  found[i] = sum / (1.0f + exp(-sum));
  squares += found[i] * found[i];
  window[(BEFORE + row) * WIDTH + place + i] = qkv[row * step + place + i];
  for (int from = row; from < BEFORE; from += rows) {
    window[from * WIDTH + place + i] = convolved[from * WIDTH + place + i];
  }
}

float size = 1.0f;
if (head < 2 * HK) {
  size = rsqrt(simd_sum(squares) + 1e-6f) * (head < HK ? rsqrt(float(D)) : 1.0f);
}
device float* to = head < HK       ? q + (row * HK + head) * D
               : head < 2 * HK ? k + (row * HK + head - HK) * D
                               : v + (row * HV + head - 2 * HK) * D;
#pragma clang loop unroll(full)
for (int i = 0; i < EACH; ++i) {
  to[lane * EACH + i] = found[i] * size;
}
if (head >= 2 * HK && lane == 0) {
  const int gate = head - 2 * HK;
  const float x = float(a[row * a_strides[1] + gate]) + float(biases[gate]);
  const float plus = max(x, 0.0f) + log(1.0f + exp(-abs(x)));
  decays[row * HV + gate] = exp(-exp(float(rates[gate])) * plus);
  beta[row * HV + gate] = 1.0f / (1.0f + exp(-float(b[row * b_strides[1] + gate])));
}
