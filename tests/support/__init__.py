"""What the tests of Triton kernels share. Importing anything of it turns Triton's interpreter on.

`casts` puts the interpreter's float casts right, `sanitizer` checks every address that a kernel touches, `guard`
allocates memory that ends at a page nobody may touch, `sparse` tensors that are larger than memory, and `fixtures`
offers the first three to pytest.
"""

import os
import sys

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("import `support` before triton: its kernels are compiled or interpreted from the import on")
os.environ["TRITON_INTERPRET"] = "1"
