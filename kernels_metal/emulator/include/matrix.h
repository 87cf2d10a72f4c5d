// metal_simdgroup_matrix: 8x8 matrices of a SIMD-group, two neighbouring elements in each lane, in
// the order that Apple's GPUs use (thread_elements() sees it).
#pragma once
#include "sync.h"

namespace emulator {

EMULATOR_FUNC ushort matrix_row(uint lane) { return (lane / 4 & 4) + lane / 2 % 4; }
EMULATOR_FUNC ushort matrix_column(uint lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }

template <class D, class A, class B, class C> struct Factors {
    A a[2];
    B b[2];
    C c[2];
    D d[2];
};

template <class D, class A, class B, class C>
EMULATOR_UNCHECKED void multiply(uchar* slots, const uint*, uint members) {
    Lanes<Factors<D, A, B, C>> lanes(slots, members);
    float a[8][8], b[8][8];
    for (uint i = 0; i < WIDTH; ++i)
        for (uint j = 0; j < 2; ++j) {
            a[matrix_row(i)][matrix_column(i) + j] = static_cast<float>(lanes.value[i].a[j]);
            b[matrix_row(i)][matrix_column(i) + j] = static_cast<float>(lanes.value[i].b[j]);
        }
    for (uint i = 0; i < WIDTH; ++i)
        for (uint j = 0; j < 2; ++j) {
            float sum = static_cast<float>(lanes.value[i].c[j]);
            for (uint k = 0; k < 8; ++k) sum += a[matrix_row(i)][k] * b[k][matrix_column(i) + j];
            lanes.value[i].d[j] = static_cast<D>(sum);
        }
    lanes.store(slots);
}

EMULATOR_UNCHECKED inline void nothing(uchar*, const uint*, uint) {}

}  // namespace emulator

namespace metal {

template <class T, int Rows, int Columns> struct simdgroup_matrix {
    static_assert(Rows == 8 && Columns == 8, "SIMD-group matrices are 8x8");
    using storage = vec<T, 2>;
    storage elements_;
    simdgroup_matrix() = default;
    // A diagonal, as in Metal.
    EMULATOR_FUNC explicit simdgroup_matrix(T diagonal) {
        uint row = emulator::matrix_row(emulator::lane()), column = emulator::matrix_column(emulator::lane());
        elements_[0] = row == column ? diagonal : static_cast<T>(0);
        elements_[1] = row == column + 1 ? diagonal : static_cast<T>(0);
    }
    EMULATOR_FUNC thread storage& thread_elements() { return elements_; }
    EMULATOR_FUNC const thread storage& thread_elements() const { return elements_; }
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <class T, int R, int C> EMULATOR_FUNC simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T value) {
    simdgroup_matrix<T, R, C> result;
    result.elements_ = value;
    return result;
}

#define EMULATOR_MATRIX_MEMORY(space) \
    template <class T> EMULATOR_FUNC void simdgroup_load( \
        thread simdgroup_matrix<T, 8, 8>& to, const space T* from, ulong per_row = 8, \
        ulong2 origin = 0, bool transpose = false) { \
        emulator::call("simdgroup_load", 0u, &emulator::nothing); \
        ulong row = emulator::matrix_row(emulator::lane()), column = emulator::matrix_column(emulator::lane()); \
        for (ulong j = 0; j < 2; ++j) { \
            ulong y = transpose ? column + j : row, x = transpose ? row : column + j; \
            to.elements_[j] = from[(origin.y + y) * per_row + origin.x + x]; \
        } \
    }
EMULATOR_MATRIX_MEMORY(device)
EMULATOR_MATRIX_MEMORY(threadgroup)
#define EMULATOR_MATRIX_STORE(space) \
    template <class T> EMULATOR_FUNC void simdgroup_store( \
        simdgroup_matrix<T, 8, 8> from, space T* to, ulong per_row = 8, \
        ulong2 origin = 0, bool transpose = false) { \
        emulator::call("simdgroup_store", 0u, &emulator::nothing); \
        ulong row = emulator::matrix_row(emulator::lane()), column = emulator::matrix_column(emulator::lane()); \
        for (ulong j = 0; j < 2; ++j) { \
            ulong y = transpose ? column + j : row, x = transpose ? row : column + j; \
            to[(origin.y + y) * per_row + origin.x + x] = from.elements_[j]; \
        } \
    }
EMULATOR_MATRIX_STORE(device)
EMULATOR_MATRIX_STORE(threadgroup)

template <class D, class A, class B, class C>
EMULATOR_FUNC void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b,
    simdgroup_matrix<C, 8, 8> c) {
    emulator::Factors<D, A, B, C> factors = {
        {a.elements_[0], a.elements_[1]}, {b.elements_[0], b.elements_[1]}, {c.elements_[0], c.elements_[1]}, {}};
    factors = emulator::call("simdgroup_multiply_accumulate", factors, &emulator::multiply<D, A, B, C>);
    d.elements_[0] = factors.d[0];
    d.elements_[1] = factors.d[1];
}

template <class D, class A, class B>
EMULATOR_FUNC void simdgroup_multiply(
    thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a, simdgroup_matrix<B, 8, 8> b) {
    simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(static_cast<D>(0)));
}

}  // namespace metal
