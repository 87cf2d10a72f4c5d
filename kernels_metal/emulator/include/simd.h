// metal_simdgroup: every lane hands in a value, the last one works out all
// results. Sums go pairwise over halves of the lanes; Metal's own order is not documented.
#pragma once
#include "math.h"

extern "C" __attribute__((convergent, nomerge)) void emulator_simd(
    const char* operation, void* value, uint size, void (*combine)(uchar*, const uint*, uint), uint argument);

namespace emulator {

constexpr int WIDTH = 32, SLOT_BYTES = 64;
constexpr uint NOWHERE = ~0u;

template <class T> struct Lanes {
    T value[WIDTH];
    uint members;
    EMULATOR_UNCHECKED Lanes(const uchar* slots, uint mask) : members(mask) {
        for (int i = 0; i < WIDTH; ++i) __builtin_memcpy(&value[i], slots + i * SLOT_BYTES, sizeof(T));
    }
    EMULATOR_UNCHECKED void store(uchar* slots) const {
        for (int i = 0; i < WIDTH; ++i) __builtin_memcpy(slots + i * SLOT_BYTES, &value[i], sizeof(T));
    }
    EMULATOR_UNCHECKED bool has(uint lane) const { return lane < WIDTH && (members >> lane & 1); }
};

// Operations

#define EMULATOR_OPERATION(name, expression) \
    struct name { template <class T> static T of(T a, T b) { return static_cast<T>(expression); } };
EMULATOR_OPERATION(Sum, a + b)
EMULATOR_OPERATION(Maximum, metal::max(a, b))
EMULATOR_OPERATION(Minimum, metal::min(a, b))

template <class T, class O> EMULATOR_UNCHECKED void reduce(uchar* slots, const uint*, uint members) {
    Lanes<T> lanes(slots, members);
    uint have = members;
    for (int distance = WIDTH / 2; distance; distance /= 2)
        for (int i = 0; i < WIDTH; ++i) {
            if (i >= distance || !(have >> (i + distance) & 1)) continue;
            T other = lanes.value[i + distance];
            lanes.value[i] = have >> i & 1 ? O::of(lanes.value[i], other) : other;
            have |= 1u << i;
        }
    for (int i = 0; i < WIDTH; ++i) lanes.value[i] = lanes.value[0];
    lanes.store(slots);
}

// Each lane takes the value of the lane it names. From a lane that is not there comes the pattern
// of uninitialised memory, which the checks of outputs find.
template <class T> EMULATOR_UNCHECKED void gather(uchar* slots, const uint* from, uint members) {
    Lanes<T> before(slots, members), after = before;
    for (uint i = 0; i < WIDTH; ++i) {
        if (from[i] == NOWHERE) continue;
        if (before.has(from[i])) after.value[i] = before.value[from[i]];
        else __builtin_memset(&after.value[i], 0xff, sizeof(T));
    }
    after.store(slots);
}

// The lane of the calling thread; MLX's text has it only where the body names it.
EMULATOR_FUNC uint lane();

template <class T>
EMULATOR_FUNC T call(const char* operation, T value, void (*combine)(uchar*, const uint*, uint), uint argument = 0) {
    static_assert(sizeof(T) <= SLOT_BYTES, "too large for a SIMD-group operation");
    emulator_simd(operation, &value, sizeof(T), combine, argument);
    return value;
}

}  // namespace emulator

struct EmulatorAttributes {
    uint3 dispatch_threads_per_threadgroup, grid_origin, grid_size, thread_position_in_grid,
        thread_position_in_threadgroup, threadgroup_position_in_grid, threadgroups_per_grid,
        threads_per_grid, threads_per_threadgroup;
    uint dispatch_quadgroups_per_threadgroup, dispatch_simdgroups_per_threadgroup,
        quadgroup_index_in_threadgroup, quadgroups_per_threadgroup, simdgroup_index_in_threadgroup,
        simdgroups_per_threadgroup, thread_execution_width, thread_index_in_quadgroup,
        thread_index_in_simdgroup, thread_index_in_threadgroup, threads_per_simdgroup;
};
extern "C" const EmulatorAttributes* emulator_attributes();
EMULATOR_UNCHECKED inline uint emulator_lane() { return emulator_attributes()->thread_index_in_simdgroup; }
EMULATOR_FUNC uint emulator::lane() { return emulator_lane(); }

namespace metal {

#define EMULATOR_REDUCTION(name, operation) \
    template <class T> EMULATOR_FUNC T simd_##name(T x) { \
        return emulator::call("simd_" #name, x, &emulator::reduce<T, emulator::operation>); }
EMULATOR_REDUCTION(sum, Sum)
EMULATOR_REDUCTION(max, Maximum)
EMULATOR_REDUCTION(min, Minimum)

// `at` gives the lane to read from; NOWHERE keeps the lane's own value.
#define EMULATOR_SHUFFLE(name, at) \
    template <class T> EMULATOR_FUNC T name(T x, ushort n) { \
        uint me = emulator::lane(); \
        return emulator::call(#name, x, &emulator::gather<T>, at); }
EMULATOR_SHUFFLE(simd_shuffle, n)
EMULATOR_SHUFFLE(simd_broadcast, n)
EMULATOR_SHUFFLE(simd_shuffle_xor, me ^ n)
EMULATOR_SHUFFLE(simd_shuffle_up, me < n ? emulator::NOWHERE : me - n)
EMULATOR_SHUFFLE(simd_shuffle_down, me + n >= 32 ? emulator::NOWHERE : me + n)
#undef EMULATOR_SHUFFLE

}  // namespace metal
