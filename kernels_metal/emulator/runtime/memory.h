// All memory a kernel can name, and the checks of every access to it.
//
// Each buffer and each threadgroup variable lies alone in a slot of 4 GiB of address space, so that
// the address tells which buffer was meant even far out of its bounds. `read` and `written` count
// the bytes of every access of every thread; `fetched` counts the bytes of an input that at least
// one thread of a threadgroup read, summed over the threadgroups: what has to come from memory when
// a threadgroup shares all it loads.
#pragma once
#include <dlfcn.h>

#include "banks.h"

constexpr uint64_t SLOT_SHIFT = 32;
constexpr uint64_t SLOT_COUNT = 128;
constexpr uint64_t SLOT_START = 1ull << 30;
constexpr uint64_t MAX_BUFFER_BYTES = 1ull << 31;

// An access: by which thread, in which epochs, from where in the code.
struct Access {
    uint32_t thread, epoch, simd_epoch;
    int32_t pc;
};

struct Region {
    const char* name;
    uint8_t* begin;
    uint64_t bytes;
    Kind kind;
    Space space;
    bool was_read;
    uint32_t shift;        // log2 of the bytes that share a state
    Access* writes;        // the last one
    Access* reads;         // two threads that read since
    uint32_t* fetched_by;  // the last threadgroup that read here
    uint64_t read, written, fetched;
    uint32_t variable;     // which threadgroup variable
};

constexpr uint32_t HOLE = ~0u;  // in fetched_by: belongs to no element

inline uint8_t* arena;
inline Region regions[SLOT_COUNT];
inline uint32_t region_count;

inline int32_t short_pc(const void* pc) {
    return static_cast<int32_t>(reinterpret_cast<uint64_t>(pc) - reinterpret_cast<uint64_t>(launch->entry));
}

inline const void* long_pc(int32_t pc) {
    return reinterpret_cast<const uint8_t*>(launch->entry) + pc;
}

inline uint32_t log2_of(uint64_t value) {
    uint32_t shift = 0;
    while ((2ull << shift) <= value) ++shift;
    return shift;
}

template <class T> T* table(uint64_t count) {
    return reinterpret_cast<T*>(reserve(count * sizeof(T) + 1, PROT_READ | PROT_WRITE));
}

// A new region, or null when there is no room.
inline Region* add_region(const char* name, uint64_t bytes, uint32_t item, Kind kind) {
    if (region_count == SLOT_COUNT || bytes > MAX_BUFFER_BYTES) return nullptr;
    Region& region = regions[region_count];
    region = Region{};
    region.begin = arena + (uint64_t(region_count) << SLOT_SHIFT) + SLOT_START;
    if (mprotect(region.begin, bytes + 1, PROT_READ | PROT_WRITE) != 0) return nullptr;
    region.name = name;
    region.bytes = bytes;
    region.kind = kind;
    region.space = kind == THREADGROUP ? THREADGROUP_SPACE : DEVICE_SPACE;
    region.shift = log2_of(item);
    uint64_t count = (bytes >> region.shift) + 1;
    if (kind == INPUT) region.fetched_by = table<uint32_t>(count);
    if (kind == OUTPUT || kind == THREADGROUP) {
        region.writes = table<Access>(count);
        region.reads = table<Access>(2 * count);
    }
    ++region_count;
    return &region;
}

inline void remove_regions() {
    for (uint32_t i = 0; i < region_count; ++i) {
        Region& region = regions[i];
        uint64_t count = (region.bytes >> region.shift) + 1;
        if (region.fetched_by) munmap(region.fetched_by, count * sizeof(uint32_t) + 1);
        if (region.writes) munmap(region.writes, count * sizeof(Access) + 1);
        if (region.reads) munmap(region.reads, 2 * count * sizeof(Access) + 1);
        mmap(region.begin, region.bytes + 1, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    }
    region_count = 0;
}

inline uint32_t thread_number() { return group.first_thread + self->index; }

// Nothing orders that access before the one of this thread now.
inline bool unordered(const Access& access, Space space) {
    if (access.epoch == 0 || access.thread == thread_number()) return false;
    if (access.epoch < group.start_epochs[space]) return space == DEVICE_SPACE;
    if (access.epoch < group.epochs[space]) return false;
    bool same_simd = (access.thread - group.first_thread) / WIDTH == self->simd;
    return !same_simd || access.simd_epoch >= simds[self->simd].epochs[space];
}

[[noreturn]] inline void fail_race(const Region& region, uint64_t at, const Access& other, const void* pc,
                                   const char* now, const char* before) {
    uint32_t number = other.thread - group.first_thread;
    bool here = other.epoch >= group.start_epochs[region.space];
    fail(RACE, pc, region.name, "%s byte %llu of %s, which %s %u of %s threadgroup %s on line %u; "
         "nothing orders the two", now, (unsigned long long)at, region.name, "thread",
         here ? number : other.thread, here ? "the same" : "another", before, line_of(long_pc(other.pc)));
}

inline void note_read(Access* slots, const Access& now, Space space) {
    for (int i = 0; i < 2; ++i) {
        if (slots[i].thread == now.thread || !unordered(slots[i], space)) {
            slots[i] = now;
            return;
        }
    }
    bool first_is_mine = (slots[0].thread - group.first_thread) / WIDTH == self->simd;
    slots[first_is_mine ? 0 : 1] = now;
}

inline bool is_written(const Region& region, const Access& write) {
    if (region.kind == THREADGROUP) return write.epoch >= group.start_epochs[THREADGROUP_SPACE];
    return write.epoch != 0;
}

inline void check_read(Region& region, uint64_t at, uint64_t index, const Access& now, const void* pc) {
    Access& write = region.writes[index];
    if (!is_written(region, write))
        fail(UNINITIALISED, pc, region.name, "reads byte %llu of %s before anything is written there",
             (unsigned long long)at, region.name);
    if (unordered(write, region.space)) fail_race(region, at, write, pc, "reads", "writes");
    region.was_read = true;
    note_read(region.reads + 2 * index, now, region.space);
}

inline void check_write(Region& region, uint64_t at, uint64_t index, const Access& now, const void* pc) {
    Access& write = region.writes[index];
    if (unordered(write, region.space)) fail_race(region, at, write, pc, "writes", "writes");
    if (region.was_read)
        for (int i = 0; i < 2; ++i) {
            const Access& read = region.reads[2 * index + i];
            if (unordered(read, region.space)) fail_race(region, at, read, pc, "writes", "reads");
        }
    write = now;
}

inline bool on_own_stack(uint64_t address) {
    uint64_t begin = reinterpret_cast<uint64_t>(stacks) + self->index * STACK_BYTES;
    return address - begin < STACK_BYTES;
}

// Locals of this thread, or the constants of the kernel's program.
inline void check_outside(uint64_t address, uint32_t size, bool write, const void* pc) {
    if (on_own_stack(address)) return;
    Dl_info info;
    if (!write && dladdr(reinterpret_cast<void*>(address), &info) && info.dli_fbase) return;
    fail(BOUNDS, pc, "", "%s %u bytes that belong to no buffer", write ? "writes" : "reads", size);
}

inline uint64_t check_bounds(const Region& region, uint64_t address, uint32_t size, bool write, const void* pc) {
    uint64_t at = address - reinterpret_cast<uint64_t>(region.begin);
    if (__builtin_expect(at > region.bytes || size > region.bytes - at, 0))
        fail(BOUNDS, pc, region.name, "%s %u bytes at byte %lld of %s, which has %llu", write ? "writes" : "reads",
             size, (long long)at, region.name, (unsigned long long)region.bytes);
    return at;
}

inline void fetch(Region& region, uint64_t first, uint64_t last, const void* pc) {
    for (uint64_t i = first; i <= last; ++i) {
        if (region.fetched_by[i] == group.number) continue;
        if (region.fetched_by[i] == HOLE)
            fail(BOUNDS, pc, region.name, "reads byte %llu of %s, which lies between its elements",
                 (unsigned long long)(i << region.shift), region.name);
        region.fetched_by[i] = group.number;
        region.fetched += 1ull << region.shift;
    }
}

inline void access(uint64_t address, uint32_t size, bool write, const void* pc) {
    uint64_t slot = (address - reinterpret_cast<uint64_t>(arena)) >> SLOT_SHIFT;
    if (__builtin_expect(slot >= region_count, 0)) return check_outside(address, size, write, pc);
    Region& region = regions[slot];
    uint64_t at = check_bounds(region, address, size, write, pc);
    (write ? region.written : region.read) += size;
    if (region.kind != METADATA)
        ++(region.space == DEVICE_SPACE ? launch->counters.device_accesses : launch->counters.threadgroup_accesses);
    if (size == 0) return;
    if (region.kind == THREADGROUP) note_banks(address, size, pc);
    uint64_t first = at >> region.shift, last = (at + size - 1) >> region.shift;
    if (region.kind == INPUT && !write) return fetch(region, first, last, pc);
    if (region.kind == METADATA && !write) return;
    if (region.kind == INPUT || region.kind == METADATA)
        fail(READ_ONLY, pc, region.name, "writes byte %llu of %s, which is an input",
             (unsigned long long)at, region.name);
    Access now{thread_number(), group.epochs[region.space], simds[self->simd].epochs[region.space], short_pc(pc)};
    for (uint64_t i = first; i <= last; ++i) {
        if (write) check_write(region, i << region.shift, i, now, pc);
        else check_read(region, i << region.shift, i, now, pc);
    }
}
