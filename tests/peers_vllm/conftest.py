"""vLLM's own code on a CPU: its model classes without weights, and what stands in for a GPU.

Nothing of vLLM is edited. Its model classes say which layers keep a cache, of how many heads and widths and in which
windows, its layers and attention backends how many bytes that is, and its planner how many blocks. For that they are
made on the device `meta`, where tensors have no memory, and nothing of them runs.
"""

import importlib.machinery
import os
import sys
import types
from pathlib import Path

ROOT = Path(__file__).parents[2]
os.environ |= {
    "CUDA_VISIBLE_DEVICES": "",  # Triton then counts as installed without a driver
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402
import torch  # noqa: E402


class Stub(types.ModuleType):
    """A module of which every attribute is a class that does nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *arguments, **options: None})


class _Operators:
    """Compiled operators, which layers look up when they are made; asked what they support, they say nothing."""

    def __getattr__(self, name: str) -> "_Operators":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *arguments: object) -> bool:
        return False


# Extensions that are compiled for CUDA: vLLM's operators, FlashAttention and DeepGEMM; FlashInfer is not installed.
for name in ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn", "vllm.third_party.deep_gemm"):
    sys.modules[name] = Stub(name)
# Side streams of experts and a cache of an allocator, which torch has with CUDA alone.
torch.cuda.Stream = torch.cuda.Event = Stub("cuda").Stream
torch.accelerator.empty_cache = lambda: None

import vllm.platforms  # noqa: E402
from vllm.platforms.cuda import NonNvmlCudaPlatform  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402


class Hopper(NonNvmlCudaPlatform):
    """vLLM's CUDA platform, with the answers of an H200 where it would ask the device."""

    device_type = "cpu"

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(9, 0)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "NVIDIA H200"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 141 * 2**30

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return 132


vllm.platforms._current_platform = Hopper()  # none is found where there is no GPU

import vllm._custom_ops  # noqa: E402  describes the operators that are there, before these are

vars(torch.ops).update({name: _Operators() for name in ("_C", "_C_cache_ops", "_moe_C")})

from vllm.v1.worker.workspace import init_workspace_manager  # noqa: E402

init_workspace_manager(torch.device("meta"))
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-report", action="store_true", help="write docs/peers.md")
