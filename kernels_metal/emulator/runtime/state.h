// The launch that runs: its threads, its SIMD-groups, and how it is stopped by a failure.
#pragma once
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "abi.h"
#include "fiber.h"

constexpr uint32_t WIDTH = 32;           // threads of a SIMD-group
constexpr uint32_t MAX_THREADS = 1024;   // of a threadgroup
constexpr uint32_t MAX_SIMDGROUPS = MAX_THREADS / WIDTH;
constexpr uint32_t MAX_THREADGROUP_BYTES = 32 * 1024;
constexpr uint64_t STACK_BYTES = 256 * 1024;
constexpr uint32_t SLOT_BYTES = 64;      // what a lane can hand to a SIMD-group operation

enum State : uint8_t { READY, AT_SIMD, AT_BARRIER, RETURNED };

struct Thread {
    void* sp;
    State state;
    uint32_t index, lane, simd;
    Attributes attributes;
};

struct Simd {
    uint32_t members, waiting, at_barrier, returned;  // masks of lanes
    const char* operation;
    void* pc;
    uint32_t epochs[2];  // by memory space: simdgroup_barriers passed
    alignas(16) uint8_t slots[WIDTH * SLOT_BYTES];
    uint32_t arguments[WIDTH];
};

enum Space : uint8_t { DEVICE_SPACE = 0, THREADGROUP_SPACE = 1 };

struct Group {
    uint32_t threads, at_barrier, returned;
    const char* operation;
    void* pc;
    uint32_t first_thread;     // numbers threads over the whole launch
    uint32_t number;           // from 1
    uint32_t epochs[2];        // by memory space: grows with barriers and threadgroups
    uint32_t start_epochs[2];  // when this threadgroup began
};

inline Launch* launch;
inline Group group;
inline Thread threads[MAX_THREADS];
inline Simd simds[MAX_SIMDGROUPS];
inline Thread* self;
inline void* scheduler;
inline uint8_t* stacks;

inline uint8_t* reserve(uint64_t bytes, int protection) {
    void* memory = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? nullptr : static_cast<uint8_t*>(memory);
}

inline const Line* find_line(const void* pc) {
    uint64_t wanted = reinterpret_cast<uint64_t>(pc);
    uint64_t low = 0, high = launch->line_count;
    while (low < high) {
        uint64_t middle = (low + high) / 2;
        if (launch->lines[middle].pc < wanted) low = middle + 1;
        else high = middle;
    }
    bool found = low < launch->line_count && launch->lines[low].pc == wanted;
    return found ? &launch->lines[low] : nullptr;
}

inline uint32_t line_of(const void* pc) {
    const Line* line = find_line(pc);
    return line ? static_cast<uint32_t>(line->line) : 0;
}

inline bool same_line(const void* a, const void* b) { return a == b || line_of(a) == line_of(b); }

inline void copy_text(char* to, uint64_t room, const char* from) {
    snprintf(to, room, "%s", from ? from : "");
}

// Keeps the first failure of the launch.
inline void describe(Failure failure, const void* pc, const char* buffer, const char* format, va_list values) {
    Error& error = launch->error;
    if (error.failure != NONE) return;
    error.failure = failure;
    const Line* line = pc ? find_line(pc) : nullptr;
    error.line = line ? static_cast<uint32_t>(line->line) : 0;
    copy_text(error.file, sizeof error.file, line ? line->file : "");
    copy_text(error.buffer, sizeof error.buffer, buffer);
    error.has_position = self != nullptr;
    if (self) memcpy(error.position, self->attributes.thread_position_in_grid, sizeof error.position);
    vsnprintf(error.message, sizeof error.message, format, values);
}

// Ends the launch: the thread that failed is left where it is, and so are all others.
[[noreturn]] inline void stop() {
    void* abandoned;
    emulator_switch(&abandoned, scheduler);
    abort();
}

[[noreturn]] inline void fail(Failure failure, const void* pc, const char* buffer, const char* format, ...) {
    va_list values;
    va_start(values, format);
    describe(failure, pc, buffer, format, values);
    va_end(values);
    stop();
}

// A failure that ends nothing by itself.
inline void report(Failure failure, const void* pc, const char* buffer, const char* format, ...) {
    va_list values;
    va_start(values, format);
    describe(failure, pc, buffer, format, values);
    va_end(values);
}

inline void wait() { emulator_switch(&self->sp, scheduler); }
