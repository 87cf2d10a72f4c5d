#include <metal_simdgroup_matrix>

// Four numbers of any type as floats, one by one: not every Metal converts vectors of bfloat.
template <typename T>
inline float4 widen(vec<T, 4> x) {
  return float4(float(x[0]), float(x[1]), float(x[2]), float(x[3]));
}

// x * sigmoid(x)
inline float swish(float x) {
  return x / (1.0f + exp(-x));
}

// Of an 8x8 matrix a lane holds two neighbouring numbers of one row, in this order on Apple's GPUs.
inline int matrix_row(int lane) {
  return (lane / 4 & 4) + lane / 2 % 4;
}

inline int matrix_column(int lane) {
  return (lane / 4 & 2) * 2 + lane % 2 * 2;
}

// a * b + c for 8x8 matrices, each given by the two numbers that this lane holds.
template <typename T>
inline float2 multiply_add(vec<T, 2> a, vec<T, 2> b, float2 c) {
  simdgroup_matrix<T, 8, 8> left;
  simdgroup_matrix<T, 8, 8> right;
  simdgroup_matrix<float, 8, 8> sum;
  left.thread_elements()[0] = a[0];
  left.thread_elements()[1] = a[1];
  right.thread_elements()[0] = b[0];
  right.thread_elements()[1] = b[1];
  sum.thread_elements()[0] = c[0];
  sum.thread_elements()[1] = c[1];
  simdgroup_multiply_accumulate(sum, left, right, sum);
  return float2(sum.thread_elements()[0], sum.thread_elements()[1]);
}

// Weights s and s + 4 of eight, of which the words a and b have four each, or a all where they have
// 4 bits. Integers come as they lie there, see `per_place`. Floats are e2m1 or e4m3, whose bits stand
// in a half as in themselves, so that they come 2^-14 or 2^-8 of what they are; a NaN comes as 480.
template <int BITS, bool FLOATS>
inline float2 two_weights(uint a, uint b, int s) {
  if (FLOATS) {
    const uint halves = s < 2 ? (a & 0xFFFFu) | b << 16 : a >> 16 | (b & 0xFFFF0000u);
    const uint word = BITS == 4 ? a : halves;
    const int at = BITS == 4 ? 4 * s : 8 * (s % 2);
    const int up = (BITS == 4 ? 9 : 7) - at;
    const uint moved = up > 0 ? word << up : word >> -up;
    const uint sign = word << (16 - BITS - at) & 0x80008000u;
    const half2 pair = as_type<half2>(sign | (moved & (BITS == 4 ? 0x0E000E00u : 0x3F803F80u)));
    return float2(float(pair[0]), float(pair[1]));
  }
  const uint mask = ((1u << BITS) - 1) << (BITS * s);
  return float2(float(a & mask), float(b & (BITS == 4 ? mask << 16 : mask)));
}

// What undoes the places of four weights: of the first of eight, or of the second.
template <int BITS, bool FLOATS>
inline float4 per_place(bool second) {
  const float step = FLOATS ? 1.0f : 1.0f / float(1u << BITS);
  const float first = second && BITS == 4 && !FLOATS ? 1.0f / 65536.0f : 1.0f;
  return float4(1.0f, step, step * step, step * step * step) * first;
}

// A scale as it is stored: a number, or the 8 bits of an e8m0 (FORM 1) or e4m3 (FORM 2).
template <int FORM, typename S>
inline float scale_of(S stored) {
  if (FORM == 0) {
    return float(stored);
  }
  const uint bits = uint(stored);
  return FORM == 1 ? as_type<float>(bits << 23) : two_weights<8, true>(bits, 0, 0)[0] * 256.0f;
}
