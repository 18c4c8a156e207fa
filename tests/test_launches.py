"""How kernels are launched: which are asked of Triton, which are launched as they were compiled, and on what rows."""

import importlib
import mmap
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from fake_driver import FakeDriver, Launch, on_gpu, without_interpreter

sys.path.insert(0, str(Path(__file__).parent.parent))

SLOTS = torch.arange(1, 9)
NORESERVE = 0x4000  # not in Python's `mmap` before 3.12


def pool_of(kv_format: str, layers: int = 2, device: str = "cpu", backend: str = "triton") -> Any:
    glm_dsa = importlib.import_module("generated.glm_dsa")
    config = {"num_hidden_layers": layers, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    return glm_dsa.Pool(glm_dsa.Layout.from_config(config, kv_format=kv_format), 64, device, backend=backend)


def rows(width: int, dtype: torch.dtype = torch.bfloat16, count: int = 8) -> torch.Tensor:
    return torch.zeros((count, width), dtype=dtype)


def store(pool: Any, slots: torch.Tensor = SLOTS, layer: int = 0, **given: torch.Tensor) -> None:
    latent, rope = given.get("latent"), given.get("rope")
    pool.set_mla_kv_buffer(
        layer,
        slots,
        rows(512, count=len(slots)) if latent is None else latent,
        rows(64, count=len(slots)) if rope is None else rope,
    )


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
        (WIDE[:, 4:516], True),  # at 8
        (WIDE[:, 2:514], True),  # at 4
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


@pytest.mark.parametrize("start", [2, 4])
@without_interpreter
def test_rows_that_begin_at_4_and_8_bytes(start: int) -> None:
    """A kernel reads 16 bytes at a time, also the one that is compiled when such rows are the first that come."""
    with FakeDriver("sm_90") as driver, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pool = pool_of("fp8_scaled")
        latent, rope = WIDE[:, start : 512 + start], WIDE[:, 600 + start : 664 + start]
        assert latent.data_ptr() % 16 == 2 * start  # bf16
        for _ in range(2):
            pool.set_mla_kv_buffer(0, SLOTS, latent, rope)
        scales = torch.ones(9)[1:, None]  # side by side, from 4 bytes on
        pool.set_index_k_scale_buffer(0, SLOTS, rows(136, torch.float8_e4m3fn)[:, 8:], scales)
        for launch in driver.launches:
            pointers = [own.data_ptr() for name, own in launch.arguments.items() if name in ROWS]
            assert len(pointers) == 2 and not any(pointer % 16 for pointer in pointers)
        store, again, _ = driver.launches
        assert store.compiled is again.compiled
        assert store.compiled.asm["ptx"].count("ld.global.v4.b32") == 9  # (512 + 64) x 2 bytes of 4 tokens, 32 threads


ROWS = ("latent_ptr", "rope_ptr", "key_ptr", "key_scale_ptr")


# -- numbers beyond 32 bits


@pytest.mark.parametrize("first", ["small", "large"])
@without_interpreter
def test_a_count_beyond_2_31(first: str, asked: list[str]) -> None:
    """Whatever was launched before, a kernel is given the whole number."""
    counts = {"small": 8, "large": 2**31 + 5}
    order = ["small", "large"] if first == "small" else ["large", "small"]
    with FakeDriver("sm_90") as driver:
        pool = pool_of("bf16")
        for size in order * 2:
            count = counts[size]
            slots = torch.zeros(1, dtype=torch.int64).expand(count)
            store(pool, slots, latent=WIDE[:1, :512].expand(count, 512), rope=WIDE[:1, :64].expand(count, 64))
        given = [launch.arguments["count"] for launch in driver.launches]
        assert given == [counts[size] for size in order * 2]
        assert [launch.grid[0] for launch in driver.launches] == [-(-count // 4) for count in given]
        assert len(asked) == 2


@without_interpreter
def test_strides_beyond_2_31(asked: list[str]) -> None:
    """Of slots and of rows: two tokens as far apart. The memory between them is never touched."""
    far = 2**31 + 16
    places = mmap.mmap(-1, 8 * far + 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    memory = torch.frombuffer(places, dtype=torch.int64)
    slots = memory.as_strided((2,), (far,))
    latent = memory.view(torch.bfloat16).as_strided((2, 512), (far, 1))
    with FakeDriver("sm_90") as driver:
        pool = pool_of("bf16")
        for _ in range(2):
            store(pool, SLOTS[:2])
            store(pool, slots)
            store(pool, SLOTS[:2], latent=latent)
        found = [(own.arguments["slots_stride"], own.arguments["latent_stride"]) for own in driver.launches]
        assert found == [(1, 512), (far, 512), (1, far)] * 2
        assert len(asked) == 3


# -- several GPUs


def everything(pool: Any) -> None:
    """Every operation that launches."""
    store(pool)
    pool.get_mla_kv_buffer(0, SLOTS)
    pool.store_index_k(0, SLOTS, rows(128))
    pool.set_index_k_scale_buffer(0, SLOTS, rows(128, torch.float8_e4m3fn), rows(1, torch.float32))
    pool.get_index_k_scale_buffer(0, SLOTS, SLOTS[:, None], 36, 8)
    pool.move_kv_cache(SLOTS, SLOTS)
    pool.load_cpu_copy(pool.get_cpu_copy(SLOTS), SLOTS)
    pool.clear_pages(SLOTS)


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("gpu", [0, 1])
@without_interpreter
def test_kernels_are_launched_on_the_gpu_of_the_pool(gpu: int, current: int, asked: list[str]) -> None:
    """Whichever is current, and it stays so; compiled for that of the pool, the second time without asking Triton."""
    with FakeDriver("sm_90", "sm_80") as driver, on_gpu(driver, gpu):
        driver.gpu = current
        pool = pool_of("fp8_scaled", device=f"cuda:{gpu}")
        for _ in range(2):
            everything(pool)
            assert driver.gpu == current
        assert (len(asked), len(driver.launches)) == (8, 20)
        assert {launch.gpu for launch in driver.launches} == {gpu}
        assert {launch.compiled.metadata.target.arch for launch in driver.launches} == {(90, 80)[gpu]}
        assert pool._native == (1, 0)[gpu]  # of the two, sm_90 has an instruction for e4m3


@without_interpreter
def test_pools_of_two_gpus() -> None:
    with FakeDriver("sm_90", "sm_90") as driver:
        for gpu in (0, 1, 0):
            with on_gpu(driver, gpu):
                everything(pool_of("bf16", device=f"cuda:{gpu}"))
        assert [launch.gpu for launch in driver.launches] == [0] * 10 + [1] * 10 + [0] * 10


@pytest.mark.parametrize("gpu", [0, 1, 3])
@without_interpreter
def test_regions_name_the_gpu_of_the_pool(gpu: int) -> None:
    with FakeDriver("sm_90") as driver, on_gpu(driver, gpu):
        regions = pool_of("bf16", device=f"cuda:{gpu}", backend="torch").transfer_regions()
    assert [region.device_id for region in regions] == [gpu] * 4  # `kv` and `index_k` of two layers
