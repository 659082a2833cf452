"""The GPU check: each mechanism once on one GPU, with numbers. `launch/gpu_check.sh` runs it, docs/install_gpu.md tells how.

Needs torch, transformers, numpy, pyyaml, safetensors and an unpacked megatron-core alone. Every check takes a platform, so
that the same code runs on a CPU with tiny sizes (tests/gpu/test_gpu_check.py).
"""
