"""The fixtures of kernel tests. A `conftest.py` takes them with `pytest_plugins = ["support.fixtures"]`.

With hypothesis enter `cast_fix()` and `Sanitizer()` inside the test instead: a fixture is set up once for all examples.
"""

from collections.abc import Iterator

import pytest

from .casts import cast_fix as _cast_fix
from .guard import GuardedAllocator
from .sanitizer import Sanitizer


@pytest.fixture
def cast_fix() -> Iterator[None]:
    """Interpreted kernels cast floats as the hardware does."""
    with _cast_fix():
        yield


@pytest.fixture
def sanitizer() -> Iterator[Sanitizer]:
    """Every access of every interpreted kernel is checked; a test that launched none has tested nothing and fails."""
    with Sanitizer() as active:
        yield active
    assert active.accesses, "the test asks for the sanitizer, but no interpreted kernel touched memory"


@pytest.fixture(params=["left", "right"])
def guarded(request: pytest.FixtureRequest) -> GuardedAllocator:
    """The `allocate` hook of a pool, once with guards flush on the left of each buffer and once on the right."""
    return GuardedAllocator(request.param)
