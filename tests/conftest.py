"""Options and fixtures of the tests: accepting goldens, and what kernels are tested with."""

pytest_plugins = ["goldens", "support.fixtures"]
