"""`kvgen specs`, and budgets of a config without a spec."""

import io
import json
import shutil
from pathlib import Path

import pytest

import kvgen.shipped as kvgen_shipped
from kvgen.cli import main

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "tests" / "data" / "configs"
OWNERS = {  # config -> the layout that is for it
    "deepseek-v3": "mla",
    "deepseek-v3.2": "glm_dsa",
    "gemma-3-27b": "hybrid_swa",
    "gemma-4-31b": "hybrid_swa",
    "glm-5": "glm_dsa",
    "glm-5.2": "glm_dsa",
    "gpt-oss-120b": "hybrid_swa",
    "kimi-k2.5": "mla",
    "llama-3.1-70b": "gqa",
    "llama-3.1-8b": "gqa",
    "llama-4-scout": "hybrid_swa",
    "mimo-v2-flash": "hybrid_swa",
    "minimax-m2.5": "gqa",
    "mixtral-8x7b": "gqa",
    "qwen3-30b-a3b": "gqa",
    "qwen3-8b": "gqa",
    "step-3.7-flash": "hybrid_swa",
}
NO_LAYOUT = {"gemma-3n-e4b"}  # whose last layers keep nothing of their own


def kvgen(*words: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    status = main([str(word) for word in words], io.BytesIO(), out, err)
    return status, out.getvalue(), err.getvalue()


def test_every_config_has_its_layout() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(OWNERS) | NO_LAYOUT


@pytest.mark.parametrize("config", NO_LAYOUT)
def test_configs_without_a_layout(config: str) -> None:
    entries = json.loads(kvgen("specs", "--config", CONFIGS / f"{config}.json", "--format", "json")[1])["specs"]
    assert entries and all(entry["reasons"] and not entry["accepted"] for entry in entries)


@pytest.mark.parametrize("config", OWNERS)
def test_budget_picks_the_layout(config: str) -> None:
    """As with the spec named; the other layouts say why they are not for it."""
    file, own = CONFIGS / f"{config}.json", OWNERS[config]
    picked = kvgen("budget", "--config", file, "--tokens", 6400, "--format", "json")
    named = kvgen("budget", ROOT / "specs" / f"{own}.yaml", "--config", file, "--tokens", 6400, "--format", "json")
    assert picked == named and picked[0] == 0 and json.loads(picked[1])["layout"] == own
    status, out, err = kvgen("specs", "--config", file, "--format", "json")
    assert (status, err) == (0, "")
    verdicts = {entry["layout"]: (entry["accepted"], entry["reasons"]) for entry in json.loads(out)["specs"]}
    assert [name for name, (accepted, _) in verdicts.items() if accepted] == [own]
    assert all(accepted or reasons for accepted, reasons in verdicts.values())


def test_specs_as_text() -> None:
    status, out, err = kvgen("specs")
    assert (status, err) == (0, "")
    assert out.endswith(
        "mla\n"
        "  Multi-head latent attention (DeepSeek-V3, Kimi-K2), one latent row per token in every layer\n"
        "  needs    num_hidden_layers, kv_lora_rank = 512, qk_rope_head_dim = 64\n"
        "  reads    num_nextn_predict_layers, index_topk, linear_attn_config.kda_layers\n"
        "  choices  kv_format (bf16 | fp8_scaled | fp8_raw), page_size\n"
    )
    status, out, err = kvgen("specs", "--config", CONFIGS / "glm-5.json")
    assert (status, err) == (0, "")
    assert out == (
        "glm_dsa: yes\n"
        "  DeepSeek sparse attention (DeepSeek-V3.2, GLM-5.x), an MLA latent and indexer keys\n"
        "gqa: no\n"
        "  Keys and values per head in every layer (MHA, GQA, MQA), heads divided or replicated over ranks\n"
        "  - kv_lora_rank: a latent per token, which the layouts mla and glm_dsa have\n"
        "hybrid_swa: no\n"
        "  Keys and values per head, layers with a window apart (gpt-oss, Gemma 3 and 4, MiMo-V2, Llama 4)\n"
        "  - sliding_window or attention_chunk_size is missing from the config\n"
        "mla: no\n"
        "  Multi-head latent attention (DeepSeek-V3, Kimi-K2), one latent row per token in every layer\n"
        "  - index_topk: sparse attention has indexer keys too, which the layout glm_dsa has\n"
    )


def test_choices_decide_too() -> None:
    """A choice that a layout does not have is a reason against it."""
    file = CONFIGS / "kimi-k2.5.json"
    assert kvgen("budget", "--config", file, "--tokens", 64, "--set", "page_size=16")[0] == 0
    status, _, err = kvgen("budget", "--config", file, "--tokens", 64, "--set", "elide_shared=false")
    assert status == 1 and "note: mla: --set elide_shared=false: unknown choice `elide_shared`\n" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["budget", "--config", "nowhere.json", "--tokens", "0"], "error[KV411]: cannot read `nowhere.json`: "),
        (["specs", "--config", "nowhere.json"], "error[KV411]: cannot read `nowhere.json`: "),
        (["specs", "--config", CONFIGS / "glm-5.json", "--set", "odd"], "error[KV410]: --set odd: expected K=V\n"),
        (["specs", "--set", "kv_format=bf16"], "error[KV410]: --set needs --config\n"),
    ],
)
def test_what_is_wrong_with_the_command(words: list[object], message: str) -> None:
    """Said once, not as a reason of each layout."""
    status, out, err = kvgen(*words)
    assert (status, out) == (2, "") and err.startswith(message) and err.count("error") == 1


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
