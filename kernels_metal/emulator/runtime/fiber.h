// Switching stacks: `emulator_switch` saves the callee-saved registers on this stack and goes on
// where the other one was left.
#pragma once
#include <stdint.h>

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define SYMBOL(name) TEXT(__USER_LABEL_PREFIX__) name

extern "C" void emulator_switch(void** save, void* load);

#if defined(__x86_64__)
asm(".text\n.p2align 4\n"
    ".globl " SYMBOL("emulator_switch") "\n" SYMBOL("emulator_switch") ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  retq\n");

// A stack on which `emulator_switch` enters `start`.
inline void* prepare(uint8_t* top, void (*start)()) {
    uint64_t* sp = reinterpret_cast<uint64_t*>(top);
    *--sp = 0;  // where a return address would be: `start` never returns
    *--sp = reinterpret_cast<uint64_t>(start);
    for (int i = 0; i < 6; ++i) *--sp = 0;
    return sp;
}
#elif defined(__aarch64__)
asm(".text\n.p2align 4\n"
    ".globl " SYMBOL("emulator_switch") "\n" SYMBOL("emulator_switch") ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x9, sp\n  str x9, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n"
    "  ret\n");

inline void* prepare(uint8_t* top, void (*start)()) {
    uint64_t* sp = reinterpret_cast<uint64_t*>(top) - 20;
    for (int i = 0; i < 20; ++i) sp[i] = 0;
    sp[11] = reinterpret_cast<uint64_t>(start);
    return sp;
}
#else
#error "the emulator switches stacks on x86-64 and arm64 only"
#endif
