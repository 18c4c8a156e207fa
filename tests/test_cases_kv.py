"""Public faults of caches of keys and values: the right figure comes out, and the one of the fault does not.

Each test is named after its case of `docs/cases.md`. Those of latent rows are in `test_cases.py`.
"""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.cli import kvgen
from support.models import ROOT, model_config, problem_lines
from support.reference import interpreted, one_thread

from generated import gqa, hybrid_swa, shared_kv

GIB = 2**30
KINDS = {"s": "sliding_attention", "f": "full_attention"}
SHARED = "num_kv_shared_layers or cla_share_factor: layers share keys and values, which shared_kv has"


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def heads(layers: int, count: int = 8, dim: int = 128, **fields: Any) -> dict[str, Any]:
    return {"num_hidden_layers": layers, "num_key_value_heads": count, "head_dim": dim, **fields}


def windowed(kinds: str, count: int, dim: int, **fields: Any) -> dict[str, Any]:
    """A config of layers of the given kinds, `s` with a window and `f` without."""
    types = [KINDS[kind] for kind in kinds]
    return heads(len(kinds), count, dim, layer_types=types, sliding_window=128) | fields


def cell(module: ModuleType, config: dict[str, Any], **choices: Any) -> int:
    """Bytes per token, which are those that a pool has more for a granule more."""
    layout = module.Layout.from_config(config, **choices)
    tokens = 32 * layout.granule
    pools = [module.Pool(layout, count, device="meta").num_bytes() for count in (tokens, 2 * tokens)]
    assert pools[1] - pools[0] == tokens * module.cell_size(layout)
    return module.cell_size(layout)


def refusal(module: ModuleType, config: dict[str, Any], **choices: Any) -> list[str]:
    with pytest.raises(module.LayoutError) as error:
        module.Layout.from_config(config, **choices)
    name = module.__name__.split(".")[-1]
    return [line.removeprefix(f"{name}: ").removeprefix("  - ") for line in problem_lines(error)]


def budget(path: Path, spec: str, config: dict[str, Any], *words: object) -> Any:
    """What `kvgen budget --format json` prints."""
    file = path / f"{spec}.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    status, out, err = kvgen("budget", ROOT / "specs" / f"{spec}.yaml", "--config", file, *words, "--format", "json")
    assert (status, err) == (0, ""), out
    return json.loads(out)


def pages(buffer: Any) -> tuple[Any, ...]:
    """The page of each layer of a buffer, or the one page of all."""
    return buffer.pages if hasattr(buffer, "pages") else (buffer.page,)


def filled(pool: Any) -> Any:
    """The pool, with random bytes in every field."""
    for layer in pool.layout.held:
        for field in pool.get_kv_fields(layer).values():
            field.view(torch.uint8).random_(0, 256)
    return pool


def fields_of(pool: Any, layer: int) -> torch.Tensor:
    """All bytes of each slot of a layer, one field after the other."""
    fields = pool.get_kv_fields(layer).values()
    return torch.cat([field.view(torch.uint8).flatten(0, 1).flatten(1) for field in fields], 1)


def written(tensor: torch.Tensor) -> list[int]:
    """Where a tensor of bytes is not zero: the first such place, and the one behind the last."""
    places = tensor.view(-1).nonzero().flatten()
    return [int(places[0]), int(places[-1]) + 1]


def ones(count: int, config: dict[str, Any], ranks: int = 1) -> list[torch.Tensor]:
    shape = (count, config["num_key_value_heads"] // ranks, config["head_dim"])
    return [torch.ones(shape, dtype=torch.bfloat16) for _ in range(2)]


# -- a: budgets


def test_14_a_draft_layer_beside_windows() -> None:
    """sglang 28219: 18 full and 18 window layers at 1/2, 2,048 bytes each; the draft layer was not priced."""
    gpt_oss = model_config("gpt-oss-120b")
    layouts = [
        hybrid_swa.Layout.from_config(gpt_oss | {"num_nextn_predict_layers": drafts}, role="both") for drafts in (0, 1)
    ]
    assert [hybrid_swa.cell_size(layout) for layout in layouts] == [55296, 57344] == [27 * 2048, 28 * 2048]
    assert [10 * GIB // own // 16 * 16 for own in (55296, 57344)] == [194176, 187232]
    # A reserved page of 32,768 bytes in each layer; 32 tokens are two pages of full layers and one with a window.
    for layout, full, own in zip(layouts, (18, 19), (194160, 187216), strict=True):
        pages = (10 * GIB - (full + 18) * 32768) // 32768
        pairs, rest = divmod(pages, 2 * full + 18)
        assert own == pairs * 32 + (16 if rest >= full else 0)
        assert hybrid_swa.max_tokens(layout, 10 * GIB) == own


def test_15_a_draft_pool_has_the_slots_of_the_target() -> None:
    """sglang 17630: 73,728,000 bytes are 1,000 tokens without windows, 1,333 with 666 slots of windows."""
    config = model_config("gpt-oss-120b") | {"num_nextn_predict_layers": 1}
    layout = hybrid_swa.Layout.from_config(config, page_size=1)
    assert 73_728_000 // (36 * 2048) == 1000
    assert (1333 + 666) * 18 * 2048 <= 73_728_000 < (1334 + 667) * 18 * 2048
    assert hybrid_swa.max_tokens(layout, 73_728_000) == 1332  # a reserved slot of both kinds is paid for
    assert [hybrid_swa.slots(layout, space, 1333) for space in ("token", "swa")] == [1333 + 1, 666 + 1]
    draft = hybrid_swa.Pool(hybrid_swa.Layout.from_config(config, page_size=1, role="draft"), 1333)
    draft.set_kv_buffer(36, torch.tensor([1333]), *ones(1, config))
    assert draft.get_kv_fields(36)["k"][1333].all() and not draft.get_kv_fields(36)["k"][:1333].any()


def test_19_heads_of_a_rank() -> None:
    """transformers 48566: 64 layers of 8 heads; planned with all heads, a pool of 4 ranks is a quarter."""
    cells = [cell(gqa, heads(64), tp_size=ranks) for ranks in (1, 4)]
    assert cells == [262144, 65536] == [64 * count * 2 * 128 * 2 for count in (8, 2)]


@pytest.mark.parametrize(("target", "draft"), [(8, 1), (1, 8), (4, 4)])
def test_23_one_memory_for_two_pools(tmp_path: Path, target: int, draft: int) -> None:
    """sglang 29034: each of two pools took all that was there."""
    side = tmp_path / "draft.json"
    side.write_text(json.dumps(heads(draft)))
    words = ("--memory", 10**9, "--draft", f"{ROOT / 'specs' / 'gqa.yaml'},config={side}")
    found = budget(tmp_path, "gqa", heads(target), *words)
    page = 16 * 8 * 2 * 128 * 2
    pages = 10**9 // ((target + draft) * page)
    assert found["tokens"] == (pages - 1) * 16
    assert found["total_bytes"] == pages * (target + draft) * page <= 10**9


def test_24_a_width_that_is_stated() -> None:
    """LMCache 688: Qwen3-4B has heads of 128, not of 2560 / 32."""
    config = heads(36, hidden_size=2560, num_attention_heads=32)
    assert cell(gqa, config) == 147456 == 36 * 8 * 2 * 128 * 2
    assert 92160 == 36 * 8 * 2 * (2560 // 32) * 2


def test_25_allocated_and_written_by_one_width() -> None:
    """vllm 2622: gpt-oss-120b has heads of 64, not of 2880 / 64 = 45; a store of the last slot ends with its buffer."""
    config = model_config("gpt-oss-120b")
    assert cell(hybrid_swa, config, swa_ratio=1) == 73728 == 36 * 8 * 2 * 64 * 2
    assert 51840 == 36 * 8 * 2 * (2880 // 64) * 2
    held: list[torch.Tensor] = []

    def allocate(name: str, layer: int, nbytes: int) -> torch.Tensor:
        held.append(torch.zeros(nbytes + 256, dtype=torch.uint8))
        return held[-1][:nbytes]

    pool = hybrid_swa.Pool(hybrid_swa.Layout.from_config(config, end_layer=2), 32, allocate=allocate)
    pool.set_kv_buffer(1, torch.tensor([47]), *ones(1, config))
    row = 8 * 64 * 2
    sizes = [memory.numel() - 256 for memory in held]
    assert sorted(sizes) == [32 * row] * 2 + [48 * row] * 2
    ends = [written(memory) for memory, size in zip(held, sizes, strict=True) if size == 48 * row]
    assert ends == [[47 * row, 48 * row]] * 2


def test_27_a_context_is_shared_once(tmp_path: Path) -> None:
    """llama.cpp 19559: 8,192 tokens of 4 sequences are 8,192 slots, not 32,768."""
    found = budget(tmp_path, "gqa", heads(2), "--tokens", 8192, "--requests", 4)
    assert (found["tokens"], found["context_tokens"]) == (8192, 2048)
    assert found["buffers"][0]["slots"] == 8192 + 16


def test_28_requests_take_whole_pages(tmp_path: Path) -> None:
    """FreeToken 367: two requests of 2 tokens need two pages of 128, not one for all 4 tokens."""
    page = 128 * 8 * 2 * 128 * 2
    for pages, requests in ((1, 0), (2, 1), (3, 2), (4, 3)):  # one is reserved
        words = ("--set", "page_size=128", "--memory", pages * page, "--context", 2)
        assert budget(tmp_path, "gqa", heads(1), *words)["requests"] == requests


# -- b: addresses


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_34_keys_and_values_in_one_buffer(backend: str) -> None:
    """vllm 50427: a page of both is 32,768 elements, so that page 65,536 begins at element 2^31."""
    assert 2 * 16 * 8 * 128 == 32768 and 65535 * 32768 < 2**31 == 65536 * 32768
    layout = gqa.Layout.from_config(heads(1), kv_format="fp8", split_kv=False)
    assert layout.buffer("kv").page.page_bytes == 32768
    with interpreted() if backend == "triton" else nullcontext():
        pool = gqa.Pool(layout, 65536 * 16, backend=backend)
        slots = torch.tensor([65536 * 16 - 1, 65536 * 16 + 5])
        pool.set_kv_buffer(0, slots, *ones(2, heads(1)))
        for loaded in pool.load_kv(0, slots):
            assert loaded.eq(1).all()
    pages = pool.buffer("kv", 0)
    assert pages[65535].any() and pages[65536].any() and not pages[0].any()


def test_41_a_stage_begins_where_the_one_before_ends() -> None:
    """vllm-ascend 15507: stages of 21 and 23 layers begin at layer 0 and 21, not at 23."""
    stages = [gqa.Layout.from_config(heads(44), **held) for held in ({"end_layer": 21}, {"start_layer": 21})]
    assert [stage.layers("kv") for stage in stages] == [tuple(range(21)), tuple(range(21, 44))]
    named = [{region.layer for region in gqa.Pool(stage, 16, device="meta").transfer_regions()} for stage in stages]
    assert (min(named[1]), len(named[0] | named[1])) == (21, 44)


def test_42_entries_are_of_owners() -> None:
    """sglang 33457: of 60 layers every fourth owns; the second stage has entries 7 to 14, and values begin at 15."""
    config = heads(60, 1, 64, use_cla=True, cla_share_factor=4)
    whole = shared_kv.Pool(shared_kv.Layout.from_config(config), 16)
    owners = whole.layout.layers("kv_full")
    assert owners == tuple(range(0, 60, 4)) and len(owners) == 15
    aligned, *_ = whole.get_contiguous_buf_infos()  # with zeros for the layers that own nothing
    entries = [ptr for ptr in aligned if ptr]
    assert entries == [whole.buffer("kv_full", layer, plane).data_ptr() for plane in ("k", "v") for layer in owners]
    values = whole.buffer("kv_full", 0, "v").data_ptr()
    assert (entries.index(values), aligned.index(values)) == (15, 60)
    stage = shared_kv.Pool(shared_kv.Layout.from_config(config, start_layer=28), 16)
    assert stage.layout.layers("kv_full") == owners[7:15]
    assert [len(stage.get_contiguous_buf_infos()[0]), len(stage.transfer_regions())] == [2 * 32, 2 * 8]
    with pytest.raises(ValueError, match="^layer_id must be a layer of this pool"):
        stage.buffer("kv_full", 7, "k")


def test_47_slots_of_a_window_are_its_own() -> None:
    """sglang 24743: of 1,024 and 512 slots, 900 of the one is 37 of the other, and never 900 there."""
    config = windowed("sf", 1, 64)
    pool = hybrid_swa.Pool(hybrid_swa.Layout.from_config(config), 1024)
    fields = {layer: pool.get_kv_fields(layer)["k"].flatten(0, 1) for layer in (0, 1)}
    assert [len(fields[layer]) for layer in (0, 1)] == [512 + 16, 1024 + 16]
    pool.set_kv_buffer(0, torch.tensor([900, -1]), *ones(2, config))  # of the full layers, and padding
    assert not fields[0].any()
    pool.set_kv_buffer(0, torch.tensor([37]), *ones(1, config))
    pool.set_kv_buffer(1, torch.tensor([900]), *ones(1, config))
    assert [fields[layer].flatten(1).any(1).nonzero().tolist() for layer in (0, 1)] == [[[37]], [[900]]]
    for run in (pool.pack, pool.get_cpu_copy):
        with pytest.raises(ValueError, match="a mapping with an entry for each of the spaces token, swa, not int64"):
            run(torch.tensor([900]))
    with pytest.raises(ValueError, match="int32 or int64"):
        pool.set_kv_buffer(0, torch.tensor([37.0]), *ones(1, config))


def test_48_a_request_more_than_there_are() -> None:
    """sglang 33379: rows for 64 requests and the reserved one; the last is there."""
    config = windowed("s", 1, 64)
    layout = hybrid_swa.Layout.from_config(config, page_size=128, swa_pool="requests")
    last = 64 * 256 + 127  # 128 tokens lie in two pages at most, wherever they begin; a page is reserved
    tokens = 64 * 256
    assert hybrid_swa.slots(layout, "swa", tokens, requests=64) == last + 1
    pool = hybrid_swa.Pool(layout, tokens, requests=64)
    pool.set_kv_buffer(0, torch.tensor([last, last + 1]), *ones(2, config))
    assert pool.get_kv_fields(0)["k"].flatten(0, 1).flatten(1).any(1).nonzero().tolist() == [[last]]


# -- c: layers


def test_50_layers_that_share_own_nothing() -> None:
    """transformers 39764: Gemma 3n keeps 20 of 35 layers; the others read 18 with a window and 19 without."""
    config = model_config("gemma-3n-e4b")
    assert cell(shared_kv, config) == 40960 == 20 * 2 * 2 * 256 * 2
    assert 71680 == 35 * 2 * 2 * 256 * 2
    layout = shared_kv.Layout.from_config(config)
    assert layout.layers("kv_full") == (4, 9, 14, 19) and len(layout.layers("kv_swa")) == 16
    full = {layer: 19 for layer in range(20, 35) if layer % 5 == 4}
    assert dict(layout.buffer("kv_full").readers) == full
    assert dict(layout.buffer("kv_swa").readers) == {layer: 18 for layer in range(20, 35) if layer not in full}
    pool = shared_kv.Pool(layout, 16)
    rows = ones(1, {"num_key_value_heads": 2, "head_dim": 256})
    pool.set_kv_buffer(18, torch.tensor([3]), *rows)
    assert torch.equal(pool.load_kv(33, torch.tensor([3]))[0], rows[0])
    with pytest.raises(ValueError, match="^layer 33 reads the `kv_swa` of layer 18 and stores nothing of its own"):
        pool.set_kv_buffer(33, torch.tensor([3]), *rows)


def test_50_layers_that_share_and_have_widths_of_their_own() -> None:
    """Of 42 layers 24 own: 4 without a window of 2 x (512 + 512) values, 20 with one of 2 x (256 + 256)."""
    config = windowed("sssssf" * 7, 2, 256, global_head_dim=512, num_kv_shared_layers=18)
    assert cell(shared_kv, config) == 57344 == (4 * 2 * 1024 + 20 * 2 * 512) * 2
    layout = shared_kv.Layout.from_config(config)
    assert layout.owner("kv_full", 41) == 23 and layout.owner("kv_swa", 40) == 22


@pytest.mark.parametrize(("use_cla", "module", "bytes_per_token"), [(True, shared_kv, 65536), (False, gqa, 131072)])
def test_50_layers_that_would_share_and_do_not(use_cla: bool, module: ModuleType, bytes_per_token: int) -> None:
    """Hunyuan's flag decides, whatever its factor is: 16 or 32 layers of 4,096 bytes."""
    config = heads(32, cla_share_factor=2, use_cla=use_cla)
    assert cell(module, config) == bytes_per_token
    (other,) = {gqa, shared_kv} - {module}
    assert refusal(other, config) == [SHARED if use_cla else "use_cla: none shares, as in gqa"]


def test_52_heads_and_widths_of_both_kinds() -> None:
    """vllm-metal 277: Gemma 4 has 50 layers of 16 x 256 and 10 of 4 x 512; one pair for all is 2.18 times as much."""
    config = model_config("gemma-4-31b")
    text = config["text_config"]
    assert cell(hybrid_swa, config, swa_ratio=1) == 901120 == (50 * 16 * 256 + 10 * 4 * 512) * 2 * 2
    assert 1966080 == 60 * 16 * 512 * 2 * 2
    layout = hybrid_swa.Layout.from_config(text | {"num_global_key_value_heads": None})
    assert {page.slot_bytes for page in pages(layout.buffer("kv_full"))} == {
        16 * 512 * 2 * 2
    }  # heads as with a window, width of its own


def test_53_values_narrower_than_keys() -> None:
    """sglang 23173: MiMo-V2-Flash has keys of 192 and values of 128, in 9 layers of 4 heads and 39 of 8."""
    config = model_config("mimo-v2-flash")
    layout = hybrid_swa.Layout.from_config(config, swa_ratio=1)
    cells = [layout.buffer(name).bytes_per_token for name in ("kv_full", "kv_swa")]
    assert cells == [23040, 199680] == [9 * 4 * 320 * 2, 39 * 8 * 320 * 2]
    assert [27648, 239616] == [9 * 4 * 384 * 2, 39 * 8 * 384 * 2]
    pool = hybrid_swa.Pool(hybrid_swa.Layout.from_config(config, end_layer=1), 16)
    assert [pool.buffer("kv_full", 0, plane).numel() for plane in ("k", "v")] == [32 * 4 * 192 * 2, 32 * 4 * 128 * 2]


def test_54_layer_types_are_enough() -> None:
    """sglang 39308: 9 full and 27 sliding layers, by the list alone and whatever the architecture is called."""
    for name in ("Gemma3ForCausalLM", "SomethingElse"):
        config = windowed("sssf" * 9, 4, 256, architectures=[name])
        layout = hybrid_swa.Layout.from_config(config, kv_format="fp8", swa_ratio=1)
        cells = [layout.buffer(buffer).bytes_per_token for buffer in ("kv_full", "kv_swa")]
        assert cells == [18432, 55296] == [9 * 4 * 512, 27 * 4 * 512] and sum(cells) == 73728


def test_55_a_window_is_of_its_layers_alone() -> None:
    """vllm 51756: 5 layers with a window of 1,024 and one without, which keeps all tokens; no list of windows."""
    config = windowed("sssssf", 1, 64, sliding_window=1024)
    layout = hybrid_swa.Layout.from_config(config, swa_pool="requests")
    assert (layout.layers("kv_swa"), layout.layers("kv_full")) == ((0, 1, 2, 3, 4), (5,))
    assert layout.config_used["sliding_window"] == 1024
    # 1,024 tokens lie in 65 pages of 16 at most, of a request that has more of them, and in 64 of one that does not
    assert [hybrid_swa.slots(layout, "swa", tokens, 1) for tokens in (1024, 1040, 10**6)] == [65 * 16, *[66 * 16] * 2]
    assert hybrid_swa.slots(layout, "token", 10**6, 1) == 10**6 + 16
    lists = heads(6, 1, 64, sliding_window=[1024] * 5 + [None])
    for module in (gqa, hybrid_swa):
        assert "sliding_window: expected an integer, found [1024, 1024, 1024, 1024, 1024, None]" in refusal(
            module, lists
        )


def test_57_a_built_in_draft_layer_bears_keys() -> None:
    """club-3090 1328: 10 layers and one for drafts; without it tokens are off by 17 / 16 or so."""
    config = heads(10, 2, 256, num_nextn_predict_layers=1)
    assert [cell(gqa, config, role=role) for role in ("both", "target")] == [22528, 20480] == [11 * 2048, 10 * 2048]


# -- d: dtypes and scales


def test_68_copies_of_codes_have_their_scales() -> None:
    """sglang 36121: 8 heads of 2 x (64 + 8) bytes, which is not 512; cleared and reloaded, all are as they were."""
    layout = gqa.Layout.from_config(heads(2), kv_format="nvfp4")
    assert gqa.cell_size(layout) == 2 * 8 * 144
    pool = filled(gqa.Pool(layout, 64))
    slots, others = torch.arange(20, 40), torch.arange(50, 70)
    before = {layer: {name: field.view(torch.uint8)[1:3].clone() for name, field in pool.get_kv_fields(layer).items()}
              for layer in (0, 1)}  # fmt: skip
    copy = pool.get_cpu_copy(slots)
    pool.clear_pages(torch.arange(5))
    assert not any(field.view(torch.uint8).any() for field in pool.get_kv_fields(0).values())
    pool.load_cpu_copy(copy, others)
    pool.load_cpu_copy(copy, slots)
    for layer, fields in before.items():
        assert set(fields) == {"k", "k_scale", "v", "v_scale"}
        for name, field in fields.items():
            now = pool.get_kv_fields(layer)[name].view(torch.uint8).flatten(0, 1)
            assert torch.equal(now[slots], field.flatten(0, 1)[slots - 16])
            assert torch.equal(now[others], now[slots])


def test_69_how_scales_lie_is_part_of_the_format() -> None:
    """vllm 50085: pages of as many bytes, one with its scales in rows and one with them swizzled, do not mix."""
    choices = {"kv_order": "hnd", "split_kv": False}
    layouts = [gqa.Layout.from_config(heads(1), kv_format=name, **choices) for name in ("nvfp4", "nvfp4_swizzled")]
    for layout in layouts:
        page = layout.buffer("kv").page
        offsets = {name: page.field(name).offset for name in ("k", "k_scale", "v", "v_scale")}
        assert offsets == {"k": 0, "k_scale": 8192, "v": 9216, "v_scale": 17408} and page.page_bytes == 18432
    assert layouts[0].page_fingerprint("kv") != layouts[1].page_fingerprint("kv")
    linear, swizzled = (gqa.Pool(layout, 16) for layout in layouts)
    with pytest.raises(ValueError, match=r"choices.kv_format is 'nvfp4' in the copy and 'nvfp4_swizzled' here$"):
        swizzled.load_cpu_copy(linear.get_cpu_copy(torch.tensor([5])), torch.tensor([5]))


@pytest.mark.parametrize(("kv_format", "group"), [("nvfp4", 16), ("mxfp8", 32)])
def test_73_widths_that_groups_do_not_divide_are_refused(kv_format: str, group: int) -> None:
    """TensorRT-LLM 18723: 514 values are 33 groups of 16 a token and not 32, or none."""
    assert (64 * -(-514 // 16), 64 * 514 // 16) == (2112, 2056)
    (line,) = refusal(gqa, heads(1, dim=514, v_head_dim=512), kv_format=kv_format)
    place = f"formats.{kv_format}_nhd.fields.k_scale of kv_rows.yaml"
    assert line == f"{kv_format}_nhd: head_dim must be a multiple of {group}, not 514 ({place})"
    (line,) = refusal(gqa, heads(1, dim=512, v_head_dim=514), kv_format=kv_format)
    place = f"formats.{kv_format}_nhd.fields.v_scale of kv_rows.yaml"
    assert line == f"{kv_format}_nhd: v_head_dim must be a multiple of {group}, not 514 ({place})"


def test_74_bytes_are_counted_in_bytes() -> None:
    """kvcached 387: what is stored is bytes, and an element of the tensors is one, whatever is in them."""
    layout = gqa.Layout.from_config(heads(1))
    pool = gqa.Pool(layout, 16)
    tensors = [pool.buffer("kv", 0, plane) for plane in ("k", "v")]
    assert {tensor.dtype for tensor in tensors} == {torch.uint8}
    assert [list(tensor.shape) for tensor in tensors] == [[2, 16 * 8 * 128 * 2]] * 2
    assert sum(tensor.numel() for tensor in tensors) == gqa.bytes_for(layout, 16) == pool.num_bytes()
    assert sum(region.nbytes for region in pool.transfer_regions()) == pool.num_bytes()


# -- e: copies


def test_83_pages_of_windows_have_a_list_of_their_own() -> None:
    """sglang 33043: entries of two kinds of page numbers are in two lists, in the order of the layers."""
    pool = hybrid_swa.Pool(hybrid_swa.Layout.from_config(windowed("sfs", 1, 64)), 64)
    regions = {(region.layer, region.space, region.ptr) for region in pool.transfer_regions()}
    for infos, space, layers in (
        (pool.get_contiguous_buf_infos, "token", [1]),
        (pool.get_state_buf_infos, "swa", [0, 2]),
    ):
        ptrs, _, item_lens = infos()
        assert [entry % 3 for entry, ptr in enumerate(ptrs) if ptr] == layers * 2  # of K and of V
        assert {ptr for ptr in ptrs if ptr} == {ptr for _, own, ptr in regions if own == space}
        assert set(item_lens) == {0, 16 * 64 * 2}


def test_85_copies_of_mxfp8_have_four_parts() -> None:
    """sglang 35888: K, V and the scales of each, of the same slots in the same order."""
    layout = gqa.Layout.from_config(heads(2, 2), kv_format="mxfp8")
    pool = filled(gqa.Pool(layout, 64))
    slots = torch.tensor([40, 17, 33])
    parts = pool.describe_staging(3)
    assert sorted((part.fields, part.record_bytes) for part in parts) == [
        (("k",), 2 * 128),
        (("k_scale",), 2 * 4),
        (("v",), 2 * 128),
        (("v_scale",), 2 * 4),
    ]
    staging = pool.pack(slots)
    for part in parts:
        rows = staging[part.offset : part.offset + part.nbytes].view(2, 3, part.record_bytes)
        for layer in (0, 1):
            field = pool.get_kv_fields(layer)[part.fields[0]].view(torch.uint8).flatten(0, 1).flatten(1)
            assert torch.equal(rows[layer], field[slots])


# -- f: moves


def test_89_a_move_takes_scales_along() -> None:
    """sglang 15108: 2 x (512 + 64) = 1,152 bytes a layer for a token of 8 heads, and none of any other token."""
    pool = filled(gqa.Pool(gqa.Layout.from_config(heads(2), kv_format="nvfp4"), 48))
    assert sum(part.record_bytes for part in pool.describe_staging(1)) == 1152
    before = {layer: fields_of(pool, layer) for layer in (0, 1)}
    pool.move_kv_cache(torch.tensor([21]), torch.tensor([37]))
    order = [37 if slot == 21 else slot for slot in range(64)]
    for layer, rows in before.items():
        assert rows.shape == (64, 1152)
        assert torch.equal(fields_of(pool, layer), rows[order])


def test_90_a_pool_of_two_kinds_moves_each() -> None:
    """sglang 14817: of 48 layers 12 are full; a move of their slots changes those alone, one of windows the others."""
    config = windowed("sssf" * 12, 1, 32)
    pool = filled(hybrid_swa.Pool(hybrid_swa.Layout.from_config(config), 64))
    none = torch.tensor([], dtype=torch.int64)
    for space, changed in (("token", range(3, 48, 4)), ("swa", [layer for layer in range(48) if layer % 4 != 3])):
        before = [fields_of(pool, layer) for layer in range(48)]
        there, here = ({"token": none, "swa": none} | {space: torch.tensor([slot])} for slot in (20, 40))
        pool.move_kv_cache(there, here)
        after = [fields_of(pool, layer) for layer in range(48)]
        assert [layer for layer in range(48) if not torch.equal(before[layer], after[layer])] == list(changed)
        assert all(torch.equal(after[layer][20], before[layer][40]) for layer in changed)


# -- g: heads of ranks


def test_94_heads_of_ranks_make_up_those_of_one() -> None:
    """vllm 52516: 4 heads on 8 ranks are one on each, of 65,536 bytes; one rank has all 262,144, at these offsets."""
    one, eight = (gqa.Layout.from_config(heads(1, 4), kv_order="hnd", page_size=256, tp_size=ranks) for ranks in (1, 8))
    whole, part = gqa.Pool(one, 256), gqa.Pool(eight, 256)
    assert [pool.buffer("kv", 0, "k")[1].numel() for pool in (whole, part)] == [262144, 65536]
    filled(whole)
    keys = whole.get_kv_fields(0)["k"][1]  # of all 256 slots of a page
    for head, offset in enumerate((0, 65536, 131072, 196608)):
        piece = whole.buffer("kv", 0, "k")[1, offset : offset + 65536]
        assert torch.equal(piece, keys[:, head].contiguous().view(torch.uint8).flatten())
    assert one.page_fingerprint("kv") != eight.page_fingerprint("kv")
    with pytest.raises(ValueError, match="choices.tp_size is 8 in the copy and 1 here$"):
        whole.load_cpu_copy(part.get_cpu_copy(torch.tensor([300])), torch.tensor([300]))


def test_95_all_heads_are_those_of_the_model() -> None:
    """sglang 19086: 2 heads on 4 ranks are one on each, and still 2."""
    layouts = {ranks: gqa.Layout.from_config(heads(1, 2), tp_size=ranks) for ranks in (1, 4)}
    local = {ranks: layout.buffer("kv").page.field("k").shape[1] for ranks, layout in layouts.items()}
    assert local == {1: 2, 4: 1}
    assert {layout.config_used["num_key_value_heads"] for layout in layouts.values()} == {2}


def test_97_as_many_heads_of_a_rank_are_not_the_same_model() -> None:
    """vllm-ascend 11886: 16 and 8 heads on 16 ranks are one on each; pages are alike, layouts are not."""
    target, draft = (gqa.Layout.from_config(heads(1, count), tp_size=16) for count in (16, 8))
    assert target.page_fingerprint("kv") == draft.page_fingerprint("kv")
    assert target != draft and len({target, draft}) == 2
    assert [layout.config_used["num_key_value_heads"] for layout in (target, draft)] == [16, 8]


@pytest.mark.parametrize(("count", "ranks", "own"), [(8, 32, 1), (4, 8, 1), (8, 4, 2), (10, 4, None), (8, 12, None)])
def test_98_heads_are_divided_or_repeated(count: int, ranks: int, own: int | None) -> None:
    """transformers 48307: none, a part of one, or 2 of 10 on each of 4 ranks cannot be."""
    families = {gqa: heads(1, count), hybrid_swa: windowed("sf", count, 128)}
    families[shared_kv] = heads(2, count, use_cla=True, cla_share_factor=2)
    for module, config in families.items():
        if own is None:
            assert refusal(module, config, tp_size=ranks) == [
                f"{count} heads cannot be divided over {ranks} ranks, nor repeated on them"
            ]
        else:
            layout = module.Layout.from_config(config, tp_size=ranks)
            shapes = [page.field("k").shape for buffer in layout.buffers for page in pages(buffer)]
            assert {heads for _, heads, _ in shapes} == {own}


@pytest.mark.parametrize(("order", "element"), [("hnd", 6784), ("nhd", 5504)])
def test_99_offsets_are_those_of_the_order(order: str, element: int) -> None:
    """LMCache 2920: head 3 of token 5 in a page of 16 tokens of 8 heads x 128."""
    assert element == (3 * 16 * 128 + 5 * 128 if order == "hnd" else 5 * 8 * 128 + 3 * 128)
    pool = gqa.Pool(gqa.Layout.from_config(heads(1), kv_order=order), 16)
    keys = torch.zeros(1, 8, 128, dtype=torch.bfloat16)
    keys[0, 3, 0] = 1
    pool.set_kv_buffer(0, torch.tensor([16 + 5]), keys, torch.zeros_like(keys))
    page = pool.buffer("kv", 0, "k")[1].view(torch.bfloat16)
    assert page.nonzero().flatten().tolist() == [element]


# -- h: configs


@pytest.mark.parametrize("field", ["layer_types", "sliding_window_pattern", "_sliding_window_pattern"])
def test_105_a_pattern_or_a_list(field: str) -> None:
    """vllm 21927: Gemma 3 has 10 full and 52 sliding layers by either field; as all full it is no hybrid."""
    kinds = [KINDS["f" if (layer + 1) % 6 == 0 else "s"] for layer in range(62)]
    config = heads(62, 16, 128, sliding_window=1024)
    layout = hybrid_swa.Layout.from_config(config | {field: kinds if field == "layer_types" else 6}, swa_ratio=1)
    cells = [layout.buffer(name).bytes_per_token for name in ("kv_full", "kv_swa")]
    assert cells == [81920, 425984] == [10 * 8192, 52 * 8192] and sum(cells) == 507904
    both = hybrid_swa.Layout.from_config(config | {"layer_types": kinds, "_sliding_window_pattern": 6})
    assert both.layers("kv_full") == layout.layers("kv_full") == tuple(range(5, 62, 6))
    (line,) = refusal(hybrid_swa, config | {"layer_types": kinds, "sliding_window_pattern": 5})
    rules = "the rules `has(layer_types)` and `has(sliding_window_pattern)` disagree about layer 4"
    assert line == f"windowed: {rules} (layers.sets.windowed of hybrid_swa.yaml)"


@pytest.mark.parametrize(
    ("layers", "fields"),
    [
        (36, {"model_type": "qwen3"}),
        (36, {"model_type": "qwen2", "max_window_layers": 28}),
        (36, {"max_window_layers": 28}),
        (36, {"use_sliding_window": False, "max_window_layers": 28}),
        (5, {"use_sliding_window": True, "max_window_layers": 28}),
    ],
)
def test_106_a_window_that_is_declared_and_not_used(layers: int, fields: dict[str, Any]) -> None:
    """model-serving-minefield 107: without the flag, or below the first layer that has one, no layer has a window."""
    config = heads(layers, sliding_window=2048, **fields)
    assert cell(gqa, config) == layers * 4096
    assert refusal(hybrid_swa, config)


def test_106_a_window_that_is_declared_and_used() -> None:
    """With the flag, 8 of 36 layers; where nothing says which model it is, nobody guesses."""
    config = heads(36, sliding_window=2048, model_type="qwen3", use_sliding_window=True, max_window_layers=28)
    assert hybrid_swa.Layout.from_config(config).layers("kv_swa") == tuple(range(28, 36))
    assert refusal(gqa, config) == ["layer 28: the layer has a window, and hybrid_swa keeps those apart"]
    mistral = heads(32, sliding_window=4096)  # without its model type
    assert refusal(gqa, mistral) == ["layer 0: the layer has a window, and hybrid_swa keeps those apart"]
    assert refusal(hybrid_swa, mistral) == [
        "sliding_window: add layer_types or sliding_window_pattern to the config, which say which layers have it"
    ]


def test_107_no_shared_layers_are_no_owners_less_as_shipped() -> None:
    """transformers 46235: of 30 layers, 0 shared leave 30 and 10 leave 20; a slice up to -0 leaves none."""
    assert len(gqa.Layout.from_config(heads(30, num_kv_shared_layers=0)).layers("kv")) == 30
    assert len(shared_kv.Layout.from_config(heads(30, num_kv_shared_layers=10)).layers("kv_full")) == 20
    gemma = windowed("ssssf" * 6, 2, 256, num_kv_shared_layers=0)
    layout = hybrid_swa.Layout.from_config(gemma)
    assert len(layout.layers("kv_full")) + len(layout.layers("kv_swa")) == 30


@pytest.mark.parametrize("shared", [30, 31])
def test_108_a_model_where_all_share_is_refused(shared: int) -> None:
    """vllm 48365: nothing is before the first layer, and no layer is -1."""
    config = heads(30, num_kv_shared_layers=shared)
    assert refusal(shared_kv, config) == ["num_kv_shared_layers: every layer shares and none owns"]
    assert refusal(gqa, config) == [SHARED]


@pytest.mark.parametrize(("layers", "pattern", "full"), [(64, "LLLG", 16), (64, 4, 16), (6, "LLLG", 1), (6, "G", 6)])
def test_109_a_pattern_is_a_text_or_a_number(layers: int, pattern: object, full: int) -> None:
    """transformers 39698: EXAONE 4 writes "LLLG", which others write as 4; the list of layers agrees."""
    config = heads(layers, sliding_window=4096, sliding_window_pattern=pattern)
    layout = hybrid_swa.Layout.from_config(config)
    assert [len(layout.layers(name)) for name in ("kv_swa", "kv_full")] == [layers - full, full]
    assert layout.config_used["sliding_window_pattern"] == pattern
    assert "sliding_window_pattern" not in layout.defaults_used
    kinds = [KINDS["f" if layer in layout.layers("kv_full") else "s"] for layer in range(layers)]
    if full < layers:  # a list of full layers alone is gqa's
        listed = hybrid_swa.Layout.from_config(config | {"layer_types": kinds})
        assert listed.layers("kv_full") == layout.layers("kv_full")


@pytest.mark.parametrize(
    ("pattern", "lines"),
    [
        (0, ["sliding_window_pattern: expected an integer from 1 to 1099511627776, found 0"]),
        (True, ["sliding_window_pattern: expected an integer, found True"]),
        ("LXG", ["sliding_window_pattern: expected the letters LG, found 'X'"]),
        ("", ["sliding_window_pattern has no letters"]),
        (
            [4],
            [
                "sliding_window_pattern: expected an integer, found [4]",
                "sliding_window_pattern: expected the letters LG, found [4]",
            ],
        ),
        (
            None,
            ["sliding_window: add layer_types or sliding_window_pattern to the config, which say which layers have it"],
        ),
    ],
)
def test_109_a_pattern_that_cannot_be(pattern: object, lines: list[str]) -> None:
    assert refusal(hybrid_swa, heads(64, sliding_window=4096, sliding_window_pattern=pattern)) == lines


def test_109_no_pattern_and_no_window() -> None:
    assert cell(gqa, heads(64, sliding_window=None, sliding_window_pattern=None)) == 64 * 4096
