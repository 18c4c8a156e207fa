"""What the machine code of a compiled kernel says: registers, spills, shared memory, instructions, accesses by width.

NVIDIA's code is read by the tools that come with Triton, AMD's from the assembly that Triton keeps.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SASS = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]+)")
SASS_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}  # of an access; else 4
AMD = re.compile(r"^\s+([a-z]\w+)(?:\s|$)")
AMD_ACCESS = re.compile(r"(?:global|buffer|flat)_(load|store)_(\w+?)(?:_d16)?(?:_hi)?$")
AMD_BYTES = {
    **{"ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2},
    **{"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16},
}


@dataclass(frozen=True)
class Code:
    """The machine code of one kernel, counted as it stands: a loop that is not unrolled counts once."""

    registers: int  # of a thread
    spills: int  # accesses to memory that stands in for registers
    shared_bytes: int  # of a program
    instructions: int
    loads: dict[int, int]  # from global memory, of a thread, by their bytes
    stores: dict[int, int]


def read_code(compiled: Any) -> Code:
    """The code of a `CompiledKernel` of Triton."""
    if "cubin" in compiled.asm:
        return _nvidia(compiled.asm["cubin"], compiled.metadata.shared)
    return _amd(compiled.asm["amdgcn"], compiled.metadata.shared)


def _nvidia(cubin: bytes, shared_bytes: int) -> Code:
    resources, listing = _disassembled(cubin)
    names = [match[1] for match in map(SASS.search, listing.splitlines()) if match and match[1] != "NOP"]
    found = re.search(r"REG:(\d+) STACK:(\d+)", resources)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {resources!r}")

    def accesses(prefix: str) -> dict[int, int]:
        widths = (_sass_bytes(name) for name in names if name.partition(".")[0] == prefix)
        return _counted(widths)

    return Code(
        registers=int(found[1]),
        spills=sum(name.startswith(("LDL", "STL")) for name in names),
        shared_bytes=shared_bytes,
        instructions=len(names),
        loads=accesses("LDG"),
        stores=accesses("STG"),
    )


def _sass_bytes(name: str) -> int:
    return next((SASS_BYTES[part] for part in name.split(".")[1:] if part in SASS_BYTES), 4)


def _disassembled(cubin: bytes) -> tuple[str, str]:
    """The resource usage and the listing of a cubin."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        commands = ([tools / "cuobjdump", "-res-usage", file.name], [tools / "nvdisasm", "-c", file.name])
        done = [subprocess.run(command, capture_output=True, text=True, check=True) for command in commands]
    return done[0].stdout + done[0].stderr, done[1].stdout


def _amd(assembly: str, shared_bytes: int) -> Code:
    names = [match[1] for match in map(AMD.match, assembly.splitlines()) if match and not match[1].startswith("s_nop")]
    accesses = [match for match in map(AMD_ACCESS.fullmatch, names) if match]

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", assembly)
        if found is None:
            raise RuntimeError(f"the assembly says nothing of {key}")
        return int(found[1])

    return Code(
        registers=number("vgpr_count"),
        spills=sum(name.startswith("scratch_") for name in names),  # scalars may move to vector registers instead
        shared_bytes=shared_bytes,
        instructions=len(names),
        loads=_counted(AMD_BYTES[match[2]] for match in accesses if match[1] == "load"),
        stores=_counted(AMD_BYTES[match[2]] for match in accesses if match[1] == "store"),
    )


def _counted(widths: Iterator[int]) -> dict[int, int]:
    """How many of each width, the widest first."""
    return dict(sorted(Counter(widths).items(), reverse=True))
