"""The plugin by which SGLang 0.5.23 uses a generated pool, and its budget with it.

SGLang finds both entry points by their groups, `sglang.srt.platforms` and `sglang.srt.plugins`. They do something only
where SGLANG_PLATFORM is `kvgen`: the platform is then SGLang's own for CUDA, or for no device, with one method more,
which answers with the pool class of the adapter; the plugin has SGLang's budget count what that pool allocates.
KVGEN_SGLANG_POOL names the adapter that `kvgen build --engine sglang` wrote, as in `generated.sglang.glm_dsa`.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

NAME = "kvgen"  # of the entry points
ADAPTER = "KVGEN_SGLANG_POOL"
WRITTEN_FOR = "0.5.23"

logger = logging.getLogger(__name__)


class PluginError(RuntimeError):
    """Why the plugin cannot do what it was asked for."""


def activate() -> str | None:
    """The platform that SGLang is to use, as the name of its class; None where another was asked for.

    Raises:
        PluginError: on a device that the generated pools are not for, and where there is no adapter.
    """
    if not _is_selected():
        return None
    _find_adapter()  # before the weights are loaded; SGLang cannot be imported yet, and so neither can the adapter
    import torch

    own = f"{__name__}.platform"
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        if not torch.accelerator.is_available():
            return f"{own}:KvgenPlatform"
        if torch.cuda.is_available() and torch.version.hip is None and "ZW" not in torch.cuda.get_device_name():
            return f"{own}:KvgenCudaPlatform"
    raise PluginError("kvgen: SGLang's pools can be replaced on CUDA alone; unset SGLANG_PLATFORM for its own")


def register() -> None:
    """Have SGLang's budget count what the generated pool allocates."""
    if not _is_selected():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from kvgen.engines.sglang.budget import TARGET, correct

    found = _version()
    if found != WRITTEN_FOR:
        logger.warning("kvgen: this plugin is for SGLang %s and this is %s", WRITTEN_FOR, found)
    HookRegistry.register(TARGET, correct, HookType.AFTER)


def adapter() -> Any:
    """The generated adapter module that KVGEN_SGLANG_POOL names.

    Raises:
        PluginError: no module is named, or none can be imported by that name.
    """
    name = _find_adapter()
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise PluginError(f"kvgen: {ADAPTER} is {name!r}, which cannot be imported: {error}") from error
    if not hasattr(module, "TokenToKVPool"):
        raise PluginError(f"kvgen: {ADAPTER} is {name!r}, which `kvgen build --engine sglang` did not write")
    return module


def _find_adapter() -> str:
    """The name of the adapter module. PluginError where it names none that is there."""
    name = os.environ.get(ADAPTER, "")
    if not name:
        raise PluginError(f"kvgen: set {ADAPTER} to an adapter module, such as generated.sglang.glm_dsa")
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, TypeError, ValueError):
        found = None
    if found is None:
        raise PluginError(
            f"kvgen: {ADAPTER} is {name!r}, and there is no such module; "
            "it is a name such as generated.sglang.glm_dsa, of a folder on PYTHONPATH"
        )
    return name


def _is_selected() -> bool:
    return os.environ.get("SGLANG_PLATFORM") == NAME


def _version() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "of no known version"
