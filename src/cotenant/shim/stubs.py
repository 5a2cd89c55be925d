"""Write the assembly of the stand-in libraries: one jump per export of the real library, and the table behind them.

Every export has a slot in `cot_real_table`.  Before the real library is open a slot leads to a small stub that opens it
and then goes on to the real function with all arguments unchanged; afterwards the slot holds the real address.
"""

from __future__ import annotations

from collections.abc import Iterable

_RESOLVE = """
    .text
    .type cot_lazy_common, @function
cot_lazy_common:
    /* on the stack: index of the slot, then the caller's return address; all argument registers are live */
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
    movups %xmm0, 64(%rsp)
    movups %xmm1, 80(%rsp)
    movups %xmm2, 96(%rsp)
    movups %xmm3, 112(%rsp)
    movups %xmm4, 128(%rsp)
    movups %xmm5, 144(%rsp)
    movups %xmm6, 160(%rsp)
    movups %xmm7, 176(%rsp)
    call {opener}
    movq 8(%rbp), %rax
    leaq cot_real_table(%rip), %r11
    movq (%r11,%rax,8), %r11
    movq 0(%rsp), %rax
    movq 8(%rsp), %rdi
    movq 16(%rsp), %rsi
    movq 24(%rsp), %rdx
    movq 32(%rsp), %rcx
    movq 40(%rsp), %r8
    movq 48(%rsp), %r9
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
    addq $8, %rsp
    jmp *%r11
    .size cot_lazy_common, .-cot_lazy_common
"""


def stub_assembly(exports: Iterable[str], wrapped: set[str], opener: str) -> str:
    """Assembly (x86-64, GNU syntax) for all `exports`; those in `wrapped` are defined elsewhere and get only a slot.

    `opener` is the C function that fills the table.
    """
    names = sorted(set(exports) | wrapped)
    lines = [_RESOLVE.replace("{opener}", opener)]
    for index, name in enumerate(names):
        lines.append(f"cot_lazy_{index}: pushq ${index}\n    jmp cot_lazy_common")
        if name not in wrapped:
            lines.append(f"    .globl {name}\n    .type {name}, @function\n{name}:")
            lines.append(f"    jmp *cot_real_{name}(%rip)\n    .size {name}, .-{name}")
    lines.append("    .data\n    .balign 16\n    .globl cot_real_table\n    .hidden cot_real_table\ncot_real_table:")
    for index, name in enumerate(names):
        lines.append(
            f"    .globl cot_real_{name}\n    .hidden cot_real_{name}\ncot_real_{name}: .quad cot_lazy_{index}"
        )
    lines.append('    .section .data.rel.ro,"aw"\n    .balign 8')
    lines.append("    .globl cot_names\n    .hidden cot_names\ncot_names:")
    lines += [f"    .quad cot_name_{index}" for index in range(len(names))]
    lines.append("    .globl cot_wrappers\n    .hidden cot_wrappers\ncot_wrappers:")
    lines += [f"    .quad {name if name in wrapped else 0}" for name in names]
    lines.append("    .section .rodata")
    lines += [f'cot_name_{index}: .asciz "{name}"' for index, name in enumerate(names)]
    lines.append("    .balign 4\n    .globl cot_export_count\n    .hidden cot_export_count")
    lines.append(f"cot_export_count: .long {len(names)}")
    lines.append('    .section .note.GNU-stack,"",@progbits\n')
    return "\n".join(lines)
