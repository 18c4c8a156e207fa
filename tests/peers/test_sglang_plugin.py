"""How SGLang finds the plugin, and what it says where it cannot do what it was asked for."""

import os
import subprocess
import sys
import types
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import sglang.srt
from deployments import SHARING, Deployment, build, glm_5_2
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator
from sglang.srt.platforms import current_platform
from sglang.srt.platforms.interface import SRTPlatform

import kvgen.engines.sglang as plugin
from generated.sglang.glm_dsa import GlmDsaTokenToKVPool
from kvgen.engines.sglang.budget import correct
from kvgen.engines.sglang.platform import KvgenPlatform

ROOT = Path(__file__).parents[2]


def test_sglang_discovers_the_platform() -> None:
    """By its entry points: the name of the platform was all that these tests set."""
    assert type(current_platform) is KvgenPlatform
    assert not current_platform.is_out_of_tree()
    assert current_platform.get_kv_pool_cls(kind="dsa") is GlmDsaTokenToKVPool
    assert current_platform.get_kv_pool_cls(kind="mla") is current_platform.get_kv_pool_cls(kind="mha") is None
    for group, function in (("platforms", plugin.activate), ("plugins", plugin.register)):
        (found,) = entry_points(group=f"sglang.srt.{group}", name="kvgen")
        assert found.load() is function


def test_the_budget_is_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """And without the hook there is no pool: it would be allocated by one budget and priced by another."""
    hooked = DefaultPoolConfigurator.__init__
    assert correct in [cell.cell_contents for cell in hooked.__closure__]
    monkeypatch.setattr(DefaultPoolConfigurator, "__init__", hooked.__wrapped__)
    message = "^kvgen: SGLang did not load the plugin `kvgen`; is SGLANG_PLUGINS set without it\\?$"
    with pytest.raises(plugin.PluginError, match=message):
        current_platform.get_kv_pool_cls(kind="dsa")


@pytest.mark.parametrize("platform", ["", "other"])
def test_nothing_happens_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", platform)
    monkeypatch.delenv("KVGEN_SGLANG_POOL")
    assert plugin.activate() is None
    plugin.register()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "kvgen: set KVGEN_SGLANG_POOL to an adapter module, such as generated.sglang.glm_dsa"),
        (
            "generated.sglang.nothing",
            "kvgen: KVGEN_SGLANG_POOL is 'generated.sglang.nothing', and there is no such module; "
            "it is a name such as generated.sglang.glm_dsa, of a folder on PYTHONPATH",
        ),
        *(
            (
                name,
                f"kvgen: KVGEN_SGLANG_POOL is {name!r}, and there is no such module; "
                "it is a name such as generated.sglang.glm_dsa, of a folder on PYTHONPATH",
            )
            for name in (
                "generated/sglang/glm_dsa.py",
                " generated.sglang.glm_dsa",
                ".sglang.glm_dsa",
                "nowhere.glm_dsa",
            )
        ),
    ],
)
def test_adapters_that_are_nowhere(monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    """Said when the platform is chosen, before a server loads weights, and again where the pool is asked for."""
    monkeypatch.setenv("KVGEN_SGLANG_POOL", name)
    for ask in (plugin.activate, lambda: current_platform.get_kv_pool_cls(kind="dsa")):
        with pytest.raises(plugin.PluginError) as error:
            ask()
        assert str(error.value) == message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "generated.glm_dsa",
            "kvgen: KVGEN_SGLANG_POOL is 'generated.glm_dsa', which `kvgen build --engine sglang` did not write",
        ),
        (
            "broken_adapter",
            "kvgen: KVGEN_SGLANG_POOL is 'broken_adapter', which cannot be imported: No module named 'nothing'",
        ),
    ],
)
def test_adapters_that_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "broken_adapter.py").write_text("import nothing")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("KVGEN_SGLANG_POOL", name)
    with pytest.raises(plugin.PluginError) as error:
        current_platform.get_kv_pool_cls(kind="dsa")
    assert str(error.value) == message


def test_other_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "^kvgen: SGLang's pools can be replaced on CUDA alone; unset SGLANG_PLATFORM for its own$"
    with monkeypatch.context() as patched:
        patched.setenv("SGLANG_USE_CPU_ENGINE", "1")
        with pytest.raises(plugin.PluginError, match=message):
            plugin.activate()
    for hip, name, expected in (
        (None, "NVIDIA H200", "KvgenCudaPlatform"),
        ("6.4", "MI300X", None),
        (None, "ZW-1", None),
    ):
        with monkeypatch.context() as patched:
            patched.setattr("torch.accelerator.is_available", lambda: True)
            patched.setattr("torch.cuda.is_available", lambda: True)
            patched.setattr("torch.version.hip", hip)
            patched.setattr("torch.cuda.get_device_name", lambda name=name: name)
            if expected is None:
                with pytest.raises(plugin.PluginError, match=message):
                    plugin.activate()
            else:
                assert plugin.activate() == f"kvgen.engines.sglang.platform:{expected}"


def test_another_version_is_warned_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(plugin, "version", lambda name: "0.6.0")
    monkeypatch.setattr("sglang.srt.plugins.hook_registry.HookRegistry.register", lambda *arguments: None)
    plugin.register()
    assert "kvgen: this plugin is for SGLang 0.5.23 and this is 0.6.0" in caplog.text


def test_a_process_without_the_platform_has_sglangs_own_pool() -> None:
    """The way back: unset one variable."""
    program = (
        "import conftest\n"
        "from sglang.srt.platforms import current_platform\n"
        "from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator as Configurator\n"
        "print(type(current_platform).__name__, current_platform.get_kv_pool_cls(kind='dsa'))\n"
        "print(hasattr(Configurator.__init__, '__wrapped__'))\n"
    )
    environment = {**os.environ, "SGLANG_PLATFORM": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=Path(__file__).parent,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["SRTPlatform", "None", "False"]


def test_the_way_without_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The patch of docs/sglang.md applies to this SGLang, and then its budget and its pool are the generated ones."""
    patch = (ROOT / "docs" / "sglang.md").read_text(encoding="utf-8").split("```diff\n")[1].split("```")[0]
    names = ["mem_cache/kv_cache_configurator.py", "model_executor/pool_configurator.py"]
    for name in names:
        copy = tmp_path / "sglang" / "srt" / name
        copy.parent.mkdir(parents=True)
        copy.write_bytes((Path(sglang.srt.__path__[0]) / name).read_bytes())
    subprocess.run(["git", "apply", "-"], input=patch, text=True, cwd=tmp_path, check=True)
    patched = {}
    for name in names:
        module = types.ModuleType(f"patched.{Path(name).stem}")
        module.__dict__["__package__"] = "sglang.srt"
        sys.modules[module.__name__] = module
        exec(compile((tmp_path / "sglang" / "srt" / name).read_text(), name, "exec"), module.__dict__)
        patched[Path(name).stem] = module
    with Deployment("fp8_scaled", glm_5_2(**SHARING), draft_layers=1).serving() as configurator:
        pricing = patched["pool_configurator"].DefaultPoolConfigurator(configurator)
        hooked = DefaultPoolConfigurator(configurator)
        assert pricing._cell_size == hooked._cell_size == 53940 + 656 + 132
        assert pricing._fixed_overhead_bytes == hooked._fixed_overhead_bytes == 64 * (53940 + 656 + 132)
        monkeypatch.setattr(patched["kv_cache_configurator"], "current_platform", SRTPlatform())
        pool = build(configurator, 64, patched["kv_cache_configurator"].KVCacheConfigurator)
        assert type(pool) is GlmDsaTokenToKVPool


def test_what_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), Deployment("fp8_scaled", glm_5_2(**SHARING)).serving() as configurator:
        DefaultPoolConfigurator(configurator)
    line = "kvgen: the KV cache is that of /srv/generated/sglang/glm_dsa.py: 53940 bytes a token, 3452160 fixed"
    assert line.replace("/srv", str(ROOT)) in caplog.text
    assert line in (ROOT / "docs" / "sglang.md").read_text(encoding="utf-8")
