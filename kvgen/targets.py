"""The devices that kernels are compiled for ahead, as Triton calls them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """A device: `sm_90` or `gfx950`."""

    backend: str  # "cuda" or "hip"
    arch: int | str  # 90, or "gfx950"
    threads: int  # of a warp
    shared_bytes: int  # that one program can have

    def as_triton(self) -> Any:
        """The same as Triton's drivers say it."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.backend, self.arch, self.threads)


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 << 10),
    "sm_89": Target("cuda", 89, 32, 99 << 10),
    "sm_90": Target("cuda", 90, 32, 227 << 10),
    "sm_100": Target("cuda", 100, 32, 227 << 10),
    "sm_120": Target("cuda", 120, 32, 99 << 10),
    "gfx942": Target("hip", "gfx942", 64, 64 << 10),
    "gfx950": Target("hip", "gfx950", 64, 160 << 10),
}
