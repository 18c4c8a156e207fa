"""Adapters as text: what `kvgen build --engine` writes, and what the module says without its engine.

That an engine runs on one is shown by `make test-peers`, which has the engine.
"""

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import kvgen

ROOT = Path(__file__).parent.parent
SPEC = str(ROOT / "specs" / "glm_dsa.yaml")
ADAPTER = ROOT / "generated" / "sglang" / "glm_dsa.py"


@pytest.fixture
def built(tmp_path: Path) -> Path:
    assert kvgen("build", SPEC, "--engine", "sglang", "-o", tmp_path) == (
        0,
        f"wrote: {tmp_path}/glm_dsa.py\nwrote: {tmp_path}/sglang/glm_dsa.py\n",
        "",
    )
    return tmp_path


def test_the_pool_and_its_adapter_are_written(built: Path) -> None:
    assert sorted(path.relative_to(built).as_posix() for path in built.rglob("*.py")) == [
        "glm_dsa.py",
        "sglang/glm_dsa.py",
    ]
    assert (built / "sglang" / "glm_dsa.py").read_bytes() == ADAPTER.read_bytes()
    assert (built / "glm_dsa.py").read_bytes() == (ROOT / "generated" / "glm_dsa.py").read_bytes()


@pytest.mark.parametrize("name", ["mla", "gqa"])
def test_the_other_shipped_adapters_are_current(tmp_path: Path, name: str) -> None:
    assert kvgen("build", ROOT / "specs" / f"{name}.yaml", "--engine", "sglang", "-o", tmp_path)[0] == 0
    written = tmp_path / "sglang" / f"{name}.py"
    assert written.read_text() == (ADAPTER.parent / f"{name}.py").read_text()


def test_checks_look_at_adapters_where_they_are_asked_to(built: Path) -> None:
    adapter = built / "sglang" / "glm_dsa.py"
    assert kvgen("build", SPEC, "--engine", "sglang", "-o", built, "--check") == (0, "", "")
    adapter.write_text(adapter.read_text() + "\n")
    assert kvgen("build", SPEC, "-o", built, "--check") == (0, "", "")
    status, out, _ = kvgen("build", SPEC, "--engine", "sglang", "-o", built, "--check", "--diff")
    assert status == 1 and out.endswith(f"changed: {adapter}\n") and f"--- {adapter}\n" in out
    adapter.unlink()
    assert kvgen("build", SPEC, "--engine", "sglang", "-o", built, "--check") == (1, f"missing: {adapter}\n", "")


def test_an_adapter_that_no_spec_makes_is_extra(built: Path, tmp_path: Path) -> None:
    gone = built / "sglang" / "gone.py"
    gone.write_bytes(ADAPTER.read_bytes())
    specs = [tmp_path / "specs" / name for name in ("glm_dsa.yaml", "index_rows.yaml", "mla_rows.yaml")]
    (tmp_path / "specs").mkdir()
    for spec in specs:
        spec.write_bytes((ROOT / "specs" / spec.name).read_bytes())
    assert kvgen("build", *specs, "--engine", "sglang", "-o", built, "--check") == (1, f"extra: {gone}\n", "")
    assert kvgen("build", *specs, "-o", built, "--check") == (0, "", "")


def test_standard_output_takes_one_module() -> None:
    assert kvgen("build", SPEC, "--engine", "sglang", "-o", "-") == (
        2,
        "",
        "error[KV410]: `-o -` prints one module; with --engine sglang there are two\n",
    )


def test_an_engine_that_is_not_known() -> None:
    status, out, err = kvgen("build", SPEC, "--engine", "vllm")
    assert (status, out) == (2, "")
    assert err.startswith("error[KV410]: argument --engine: invalid choice: 'vllm'")


def test_what_is_missing_as_json(tmp_path: Path) -> None:
    text = (ROOT / "specs" / "glm_dsa.yaml").read_text().replace("get_state_buf_infos:", "get_index_buf_infos:")
    changed = ROOT / "specs" / "glm_dsa.yaml"
    spec = tmp_path / "glm_dsa.yaml"
    spec.write_text(text)
    for fragment in ("mla_rows.yaml", "index_rows.yaml"):
        (tmp_path / fragment).write_bytes((changed.parent / fragment).read_bytes())
    status, out, err = kvgen("build", spec, "--engine", "sglang", "-o", tmp_path, "--format", "json")
    (problem,) = json.loads(out)["problems"]
    assert (status, err, problem["code"]) == (1, "", "KV405")
    assert problem["message"] == (
        "`glm_dsa` is not the DSA pool of SGLang: it has no operation `get_state_buf_infos` that is a describe"
    )


@pytest.mark.parametrize(("name", "others"), [("glm_dsa", set()), ("mla", set()), ("gqa", {256})])
def test_the_adapter_states_no_numbers(name: str, others: set[int]) -> None:
    """Bytes and offsets are the layout's: the only numbers are those of first and last things, and an alignment."""
    tree = ast.parse((ADAPTER.parent / f"{name}.py").read_text())
    numbers = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is int}
    assert numbers <= {0, 1} | others


@pytest.mark.parametrize(
    ("name", "formats"),
    [
        ("glm_dsa", '("bf16", "fp8_scaled", "fp8_raw")'),
        ("mla", '("bf16", "fp8_scaled", "fp8_raw")'),  # of its four; SGLang has other pools for e2m1
        ("gqa", '("bf16", "fp8")'),  # of its six; those of rows with scales, of e2m1 and of HND are not asked for
    ],
)
def test_the_formats_that_sglang_may_ask_for(name: str, formats: str) -> None:
    text = (ADAPTER.parent / f"{name}.py").read_text()
    assert re.findall(r"for kv_format in (\(.*\)):", text) == [formats]
    assert re.findall(r"^PAGES = (\(.*\))$", text, re.M) == (['("bf16_nhd", "fp8_nhd")'] if name == "gqa" else [])


def test_without_sglang_the_import_says_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setitem(sys.modules, "msgspec", None)
    monkeypatch.delitem(sys.modules, "generated.sglang.glm_dsa", raising=False)
    with pytest.raises(ImportError) as error:
        importlib.import_module("generated.sglang.glm_dsa")
    assert str(error.value) == (
        "this pool is for SGLang 0.5.23 (pip install sglang==0.5.23), of which something cannot be imported: "
        "import of msgspec halted; None in sys.modules. The pool in glm_dsa.py itself needs no engine."
    )


def test_an_adapter_of_a_layout_of_other_names(tmp_path: Path) -> None:
    """Its names are the layout's, and it reads as if a formatter had laid it out, however long they are."""
    for fragment in ("mla_rows.yaml", "index_rows.yaml"):
        (tmp_path / fragment).write_bytes((ROOT / "specs" / fragment).read_bytes())
    name = "a_layout_whose_name_has_forty_letters_ab"
    text = (ROOT / "specs" / "glm_dsa.yaml").read_text()
    text = text[: text.index("expect:")].replace("layout: glm_dsa", f"layout: {name}")
    text = text.replace("index_k:", "index_rows_of_pages:").replace("[index_k]", "[index_rows_of_pages]")
    text = text.replace("args: {index_rows_of_pages: key", "args: {index_k: key")
    text = text.replace("kv: {format", "latent_rows: {format").replace("[kv, kv_draft]", "[latent_rows, kv_draft]")
    text = text.replace("move_kv_cache", "move_slots").replace("get_cpu_copy", "save_slots")
    (tmp_path / "other.yaml").write_text(text)
    assert kvgen("build", tmp_path / "other.yaml", "--engine", "sglang", "-o", tmp_path)[0] == 0
    adapter = tmp_path / "sglang" / f"{name}.py"
    text = adapter.read_text()
    assert 'buffer("latent_rows")' in text and 'buffer("index_rows_of_pages")' in text
    assert "self.generated.move_slots(" in text and "self.generated.save_slots(" in text
    assert "class ALayoutWhoseNameHasFortyLettersAbTokenToKVPool(DSATokenToKVPool):" in text
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", str(adapter)]
    for words in (["check"], ["format", "--diff"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *words, *config], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_an_adapter_of_heads_of_other_names(tmp_path: Path) -> None:
    """However long they are."""
    names = {letter: f"{letter * 29}_of_a_token" for letter in "kvbp"}  # of 40 letters
    for name in ("gqa", "kv_rows"):
        text = (ROOT / "specs" / f"{name}.yaml").read_text().split("\nexpect:")[0] + "\n"
        text = re.sub(r"\b([kv])\b(?=[,:\]}])", lambda found: names[found[1]], text)
        text = re.sub(r"\bkv\b(?=[,:\]])", names["b"], text).replace("bf16_nhd", names["p"])
        text = text.replace("layout: gqa", "layout: a_layout_whose_name_has_forty_letters_ab")
        (tmp_path / f"{name}.yaml").write_text(text)
    assert kvgen("build", tmp_path / "gqa.yaml", "--engine", "sglang", "-o", tmp_path)[0] == 0
    adapter = tmp_path / "sglang" / "a_layout_whose_name_has_forty_letters_ab.py"
    text = adapter.read_text()
    assert f'BUFFER = "{names["b"]}"\nKEYS, KEY_SCALE = "{names["k"]}", "{names["k"]}_scale"\n' in text
    assert f'PAGES = ("{names["p"]}", "fp8_nhd")' in text
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", str(adapter)]
    for words in (["check"], ["format", "--diff"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *words, *config], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


EDITS = {  # of the shipped specs, and what SGLang would have against them
    "another order of arguments": (
        ["glm_dsa"],
        "cache_k_nope: latent, cache_k_rope: rope",
        "cache_k_rope: rope, cache_k_nope: latent",
    ),
    "another name of a field": (["glm_dsa", "mla_rows"], r"\blatent\b(?!_| row)", "nope"),
    "fewer formats": (["glm_dsa"], r"of: \[bf16, fp8_scaled, fp8_raw\]", "of: [bf16, fp8_scaled]"),
    "another argument": (
        ["glm_dsa"],
        "cache_k_nope: latent",
        "k: latent",
        "the arguments of `set_mla_kv_buffer` are not cache_k_nope and cache_k_rope",
    ),
    "another order of results": (
        ["glm_dsa"],
        r"returns: \[latent, rope\]",
        "returns: [rope, latent]",
        "`get_mla_kv_buffer` does not return latent and rope",
    ),
    "a result less": (
        ["glm_dsa"],
        r"returns: \[key, key_scale\]",
        "returns: [key]",
        "`get_index_k_scale_buffer` does not return key and key_scale",
    ),
    "another view": (
        ["glm_dsa"],
        r"get_key_buffer: \{view: \[kv, kv_draft\], as: rows",
        "get_key_buffer: {view: [kv, kv_draft], as: pages",
        "`get_key_buffer` is not a view as rows",
    ),
    "rope before latent": (
        ["mla_rows"],
        r"- \[latent, latent_scale, rope\]",
        "- [rope, latent, latent_scale]",
        "no kernel reads the bytes of `mla_fp8_scaled`: rope bf16[64] at 0, 656 bytes a slot; "
        "latent e4m3[512] at 128, 656 bytes a slot; latent_scale f32[4] at 640, 656 bytes a slot",
    ),
    "scales before keys": (
        ["index_rows"],
        r"- \[key\]\n      - \[key_scale\]",
        "- [key_scale]\n      - [key]",
        "no kernel reads the bytes of `index_fp8`: key_scale f32[1] at 0, 4 bytes a slot; "
        "key e4m3[128] at 256, 128 bytes a slot",
    ),
    "scales beside keys": (
        ["index_rows"],
        r"- \[key\]\n      - \[key_scale\]",
        "- [key, key_scale]",
        "no kernel reads the bytes of `index_fp8`: key e4m3[128] at 0, 132 bytes a slot; "
        "key_scale f32[1] at 128, 132 bytes a slot",
    ),
    "another page": (
        ["glm_dsa"],
        "page: 64",
        "page: 128",
        "no kernel reads the bytes of `index_fp8`: key e4m3[128] at 0, 128 bytes a slot; "
        "key_scale f32[1] at 16384, 4 bytes a slot",
    ),
    "a page of load time": (
        ["glm_dsa"],
        "choices:|page: 64",
        lambda found: "choices:\n  size: {type: int, min: 1, default: 64}" if found[0] == "choices:" else "page: size",
        "no kernel reads the bytes of `index_fp8`: key e4m3[128] at 0, 128 bytes a slot; "
        "key_scale f32[1] at 128 * slots, 4 bytes a slot",
    ),
    "keys in pieces": (
        ["index_rows"],
        r"- \[key\]\n",
        "- {each: [index_head_dim//64, slot], put: [key]}\n",
        "no kernel reads the bytes of `index_fp8`: key in pieces; key_scale f32[1] at 8192, 4 bytes a slot",
    ),
    "a buffer more": (
        ["glm_dsa"],
        "  kv_host:",
        "  more: {format: index_fp8, space: logical, layers: body}\n  kv_host:",
        "it has a buffer more, `more`",
    ),
    "two things at once": (
        ["glm_dsa"],
        r"get_state_buf_infos:|returns: \[key, key_scale\]",
        lambda found: "get_index_buf_infos:" if found[0].endswith(":") else "returns: [key]",
        "`get_index_k_scale_buffer` does not return key and key_scale",
        "it has no operation `get_state_buf_infos` that is a describe",
    ),
    "one operation of the index left": (
        ["glm_dsa"],
        "(set_index_k_scale_buffer|get_index_k_scale_buffer|get_index_k_with_scale_buffer):",
        r"my_\1:",
        "it has no operation `set_index_k_scale_buffer` that is a put",
        "it has no operation `get_index_k_scale_buffer` that is a gather",
        "it has no operation `get_index_k_with_scale_buffer` that is a view",
        "it has a buffer more, `index_k`",
    ),
    "one format": (["mla"], r"of: \[bf16, fp8_scaled, fp8_raw, nvfp4\]", "of: [bf16]"),
    "two slots a token": (
        ["mla"],
        "slots: tokens",
        "slots: tokens * 2",
        "the slots of `token` are not one a token and a page in reserve",
    ),
    "slots of requests": (
        ["mla"],
        "slots: tokens",
        "slots: tokens + 64 * requests",
        "the slots of `token` are not one a token and a page in reserve",
    ),
    "slots that are always there": (
        ["mla"],
        "slots: tokens",
        "slots: tokens + 64",
        "the slots of `token` are not one a token and a page in reserve",
    ),
    "no page in reserve": (
        ["mla"],
        "page: page_size",
        "page: page_size, reserve: 0",
        "the slots of `token` are not one a token and a page in reserve",
    ),
    "index slots of requests": (
        ["glm_dsa"],
        r"slots: tokens \* host_to_device_ratio",
        "slots: tokens * host_to_device_ratio + requests",
        "the slots of `device` are not one a token and a page in reserve",
        "the slots of `logical` are not one a token and a page in reserve",
    ),
    "keys and values under other names": (
        ["gqa", "kv_rows"],
        r"\bk\b(?=[,:\]}])",
        "key",
    ),
    "no format of codes": (["gqa"], r"of: \[bf16, fp8, int8,", "of: [bf16, int8,"),
    "values beside keys": (
        ["kv_rows"],
        r"k: \"bf16\[heads, head_dim\](.*)\n    page: \[\[k\], \[v\]\]",
        r'k: "bf16[heads, head_dim]\1\n    page: [[k, v]]',
        "no kernel reads the bytes of `bf16_nhd`: "
        "k bf16[head_dim * heads] at 0, 2 * head_dim * heads + 2 * heads * v_head_dim bytes a slot; "
        "v bf16[heads * v_head_dim] at 2 * head_dim * heads, "
        "2 * head_dim * heads + 2 * heads * v_head_dim bytes a slot",
    ),
    "values before keys": (
        ["kv_rows"],
        r"\[\[k\], \[v\]\]",
        "[[v], [k]]",
        "no kernel reads the bytes of `bf16_nhd`: "
        "v bf16[heads * v_head_dim] at 0, 2 * heads * v_head_dim bytes a slot; "
        "k bf16[head_dim * heads] at 2 * slots * heads * v_head_dim, 2 * head_dim * heads bytes a slot",
        "no kernel reads the bytes of `fp8_nhd`: v e4m3[heads * v_head_dim] at 0, heads * v_head_dim bytes a slot; "
        "k e4m3[head_dim * heads] at slots * heads * v_head_dim, head_dim * heads bytes a slot",
    ),
    "codes without scales": (
        ["kv_rows"],
        r"\{type: \"e4m3\[heads, (v_)?head_dim\]\", quant: \{scale: given, code: divide\}\}",
        r'"e4m3[heads, \1head_dim]"',
        "`set_kv_buffer` is given scales, which the codes of `fp8_nhd` do not take",
    ),
    "heads before slots alone": (
        ["kv_rows"],
        r"page: \[\[k\], \[v\]\]",
        "page: [{each: [heads, slot], put: [k]}, {each: [heads, slot], put: [v]}]",
        "no kernel reads the bytes of any format that `set_kv_buffer` writes",
    ),
    "another argument of keys": (
        ["gqa"],
        "cache_k: k",
        "keys: k",
        "the arguments of `set_kv_buffer` are not cache_k and cache_v",
    ),
    "no width of values": (
        ["gqa"],
        r"from: \[v_head_dim, head_dim,",
        "from: [value_dim, head_dim,",
        "it has no field of the config from `v_head_dim`",
    ),
    "no view of fields": (
        ["gqa"],
        "get_kv_fields:",
        "my_fields:",
        "it has no operation `get_kv_fields` that is a view",
    ),
}
TITLES = {"glm_dsa": "DSA", "mla": "MLA", "gqa": "MHA"}


@pytest.mark.parametrize("edit", EDITS)
def test_what_sglang_would_have_against_a_layout(tmp_path: Path, edit: str) -> None:
    """Told at build, as SGLang's kernels would read other bytes without a word."""
    files, old, new, *wrong = EDITS[edit]
    for name in (*TITLES, "mla_rows", "index_rows", "kv_rows"):
        text = (ROOT / "specs" / f"{name}.yaml").read_text()
        text = text.split("\nexpect:")[0] + "\n"
        changed = re.sub(old, new, text) if name in files else text
        assert (changed != text) == (name in files)
        (tmp_path / f"{name}.yaml").write_text(changed)
    built = next((name for name in files if name in TITLES), "gqa" if "kv_rows" in files else "glm_dsa")
    words = [tmp_path / f"{built}.yaml", "--engine", "sglang", "-o", tmp_path, "--format", "json"]
    status, out, _ = kvgen("build", *words)
    errors = [problem for problem in json.loads(out).get("problems", []) if problem["severity"] == "error"]
    if not wrong:
        assert (status, errors) == (0, [])
    else:
        (error,) = errors
        assert error["message"] == f"`{built}` is not the {TITLES[built]} pool of SGLang: {wrong[0]}"
        assert error["notes"] == wrong[1:]


def test_headers_are_of_one_line_where_they_fit(tmp_path: Path) -> None:
    """120 columns: names of 21 letters fit into the header of an adapter, of 29 into that of a module."""
    text = (ROOT / "specs" / "mla.yaml").read_text().split("\nexpect:")[0] + "\n"
    (tmp_path / "mla_rows.yaml").write_bytes((ROOT / "specs" / "mla_rows.yaml").read_bytes())
    for letters in (21, 22, 29, 30):
        spec = tmp_path / f"{'a' * (letters - 5)}.yaml"
        spec.write_text(text)
        assert kvgen("build", spec, "--engine", "sglang", "-o", tmp_path)[0] == 0
        for path, limit, words in (("mla.py", 29, ""), ("sglang/mla.py", 21, "--engine sglang ")):
            gap = " " if letters <= limit else "\n# "
            line = f"# @generated by kvgen from {spec.name}. Edit the spec, then:{gap}kvgen build {words}{spec.name}\n"
            assert (tmp_path / path).read_text().startswith(line)
            assert max(map(len, line.split("\n"))) <= 120


def test_mla_without_pages_of_load_time(tmp_path: Path) -> None:
    """A layout whose pages have a fixed size holds that against the size that SGLang asks for."""
    (tmp_path / "mla_rows.yaml").write_bytes((ROOT / "specs" / "mla_rows.yaml").read_bytes())
    text = (ROOT / "specs" / "mla.yaml").read_text().split("\nexpect:")[0] + "\n"
    text = text.replace("  page_size: {type: int, min: 1, default: 64}\n", "").replace("page: page_size", "page: 64")
    (tmp_path / "mla.yaml").write_text(text)
    assert kvgen("build", tmp_path / "mla.yaml", "--engine", "sglang", "-o", tmp_path)[0] == 0
    adapter = (tmp_path / "sglang" / "mla.py").read_text()
    assert 'raise ValueError(f"{NAME}: a page of this layout has {space.page_size} slots, not {page_size}")' in adapter
    assert "page_size=page_size" not in adapter and "index_k" not in adapter
    line = [sys.executable, "-m", "ruff", "format", "--diff", "--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    done = subprocess.run([*line, str(tmp_path / "sglang" / "mla.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
