"""What a launch costs the host: through Triton as ever, and as the pool does it, on a driver that does nothing.

Run by `make bench-cpu`. Prints one table: microseconds of a launch (the least of several runs), and ratios to the
ordinary path. Nothing here is about a GPU: its own launch comes on top of both.
"""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "tests")]

from fake_driver import FakeDriver  # noqa: E402

from generated import glm_dsa  # noqa: E402

RUNS, CALLS = 9, 400


class Idle(FakeDriver):
    """A driver that does nothing, not even write launches down."""

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: None


def least(call: Callable[[], None]) -> float:
    """Microseconds of a call."""
    return min(timeit.repeat(call, number=CALLS, repeat=RUNS)) / CALLS * 1e6


def main() -> None:
    config = {"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    layout = glm_dsa.Layout.from_config(config, kv_format="fp8_scaled")
    slots = torch.arange(1, 9)
    latent, rope = torch.zeros((8, 512)).bfloat16(), torch.zeros((8, 64)).bfloat16()
    with FakeDriver("sm_90") as driver:
        glm_dsa.Pool(layout, 64, backend="triton").set_mla_kv_buffer(0, slots, latent, rope)
        (launch,) = driver.launches
    with Idle("sm_90"):
        pool = glm_dsa.Pool(layout, 64, backend="triton")
        pool.set_mla_kv_buffer(0, slots, latent, rope)
        entry = pool._entry_of["kv", 0]
        own: Any = entry.kernels[launch.name]
        arguments = list(launch.arguments.values())[1 : -len(own.constants)]
        options = {"num_warps": own.warps, "enable_fp_fusion": False}

        def ordinary() -> None:
            own.kernel[2, 1, 1](entry.memory, *arguments, **own.constants, **options)

        def direct() -> None:
            pool._launch(own, (2, 1, 1), *arguments)

        def whole() -> None:
            pool.set_mla_kv_buffer(0, slots, latent, rope)

        rows = {"through Triton": least(ordinary), "as compiled": least(direct), "the whole operation": least(whole)}
    print(f"a store of {glm_dsa.__name__}, {len(arguments) + 1} arguments and {len(own.constants)} constants")
    for title, cost in rows.items():
        print(f"  {title:<20} {cost:6.2f} us  {cost / rows['through Triton']:5.2f}")


if __name__ == "__main__":
    main()
