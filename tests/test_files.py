"""Files and the system around them: what is read at once or refused, what is written, and whose fault is told."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cli import kvgen
from support.models import ROOT

from kvgen import files
from kvgen.files import MARK, UNFINISHED
from kvgen.source import MAX_BYTES

SPEC = """\
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
  kv: {format: row, space: token, layers: all}
"""
INCLUDING = SPEC.replace("layers: {body", "include: [rows.yaml]\nlayers: {body").replace(
    """\
formats:
  row:
    fields: {k: "bf16[64]"}
    page: [[k]]
""",
    "",
)
FRAGMENT = """\
kvgen: 1
fragment: rows
doc: One row.
formats:
  row:
    fields: {k: "bf16[64]"}
    page: [[k]]
"""
OURS = f"{MARK}another.yaml. Edit the spec, then: kvgen build another.yaml\n"
THEIRS = 'print("my own module")\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a spec and a config."""
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(SPEC)
    Path("config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    return tmp_path


def process(*words: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """kvgen as a process. One that waits for ever is ended, which fails the test."""
    given = {"capture_output": True, "timeout": 120, "env": os.environ | {"PYTHONPATH": str(ROOT)}} | options
    return subprocess.run([sys.executable, "-m", "kvgen", *words], **given)


def below(name: str) -> set[str]:
    return {str(path) for path in Path(name).rglob("*")}


# Files that kvgen did not write


def foreign(name: str) -> str:
    return (
        f"error[KV411]: kvgen did not write `{name}`, and does not replace it\n"
        f" --> {name}\n"
        "  = help: write to another folder with `-o`, rename the layout, or add `--force` to replace the file\n"
    )


@pytest.mark.parametrize("text", [THEIRS, "", "\n" + OURS, "# edited\n" + OURS])
def test_a_file_of_somebody_else_is_not_replaced(text: str) -> None:
    Path("out").mkdir()
    Path("out/small.py").write_text(text)
    Path("other.yaml").write_text(SPEC.replace("layout: small", "layout: other"))
    assert kvgen("build", "other.yaml", "small.yaml", "-o", "out") == (2, "", foreign("out/small.py"))
    assert kvgen("build", "other.yaml", "small.yaml", "-o", "out", "--diff") == (2, "", foreign("out/small.py"))
    assert below("out") == {"out/small.py"}  # nothing of the other is written either
    assert Path("out/small.py").read_text() == text


def test_a_file_of_somebody_else_is_replaced_where_that_is_asked_for() -> None:
    Path("small.py").write_text(THEIRS)
    assert kvgen("build", "small.yaml", "-o", ".", "--force") == (0, "wrote: small.py\n", "")
    assert Path("small.py").read_text().startswith(MARK)


def test_check_tells_a_file_of_somebody_else_from_one_that_has_changed() -> None:
    Path("small.py").write_text(THEIRS)
    assert kvgen("build", "small.yaml", "-o", ".", "--check") == (1, "foreign: small.py\n", "")
    status, out, _ = kvgen("build", "small.yaml", "-o", ".", "--check", "--format", "json")
    assert (status, json.loads(out)["files"]) == (1, [{"file": "small.py", "state": "foreign"}])
    assert kvgen("build", "small.yaml", "-o", ".", "--check", "--force") == (1, "changed: small.py\n", "")
    Path("small.py").write_text(OURS)
    assert kvgen("build", "small.yaml", "-o", ".", "--check") == (1, "changed: small.py\n", "")


def test_an_adapter_of_somebody_else_is_not_replaced() -> None:
    Path("out/sglang").mkdir(parents=True)
    Path("out/sglang/mla.py").write_text(THEIRS)
    status, out, err = kvgen("build", ROOT / "specs" / "mla.yaml", "-o", "out", "--engine", "sglang")
    assert (status, out, err) == (2, "", foreign("out/sglang/mla.py"))
    assert below("out") == {"out/sglang", "out/sglang/mla.py"}


def test_a_link_to_a_file_of_somebody_else_is_not_replaced() -> None:
    Path("out").mkdir()
    Path("theirs.py").write_text(THEIRS)
    Path("out/small.py").symlink_to("../theirs.py")
    assert kvgen("build", "small.yaml", "-o", "out") == (2, "", foreign("out/small.py"))
    assert Path("out/small.py").is_symlink()


def test_links_to_nothing_are_called_that() -> None:
    Path("out").symlink_to("nowhere")
    status, _, err = kvgen("build", "small.yaml", "-o", "out")
    assert (status, err.splitlines()[0]) == (
        2,
        "error[KV411]: cannot read `out/small.py`: `out` is a symbolic link to nothing",
    )
    Path("out").unlink()
    Path("out").mkdir()
    Path("out/small.py").symlink_to("nowhere")
    status, _, err = kvgen("build", "small.yaml", "-o", "out")
    assert (status, err.splitlines()[0]) == (
        2,
        "error[KV411]: cannot read `out/small.py`: `out/small.py` is a symbolic link to nothing",
    )


# Builds that are interrupted, and several at once


def interrupted(name: str) -> None:
    """Start a build that is killed as soon as it has written half a module."""
    code = (
        "import os, signal, sys\n"
        "from kvgen import files\n"
        "from kvgen.cli import main_entry\n"
        "files.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"sys.argv = ['kvgen', 'build', {name!r}, '-o', 'out']\n"
        "main_entry()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == -signal.SIGKILL


def test_the_next_build_removes_what_an_interrupted_one_left() -> None:
    interrupted("small.yaml")
    (left,) = below("out")
    assert left.startswith("out/.small.py.") and left.endswith(UNFINISHED)
    assert kvgen("build", "small.yaml", "-o", "out", "--check") == (1, "missing: out/small.py\n", "")
    assert below("out") == {left}
    assert kvgen("build", "small.yaml", "-o", "out") == (0, "wrote: out/small.py\n", "")
    assert below("out") == {"out/small.py"}


def test_so_does_one_that_has_nothing_to_write() -> None:
    kvgen("build", "small.yaml", "-o", "out")
    text = Path("out/small.py").read_text()
    Path("small.yaml").write_text(SPEC.replace("One buffer", "Another"))
    interrupted("small.yaml")
    assert len(below("out")) == 2
    Path("small.yaml").write_text(SPEC)
    assert kvgen("build", "small.yaml", "-o", "out") == (0, "current: out/small.py\n", "")
    assert below("out") == {"out/small.py"}
    assert Path("out/small.py").read_text() == text


def test_a_build_leaves_alone_what_another_is_writing() -> None:
    with files.writing_to(Path("out")):
        writing = Path(f"out/.other.py.x{UNFINISHED}")
        writing.write_text("half")
        assert kvgen("build", "small.yaml", "-o", "out")[0] == 0
        assert below("out") == {"out/small.py", str(writing)}
    Path("out/.small.py.swp").write_text("of an editor")
    assert kvgen("build", "small.yaml", "-o", "out")[0] == 0
    assert below("out") == {"out/small.py", "out/.small.py.swp"}


def test_a_folder_without_locks_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    assert kvgen("build", "small.yaml", "-o", "out") == (0, "wrote: out/small.py\n", "")


def test_builds_at_the_same_time_all_succeed() -> None:
    command = [sys.executable, "-m", "kvgen", "build", "small.yaml", "-o", "out"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) for _ in range(6)]
    assert [own.wait() for own in started] == [0] * 6
    assert below("out") == {"out/small.py"}
    assert kvgen("build", "small.yaml", "-o", "out", "--check") == (0, "", "")


# Modules of no spec


@pytest.mark.parametrize("target", ["host.1234:1700000000", ".#small.yaml", "small.yaml/below"])
def test_the_lock_of_an_editor_hides_no_stale_module(target: str) -> None:
    kvgen("build", "small.yaml", "-o", "out")
    Path("out/gone.py").write_text(OURS)
    Path(".#small.yaml").symlink_to(target)  # to nothing, to itself, through a file
    Path("link.yaml").symlink_to("link.yaml")
    Path("below.yaml").mkdir()
    assert kvgen("build", "small.yaml", "-o", "out", "--check") == (1, "extra: out/gone.py\n", "")


# What is no file


def special(kind: str) -> str:
    """Make something that is not a file, on most of which reading would wait."""
    if kind == "device":
        return "/dev/zero"
    path = "special.yaml"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        Path(path).mkdir()
    elif kind == "loop":
        Path(path).symlink_to(path)
    else:
        socket.socket(socket.AF_UNIX).bind(path)
    return path


WHY = {
    "fifo": "not a regular file",
    "socket": "not a regular file",
    "device": "not a regular file",
    "folder": "is a directory",
    "loop": "too many levels of symbolic links",
}


@pytest.mark.parametrize("kind", WHY)
@pytest.mark.parametrize(
    "words",
    [
        ["check", "FILE"],
        ["build", "FILE"],
        ["explain", "FILE"],
        ["explain", "small.yaml", "--config", "FILE"],
        ["budget", "small.yaml", "--config", "FILE", "--tokens", "0"],
        ["budget", "--config", "FILE", "--tokens", "0"],
        ["budget", "small.yaml", "--config", "config.json", "--tokens", "0", "--draft", "small.yaml,config=FILE"],
        ["diff", "small.yaml,config=config.json", "small.yaml,config=FILE"],
        ["profile", "small.yaml", "--config", "FILE"],
        ["specs", "--config", "FILE"],
    ],
    ids=" ".join,
)
def test_what_is_no_file_is_refused_at_once(words: list[str], kind: str) -> None:
    name = special(kind)
    status, out, err = kvgen(*(word.replace("FILE", name) for word in words))
    assert (status, out, err) == (2, "", f"error[KV411]: cannot read `{name}`: {WHY[kind]}\n --> {name}\n")


@pytest.mark.parametrize("kind", [kind for kind in WHY if kind != "device"])
def test_so_is_an_include(kind: str) -> None:
    Path(special(kind)).rename("rows.yaml")
    Path("small.yaml").write_text(INCLUDING)
    why = WHY[kind]
    if kind == "loop":
        Path("rows.yaml").unlink()
        Path("rows.yaml").symlink_to("rows.yaml")
    status, _, err = kvgen("check", "small.yaml")
    assert (status, err.splitlines()[0]) == (1, f"error[KV202]: cannot read `rows.yaml`: {why}")


def test_so_is_the_config_of_an_expectation() -> None:
    os.mkfifo("c.json")
    Path("small.yaml").write_text(f"{SPEC}expect:\n  - {{config: c.json, bytes_per_token: 1}}\n")
    status, _, err = kvgen("check", "small.yaml")
    assert (status, err.splitlines()[0]) == (1, "error[KV302]: cannot read `c.json`: not a regular file")


def test_a_file_that_becomes_a_fifo_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvgen.files.check_file", lambda file: None)
    os.mkfifo("special.yaml")
    assert kvgen("check", "special.yaml")[2].startswith(
        "error[KV411]: cannot read `special.yaml`: not a regular file\n"
    )


def test_a_pipe_that_kvgen_is_given_is_read() -> None:
    """What a shell makes of `<(...)`, and `/dev/stdin`."""
    reader, writer = os.pipe()
    os.write(writer, b'{"num_hidden_layers": 3}')
    os.close(writer)
    words = ["budget", "/dev/stdin", "--config", f"/dev/fd/{reader}", "--tokens", "16", "--format", "json"]
    done = process(*words, input=SPEC.encode(), pass_fds=[reader])
    os.close(reader)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b'"end_layer": 3' in done.stdout


# Links that leave the folder of a spec


def test_a_linked_include_stays_in_the_folder() -> None:
    for name in ("specs", "specs/below", "outside"):
        Path(name).mkdir()
    Path("specs/small.yaml").write_text(INCLUDING)
    Path("outside/rows.yaml").write_text(FRAGMENT)
    Path("specs/rows.yaml").symlink_to("../outside/rows.yaml")
    assert kvgen("check", "specs/small.yaml") == (
        1,
        "",
        "error[KV202]: cannot read `rows.yaml`: a symbolic link that leaves the folder of the spec\n"
        " --> specs/small.yaml:6:11\n"
        "  |\n"
        "6 | include: [rows.yaml]\n"
        "  |           ^^^^^^^^^\n",
    )
    Path("specs/below/rows.yaml").write_text(FRAGMENT)
    Path("specs/rows.yaml").unlink()
    Path("specs/rows.yaml").symlink_to("below/rows.yaml")
    assert kvgen("check", "specs/small.yaml") == (0, "", "")


def test_so_does_a_linked_config() -> None:
    Path("specs").mkdir()
    Path("specs/c.json").symlink_to("../config.json")
    Path("specs/small.yaml").write_text(f"{SPEC}expect:\n  - {{config: c.json, bytes_per_token: 256}}\n")
    status, _, err = kvgen("check", "specs/small.yaml")
    assert (status, err.splitlines()[0]) == (
        1,
        "error[KV302]: cannot read `c.json`: a symbolic link that leaves the folder of the spec",
    )


def test_specs_that_are_links_themselves_include_from_where_they_lie() -> None:
    """As in a sandbox that links every file of a project."""
    for name in ("store", "sandbox"):
        Path(name).mkdir()
    for name, text in (("small.yaml", INCLUDING), ("rows.yaml", FRAGMENT)):
        Path(f"store/{name}").write_text(text)
        Path(f"sandbox/{name}").symlink_to(f"../store/{name}")
    assert kvgen("check", "sandbox/small.yaml") == (0, "", "")


def test_standard_input_includes_from_the_working_directory_alone() -> None:
    Path("here").mkdir()
    Path("rows.yaml").write_text(FRAGMENT)
    Path("here/rows.yaml").symlink_to("../rows.yaml")
    assert process("check", "-", input=INCLUDING.encode()).returncode == 0
    done = process("check", "-", input=INCLUDING.encode(), cwd="here")
    assert b"error[KV202]: cannot read `rows.yaml`: a symbolic link that leaves the folder of the spec\n" in done.stderr


def test_a_file_that_is_too_large_is_not_measured() -> None:
    Path("small.yaml").write_bytes(b"#" * (3 * MAX_BYTES))
    status, _, err = kvgen("check", "small.yaml")
    assert (status, err.splitlines()[0]) == (
        1,
        "error[KV001]: the file has more than the 1048576 bytes that are allowed",
    )


# What is printed


def test_paths_are_printed_escaped() -> None:
    """An escape sequence, a line feed, and characters that reorder the text around them."""
    name = "o\x1b[2J\n\u202eu"
    shown = "o\\x1b[2J\\n\\u202eu/small.py"
    assert kvgen("build", "small.yaml", "-o", name) == (0, f"wrote: {shown}\n", "")
    assert kvgen("build", "small.yaml", "-o", name) == (0, f"current: {shown}\n", "")
    Path(name, "small.py").write_text(f"{MARK}\x1b[2J\u202e")
    status, out, _ = kvgen("build", "small.yaml", "-o", name, "--check", "--diff")
    head = f"--- {shown}\n+++ {shown}\n@@ -1 +1,"
    assert (status, out[: len(head)]) == (1, head)
    assert f"\n-{MARK}\\x1b[2J\\u202e\n\\ No newline at end of file\n" in out
    assert out.endswith(f"\nchanged: {shown}\n")
    assert all(character.isprintable() or character == "\n" for character in out)
    status, out, _ = kvgen("build", "small.yaml", "-o", name, "--check", "--format", "json")
    assert (status, json.loads(out)["files"]) == (1, [{"file": shown, "state": "changed"}])


def test_a_folder_whose_name_is_not_utf_8() -> None:
    done = process("build", "small.yaml", "-o", b"\xff\xfe")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"wrote: \\xff\\xfe/small.py\n", b"")
    done = process("build", "small.yaml", "-o", b"\xff\xfe", "--format", "json", "--check")
    assert (done.returncode, json.loads(done.stdout)["files"]) == (
        0,
        [{"file": "\\xff\\xfe/small.py", "state": "current"}],
    )


@pytest.mark.parametrize(
    "words",
    [
        ["build", "small.yaml", "-o", "-"],
        ["build", "small.yaml", "-o", "-", "--format", "json"],
        ["build", "small.yaml"],
        ["schema"],
        ["specs"],
        ["explain", "small.yaml"],
        ["check", "small.yaml", "--format", "json"],
        ["check", "nothing.yaml", "--format", "json"],
        ["--help"],
    ],
    ids=" ".join,
)
def test_standard_output_that_is_full(words: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = process(*words, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    said = "cannot write `standard output`: no space left on device\n --> standard output\n"
    if "nothing.yaml" in words:  # the problem that could not be printed as JSON
        said = "cannot read `nothing.yaml`: no such file or directory\n --> nothing.yaml\n"
    assert (done.returncode, done.stderr.decode()) == (2, f"error[KV411]: {said}")


def test_standard_error_that_is_full() -> None:
    with open("/dev/full", "wb") as full:
        done = process("check", "nothing.yaml", capture_output=False, stdout=subprocess.PIPE, stderr=full)
    assert (done.returncode, done.stdout) == (2, b"")


# Faults of the machine


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (MemoryError(), "error[KV412]: not enough memory\n  = help: see what `ulimit -v` or the container allows\n"),
        (
            ModuleNotFoundError("No module named 'jinja2.ext'", name="jinja2.ext"),
            "error[KV412]: `jinja2` is not installed\n  = help: pip install 'kvgen'\n",
        ),
        (
            ImportError("libcudart.so.13: cannot open shared object file", name="torch._C"),
            "error[KV412]: `torch` cannot be imported: libcudart.so.13: cannot open shared object file\n"
            "  = help: pip install 'kvgen[pool]'\n",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "/else/where"),
            "error[KV411]: cannot use `/else/where`: permission denied\n --> /else/where\n",
        ),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "error[KV411]: the system refuses: cannot allocate memory\n"),
    ],
    ids=repr,
)
def test_faults_of_the_machine_are_told_as_such(fault: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise fault

    monkeypatch.setattr("kvgen.explain.explain", broken)
    assert kvgen("explain", "small.yaml") == (2, "", said)


def test_faults_of_kvgen_stay_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ImportError("cannot import name 'x'", name="kvgen.layout")

    monkeypatch.setattr("kvgen.compile.resolve", broken)
    assert "this is a bug in kvgen" in kvgen("check", "small.yaml")[2]


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_profile_without_its_packages(package: str) -> None:
    code = f"import sys\nsys.modules[{package!r}] = None\nfrom kvgen.cli import main_entry\nmain_entry()\n"
    words = ["profile", "small.yaml", "--config", "config.json", "--arch", "sm_90"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (
        2,
        f"error[KV412]: `{package}` is not installed\n  = help: pip install 'kvgen[pool]'\n",
    )


def test_profile_without_a_place_for_kernels() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": "/proc/nope"}
    done = process("profile", "small.yaml", "--config", "config.json", "--arch", "sm_90", env=environment)
    assert (done.returncode, done.stderr.decode()) == (
        2,
        "error[KV411]: cannot use `/proc/nope`: no such file or directory\n"
        " --> /proc/nope\n"
        "  = help: Triton keeps kernels in `TRITON_CACHE_DIR`, or else in `.triton/cache` of the home folder\n",
    )
