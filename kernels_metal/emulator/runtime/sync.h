// What threads do together: SIMD-group operations, barriers, threadgroup memory.
#pragma once
#include "memory.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// Turns what the lanes handed in into what they get back, both in `slots`.
using Combine = void (*)(uint8_t* slots, const uint32_t* arguments, uint32_t members);

inline const char* state_text(State state) {
    return state == RETURNED ? "has returned" : "waits at a threadgroup_barrier";
}

inline uint32_t lowest(uint32_t mask) { return static_cast<uint32_t>(__builtin_ctz(mask)); }

[[noreturn]] inline void fail_left_behind(const char* operation, void* pc, uint32_t lane, State state) {
    fail(DIVERGENCE, pc, "", "%s is reached by lane %u but not by lane %u, which %s", operation,
         self->lane, lane, state_text(state));
}

inline void arrive(Simd& simd, const char* operation, void* pc) {
    if (simd.returned) fail_left_behind(operation, pc, lowest(simd.returned), RETURNED);
    if (simd.at_barrier) fail_left_behind(operation, pc, lowest(simd.at_barrier), AT_BARRIER);
    if (!simd.waiting) {
        simd.operation = operation;
        simd.pc = pc;
    } else if (strcmp(simd.operation, operation) != 0 || !same_line(simd.pc, pc)) {
        fail(DIVERGENCE, pc, "", "%s is reached by lane %u while lane %u waits at %s on line %u", operation,
             self->lane, lowest(simd.waiting), simd.operation, line_of(simd.pc));
    }
    simd.waiting |= 1u << self->lane;
}

inline void release(Simd& simd) {
    end_turns();
    for (uint32_t mask = simd.waiting; mask; mask &= mask - 1)
        threads[self->simd * WIDTH + lowest(mask)].state = READY;
    simd.waiting = 0;
}

EXPORT void emulator_simd(const char* operation, void* value, uint32_t size, Combine combine, uint32_t argument) {
    Simd& simd = simds[self->simd];
    arrive(simd, operation, __builtin_return_address(0));
    uint8_t* slot = simd.slots + self->lane * SLOT_BYTES;
    memcpy(slot, value, size);
    simd.arguments[self->lane] = argument;
    if (simd.waiting == simd.members) {
        combine(simd.slots, simd.arguments, simd.members);
        ++launch->counters.simd_operations;
        if (strcmp(operation, "simdgroup_multiply_accumulate") == 0) ++launch->counters.matrix_products;
        release(simd);
    } else {
        self->state = AT_SIMD;
        wait();
    }
    memcpy(value, slot, size);
}

inline void advance(uint32_t* epochs, uint32_t flags) {
    if (flags & 1) ++epochs[DEVICE_SPACE];
    if (flags & 2) ++epochs[THREADGROUP_SPACE];
}

EXPORT void emulator_simdgroup_barrier(uint32_t flags) {
    Simd& simd = simds[self->simd];
    arrive(simd, "simdgroup_barrier", __builtin_return_address(0));
    if (simd.waiting == simd.members) {
        advance(simd.epochs, flags);
        ++launch->counters.simdgroup_barriers;
        release(simd);
    } else {
        self->state = AT_SIMD;
        wait();
    }
}

inline void arrive_at_barrier(Simd& simd, void* pc) {
    const char* name = "threadgroup_barrier";
    if (group.returned)
        fail(DIVERGENCE, pc, "", "%s is reached by thread %u after %u threads of the threadgroup have returned",
             name, self->index, group.returned);
    if (simd.waiting) {
        fail(DIVERGENCE, pc, "", "%s is reached by lane %u while lane %u waits at %s on line %u", name,
             self->lane, lowest(simd.waiting), simd.operation, line_of(simd.pc));
    }
    if (group.at_barrier && !same_line(group.pc, pc)) {
        fail(DIVERGENCE, pc, "", "%s is reached by thread %u while others wait at the one on line %u", name,
             self->index, line_of(group.pc));
    }
    group.pc = pc;
}

EXPORT void emulator_threadgroup_barrier(uint32_t flags) {
    Simd& simd = simds[self->simd];
    arrive_at_barrier(simd, __builtin_return_address(0));
    if (++group.at_barrier < group.threads) {
        simd.at_barrier |= 1u << self->lane;
        self->state = AT_BARRIER;
        wait();
        return;
    }
    advance(group.epochs, flags);
    ++launch->counters.barriers;
    group.at_barrier = 0;
    for (uint32_t i = 0; i < group.threads; ++i) threads[i].state = READY;
    for (uint32_t i = 0; i < MAX_SIMDGROUPS; ++i) simds[i].at_barrier = 0;
}

// At the end of a thread: nobody may be waiting for it.
inline void arrive_at_return() {
    Simd& simd = simds[self->simd];
    if (simd.waiting) {
        fail(DIVERGENCE, simd.pc, "", "%s is reached by lane %u but not by lane %u, which has returned",
             simd.operation, lowest(simd.waiting), self->lane);
    }
    if (group.at_barrier)
        fail(DIVERGENCE, group.pc, "", "threadgroup_barrier is reached by %u threads but not by thread %u, "
             "which has returned", group.at_barrier, self->index);
    simd.returned |= 1u << self->lane;
    ++group.returned;
}

// The memory of a threadgroup variable, the same for all threads and threadgroups.
EXPORT void* emulator_threadgroup(uint32_t variable, const char* name, uint64_t bytes, uint32_t item) {
    for (uint32_t i = 0; i < region_count; ++i)
        if (regions[i].kind == THREADGROUP && regions[i].variable == variable) return regions[i].begin;
    launch->counters.threadgroup_bytes += bytes;
    if (launch->counters.threadgroup_bytes > MAX_THREADGROUP_BYTES)
        fail(LIMIT, __builtin_return_address(0), name, "%s brings threadgroup memory to %llu bytes; the limit is %u",
             name, (unsigned long long)launch->counters.threadgroup_bytes, MAX_THREADGROUP_BYTES);
    Region* region = add_region(name, bytes, item, THREADGROUP);
    if (!region) fail(LIMIT, __builtin_return_address(0), name, "no room for %s in the emulator", name);
    region->variable = variable;
    memset(region->begin, 0xff, bytes);
    return region->begin;
}

EXPORT const Attributes* emulator_attributes() { return &self->attributes; }
