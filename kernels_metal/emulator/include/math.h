// metal_math, metal_common and metal_geometric: computed in float32 and rounded once
// for the half types, element by element for vectors.
#pragma once
#include "types.h"

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

namespace emulator {

template <class T> inline constexpr bool is_real = metal::is_floating_point_v<element_of<T>>;
template <class T> using only_real = metal::enable_if_t<is_real<T>, T>;
// Metal gives floats for integers in functions of one real argument.
template <class T> using real_of = metal::conditional_t<is_real<T>, T, typename with_element<T, float>::type>;

template <class R, class F, class T, class... A> EMULATOR_FUNC R each(F f, T first, A... rest) {
    if constexpr (is_vector<T>) {
        R result = {};
        for (int i = 0; i < size_of<T>; ++i) result[i] = f(first[i], rest[i]...);
        return result;
    } else {
        return f(first, rest...);
    }
}

// Errors of the fast functions, about as large as Metal allows and always the same for the same
// argument: MLX asks for safe arithmetic, but a function without `precise::` stays a fast one.
EMULATOR_FUNC float sign_of(float x) { return __builtin_bit_cast(uint, x) & 1 ? -1.0f : 1.0f; }
EMULATOR_FUNC float exact(float, float y) { return y; }
EMULATOR_FUNC float rough(float x, float y) { return y * (1.0f + sign_of(x) * 0x1p-20f); }
EMULATOR_FUNC float rough_angle(float x, float y) {
    return y + sign_of(x) * (__builtin_fabsf(x) <= 3.14159265f ? 0x1p-13f : 0x1p-11f);
}

}  // namespace emulator

namespace metal {

#define EMULATOR_UNARY(name, expression) \
    template <class T> EMULATOR_FUNC emulator::real_of<T> name(T x) { \
        return emulator::each<emulator::real_of<T>>( \
            [](auto v) { float x = static_cast<float>(v); \
                         return static_cast<emulator::element_of<emulator::real_of<T>>>(expression); }, x); \
    }
#define EMULATOR_UNARIES(rough, rough_angle) \
    EMULATOR_UNARY(exp, rough(x, __builtin_expf(x))) \
    EMULATOR_UNARY(exp2, rough(x, __builtin_exp2f(x))) \
    EMULATOR_UNARY(log, rough(x, __builtin_logf(x))) \
    EMULATOR_UNARY(log2, rough(x, __builtin_log2f(x))) \
    EMULATOR_UNARY(sqrt, rough(x, __builtin_sqrtf(x))) \
    EMULATOR_UNARY(rsqrt, rough(x, 1.0f / __builtin_sqrtf(x))) \
    EMULATOR_UNARY(tanh, rough(x, __builtin_tanhf(x))) \
    EMULATOR_UNARY(sin, rough_angle(x, __builtin_sinf(x))) \
    EMULATOR_UNARY(cos, rough_angle(x, __builtin_cosf(x)))
EMULATOR_UNARIES(emulator::rough, emulator::rough_angle)
namespace fast {
EMULATOR_UNARIES(emulator::rough, emulator::rough_angle)
}
namespace precise {
EMULATOR_UNARIES(emulator::exact, emulator::exact)
}
EMULATOR_UNARY(floor, __builtin_floorf(x))
EMULATOR_UNARY(ceil, __builtin_ceilf(x))
EMULATOR_UNARY(trunc, __builtin_truncf(x))
EMULATOR_UNARY(round, __builtin_roundf(x))
EMULATOR_UNARY(fabs, __builtin_fabsf(x))

#define EMULATOR_BINARY(name, expression) \
    template <class T> EMULATOR_FUNC emulator::only_real<T> name(T a, T b) { \
        return emulator::each<T>( \
            [](auto v, auto w) { float x = static_cast<float>(v), y = static_cast<float>(w); \
                                 return static_cast<emulator::element_of<T>>(expression); }, a, b); \
    }
EMULATOR_BINARY(pow, __builtin_powf(x, y))

template <class T> EMULATOR_FUNC emulator::only_real<T> fma(T a, T b, T c) {
    return emulator::each<T>([](auto x, auto y, auto z) {
        return static_cast<emulator::element_of<T>>(
            __builtin_fmaf(static_cast<float>(x), static_cast<float>(y), static_cast<float>(z))); }, a, b, c);
}

// Numbers win over NaN, as in Metal.
template <class T> EMULATOR_FUNC T max(T a, T b) {
    return emulator::each<T>([](auto x, auto y) { return x != x || x < y ? y : x; }, a, b);
}
template <class T> EMULATOR_FUNC T min(T a, T b) {
    return emulator::each<T>([](auto x, auto y) { return x != x || y < x ? y : x; }, a, b);
}
template <class T> EMULATOR_FUNC T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <class T> EMULATOR_FUNC T abs(T x) {
    return emulator::each<T>([](auto v) { return static_cast<decltype(v)>(v < 0 ? -v : v); }, x);
}

template <class T> EMULATOR_FUNC emulator::element_of<T> dot(T a, T b) {
    emulator::element_of<T> sum = 0;
    for (int i = 0; i < emulator::size_of<T>; ++i) sum += a[i] * b[i];
    return sum;
}

}  // namespace metal
