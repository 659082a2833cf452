"""Each check runs in its own interpreter, with the layer on PYTHONPATH as a server has it."""

import os
import subprocess
import sys
import textwrap

import pytest

from megatron_rl.rollout.sglang.launch_args import CPU_LAYER_PATH


def run(code: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(CPU_LAYER_PATH)}
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_kernels_can_be_declared_but_not_launched():
    output = run(
        """
        import triton, triton.language as tl
        from triton.language.extra import libdevice

        BLOCK = tl.constexpr(64)

        @triton.autotune(configs=[triton.Config({"BLOCK": 32}, num_warps=4)], key=["n"])
        @triton.heuristics({"EVEN": lambda args: True})
        @triton.jit
        def kernel(x, n: tl.constexpr):
            return libdevice.tanh(x)

        @triton.jit(do_not_specialize=["n"])
        def other(x: tl.tensor | None):
            pass

        for call in (lambda: kernel[(3,)](1), lambda: other(2), lambda: tl.load(0), lambda: libdevice.tanh(1)):
            try:
                call()
            except NotImplementedError as error:
                print(error)
        print(triton.cdiv(9, 4), triton.next_power_of_2(33))
        """
    )
    lines = output.splitlines()
    assert "kernel __main__.kernel was launched on a CPU" in lines[0]
    assert "__main__.other" in lines[1]
    assert lines[2].startswith("triton.language.load is not installed")
    assert lines[3].startswith("triton.language.extra.libdevice.tanh is not installed")
    assert lines[4] == "3 64"


def test_stand_ins_can_be_subclassed_and_named():
    run(
        """
        import soundfile, torchvision
        from torchvision.transforms.functional import InterpolationMode

        class Mine(torchvision.datasets.VisionDataset):
            pass

        assert not isinstance(3, soundfile.SoundFile)
        assert InterpolationMode.BICUBIC is InterpolationMode.BICUBIC
        assert not hasattr(torchvision, "__wrapped__")
        """
    )


def test_only_listed_packages_are_stood_in_for_and_real_ones_win():
    run(
        """
        import importlib.util, sys
        assert importlib.util.find_spec("no_such_package_at_all") is None
        assert importlib.util.find_spec("json.no_such_part") is None
        import numpy
        assert numpy.asarray([1]).sum() == 1
        assert type(sys.meta_path[-1]).__name__ == "CpuLayerFinder"
        """
    )


def test_a_real_package_wins(tmp_path):
    (tmp_path / "soundfile.py").write_text("origin = 'real'\n")
    output = run(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import soundfile; print(soundfile.origin)")
    assert output.strip() == "real"


def test_megatron_is_hidden_from_servers():
    output = run(
        """
        try:
            import megatron.core
        except ImportError as error:
            print(type(error).__name__)
        """
    )
    assert output.strip() == "ModuleNotFoundError"


@pytest.mark.parametrize("with_layer", [True, False])
def test_the_plugin_is_declared_to_processes_with_the_layer_only(with_layer):
    code = "from importlib.metadata import entry_points; print([e.name for e in entry_points(group='sglang.srt.plugins')])"
    if with_layer:
        assert "megatron_rl_cpu" in run(code)
    else:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        output = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60).stdout
        assert "megatron_rl_cpu" not in output
