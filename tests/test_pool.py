"""The pool of a generated module: what it allocates, whom it asks for memory, and what it refuses."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import model_config

from generated.glm_dsa import Layout, Pool, bytes_for

# A small model: four layers of which 0 and 2 own an indexer, and one draft layer.
CONFIG = {
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_topk_pattern": "FSFS",
}
LATENT_PAGE = 64 * 656
INDEX_PAGE = 64 * 132


def small(**choices: object) -> Layout:
    return Layout.from_config(CONFIG, **choices)


def aligned(nbytes: int, fill: int = 0xAB) -> torch.Tensor:
    """uint8 memory at a multiple of 256, filled with something other than zeros."""
    memory = torch.full((nbytes + 255,), fill, dtype=torch.uint8)
    start = -memory.data_ptr() % 256
    return memory[start : start + nbytes]


# (name, layer) -> (pages, bytes of a page) of `hisparse()` for 128 tokens: 2 + 1 pages where the latent of the body
# lies, 4 + 1 where the allocator's own ids point. The pool does not allocate the latent of the host.
EXPECTED = {
    **{("kv", layer): (3, LATENT_PAGE) for layer in range(4)},
    ("kv_draft", 4): (5, LATENT_PAGE),
    **{("index_k", layer): (5, INDEX_PAGE) for layer in (0, 2, 4)},
}


def hisparse() -> Layout:
    return small(role="both", host_to_device_ratio=2)


@pytest.mark.parametrize("device", ["cpu", "meta", torch.device("cpu"), torch.device("meta")])
def test_buffers(device: str | torch.device) -> None:
    pool = Pool(hisparse(), 128, device)
    for (name, layer), shape in EXPECTED.items():
        buffer = pool.buffer(name, layer)
        assert buffer.shape == shape
        assert buffer.dtype == torch.uint8
        assert buffer.device == torch.device(device)
        assert buffer.is_contiguous()
        assert pool.buffer(name, layer) is buffer
    # 4 x 3 x 41984 + 5 x 41984 + 3 x 5 x 8448
    assert pool.num_bytes() == 840_448 == bytes_for(hisparse(), 128)
    assert pool.num_bytes() == sum(pages * page_bytes for pages, page_bytes in EXPECTED.values())
    assert pool.aux_bytes() == 0
    assert (pool.layout, pool.tokens, pool.requests, pool.device) == (hisparse(), 128, 0, torch.device(device))


def test_memory_is_zeroed_and_every_buffer_has_its_own() -> None:
    pool = Pool(hisparse(), 128)
    spans = []
    for name, layer in EXPECTED:
        buffer = pool.buffer(name, layer)
        assert not buffer.any()
        spans.append((buffer.data_ptr(), buffer.data_ptr() + buffer.numel()))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    for number, (name, layer) in enumerate(EXPECTED, start=1):
        pool.buffer(name, layer).fill_(number)
    for number, (name, layer) in enumerate(EXPECTED, start=1):
        assert torch.equal(pool.buffer(name, layer).unique(), torch.tensor([number], dtype=torch.uint8))


@pytest.mark.parametrize("kv_format", ["bf16", "fp8_scaled", "fp8_raw"])
@pytest.mark.parametrize("tokens", [0, 64, 640])
def test_bytes_of_a_cpu_pool(kv_format: str, tokens: int) -> None:
    layout = small(kv_format=kv_format, role="both")
    pool = Pool(layout, tokens)
    row = {"bf16": 1152, "fp8_scaled": 656, "fp8_raw": 576}[kv_format]
    assert pool.num_bytes() == (tokens + 64) * (5 * row + 3 * 132) == bytes_for(layout, tokens)
    held = [pool.buffer(name, layer) for name in ("kv", "kv_draft", "index_k") for layer in layout.layers(name)]
    assert sum(buffer.untyped_storage().nbytes() for buffer in held) == pool.num_bytes()


def test_arguments_by_position_and_by_name() -> None:
    layout = small()
    assert Pool(layout, 64, "meta", 3).requests == 3
    assert Pool(layout=layout, tokens=64, device="meta", requests=3).num_bytes() == Pool(layout, 64).num_bytes()
    assert Pool(layout, 64).device == torch.device("cpu")
    with pytest.raises(TypeError):
        Pool(layout, 64, "meta", 0, aligned)


# -- memory from a hook


def test_the_hook_is_asked_for_each_cache_buffer_once() -> None:
    asked: list[tuple[str, int, int]] = []
    given: dict[tuple[str, int], torch.Tensor] = {}

    def allocate(name: str, layer: int, nbytes: int) -> torch.Tensor:
        asked.append((name, layer, nbytes))
        given[name, layer] = aligned(nbytes)
        return given[name, layer]

    pool = Pool(hisparse(), 128, allocate=allocate)
    assert sorted(asked) == sorted(
        (name, layer, pages * page_bytes) for (name, layer), (pages, page_bytes) in EXPECTED.items()
    )
    for key, memory in given.items():
        buffer = pool.buffer(*key)
        assert buffer.data_ptr() == memory.data_ptr()
        assert buffer.shape == EXPECTED[key]
        assert not memory.any()  # given memory is zeroed too
    assert pool.num_bytes() == 840_448


def test_the_hook_may_give_memory_of_any_shape() -> None:
    pool = Pool(small(), 64, allocate=lambda name, layer, nbytes: aligned(nbytes).view(4, nbytes // 4))
    assert pool.buffer("kv", 3).shape == (2, LATENT_PAGE)
    assert not pool.buffer("kv", 3).any()


def test_the_hook_may_give_memory_on_meta() -> None:
    pool = Pool(small(), 64, "meta", allocate=lambda *ask: torch.empty(ask[2], dtype=torch.uint8, device="meta"))
    assert pool.num_bytes() == bytes_for(small(), 64)
    assert pool.buffer("kv", 0).is_meta


@pytest.mark.parametrize(
    ("allocate", "words"),
    [
        (lambda name, layer, nbytes: aligned(nbytes - 1), ["bytes of uint8"]),
        (lambda name, layer, nbytes: aligned(nbytes + 256), ["bytes of uint8"]),
        (lambda name, layer, nbytes: aligned(nbytes).view(torch.int8), ["bytes of uint8"]),
        (lambda name, layer, nbytes: torch.zeros(nbytes), ["bytes of uint8"]),
        (lambda name, layer, nbytes: aligned(nbytes * 4).view(torch.float32), ["bytes of uint8"]),
        (lambda name, layer, nbytes: None, ["bytes of uint8"]),
        (lambda name, layer, nbytes: bytearray(nbytes), ["bytes of uint8"]),
        (lambda name, layer, nbytes: aligned(2 * nbytes)[::2], ["contiguous", "cpu"]),
        (lambda name, layer, nbytes: aligned(nbytes).view(-1, 64).t(), ["contiguous", "cpu"]),
        (lambda name, layer, nbytes: torch.empty(nbytes, dtype=torch.uint8, device="meta"), ["cpu"]),
        (torch.inference_mode()(lambda name, layer, nbytes: aligned(nbytes)), ["outside of inference mode"]),
        (lambda name, layer, nbytes: aligned(nbytes + 1)[1:], ["64 bytes"]),
        (lambda name, layer, nbytes: aligned(nbytes + 32)[32:], ["64 bytes"]),
    ],
)
def test_unfit_memory_is_refused(allocate: Callable[[str, int, int], Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        Pool(small(), 64, allocate=allocate)
    assert "allocate" in str(error.value)
    assert "'kv', 0, 83968" in str(error.value)  # whom it was for: 2 pages of 41984 bytes
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("allocate", [5, "torch.empty", torch.zeros(3)])
def test_an_allocator_that_is_no_function(allocate: Any) -> None:
    with pytest.raises(ValueError, match="^allocate must be a function, not "):
        Pool(small(), 64, allocate=allocate)


def test_memory_of_the_cpu_is_refused_on_meta() -> None:
    with pytest.raises(ValueError, match="allocate.*meta"):
        Pool(small(), 64, "meta", allocate=lambda name, layer, nbytes: aligned(nbytes))


@pytest.mark.parametrize("gap", [0, 83968 - 256, 83968])
def test_the_hook_may_not_give_memory_twice(gap: int) -> None:
    """Buffers of 83,968 bytes (2 pages of 41,984): two of them `gap` bytes apart share all, 256 or no bytes."""
    slab, starts = aligned(4 * 83968), iter((83968, 83968 + gap))

    def allocate(name: str, layer: int, nbytes: int) -> torch.Tensor:
        assert name == "kv" and nbytes == 83968
        start = next(starts)
        return slab[start : start + nbytes]

    layout = Layout.from_config({**CONFIG, "index_topk_pattern": "FSSS"}, start_layer=1, end_layer=3)
    assert [(buffer.name, buffer.layers) for buffer in layout.buffers if buffer.layers] == [("kv", (1, 2))]
    if gap == 83968:
        pool = Pool(layout, 64, allocate=allocate)
        assert pool.buffer("kv", 2).data_ptr() - pool.buffer("kv", 1).data_ptr() == gap
        return
    with pytest.raises(ValueError) as error:
        Pool(layout, 64, allocate=allocate)
    shared = "`kv` of layer 1 and `kv` of layer 2 overlap"
    assert str(error.value) == f"allocate must return memory of its own for each call: {shared}"


def test_what_the_hook_raises_comes_through() -> None:
    def allocate(name: str, layer: int, nbytes: int) -> torch.Tensor:
        raise MemoryError(f"{name} {layer}")

    with pytest.raises(MemoryError, match="kv 0"):
        Pool(small(), 64, allocate=allocate)


# -- what is refused


@pytest.mark.parametrize("backend", ["auto", "torch", "triton"])
def test_backends(backend: str) -> None:
    assert Pool(small(), 64, "meta", backend=backend).num_bytes() == bytes_for(small(), 64)


@pytest.mark.parametrize("backend", ["cuda", "Torch", "", None, 1])
def test_an_unknown_backend_is_refused(backend: object) -> None:
    with pytest.raises(ValueError) as error:
        Pool(small(), 64, "meta", backend=backend)
    for word in ("backend", "auto", "torch", "triton", repr(backend)):
        assert word in str(error.value)


def test_counts_are_refused_before_memory_is_asked_for() -> None:
    def allocate(name: str, layer: int, nbytes: int) -> torch.Tensor:
        raise AssertionError("nothing may be allocated")

    with pytest.raises(ValueError, match="tokens.* 65;.* 64 and 128$"):
        Pool(small(), 65, allocate=allocate)
    with pytest.raises(ValueError, match="requests.*-1"):
        Pool(small(), 64, requests=-1, allocate=allocate)
    with pytest.raises(ValueError, match="backend"):
        Pool(small(), 64, allocate=allocate, backend="cuda")


def test_a_layer_without_an_indexer_names_those_that_have_one() -> None:
    pool = Pool(small(), 64, "meta")
    for layer in (1, 3):
        with pytest.raises(LookupError, match=rf"layer {layer} .*`index_k`.*\[0, 2\]"):
            pool.buffer("index_k", layer)
    with pytest.raises(LookupError, match=r"layer 0 .*`kv_draft`.*\[4\]"):
        Pool(small(role="both"), 64, "meta").buffer("kv_draft", 0)
    with pytest.raises(LookupError, match=r"layer 4 .*`kv`.*\[0, 1, 2, 3\]"):
        Pool(small(role="both"), 64, "meta").buffer("kv", 4)


@pytest.mark.parametrize(
    ("choices", "layer"),
    [
        ({}, 4),  # the draft layer, which this pool does not hold
        ({}, -1),
        ({}, 79),
        ({}, 2**40),
        ({}, "0"),
        ({}, None),
        ({"role": "draft"}, 0),
        ({"start_layer": 1, "end_layer": 3}, 0),  # 0 - 1 would be the last layer
        ({"start_layer": 1, "end_layer": 3}, 3),
        ({"start_layer": 2, "end_layer": 2}, 2),
    ],
)
def test_a_layer_outside_the_pool_is_refused(choices: dict[str, Any], layer: object) -> None:
    pool = Pool(small(**choices), 64, "meta")
    for name in ("kv", "index_k", "kv_draft"):
        with pytest.raises(ValueError, match="layer_id") as error:
            pool.buffer(name, layer)
        assert repr(layer) in str(error.value)


def test_an_unknown_buffer_is_refused() -> None:
    for layer in (0, 99):
        with pytest.raises(LookupError, match="`index_kk`.*did you mean `index_k`.*kv, kv_draft, index_k"):
            Pool(small(), 64, "meta").buffer("index_kk", layer)


def test_a_buffer_of_the_host_is_not_in_the_pool() -> None:
    with pytest.raises(LookupError, match="`kv_host`.*host memory"):
        Pool(hisparse(), 64, "meta").buffer("kv_host", 0)


def test_layers_are_asked_for_by_global_id() -> None:
    pool = Pool(Layout.from_config(model_config("glm-5.2"), start_layer=39), 64, "meta")
    assert pool.buffer("kv", 39).shape == (2, LATENT_PAGE)
    assert pool.buffer("index_k", 42).shape == (2, INDEX_PAGE)
    with pytest.raises(ValueError):
        pool.buffer("kv", 0)
    with pytest.raises(LookupError, match=r"\[42, 46, 50, 54, 58, 62, 66, 70, 74\]"):
        pool.buffer("index_k", 39)


def test_a_pool_is_not_picklable_and_says_so() -> None:
    pool = Pool(small(), 64)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(pool, protocol)
    for duplicate in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled"):
            duplicate(pool)


# -- pools with little in them


def test_a_pool_without_layers_holds_nothing_and_asks_for_nothing() -> None:
    def allocate(name: str, layer: int, nbytes: int) -> torch.Tensor:
        raise AssertionError("nothing may be allocated")

    pool = Pool(small(start_layer=2, end_layer=2), 6400, allocate=allocate)
    assert (pool.num_bytes(), pool.aux_bytes()) == (0, 0)


def test_a_stage_without_owners_has_no_indexer() -> None:
    pool = Pool(small(start_layer=1, end_layer=2), 64)
    assert pool.num_bytes() == 2 * LATENT_PAGE
    with pytest.raises(LookupError, match=r"`index_k`.*\[\]"):
        pool.buffer("index_k", 1)


def test_no_tokens_allocate_the_reserved_pages() -> None:
    pool = Pool(small(), 0)
    assert pool.buffer("kv", 0).shape == (1, LATENT_PAGE)
    assert pool.buffer("index_k", 2).shape == (1, INDEX_PAGE)
