"""What a block may use on each architecture. The assembler does not refuse a kernel that asks for more."""

from __future__ import annotations

from dataclasses import dataclass

from aotc.errors import CompilerError


@dataclass(frozen=True)
class Limits:
    """Shared memory in bytes that a block can opt in to, registers of a thread and of a block.

    From the CUDA C++ Programming Guide, technical specifications per compute capability.
    """

    shared_bytes: int
    thread_registers: int = 255
    block_registers: int = 65536


_KIB = 1024
LIMITS = {
    "sm80": Limits(163 * _KIB), "sm86": Limits(99 * _KIB), "sm89": Limits(99 * _KIB), "sm90": Limits(227 * _KIB),
    "sm100": Limits(227 * _KIB), "sm120": Limits(99 * _KIB),
}  # fmt: skip
MAX_SPILL_BYTES = 256  # of a thread: more of it is a schedule gone wrong


def check(name: str, arch: str, shared: int, registers: int, spill_bytes: int, num_warps: int) -> None:
    """Raises CompilerError, naming the kernel, where it would not start on `arch` or spills registers."""
    limits = LIMITS[arch]
    if shared > limits.shared_bytes:
        raise CompilerError(f"kernel {name} asks for {shared} bytes of shared memory, {arch} has {limits.shared_bytes}")
    if registers > limits.thread_registers or registers * num_warps * 32 > limits.block_registers:
        raise CompilerError(f"kernel {name} asks for {registers} registers in {num_warps} warps, more than {arch} has")
    if spill_bytes > MAX_SPILL_BYTES:
        raise CompilerError(f"kernel {name} spills {spill_bytes} bytes a thread on {arch}: its tile is too large")
