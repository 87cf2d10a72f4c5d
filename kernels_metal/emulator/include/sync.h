// Barriers and threadgroup variables.
#pragma once
#include "simd.h"

extern "C" {
__attribute__((convergent, nomerge)) void emulator_threadgroup_barrier(uint flags);
__attribute__((convergent, nomerge)) void emulator_simdgroup_barrier(uint flags);
void* emulator_threadgroup(uint variable, const char* name, ulong bytes, uint item);
}

namespace emulator {

template <class T> struct innermost { using type = T; };
template <class T, ulong N> struct innermost<T[N]> { using type = typename innermost<T>::type; };

// How many bytes share one state of the race check: those of an element, 1 for structs.
template <class T> constexpr uint grain() {
    using E = element_of<typename innermost<T>::type>;
    return __is_arithmetic(E) || metal::is_floating_point_v<E> ? sizeof(E) : 1;
}

template <class T> EMULATOR_FUNC threadgroup T& variable(uint number, const char* name) {
    return *pointer<threadgroup T*>(emulator_threadgroup(number, name, sizeof(T), grain<T>()));
}

}  // namespace emulator

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
    return static_cast<mem_flags>(static_cast<uint>(a) | static_cast<uint>(b));
}
EMULATOR_FUNC void threadgroup_barrier(mem_flags flags) { emulator_threadgroup_barrier(static_cast<uint>(flags)); }
EMULATOR_FUNC void simdgroup_barrier(mem_flags flags) { emulator_simdgroup_barrier(static_cast<uint>(flags)); }

}  // namespace metal
