// metal_math, metal_common, metal_geometric, metal_integer and metal_relational: computed in
// float32 and rounded once for the half types, element by element for vectors.
#pragma once
#include "limits.h"

namespace emulator {

template <class T> inline constexpr bool is_real = metal::is_floating_point_v<element_of<T>>;
template <class T> inline constexpr bool is_whole = metal::is_integral_v<element_of<T>>;
template <class T> using only_real = metal::enable_if_t<is_real<T>, T>;
template <class T> using only_whole = metal::enable_if_t<is_whole<T>, T>;
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

}  // namespace emulator

namespace metal {

#define EMULATOR_UNARY(name, expression) \
    template <class T> EMULATOR_FUNC emulator::real_of<T> name(T x) { \
        return emulator::each<emulator::real_of<T>>( \
            [](auto v) { float x = static_cast<float>(v); \
                         return static_cast<emulator::element_of<emulator::real_of<T>>>(expression); }, x); \
    }
#define EMULATOR_UNARIES \
    EMULATOR_UNARY(exp, __builtin_expf(x)) \
    EMULATOR_UNARY(exp2, __builtin_exp2f(x)) \
    EMULATOR_UNARY(exp10, __builtin_powf(10.0f, x)) \
    EMULATOR_UNARY(log, __builtin_logf(x)) \
    EMULATOR_UNARY(log2, __builtin_log2f(x)) \
    EMULATOR_UNARY(log10, __builtin_log10f(x)) \
    EMULATOR_UNARY(sqrt, __builtin_sqrtf(x)) \
    EMULATOR_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x)) \
    EMULATOR_UNARY(sin, __builtin_sinf(x)) \
    EMULATOR_UNARY(cos, __builtin_cosf(x)) \
    EMULATOR_UNARY(tan, __builtin_tanf(x)) \
    EMULATOR_UNARY(asin, __builtin_asinf(x)) \
    EMULATOR_UNARY(acos, __builtin_acosf(x)) \
    EMULATOR_UNARY(atan, __builtin_atanf(x)) \
    EMULATOR_UNARY(sinh, __builtin_sinhf(x)) \
    EMULATOR_UNARY(cosh, __builtin_coshf(x)) \
    EMULATOR_UNARY(tanh, __builtin_tanhf(x))
EMULATOR_UNARIES
namespace fast {
EMULATOR_UNARIES
}
namespace precise {
EMULATOR_UNARIES
}
EMULATOR_UNARY(floor, __builtin_floorf(x))
EMULATOR_UNARY(ceil, __builtin_ceilf(x))
EMULATOR_UNARY(trunc, __builtin_truncf(x))
EMULATOR_UNARY(round, __builtin_roundf(x))
EMULATOR_UNARY(rint, __builtin_rintf(x))
EMULATOR_UNARY(fract, x - __builtin_floorf(x))
EMULATOR_UNARY(fabs, __builtin_fabsf(x))
EMULATOR_UNARY(sign, x > 0 ? 1.0f : x < 0 ? -1.0f : x == 0 ? x : 0.0f)
EMULATOR_UNARY(saturate, x > 1 ? 1.0f : x > 0 ? x : 0.0f)

#define EMULATOR_BINARY(name, expression) \
    template <class T> EMULATOR_FUNC emulator::only_real<T> name(T a, T b) { \
        return emulator::each<T>( \
            [](auto v, auto w) { float x = static_cast<float>(v), y = static_cast<float>(w); \
                                 return static_cast<emulator::element_of<T>>(expression); }, a, b); \
    }
EMULATOR_BINARY(pow, __builtin_powf(x, y))
EMULATOR_BINARY(powr, __builtin_powf(x, y))
EMULATOR_BINARY(fmod, __builtin_fmodf(x, y))
EMULATOR_BINARY(atan2, __builtin_atan2f(x, y))
EMULATOR_BINARY(copysign, __builtin_copysignf(x, y))
EMULATOR_BINARY(fmin, __builtin_fminf(x, y))
EMULATOR_BINARY(fmax, __builtin_fmaxf(x, y))
EMULATOR_BINARY(step, y < x ? 0.0f : 1.0f)

template <class T> EMULATOR_FUNC emulator::only_real<T> fma(T a, T b, T c) {
    return emulator::each<T>([](auto x, auto y, auto z) {
        return static_cast<emulator::element_of<T>>(
            __builtin_fmaf(static_cast<float>(x), static_cast<float>(y), static_cast<float>(z))); }, a, b, c);
}
template <class T> EMULATOR_FUNC emulator::only_real<T> mix(T a, T b, T share) { return a + (b - a) * share; }
template <class T> EMULATOR_FUNC float ldexp(T x, int power) { return __builtin_ldexpf(static_cast<float>(x), power); }

// Numbers win over NaN, as in Metal.
template <class T> EMULATOR_FUNC T max(T a, T b) {
    return emulator::each<T>([](auto x, auto y) { return x != x || x < y ? y : x; }, a, b);
}
template <class T> EMULATOR_FUNC T min(T a, T b) {
    return emulator::each<T>([](auto x, auto y) { return x != x || y < x ? y : x; }, a, b);
}
template <class T> EMULATOR_FUNC T max3(T a, T b, T c) { return max(max(a, b), c); }
template <class T> EMULATOR_FUNC T min3(T a, T b, T c) { return min(min(a, b), c); }
template <class T> EMULATOR_FUNC T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <class T> EMULATOR_FUNC T abs(T x) {
    return emulator::each<T>([](auto v) { return static_cast<decltype(v)>(v < 0 ? -v : v); }, x);
}

template <class T> EMULATOR_FUNC auto isnan(T x) { return x != x; }
template <class T> EMULATOR_FUNC auto isinf(T x) { return fabs(x) == static_cast<emulator::element_of<T>>(INFINITY); }
template <class T> EMULATOR_FUNC auto isfinite(T x) { return fabs(x) < static_cast<emulator::element_of<T>>(INFINITY); }

// Comparisons of vectors give 0 or -1 for each element.
template <class T> EMULATOR_FUNC bool any(T x) {
    if constexpr (!emulator::is_vector<T>) return x;
    else { bool result = false; for (int i = 0; i < emulator::size_of<T>; ++i) result |= x[i] != 0; return result; }
}
template <class T> EMULATOR_FUNC bool all(T x) {
    if constexpr (!emulator::is_vector<T>) return x;
    else { bool result = true; for (int i = 0; i < emulator::size_of<T>; ++i) result &= x[i] != 0; return result; }
}
template <class T, class C> EMULATOR_FUNC T select(T otherwise, T chosen, C condition) {
    return emulator::each<T>([](auto a, auto b, auto c) { return c ? b : a; }, otherwise, chosen, condition);
}

template <class T> EMULATOR_FUNC emulator::element_of<T> dot(T a, T b) {
    emulator::element_of<T> sum = 0;
    for (int i = 0; i < emulator::size_of<T>; ++i) sum += a[i] * b[i];
    return sum;
}
template <class T> EMULATOR_FUNC emulator::element_of<T> length_squared(T x) { return dot(x, x); }
template <class T> EMULATOR_FUNC emulator::element_of<T> length(T x) { return sqrt(dot(x, x)); }

#define EMULATOR_BITS(name, expression) \
    template <class T> EMULATOR_FUNC emulator::only_whole<T> name(T x) { \
        return emulator::each<T>([](auto v) { \
            constexpr int size = 8 * sizeof v; \
            ulong bits = static_cast<ulong>(v) & (~0ul >> (64 - size)); \
            return static_cast<decltype(v)>(expression); }, x); \
    }
EMULATOR_BITS(popcount, __builtin_popcountl(bits))
EMULATOR_BITS(clz, bits ? __builtin_clzl(bits) - (64 - size) : size)
EMULATOR_BITS(ctz, bits ? __builtin_ctzl(bits) : size)
template <class T> EMULATOR_FUNC emulator::only_whole<T> extract_bits(T x, uint offset, uint bits) {
    uint rest = 8 * sizeof(T) - bits;
    return bits == 0 ? T(0) : static_cast<T>(static_cast<T>(x << (rest - offset)) >> rest);
}
template <class T> EMULATOR_FUNC emulator::only_whole<T> insert_bits(T base, T insert, uint offset, uint bits) {
    T mask = static_cast<T>(bits >= 8 * sizeof(T) ? ~0ul : ((1ul << bits) - 1));
    return static_cast<T>((base & ~(mask << offset)) | ((insert & mask) << offset));
}
EMULATOR_FUNC uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }
EMULATOR_FUNC uint mulhi(uint a, uint b) { return static_cast<uint>((static_cast<ulong>(a) * b) >> 32); }
EMULATOR_FUNC int mulhi(int a, int b) { return static_cast<int>((static_cast<long>(a) * b) >> 32); }

}  // namespace metal
