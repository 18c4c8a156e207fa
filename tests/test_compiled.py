"""Kernels compiled ahead for every target, and what one operation asks of a device, on a driver that does nothing."""

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from fake_driver import TARGETS, FakeDriver, count_operations, without_interpreter
from triton.backends.compiler import GPUTarget

sys.path.insert(0, str(Path(__file__).parent.parent))

NATIVE = ("sm_90", "sm_100", "sm_120", "gfx950")  # that have an instruction for e4m3
if not triton.__version__.startswith("3.8."):  # which goes by f16 there
    NATIVE += ("sm_89",)
KERNELS = {
    "_clear_kernel",
    "_gather_index_fp8_kernel",
    "_load_mla_bf16_kernel",
    "_load_mla_fp8_raw_kernel",
    "_load_mla_fp8_scaled_kernel",
    "_pack_kernel",
    "_put_index_fp8_kernel",
    "_store_index_fp8_kernel",
    "_store_mla_bf16_kernel",
    "_store_mla_fp8_raw_kernel",
    "_store_mla_fp8_scaled_kernel",
    "_unpack_kernel",
}


def pool_of(layers: int, kv_format: str, ratio: int = 1) -> Any:
    """A Triton pool of two pages in which every second layer owns an indexer."""
    glm_dsa = importlib.import_module("generated.glm_dsa")
    config = {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 1,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "index_topk_pattern": "FS" * (layers // 2),
    }
    layout = glm_dsa.Layout.from_config(config, kv_format=kv_format, role="both", host_to_device_ratio=ratio)
    return glm_dsa.Pool(layout, 64, backend="triton")


@pytest.mark.parametrize("target", TARGETS)
@without_interpreter
def test_every_kernel_compiles(target: str) -> None:
    """All kernels of every format; the casts to e4m3 by instruction where there is one."""
    compiled = set()
    with FakeDriver(target) as driver:
        for kv_format in ("bf16", "fp8_scaled", "fp8_raw"):
            run_everything(pool_of(4, kv_format), 8)
        for launch in driver.launches:
            compiled.add(launch.name)
            text = launch.compiled.asm["ptx" if target.startswith("sm") else "amdgcn"]
            if "fp8" in launch.name and launch.name.startswith("_store"):
                instruction = "satfinite.e4m3x2.f32" if target.startswith("sm") else "v_cvt_scalef32_pk_fp8_f32"
                assert (instruction in text) == (target in NATIVE)
    assert compiled == KERNELS


BY_HEAD = {
    **{"num_hidden_layers": 3, "num_key_value_heads": 3, "head_dim": 64, "v_head_dim": 32},
    **{"num_kv_shared_layers": 1, "sliding_window_pattern": 2, "sliding_window": 8},
}
ROWS = [  # codes, scales and orders of each kind, with an e4m3 cast or without
    ("mla", {"kv_format": "nvfp4"}, True),
    ("gqa", {"kv_format": "bf16", "kv_order": "hnd", "split_kv": False}, False),
    ("gqa", {"kv_format": "fp8", "kv_order": "nhd"}, True),
    ("gqa", {"kv_format": "int8", "kv_order": "hnd"}, False),
    ("hybrid_swa", {"kv_format": "mxfp8", "page_size": 128}, True),
    ("shared_kv", {"kv_format": "nvfp4_swizzled", "kv_order": "hnd"}, True),
]


def other_pool(layout: str, **choices: Any) -> Any:
    """A Triton pool of two pages of a space, and one request more where it counts."""
    module = importlib.import_module(f"generated.{layout}")
    config = BY_HEAD | ({"num_kv_shared_layers": None} if layout != "shared_kv" else {})
    if layout in ("mla", "gqa"):
        config = {"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64} if layout == "mla" else config
        config |= {"sliding_window": None}
    own = module.Layout.from_config(config, **choices)
    return module.Pool(own, own.granule, requests=1, backend="triton")


def run_rows(pool: Any, n: int, dtype: torch.dtype = torch.int64, scale: Any = None) -> None:
    """A store and a load of every layer that owns, and loads of those that read."""
    slots = torch.arange(n, dtype=dtype)
    owners = {layer for buffer in pool.layout.buffers for layer in buffer.layers}
    for layer in pool.layout.held:
        if hasattr(pool, "set_mla_kv_buffer"):
            latent, rope = torch.zeros((n, 512)).bfloat16(), torch.zeros((n, 64)).bfloat16()
            pool.set_mla_kv_buffer(layer, slots, latent, rope, scale)
            pool.get_mla_kv_buffer(layer, slots, latent_scale=scale)
            continue
        if layer in owners:
            k, v = torch.zeros((n, 3, 64)).bfloat16(), torch.zeros((n, 3, 32)).bfloat16()
            pool.set_kv_buffer(layer, slots, k, v, scale, scale)
        pool.load_kv(layer, slots, k_scale=scale, v_scale=scale)


def run_whole(pool: Any, n: int, dtype: torch.dtype = torch.int64) -> None:
    slots = torch.arange(n, dtype=dtype)
    roots = dict.fromkeys(pool._roots, slots)
    pool.move_kv_cache(roots, roots)
    pool.load_cpu_copy(pool.get_cpu_copy(roots), roots)
    pool.clear_pages(roots)


@pytest.mark.parametrize("target", TARGETS)
@without_interpreter
def test_every_kind_of_row_compiles(target: str) -> None:
    names = set()
    for layout, choices, casts in ROWS:
        with FakeDriver(target) as driver:
            pool = other_pool(layout, **choices)
            run_rows(pool, 8)
            if choices["kv_format"] == "nvfp4_swizzled":  # whose records lie in the most pieces
                run_whole(pool, 8)
        names |= {launch.name for launch in driver.launches}
        for launch in driver.launches:
            text = launch.compiled.asm["ptx" if target.startswith("sm") else "amdgcn"]
            if launch.name.startswith("_store"):
                instruction = "satfinite.e4m3x2.f32" if target.startswith("sm") else "v_cvt_scalef32_pk_fp8_f32"
                assert (instruction in text) == (casts and target in NATIVE)
    formats = ("mla_nvfp4", "bf16_hnd", "fp8_nhd", "int8_hnd", "mxfp8_atom", "nvfp4_swizzled")
    own = {f"_{verb}_{name}_kernel" for verb in ("store", "load") for name in formats}
    assert names == own | {"_clear_kernel", "_pack_kernel", "_unpack_kernel"}


@pytest.mark.parametrize(
    ("layout", "choices", "scale"),
    [
        ("gqa", {"kv_format": "fp8"}, torch.ones(1)),
        ("shared_kv", {"kv_format": "int8", "kv_order": "hnd", "swa_pool": "requests"}, None),
    ],
)
@without_interpreter
def test_warming_up_other_rows_leaves_nothing_to_compile(layout: str, choices: dict[str, Any], scale: Any) -> None:
    """Values are columns of wider rows too, at multiples of 16 and not."""
    with FakeDriver("sm_90") as driver:
        pool = other_pool(layout, **choices)
        pool.warmup()
        warm = len(driver.kernels)
        for n in (1, 2, 17, 640):
            for dtype in (torch.int32, torch.int64):
                run_rows(pool, n, dtype, scale)
                run_whole(pool, n, dtype)
        wide, slots = torch.zeros((8, 3, 200)).bfloat16(), torch.arange(32, dtype=torch.int32)
        for loc in (slots[1:9], slots[:16:2], slots.long()[3:11]):
            pool.set_kv_buffer(1, loc, wide[:, :, :64], wide[:, :, 64:96], scale, scale)
            pool.set_kv_buffer(1, loc, wide[:, :, 1:65], wide[:, :, ::2][:, :, :32], scale, scale)
            for own in (torch.bfloat16, torch.float16, torch.float32):
                pool.load_kv(1, loc, own, scale, scale)
        assert len(driver.kernels) == warm


@without_interpreter
def test_rows_of_other_layouts_are_one_launch_and_wait_for_nothing() -> None:
    """A store and a load for a layer each, and a move or a copy of any number of layers in two."""
    with FakeDriver("sm_90") as driver:
        pool = other_pool("shared_kv", kv_format="fp8")
        pool.warmup()
        before, slots, scale = len(driver.launches), torch.arange(100), torch.ones(1)
        k, v = torch.zeros((100, 3, 64)).bfloat16(), torch.zeros((100, 3, 32)).bfloat16()
        with count_operations() as operations:
            pool.set_kv_buffer(1, slots, k, v, scale, scale)
            pool.load_kv(2, slots, k_scale=scale, v_scale=scale)
            both = {"token": slots, "swa": slots}
            pool.move_kv_cache(both, both)
            pool.unpack(pool.pack(both), both)
            pool.clear_pages(both)
        assert operations.to_host == []
        assert [launch.name for launch in driver.launches[before:]] == [
            *("_store_fp8_nhd_kernel", "_load_fp8_nhd_kernel"),
            *("_pack_kernel", "_unpack_kernel") * 2,
            "_clear_kernel",
        ]


@pytest.mark.parametrize("ratio", [1, 2])
@without_interpreter
def test_warming_up_leaves_nothing_to_compile(ratio: int) -> None:
    """Calls of any size, from slots, tables and values that lie anywhere, find their kernels after the warm-up."""
    with FakeDriver("sm_90") as driver:
        pool = pool_of(4, "fp8_scaled", ratio)
        pool.warmup()
        warm = len(driver.kernels)
        for n in (1, 2, 16, 17, 640):
            for dtype in (torch.int32, torch.int64):
                run_everything(pool, n, dtype)
        values, odd = torch.zeros((8, 1200)).bfloat16(), torch.zeros((8, 650)).bfloat16()
        slots, table = torch.arange(40, dtype=torch.int32), torch.zeros((8, 64), dtype=torch.int32)
        for loc in (slots[1:9], slots[:16:2], slots.long()[3:11]):
            pool.set_mla_kv_buffer(1, loc, values[:, :512], values[:, 512:576])
            pool.set_mla_kv_buffer(1, loc, odd[:, 1:513], odd[:, 3:67])
            pool.set_mla_kv_buffer(1, loc, values[:, :1024:2], values[:, ::8][:, :64])
            pool.set_index_k_scale_buffer(0, loc, values[:, :128].to(torch.float8_e4m3fn), torch.zeros((8, 5))[:, 1:2])
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                pool.get_mla_kv_buffer(1, loc, dtype)
            for pages in (table[:, :1], table[:, :16], table[:, 1:3], table.long()[:, ::3]):
                pool.get_index_k_scale_buffer(0, loc, pages, 100, 40)
        mixed = ({"logical": slots[1:], "device": slots.long()[1:4]}, {"logical": slots.long(), "device": slots[:0]})
        for roots in mixed if ratio == 2 else (slots[1:],):
            pool.move_kv_cache(roots, roots)
            pool.unpack(pool.pack(roots), roots)
            pool.clear_pages(roots)
        assert len(driver.kernels) == warm


def run_everything(pool: Any, n: int, dtype: torch.dtype = torch.int64) -> None:
    """Every operation that launches, once for each layer it has."""
    slots = torch.arange(n, dtype=dtype)
    latent, rope = torch.zeros((n, 512), dtype=torch.bfloat16), torch.zeros((n, 64), dtype=torch.bfloat16)
    for layer in pool.layout.held:
        pool.set_mla_kv_buffer(layer, slots, latent, rope)
        pool.get_mla_kv_buffer(layer, slots)
    for layer in pool.layout.layers("index_k"):
        key, scale = torch.zeros((n, 128), dtype=torch.bfloat16), torch.zeros(n)
        pool.store_index_k(layer, slots, key)
        pool.set_index_k_scale_buffer(layer, slots, key.to(torch.float8_e4m3fn), scale)
        pool.get_index_k_scale_buffer(layer, slots, slots[:, None], n, n)
    roots = dict.fromkeys(pool._roots, slots)
    pool.move_kv_cache(roots, roots)
    pool.load_cpu_copy(pool.get_cpu_copy(roots), roots)
    pool.clear_pages(roots)


@without_interpreter
def test_one_launch_for_a_store_or_a_gather() -> None:
    with FakeDriver("sm_90") as driver:
        pool = pool_of(4, "fp8_scaled")
        slots = torch.arange(100)
        calls = {
            "_store_mla_fp8_scaled_kernel": lambda: pool.set_mla_kv_buffer(
                1, slots, torch.zeros((100, 512)).bfloat16(), torch.zeros((100, 64)).bfloat16()
            ),
            "_load_mla_fp8_scaled_kernel": lambda: pool.get_mla_kv_buffer(1, slots),
            "_store_index_fp8_kernel": lambda: pool.store_index_k(0, slots, torch.zeros((100, 128)).bfloat16()),
            "_gather_index_fp8_kernel": lambda: pool.get_index_k_scale_buffer(0, slots, slots[:, None], 4950, 99),
        }
        for name, call in calls.items():
            before = len(driver.launches)
            call()
            assert [launch.name for launch in driver.launches[before:]] == [name]


@without_interpreter
def test_nothing_grows_with_the_layers() -> None:
    """Launches, other work of the device and transfers of an operation on all layers: the same for 2 and for 40."""
    seen: dict[str, list[Any]] = {}
    for layers in (2, 40):
        with FakeDriver("sm_90") as driver:
            pool = pool_of(layers, "fp8_scaled")
            slots = torch.arange(100)
            calls = {
                "move": (pool.move_kv_cache, slots, slots),
                "save": (pool.get_cpu_copy, slots),
                "restore": (pool.load_cpu_copy, pool.get_cpu_copy(slots), slots),
                "clear": (pool.clear_pages, slots),
            }
            for name, (call, *arguments) in calls.items():
                before = len(driver.launches)
                with count_operations() as operations:
                    call(*arguments)
                launches = [launch.name for launch in driver.launches[before:]]
                seen.setdefault(name, []).append((launches, sorted(operations.names), operations.to_host))
    for few, many in seen.values():
        assert few == many
    assert seen["move"][0][0] == ["_pack_kernel", "_unpack_kernel"]
    assert seen["move"][0][1] == ["aten.empty.memory_format"]  # and nothing else for the device to do
    assert seen["save"][0][0] == ["_pack_kernel"]
    # The slots of the one part and its staging tensor, which on a CPU needs no transfer to be the copy.
    assert seen["save"][0][1] == ["aten.slice.Tensor", "aten.zeros.default"]
    assert seen["restore"][0][0] == ["_unpack_kernel"]
    assert seen["clear"][0][0] == ["_clear_kernel"]


@without_interpreter
def test_two_launches_where_spaces_number_slots_apart() -> None:
    with FakeDriver("sm_90") as driver:
        pool = pool_of(4, "fp8_scaled", ratio=2)
        slots = {"logical": torch.arange(90), "device": torch.arange(40)}
        pool.move_kv_cache(slots, slots)
        assert [launch.name for launch in driver.launches] == ["_pack_kernel", "_unpack_kernel"]


@without_interpreter
def test_nothing_that_may_be_captured_waits_for_the_device() -> None:
    """Stores, loads, gathers with their sums given, moves, packs and clears read nothing back."""
    with FakeDriver("sm_90"):
        pool = pool_of(4, "fp8_scaled")
        pool.warmup()
        slots = torch.arange(100)
        with count_operations() as operations:
            pool.set_mla_kv_buffer(1, slots, torch.zeros((100, 512)).bfloat16(), torch.zeros((100, 64)).bfloat16())
            pool.get_mla_kv_buffer(1, slots)
            pool.store_index_k(0, slots, torch.zeros((100, 128)).bfloat16())
            pool.get_index_k_scale_buffer(0, slots, slots[:, None], 4950, 99)
            pool.move_kv_cache(slots, slots)
            pool.unpack(pool.pack(slots), slots)
            pool.clear_pages(slots)
        assert operations.to_host == []


VALUE = re.compile(r"%[\w#]+")
RESULT = re.compile(r"^\s*(%\w+)(?::\d+)? = ")


def narrow_products(ttir: str) -> list[str]:
    """The products that are computed in 32 bits of what is not known when a kernel is compiled."""
    head, *lines = ttir.split("tt.func public ", 1)[1].splitlines()
    open_ended = set(re.findall(r"(%\w+): i(?:32|64)", head))  # by the names of values
    assert {"%num_slots", "%logical_num_slots", "%logical_num_pages", "%num_pages"} & open_ended
    found = []
    for line in lines:
        used = {name.partition("#")[0] for name in VALUE.findall(line)}
        if used & open_ended or "tt.get_program_id" in line or "tt.load" in line:
            open_ended |= used if "scf.for" in line else set(RESULT.findall(line))
            if "arith.muli" in line and not re.search(r": (tensor<[\dx]*)?i64", line):
                found.append(line)
    return found


@without_interpreter
def test_slots_are_64_bits_wide_before_they_are_multiplied() -> None:
    """With int32 slots no address is computed in 32 bits, neither of rows of 656 bytes nor of any other kernel."""
    with FakeDriver("sm_90") as driver:
        for kv_format in ("bf16", "fp8_scaled", "fp8_raw"):
            run_everything(pool_of(4, kv_format), 8, torch.int32)
        texts = {launch.name: launch.compiled.asm["ttir"] for launch in driver.launches}
    assert texts.keys() == KERNELS
    for name, text in texts.items():
        assert "arith.muli" in text or name == "_clear_kernel"
        assert narrow_products(text) == [], name
    lines = texts["_store_mla_fp8_scaled_kernel"].splitlines()
    (row_bytes,) = (RESULT.match(line).group(1) for line in lines if "arith.constant dense<656>" in line)
    (product,) = (line for line in lines if "arith.muli" in line and row_bytes in VALUE.findall(line))
    assert ": tensor<4xi64>" in product
    for wide in (": tensor<4xi64>", ": i64"):  # the same in 32 bits is found
        for line in lines:
            if "arith.muli" in line and wide in line:
                narrow = line.replace(wide, wide.replace("i64", "i32"))
                assert narrow_products("\n".join(lines).replace(line, narrow)) == [narrow]


@without_interpreter
def test_copies_behind_the_pointer_table_are_16_bytes_wide() -> None:
    """What a pointer loaded from a table points to is known to be aligned; scales of 4 bytes are copied as such."""
    with FakeDriver("sm_90") as driver:
        pool = pool_of(4, "fp8_scaled")
        slots = torch.arange(100)
        pool.move_kv_cache(slots, slots)
        for launch in driver.launches:
            ptx = launch.compiled.asm["ptx"]
            assert ptx.count("ld.global.v4.b32") >= 4 and ptx.count("st.global.v4.b32") >= 4
            flags = ptx.count("ld.global.b8") + ptx.count("st.global.b8")
            assert flags <= 16  # for 4 slots of the latents, the draft's, keys and scales


@pytest.mark.parametrize(
    ("spec", "target"),
    [("golden/operations/spec", "sm_90"), ("golden/operations/spec", "gfx942"), ("language/dsv4", "sm_90")],
)
@without_interpreter
def test_kernels_of_other_layouts_compile(spec: str, target: str, tmp_path: Path) -> None:
    """Several buffers of one operation, and e8m0 scales in spaces derived from others."""
    from kvgen.compile import compile_spec

    path = Path(__file__).parent / f"{spec}.yaml"
    compiled = compile_spec(path.name, lambda name: (path.parent / name).read_bytes())
    assert compiled.module is not None
    (tmp_path / "other.py").write_text(compiled.module.text)
    found = importlib.util.spec_from_file_location("other", tmp_path / "other.py")
    assert found is not None and found.loader is not None
    sys.modules["other"] = other = importlib.util.module_from_spec(found)
    found.loader.exec_module(other)
    config = {
        "golden/operations/spec": {"num_hidden_layers": 3, "full_layers": [0, 2], "window_layers": [1]},
        "language/dsv4": {
            "num_hidden_layers": 3,
            "compress_ratios": [0, 4, 128],
            "head_dim": 512,
            "index_head_dim": 128,
            "qk_rope_head_dim": 64,
        },
    }[spec]
    layout = other.Layout.from_config(config)
    with FakeDriver(target) as driver:
        other.Pool(layout, 2 * layout.granule, requests=2, backend="triton").warmup()
    names = {launch.name for launch in driver.launches}
    assert {"_pack_kernel", "_unpack_kernel", "_clear_kernel"} < names
    assert any(name.startswith("_store") for name in names)


@pytest.mark.parametrize("target", TARGETS)
@without_interpreter
def test_which_targets_cast_to_e4m3(target: str) -> None:
    """The pool asks Triton for what it compiles for: cards from Ada on, and of AMD's the MI350."""
    glm_dsa = importlib.import_module("generated.glm_dsa")
    with FakeDriver(target):
        pool = glm_dsa.Pool(pool_of(2, "bf16").layout, 64, backend="triton")
    assert pool._native == (0 if target not in NATIVE else 1 if target.startswith("sm") else 2)


@without_interpreter
def test_a_device_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeDriver("sm_90") as driver:
        monkeypatch.setattr(driver, "get_current_target", lambda: GPUTarget("cuda", 75, 32))
        with pytest.raises(ValueError) as error:
            pool_of(2, "bf16")
    assert str(error.value) == "kernels are for compute capability 8.0 and later, and that of cpu is 7.5"
