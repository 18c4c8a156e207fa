"""Every message kvgen has for a bad spec: one small file each in `problems/`, with the exact text of `kvgen check`.

A file is called `<CODE>_<what>.yaml`; the code is the one that is reported first. `pytest --update-golden` rewrites the
texts.
"""

import importlib
import io
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import kvgen
from kvgen.cli import main
from kvgen.compile import compile_spec
from kvgen.problems import InternalError
from kvgen.source import MAX_BYTES

PROBLEMS = Path(__file__).parent / "problems"
CASES = sorted(PROBLEMS.glob("*.yaml"))
OWN = [case for case in CASES if case.name >= "KV2"]  # the others are also judged in test_source.py and test_schema.py
IN_ANOTHER_ORDER = "KV103_neither_slot_nor_slots"  # two problems of one place, which the command line sorts
WARNINGS = {"KV305"}
WITHOUT_FILE = {  # codes that no spec file of the corpus can bring about, each with a test of its own below
    "KV001": "a file of more than 1 MiB",
    "KV401": "a config that the layout refuses",
    "KV402": "two specs that write the same file",
    "KV403": "a fragment where a layout is needed",
    "KV404": "memory that is too small for the reserved pages, or for one request",
    "KV405": "a layout that is no pool of the engine",
    "KV406": "a config that no shipped layout is for, or more than one",
    "KV407": "a field of a config that the layout does not know",
    "KV408": "layers whose slots grow with requests, and no requests",
    "KV409": "what a layout says of a config and choices",
    "KV410": "a command line that cannot be read",
    "KV411": "a file that cannot be read",
    "KV412": "memory or a package that is not there",
    "KV499": "a fault of kvgen itself",
}
RULES = {  # what a spec is checked for, and cases that show it
    "an unknown name, with what may be meant": ["KV210_misspelt_name", "KV243_misspelt_format", "KV250_misspelt_field"],
    "a name that is never used": ["KV242_unused_names", "KV242_unused_format", "KV242_unused_space"],
    "a predicate that reads past a list": ["KV214_past_the_end_of_a_list", "KV214_draft_layers_past_the_list"],
    "fields that would lie on each other": ["KV222_field_twice", "KV224_covered_twice", "KV224_slot_twice"],
    "a field that would leave the page": ["KV221_piece_does_not_divide_the_page", "KV249_blocks_that_do_not_fill"],
    "a field misaligned for its dtype": ["KV225_offset", "KV225_stride", "KV225_page"],
    "a scale block that does not divide": ["KV221_scale_block_does_not_divide"],
    "a scale field of the wrong count": ["KV230_count_of_scales", "KV230_scales_finer_than_codes"],
    "a format that lacks a field of an operation": ["KV250_format_lacks_a_field"],
    "an operation that leaves out a field": ["KV250_field_left_out", "KV250_scale_left_out_of_a_put"],
    "an expectation that does not hold": ["KV301_scale_forgotten", "KV301_padding_forgotten", "KV303_no_error"],
    "an inexact division": ["KV217_remainder_in_a_let", "KV217_heads_over_ranks"],
    "a range": ["KV245_default_out_of_range", "KV245_min_above_max", "KV245_is_below_zero"],
    "a name that is no identifier": ["KV106_key_with_capitals", "KV106_layout_with_a_path"],
    "a name that is a keyword": ["KV241_keyword", "KV241_word_of_the_language"],
    "a name that collides in the generated module": ["KV240_let_and_config", "KV241_name_that_is_made"],
    "readers that read nothing of another": ["KV249_no_readers", "KV249_readers_of_their_own"],
    "a reader without an owner": ["KV249_readers_without_owners", "KV304_reader_without_an_owner"],
    "a page of 0 bytes": ["KV228_page_of_nothing", "KV221_empty_axis"],
}


def run(*argv: str, stdin: bytes = b"") -> tuple[int, str, str]:
    """The exit status, standard output and standard error of a command, with `problems` as the working directory."""
    out, err = io.StringIO(), io.StringIO()
    before = Path.cwd()
    os.chdir(PROBLEMS)
    try:
        status = main(argv, io.BytesIO(stdin), out, err)
    finally:
        os.chdir(before)
    return status, out.getvalue(), err.getvalue()


@cache
def reported(name: str) -> list[dict[str, Any]]:
    """The problems of one case, as data."""
    return json.loads(run("check", name, "--format", "json")[1])["problems"]


@cache
def known_codes() -> dict[str, str]:
    """Every code of every module's table, with what it is."""
    found: dict[str, str] = {}
    for module in pkgutil.iter_modules(kvgen.__path__):
        if module.name != "__main__":
            codes = getattr(importlib.import_module(f"kvgen.{module.name}"), "CODES", {})
            assert not set(found) & set(codes), module.name
            found |= codes
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_text(case: Path, golden: Callable[[str, Path], None]) -> None:
    status, out, err = run("check", case.name)
    if case.stem == IN_ANOTHER_ORDER:
        expected = case.with_suffix(".txt").read_bytes().decode()
        assert sorted(err.rstrip().split("\n\n")) == sorted(expected.rstrip().split("\n\n"))
    else:
        golden(err, case.with_suffix(".txt"))
    assert (status, out) == (0 if case.name[:5] in WARNINGS else 1, "")


@pytest.mark.parametrize("case", OWN, ids=lambda case: case.stem)
def test_name_begins_with_the_code_that_is_reported_first(case: Path) -> None:
    assert reported(case.name)[0]["code"] == case.name[:5]


UNFIT = """
    conftest sitecustomize usercustomize setup numpy torch triton sglang vllm transformers jinja2 jsonschema yaml pytest
    pip setuptools site builtins con nul aux prn com1 com9 lpt1 lpt9 match case type class kvgen generated
    typing_extensions filelock fsspec mpmath functorch torchgen test amdsmi pynvml
    distutils cgi annotationlib compression
"""


@pytest.mark.parametrize("name", UNFIT.split())
def test_names_that_no_module_can_have(name: str) -> None:
    """Whatever the Python that kvgen runs on: the last four are of the libraries of 3.11, 3.12, 3.14."""
    status, _, err = run("check", "-", "--format", "concise", stdin=SMALL.replace(b"small", name.encode()))
    assert status == 1
    assert err.startswith(f"<stdin>:2:9: error[KV241]: `{name}` ")
    fragment = b"kvgen: 1\nfragment: NAME\ndoc: D.\nformats: {row: {fields: {k: 'u8[1]'}, page: [[k]]}}\n"
    assert run("check", "-", stdin=fragment.replace(b"NAME", name.encode()))[0] == 0  # writes no file


def test_every_code_has_a_case() -> None:
    with_file = {case.name[:5] for case in CASES}
    assert with_file & set(WITHOUT_FILE) == set()
    assert with_file | set(WITHOUT_FILE) == set(known_codes())
    assert len(CASES) >= 60


def test_every_reported_code_is_in_a_table() -> None:
    assert {problem["code"] for case in CASES for problem in reported(case.name)} <= set(known_codes())


def test_no_stray_files() -> None:
    texts = {path.stem for path in PROBLEMS.glob("*.txt")}
    assert texts == {case.stem for case in CASES}
    mentioned = "".join(case.read_bytes().decode("utf-8", "replace") for case in CASES)
    for path in (PROBLEMS / "include").iterdir():
        assert f"include/{path.name}" in mentioned


@pytest.mark.parametrize("rule", RULES)
def test_rule_has_a_case(rule: str) -> None:
    assert set(RULES[rule]) <= {case.stem for case in CASES}


@pytest.mark.parametrize("case", OWN, ids=lambda case: case.stem)
def test_house_style(case: Path) -> None:
    """Lower case, no full stop, backticks in pairs; a message says what is wrong, and `help` alone what to do."""
    problems = reported(case.name)
    places = [(span["file"], span["line"], span["column"]) for span in (problem["span"] for problem in problems)]
    assert places == sorted(places)
    for problem in problems:
        message, span = problem["message"], problem["span"]
        for text in (message, *problem["notes"], problem["help"] or "x", *(x["text"] for x in problem["labels"])):
            assert not text.endswith(".") and text == text.strip(), text
            assert text.count("`") % 2 == 0, text
            assert not re.search(r"None|True|False|Fraction|<class", re.sub("`[^`]*`", "", text)), text
        assert message[0] in "`(" or message[0].isdigit() or message[0].islower(), message
        if not message.startswith("tokens must be"):  # as the generated module says it
            assert not re.search(r"\b(must|should|please|write|use)\b", re.sub("`[^`]*`", "", message)), message
        assert (span["line"], span["column"]) < (span["end_line"], span["end_column"])
        assert span["end_line"] <= len((PROBLEMS / span["file"]).read_text(encoding="utf-8").splitlines())
        written = (PROBLEMS / span["file"]).read_text(encoding="utf-8").splitlines()[span["line"] - 1]
        assert written[span["column"] - 1 :].strip() and written[span["column"] - 1] != " "


# Forms


def test_concise() -> None:
    status, out, err = run(
        "check", "KV221_scale_block_does_not_divide.yaml", "KV205_serves.yaml", "--format", "concise"
    )
    assert (status, out) == (1, "")
    assert err == (
        "KV205_serves.yaml:12:49: error[KV205]: `serves` is not supported yet\n"
        "KV221_scale_block_does_not_divide.yaml:13:21: error[KV221]: `dim` cannot be divided into blocks of 96\n"
    )


def test_concise_warning() -> None:
    status, out, err = run("check", "KV305_case_that_nobody_reaches.yaml", "--format=concise")
    assert (status, out) == (0, "")
    assert err == (
        "KV305_case_that_nobody_reaches.yaml:21:7: warning[KV305]: no expectation reaches this case of `either`\n"
    )


def test_json_with_labels_note_and_help() -> None:
    name = "KV221_scale_block_does_not_divide.yaml"
    block = {"file": name, "line": 13, "column": 21, "end_line": 13, "end_column": 28}
    number = {"file": name, "line": 5, "column": 3, "end_line": 5, "end_column": 6}
    status, out, err = run("check", name, "--format", "json")
    assert (status, err) == (1, "")
    assert json.loads(out) == {
        "problems": [
            {
                "code": "KV221",
                "severity": "error",
                "message": "`dim` cannot be divided into blocks of 96",
                "path": "formats.row.fields.k_scale",
                "span": block,
                "labels": [
                    {"span": block, "text": "", "primary": True},
                    {"span": number, "text": "`dim` is 512", "primary": False},
                ],
                "notes": ["512 = 5 x 96 + 32, so the last block would be short"],
                "help": "use a block that divides 512, such as 64 or 128",
            }
        ]
    }


def test_json_over_two_files() -> None:
    name = "KV240_format_of_a_fragment.yaml"
    here = {"file": name, "line": 11, "column": 3, "end_line": 11, "end_column": 11}
    there = {"file": "include/rows.yaml", "line": 6, "column": 3, "end_line": 6, "end_column": 11}
    [problem] = reported(name)
    assert problem == {
        "code": "KV240",
        "severity": "error",
        "message": "`frag_row` is defined twice",
        "path": "formats.frag_row",
        "span": here,
        "labels": [
            {"span": here, "text": "", "primary": True},
            {"span": there, "text": "also defined here, as `formats.frag_row`", "primary": False},
        ],
        "notes": [],
        "help": "rename one of them",
    }


def test_json_of_a_warning() -> None:
    status, out, err = run("check", "KV305_case_that_nobody_reaches.yaml", "--format", "json")
    assert (status, err) == (0, "")
    [problem] = json.loads(out)["problems"]
    assert (problem["severity"], problem["path"]) == ("warning", "formats.either[1]")


def test_all_problems_of_all_files_at_once_in_reading_order() -> None:
    names = ["KV242_unused_names.yaml", "KV015_key_twice.yaml", "KV210_in_two_files.yaml", "KV102_misspelt_key.yaml"]
    status, _, err = run("check", *names, "--format", "concise")
    assert status == 1
    assert [line.split(": ")[:2] for line in err.splitlines()] == [
        ["KV015_key_twice.yaml:4:1", "error[KV015]"],
        ["KV102_misspelt_key.yaml:12:8", "error[KV102]"],
        ["KV210_in_two_files.yaml:6:6", "error[KV210]"],
        ["KV242_unused_names.yaml:5:3", "error[KV242]"],
        ["KV242_unused_names.yaml:8:3", "error[KV242]"],
        ["KV242_unused_names.yaml:10:3", "error[KV242]"],
        ["KV242_unused_names.yaml:14:5", "error[KV242]"],
        ["include/broken.yaml:6:23", "error[KV210]"],
    ]
    assert run("check", *reversed(names), "--format", "concise")[2] == err


# Codes without a file

SMALL = b"""\
kvgen: 1
layout: small
doc: One buffer.
config:
  num_layers: {type: int, from: num_hidden_layers}
layers: {body: num_layers}
spaces:
  token: {slots: tokens, page: 16}
formats:
  row:
    fields: {k: "bf16[64]"}
    page: [[k]]
buffers:
  kv: {format: row, space: token, layers: body}
"""


def test_file_that_is_too_large() -> None:
    status, out, err = run("check", "-", "--format", "concise", stdin=b"#" * (MAX_BYTES + 1))
    assert (status, out) == (1, "")
    assert err.startswith("<stdin>:1:1: error[KV001]: ") and err.count("\n") == 1


def test_config_that_the_layout_refuses(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    status, out, err = run("budget", "-", "--config", str(config), "--tokens", "0", stdin=SMALL)
    assert (status, out) == (1, "")
    assert err == f"error[KV401]: num_hidden_layers is missing from the config\n --> {config}\n"


LOADED = """\
kvgen: 1
layout: loaded
doc: Rows that a model's numbers may not align, and layers that they may share.
config: {num_layers: {type: int}, head_dim: {type: int, min: 1}, interval: {type: int, min: 1}}
layers:
  body: num_layers
  sets: {full: layer % interval == 0}
spaces: {token: {slots: tokens, page: 16}}
formats:
  row:
    fields:
      k: {type: "i8[head_dim]", quant: {scale: k_scale}}
      k_scale: f32[1]
    page: [[k, k_scale]]
buffers:
  kv: {format: row, space: token, layers: full}
  kv_swa: {format: row, space: token, layers: layer % 3 == 1}
operations:
  set_kv: {store: [kv, kv_swa], args: {k: k}}
"""
K_SCALE = "row: offset of k_scale must be a multiple of 4, not 66"
SHARED = "layer 4: set_kv cannot tell kv from kv_swa: both are owned here"


def test_faults_of_load_time_name_the_line_of_the_spec(tmp_path: Path) -> None:
    """Scales behind 66 bytes; layer 4 is a second one, and one of those of a rest of 1 by 3."""
    (tmp_path / "loaded.yaml").write_text(LOADED)
    cases = [
        ({"num_layers": 8, "head_dim": 66, "interval": 9}, K_SCALE, 13, "k_scale: f32[1]", "      -------"),
        ({"num_layers": 8, "head_dim": 64, "interval": 2}, SHARED, 19, "set_kv: {store: [kv, kv_swa]", "  ------"),
    ]
    assert run("check", str(tmp_path / "loaded.yaml")) == (0, "", "")
    for config, message, line, text, marks in cases:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        for command in ("budget", "explain"):
            words = (command, str(tmp_path / "loaded.yaml"), "--config", str(path))
            words += ("--tokens", "16") if command == "budget" else ()
            status, out, err = run(*words)
            assert (status, out) == (1, "")
            first, *rest = err.splitlines()
            assert first == f"error[KV401]: {message}"
            place = f"{tmp_path / 'loaded.yaml'}:{line}:{marks.index('-') + 1}"
            assert rest[0] == f"  --> {path}" and rest[2] == f"  ::: {place}"
            assert rest[4].startswith(f"{line} | ") and text in rest[4]
            assert rest[5] == f"   | {marks} because of this"
            (problem,) = json.loads(run(*words, "--format", "json")[1])["problems"]
            primary, place = problem["labels"]
            assert primary["span"] == {"file": str(path)} and place["span"]["line"] == line and not place["primary"]


def test_a_module_names_what_of_the_spec_a_fault_is_about(tmp_path: Path) -> None:
    """By its place and the name of the file, in the text of the error; the problems are as they were."""
    (tmp_path / "loaded.yaml").write_text(LOADED)
    made = compile_spec(str(tmp_path / "loaded.yaml"), lambda file: Path(file).read_bytes()).namespace
    with pytest.raises(made.LayoutError) as error:
        made.Layout.from_config({"num_layers": 8, "head_dim": 66, "interval": 9})
    assert str(error.value) == f"loaded: {K_SCALE} (formats.row.fields.k_scale of loaded.yaml)"
    assert error.value.problems == (K_SCALE,)
    with pytest.raises(made.LayoutError) as error:
        made.Layout.from_config({"num_layers": 8, "head_dim": 64, "interval": 2})
    assert str(error.value) == f"loaded: {SHARED} (operations.set_kv of loaded.yaml)"


def test_lines_of_a_spec_do_not_change_its_module(tmp_path: Path) -> None:
    """Places have no line numbers, so that a comment leaves the module as it was."""
    texts = []
    for text in (LOADED, LOADED.replace("layers:\n", "# a comment\n\nlayers:\n", 1)):
        (tmp_path / "loaded.yaml").write_text(text)
        texts.append(compile_spec(str(tmp_path / "loaded.yaml"), lambda file: Path(file).read_bytes()).module.text)
    assert texts[0] == texts[1]


def test_two_specs_that_write_the_same_file(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_bytes(SMALL)
    second.write_bytes(SMALL)
    status, out, err = run("check", str(first), str(second))
    assert (status, out) == (1, "")
    assert err == (
        f"error[KV402]: `small` is also the name of the layout in {first}\n"
        f" --> {second}:2:9\n"
        "  |\n"
        "2 | layout: small\n"
        "  |         ^^^^^\n"
        "  |\n"
        "  = help: rename one of them\n"
    )


def test_fragment_where_a_layout_is_needed() -> None:
    status, out, err = run("explain", "include/rows.yaml")
    assert (status, out) == (1, "")
    assert err == (
        "error[KV403]: `rows` is a fragment\n"
        " --> include/rows.yaml:2:11\n"
        "  |\n"
        "2 | fragment: rows\n"
        "  |           ^^^^\n"
        "  |\n"
        "  = help: name a layout that includes it\n"
    )


def test_layout_that_is_no_pool_of_the_engine(tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_bytes(SMALL)
    status, out, err = run("build", str(file), "--engine", "sglang", "-o", str(tmp_path / "out"))
    assert (status, out) == (1, "")
    assert err == (
        "error[KV405]: `small` is not the MHA pool of SGLang: it has no operation `set_kv_buffer` that is a store\n"
        f" --> {file}:2:9\n"
        "  |\n"
        "2 | layout: small\n"
        "  |         ^^^^^\n"
        "  |\n"
        "  = note: it has no operation `get_kv_fields` that is a view\n"
        "  = note: it has no operation `get_contiguous_buf_infos` that is a describe\n"
        "  = note: it has no field of the config from `num_key_value_heads`\n"
        "  = note: it has no field of the config from `head_dim`\n"
        "  = note: it has no field of the config from `v_head_dim`\n"
        "  = note: it has no choice `kv_format` between formats by name (`of: [...]`)\n"
        "  = help: build it without --engine sglang\n"
    )
    assert not (tmp_path / "out").exists()


def test_config_that_no_shipped_layout_is_for(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    heads = '"num_attention_heads": 4, "hidden_size": 512'
    config.write_text(
        f'{{"num_hidden_layers": 4, {heads}, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 2048}}'
    )
    status, out, err = run("budget", "--config", str(config), "--tokens", "0")
    assert (status, out) == (1, "")
    assert err == (
        "error[KV406]: no shipped layout is for this config\n"
        f" --> {config}\n"
        "  = note: glm_dsa: index_head_dim is missing from the config\n"
        "  = note: gqa: kv_lora_rank: a latent per token, which the layouts mla and glm_dsa have\n"
        "  = note: hybrid_swa: sliding_window or attention_chunk_size is missing from the config\n"
        "  = note: hybrid_swa: kv_lora_rank: a latent per token, which the layouts mla and glm_dsa have\n"
        "  = note: mla: index_topk: sparse attention has indexer keys too, which the layout glm_dsa has\n"
        "  = note: shared_kv: kv_lora_rank: a latent per token, which the layouts mla and glm_dsa have\n"
        "  = note: shared_kv: neither num_kv_shared_layers nor cla_share_factor, so no layer reads what another has\n"
        "  = help: name a spec; `kvgen specs` lists the shipped ones\n"
    )


def test_command_line_that_cannot_be_read() -> None:
    status, out, err = run("check")
    assert (status, out) == (2, "")
    assert err == ("error[KV410]: the following arguments are required: SPEC\n  = help: see `kvgen check --help`\n")


def test_file_that_cannot_be_read() -> None:
    status, out, err = run("check", "nothing.yaml")
    assert (status, out) == (2, "")
    assert err == "error[KV411]: cannot read `nothing.yaml`: no such file or directory\n --> nothing.yaml\n"


@pytest.mark.parametrize("fault", [InternalError("the pages overlap"), KeyError("latent")])
def test_fault_of_kvgen_itself(fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise fault

    monkeypatch.setattr("kvgen.compile.compile_spec", broken)
    status, out, err = run("check", "-", stdin=SMALL)
    assert (status, out) == (2, "")
    assert err.startswith(f"error[KV499]: {fault}\n")
    assert f"= note: {type(fault).__name__} at line " in err
    assert err.endswith("= help: this is a bug in kvgen: please report it with the spec\n")
    assert "Traceback" not in err


# Accepting


def in_a_project_of_one_test(folder: Path, *options: str, ci: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a project whose one test compares `new` with `expected.txt`."""
    shutil.copy(Path(__file__).parent / "goldens.py", folder / "conftest.py")
    (folder / "test_it.py").write_text(
        "from pathlib import Path\n\n\n"
        "def test_it(golden):\n    golden('new\\n', Path(__file__).parent / 'expected.txt')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | ({"CI": "1"} if ci else {})
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), *options]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_mismatch_shows_the_difference_and_the_command(tmp_path: Path) -> None:
    (tmp_path / "expected.txt").write_text("old\n")
    done = in_a_project_of_one_test(tmp_path)
    assert done.returncode == 1
    assert "--- expected.txt\n+++ what came out\n@@ -1 +1 @@\n-old\n+new\n" in done.stdout
    assert "if this change is meant: pytest --update-golden test_it.py::test_it" in done.stdout
    assert (tmp_path / "expected.txt").read_text() == "old\n"


def test_update_rewrites(tmp_path: Path) -> None:
    done = in_a_project_of_one_test(tmp_path, "--update-golden")
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "expected.txt").read_text() == "new\n"
    assert in_a_project_of_one_test(tmp_path).returncode == 0


def test_update_is_refused_under_ci(tmp_path: Path) -> None:
    (tmp_path / "expected.txt").write_text("old\n")
    done = in_a_project_of_one_test(tmp_path, "--update-golden", ci=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--update-golden is refused where CI is set" in done.stderr
    assert (tmp_path / "expected.txt").read_text() == "old\n"
    assert in_a_project_of_one_test(tmp_path, ci=True).returncode == 1
