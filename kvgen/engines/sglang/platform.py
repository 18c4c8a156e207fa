"""SGLang's own platforms with one method more: which class its pools are."""

from __future__ import annotations

from sglang.srt.platforms.cuda import CudaSRTPlatform
from sglang.srt.platforms.interface import KVPoolKind, SRTPlatform

from kvgen.engines.sglang import PluginError, adapter


class _WithGeneratedPool:
    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        """The generated pool where it is of this kind, else None: SGLang's own.

        Raises:
            PluginError: SGLang's budget is not that of the pool, as it did not load the plugin.
        """
        module = adapter()
        if kind != module.KIND:
            return None
        from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator

        if not hasattr(DefaultPoolConfigurator.__init__, "__wrapped__"):
            raise PluginError("kvgen: SGLang did not load the plugin `kvgen`; is SGLANG_PLUGINS set without it?")
        return module.TokenToKVPool


class KvgenCudaPlatform(_WithGeneratedPool, CudaSRTPlatform):
    """SGLang's CUDA platform on a generated pool."""


class KvgenPlatform(_WithGeneratedPool, SRTPlatform):
    """What SGLang uses on a machine without a device, on a generated pool."""
