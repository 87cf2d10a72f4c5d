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
