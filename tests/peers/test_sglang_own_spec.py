"""Adapters of specs that are not the shipped one."""

import importlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deployments import DTYPES, HEAD_DTYPES, Deployment, build, build_own, deepseek_v3, glm_5_2, model_of
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator

from kvgen.cli import main

ROOT = Path(__file__).parents[2]
MODEL = glm_5_2(3, indexer_types=["full", "full", "shared"])


def adapter_of(folder: Path, edit: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, spec: str = "glm_dsa") -> Any:
    """The adapter of a shipped spec, `own` after an edit of its files."""
    for name in ("glm_dsa", "mla", "gqa", "mla_rows", "index_rows", "kv_rows"):
        text = (ROOT / "specs" / f"{name}.yaml").read_text().split("\nexpect:")[0] + "\n"
        (folder / f"{name}.yaml").write_text(edit(text.replace(f"layout: {spec}\n", "layout: own\n")))
    out = io.StringIO()
    package = folder.name
    words = ["build", str(folder / f"{spec}.yaml"), "--engine", "sglang", "-o", str(folder)]
    assert main(words, io.BytesIO(), out, out) == 0, out.getvalue()
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setenv("KVGEN_SGLANG_POOL", f"{package}.sglang.own")
    return importlib.import_module(f"{package}.sglang.own")


def renamed(text: str) -> str:
    """Other names wherever names are free, arguments and formats in another order."""
    text = re.sub(r"\blatent\b(?!_| row)", "nope", text)
    text = text.replace("cache_k_nope: nope, cache_k_rope: rope", "cache_k_rope: rope, cache_k_nope: nope")
    text = text.replace("index_k: key, index_k_scale: key_scale", "index_k_scale: key_scale, index_k: key")
    text = re.sub(r"\bkv\b(?=[,:\]])", "rows", text)
    text = text.replace("[bf16, fp8_scaled, fp8_raw]", "[fp8_raw, fp8_scaled, bf16]")
    return text.replace("move_kv_cache:", "move:").replace("get_cpu_copy:", "save:").replace("load_cpu_copy:", "load:")


@pytest.mark.parametrize("kv_format", DTYPES)
def test_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_format: str) -> None:
    module = adapter_of(tmp_path, renamed, monkeypatch)
    with Deployment(kv_format, MODEL, 0, 3).serving() as configurator:
        own, pool = build_own(configurator, 128), build(configurator, 128)
        assert type(pool) is module.TokenToKVPool
        assert pool.generated.layout.layers("rows") == (0, 1, 2)
        layer, loc = SimpleNamespace(layer_id=1), torch.randperm(191)[:50] + 1
        values = torch.randn(50, 1, 512).bfloat16(), torch.randn(50, 1, 64).bfloat16()
        codes, scales = torch.randint(0, 127, (50, 128)).to(torch.uint8).view(torch.float8_e4m3fn), torch.rand(50)
        for each in (own, pool):
            each.set_mla_kv_buffer(layer, loc, *values)
            each.set_index_k_scale_buffer(1, loc, codes, scales)
            each.move_kv_cache(loc.roll(1), loc)
            each.load_cpu_copy(each.get_cpu_copy(torch.arange(64, 128)), torch.arange(128, 192))
        buffers = ([*each.kv_buffer, *each.index_k_with_scale_buffer] for each in (own, pool))
        for one, other in zip(*buffers, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_slots_numbered_apart_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang sets no choice but the format; what the others are by default has to be a pool that it can address."""

    def edit(text: str) -> str:
        ratio = "host_to_device_ratio: {type: int, min: 1, default: "
        return text.replace(f"{ratio}1}}", f"{ratio}2}}")

    adapter_of(tmp_path, edit, monkeypatch)
    with Deployment("bf16", MODEL, 0, 3).serving() as configurator:
        message = "^own: latent and index have one slot a token in SGLang, and not here by default$"
        with pytest.raises(NotImplementedError, match=message):
            build(configurator, 128)


PAGE_SIZE = "  page_size: {type: int, min: 1, default: 64}\n"


@pytest.mark.parametrize(
    ("choice", "own", "page", "slots"),
    [
        ("", "64", 16, 64),
        (PAGE_SIZE, "page_size * 2", 64, 128),
        (PAGE_SIZE, "page_size + 1", 1, 2),
    ],
    ids=["a fixed page", "twice the choice", "one more than the choice"],
)
def test_pages_of_another_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str, own: str, page: int, slots: int
) -> None:
    """A choice `page_size` is what SGLang sets, and not always the page; the page of the layout is held against it."""

    def edit(text: str) -> str:
        return text.replace(PAGE_SIZE, choice).replace("page: page_size}", f"page: {own}}}")

    adapter_of(tmp_path, edit, monkeypatch, "mla")
    with Deployment("bf16", deepseek_v3(2), 0, 2, page=page).serving() as configurator:
        for make in (lambda: build(configurator, 640), lambda: DefaultPoolConfigurator(configurator)):
            with pytest.raises(ValueError, match=f"^own: a page of this layout has {slots} slots, not {page}$"):
                make()


def test_a_fixed_page_that_is_sglangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = adapter_of(
        tmp_path, lambda text: text.replace(PAGE_SIZE, "").replace("page: page_size", "page: 64"), monkeypatch, "mla"
    )
    with Deployment("bf16", deepseek_v3(2), 0, 2).serving() as configurator:
        pool, own = build(configurator, 128), build_own(configurator, 128)
        assert type(pool) is module.TokenToKVPool
        assert [rows.shape for rows in pool.kv_buffer] == [rows.shape for rows in own.kv_buffer]


@pytest.mark.parametrize(("default", "fits"), [(1, True), (2, False)])
def test_slots_by_a_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default: int, fits: bool) -> None:
    """How many slots a token has is known at load time; one is what SGLang hands out."""

    def edit(text: str) -> str:
        text = text.replace("slots: tokens,", "slots: tokens * ratio,")
        return text.replace(PAGE_SIZE, f"{PAGE_SIZE}  ratio: {{type: int, min: 1, default: {default}}}\n")

    module = adapter_of(tmp_path, edit, monkeypatch, "mla")
    with Deployment("bf16", deepseek_v3(2), 0, 2).serving() as configurator:
        if fits:
            assert type(build(configurator, 128)) is module.TokenToKVPool
        else:
            message = "^own: a token has one slot in SGLang, and not here by default$"
            with pytest.raises(NotImplementedError, match=message):
                build(configurator, 128)


def test_slots_of_both_by_a_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latent and index in one space with two slots a token: numbered together, and still not as SGLang does."""

    def edit(text: str) -> str:
        ratio = "host_to_device_ratio: {type: int, min: 1, default: "
        text = text.replace(f"{ratio}1}}", f"{ratio}2}}").replace("space: device", "space: logical")
        return re.sub(r"  device:  #.*\n(    - .*\n)+", "", text)

    adapter_of(tmp_path, edit, monkeypatch)
    with Deployment("bf16", MODEL, 0, 3).serving() as configurator:
        message = "^own: latent and index have one slot a token in SGLang, and not here by default$"
        with pytest.raises(NotImplementedError, match=message):
            build(configurator, 128)


HEADS = model_of("llama-3.1-8b", num_hidden_layers=3, num_key_value_heads=4, head_dim=192, v_head_dim=128)


def renamed_heads(text: str) -> str:
    """Other names wherever names are free, arguments and formats in another order."""
    text = re.sub(r"\b([kv])\b(?=[,:\]}])", r"\1_of_heads", text)
    text = re.sub(r"\bkv\b(?=[,:\]])", "rows", text)
    text = text.replace("cache_k: k_of_heads, cache_v: v_of_heads", "cache_v: v_of_heads, cache_k: k_of_heads")
    text = text.replace("[bf16, fp8, int8,", "[int8, fp8, bf16,").replace("tp_size", "ranks")
    return text.replace("move_kv_cache:", "move:").replace("get_cpu_copy:", "save:").replace("load_cpu_copy:", "load:")


@pytest.mark.parametrize("kv_format", HEAD_DTYPES)
def test_other_names_of_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_format: str) -> None:
    module = adapter_of(tmp_path, renamed_heads, monkeypatch, "gqa")
    arguments = (("speculative_algorithm", "EAGLE"),)
    with Deployment(kv_format, end=3, model=HEADS, arguments=arguments).serving() as configurator:
        own, pool = build_own(configurator, 128), build(configurator, 128)
        assert type(pool) is module.TokenToKVPool
        assert pool.generated.layout.layers("rows") == (0, 1, 2)
        layer, loc = SimpleNamespace(layer_id=1), torch.randperm(191)[:50] + 1
        k, v = torch.randn(50, 4, 192).bfloat16(), torch.randn(50, 4, 128).bfloat16()
        for each in (pool, own):
            each.set_kv_buffer(layer, loc, k, v, 0.5, 4.0)
            each.move_kv_cache(loc.roll(1), loc)
            each.load_cpu_copy(each.get_cpu_copy(torch.arange(64, 128)), torch.arange(128, 192))
        for one, other in zip((*own.k_buffer, *own.v_buffer), (*pool.k_buffer, *pool.v_buffer), strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "split_kv: {type: bool, default: true}",
            "split_kv: {type: bool, default: false}",
            "own: keys and values of bfloat16, row by row in two tensors, are none of this layout's: "
            "`bf16_nhd` in one tensor, `fp8_nhd` in one tensor",
        ),
        (
            "default: nhd",
            "default: hnd",
            "own: keys and values of bfloat16, row by row in two tensors, are none of this layout's: "
            "`bf16_hnd`, `fp8_hnd`",
        ),
        (
            "tp_size: {type: int, min: 1, default: 1}",
            "tp_size: {type: int, min: 1, default: 2}",
            "own: a token has keys and values [[4, 192], [4, 128]] in SGLang, and [[2, 192], [2, 128]] here",
        ),
        (
            "page: page_size}",
            "page: page_size * 2}",
            "own: a page of this layout has 128 slots, not 64",
        ),
        (
            "slots: tokens,",
            "slots: tokens * tp_size * 2,",
            "own: a token has one slot in SGLang, and not here by default",
        ),
        (
            "min: 1, from: [head_dim,",
            "max: 128, min: 1, from: [head_dim,",
            "own: head_dim: expected an integer from 1 to 128, found 192",
        ),
    ],
)
def test_heads_that_are_not_sglangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, message: str
) -> None:
    """What choices are by default is what SGLang gets, and the numbers of load time are held against its own."""
    adapter_of(tmp_path, lambda text: text.replace(old, new), monkeypatch, "gqa")
    with Deployment("bf16", end=3, model=HEADS).serving() as configurator:
        for make in (lambda: build(configurator, 128), lambda: DefaultPoolConfigurator(configurator)):
            with pytest.raises((ValueError, NotImplementedError)) as error:
                make()
            assert str(error.value) == message


def test_heads_that_no_ranks_divide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout of the heads of a rank: it takes what SGLang has divided."""

    def edit(text: str) -> str:
        text = text.replace("  tp_size: {type: int, min: 1, default: 1}\n", "")
        return re.sub(r"heads: shard\((.*), tp_size\)", r"heads: \1", text)

    module = adapter_of(tmp_path, edit, monkeypatch, "gqa")
    with Deployment("bf16", end=3, model=HEADS, ranks=2).serving() as configurator:
        pricing = DefaultPoolConfigurator(configurator)
        pool = build(configurator, 128)
        assert type(pool) is module.TokenToKVPool and pool.k_buffer[0].shape == (192, 2, 192)
        assert pricing._cell_size == module.cell_size(pool.generated.layout) == 3 * 2 * 320 * 2
