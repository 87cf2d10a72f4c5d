// Barriers, threadgroup variables and atomics.
#pragma once
#include "simd.h"

extern "C" {
__attribute__((convergent, nomerge)) void emulator_threadgroup_barrier(uint flags);
__attribute__((convergent, nomerge)) void emulator_simdgroup_barrier(uint flags);
void* emulator_threadgroup(uint variable, const char* name, ulong bytes, uint item);
void emulator_atomic(const void* address, uint size, uint reads, uint writes);
void emulator_copy(void* to, const void* from, uint size);
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

enum memory_order { memory_order_relaxed };

template <class T> struct atomic {
    T value_;  // only the functions below may touch it
};
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_float = atomic<float>;
using atomic_bool = atomic<bool>;

template <class T, class P> EMULATOR_FUNC T atomic_read_(P* place) {
    T value;
    emulator_copy(&value, (const void*)(uintptr_t)place, sizeof(T));
    return value;
}
template <class T, class P> EMULATOR_FUNC void atomic_write_(P* place, T value) {
    emulator_copy((void*)(uintptr_t)place, &value, sizeof(T));
}

#define EMULATOR_FETCH(space, name, expression) \
    template <class T> EMULATOR_FUNC T atomic_##name##_explicit( \
        volatile space atomic<T>* place, metal::enable_if_t<true, T> value, memory_order) { \
        emulator_atomic((const void*)(uintptr_t)place, sizeof(T), 1, 1); \
        T before = atomic_read_<T>(place); \
        atomic_write_(place, static_cast<T>(expression)); \
        return before; \
    }
#define EMULATOR_ATOMICS(space) \
    EMULATOR_FETCH(space, fetch_add, before + value) \
    EMULATOR_FETCH(space, fetch_sub, before - value) \
    EMULATOR_FETCH(space, fetch_max, metal::max(before, value)) \
    EMULATOR_FETCH(space, fetch_min, metal::min(before, value)) \
    EMULATOR_FETCH(space, fetch_and, before & value) \
    EMULATOR_FETCH(space, fetch_or, before | value) \
    EMULATOR_FETCH(space, fetch_xor, before ^ value) \
    EMULATOR_FETCH(space, exchange, value) \
    template <class T> EMULATOR_FUNC T atomic_load_explicit(const volatile space atomic<T>* place, memory_order) { \
        emulator_atomic((const void*)(uintptr_t)place, sizeof(T), 1, 0); \
        return atomic_read_<T>(place); \
    } \
    template <class T> EMULATOR_FUNC void atomic_store_explicit( \
        volatile space atomic<T>* place, metal::enable_if_t<true, T> value, memory_order) { \
        emulator_atomic((const void*)(uintptr_t)place, sizeof(T), 0, 1); \
        atomic_write_(place, value); \
    } \
    template <class T> EMULATOR_FUNC bool atomic_compare_exchange_weak_explicit( \
        volatile space atomic<T>* place, thread T* expected, metal::enable_if_t<true, T> value, \
        memory_order, memory_order) { \
        emulator_atomic((const void*)(uintptr_t)place, sizeof(T), 1, 1); \
        T before = atomic_read_<T>(place); \
        bool equal = before == *expected; \
        if (equal) atomic_write_(place, value); \
        *expected = before; \
        return equal; \
    }
EMULATOR_ATOMICS(device)
EMULATOR_ATOMICS(threadgroup)

}  // namespace metal
