"""What `make demo` shows: build the shipped layout, price GLM-5.2 for 80 GiB, and check each price against a pool.

The pool is allocated on torch's `meta` device, which sizes tensors without memory, so this runs on any machine.
"""

import importlib
import io
import json
import sys
from pathlib import Path

from kvgen.cli import main

ROOT = Path(__file__).resolve().parent
SPEC = ROOT / "specs" / "glm_dsa.yaml"
CONFIG = ROOT / "tests" / "data" / "configs" / "glm-5.2.json"
MEMORY = "80GiB"


def kvgen(*arguments: str) -> str:
    """Run one kvgen command in this process; what it prints."""
    stdout = io.StringIO()
    status = main(arguments, io.BytesIO(), stdout, sys.stderr)
    if status:
        sys.exit(status)
    return stdout.getvalue()


def demo() -> None:
    """Build, price, allocate, compare."""
    print(f"$ kvgen build {SPEC.relative_to(ROOT)}")
    print(kvgen("build", str(SPEC), "-o", str(ROOT / "generated")).replace(f"{ROOT}/", ""))
    sys.path.insert(0, str(ROOT))
    glm_dsa = importlib.import_module("generated.glm_dsa")

    print(f"GLM-5.2 in {MEMORY}, priced by `kvgen budget`, against the bytes of a pool on the meta device:\n")
    print("  kv_format   indexers  bytes/token     tokens     priced bytes  allocated bytes")
    for kv_format in ("bf16", "fp8_scaled", "fp8_raw"):
        for elide_shared in (False, True):
            settings = (f"--set=kv_format={kv_format}", f"--set=elide_shared={str(elide_shared).lower()}")
            budget = ("budget", str(SPEC), "--config", str(CONFIG), "--memory", MEMORY, *settings, "--format", "json")
            priced = json.loads(kvgen(*budget))
            layout = glm_dsa.Layout.from_config(CONFIG, kv_format=kv_format, elide_shared=elide_shared)
            allocated = glm_dsa.Pool(layout, priced["tokens"], device="meta").num_bytes()
            indexers = len(layout.layers("index_k"))
            print(
                f"  {kv_format:<10}  {indexers:>8}  {priced['bytes_per_token']:>11,}  {priced['tokens']:>9,}"
                f"  {priced['total_bytes']:>15,}  {allocated:>15,}"
            )
            if allocated != priced["total_bytes"] or layout.fingerprint != priced["fingerprint"]:
                sys.exit("the pool does not allocate what was priced")
    print("\nEvery pool allocates exactly what was priced, reserved pages included.")


if __name__ == "__main__":
    demo()
