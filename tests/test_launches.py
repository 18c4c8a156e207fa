"""How kernels are launched: which are asked of Triton, which are launched as they were compiled, and on what rows."""

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from fake_driver import FakeDriver, Launch, without_interpreter

sys.path.insert(0, str(Path(__file__).parent.parent))

SLOTS = torch.arange(1, 9)


def pool_of(kv_format: str, layers: int = 2) -> Any:
    glm_dsa = importlib.import_module("generated.glm_dsa")
    config = {"num_hidden_layers": layers, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    return glm_dsa.Pool(glm_dsa.Layout.from_config(config, kv_format=kv_format), 64, backend="triton")


def rows(width: int, dtype: torch.dtype = torch.bfloat16, count: int = 8) -> torch.Tensor:
    return torch.zeros((count, width), dtype=dtype)


def store(pool: Any, slots: torch.Tensor = SLOTS, layer: int = 0) -> None:
    pool.set_mla_kv_buffer(layer, slots, rows(512, count=len(slots)), rows(64, count=len(slots)))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that Triton was asked for, in order."""
    found: list[str] = []
    ordinary = triton.JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(self.__name__)
        return ordinary(self, *args, **kwargs)

    monkeypatch.setattr(triton.JITFunction, "run", run)
    return found


def seen(launch: Launch) -> tuple[str, tuple[int, int, int], dict[str, Any], Any]:
    """A launch, without what differs from one call to the next."""
    named = {
        name: (value.dtype, tuple(value.shape), value.stride()) if isinstance(value, torch.Tensor) else value
        for name, value in launch.arguments.items()
    }
    return launch.name, launch.grid, named, launch.compiled


@without_interpreter
def test_triton_is_asked_once(asked: list[str]) -> None:
    """Every operation again, with as many tokens: the same launches, none of which asks Triton."""
    with FakeDriver("sm_90") as driver:
        pool = pool_of("fp8_scaled")

        def everything() -> list[tuple]:
            before = len(driver.launches)
            store(pool)
            pool.get_mla_kv_buffer(0, SLOTS)
            pool.store_index_k(0, SLOTS, rows(128))
            pool.set_index_k_scale_buffer(0, SLOTS, rows(128, torch.float8_e4m3fn), rows(1, torch.float32))
            pool.get_index_k_scale_buffer(0, SLOTS, SLOTS[:, None], 36, 8)
            pool.move_kv_cache(SLOTS, SLOTS)
            pool.clear_pages(SLOTS)
            return [seen(launch) for launch in driver.launches[before:]]

        first = everything()
        assert len(asked) == len(first) == 8
        assert everything() == first
        assert len(asked) == 8
        # whatever the default of Triton's version is
        assert {launch.compiled.metadata.enable_fp_fusion for launch in driver.launches} == {False}


@without_interpreter
def test_other_numbers_of_tokens_ask_nothing(asked: list[str]) -> None:
    with FakeDriver("sm_90") as driver:
        pool = pool_of("bf16")
        for count in (8, 1, 2, 15, 16, 17, 32, 1000):
            store(pool, torch.arange(count))
        assert asked == ["_store_mla_bf16_kernel"]
        assert [launch.grid[0] for launch in driver.launches] == [2, 1, 1, 4, 4, 5, 8, 250]
        assert [launch.arguments["count"] for launch in driver.launches] == [8, 1, 2, 15, 16, 17, 32, 1000]


@without_interpreter
def test_other_dtypes_and_layers_are_asked_for(asked: list[str]) -> None:
    """Each has its own kernel or memory, and the right one is launched afterwards."""
    with FakeDriver("sm_90") as driver:
        pool = pool_of("fp8_raw")
        codes = (rows(512, torch.float8_e4m3fn), rows(64, torch.float8_e4m3fn))
        for _ in range(2):
            store(pool)
            store(pool, SLOTS.int())
            store(pool, layer=1)
            pool.set_mla_kv_buffer(0, SLOTS, *codes)
        assert len(asked) == 4 and len(driver.launches) == 8
        assert [seen(launch) for launch in driver.launches[:4]] == [seen(launch) for launch in driver.launches[4:]]
        memories = [launch.arguments["memory_ptr"].data_ptr() for launch in driver.launches]
        assert memories == 2 * [pool.buffer("kv", layer).data_ptr() for layer in (0, 0, 1, 0)]
        plain, narrow, _, given = (launch.compiled for launch in driver.launches[:4])
        assert len({plain.hash, narrow.hash, given.hash}) == 3 and driver.launches[2].compiled.hash == plain.hash


@without_interpreter
def test_the_ordinary_path(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """While torch traces, while someone watches launches, and where Triton is of another version."""
    glm_dsa = importlib.import_module("generated.glm_dsa")
    with FakeDriver("sm_90") as driver:
        pool = pool_of("bf16")
        store(pool)
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            store(pool)
        assert len(asked) == 2
        store(pool)
        assert len(asked) == 2
        watched: list[Any] = []
        triton.knobs.runtime.launch_enter_hook.add(watched.append)
        try:
            store(pool)
        finally:
            triton.knobs.runtime.launch_enter_hook.remove(watched.append)
        assert len(asked) == 3
        monkeypatch.setattr(glm_dsa, "_CAN_RELAUNCH", False)
        pool = pool_of("bf16")
        store(pool)
        store(pool)
        assert len(asked) == 5
        assert len({launch.compiled.hash for launch in driver.launches}) == 1


WIDE = torch.zeros((8, 1200)).bfloat16()


@pytest.mark.parametrize(
    ("latent", "is_copied"),
    [
        (WIDE[:, :512], False),  # a slice of a wider row
        (WIDE[:, 16:528], False),
        (WIDE[:1].expand(8, 1200)[:, :512], False),
        (WIDE[:, 8:520], False),  # at 16 bytes
        (WIDE[:, 1:513], True),  # at 2
        (WIDE[:, :1024:2], True),
        (torch.zeros((8, 520)).bfloat16()[:, :512], True),  # rows 520 values apart, no multiple of 16
    ],
)
@without_interpreter
def test_rows_that_lie_anywhere(latent: torch.Tensor, is_copied: bool) -> None:
    """They end in one kernel. Rows that do not begin at multiples of 16 are copied before, which is said once."""
    with FakeDriver("sm_90") as driver, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pool = pool_of("bf16")
        store(pool)
        for _ in range(2):
            pool.set_mla_kv_buffer(0, SLOTS, latent, rows(64))
        assert len(driver.kernels) == 1
        assert (driver.launches[-1].arguments["latent_ptr"].data_ptr() != latent.data_ptr()) is is_copied
    said = ["cache_k_nope: rows lie at no multiples of 16 values and bytes: copied first"]
    assert [str(warning.message) for warning in told if warning.category is UserWarning] == said * is_copied
