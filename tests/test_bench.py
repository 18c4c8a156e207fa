"""The benches that need what is not here: that they say so, and that what they check and compare runs and is right."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    found = importlib.util.spec_from_file_location("bench_gpu", BENCH / "gpu.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "bench_gpu", module)
    found.loader.exec_module(module)
    return module


def test_without_cuda_it_says_so(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, BENCH / "gpu.py"], cwd=tmp_path, capture_output=True, text=True)
    said = "bench-gpu needs CUDA, and torch finds none here: nothing was measured\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")
    assert not list(tmp_path.iterdir())


def test_its_comparisons_hold(gpu: Any) -> None:
    """On the CPU, with interpreted kernels: 8 kinds, of which 7 are read back, and copies."""
    assert gpu.check("cpu", (1, 9)) == 2 * (8 + 7 * 2 * 2 + 8 * 3)


@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "fp8_scaled", "fp8_raw", "int8", "mxfp8"])
def test_values_that_are_off_are_seen(gpu: Any, kv_format: str) -> None:
    given = torch.randn((4, 512)).bfloat16()
    with pytest.raises(AssertionError):
        gpu.check_values("own", given.float() * 1.1, given, kv_format)


def test_what_it_times_runs(gpu: Any) -> None:
    """Every case once, and those that it is compared with, but for kernels of a GPU alone."""
    seen = []
    for case in gpu.cases("cpu", (3,)):
        seen.append(case.name)
        case.run()
        for name, run in case.others.items():
            if name != "pair":
                run()
    assert len(seen) == len(set(seen)) == 8 + 7 + 2


def test_others_do_the_same(gpu: Any) -> None:
    """The obvious stores write the bytes of the pool's where a row is a token's."""
    for kind in gpu.KINDS[:3]:
        store, load = gpu.stores_and_loads(kind, 5, "cpu")
        memory = store.run.__closure__
        assert memory is not None
        rows = store.others["torch"].__closure__
        names = dict(zip(store.others["torch"].__code__.co_freevars, rows, strict=True))
        own_rows = names["rows"].cell_contents
        store.run()
        before = own_rows.clone()
        own_rows.zero_()
        store.others["torch"]()
        different = (own_rows != before).float().mean().item()
        assert different < 0.01, kind.title  # division and the product with an inverse round apart
        store.run()
        for one, other in zip(load.run(), load.others["torch"](), strict=True):
            torch.testing.assert_close(one.flatten(1), other.flatten(1), rtol=0.02, atol=1e-3)


def test_the_document_can_be_read(gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The whole bench, with a clock that says that everything takes a millisecond."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(gpu, "check", lambda device, counts: 7)
    stock = gpu.cases
    monkeypatch.setattr(gpu, "cases", lambda device, counts: stock("cpu", (2,)))
    monkeypatch.setattr(gpu, "time_of", lambda run: 1e-3)
    monkeypatch.setattr(gpu, "copying", lambda nbytes: None)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--json", str(tmp_path / "out.json")])
    assert gpu.main() == 0
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["card"] == "a card" and document["copy_bytes_per_second"] == 2**31 / 1e-3
    first = document["lines"][0]
    assert (first["operation"], first["tokens"], first["bytes"]) == ("glm_dsa bf16 store", 2, 2 * (1152 + 1152 + 8))
    assert first["ratios"] == {"torch": 1.0, "copy": 1.0}
