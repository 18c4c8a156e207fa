"""`kvgen specs`, and budgets of a config without a spec."""

import json
import shutil
from pathlib import Path

import pytest
from support.cli import kvgen
from test_configs import default_price

import kvgen.shipped as kvgen_shipped

ROOT = Path(__file__).parent.parent
SPECS = ROOT / "specs"
CONFIGS = ROOT / "tests" / "data" / "configs"
OWNERS = {  # config -> the layout that is for it
    "deepseek-v3": "mla",
    "deepseek-v3.2": "glm_dsa",
    "gemma-3-27b": "hybrid_swa",
    "gemma-3n-e4b": "shared_kv",
    "gemma-4-31b": "hybrid_swa",
    "glm-5": "glm_dsa",
    "glm-5.2": "glm_dsa",
    "gpt-oss-120b": "hybrid_swa",
    "hunyuan-a13b": "gqa",
    "kimi-k2-instruct": "mla",
    "kimi-k2.5": "mla",
    "llama-3.1-70b": "gqa",
    "llama-3.1-8b": "gqa",
    "llama-4-scout": "hybrid_swa",
    "mimo-v2-flash": "hybrid_swa",
    "minimax-m2.5": "gqa",
    "minimax-m2.7": "gqa",
    "mistral-7b-instruct-v0.2": "gqa",
    "mistral-large-2407": "gqa",
    "mixtral-8x7b": "gqa",
    "qwen3-235b-a22b": "gqa",
    "qwen3-30b-a3b": "gqa",
    "qwen3-8b": "gqa",
    "step-3.7-flash": "hybrid_swa",
}
LATENT = "kv_lora_rank: a latent per token, which the layouts mla and glm_dsa have"
COMPRESSED = "compress_ratios: layers keep a latent for several tokens"
STATE = "mamba_d_state, ssm_state_size, linear_num_value_heads, lru_width or conv_L_cache: layers keep state"
LAYERS_OF_STATE = "layer_types: layers that keep state instead of keys and values, or beside them"
KDA = "linear_attn_config: layers of linear attention have state, no latent rows"
REFUSED: dict[str, dict[str, list[str]]] = {  # config -> what layouts like its model's say against it
    "deepseek-v4-flash": {"glm_dsa": [COMPRESSED], "gqa": [COMPRESSED], "hybrid_swa": [COMPRESSED]},
    "deepseek-v4-pro": {"glm_dsa": [COMPRESSED], "gqa": [COMPRESSED], "hybrid_swa": [COMPRESSED]},
    "glm-5.3-flash": {
        "glm_dsa": [
            "qk_rope_head_dim: this layout is for 64, found 0",
            "layer_types: layers without an indexer",
            "pooled index keys (index_kpool above 1) are not supported by this layout",
        ],
        "mla": ["layer_types: layers that keep something else than a latent row of each token"],
    },
    "kimi-k3": {"mla": [KDA], "gqa": [LATENT], "shared_kv": [LATENT]},
    "kimi-linear-48b-a3b": {"mla": [KDA], "gqa": [LATENT], "shared_kv": [LATENT]},
    "minimax-m3": {"gqa": ["sparse_attention_config: sparse attention has index keys too"]},
    "qwen3-next-80b-a3b": {
        "gqa": [
            STATE,
            "full_attention_interval: layers of linear attention keep state instead of keys and values",
        ],
        "hybrid_swa": [STATE],
    },
    "qwen3.5-35b-a3b": {"gqa": [STATE, LAYERS_OF_STATE], "hybrid_swa": [STATE, LAYERS_OF_STATE]},
    "qwen3.5-397b-a17b": {"gqa": [STATE, LAYERS_OF_STATE], "shared_kv": ["layer_types: layers that keep state"]},
}


def test_every_config_has_its_layout_or_reasons() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(OWNERS) ^ set(REFUSED)


@pytest.mark.parametrize("config", OWNERS)
def test_budget_picks_the_layout(config: str) -> None:
    """As with the spec named; the other layouts say why they are not for it."""
    file, own = CONFIGS / f"{config}.json", OWNERS[config]
    picked = kvgen("budget", "--config", file, "--tokens", 6400, "--format", "json")
    named = kvgen("budget", ROOT / "specs" / f"{own}.yaml", "--config", file, "--tokens", 6400, "--format", "json")
    assert picked == named and picked[0] == 0 and json.loads(picked[1])["layout"] == own
    assert json.loads(picked[1])["bytes_per_token"] == default_price(config)
    status, out, err = kvgen("specs", "--config", file, "--format", "json")
    assert (status, err) == (0, "")
    verdicts = {entry["layout"]: (entry["accepted"], entry["reasons"]) for entry in json.loads(out)["specs"]}
    assert [name for name, (accepted, _) in verdicts.items() if accepted] == [own]
    assert all(accepted or reasons for accepted, reasons in verdicts.values())


@pytest.mark.parametrize("config", REFUSED)
def test_a_model_that_no_layout_is_for(config: str) -> None:
    """What makes it so is said, whatever else the config lacks."""
    file = CONFIGS / f"{config}.json"
    status, out, err = kvgen("specs", "--config", file, "--format", "json")
    assert (status, err) == (0, "")
    verdicts = {entry["layout"]: (entry["accepted"], entry["reasons"]) for entry in json.loads(out)["specs"]}
    for accepted, reasons in verdicts.values():
        assert not accepted and reasons
    for layout, expected in REFUSED[config].items():
        assert [reason for reason in verdicts[layout][1] if reason in expected] == expected
    status, out, err = kvgen("budget", "--config", file, "--tokens", 0)
    assert (status, out) == (1, "")
    assert err.startswith(f"error[KV406]: no shipped layout is for this config\n --> {file}\n")
    for layout, (_, reasons) in verdicts.items():
        for reason in reasons:
            assert f"  = note: {layout}: {reason}\n" in err


def test_specs_as_text() -> None:
    status, out, err = kvgen("specs")
    assert (status, err) == (0, "")
    assert (
        "mla\n"
        "  Multi-head latent attention (DeepSeek-V3, Kimi-K2), one latent row per token in every layer\n"
        f"  file     {SPECS}/mla.yaml\n"
        "  needs    num_hidden_layers, kv_lora_rank = 512, qk_rope_head_dim = 64\n"
        "  reads    num_nextn_predict_layers, index_topk, linear_attn_config.kda_layers or "
        "linear_attn_config.full_attn_layers, layer_types, layer_group_size\n"
        "  choices  kv_format (bf16 | fp8_scaled | fp8_raw | nvfp4), page_size\n"
    ) in out
    status, out, err = kvgen("specs", "--config", CONFIGS / "glm-5.json")
    assert (status, err) == (0, "")
    assert out == (
        "glm_dsa: yes\n"
        "  DeepSeek sparse attention (DeepSeek-V3.2, GLM-5.x), an MLA latent and indexer keys\n"
        f"  file     {SPECS}/glm_dsa.yaml\n"
        "gqa: no\n"
        "  Keys and values per head in every layer (MHA, GQA, MQA), heads divided or replicated over ranks\n"
        f"  file     {SPECS}/gqa.yaml\n"
        "  - kv_lora_rank: a latent per token, which the layouts mla and glm_dsa have\n"
        "hybrid_swa: no\n"
        "  Keys and values per head, layers with a window apart (gpt-oss, Gemma 3 and 4, MiMo-V2, Llama 4)\n"
        f"  file     {SPECS}/hybrid_swa.yaml\n"
        "  - sliding_window or attention_chunk_size is missing from the config\n"
        "  - kv_lora_rank: a latent per token, which the layouts mla and glm_dsa have\n"
        "mla: no\n"
        "  Multi-head latent attention (DeepSeek-V3, Kimi-K2), one latent row per token in every layer\n"
        f"  file     {SPECS}/mla.yaml\n"
        "  - index_topk: sparse attention has indexer keys too, which the layout glm_dsa has\n"
        "shared_kv: no\n"
        "  Keys and values per head, where layers read those of a layer before them (Gemma 3n and 4, cross-layer "
        "attention)\n"
        f"  file     {SPECS}/shared_kv.yaml\n"
        "  - kv_lora_rank: a latent per token, which the layouts mla and glm_dsa have\n"
        "  - neither num_kv_shared_layers nor cla_share_factor, so no layer reads what another has\n"
    )


def test_choices_decide_too() -> None:
    """A choice that a layout does not have is a reason against it."""
    file = CONFIGS / "kimi-k2.5.json"
    assert kvgen("budget", "--config", file, "--tokens", 64, "--set", "page_size=16")[0] == 0
    status, _, err = kvgen("budget", "--config", file, "--tokens", 64, "--set", "elide_shared=false")
    assert status == 2 and err.startswith("error[KV410]: --set elide_shared=false: unknown choice `elide_shared`\n")


def test_the_file_that_is_listed_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any folder, as the help of KV406 has it."""
    monkeypatch.chdir(tmp_path)
    for entry in json.loads(kvgen("specs", "--format", "json")[1])["specs"]:
        assert kvgen("check", entry["file"]) == (0, "", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{bad", "config.json is no JSON: "),
        (b"", "config.json is no JSON: "),
        ("{}".encode("utf-16"), "config.json is no JSON: "),
        (b"[]", "config.json holds no JSON object but []"),
    ],
)
@pytest.mark.parametrize("command", [["specs"], ["budget", "--tokens", "0"]])
def test_a_config_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], text: bytes, message: str
) -> None:
    """No layout has a say about it."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_bytes(text)
    status, out, err = kvgen(*command, "--config", "config.json")
    assert (status, out) == (1, "")
    assert err.startswith(f"error[KV401]: {message}") and err.endswith("\n --> config.json\n") and "note" not in err


V3 = ["--config", CONFIGS / "deepseek-v3.json"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "nowhere.json"], "[KV411]: cannot read `nowhere.json`: no such file or directory\n"),
        ([*V3, "--set", "odd"], "[KV410]: --set odd: expected K=V\n"),
        ([*V3, "--set", "role=both", "--set", "role=both"], "[KV410]: --set role=both: `role` is set twice\n"),
        (
            [*V3, "--set", "zzz=1"],
            "[KV410]: --set zzz=1: unknown choice `zzz`\n  = help: the choices are "
            "kv_format, host_to_device_ratio, elide_shared, kv_order, page_size, tp_size, split_kv, swa_pool, "
            "swa_ratio, step_tokens, role, start_layer, end_layer\n",
        ),
        (
            [*V3, "--set", "page_sise=1"],
            "[KV410]: --set page_sise=1: unknown choice `page_sise`\n  = help: did you mean `page_size`?\n",
        ),
        (
            [*V3, "--set", "index_topk=1"],
            "[KV410]: --set index_topk=1: `index_topk` is a fact of the model, read from its config\n",
        ),
        ([*V3, "--set", "page_size=x"], "[KV410]: --set page_size=x: expected an integer\n"),
        (
            [*V3, "--set", "kv_format=fp16"],
            "[KV410]: --set kv_format=fp16: "
            "`fp16` is not among the values of `kv_format`: bf16, fp8_scaled, fp8_raw, nvfp4\n",
        ),
        (
            ["--config", CONFIGS / "minimax-m3.json", "--set", "kv_format=fp16"],
            "[KV410]: no shipped layout takes these choices\n"
            "  = note: glm_dsa: --set kv_format=fp16: "
            "`fp16` is not among the values of `kv_format`: bf16, fp8_scaled, fp8_raw\n"
            "  = note: gqa: ",
        ),
        (
            [*V3, "--set", "start_layer=100"],
            "[KV410]: --set: start_layer 100 and end_layer 62 are not in order within 62 layers\n",
        ),
    ],
)
@pytest.mark.parametrize("command", [["specs"], ["budget", "--tokens", "0"]])
def test_what_is_wrong_with_the_command(command: list[object], words: list[object], message: str) -> None:
    """Said once, and not held against the model."""
    status, out, err = kvgen(*command, *words)
    assert (status, out) == (2, "") and err.startswith(f"error{message}") and err.count("error") == 1


LLAMA = CONFIGS / "llama-3.1-70b.json"


@pytest.mark.parametrize(
    ("config", "settings", "status", "message"),
    [
        (
            LLAMA,
            ["tp_size=3"],
            1,
            f"{LLAMA}: error[KV401]: 8 heads cannot be divided over 3 ranks, nor repeated on them",
        ),
        (LLAMA, ["kv_format=mxfp8", "kv_order=hnd"], 1, f"{LLAMA}: error[KV401]: mxfp8 has NHD rows alone"),
        (
            LLAMA,
            ["kv_format=fp8_raw"],
            2,
            "error[KV410]: --set kv_format=fp8_raw: `fp8_raw` is not among the values of `kv_format`: "
            "bf16, fp8, int8, mxfp8, nvfp4, nvfp4_swizzled",
        ),
        (LLAMA, ["swa_pool=requests"], 2, "error[KV410]: --set swa_pool=requests: unknown choice `swa_pool`"),
        (V3[1], ["tp_size=2"], 2, "error[KV410]: --set tp_size=2: unknown choice `tp_size`"),
    ],
)
def test_a_choice_that_the_layout_of_the_config_does_not_take(
    config: Path, settings: list[str], status: int, message: str
) -> None:
    """Said as if its spec had been named: with other choices the config has one layout."""
    words = [word for setting in settings for word in ("--set", setting)]
    rest = ["--config", config, "--tokens", 0, *words, "--format", "concise"]
    own = "mla" if config == V3[1] else "gqa"
    expected = (status, "", f"{message}\n")
    assert kvgen("budget", *rest) == kvgen("budget", ROOT / "specs" / f"{own}.yaml", *rest) == expected


@pytest.mark.parametrize("layout", ["mla", "glm_dsa"])
def test_a_latent_is_not_divided_over_ranks(layout: str) -> None:
    file = CONFIGS / {"mla": "deepseek-v3.json", "glm_dsa": "glm-5.json"}[layout]
    assert kvgen("budget", "--config", file, "--tokens", 0, "--set", "tp_size=2") == (
        2,
        "",
        "error[KV410]: --set tp_size=2: unknown choice `tp_size`\n"
        "  = help: the layout divides nothing over ranks: each of them keeps all that is priced\n",
    )


def test_choices_without_a_config() -> None:
    assert kvgen("specs", "--set", "kv_format=bf16") == (2, "", "error[KV410]: --set needs --config\n")


def test_a_config_of_two_layouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = shutil.copytree(ROOT / "specs", tmp_path / "specs")
    (specs / "zmla.yaml").write_text((specs / "mla.yaml").read_text().replace("layout: mla", "layout: zmla"))
    files = tuple(str(path) for path in sorted(specs.glob("*.yaml")))
    monkeypatch.setattr(kvgen_shipped, "shipped_specs", lambda: files)
    file = CONFIGS / "deepseek-v3.json"
    assert kvgen("budget", "--config", file, "--tokens", 0) == (
        1,
        "",
        "error[KV406]: more than one layout is for this config: mla, zmla\n"
        f" --> {file}\n"
        "  = help: name a spec; `kvgen specs` lists the shipped ones\n",
    )
