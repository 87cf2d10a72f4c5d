// The names clang's -fsanitize=thread and -fsanitize=array-bounds call, given our own meaning.
#pragma once
#include "sync.h"

#define HERE __builtin_return_address(0)
#define HOOK(name, size, write) \
    EXPORT void name(void* address) { access(reinterpret_cast<uint64_t>(address), size, write, HERE); }
#define HOOKS(size) \
    HOOK(__tsan_read##size, size, false) \
    HOOK(__tsan_write##size, size, true) \
    HOOK(__tsan_unaligned_read##size, size, false) \
    HOOK(__tsan_unaligned_write##size, size, true)

HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

EXPORT void __tsan_init() {}

EXPORT void* __tsan_memcpy(void* to, const void* from, size_t size) {
    access(reinterpret_cast<uint64_t>(from), static_cast<uint32_t>(size), false, HERE);
    access(reinterpret_cast<uint64_t>(to), static_cast<uint32_t>(size), true, HERE);
    return memcpy(to, from, size);
}

EXPORT void* __tsan_memmove(void* to, const void* from, size_t size) {
    access(reinterpret_cast<uint64_t>(from), static_cast<uint32_t>(size), false, HERE);
    access(reinterpret_cast<uint64_t>(to), static_cast<uint32_t>(size), true, HERE);
    return memmove(to, from, size);
}

EXPORT void* __tsan_memset(void* to, int value, size_t size) {
    access(reinterpret_cast<uint64_t>(to), static_cast<uint32_t>(size), true, HERE);
    return memset(to, value, size);
}

// What clang passes to its undefined-behaviour handlers.
struct Place {
    const char* file;
    uint32_t line, column;
};

struct TypeName {
    uint16_t kind, info;
    char name[1];
};

struct OutOfBounds {
    Place place;
    const TypeName* array;
    const TypeName* index;
};

struct Arithmetic {
    Place place;
};

struct Misaligned {
    Place place;
    const TypeName* type;
    uint8_t log_alignment, use;
};

[[noreturn]] inline void fail_at(const Place& place, Failure failure, const char* format, long long value,
                                 const char* text = "") {
    report(failure, nullptr, "", format, value, text);
    launch->error.line = place.line;
    copy_text(launch->error.file, sizeof launch->error.file, place.file);
    stop();
}

EXPORT void __ubsan_handle_out_of_bounds_abort(OutOfBounds* data, uintptr_t index) {
    fail_at(data->place, BOUNDS, "index %lld of an array of type %s", (long long)index, data->array->name);
}

EXPORT void __ubsan_handle_type_mismatch_v1_abort(Misaligned* data, uintptr_t) {
    fail_at(data->place, ALIGNMENT, "an address that is no multiple of %lld, as type %s needs",
            1ll << data->log_alignment, data->type->name);
}

EXPORT void __ubsan_handle_divrem_overflow_abort(Arithmetic* data, uintptr_t, uintptr_t) {
    fail_at(data->place, ARITHMETIC, "division by %lld%s", 0);
}

EXPORT void __ubsan_handle_shift_out_of_bounds_abort(Arithmetic* data, uintptr_t, uintptr_t by) {
    fail_at(data->place, ARITHMETIC, "shift by %lld bits%s", (long long)by);
}

// Rounding to bfloat, to nearest even; not every compiler's own library has it.
EXPORT __attribute__((weak)) __bf16 __truncsfbf2(float value) {
    uint32_t bits = __builtin_bit_cast(uint32_t, value);
    if (value != value) bits |= 0x400000;
    else bits += 0x7fff + (bits >> 16 & 1);
    return __builtin_bit_cast(__bf16, static_cast<uint16_t>(bits >> 16));
}
