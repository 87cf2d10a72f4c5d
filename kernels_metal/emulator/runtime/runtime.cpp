// Runs a launch on the CPU: every thread of a threadgroup is a fiber, threadgroups run one after
// the other. Compiled once; all kernels share it. No C++ library is needed.
#include "hooks.h"

static void* pointers[SLOT_COUNT];

static void start() {
    launch->entry(pointers);
    arrive_at_return();
    self->state = RETURNED;
    void* finished;
    emulator_switch(&finished, scheduler);
}

static bool prepare_once() {
    if (!arena) arena = reserve(SLOT_COUNT << SLOT_SHIFT, PROT_NONE);
    if (!stacks) stacks = reserve(MAX_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE);
    return arena && stacks;
}

static bool place_buffers() {
    for (uint32_t i = 0; i < launch->buffer_count; ++i) {
        Buffer& buffer = launch->buffers[i];
        Region* region = add_region(buffer.name, buffer.bytes, buffer.item, buffer.kind);
        if (!region) {
            report(LIMIT, nullptr, buffer.name, "%s with %llu bytes does not fit the emulator", buffer.name,
                   (unsigned long long)buffer.bytes);
            return false;
        }
        memcpy(region->begin, buffer.data, buffer.bytes);
        for (uint64_t j = 0; buffer.holes && j < buffer.bytes / buffer.item; ++j)
            if (buffer.holes[j]) region->fetched_by[j] = HOLE;
        pointers[i] = region->begin + buffer.origin;
    }
    return true;
}

static uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }
static uint32_t upwards(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

static void copy3(uint32_t* to, const uint32_t* from) { memcpy(to, from, 3 * sizeof(uint32_t)); }

static void set_attributes(Thread& thread, const uint32_t* position, const uint32_t* size, const uint32_t* groups) {
    Attributes& a = thread.attributes;
    uint32_t index = thread.index, full = 1;
    uint32_t at[3] = {index % size[0], index / size[0] % size[1], index / size[0] / size[1]};
    for (int i = 0; i < 3; ++i) {
        a.thread_position_in_grid[i] = position[i] * launch->threadgroup[i] + at[i];
        full *= launch->threadgroup[i];
    }
    copy3(a.dispatch_threads_per_threadgroup, launch->threadgroup);
    copy3(a.grid_size, launch->grid);
    copy3(a.thread_position_in_threadgroup, at);
    copy3(a.threadgroup_position_in_grid, position);
    copy3(a.threadgroups_per_grid, groups);
    copy3(a.threads_per_grid, launch->grid);
    copy3(a.threads_per_threadgroup, size);
    a.dispatch_quadgroups_per_threadgroup = upwards(full, 4);
    a.dispatch_simdgroups_per_threadgroup = upwards(full, WIDTH);
    a.quadgroup_index_in_threadgroup = index / 4;
    a.quadgroups_per_threadgroup = upwards(group.threads, 4);
    a.simdgroup_index_in_threadgroup = index / WIDTH;
    a.simdgroups_per_threadgroup = upwards(group.threads, WIDTH);
    a.thread_execution_width = a.threads_per_simdgroup = WIDTH;
    a.thread_index_in_quadgroup = index % 4;
    a.thread_index_in_simdgroup = index % WIDTH;
    a.thread_index_in_threadgroup = index;
}

static void begin_group(const uint32_t* position, const uint32_t* groups) {
    uint32_t size[3];
    for (int i = 0; i < 3; ++i)
        size[i] = smaller(launch->threadgroup[i], launch->grid[i] - position[i] * launch->threadgroup[i]);
    group.first_thread += group.threads;
    group.threads = size[0] * size[1] * size[2];
    group.at_barrier = group.returned = 0;
    ++group.number;
    for (int space = 0; space < 2; ++space) group.start_epochs[space] = ++group.epochs[space];
    for (Simd& simd : simds) {
        simd.members = simd.waiting = simd.at_barrier = simd.returned = 0;
        simd.epochs[0] = simd.epochs[1] = 0;
    }
    for (uint32_t i = 0; i < group.threads; ++i) {
        Thread& thread = threads[i];
        thread.state = READY;
        thread.index = i;
        thread.lane = i % WIDTH;
        thread.simd = i / WIDTH;
        thread.sp = prepare(stacks + (i + 1) * STACK_BYTES, start);
        simds[thread.simd].members |= 1u << thread.lane;
        set_attributes(thread, position, size, groups);
    }
}

// Runs the lanes of a SIMD-group until all wait or have returned.
static bool run_simd(uint32_t simd) {
    uint32_t end = smaller((simd + 1) * WIDTH, group.threads);
    bool ran = false;
    for (bool again = true; again;) {
        again = false;
        for (uint32_t i = simd * WIDTH; i < end; ++i) {
            if (threads[i].state != READY) continue;
            self = &threads[i];
            emulator_switch(&scheduler, self->sp);
            if (launch->error.failure != NONE) return false;
            again = ran = true;
        }
    }
    end_turns();
    return ran;
}

static void run_group() {
    for (bool ran = true; ran && group.returned < group.threads;) {
        ran = false;
        for (uint32_t simd = 0; simd * WIDTH < group.threads; ++simd) {
            ran |= run_simd(simd);
            if (launch->error.failure != NONE) return;
        }
    }
}

static void run_groups() {
    uint32_t groups[3];
    for (int i = 0; i < 3; ++i) groups[i] = upwards(launch->grid[i], launch->threadgroup[i]);
    for (uint32_t z = 0; z < groups[2]; ++z)
        for (uint32_t y = 0; y < groups[1]; ++y)
            for (uint32_t x = 0; x < groups[0]; ++x) {
                uint32_t position[3] = {x, y, z};
                begin_group(position, groups);
                run_group();
                if (launch->error.failure != NONE) return;
                ++launch->counters.threadgroups;
                launch->counters.threads += group.threads;
            }
}

// The pattern that clang leaves in uninitialised floats, a NaN that arithmetic hands on.
static bool is_pattern(const Region& region, uint64_t at) {
    for (uint64_t i = 0; i < (1ull << region.shift); ++i)
        if (region.begin[at + i] != 0xff) return false;
    return true;
}

static void check_output(const Buffer& buffer, const Region& region) {
    uint64_t item = 1ull << region.shift, missing = 0, first = 0;
    for (uint64_t i = 0; i < buffer.bytes / item; ++i) {
        const Access& write = region.writes[i];
        if (write.epoch == 0) {
            if (!missing++) first = i;
        } else if (buffer.floating && is_pattern(region, i * item)) {
            report(UNINITIALISED, long_pc(write.pc), region.name,
                   "thread %u writes element %llu of %s from an uninitialised variable", write.thread,
                   (unsigned long long)i, region.name);
        }
    }
    if (missing)
        report(UNWRITTEN, nullptr, region.name, "%llu of %llu elements of %s are never written, the first is %llu",
               (unsigned long long)missing, (unsigned long long)(buffer.bytes / item), region.name,
               (unsigned long long)first);
}

static void finish() {
    self = nullptr;
    for (uint32_t i = 0; i < launch->buffer_count; ++i) {
        Buffer& buffer = launch->buffers[i];
        const Region& region = regions[i];
        buffer.read = region.read;
        buffer.written = region.written;
        buffer.fetched = region.fetched;
        if (buffer.kind != OUTPUT) continue;
        memcpy(buffer.data, region.begin, buffer.bytes);
        if (launch->error.failure == NONE) check_output(buffer, region);
    }
}

EXPORT uint32_t emulator_run(Launch* wanted) {
    launch = wanted;
    self = nullptr;
    group = Group{};
    turn_count = 0;  // where a launch was stopped
    memset(next_turn, 0, sizeof next_turn);
    if (!prepare_once()) {
        report(LIMIT, nullptr, "", "the emulator could not reserve %llu GiB of address space",
               (unsigned long long)((SLOT_COUNT << SLOT_SHIFT) >> 30));
    } else if (place_buffers()) {
        run_groups();
        finish();
    }
    if (arena) remove_regions();
    return launch->error.failure;
}
