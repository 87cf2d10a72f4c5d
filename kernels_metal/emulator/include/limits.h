// metal::numeric_limits, MLX's Limits and the constants of metal_math.
#pragma once
#include "types.h"

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_huge_valf()
#define FLT_MAX 3.40282347e+38f
#define FLT_MIN 1.17549435e-38f
#define FLT_EPSILON 1.19209290e-07f
#define HALF_MAX ((half)65504.0f)
#define HALF_MIN ((half)6.10351562e-05f)
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define M_PI_F 3.14159265358979323846f
#define M_SQRT2_F 1.41421356237309504880f

namespace metal {

template <class T> struct numeric_limits {
    static constexpr bool is_signed = T(-1) < T(0);
    static constexpr int digits = 8 * sizeof(T) - is_signed;
    static constexpr T max() { return is_signed ? T((((1ul << (digits - 1)) - 1) << 1) + 1) : T(-1); }
    static constexpr T min() { return T(~max()); }
    static constexpr T lowest() { return min(); }
};

#define EMULATOR_LIMITS(type, largest, smallest, step) \
    template <> struct numeric_limits<type> { \
        static constexpr bool is_signed = true; \
        static constexpr type max() { return static_cast<type>(largest); } \
        static constexpr type lowest() { return static_cast<type>(-(largest)); } \
        static constexpr type min() { return static_cast<type>(smallest); } \
        static constexpr type epsilon() { return static_cast<type>(step); } \
        static constexpr type infinity() { return static_cast<type>(INFINITY); } \
        static constexpr type quiet_NaN() { return static_cast<type>(NAN); } \
    };
EMULATOR_LIMITS(float, FLT_MAX, FLT_MIN, FLT_EPSILON)
EMULATOR_LIMITS(half, 65504.0f, 6.10351562e-05f, 9.765625e-04f)
EMULATOR_LIMITS(bfloat, 3.38953139e+38f, FLT_MIN, 7.8125e-03f)

}  // namespace metal

template <class T> struct Limits {
    static constexpr T max = metal::numeric_limits<T>::max();
    static constexpr T min = metal::numeric_limits<T>::lowest();
    static constexpr T finite_max = max;
    static constexpr T finite_min = min;
};
#define EMULATOR_FLOAT_LIMITS(type) \
    template <> struct Limits<type> { \
        static constexpr type max = metal::numeric_limits<type>::infinity(); \
        static constexpr type min = static_cast<type>(-INFINITY); \
        static constexpr type finite_max = metal::numeric_limits<type>::max(); \
        static constexpr type finite_min = metal::numeric_limits<type>::lowest(); \
    };
EMULATOR_FLOAT_LIMITS(float)
EMULATOR_FLOAT_LIMITS(half)
EMULATOR_FLOAT_LIMITS(bfloat)
