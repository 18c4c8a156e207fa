"""The fake driver: launches are recorded with compiled kernels, operations of torch are counted."""

import gc
import sys
import weakref
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from fake_driver import (
    TARGETS,
    FakeDriver,
    Launch,
    count_operations,
    on_gpu,
    report_result,
    run_without_interpreter,
    without_interpreter,
)
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources


@triton.jit(do_not_specialize=["n"])
def copy_rows_kernel(target, source, n, PITCH: tl.constexpr, FIELDS: tl.constexpr, ROWS: tl.constexpr):
    """Copy the FIELDS, pairs of an offset and a power of two of bytes, of rows 0 to n - 1."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    for i in tl.static_range(len(FIELDS)):
        byte = row * PITCH + FIELDS[i][0] + tl.arange(0, FIELDS[i][1])[None, :]
        tl.store(target + byte, tl.load(source + byte, mask=row < n), mask=row < n)


@triton.jit
def fp8_kernel(target, source, N: tl.constexpr):
    index = tl.arange(0, N)
    tl.store(target + index, tl.load(source + index).to(tl.float8e4nv).to(tl.uint8, bitcast=True))


@triton.jit
def transpose_kernel(target, source, N: tl.constexpr):
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tile = tl.load(source + rows * N + columns)
    tl.store(target + rows * N + columns, tl.trans(tile))


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(count * 640, dtype=torch.uint8), torch.ones(count * 640, dtype=torch.uint8)


def copy_rows(n: int) -> None:
    copy_rows_kernel[(triton.cdiv(n, 16),)](*rows(max(n, 1)), n, PITCH=640, FIELDS=((0, 512), (512, 128)), ROWS=16)


@without_interpreter
def test_launches_are_recorded_and_not_made() -> None:
    target, source = rows(40)
    with FakeDriver("sm_90") as driver:
        copy_rows_kernel[(3, 2)](target, source, 40, 640, FIELDS=((0, 512),), ROWS=16, num_warps=2)
        copy_rows_kernel[lambda meta: (meta["ROWS"],)](target, source, 41, 640, FIELDS=((0, 512),), ROWS=16)
        (_, _), (first, second) = driver.kernels, driver.launches
    assert isinstance(first, Launch)
    assert (first.name, first.grid) == ("copy_rows_kernel", (3, 2, 1))
    assert first.arguments["target"] is target and first.arguments["source"] is source
    assert {name: first.arguments[name] for name in ("n", "PITCH", "FIELDS", "ROWS")} == {
        "n": 40,
        "PITCH": 640,
        "FIELDS": ((0, 512),),
        "ROWS": 16,
    }
    assert first.compiled.metadata.num_warps == 2
    assert (second.grid, second.arguments["n"], second.compiled.metadata.num_warps) == ((16, 1, 1), 41, 4)
    assert not target.any()


@pytest.mark.parametrize("target", TARGETS)
@without_interpreter
def test_kernels_compile_for_every_target(target: str) -> None:
    with FakeDriver(target) as driver:
        copy_rows(40)
    (launch,) = driver.launches
    asm = launch.compiled.asm
    if target.startswith("sm_"):
        assert f".target {target}" in asm["ptx"] and "st.global.v4.b32" in asm["ptx"]
        assert asm["cubin"].startswith(b"\x7fELF")
    else:
        assert target in asm["amdgcn"] and "store_dwordx4" in asm["amdgcn"]
        assert asm["hsaco"].startswith(b"\x7fELF")


@without_interpreter
def test_a_kernel_is_compiled_once_for_each_specialisation() -> None:
    with FakeDriver("sm_90") as driver:
        for n in (0, 1, 15, 16, 17, 1000):
            copy_rows(n)
        assert (len(driver.launches), len(driver.kernels)) == (6, 1)
        target, source = rows(2)
        copy_rows_kernel[(1,)](target, source[1:], 1, 640, FIELDS=((0, 512), (512, 128)), ROWS=16)
        assert (len(driver.launches), len(driver.kernels)) == (7, 2)
    with FakeDriver("sm_90") as another:
        copy_rows(3)
    assert (len(driver.launches), len(another.launches), len(another.kernels)) == (7, 1, 1)


@without_interpreter
def test_a_compiled_kernel_is_launched_by_hand() -> None:
    with FakeDriver("gfx942") as driver:
        copy_rows(3)
        (compiled,) = driver.kernels
        arguments = tuple(driver.launches[0].arguments.values())
        compiled[(5, 1, 1)](*arguments)
        compiled[(6, 1, 1)](*arguments)
        with pytest.raises(ValueError, match="shorter"):
            compiled[(7, 1, 1)](*arguments[1:])
    assert [launch.grid[0] for launch in driver.launches] == [1, 5, 6]
    assert all(launch.compiled is compiled for launch in driver.launches) and driver.kernels == [compiled]
    with FakeDriver("gfx942") as another:
        compiled[(8, 1, 1)](*arguments)
    assert [launch.grid[0] for launch in another.launches] == [8] and len(driver.launches) == 3


@without_interpreter
def test_what_cannot_be_launched_is_an_error() -> None:
    tensors = torch.zeros(64, dtype=torch.uint8), torch.zeros(64)
    with FakeDriver("sm_80") as driver, pytest.raises(CompilationError, match="fp8e4nv not supported"):
        fp8_kernel[(1,)](*tensors, N=64)
    assert not driver.launches and not driver.kernels
    with FakeDriver("sm_89") as driver:
        fp8_kernel[(1,)](*tensors, N=64)
    assert "cvt.rn.satfinite.e4m3x2.f32" in driver.launches[0].compiled.asm["ptx"]
    square = torch.zeros(1 << 15), torch.zeros(1 << 15)
    with FakeDriver("gfx942") as driver, pytest.raises(OutOfResources, match="shared memory"):
        transpose_kernel[(1,)](*square, N=256, num_warps=8)
    assert not driver.launches and not driver.kernels
    with pytest.raises(ValueError, match="no target 'sm_91': sm_80, sm_89"):
        FakeDriver("sm_91")


@without_interpreter
def test_the_driver_before_is_active_again() -> None:
    with FakeDriver("sm_90") as outer:
        with FakeDriver("gfx950") as inner:
            copy_rows(3)
        copy_rows(3)
        assert triton.runtime.driver.active is outer
    assert [kernel.metadata.target.arch for kernel in outer.kernels + inner.kernels] == [90, "gfx950"]
    with pytest.raises(RuntimeError, match="0 active drivers"):
        copy_rows(3)


def test_nothing_is_recorded_of_interpreted_kernels() -> None:
    with pytest.raises(RuntimeError, match="Triton interprets kernels"), FakeDriver("sm_90"):
        pass


@without_interpreter
def test_a_kernel_that_dies_later_asks_no_driver_to_unload_it(monkeypatch: pytest.MonkeyPatch) -> None:
    complaints: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    with FakeDriver("sm_90") as driver:
        copy_rows(3)
    kernel = weakref.ref(driver.kernels[0])
    driver.kernels.clear()
    driver.launches.clear()
    copy_rows_kernel.device_caches.clear()
    gc.collect()
    assert kernel() is None and not complaints


@without_interpreter
def test_a_launch_is_no_operation_of_torch() -> None:
    target, source = rows(40)
    with FakeDriver("sm_90") as driver, count_operations() as operations:
        copy_rows_kernel[(3,)](target, source, 40, 640, FIELDS=((0, 512),), ROWS=16)
    assert len(driver.launches) == 1 and operations.names == [] == operations.to_host


def test_the_results_of_the_process_without_the_interpreter(tmp_path: Path) -> None:
    file = tmp_path / "test_planted.py"
    file.write_text(
        "import os, pytest\n"
        "@pytest.mark.parametrize('value', [1, 2])\n"
        "def test_one(value): assert value == 1 and 'TRITON_INTERPRET' not in os.environ\n"
        "def test_two(): pytest.skip('planted')\n"
        "def test_three(): os._exit(0)\n"
        "def test_four(): pass\n"
    )
    results, output = run_without_interpreter(str(file), ("test_one", "test_two"))
    assert list(results) == ["test_one[1]", "test_one[2]", "test_two"]
    report_result("test_one[1]", results, output)
    with pytest.raises(pytest.fail.Exception, match="2 == 1"):
        report_result("test_one[2]", results, output)
    with pytest.raises(pytest.skip.Exception, match="planted"):
        report_result("test_two", results, output)
    results, output = run_without_interpreter(str(file), ("test_four", "test_three"))
    with pytest.raises(pytest.fail.Exception, match="(?s)did not get to the end.*test_four PASSED.*test_three"):
        report_result("test_four", results, output)


def test_a_module_that_turns_the_interpreter_on_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "test_planted.py"
    file.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import support, fake_driver\n"
        "@fake_driver.without_interpreter\n"
        "def test_one(): pass\n"
    )
    _, output = run_without_interpreter(str(file), ("test_one",))
    assert "test_planted imports `support`, which turns the interpreter on" in output


def test_operations_are_counted() -> None:
    x = torch.arange(6)
    with count_operations() as operations:
        x.view(2, 3)[0].add_(1)
        x.index_select(0, x.new_zeros(2))
    assert operations.names == [
        "aten.view.default",
        "aten.select.int",
        "aten.add_.Tensor",
        "aten.new_zeros.default",
        "aten.index_select.default",
    ]
    assert (operations.views, operations.to_host) == (2, [])
    x.clone()
    assert len(operations.names) == 5


@pytest.mark.parametrize(
    "copy",
    [
        torch.Tensor.cpu,
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        torch.Tensor.nonzero,
        torch.Tensor.unique,
        lambda x: x.to("cpu"),
        lambda x: x.to(device=torch.device("cpu"), dtype=torch.int32),
        lambda x: int(x[0]),
        lambda x: x.max().item(),
        lambda x: bool((x > 2).all()),
        lambda x: x[x > 2],
        lambda x: x.index_put_((x > 2,), x[:3].clone()),
        lambda x: torch.equal(x, x),
    ],
)
def test_copies_to_the_host_are_counted_on_the_cpu(copy) -> None:
    with count_operations() as operations:
        copy(torch.arange(6))
    assert len(operations.to_host) == 1


def test_what_stays_on_the_device_is_no_copy_to_the_host() -> None:
    x = torch.arange(6)
    with count_operations() as operations:
        x.to(torch.int32)
        x[x.clone().clamp(0, 5)] = torch.where(x > 2, x, 0)
        torch.empty_like(x).copy_(x)
    assert operations.to_host == [] and "aten.copy_.default" in operations.names


@without_interpreter
def test_a_launch_for_32_bits_takes_the_lower_half_of_a_number() -> None:
    """As Triton's own launchers do, without a word."""
    target, source = rows(8)
    constants = {"PITCH": 640, "FIELDS": ((0, 512),), "ROWS": 16}
    with FakeDriver("sm_90") as driver:
        narrow = copy_rows_kernel[(1,)](target, source, 8, **constants)
        wide = copy_rows_kernel[(1,)](target, source, 2**32 + 5, **constants)
        before = (driver.get_current_device(), None, None, None, None, None)
        for kernel in (narrow, wide):
            for number in (2**31 - 1, 2**31, 2**32 + 5):
                kernel.run(1, 1, 1, *before, target, source, number, *constants.values())
        given = [launch.arguments["n"] for launch in driver.launches]
    assert given == [8, 2**32 + 5, 2**31 - 1, -(2**31), 5, 2**31 - 1, 2**31, 2**32 + 5]


@without_interpreter
def test_a_second_gpu() -> None:
    """Tensors say that they lie there, kernels are compiled for each, and one of another GPU cannot be launched."""
    with FakeDriver("sm_90", "gfx950") as driver:
        with on_gpu(driver, 1):
            own = torch.zeros(4, device=torch.device("cuda", 1))
            assert own.device == own[1:].to(own.device).device == torch.device("cuda", 1)
            assert torch.cuda.current_device() == 0
            with torch.cuda.device(own.device):
                assert torch.cuda.current_device() == driver.gpu == 1
                copy_rows(8)
            assert torch.cuda.current_device() == driver.gpu == 0
        copy_rows(8)
        here, there = driver.launches[1], driver.launches[0]
        assert (here.gpu, there.gpu) == (0, 1)
        assert [own.compiled.metadata.target.arch for own in (here, there)] == [90, "gfx950"]
        with pytest.raises(RuntimeError, match="a kernel of GPU 1"):
            there.compiled.run(1, 1, 1, driver.get_current_device(), *[None] * 5, *there.arguments.values())
    assert torch.zeros(1).device == torch.device("cpu")
