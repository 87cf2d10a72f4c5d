// What Python (launcher.py) and compiled kernels share with the runtime. Keep the three in step.
#pragma once
#include <stdint.h>

enum Kind : uint32_t { INPUT = 0, OUTPUT = 1, METADATA = 2, THREADGROUP = 3 };

enum Failure : uint32_t {
    NONE = 0,
    BOUNDS,
    READ_ONLY,
    RACE,
    DIVERGENCE,
    UNINITIALISED,
    UNWRITTEN,
    LIMIT,
    ARITHMETIC,
    ALIGNMENT,
};

struct Buffer {
    const char* name;
    uint8_t* data;         // copied in before the launch, and back for outputs
    const uint8_t* holes;  // 1 for each item between the elements of a strided input, or null
    uint64_t bytes;        // all that may be touched
    uint64_t origin;       // byte of the first element, not 0 with negative strides
    uint32_t item;         // bytes of an element
    Kind kind;
    uint32_t floating;
    uint64_t read, written, fetched;  // results, in bytes; see memory.h
};

struct Line {
    uint64_t pc;
    const char* file;
    uint64_t line;
};

struct Counters {
    uint64_t threads, threadgroups, simd_operations, barriers, simdgroup_barriers;
    uint64_t threadgroup_bytes;
    uint64_t matrix_products;                          // among the SIMD-group operations
    uint64_t device_accesses, threadgroup_accesses;    // loads and stores of single threads
    uint64_t threadgroup_cycles;                       // of SIMD-groups, see banks.h
};

struct Error {
    Failure failure;
    uint32_t line;
    uint32_t has_position;
    uint32_t position[3];  // of the thread, in the grid
    char file[256];
    char buffer[64];
    char message[512];
};

struct Launch {
    void (*entry)(void* const* pointers);
    const Line* lines;
    uint64_t line_count;
    Buffer* buffers;
    uint32_t buffer_count;
    uint32_t grid[3];
    uint32_t threadgroup[3];
    Counters counters;
    Error error;
};

// The attributes a kernel may ask for; vectors of three have the size of four.
struct alignas(16) Attributes {
    uint32_t dispatch_threads_per_threadgroup[4];
    uint32_t grid_origin[4];
    uint32_t grid_size[4];
    uint32_t thread_position_in_grid[4];
    uint32_t thread_position_in_threadgroup[4];
    uint32_t threadgroup_position_in_grid[4];
    uint32_t threadgroups_per_grid[4];
    uint32_t threads_per_grid[4];
    uint32_t threads_per_threadgroup[4];
    uint32_t dispatch_quadgroups_per_threadgroup;
    uint32_t dispatch_simdgroups_per_threadgroup;
    uint32_t quadgroup_index_in_threadgroup;
    uint32_t quadgroups_per_threadgroup;
    uint32_t simdgroup_index_in_threadgroup;
    uint32_t simdgroups_per_threadgroup;
    uint32_t thread_execution_width;
    uint32_t thread_index_in_quadgroup;
    uint32_t thread_index_in_simdgroup;
    uint32_t thread_index_in_threadgroup;
    uint32_t threads_per_simdgroup;
};
