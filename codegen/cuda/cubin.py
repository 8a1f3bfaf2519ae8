"""What a cubin says of its kernel: registers and stack, read from the notes that ptxas leaves in the ELF file."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_REGISTERS, _FRAME_BYTES = 0x2F, 0x11  # EIATTR_REGCOUNT, EIATTR_FRAME_SIZE: (symbol, value) pairs
_SIZED = 0x04  # EIFMT_SVAL: two bytes of length, then the value; other formats hold two bytes


def kernel_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, stack bytes) of a thread. Triton's kernels have no arrays: their stack is what they spill.

    Raises ValueError for a file that is no cubin.
    """
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    registers = frame = 0
    for name, data in _sections(cubin):
        if name == ".nv.info":
            for attribute, payload in _notes(data):
                if attribute == _REGISTERS:
                    registers = max(registers, struct.unpack_from("<II", payload)[1])
                elif attribute == _FRAME_BYTES:
                    frame = max(frame, struct.unpack_from("<II", payload)[1])
    if not registers:
        raise ValueError("the cubin does not say how many registers its kernel has")
    return registers, frame


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    for name, kind, _, _, offset, size in headers:
        label = elf[names + name : elf.index(b"\0", names + name)].decode()
        if kind != 8:  # SHT_NOBITS has no bytes
            yield label, elf[offset : offset + size]


def _notes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        kind, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind == _SIZED:
            yield attribute, data[at : at + size]
            at += size
