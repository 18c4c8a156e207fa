"""Specs as large as the language allows: work is done once, or refused with the limit."""

from types import ModuleType
from typing import Any

import pytest

import kvgen.compile
import kvgen.expect
from kvgen.compile import Compiled, compile_spec
from kvgen.evaluate import run

BUFFERS = 64
LAYERS = 10_000


def compiled(text: str) -> Compiled:
    return compile_spec("small.yaml", lambda file: text.encode())


def messages(text: str) -> list[str]:
    return [problem.message for problem in compiled(text).problems]


def model(expect: str, values: str = "16", buffers: int = BUFFERS, more: str = "") -> str:
    """Buffers of one format in every layer, with so many values in a row."""
    listed = "".join(f"  kv{number}: {{format: row, space: token, layers: all}}\n" for number in range(buffers))
    return f"""\
kvgen: 1
layout: small
doc: Many buffers.
config:
  n: {{type: int, max: {LAYERS}}}
let:
  values: {values}
{more}layers: {{body: n}}
spaces:
  token: {{slots: tokens, page: 16}}
formats:
  row: {{fields: {{k: "bf16[values]"}}, page: [[k]]}}
buffers:
{listed}expect:
{expect}"""


# Pages of many slots


PAGES = """\
kvgen: 1
layout: small
doc: A space of every fourth slot, and of it every second one.
choices:
  page_size: {type: int, min: 4, default: 64}
layers: {body: 1}
spaces:
  token: {slots: tokens, page: page_size}
  fourth: {of: token, slot: offset // 4}
  even: {of: fourth, slot: offset, where: offset % 2 == 0}
formats:
  row: {fields: {k: "bf16[64]"}, page: [[k]]}
buffers:
  kv: {format: row, space: fourth, layers: all}
  index: {format: row, space: even, layers: all}
"""


@pytest.mark.parametrize("page_size", [2**20 + 4, 2**28, 2**40])
def test_a_page_of_more_slots_than_can_be_listed_is_refused(page_size: int) -> None:
    module = compiled(PAGES).namespace
    with pytest.raises(module.LayoutError) as error:
        module.Layout.from_config({}, page_size=page_size)
    assert str(error.value) == (
        f"small: fourth: a page of `token` has {page_size} slots; the most for a space of other slots is 1048576"
    )


def test_the_largest_page_is_listed() -> None:
    layout = compiled(PAGES).namespace.Layout.from_config({}, page_size=2**20)
    fourth, even = layout.buffer("kv").space, layout.buffer("index").space
    assert (fourth.page_size, even.page_size, len(fourth.rows), len(even.rows)) == (2**18, 2**18, 2**20, 2**20)
    assert (fourth.rows[7], fourth.rows[-1]) == (1, 2**18 - 1)
    assert (even.rows[7], even.rows[8], even.rows[-1]) == (-1, 2, -1)


def test_a_page_that_is_listed_for_nobody_has_no_limit() -> None:
    text = PAGES.replace("slot: offset // 4", "slot: offset").replace(", where: offset % 2 == 0", "")
    layout = compiled(text).namespace.Layout.from_config({}, page_size=2**30)
    assert layout.buffer("index").page.page_bytes == 2**37


# Layers that differ


def test_a_let_of_a_layer_is_worked_out_once() -> None:
    """A chain in which each needs the one before it twice: by itself, 2^60 evaluations in each layer."""
    lets = "".join(
        f"  a{number}: max(a{number - 1}, a{number - 1} - layer)\n" if number else "  a0: 8 * (layer + 1)\n"
        for number in range(61)
    )
    # 8 and 16 values of 2 bytes in 16 slots
    found = messages(model("  - {given: {n: 2}, page_total: 768}\n", values="a60", buffers=1, more=lets))
    assert found == []


def test_buffers_share_the_pages_of_a_layer() -> None:
    layout = compiled(model("  - {given: {n: 1}, page_bytes: {kv0: 256}}\n", values="8 * (layer + 1)")).namespace
    found = layout.Layout.from_config({"n": 100})
    assert len({id(page) for buffer in found.buffers for page in buffer.pages}) == 100
    assert [page.page_bytes for page in found.buffers[63].pages] == [256 * (layer + 1) for layer in range(100)]


def test_the_bytes_of_a_page_of_all_layers_are_summed_once() -> None:
    module = compiled(model("  - {given: {n: 1}, page_bytes: {kv0: 256}}\n", values="8 * (layer + 1)")).namespace
    buffer = module.Layout.from_config({"n": 3}).buffers[0]
    assert buffer.layer_page_bytes == 256 * (1 + 2 + 3) and "layer_page_bytes" in vars(buffer)


# Expectations


class Counted:
    """How often the layouts of a module are made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.configs: list[Any] = []

        def running(module: Any) -> ModuleType:
            found = run(module)
            whole = found.Layout.from_config

            def from_config(config: Any, **choices: Any) -> Any:
                self.configs.append((config, choices))
                return whole(config, **choices)

            found.Layout.from_config = from_config
            return found

        monkeypatch.setattr(kvgen.compile, "run", running)


def test_expectations_of_one_config_resolve_one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    same = "  - {given: {n: 3}, bytes_per_token: 96}\n  - {given: {n: 3}, page_total: 1536}\n"  # 3 x 16 x 2, 16 slots
    refused = "  - {given: {n: 10001}, error: n}\n"
    other = "  - {given: {n: 4}, bytes_per_token: 128}\n"
    assert messages(model(same * 100 + refused * 50 + other, buffers=1)) == []
    assert counted.configs == [({"n": 3}, {}), ({"n": 10001}, {}), ({"n": 4}, {})]


def test_configs_of_expectations_are_read_once_and_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    expect = "  - {config: c.json, given: {n: 2}, page_total: 1024}\n  - {config: c.json, page_total: 512}\n"
    text = model(expect * 2, buffers=1).replace("{type: int, max", "{type: int, from: text.n, max")
    files = {"small.yaml": text.encode(), "c.json": b'{"text": {"n": 1}}'}
    read: list[str] = []

    def reading(file: str) -> bytes:
        read.append(file)
        return files[file]

    assert compile_spec("small.yaml", reading).problems == ()
    assert read == ["small.yaml", "c.json"]
    assert counted.configs == [({"text": {"n": 2}}, {}), ({"text": {"n": 1}}, {})]


def test_a_difference_is_explained_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    explained: list[object] = []
    whole = kvgen.expect._difference
    monkeypatch.setattr(kvgen.expect, "_difference", lambda *own: explained.append(own) or whole(*own))
    right = "  - {given: {n: 1}, bytes_per_token: 32, page_total: 512, page_bytes: {kv0: 512}}\n"
    assert messages(model(right, buffers=1)) == []
    assert explained == []
    assert messages(model(right.replace("32", "33"), buffers=1)) == ["`bytes_per_token` is 32, expected 33"]
    assert len(explained) == 1


@pytest.mark.parametrize(
    ("total", "made_of"),
    [
        (64, "the difference of 64 is `kv1.k`"),
        (96, "the difference of 96 is `kv0.k` and `kv1.k`"),
        (224, "the difference of 224 is `kv0.k` and `kv1.k` and `kv2.k`"),
        (480, "the difference is 480"),
        (31, "the difference is 31"),
    ],
)
def test_the_fewest_fields_that_make_up_a_difference(total: int, made_of: str) -> None:
    """Buffers of 32, 64, 128 and 256 bytes a token."""
    text = model(f"  - {{given: {{n: 1}}, bytes_per_token: {480 - total}}}\n", buffers=4)
    for number in range(4):
        text = text.replace(f"kv{number}: {{format: row", f"kv{number}: {{format: row{number}")
    rows = "".join(f'  row{number}: {{fields: {{k: "bf16[{16 << number}]"}}, page: [[k]]}}\n' for number in range(4))
    text = text.replace('  row: {fields: {k: "bf16[values]"}, page: [[k]]}\n', rows).replace("let:\n  values: 16\n", "")
    (problem,) = compiled(text).problems
    assert problem.notes[-1] == made_of


def test_buffers_without_layers_are_left_out_of_a_difference() -> None:
    text = model("  - {given: {n: 1}, page_total: 1}\n", values="8 * (layer + 1)", buffers=2)
    text = text.replace(
        "kv1: {format: row, space: token, layers: all}", "kv1: {format: row, space: token, layers: layer > 7}"
    )
    assert messages(text) == ["`page_total` is 256, expected 1"]


def test_as_many_expectations_as_there_can_be_of_as_many_layers() -> None:
    line = f"  - {{given: {{n: {LAYERS}}}, bytes_per_token: {LAYERS * BUFFERS * 32}}}\n"
    assert messages(model(line * 512)) == []
    wrong = line.replace(str(LAYERS * BUFFERS * 32), "1")
    assert messages(model(wrong * 512)) == [f"`bytes_per_token` is {LAYERS * BUFFERS * 32}, expected 1"] * 512


def test_and_of_layers_that_all_differ() -> None:
    total = sum(16 * (layer + 1) for layer in range(LAYERS)) * BUFFERS  # a token has 8 values of 2 bytes more in each
    right = f"  - {{given: {{n: {LAYERS}}}, bytes_per_token: {total}, page_total: {16 * total}}}\n"
    assert messages(model(right * 512, values="8 * (layer + 1)")) == []
    wrong = f"  - {{given: {{n: {LAYERS}}}, page_bytes: {{kv0: 1}}}}\n"
    assert (
        messages(model(wrong * 512, values="8 * (layer + 1)"))
        == ["`page_bytes` of `kv0` in layer 0 is 256, expected 1"] * 512
    )


def test_layouts_that_are_too_large_together_are_refused() -> None:
    """Each has 640,000 layers of buffers at most, and 10,000 pages, which count for 16."""
    lines = [f"  - {{given: {{n: {LAYERS - number}}}, owners: {{kv0: {LAYERS - number}}}}}\n" for number in range(512)]
    parts, counted = 0, 0
    while parts <= 2**22:
        parts += (LAYERS - counted) * (BUFFERS + 16)
        counted += 1
    text = model("".join(lines), values="8 * (layer + 1)")
    (problem,) = compiled(text).problems
    assert (problem.code, problem.message) == (
        "KV206",
        f"the layouts of the expectations up to here have {parts:,} parts, more than 4,194,304",
    )
    line = text[: text.index(lines[counted - 1])].count("\n") + 1
    assert problem.primary.span.line == line
