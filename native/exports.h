/* Assembly (x86-64, GNU syntax) that is included by a library which replaces another one: a jump for each function
 * that the real library exports, and the table of addresses to which they jump.
 *
 * Every export has a slot, cot_real_NAME, in cot_real_table. Until the real library is open, the slot holds the
 * address of a few instructions that open it and then call the real function with all arguments unchanged;
 * afterwards the slot holds the address of the real function. The jump is a weak symbol: if the C code defines a
 * function of that name, the library exports the C function instead, and cot_own_table contains its address.
 *
 * OPENER is the C function that fills the table. EXPORTS is the file with the list, one line E(NAME) for each
 * function. */
    .text
    .type cot_lazy_common, @function
cot_lazy_common:
    /* r11 is the address of the slot; the top of the stack is the caller's return address; all argument registers are
     * in use */
    pushq %rbp
    movq %rsp, %rbp
    andq $-16, %rsp
    subq $208, %rsp
    movq %rax, 0(%rsp)
    movq %rdi, 8(%rsp)
    movq %rsi, 16(%rsp)
    movq %rdx, 24(%rsp)
    movq %rcx, 32(%rsp)
    movq %r8, 40(%rsp)
    movq %r9, 48(%rsp)
    movq %r11, 56(%rsp)
    movups %xmm0, 64(%rsp)
    movups %xmm1, 80(%rsp)
    movups %xmm2, 96(%rsp)
    movups %xmm3, 112(%rsp)
    movups %xmm4, 128(%rsp)
    movups %xmm5, 144(%rsp)
    movups %xmm6, 160(%rsp)
    movups %xmm7, 176(%rsp)
    call OPENER
    movq 0(%rsp), %rax
    movq 8(%rsp), %rdi
    movq 16(%rsp), %rsi
    movq 24(%rsp), %rdx
    movq 32(%rsp), %rcx
    movq 40(%rsp), %r8
    movq 48(%rsp), %r9
    movq 56(%rsp), %r11
    movups 64(%rsp), %xmm0
    movups 80(%rsp), %xmm1
    movups 96(%rsp), %xmm2
    movups 112(%rsp), %xmm3
    movups 128(%rsp), %xmm4
    movups 144(%rsp), %xmm5
    movups 160(%rsp), %xmm6
    movups 176(%rsp), %xmm7
    movq %rbp, %rsp
    popq %rbp
    jmp *(%r11)
    .size cot_lazy_common, .-cot_lazy_common

#define TABLE(name) .balign 8; .globl name; .hidden name; name:
    .section .data.cot_real, "aw"
    TABLE(cot_real_table)
    .section .data.rel.ro.cot_names, "aw"
    TABLE(cot_names)
    .section .data.rel.ro.cot_own, "aw"
    TABLE(cot_own_table)

#define E(name)                                                                             \
    .text;                                                                                  \
    .Llazy_##name: leaq cot_real_##name(%rip), %r11; jmp cot_lazy_common;                   \
    .weak name; .type name, @function; name: .Ljump_##name: jmp *cot_real_##name(%rip);     \
    .size name, .-name;                                                                     \
    .section .data.cot_real, "aw"; .globl cot_real_##name; .hidden cot_real_##name;         \
    cot_real_##name: .quad .Llazy_##name;                                                   \
    .section .rodata; .Lname_##name: .asciz #name;                                          \
    .section .data.rel.ro.cot_names, "aw"; .quad .Lname_##name;                             \
    .section .data.rel.ro.cot_own, "aw"; .quad name, .Ljump_##name

#include EXPORTS

    .section .data.cot_real, "aw"
    .set cot_export_bytes, . - cot_real_table
    .section .rodata
    .balign 4
    .globl cot_export_count
    .hidden cot_export_count
cot_export_count: .long cot_export_bytes / 8
    .section .note.GNU-stack, "", @progbits
