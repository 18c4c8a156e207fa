"""What kernels are compiled to, against what they were: `kvgen profile`, and a golden for each spec and target."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cli import kvgen

from kvgen.machine import SASS, _amd, _sass_bytes
from kvgen.profile import losses
from kvgen.targets import TARGETS

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden" / "profile"
SPECS = {path.stem: path for path in sorted((ROOT / "specs").glob("*.yaml")) if "\nlayout: " in path.read_text()}
CONFIGS = {"gqa": "gqa.json", "hybrid_swa": "hybrid_swa.json", "shared_kv": "shared_kv.json"}  # heads of one size
ORDINARY = ("sm_90", "sm_100", "gfx950")  # of every spec; of glm_dsa all of them


def run_profile(spec: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command, in a process where kernels are compiled."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "kvgen", "profile", str(spec), *words]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)


@functools.cache
def profiled(spec: str, targets: tuple[str, ...]) -> dict[str, dict[str, dict[str, Any]]]:
    """What the command says of each kernel."""
    words = [word for target in targets for word in ("--arch", target)]
    if spec in CONFIGS:
        words += ["--config", str(ROOT / "tests" / "data" / "profile" / CONFIGS[spec])]
    done = run_profile(SPECS[spec], *words, "--format", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {target: {f"{own['kernel']}: {own['variant']}": own for own in kernels} for target, kernels in found.items()}


def cases() -> list[Any]:
    found = []
    for spec in SPECS:
        for target in TARGETS:
            is_long = spec != "glm_dsa" and target not in ORDINARY
            found.append(pytest.param(spec, target, marks=[pytest.mark.long] if is_long else [], id=f"{spec}-{target}"))
    return found


@pytest.mark.parametrize(("spec", "target"), cases())
def test_kernels_are_no_worse(spec: str, target: str, request: pytest.FixtureRequest) -> None:
    """The same kernels and dtypes as in the golden; no access narrower, no spill, no fifth more registers."""
    is_long = target not in ORDINARY and spec != "glm_dsa"
    together = tuple(own for own in TARGETS if spec == "glm_dsa" or (own in ORDINARY) != is_long)
    found = profiled(spec, together)[target]
    path = GOLDEN / f"{spec}-{target}.json"
    if request.config.getoption("--update-golden"):
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(own)}" for key, own in found.items())
        path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    assert list(found) == list(before)
    worse = [f"{key}: {loss}" for key, own in found.items() for loss in losses(own, before[key])]
    assert not worse, "\n".join([*worse, "if this is meant: pytest --update-golden tests/test_profile.py"])


def test_widths_of_values() -> None:
    """What docs/performance.md says: values and codes go 16 bytes at a time, but codes of nvfp4, which go 8 at a time.

    Slots are loads of 8 bytes too, so that a store shows it, and a load has four of them at least.
    """
    found = [own for path in GOLDEN.glob("*.json") for own in json.loads(path.read_text(encoding="utf-8")).values()]
    stores = [own for own in found if own["kernel"].startswith("store_")]
    loads = [own for own in found if own["kernel"].startswith("load_")]
    for values, codes, kernels in (("loads", "stores", stores), ("stores", "loads", loads)):
        narrow = [own for own in kernels if "nvfp4" in own["kernel"]]
        assert narrow and all(own[values]["16"] for own in kernels)
        assert all(own[codes].get("16") for own in kernels if own not in narrow)
        assert all(own[codes]["8"] >= 4 for own in narrow)
    assert all(("8" in own["stores"]) == ("nvfp4" in own["kernel"]) for own in stores)


def of(target: str, key: str) -> tuple[int, int, dict[str, int], dict[str, int]]:
    """Tokens and warps of a program, loads and stores of a thread, those of slots left out."""
    own = profiled("glm_dsa", tuple(TARGETS))[target][key]
    return own["tokens"], own["warps"], own["loads"], own["stores"]


def test_stores_of_hopper() -> None:
    """A warp has 4 tokens of 1,152 bytes: 9 accesses of 16 bytes for each of 32 threads, and the slot of each.

    In scaled fp8 there are 512 codes and 128 bytes of rope of each token to write, 5 accesses, and 4 scales.
    """
    assert 4 * 1152 == 9 * 16 * 32 and 4 * (512 + 128) == 5 * 16 * 32 and 4 * 4 == 16
    tokens, warps, loads, stores = of("sm_90", "store_mla_bf16: slots int64, latent int16, rope int16")
    assert (tokens, warps, loads["16"], stores) == (4, 1, 9, {"16": 9})
    assert set(loads) == {"16", "8"}  # of slots
    tokens, warps, loads, stores = of("sm_90", "store_mla_fp8_scaled: slots int64, latent int16, rope int16")
    assert (tokens, warps, loads["16"], stores) == (4, 1, 9, {"16": 5, "4": 1})


@pytest.mark.parametrize("target", TARGETS)
def test_of_every_target(target: str) -> None:
    """Values are read and written 16 bytes at a time, by 32 threads or 64; nothing spills; what must be moved is right.

    8-bit codes come 16 to an access. A store of a bf16 row reads and writes 1,152 bytes and reads a slot of 8; a move
    packs and unpacks, each with a slot for every record, of latents, keys and scales in this spec's first layout.
    """
    found = profiled("glm_dsa", tuple(TARGETS))[target]
    threads = TARGETS[target].threads
    assert all(own["spills"] == 0 for own in found.values())
    for key, own in found.items():
        if key.startswith(("store_mla", "load_mla")):
            narrow = {width for width in (*own["loads"], *own["stores"]) if width in ("1", "2")}
            assert not narrow, key
            assert own["tokens"] == (threads // 8 if "raw" not in key else threads // 4)
    row = found["store_mla_bf16: slots int64, latent int16, rope int16"]
    assert row["least"] == 1152 + 1152 + 8
    assert row["stores"] == {"16": 9}
    scaled = found["store_mla_fp8_scaled: slots int32, latent int16, rope int16"]
    assert scaled["least"] == 1152 + 656 + 4
    gathered = found["gather_index_fp8: lengths int32, pages int32, key uint8, key_scale int32"]
    assert gathered["least"] == 2 * (128 + 4)


WIDTHS = """\
kvgen: 1
layout: widths
doc: Rows of 448 and 528 values
config:
  num_layers: {type: int, from: num_hidden_layers}
let: {dim: 448}
formats:
  rows:
    fields:
      nope: {type: "e4m3[dim]", quant: {scale: scale, round: pow2}}
      scale: e8m0[dim//64]
      rope: bf16[448]
      code: {type: "e4m3[528]", quant: {scale: none}}
    page: [[nope, {align: 16}], [rope], [code], [scale]]
layers: {body: num_layers}
spaces: {token: {slots: tokens, page: 64}}
buffers: {kv: {format: rows, space: token, layers: all}}
operations:
  set_kv: {store: [kv], args: {nope: nope, rope: rope, code: code}}
  get_kv: {load: [kv], returns: [nope, rope, code]}
  move_kv: {move: all}
  save_kv: {save: all}
  restore_kv: {restore: all}
expect:
  - {given: {num_layers: 1}, slot_bytes: {kv: 1879}}  # 448 + 896 + 528 + 7
"""


def test_widths_that_are_no_powers_of_two(tmp_path: Path) -> None:
    """They are taken in stretches that are one, of 64 and of 16, without masks along the row, 16 bytes at a time."""
    (tmp_path / "widths.yaml").write_text(WIDTHS)
    status, text, err = kvgen("build", tmp_path / "widths.yaml", "-o", "-")
    assert (status, err) == (0, "")
    assert not re.search(r"mask=.*(column|block|value) <", text)
    done = run_profile(tmp_path / "widths.yaml", "--arch", "sm_90", "--format", "json")
    assert done.returncode == 0, done.stderr
    (own,) = (
        own
        for own in json.loads(done.stdout)["sm_90"]
        if own["variant"] == "slots int64, nope int16, rope int16, code int16"
    )
    tokens = own["tokens"]
    assert tokens * (448 * 2 * 2 + 528 * 2) == own["loads"]["16"] * 16 * 32
    assert tokens * (448 + 896 + 528) == own["stores"]["16"] * 16 * 32
    assert set(own["loads"]) == {"16", "8"} and set(own["stores"]) == {"16", "1"}  # scales are bytes


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({}, []),
        ({"registers": 60}, []),
        ({"registers": 61}, ["registers: 61, not 50"]),
        ({"registers": 40, "loads": {"16": 4}, "instructions": 1000}, []),
        ({"spills": 2}, ["spills: 2, not 0"]),
        ({"stores": {"16": 8, "8": 2, "4": 1}}, ["stores of 8 bytes: 2, not 0"]),
        ({"loads": {"16": 9, "4": 2}}, ["loads of 4 bytes: 2, not 1"]),
        ({"loads": {"1": 16}}, ["loads of 1 byte: 16, not 0"]),
    ],
)
def test_what_is_a_loss(now: dict[str, Any], said: list[str]) -> None:
    before = {
        "registers": 50,
        "spills": 0,
        "instructions": 200,
        "loads": {"16": 9, "4": 1},
        "stores": {"16": 9, "4": 1},
    }
    assert list(losses({**before, **now}, before)) == said


@pytest.mark.parametrize(
    ("line", "name", "nbytes"),
    [
        ("        /*0210*/                   LDG.E.128 R8, desc[UR4][R2.64] ;", "LDG.E.128", 16),
        ("        /*0210*/              @!P0 LDG.E.64 R8, desc[UR4][R2.64] ;", "LDG.E.64", 8),
        ("        /*1f0a0*/              @P3 STG.E desc[UR4][R2.64], R5 ;", "STG.E", 4),
        ("        /*0210*/             @UP0 STG.E.U8 desc[UR4][R2.64], R5 ;", "STG.E.U8", 1),
        ("        /*0210*/                   LDG.E.U16.CONSTANT R8, desc[UR4][R2.64] ;", "LDG.E.U16.CONSTANT", 2),
    ],
)
def test_widths_of_sass(line: str, name: str, nbytes: int) -> None:
    match = SASS.search(line)
    assert match is not None
    assert (match[1], _sass_bytes(match[1])) == (name, nbytes)


def test_widths_of_amd() -> None:
    text = """
kernel:
\ts_load_dwordx4 s[0:3], s[4:5], 0x0
\tglobal_load_dwordx4 v[0:3], v[4:5], off
\tbuffer_load_ubyte v1, v2, s[0:3], 0 offen
\tglobal_load_short_d16_hi v1, v[2:3], off
\ts_nop 0
\tglobal_store_dwordx2 v[0:1], v[2:3], off
\tscratch_store_dword off, v1, s0
    .vgpr_count:     38
    .sgpr_spill_count: 2
"""
    code = _amd(text, 64)
    assert (code.registers, code.spills, code.shared_bytes, code.instructions) == (38, 1, 64, 6)
    assert (code.loads, code.stores) == ({16: 1, 2: 1, 1: 1}, {8: 1})


# The command


def test_it_compiles_and_does_not_interpret() -> None:
    """These tests run where kernels are interpreted."""
    status, out, err = kvgen("profile", SPECS["mla"])
    assert (status, out) == (2, "")
    assert err == (
        "error[KV410]: kvgen profile compiles kernels\n"
        "  = help: unset TRITON_INTERPRET, by which Triton interprets them\n"
    )


def test_refusals(tmp_path: Path) -> None:
    status, _, err = kvgen("profile", SPECS["mla"], "--arch", "sm_75")
    assert status == 2
    assert err.startswith("error[KV410]: argument --arch: invalid choice: 'sm_75' (choose from 'sm_80', 'sm_89',")
    assert kvgen("profile", SPECS["mla"], "--set", "kv_format=bf16")[2] == "error[KV410]: --set needs --config\n"
    text = SPECS["mla"].read_text(encoding="utf-8")
    (tmp_path / "mla.yaml").write_text(text[: text.index("expect:")], encoding="utf-8")
    (tmp_path / "mla_rows.yaml").write_text((ROOT / "specs" / "mla_rows.yaml").read_text(encoding="utf-8"))
    status, _, err = kvgen("profile", tmp_path / "mla.yaml")
    assert (status, err) == (
        2,
        f"error[KV410]: {tmp_path}/mla.yaml: has no expectation to take sizes from\n  = help: add --config FILE\n",
    )


def test_text_and_a_config(tmp_path: Path) -> None:
    """One layout's kernels, for its sizes: two lines of a store of 4 heads of 64 on each of two ranks."""
    config = tmp_path / "config.json"
    config.write_text('{"num_hidden_layers": 2, "num_key_value_heads": 8, "head_dim": 64}')
    words = [
        "--config",
        str(config),
        *(f"--set={own}" for own in ("tp_size=2", "kv_order=hnd", "kv_format=bf16")),
        "--arch",
        "sm_90",
    ]
    done = run_profile(SPECS["gqa"], *words)
    assert (done.returncode, done.stderr) == (0, "")
    names = [line.split(":")[0].strip() for line in done.stdout.splitlines() if ": " in line]
    assert set(names) == {"clear", "load_bf16_hnd", "pack", "store_bf16_hnd", "unpack"}
    # K and V of 4 heads x 64 x 2 = 512 bytes: one token for 32 threads
    assert "  store_bf16_hnd: 1 token, 1 warp\n    slots int64, k int16, v int16\n" in done.stdout
    assert "; 2,056 bytes a token" not in done.stdout and "of 2,056 that must be" in done.stdout


# The page


PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")


def test_the_table_of_the_page() -> None:
    """Its rows are those of the golden, and every kernel of the layout has one."""
    found = json.loads((GOLDEN / "glm_dsa-sm_90.json").read_text(encoding="utf-8"))
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if re.match(r"\| `\w+` \| \d", line)]
    assert {row[0].strip("`") for row in rows} == {own["kernel"] for own in found.values()} - {"clear"}
    for name, *shown in rows:
        alike = [own for key, own in found.items() if own["kernel"] == name.strip("`") and "int32" not in chosen(key)]
        own = min(alike, key=lambda own: ("uint8" in own["variant"], "float" in own["variant"].replace("bfloat", "")))
        widths = [", ".join(f"{own[what][width]} x {width}" for width in own[what]) for what in ("loads", "stores")]
        assert shown == [str(own["tokens"]), str(own["registers"]), str(own["spills"]), *widths], own["variant"]


def chosen(key: str) -> str:
    """The dtypes of slots and pages alone."""
    return " ".join(part for part in key.split(", ") if re.search(r"slots|lengths|pages", part))


def test_other_figures_of_the_page() -> None:
    key = "store_mla_fp8_scaled: slots int64, latent int16, rope int16"
    numbers = [json.loads((GOLDEN / f"glm_dsa-{target}.json").read_text())[key] for target in ("sm_80", "sm_90")]
    old, new = (f"{own['instructions']:,}" for own in numbers)
    assert f"the scaled fp8 store has {old} on sm_80 and {new} on sm_90" in PAGE
    for target in TARGETS:
        assert target in PAGE
