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
import zipapp
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
HIDDEN = ("kvgen", "__editable__", "torch", "triton", "__pycache__")
SPEC = "glm_dsa.yaml"


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed, run away from the project and its environment variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
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


@pytest.mark.parametrize("how", ["zip", "wheel on the path"])
def test_kvgen_runs_from_a_zip(how: str, wheel: Path, elsewhere: Path, tmp_path: Path) -> None:
    """Schema, templates and shipped specs are read out of it; nothing is unpacked."""
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
