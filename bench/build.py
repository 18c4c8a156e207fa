"""How long a build takes, cold, beside a bare Python start; and `from_config` for a thousand layers.

Each command runs in a process of its own, in turns, so that a busy machine slows all alike. The figures are medians.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 15

BAD_SPEC = "kvgen: 1\nlayout: bad\ndoc: One fault.\nlayers: {body: layrs}\nconfig:\n  layers_: {type: int}\n"


def seconds(command: list[str], folder: Path) -> float:
    """Wall time of one process, whatever its exit status."""
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return time.perf_counter() - start


def from_config_milliseconds(num_layers: int) -> float:
    """Median time of `Layout.from_config` with a list of `num_layers` indexer types."""
    sys.path.insert(0, str(ROOT))
    from kvgen.compile import compile_spec

    compiled = compile_spec(str(ROOT / "specs" / "glm_dsa.yaml"), lambda file: Path(file).read_bytes())
    config = json.loads((ROOT / "tests" / "data" / "configs" / "glm-5.2.json").read_text())
    config |= {
        "num_hidden_layers": num_layers,
        "indexer_types": ["full", "full", *["shared", "full"] * (num_layers // 2)],
    }
    del config["index_topk_freq"], config["index_skip_topk_offset"]
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        compiled.namespace.Layout.from_config(config)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def bench() -> None:
    """Print one table."""
    kvgen = [sys.executable, "-m", "kvgen"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "bad.yaml").write_text(BAD_SPEC)
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "kvgen build glm_dsa.yaml": [
                *kvgen,
                "build",
                str(ROOT / "specs" / "glm_dsa.yaml"),
                "-o",
                str(folder / "out"),
            ],
            "kvgen check glm_dsa.yaml": [*kvgen, "check", str(ROOT / "specs" / "glm_dsa.yaml")],
            "kvgen check a bad spec": [*kvgen, "check", str(folder / "bad.yaml")],
        }
        times: dict[str, list[float]] = {what: [] for what in commands}
        for _ in range(ROUNDS):
            for what, command in commands.items():
                times[what].append(seconds(command, folder))
    bare = statistics.median(times["python -c pass"])
    for what, measured in times.items():
        median = statistics.median(measured)
        print(f"{what:<26} {1000 * median:>7.0f} ms  {median / bare:>6.1f} x a bare start")
    for num_layers in (78, 1000):
        print(f"from_config, {num_layers:>4} layers   {from_config_milliseconds(num_layers):>7.2f} ms")


if __name__ == "__main__":
    bench()
