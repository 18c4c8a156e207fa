"""`kvgen diff`: what sets two layouts apart, in numbers that public reports give for the same models."""

import io
import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvgen.cli import main
from kvgen.ranks import Part, Ranks, same_heads

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "tests" / "data" / "configs"
GLM_DSA = str(ROOT / "specs" / "glm_dsa.yaml")
GLM_52 = f"{GLM_DSA},config={CONFIGS / 'glm-5.2.json'}"
OWNERS = [0, 1, 2, *range(6, 75, 4)]  # layers of GLM-5.2 that own an indexer
BODY = list(range(78))

SMALL = """\
kvgen: 1
layout: small
doc: One buffer.
config:
  num_layers: {type: int, from: num_hidden_layers}
  kinds: {type: list, of: {sliding_attention: sliding, full_attention: full}, optional: true}
choices:
  order: {of: [nhd, hnd], default: nhd}
let: {width: 64}
require:
  - {that: num_layers < 100, else: too many layers}
layers:
  body: num_layers
  draft: 1
  sets:
    even: [{when: has(kinds), use: "layer < len(kinds) and kinds[layer] == 'full'"}, {use: layer % 2 == 0}]
spaces:
  token: {slots: tokens, page: 16}
formats:
  row:
    fields: {k: {type: "e4m3[width]", quant: {scale: s}}, s: "f32[1]", c: {type: "i32[1]", init: 7}}
    page: [[k, s, c]]
  rows: [{when: order == 'nhd', use: row}, {use: other}]
  other: {fields: row, page: [[k], [s], {align: 128}, [c]]}
buffers:
  kv: {format: rows, space: token, layers: even or draft}
"""


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        assert self.err == ""
        return json.loads(self.out)


def diff(*words: object) -> Done:
    out, err = io.StringIO(), io.StringIO()
    status = main(["diff", *map(str, words)], io.BytesIO(), out, err)
    return Done(status, out.getvalue(), err.getvalue())


def facts(items: list[dict[str, Any]]) -> dict[str, tuple[Any, Any]]:
    """The changes of a document by name."""
    return {item["name"]: (item["a"], item["b"]) for item in items}


def buffers(document: Any) -> dict[str, Any]:
    return {buffer["name"]: buffer for buffer in document["buffers"]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SMALL)
    (tmp_path / "c.json").write_text('{"num_hidden_layers": 4}')
    return tmp_path


def changed(old: str, new: str) -> str:
    """A file with another version of the small spec."""
    assert SMALL.count(old) == 1
    Path("changed.yaml").write_text(SMALL.replace(old, new))
    return "changed.yaml"


# A model


def test_layers_that_share() -> None:
    """78 x (576 + 132) against 78 x 576 + 21 x 132 bytes a token: public reports had 15.8 % more tokens."""
    done = diff(f"{GLM_52},kv_format=fp8_raw,elide_shared=false", f"{GLM_52},kv_format=fp8_raw", "--format", "json")
    document = done.document
    assert (done.status, document["same"], document["spec"]) == (1, False, [])
    assert facts(document["choices"]) == {"elide_shared": (False, True)}
    assert document["config"] == document["spaces"] == []
    assert facts(document["numbers"]) == {
        "bytes_per_token": (55_224, 47_700),
        "host_bytes_per_token": (0, 0),
        "fixed_bytes": (64 * 55_224, 64 * 47_700),
        "granule": (64, 64),
    }
    assert document["bytes_per_token_ratio"] == "1325/1534"  # 47,700 = 36 x 1,325 and 55,224 = 36 x 1,534
    kv, index = buffers(document)["kv"], buffers(document)["index_k"]
    assert kv["same"] and kv["pages_interchangeable"]
    assert kv["layers"] == {"only_a": [], "only_b": [], "both": BODY}
    only_a = [layer for layer in BODY if layer not in OWNERS]
    assert len(only_a) == 57 and index["layers"] == {"only_a": only_a, "only_b": [], "both": OWNERS}
    assert facts(index["facts"]) == {"bytes_per_token": (78 * 132, 21 * 132)}
    assert index["pages_interchangeable"] and not index["same"]


def test_layers_that_share_as_text() -> None:
    """80 GiB hold (80 x 2^30 - 64 x n) // (64 x n) x 64 tokens of n bytes."""
    tokens = [(80 * 2**30 - 64 * n) // (64 * n) * 64 for n in (55_224, 47_700)]
    assert tokens == [1_555_392, 1_800_704]
    sides = (f"{GLM_52},kv_format=fp8_raw,elide_shared=false", f"{GLM_52},kv_format=fp8_raw")
    done = diff(*sides, "--memory", "80GiB")
    assert (done.status, done.err) == (1, "")
    assert done.out.split("\n", 2)[2] == (
        "\n"
        "  bytes per token         55,224 ->    47,700\n"
        "  fixed bytes          3,534,336 -> 3,052,800\n"
        "  granule                     64           64\n"
        "  tokens in 80.00 GiB  1,555,392 -> 1,800,704\n"
        "  a token of B costs 1325/1534 of one of A: 13.62 % less, for 15.77 % more tokens in the same memory\n"
        "\n"
        "choices\n"
        "  elide_shared: false -> true\n"
        "\n"
        "kv: the same in 78 layers: 0-77; its pages are interchangeable\n"
        "\n"
        "index_k\n"
        "  only A has it in 57 layers: 3-5, 7-9, 11-13, 15-17, 19-21, 23-25, 27-29, 31-33, 35-37, 39-41,\n"
        "      43-45, 47-49, 51-53, 55-57, 59-61, 63-65, 67-69, 71-73, 75-77\n"
        "  both have it in 21 layers: 0-2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70,\n"
        "      74\n"
        "  bytes_per_token: 10,296 -> 2,772\n"
        "  pages are interchangeable: their bytes mean the same\n"
    )
    document = diff(*sides, "--memory", "80GiB", "--format", "json").document
    assert facts(document["numbers"])["tokens"] == tuple(tokens)


def test_rules_that_give_as_many_owners_but_others() -> None:
    """Frequency 4 over 78 layers: with offset 3 and without, 21 layers own an indexer, and two of them are the same."""
    base = {"num_hidden_layers": 78, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    Path("a.json").write_text(json.dumps(base | {"index_topk_freq": 4}))
    Path("b.json").write_text(json.dumps(base | {"index_topk_freq": 4, "index_skip_topk_offset": 3}))
    sides = (f"{GLM_DSA},config=a.json", f"{GLM_DSA},config=b.json")
    done = diff(*sides, "--format", "json")
    document = done.document
    assert done.status == 1 and all(a == b for a, b in facts(document["numbers"]).values())
    assert document["bytes_per_token_ratio"] == 1 and document["choices"] == []
    assert facts(document["config"]) == {"index_skip_topk_offset": (None, 3)}
    index = buffers(document)["index_k"]
    assert index["layers"] == {"only_a": list(range(5, 78, 4)), "only_b": [2, *range(6, 75, 4)], "both": [0, 1]}
    assert not index["same"] and index["facts"] == []
    text = diff(*sides).out
    assert "  index_skip_topk_offset: nothing -> 3\n" in text and "\n  both have it in 2 layers: 0-1\n" in text
    assert "a token of B" not in text


def test_formats_whose_pages_part() -> None:
    """Rows of (512 + 64) x 2 = 1,152 bytes, and of 512 + 4 x 4 + 64 x 2 = 656."""
    done = diff(f"{GLM_52},kv_format=bf16", f"{GLM_52},kv_format=fp8_scaled", "--format", "json")
    document = done.document
    assert facts(document["numbers"])["bytes_per_token"] == (92_628, 53_940)
    assert facts(document["choices"]) == {"kv_format": ("bf16", "fp8_scaled")}
    kv = buffers(document)["kv"]
    assert kv["pages_interchangeable"] is False and buffers(document)["index_k"]["same"]
    assert facts(kv["facts"]) == {
        "format": ("mla_bf16", "mla_fp8_scaled"),
        "slot_bytes": (1152, 656),
        "page_bytes": (64 * 1152, 64 * 656),
        "bytes_per_token": (78 * 1152, 78 * 656),
    }
    [page] = kv["pages"]
    assert page["layers"] == BODY
    assert facts(page["fields"]) == {
        "page_bytes": (64 * 1152, 64 * 656),
        "latent": (
            "bf16 at 0, (64, 512):(1152, 2)",
            "e4m3 at 0, (64, 512):(656, 1), scale latent_scale for blocks of 128, exact, reciprocal",
        ),
        "rope": ("bf16 at 1024, (64, 64):(1152, 2)", "bf16 at 528, (64, 64):(656, 2)"),
        "latent_scale": (None, "f32 at 512, (64, 4):(656, 4)"),
    }
    text = diff(f"{GLM_52},kv_format=bf16", f"{GLM_52},kv_format=fp8_scaled").out
    assert "\n  pages of 78 layers: 0-77 are not interchangeable: their bytes mean something else\n" in text
    assert (
        "\n    latent:\n      A: bf16 at 0, (64, 512):(1152, 2)\n      B: e4m3 at 0, (64, 512):(656, 1), scale " in text
    )


def test_spaces_and_buffers_of_the_host() -> None:
    """HiSparse: 78 x 656 + 2 x 21 x 132 on the device, 2 x 78 x 656 in host memory."""
    done = diff(GLM_52, f"{GLM_52},host_to_device_ratio=2", "--format", "json")
    document = done.document
    numbers = facts(document["numbers"])
    assert numbers["bytes_per_token"] == (53_940, 56_712) and numbers["host_bytes_per_token"] == (0, 102_336)
    pages = "pages of 64 slots, 1 reserved"
    assert facts(document["spaces"]) == {
        "logical": (f"1 slot per token, {pages}", f"2 slots per token, {pages}"),
        "device": (f"1 slot per token, {pages}, numbered as logical", f"1 slot per token, {pages}"),
    }
    host = buffers(document)["kv_host"]
    assert host["layers"] == {"only_a": [], "only_b": BODY, "both": []} and host["pages_interchangeable"] is None
    assert facts(host["facts"]) == {"bytes_per_token": (None, 102_336)}


def test_models_of_two_layouts() -> None:
    """A config alone picks its shipped layout; the `kv` of both is the same row in bf16."""
    v3, v32 = (f"config={CONFIGS / name}" for name in ("deepseek-v3.json", "deepseek-v3.2.json"))
    document = diff(v3, f"{v32},kv_format=bf16", "--format", "json").document
    assert (document["a"]["layout"], document["b"]["layout"]) == ("mla", "glm_dsa")
    assert facts(document["numbers"])["bytes_per_token"] == (70_272, 78_324)  # 61 x 1152, 61 x (1152 + 132)
    assert buffers(document)["kv"]["pages_interchangeable"]
    assert buffers(document)["index_k"]["layers"] == {"only_a": [], "only_b": list(range(61)), "both": []}
    assert ("layout", ("mla", "glm_dsa")) in facts(document["spec"]).items()


def test_the_same_layout() -> None:
    """Also where fields say the same in another way: layer types, or the rule that they follow."""
    whole = json.loads((CONFIGS / "glm-5.2.json").read_text())
    Path("rule.json").write_text(json.dumps({name: whole[name] for name in whole if name != "indexer_types"}))
    done = diff(GLM_52, f"{GLM_DSA},config=rule.json")
    assert (done.status, done.err) == (0, "")
    assert done.out.splitlines()[2] == "the same layout" and "  indexer_types: 78 values -> nothing\n" in done.out
    done = diff(GLM_52, GLM_52, "--format", "json")
    assert done.status == 0 and done.document["same"]
    assert all(buffer["same"] for buffer in done.document["buffers"])


def test_lists_part_at_an_element() -> None:
    Path("a.json").write_text('{"num_hidden_layers": 3, "kinds": ["full_attention", "sliding_attention"]}')
    Path("b.json").write_text('{"num_hidden_layers": 3, "kinds": ["full_attention", "full_attention"]}')
    done = diff("small.yaml,config=a.json", "small.yaml,config=b.json")
    assert "  kinds: 2 -> 2 values, element 1: sliding_attention -> full_attention\n" in done.out
    assert "\n  only B has it in 1 layer: 1\n" in done.out


def test_a_token_that_costs_nothing() -> None:
    """No ratio where a side holds no layer; one page of 16 x (64 + 8) bytes in 2 layers is reserved."""
    done = diff("small.yaml,config=c.json", "small.yaml,config=c.json,end_layer=0", "--memory", "1MiB")
    assert done.status == 1 and "a token of B" not in done.out
    rows = [" ".join(line.split()) for line in done.out.splitlines()]
    assert "bytes per token 144 -> 0" in rows and "fixed bytes 2,304 -> 0" in rows
    assert f"tokens in 1.00 MiB {(2**20 - 2304) // 2304 * 16:,} -> unbounded" in rows
    assert "only A has it in 2 layers: 0, 2" in rows


# Ranks


GQA = str(ROOT / "specs" / "gqa.yaml")


def heads_of(heads: int, ranks: int, rank: int) -> list[int]:
    """The heads of a rank: an equal part of them, or one of them that as many ranks have."""
    if ranks <= heads:
        return list(range(rank * heads // ranks, (rank + 1) * heads // ranks))
    return [rank // (ranks // heads)]


def pairs_of(ranks: Ranks) -> set[tuple[int, int]]:
    """The ranks of A and of B that can exchange pages."""
    return {
        (i * ranks.a + a, i * ranks.b + b) for i in range(ranks.groups) for a in range(ranks.a) for b in range(ranks.b)
    }


def of_heads(count: int, **more: object) -> str:
    """The name of a config of 4 layers with so many heads of 64 values."""
    config = {"num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": count, "head_dim": 64, **more}
    Path(f"heads{count}.json").write_text(json.dumps(config))
    return f"heads{count}.json"


SHARDED = """\
kvgen: 1
layout: sharded
doc: Heads over the ranks that attention has, and state heads over all.
config:
  kv_heads: {type: int, min: 1}
  state_heads: {type: int, min: 1}
choices:
  world: {type: int, min: 1, default: 1}
  copies: {type: int, min: 1, default: 1}
let:
  attention_ranks: max(1, world / copies)
  heads: shard(kv_heads, attention_ranks)
  rows: heads * 64
  states: shard(state_heads, world)
layers: {body: 2, sets: {even: layer % 2 == 0}}
spaces:
  token: {slots: tokens, page: 16}
formats:
  kv_row: {fields: {kv: "bf16[rows]"}, page: [[kv]]}
  state_row: {fields: {state: "f32[heads, states]", flag: "u8[4]"}, page: [[state, flag]]}
buffers:
  kv: {format: kv_row, space: token, layers: all}
  state: {format: state_row, space: token, layers: even}
"""


@pytest.mark.parametrize("heads", range(1, 13))
def test_ranks_that_have_the_same_heads(heads: int) -> None:
    """Every two numbers of ranks that give each rank as many heads, rank by rank."""
    counts = [ranks for ranks in range(1, 49) if heads % ranks == 0 or ranks % heads == 0]
    for a, b in product(counts, counts):
        if len(heads_of(heads, a, 0)) != len(heads_of(heads, b, 0)):
            continue  # pages of other bytes
        found = same_heads({("k", 1): (Part(heads, a),)}, {("k", 1): (Part(heads, b),)})
        assert found is not None
        wanted = {(r, s) for r, s in product(range(a), range(b)) if heads_of(heads, a, r) == heads_of(heads, b, s)}
        assert wanted == (pairs_of(found) if found.groups > 1 else set(product(range(a), range(b))))
        assert same_heads({("k", 1): (Part(heads, a),)}, {("k", 1): (Part(2 * heads, 2 * b),)}) is None


def test_ranks_that_have_the_same_of_two_things() -> None:
    """What is named has the same of both; 4 heads and 6 over 12 and 24 ranks are 3 and 2, or 6 and 4 ranks each."""
    for one, other in product((1, 2, 3, 4, 6, 12), repeat=2):
        for a, b in product((12, 24, 36), repeat=2):
            found = same_heads(
                {("k", 1): (Part(one, a),), ("s", 2): (Part(other, a),)},
                {("k", 1): (Part(one, b),), ("s", 2): (Part(other, b),)},
            )
            assert found is not None
            for r, s in pairs_of(found) if found.groups > 1 else product(range(a), range(b)):
                assert heads_of(one, a, r) == heads_of(one, b, s) and heads_of(other, a, r) == heads_of(other, b, s)


def test_repeated_heads() -> None:
    """4 heads: rank r of 4 has head r, and so have ranks 2r and 2r + 1 of 8."""
    config = of_heads(4)
    sides = (f"{GQA},config={config},tp_size=4", f"{GQA},config={config},tp_size=8")
    document = diff(*sides, "--format", "json").document
    [kv] = document["buffers"]
    assert not document["same"] and kv["same"] and kv["pages_interchangeable"] and kv["pages"] == []
    assert kv["interchangeable"] == [{"layers": [0, 1, 2, 3], "ranks": {"groups": 4, "a": 1, "b": 2}}]
    assert diff(*sides).out.endswith(
        "\n"
        "kv: the same in 4 layers: 0-3; its pages are interchangeable between rank i of A and ranks 2i to 2i\n"
        "    + 1 of B, i from 0 to 3\n"
    )
    [kv] = diff(*reversed(sides), "--format", "json").document["buffers"]
    assert kv["interchangeable"][0]["ranks"] == {"groups": 4, "a": 2, "b": 1}


@pytest.mark.parametrize("ranks", [(2, 1), (8, 8)])
def test_heads_of_another_model(ranks: tuple[int, int]) -> None:
    """As many heads a rank, 4 of 8 or all 4, and 1 of 8 or 1 of 4: the bytes are alike, the heads are not."""
    sides = (f"{GQA},config={of_heads(8)},tp_size={ranks[0]}", f"{GQA},config={of_heads(4)},tp_size={ranks[1]}")
    done = diff(*sides, "--format", "json")
    document = done.document
    [kv] = document["buffers"]
    assert done.status == 1 and not document["same"]
    assert document["a"]["fingerprint"] != document["b"]["fingerprint"]
    assert kv["pages_interchangeable"] is False and kv["interchangeable"] == [] and not kv["same"]
    [page] = kv["pages"]
    b = f"4 over {ranks[1]} rank{'s' * (ranks[1] > 1)}"
    assert page["layers"] == [0, 1, 2, 3]
    assert facts(page["fields"]) == {f"axis 1 of {name}": (f"8 over {ranks[0]} ranks", b) for name in "kv"}
    text = diff(*sides).out
    assert "\n  pages of 4 layers: 0-3 are not interchangeable: their heads are others\n" in text
    assert "\n  pages are compared as those of one model: whether both configs are of one is not known\n" in text


def test_one_head_is_the_same_on_all_ranks() -> None:
    config = of_heads(1)
    sides = (f"{GQA},config={config}", f"{GQA},config={config},tp_size=8")
    [kv] = diff(*sides, "--format", "json").document["buffers"]
    assert kv["interchangeable"] == [{"layers": [0, 1, 2, 3], "ranks": None}]
    assert diff(*sides).out.endswith("\nkv: the same in 4 layers: 0-3; its pages are interchangeable\n")


def test_the_same_ranks_on_both_sides() -> None:
    """Of all layers and of the stage from layer 2 on, 2 and 3 are common."""
    side = f"{GQA},config={of_heads(8)},tp_size=2"
    done = diff(f"{side},end_layer=4", f"{side},start_layer=2")
    assert done.out.endswith(
        "  pages are interchangeable between rank i of A and rank i of B, i from 0 to 1: the same bytes of\n"
        "      the same heads\n"
    )


def test_stages_without_a_layer_in_common() -> None:
    """A page of layer 0 or 1 is none of layer 2 or 3, whatever their bytes mean."""
    sides = (f"{GQA},config={of_heads(8)},end_layer=2", f"{GQA},config={of_heads(8)},start_layer=2")
    [kv] = diff(*sides, "--format", "json").document["buffers"]
    assert kv["layers"] == {"only_a": [0, 1], "only_b": [2, 3], "both": []}
    assert kv["pages_interchangeable"] is None and kv["interchangeable"] == kv["pages"] == []
    assert diff(*sides).out.endswith(
        "  no page can be exchanged, since no layer has it on both sides; their bytes mean the same\n"
    )


def test_parts_of_what_a_let_computes() -> None:
    """2 heads over 4 of 8 ranks against 8 of 16, and 8 states over 8 against 16: `kv` is told by the first alone.

    A page of `state` has both, and which rank of 8 is which of 4 is not known.
    """
    Path("sharded.yaml").write_text(SHARDED)
    Path("s.json").write_text('{"kv_heads": 2, "state_heads": 8}')
    sides = ("sharded.yaml,config=s.json,world=8,copies=2", "sharded.yaml,config=s.json,world=16,copies=2")
    found = buffers(diff(*sides, "--format", "json").document)
    assert found["kv"]["interchangeable"] == [{"layers": [0, 1], "ranks": {"groups": 2, "a": 2, "b": 4}}]
    assert found["state"]["pages_interchangeable"] is False
    assert facts(found["state"]["pages"][0]["fields"]) == {
        "axis 1 of state": ("2 over 4 ranks", "2 over 8 ranks"),
        "axis 2 of state": ("8 over 8 ranks", "8 over 16 ranks"),
    }
    sides = ("sharded.yaml,config=s.json,world=8", "sharded.yaml,config=s.json,world=16")
    found = buffers(diff(*sides, "--format", "json").document)
    assert found["state"]["interchangeable"] == [{"layers": [0], "ranks": {"groups": 8, "a": 1, "b": 2}}]
    sides = ("sharded.yaml,config=s.json,world=8,copies=2", "sharded.yaml,config=s.json,world=8,copies=2,end_layer=1")
    found = buffers(diff(*sides, "--format", "json").document)
    assert found["state"]["interchangeable"] == [{"layers": [0], "ranks": {"groups": 8, "a": 1, "b": 1}}]


def test_layers_with_heads_of_their_own() -> None:
    """Two heads where a layer is even and 8 where it is odd, over 8 ranks and 16: groups of 2 and of 8."""
    text = SHARDED.replace("shard(kv_heads, attention_ranks)", "shard(kv_heads if even else 8, world)")
    text = text.replace("  copies: {type: int, min: 1, default: 1}\n", "").replace(
        "  attention_ranks: max(1, world / copies)\n", ""
    )
    Path("layered.yaml").write_text(text)
    Path("s.json").write_text('{"kv_heads": 2, "state_heads": 1}')
    sides = ("layered.yaml,config=s.json,world=8", "layered.yaml,config=s.json,world=16")
    kv = buffers(diff(*sides, "--format", "json").document)["kv"]
    assert kv["interchangeable"] == [
        {"layers": [0], "ranks": {"groups": 2, "a": 4, "b": 8}},
        {"layers": [1], "ranks": {"groups": 8, "a": 1, "b": 2}},
    ]
    assert diff(*sides).out.split("\nkv")[1].split("\n\n")[0] == (
        ": the same in 2 layers: 0-1\n"
        "  pages of 1 layer: 0 are interchangeable between ranks 4i to 4i + 3 of A and ranks 8i to 8i + 7 of\n"
        "      B, i from 0 to 1: the same bytes of the same heads\n"
        "  pages of 1 layer: 1 are interchangeable between rank i of A and ranks 2i to 2i + 1 of B, i from 0\n"
        "      to 7: the same bytes of the same heads"
    )


def test_many_layers_with_heads_of_their_own() -> None:
    """The parts of 10,000 layers are looked up, not searched for: each shard once."""
    Path("many.yaml").write_text(
        SHARDED.replace("body: 2", "body: 10000").replace(
            "shard(state_heads, world)", "shard(state_heads + layer, world)"
        )
    )
    Path("s.json").write_text('{"kv_heads": 2, "state_heads": 8}')
    side = "many.yaml,config=s.json"
    assert diff(side, side).status == 0


# Specs


STATEMENTS = [
    ("layout: small", "layout: other_one", {"layout"}),
    ("from: num_hidden_layers", "from: n_layer", {"config.num_layers"}),
    ("full_attention: full", "full: full", {"config.kinds"}),
    ("default: nhd", "default: hnd", {"choices.order"}),
    ("num_layers < 100", "num_layers < 99", {"require num_layers < 100", "require num_layers < 99"}),
    ("body: num_layers", "body: num_layers + 1", {"layers.body"}),
    ("draft: 1", "draft: 2", {"layers.draft"}),
    ("layer % 2 == 0", "layer % 3 == 0", {"layers.sets.even"}),
    ("page: 16", "page: 16, reserve: 2", {"spaces.token"}),
    ("init: 7", "init: 8", {"formats.row of 16 slots: c", "formats.other of 16 slots: c"}),
    ("scale: s}", "scale: s, floor: 0.5}", {"formats.row of 16 slots: k", "formats.other of 16 slots: k"}),
    ("[[k, s, c]]", "[[k, c, s]]", {"formats.row of 16 slots: s", "formats.row of 16 slots: c"}),
    ("{align: 128}", "{align: 512}", {"formats.other of 16 slots", "formats.other of 16 slots: c"}),
    ("layers: even or draft", "layers: even", {"buffers.kv"}),
    ("layers: even or draft", "layers: even or draft, readers: all", {"buffers.kv"}),
    ("layers: even or draft", "layers: even or draft, align: 256", {"buffers.kv"}),
    ("layers: even or draft", "layers: even or draft, memory: host", {"buffers.kv"}),
    ("layers: even or draft", "layers: even or draft, split: order == 'hnd'", {"buffers.kv"}),
]


@pytest.mark.parametrize(("old", "new", "places"), STATEMENTS, ids=[new for _, new, _ in STATEMENTS])
def test_statement(old: str, new: str, places: set[str]) -> None:
    """Whatever the fingerprint of a spec counts has its place in the difference."""
    done = diff("small.yaml", changed(old, new), "--format", "json")
    assert (done.status, done.document["same"]) == (1, False)
    assert set(facts(done.document["spec"])) == places
    assert diff("changed.yaml", "changed.yaml").status == 0


@pytest.mark.parametrize(
    ("old", "new"), [("One buffer", "A buffer"), ("too many layers", "deep"), ("page: 16}", "page: 16}  #")]
)
def test_texts_are_no_statements(old: str, new: str) -> None:
    assert diff("small.yaml", changed(old, new), "--format", "json").document == {
        "same": True,
        **{side: diff("small.yaml", "small.yaml", "--format", "json").document[side] for side in "ab"},
        "spec": [],
        "problems": [],
    }


def test_two_versions_of_a_spec_for_a_model() -> None:
    """The rule that changed, and what it does: of 4 layers and the draft's, 0 and 2 keep rows, or 0 and 3."""
    done = diff("small.yaml,config=c.json", f"{changed('layer % 2 == 0', 'layer % 3 == 0')},config=c.json")
    assert (done.status, done.err) == (1, "")
    assert done.out.split("\n", 2)[2] == (
        "\n"
        "  bytes per token    144      144\n"
        "  fixed bytes      2,304    2,304\n"
        "  granule             16       16\n"
        "\n"
        "kv\n"
        "  only A has it in 1 layer: 2\n"
        "  only B has it in 1 layer: 3\n"
        "  both have it in 1 layer: 0\n"
        "  pages are interchangeable: their bytes mean the same\n"
        "\n"
        "spec\n"
        "  layers.sets.even:\n"
        "    A: layer < len(kinds) and kinds[layer] == 'full' when has(kinds); layer % 2 == 0 otherwise\n"
        "    B: layer < len(kinds) and kinds[layer] == 'full' when has(kinds); layer % 3 == 0 otherwise\n"
    )


def test_pages_that_differ_by_layer() -> None:
    """Rows as wide as a list says, one byte a value: layers 1 and 2 part."""
    text = (
        "kvgen: 1\nlayout: wide\ndoc: Rows.\nconfig: {x: {type: list, of: int}}\n"
        "let: {n: 'x[layer] if layer < len(x) else 3'}\nlayers: {body: 3}\nspaces: {token: {slots: tokens, page: 1}}\n"
        "formats: {row: {fields: {k: 'u8[n]'}, page: [[k]]}}\n"
        "buffers: {kv: {format: row, space: token, layers: all}}\n"
    )
    Path("wide.yaml").write_text(text)
    Path("a.json").write_text('{"x": [5, 6, 6]}')
    Path("b.json").write_text('{"x": [5, 7, 7]}')
    document = diff("wide.yaml,config=a.json", "wide.yaml,config=b.json", "--format", "json").document
    [kv] = document["buffers"]
    assert facts(kv["facts"])["page_bytes"] == ([5, 6, 6], [5, 7, 7])
    assert [(page["layers"], facts(page["fields"])["page_bytes"]) for page in kv["pages"]] == [([1, 2], (6, 7))]


def test_layers_that_read_others() -> None:
    """Of 4 layers 0 and 2 own rows; that 1 and 3 read them costs nothing, and is told."""
    readers = changed("even or draft}", "even or draft, readers: all}")
    done = diff("small.yaml,config=c.json", f"{readers},config=c.json")
    assert (done.status, done.err) == (1, "")
    assert done.out.split("\n", 2)[2] == (
        "\n"
        "  bytes per token    144      144\n"
        "  fixed bytes      2,304    2,304\n"
        "  granule             16       16\n"
        "\n"
        "kv\n"
        "  both have it in 2 layers: 0, 2\n"
        "  readers: nothing -> 1 reads 0; 3 reads 2\n"
        "  pages are interchangeable: their bytes mean the same\n"
        "\n"
        "spec\n"
        "  buffers.kv:\n"
        "    A: row of 16 slots when order == 'nhd'; other of 16 slots otherwise, in token, layers even or\n"
        "       draft\n"
        "    B: row of 16 slots when order == 'nhd'; other of 16 slots otherwise, in token, layers even or\n"
        "       draft, readers all\n"
    )


def test_standard_input_on_both_sides() -> None:
    """Behind `--`, since a side that begins with `-,` looks like an option."""
    out = io.StringIO()
    words = ["diff", "--format", "json", "--", "-,config=c.json", "-,config=c.json,order=hnd"]
    assert main(words, io.BytesIO(SMALL.encode()), out, io.StringIO()) == 1
    assert facts(json.loads(out.getvalue())["choices"]) == {"order": ("nhd", "hnd")}


# Usage


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        (["small.yaml,fp8", "small.yaml"], "small.yaml,fp8: expected K=V, found `fp8`"),
        (["small.yaml,config=c.json", "small.yaml"], "small.yaml: has no config, and the other side has one"),
        (["small.yaml", "small.yaml,config=c.json"], "small.yaml: has no config, and the other side has one"),
        (["small.yaml", "small.yaml,order=hnd"], "choices need a config"),
        (["small.yaml", "small.yaml", "--memory", "1GiB"], "--memory needs a config"),
        (["small.yaml,config=c.json", "small.yaml,config=c.json", "--memory", "1 gig"], "`1 gig` is not a size"),
        (["small.yaml,config=c.json,order=hdn"] * 2, "order=hdn: `hdn` is not among the values of `order`: nhd, hnd"),
        (["small.yaml,config=c.json,odr=hdn"] * 2, "odr=hdn: unknown choice `odr`"),
        (["small.yaml,config=c.json,end_layer=x"] * 2, "end_layer: expected an integer of at least 0, found `x`"),
        (
            ["small.yaml,config=c.json,end_layer=9"] * 2,
            "start_layer 0 and end_layer 9 are not in order within 5 layers",
        ),
        (["small.yaml"], "the following arguments are required: SIDE"),
    ],
)
def test_usage(sides: list[str], message: str) -> None:
    done = diff(*sides, "--format", "json")
    assert (done.status, [problem["message"] for problem in done.document["problems"]]) == (2, [message])


def test_what_is_wrong_with_a_side() -> None:
    Path("bad.json").write_text("{}")
    done = diff("small.yaml,config=c.json", "small.yaml,config=bad.json")
    assert (done.status, done.out) == (1, "")
    assert done.err == "error[KV401]: num_hidden_layers is missing from the config\n --> bad.json\n"
    assert diff("small.yaml", "nowhere.yaml").status == 2


def test_text_fits_100_columns() -> None:
    for sides in (
        (GLM_DSA, ROOT / "specs" / "mla.yaml"),
        (GLM_52, f"config={CONFIGS / 'deepseek-v3.json'}"),
        (ROOT / "tests" / "language" / "dsv4.yaml", ROOT / "tests" / "language" / "gemma3n.yaml"),
    ):
        done = diff(*sides)
        assert (done.status, done.err) == (1, "")
        assert max(map(len, done.out.splitlines())) <= 100
        assert not any(line.endswith(" ") for line in done.out.splitlines())


# What no byte of a page tells


def test_a_buffer_that_moves_to_the_host() -> None:
    """The same rows in the same layers, elsewhere."""
    host = changed("layers: even or draft}", "layers: even or draft, memory: host}")
    [kv] = diff("small.yaml,config=c.json", f"{host},config=c.json", "--format", "json").document["buffers"]
    assert facts(kv["facts"]) == {"memory": ("device", "host")}
    assert not kv["same"] and kv["pages_interchangeable"]
    assert "\n  memory: device -> host\n" in diff("small.yaml,config=c.json", f"{host},config=c.json").out


def test_pages_whose_planes_are_tensors() -> None:
    """Of `other` 16 slots: 64 bytes of k, then s from byte 64 on, and c from 128."""
    split = changed("layers: even or draft}", "layers: even or draft, split: order == 'hnd'}")
    sides = ("small.yaml,config=c.json,order=hnd", f"{split},config=c.json,order=hnd")
    [kv] = diff(*sides, "--format", "json").document["buffers"]
    assert kv["pages_interchangeable"] is False
    [page] = kv["pages"]
    assert facts(page["fields"])["split"] == (False, True)
    assert "\n    split: false -> true\n" in diff(*sides).out


def test_a_field_that_is_left_to_its_default() -> None:
    text = SMALL.replace("config:\n", "config:\n  width: {type: int, default: 64}\n").replace("let: {width: 64}\n", "")
    Path("defaults.yaml").write_text(text)
    Path("wide.json").write_text('{"num_hidden_layers": 4, "width": 96}')
    Path("said.json").write_text('{"num_hidden_layers": 4, "width": 64}')
    sides = ("defaults.yaml,config=c.json", "defaults.yaml,config=wide.json")
    assert facts(diff(*sides, "--format", "json").document["config"]) == {"width": (64, 96)}
    assert "\nconfig\n  width: 64 -> 96\n" in diff(*sides).out
    assert facts(diff(*sides[::-1], "--format", "json").document["config"]) == {"width": (96, 64)}
    done = diff("defaults.yaml,config=c.json", "defaults.yaml,config=said.json", "--format", "json")
    assert (done.status, done.document["config"]) == (0, [])


def test_a_space_that_no_buffer_lies_in() -> None:
    """Tokens are counted in its pages, 16 at a time or 32: that makes another layout, by the spec or by the config."""
    half = "chunk}\n  half: {of: token, slots: tokens / 2, page: 8}"
    text = SMALL.replace("page: 16}", f"page: {half}").replace("space: token, layers", "space: half, layers")
    text = text.replace("config:\n", "config:\n  chunk: {type: int, min: 1, default: 16}\n")
    Path("half.yaml").write_text(text)
    Path("other.yaml").write_text(text.replace("default: 16", "default: 32"))
    Path("wide.json").write_text('{"num_hidden_layers": 4, "chunk": 32}')
    pages = [f"1 slot per token, pages of {page} slots, 1 reserved" for page in (16, 32)]
    for other in ("half.yaml,config=wide.json", "other.yaml,config=c.json"):
        done = diff("half.yaml,config=c.json", other, "--format", "json")
        assert (done.status, done.document["same"]) == (1, False)
        assert facts(done.document["spaces"]) == {"token": (pages[0], pages[1])}
        assert facts(done.document["numbers"])["granule"] == (16, 32)
        assert all(buffer["same"] for buffer in done.document["buffers"])
