"""Layouts and configs that once went wrong: what compiles must load, or be refused by name."""

from fractions import Fraction
from types import ModuleType
from typing import Any

import pytest
import torch
from support.models import run_whole

from kvgen.compile import compile_spec

SPEC = """\
kvgen: 1
layout: odd
doc: An odd layout.
config: {{n: {{type: int, min: 1}}{config}}}
layers: {{body: n}}
spaces: {{t: {{slots: tokens, page: {page}}}}}
formats: {{row: {{fields: {{k: "{type}"}}, page: [[k]]}}}}
buffers: {{k: {{format: row, space: t, layers: all{buffer}}}}}
"""


def module(config: str = "", page: str = "4", type: str = "u8[8]", buffer: str = "") -> ModuleType:
    """The module of a layout of one buffer with one field, odd in the given places."""
    text = SPEC.format(config=config and f", {config}", page=page, type=type, buffer=buffer and f", {buffer}")
    return run_whole("odd", lambda file: text.encode())


def refusal(module: ModuleType, config: dict[str, Any], **choices: Any) -> str:
    with pytest.raises(module.LayoutError) as error:
        module.Layout.from_config(config, **choices)
    return str(error.value)


@pytest.mark.parametrize("domain", ["[f32]", "{float32: f32}", "[f32, i32]"])
def test_dtypes_of_one_size(domain: str) -> None:
    """8 values of 4 bytes; the size is known at build, the dtype is not."""
    odd = module(f"d: {{of: {domain}}}", type="d[8]")
    layout = odd.Layout.from_config({"n": 2, "d": "float32" if "float32" in domain else "f32"})
    assert layout.buffer("k").page.page_bytes == 4 * 32
    assert layout.buffer("k").page.fields[0].dtype == "f32"


def test_a_dtype_that_is_fixed() -> None:
    odd = module("d: {of: [f32, bf16], is: f32}", type="d[n]")
    assert odd.Layout.from_config({"n": 3, "d": "f32"}).buffer("k").page.page_bytes == 4 * 3 * 4
    assert refusal(odd, {"n": 3, "d": "bf16"}) == "odd: d: this layout is for f32, found 'bf16'"


def test_a_stride_that_would_move_elements_off_their_alignment() -> None:
    """Pages of one f32, 6 bytes apart: the second would begin at byte 6."""
    odd = module(page="1", type="f32[1]", buffer="align: 6 * n")
    place = "buffers.k of odd.yaml"
    assert refusal(odd, {"n": 1}) == f"odd: row: pages 6 bytes apart do not keep k aligned ({place})"
    fine = module(page="1", type="u8[5]", buffer="align: 6 * n")
    assert fine.Layout.from_config({"n": 1}).buffer("k").page.page_bytes == 6


def test_lists_are_bounded() -> None:
    odd = module("ws: {type: list, of: int}", page="1 + len(ws)")
    assert odd.Layout.from_config({"n": 1, "ws": [0] * 10_000}).spaces[0].page_size == 10_001
    expected = "odd: ws: expected at most 10000 elements, found 10001"
    assert refusal(odd, {"n": 1, "ws": [0] * 10_001}) == expected


def test_pages_are_bounded() -> None:
    odd = module("m: {type: int, min: 1}", type="u8[m]")
    assert odd.Layout.from_config({"n": 1, "m": 2**38}).buffer("k").page.page_bytes == 2**40
    assert refusal(odd, {"n": 1, "m": 2**38 + 1}) == f"odd: row: a page of {2**40 + 4} bytes is larger than 2^40"


@pytest.mark.parametrize("value", [0.5, "1/2", "0.5", Fraction(1, 2)])
def test_a_ratio_that_is_fixed(value: object) -> None:
    odd = module("f: {type: ratio, is: 1/2}")
    assert odd.Layout.from_config({"n": 1, "f": value}).config_used["f"] == value
    assert "expected a number" in refusal(odd, {"n": 1, "f": "1/3"})


@pytest.mark.parametrize("value", ["1e999999999", "1e-999999999", "1/0", "1/00", " 1/2 ", "1_0/2", "١/٢", "", "nan"])
def test_texts_that_are_no_ratio(value: str) -> None:
    odd = module("f: {type: ratio, is: 1/2}")
    assert "odd: f: expected a number such as 1/2" in refusal(odd, {"n": 1, "f": value})


def test_plain_values_have_no_fields() -> None:
    """Python gives every int a `real`, every list a `count`; a config means neither."""
    odd = module("m: {type: int, from: a.real}", type="u8[m]")
    assert refusal(odd, {"n": 1, "a": 3}) == "odd: a.real is missing from the config"
    counted = module("m: {type: int, from: count}", type="u8[m]")
    assert counted.Layout.from_config({"n": 1, "text_config": [1], "count": 3}).buffer("k").page.page_bytes == 12


def test_values_too_deep_to_show() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    odd = module("ws: {type: list, of: int}", page="1 + len(ws)")
    assert refusal(odd, {"n": 1, "ws": [deep]}) == "odd: ws: element 0: expected an integer, found a list"
    assert refusal(odd, {"n": deep, "ws": []}) == "odd: n: expected an integer, found a list"


def test_what_a_pool_is_asked_for() -> None:
    odd = module()
    pool = odd.Pool(odd.Layout.from_config({"n": 2}), 4, device="meta")
    assert pool.buffer("k", 1).shape == (2, 32)
    for layer in (True, 1.0, [], None):
        with pytest.raises(ValueError, match="^layer_id must be an integer, not "):
            pool.buffer("k", layer)
    with pytest.raises(LookupError):
        pool.buffer([], 0)
    for device in ("zzz", None, 1.5, "xpu:7"):
        with pytest.raises(ValueError, match="^device must be one that torch has here, not "):
            odd.Pool(odd.Layout.from_config({"n": 2}), 4, device=device)
    assert odd.Pool(odd.Layout.from_config({"n": 2}), 4, device=torch.device("meta")).num_bytes() == 2 * 2 * 32


def test_chains_of_definitions_in_either_order() -> None:
    """101 names that each need the next are one too many, whichever stands first in the file."""
    forward = [f"  a{i}: a{i + 1} + 0\n" for i in range(100)] + ["  a100: n\n"]
    for lines in (forward, forward[::-1]):
        text = SPEC.format(config="", page="a0 + 1", type="u8[8]", buffer="") + "let:\n" + "".join(lines)
        compiled = compile_spec("odd.yaml", lambda file, text=text: text.encode())
        assert [problem.code for problem in compiled.problems] == ["KV218"]
        shorter = text.replace("  a0: a1 + 0\n", "").replace("a0 + 1", "a1 + 1")
        assert compile_spec("odd.yaml", lambda file, text=shorter: text.encode()).problems == ()


def test_the_greatest_of_a_list() -> None:
    text = SPEC.format(config=", ids: {type: list, of: int}", page="4", type="u8[8]", buffer="")
    text = text.replace("layers: all", "layers: layer in ids")
    text += "require:\n  - {that: len(ids) == 0 or max(ids) < n, else: ids names a layer that is not there}\n"
    odd = run_whole("odd", lambda file: text.encode())
    assert odd.Layout.from_config({"n": 4, "ids": [3, 1]}).layers("k") == (1, 3)
    assert odd.Layout.from_config({"n": 4, "ids": []}).layers("k") == ()
    assert refusal(odd, {"n": 4, "ids": [4]}) == "odd: ids names a layer that is not there"
