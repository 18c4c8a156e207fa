"""Fields of a config that say something about a cache and that a layout does not know: KV407."""

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from test_shipped import OWNERS

from kvgen.cli import main
from kvgen.fields import unknown_fields

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "tests" / "data" / "configs"
MLA = ROOT / "specs" / "mla.yaml"
HELP = "read it under `config` of the spec, or say under `ignores` why it does not matter"
DEEPSEEK_V3 = json.loads((CONFIGS / "deepseek-v3.json").read_text())

SMALL = """\
kvgen: 1
layout: small
doc: One row.
config:
  num_layers: {type: int, from: num_hidden_layers}
  windows: {type: list, of: int, optional: true, from: linear_attn_config.windows}
  window: {type: int, from: [sliding_window, 2 * window_size], default: 0}
layers: {body: num_layers}
spaces: {token: {slots: tokens, page: 16}}
formats: {row: {fields: {k: "bf16[64]"}, page: [[k]]}}
buffers:
  kv: {format: row, space: token, layers: layer < window or (has(windows) and layer in windows)}
"""


def kvgen(*words: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    status = main([str(word) for word in words], io.BytesIO(), out, err)
    return status, out.getvalue(), err.getvalue()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(**fields: object) -> str:
    Path("c.json").write_text(json.dumps(fields))
    return "c.json"


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"sliding_window": 4096}, ["sliding_window"]),
        ({"sliding_window": None, "attention_chunk_size": 0, "layer_types": [], "head_dim": False}, []),
        ({"head_dim": 128, "text_config": {"head_dim": 0}}, []),
        ({"head_dim": 0, "text_config": {"head_dim": 128}}, ["head_dim"]),
        ({"head_dim": 128, "text_config": {"head_dim": None}}, ["head_dim"]),
        ({"vision_config": {"head_dim": 128}}, []),
        ({"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 36}, []),
        ({"use_sliding_window": True, "sliding_window": 4096}, ["sliding_window"]),
        ({"sliding_window": 4096, "max_window_layers": 36}, ["sliding_window", "max_window_layers"]),
        ({"sliding_window": None, "max_window_layers": 36}, []),
        ({"use_mtp": False, "num_mtp_modules": 3}, []),
        (
            {"use_mtp": True, "num_mtp_modules": 3, "mtp_transformer_layers": 1},
            ["num_mtp_modules", "mtp_transformer_layers"],
        ),
        ({"layer_types": ["full_attention"] * 4}, []),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types"]),
        ({"num_kv_shared_layers": 15, "compress_ratios": [0, 4]}, ["num_kv_shared_layers", "compress_ratios"]),
        ({"linear_attn_config": {"kda_layers": [1]}}, ["linear_attn_config"]),
        (
            {
                "num_attention_groups": 8,
                "layer_group_size": 5,
                "block_types": ["recurrent"],
                "per_layer_config": {"5": {}},
            },
            ["num_attention_groups", "layer_group_size", "block_types", "per_layer_config"],
        ),
        (
            {"mtp_layer_types": ["sliding_attention"], "mtp_num_hidden_layers": 1},
            ["mtp_layer_types", "mtp_num_hidden_layers"],
        ),
        ({"kv_source_layer_ids": [2, 8, 14, 20]}, ["kv_source_layer_ids"]),
        ({"cross_attention_layers": [3], "is_encoder_decoder": True}, ["cross_attention_layers", "is_encoder_decoder"]),
        (
            {"swa_num_key_value_heads": 8, "swa_rope_theta": 1e4, "compress_rope_theta": 1e4},
            ["swa_num_key_value_heads"],
        ),
        (
            {"block_configs": [{}], "num_key_value_heads_per_layer": [4], "window_per_layer": [0, 4], "n_head_kv": 8},
            ["block_configs", "num_key_value_heads_per_layer", "window_per_layer", "n_head_kv"],
        ),
        (
            {"num_kv_heads": 8, "multi_query": True, "intermediate_size_per_layer": [64]},
            ["num_kv_heads", "multi_query"],
        ),
        ({"rope_theta": 1e6, "intermediate_size": 1536, "qkv_bias": True, "mlp_layer_types": ["dense"]}, []),
        ({"chunk_size_feed_forward": 8, "ignore_index": -100, "decoder_sparse_step": 1, "q_lora_rank": 1536}, []),
        (
            {"num_attention_heads": 32, "hidden_size": 4096, "moe_layer_freq": [0, 1], "quantization_config": {"a": 1}},
            [],
        ),
    ],
)
def test_fields_that_say_something(fields: dict[str, Any], names: list[str]) -> None:
    assert list(unknown_fields(fields, ())) == names


def test_a_switch_that_the_layout_does_not_look_at() -> None:
    """A window that is off, in a layout that reads its size as if it were on."""
    fields = {"use_sliding_window": False, "sliding_window": 4096}
    assert unknown_fields(fields, {"sliding_window"}) == {"use_sliding_window": False}
    assert unknown_fields(fields, {"sliding_window", "use_sliding_window"}) == {}
    assert unknown_fields(fields | {"use_sliding_window": True}, {"sliding_window"}) == {}


@pytest.mark.parametrize("config", OWNERS)
def test_shipped_layouts_know_their_configs(config: str) -> None:
    file = CONFIGS / f"{config}.json"
    status, out, err = kvgen("budget", "--config", file, "--tokens", 0, "--format", "json")
    assert (status, err, json.loads(out)["problems"]) == (0, "", [])
    assert kvgen("budget", "--config", file, "--tokens", 0)[2] == ""


def test_a_field_beside() -> None:
    """Said once for each field, with its value, and with what to do."""
    file = config(**DEEPSEEK_V3, sliding_window=4096)
    message = "`sliding_window` is 4096, and the layout mla does not know the field"
    warning = f"warning[KV407]: {message}\n --> c.json\n  = help: {HELP}\n"
    for command in (["budget", "--config", file, "--tokens", 0], ["explain", MLA, "--config", file]):
        status, out, err = kvgen(*command)
        assert (status, err) == (0, warning) and "70,272" in out
        status, out, err = kvgen(*command, "--format", "json")
        document = json.loads(out)
        assert (status, err, document["bytes_per_token"]) == (0, "", 70_272)
        [problem] = document["problems"]
        assert (problem["code"], problem["severity"], problem["help"]) == ("KV407", "warning", HELP)
        assert problem["message"] == message
        assert problem["span"] == {"file": "c.json"}
    concise = kvgen("budget", MLA, "--config", file, "--tokens", 0, "--format", "concise")[2]
    assert concise == f"c.json: warning[KV407]: {message}\n"


def test_a_comparison_says_it_of_either_side() -> None:
    """Once, where both sides have one config."""
    file = config(**DEEPSEEK_V3, sliding_window=4096)
    message = "`sliding_window` is 4096, and the layout mla does not know the field"
    for sides in ([f"{MLA},config={file}"] * 2, [f"{MLA},config={file}", f"config={file}"]):
        status, out, err = kvgen("diff", *sides)
        assert (status, err) == (0, f"warning[KV407]: {message}\n --> c.json\n  = help: {HELP}\n")
        assert "\nthe same layout\n" in out
        document = json.loads(kvgen("diff", *sides, "--format", "json")[1])
        assert [problem["message"] for problem in document["problems"]] == [message]


def test_specs_say_it_of_accepted_layouts() -> None:
    file = config(**DEEPSEEK_V3, sliding_window=4096)
    status, out, err = kvgen("specs", "--config", file)
    assert (status, err) == (0, "")
    mla = out[out.index("\nmla: yes\n") : out.index("\nshared_kv: no\n") + 1]
    assert mla.endswith("  - warning: `sliding_window` is 4096, and the layout mla does not know the field\n")
    assert out.count("warning") == 1
    entries = {
        entry["layout"]: entry for entry in json.loads(kvgen("specs", "--config", file, "--format", "json")[1])["specs"]
    }
    assert entries["glm_dsa"]["warnings"] == [] and not entries["glm_dsa"]["accepted"]
    assert entries["mla"]["warnings"] == ["`sliding_window` is 4096, and the layout mla does not know the field"]
    assert "warnings" not in json.loads(kvgen("specs", "--format", "json")[1])["specs"][0]


def test_memory_and_fields_in_one_document() -> None:
    file = config(**DEEPSEEK_V3, sliding_window=4096)
    document = json.loads(kvgen("budget", MLA, "--config", file, "--memory", "1KiB", "--format", "json")[1])
    assert [problem["code"] for problem in document["problems"]] == ["KV404", "KV407"]


def test_sources_are_known_wherever_they_stand() -> None:
    """A fallback, a part of a computation, the first part of a path; but no field that is like them."""
    Path("small.yaml").write_text(SMALL)
    file = config(
        num_hidden_layers=2, sliding_window=1, window_size=1, window_sizes=[1, 2], linear_attn_config={"windows": [1]}
    )
    document = json.loads(kvgen("budget", "small.yaml", "--config", file, "--tokens", 0, "--format", "json")[1])
    assert [problem["message"].split()[0] for problem in document["problems"]] == ["`window_sizes`"]


def test_ignored_fields_are_known_and_change_nothing() -> None:
    Path("small.yaml").write_text(SMALL)
    ignores = "ignores: {head_dim: rows are 64 values whatever heads are}\n"
    Path("ignores.yaml").write_text(SMALL.replace("layers: {body", f"{ignores}layers: {{body"))
    file = config(num_hidden_layers=2, head_dim=128)
    documents = [
        json.loads(kvgen("budget", spec, "--config", file, "--tokens", 0, "--format", "json")[1])
        for spec in ("small.yaml", "ignores.yaml")
    ]
    assert [len(document.pop("problems")) for document in documents] == [1, 0]
    assert documents[0] == documents[1]
    modules = [kvgen("build", spec, "-o", "-")[1] for spec in ("small.yaml", "ignores.yaml")]
    assert modules[0].replace("small.yaml", "ignores.yaml") == modules[1]
    assert kvgen("diff", "small.yaml", "ignores.yaml")[0] == 0


def test_long_values_are_cut_and_odd_names_shown() -> None:
    odd = 'kv_\x1b"' + "x" * 60
    values = {"hybrid_kinds": [{}] * 61, "linear_attn": {"kda": [1]}, "kv_kind": "a" * 60, odd: True}
    file = config(**DEEPSEEK_V3, **values)
    status, _, err = kvgen("budget", MLA, "--config", file, "--tokens", 0, "--format", "concise")
    assert status == 0 and "`hybrid_kinds` is [61 values], and" in err and "`linear_attn` is {1 field}, and" in err
    assert f'`kv_kind` is "{"a" * 36}..., and' in err
    assert "`kv_\\x1b" in err and "x" * 40 not in err and "\x1b" not in err


def test_a_config_from_a_pipe() -> None:
    """One that a shell opened can be read once; what a layout does not know of it goes unsaid."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe:
        json.dump(DEEPSEEK_V3 | {"sliding_window": 4096}, pipe)
    status, out, err = kvgen("budget", MLA, "--config", f"/dev/fd/{reading}", "--tokens", 0)
    os.close(reading)
    assert (status, err) == (0, "") and "70,272" in out
