"""The wheel and the editable install hold what they should, and give the same output.

Both are built from a copy of the project, without a network, and installed into environments of their own that see the
core dependencies of the environment running the tests, but neither its kvgen nor torch.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipapp
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
HIDDEN = ("kvgen", "__editable__", "torch", "triton", "__pycache__")
SPEC = "glm_dsa.yaml"


FOREIGN = ("PYTHON", "SOURCE_DATE_EPOCH")  # variables of the environment that no command sees


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed, run away from the project and its environment variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 0, f"{command} exited with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def pip(*arguments: str | Path, cwd: Path) -> None:
    """Run the pip of the environment running the tests; nothing may be fetched."""
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=cwd)


@dataclass(frozen=True)
class Installed:
    """An environment that kvgen was installed into."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def kvgen(self, *arguments: str | Path, cwd: Path) -> str:
        """Standard output of the installed console script."""
        return run(self.folder / "bin" / "kvgen", *arguments, cwd=cwd)


def environment_with_dependencies(folder: Path) -> Installed:
    """A fresh environment that sees every package of the running one but kvgen, torch and triton."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    visible = folder / "visible"
    visible.mkdir()
    for site_packages in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(site_packages).iterdir():
            if not entry.name.startswith(HIDDEN) and entry.suffix != ".pth" and not (visible / entry.name).exists():
                (visible / entry.name).symlink_to(entry)
    installed = Installed(folder / "env")
    purelib = run(installed.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    (Path(purelib.strip()) / "dependencies.pth").write_text(f"{visible}\n", encoding="utf-8")
    return installed


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, so that building leaves nothing behind in the original."""
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("source") / "kvgen", ignore=NOT_COPIED)


@pytest.fixture(scope="module")
def wheel(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the project."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, project, cwd=folder)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def from_wheel(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """An environment with the wheel."""
    folder = tmp_path_factory.mktemp("from_wheel")
    installed = environment_with_dependencies(folder)
    pip("--python", installed.python, "install", "--no-index", "--no-deps", wheel, cwd=folder)
    return installed


@pytest.fixture(scope="module")
def editable(project: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """An environment with an editable install of the copy, made after the wheel, which must not see its metadata."""
    folder = tmp_path_factory.mktemp("editable")
    installed = environment_with_dependencies(folder)
    options = ("--no-index", "--no-deps", "--no-build-isolation")
    pip("--python", installed.python, "install", *options, "--editable", project, cwd=folder)
    return installed


@dataclass(frozen=True)
class Built:
    """A clone, and what was built from it."""

    source: Path
    wheel: Path
    sdist: Path


def build(source: Path, folder: Path, umask: int) -> Built:
    """Build a wheel and an sdist with the backend that pyproject.toml names."""
    settings = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]
    program = f"""
import os, sys
os.umask({umask})
sys.path[:0] = {settings.get("backend-path", [])}
import {settings["build-backend"]} as backend
backend.build_wheel({str(folder)!r})
backend.build_sdist({str(folder)!r})
"""
    folder.mkdir()
    run(sys.executable, "-c", program, cwd=source)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Built(source, wheel, sdist)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Built, Built]:
    """The same from two clones of other times and permissions, under other masks."""
    folder = tmp_path_factory.mktemp("built")
    hidden = (".gitattributes", ".gitignore")
    found = []
    for name, umask, mode, seconds in (("one", 0o022, 0o644, 1_000_000_000), ("other", 0o077, 0o600, 1_700_000_001)):
        source = shutil.copytree(ROOT, folder / name / "kvgen", ignore=NOT_COPIED)
        for file in hidden:
            shutil.copy(ROOT / file, source / file)
        for path in source.rglob("*"):
            path.chmod(mode if path.is_file() else mode | (mode & 0o444) >> 2)  # who reads a folder may enter it
            os.utime(path, (seconds, seconds))
        found.append(build(source, folder / name / "dist", umask))
    return found[0], found[1]


@pytest.fixture(scope="module")
def unpacked(built: tuple[Built, Built], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the sdist holds."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(built[0].sdist) as sdist:
        sdist.extractall(folder, filter="data")
    return folder / "kvgen-0.1.0"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder with copies of the shipped specs, far from the project."""
    return shutil.copytree(ROOT / "specs", tmp_path / "copied")


def files_below(folder: str, pattern: str) -> set[str]:
    """Names of the project's files under `folder` that match, as a wheel lists them."""
    return {path.relative_to(ROOT / folder).as_posix() for path in (ROOT / folder).rglob(pattern)}


def test_wheel_holds_code_schema_templates_and_specs_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {f"kvgen/{name}" for name in files_below("kvgen", "*.py")}
    expected |= {"kvgen/spec.schema.json"}
    expected |= {f"kvgen/templates/{name}" for name in files_below("templates", "*.jinja")}
    expected |= {f"kvgen/specs/{name}" for name in files_below("specs", "*.yaml") | files_below("specs", "*.json")}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert "kvgen-0.1.0.dist-info/licenses/LICENSE" in names


def test_wheel_needs_only_the_core_dependencies(wheel: Path) -> None:
    metadata = zipfile.ZipFile(wheel).read("kvgen-0.1.0.dist-info/METADATA").decode("utf-8")
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert sorted(line.removeprefix("Requires-Dist: ").split(">")[0] for line in needed) == [
        "jinja2",
        "jsonschema",
        "pyyaml",
    ]
    assert "License-Expression: Apache-2.0" in metadata


def test_what_is_tested_are_the_lower_bounds() -> None:
    """`make test-oldest` installs those of the core, and `make test` those of the pool."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8").splitlines()
    assert [line.replace(">=", "==") for line in project["dependencies"]] == [
        line for line in oldest if not line.startswith("#")
    ]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    used = {*(ROOT / "constraints.txt").read_text(encoding="utf-8").split(), *makefile.split()}
    for needed in project["optional-dependencies"]["pool"]:
        assert f"{needed.partition(';')[0].replace('>=', '==')}.0" in used


@pytest.mark.parametrize("install", ["from_wheel", "editable"])
def test_install_runs_its_own_kvgen_without_torch(install: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    installed: Installed = request.getfixturevalue(install)
    program = "import importlib.util as u, kvgen; print(kvgen.__file__, u.find_spec('torch'))"
    home, torch = run(installed.python, "-c", program, cwd=tmp_path).split()
    source = installed.folder if install == "from_wheel" else request.getfixturevalue("project")
    assert Path(home).resolve().is_relative_to(source.resolve())
    assert torch == "None"


def test_wheel_and_editable_install_print_the_schema(
    from_wheel: Installed, editable: Installed, tmp_path: Path
) -> None:
    printed = from_wheel.kvgen("schema", cwd=tmp_path)
    assert printed == editable.kvgen("schema", cwd=tmp_path)
    assert json.loads(printed) == json.loads((ROOT / "kvgen" / "spec.schema.json").read_text(encoding="utf-8"))


def test_wheel_and_editable_install_know_the_shipped_layouts(
    from_wheel: Installed, editable: Installed, tmp_path: Path
) -> None:
    printed = from_wheel.kvgen("specs", cwd=tmp_path)
    in_place = editable.kvgen("specs", cwd=tmp_path)
    files, in_place_files = (re.findall(r"^  file     (.*)$", text, re.MULTILINE) for text in (printed, in_place))
    assert all(Path(file).is_file() for file in (*files, *in_place_files)) and not set(files) & set(in_place_files)
    for file, other in zip(files, in_place_files, strict=True):
        in_place = in_place.replace(other, file)
    assert printed == in_place
    assert [line for line in printed.splitlines() if not line.startswith(" ")] == [
        "glm_dsa",
        "gqa",
        "hybrid_swa",
        "mla",
        "shared_kv",
    ]
    config = ROOT / "tests" / "data" / "configs" / "kimi-k2.5.json"
    assert "70,272" in from_wheel.kvgen("budget", "--config", config, "--tokens", "64", cwd=tmp_path)


def test_wheel_and_editable_install_build_the_same_module(
    from_wheel: Installed, editable: Installed, elsewhere: Path, tmp_path: Path
) -> None:
    printed = from_wheel.kvgen("build", elsewhere / SPEC, "-o", "-", cwd=tmp_path)
    assert printed == editable.kvgen("build", elsewhere / SPEC, "-o", "-", cwd=tmp_path)
    assert printed == (ROOT / "generated" / SPEC.replace(".yaml", ".py")).read_text(encoding="utf-8")


def test_builds_are_the_same_whenever_and_wherever(built: tuple[Built, Built]) -> None:
    """Byte for byte, without being told a date."""
    one, other = built
    assert one.wheel.read_bytes() == other.wheel.read_bytes()
    assert one.sdist.read_bytes() == other.sdist.read_bytes()
    with tarfile.open(one.sdist) as sdist:
        assert {(member.uid, member.gid, member.uname, member.gname) for member in sdist} == {(0, 0, "", "")}
        assert {(member.isfile(), member.mode) for member in sdist} == {(True, 0o644), (False, 0o755)}


def test_the_sdist_makes_the_same_wheel(built: tuple[Built, Built], unpacked: Path, tmp_path: Path) -> None:
    again = build(unpacked, tmp_path / "dist", 0o022)
    assert again.wheel.read_bytes() == built[0].wheel.read_bytes()
    assert again.sdist.read_bytes() == built[0].sdist.read_bytes()


def test_the_sdist_holds_the_project(built: tuple[Built, Built]) -> None:
    """All that a clone has but .ci: the tests and what they read, generated modules, docs and the Makefile."""
    with tarfile.open(built[0].sdist) as sdist:
        found = {member.name.partition("/")[2] for member in sdist if member.isfile()}
    ignored = ("__pycache__", "build", "dist", "out")
    wanted = {"PKG-INFO", ".gitattributes", ".gitignore"}
    for top in ROOT.iterdir():
        files = [top] if top.is_file() else [path for path in top.rglob("*") if path.is_file()]
        for path in files if not top.name.startswith(".") else ():
            if not any(part in ignored or part.endswith(".egg-info") for part in path.relative_to(ROOT).parts):
                wanted.add(path.relative_to(ROOT).as_posix())
    assert found == wanted


def test_tests_of_the_sdist_run(unpacked: Path) -> None:
    """Each can be collected, and those that read specs, goldens and support pass."""
    options = ("-p", "no:cacheprovider", "-p", "no:xdist", "-q")
    collected = run(sys.executable, "-m", "pytest", *options, "--collect-only", cwd=unpacked)
    assert "error" not in collected.splitlines()[-1]
    files = ("tests/test_golden.py", "tests/test_sizes.py", "tests/test_side.py", "tests/test_readers.py")
    passed = run(sys.executable, "-m", "pytest", *options, *files, "-k", "not random", cwd=unpacked)
    assert " passed" in passed.splitlines()[-1] or "100%" in passed


@pytest.mark.parametrize("how", ["zip", "wheel on the path"])
def test_kvgen_runs_from_a_zip(how: str, built: tuple[Built, Built], elsewhere: Path, tmp_path: Path) -> None:
    """Schema, templates and shipped specs are read out of it; nothing is unpacked."""
    wheel = built[0].wheel
    dependencies = environment_with_dependencies(tmp_path)
    if how == "zip":
        zipfile.ZipFile(wheel).extractall(tmp_path / "unpacked")
        home = tmp_path / "kvgen.pyz"
        zipapp.create_archive(tmp_path / "unpacked", home, main="kvgen.cli:main_entry")
        shutil.rmtree(tmp_path / "unpacked")
        start = [dependencies.python, home]
    else:
        home = wheel
        code = f"import sys; sys.path.insert(0, {str(wheel)!r}); from kvgen.cli import main_entry; main_entry()"
        start = [dependencies.python, "-c", code]

    def from_zip(*words: str | Path) -> str:
        return run(*start, *words, cwd=tmp_path)

    assert json.loads(from_zip("schema")) == json.loads((ROOT / "kvgen" / "spec.schema.json").read_text())
    assert from_zip("check", elsewhere / SPEC) == ""
    committed = (ROOT / "generated" / SPEC.replace(".yaml", ".py")).read_text(encoding="utf-8")
    assert from_zip("build", elsewhere / SPEC, "-o", "-") == committed
    listed = json.loads(from_zip("specs", "--format", "json"))["specs"]
    assert [Path(own["file"]).relative_to(home).as_posix() for own in listed] == [
        f"kvgen/specs/{name}.yaml" for name in ("glm_dsa", "gqa", "hybrid_swa", "mla", "shared_kv")
    ]
    config = ROOT / "tests" / "data" / "configs" / "kimi-k2.5.json"
    assert "70,272" in from_zip("budget", "--config", config, "--tokens", "64")
    assert "\nmla: yes\n" in from_zip("specs", "--config", config)
