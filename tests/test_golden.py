"""The module of one small spec for each feature of the language, to the letter."""

from pathlib import Path

import pytest

from kvgen.compile import compile_spec

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(path for path in GOLDEN.iterdir() if path.is_dir() and path.name != "profile")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_module_matches_golden(case: Path, golden) -> None:
    compiled = compile_spec(str(case / "spec.yaml"), lambda file: Path(file).read_bytes())
    assert compiled.problems == ()
    assert compiled.module is not None
    golden(compiled.module.text, case / "expected.py")


def test_every_golden_has_a_spec() -> None:
    expected = {"spec.yaml", "expected.py"}
    assert {path.name for case in CASES for path in case.iterdir()} == expected | {"rows.yaml"}
    assert all((case / "spec.yaml").exists() and (case / "expected.py").exists() for case in CASES)
