// Metal's scalar and vector types, address spaces and limits, in clang's C++.
#pragma once

#define device __attribute__((opencl_global))
#define threadgroup __attribute__((opencl_local))
#define constant __attribute__((opencl_constant)) const
#define thread
#define METAL_FUNC inline __attribute__((always_inline))
// Functions of these headers: their calls count as made by the kernel's own line.
#define EMULATOR_FUNC inline __attribute__((always_inline, nodebug))
// What the SIMD-group's last lane runs, on memory that is not the kernel's.
#define EMULATOR_UNCHECKED __attribute__((no_sanitize("thread"), noinline, nodebug))

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long;
using size_t = unsigned long;
using ptrdiff_t = long;
using uintptr_t = unsigned long;
using half = _Float16;
using bfloat = __bf16;
using float16_t = half;
using bfloat16_t = bfloat;

#define EMULATOR_VECTORS(scalar) \
    typedef scalar scalar##2 __attribute__((ext_vector_type(2))); \
    typedef scalar scalar##3 __attribute__((ext_vector_type(3))); \
    typedef scalar scalar##4 __attribute__((ext_vector_type(4)));
EMULATOR_VECTORS(char)
EMULATOR_VECTORS(uchar)
EMULATOR_VECTORS(short)
EMULATOR_VECTORS(ushort)
EMULATOR_VECTORS(int)
EMULATOR_VECTORS(uint)
EMULATOR_VECTORS(long)
EMULATOR_VECTORS(ulong)
EMULATOR_VECTORS(half)
EMULATOR_VECTORS(bfloat)
EMULATOR_VECTORS(float)

constexpr half operator""h(long double value) { return static_cast<half>(value); }
constexpr half operator""H(long double value) { return static_cast<half>(value); }

namespace metal {

template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));

template <class A, class B> inline constexpr bool is_same_v = __is_same(A, B);
template <class A, class B> struct is_same { static constexpr bool value = __is_same(A, B); };
template <bool C, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool C, class T = void> using enable_if_t = typename enable_if<C, T>::type;
template <bool C, class A, class B> struct conditional { using type = A; };
template <class A, class B> struct conditional<false, A, B> { using type = B; };
template <bool C, class A, class B> using conditional_t = typename conditional<C, A, B>::type;
template <class T> struct remove_cv { using type = __remove_cv(T); };
template <class T> using remove_cv_t = __remove_cv(T);

template <class T> inline constexpr bool is_floating_point_v = false;
template <> inline constexpr bool is_floating_point_v<float> = true;
template <> inline constexpr bool is_floating_point_v<half> = true;
template <> inline constexpr bool is_floating_point_v<bfloat> = true;
template <class T> inline constexpr bool is_integral_v = __is_integral(T);
template <class T> struct is_floating_point { static constexpr bool value = is_floating_point_v<T>; };
template <class T> struct is_integral { static constexpr bool value = is_integral_v<T>; };

}  // namespace metal

namespace emulator {

// The element type and the number of elements of a vector; a scalar has one.
template <class T> struct shape { using element = T; static constexpr int size = 1; };
template <class T, int N> struct shape<T __attribute__((ext_vector_type(N)))> {
    using element = T;
    static constexpr int size = N;
};
template <class T> using element_of = typename shape<T>::element;
template <class T> inline constexpr int size_of = shape<T>::size;
template <class T> inline constexpr bool is_vector = size_of<T> != 1;
template <class T, class E> struct with_element { using type = E; };
template <class T, int N, class E> struct with_element<T __attribute__((ext_vector_type(N))), E> {
    using type = E __attribute__((ext_vector_type(N)));
};

template <class V, class A> EMULATOR_FUNC int append(thread V& to, int at, A from) {
    if constexpr (is_vector<A>) {
        for (int i = 0; i < size_of<A>; ++i) to[at + i] = static_cast<element_of<V>>(from[i]);
    } else {
        to[at] = static_cast<element_of<V>>(from);
    }
    return at + size_of<A>;
}

// float4(...): converts a vector, spreads a scalar, or joins what it is given.
template <class V, class... A> EMULATOR_FUNC V make(A... from) {
    constexpr int given = (size_of<A> + ... + 0);
    static_assert(given == 1 || given == size_of<V>, "a vector is made of one value or of all its elements");
    V result = {};
    int at = 0;
    ((at = append(result, at, from)), ...);
    for (; at < size_of<V>; ++at) result[at] = result[0];
    return result;
}

template <class To> EMULATOR_FUNC To pointer(void* from) { return (To)(uintptr_t)from; }

}  // namespace emulator

// A constructor call: the name with a parenthesis. Elsewhere the names stay types.
#define char2(...) (::emulator::make<::char2>(__VA_ARGS__))
#define char3(...) (::emulator::make<::char3>(__VA_ARGS__))
#define char4(...) (::emulator::make<::char4>(__VA_ARGS__))
#define uchar2(...) (::emulator::make<::uchar2>(__VA_ARGS__))
#define uchar3(...) (::emulator::make<::uchar3>(__VA_ARGS__))
#define uchar4(...) (::emulator::make<::uchar4>(__VA_ARGS__))
#define short2(...) (::emulator::make<::short2>(__VA_ARGS__))
#define short3(...) (::emulator::make<::short3>(__VA_ARGS__))
#define short4(...) (::emulator::make<::short4>(__VA_ARGS__))
#define ushort2(...) (::emulator::make<::ushort2>(__VA_ARGS__))
#define ushort3(...) (::emulator::make<::ushort3>(__VA_ARGS__))
#define ushort4(...) (::emulator::make<::ushort4>(__VA_ARGS__))
#define int2(...) (::emulator::make<::int2>(__VA_ARGS__))
#define int3(...) (::emulator::make<::int3>(__VA_ARGS__))
#define int4(...) (::emulator::make<::int4>(__VA_ARGS__))
#define uint2(...) (::emulator::make<::uint2>(__VA_ARGS__))
#define uint3(...) (::emulator::make<::uint3>(__VA_ARGS__))
#define uint4(...) (::emulator::make<::uint4>(__VA_ARGS__))
#define long2(...) (::emulator::make<::long2>(__VA_ARGS__))
#define long3(...) (::emulator::make<::long3>(__VA_ARGS__))
#define long4(...) (::emulator::make<::long4>(__VA_ARGS__))
#define ulong2(...) (::emulator::make<::ulong2>(__VA_ARGS__))
#define ulong3(...) (::emulator::make<::ulong3>(__VA_ARGS__))
#define ulong4(...) (::emulator::make<::ulong4>(__VA_ARGS__))
#define half2(...) (::emulator::make<::half2>(__VA_ARGS__))
#define half3(...) (::emulator::make<::half3>(__VA_ARGS__))
#define half4(...) (::emulator::make<::half4>(__VA_ARGS__))
#define bfloat2(...) (::emulator::make<::bfloat2>(__VA_ARGS__))
#define bfloat3(...) (::emulator::make<::bfloat3>(__VA_ARGS__))
#define bfloat4(...) (::emulator::make<::bfloat4>(__VA_ARGS__))
#define float2(...) (::emulator::make<::float2>(__VA_ARGS__))
#define float3(...) (::emulator::make<::float3>(__VA_ARGS__))
#define float4(...) (::emulator::make<::float4>(__VA_ARGS__))

template <class To, class From> EMULATOR_FUNC To as_type(From value) {
    static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
    return __builtin_bit_cast(To, value);
}
