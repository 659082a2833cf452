"""Run by Python at the start of every process of a CPU server: this directory is on its PYTHONPATH."""

from megatron_rl.rollout.sglang.cpu_layer.stand_ins import install

install()
