"""One package; the base install is light, every heavy part is an extra. docs/dependencies.md says why each is here."""

from setuptools import find_packages, setup

TORCH = ["torch>=2.11"]
EXTRAS = {
    "train": [
        *TORCH,
        "megatron-core>=0.16.1,<0.20",
        "safetensors>=0.5",
        "transformers>=5.17",
        "psutil",
        "xxhash>=3.4",
        "numba>=0.60",
    ],
    "rollout": [*TORCH, "xxhash>=3.4", "numba>=0.60", "aiohttp>=3.9"],
    "control": ["ray[default]>=2.50", "psutil", "aiohttp>=3.9"],
    "data": ["reasoning-gym>=0.1.24", "math-verify>=0.9", "pyarrow>=15", "tokenizers"],
    "telemetry": ["tensorboard>=2.16"],
    "gguf": ["gguf>=0.10"],
    "gpu": ["transformer-engine[pytorch]>=2.0"],
    "test": ["pytest>=8", "hypothesis>=6.100", "ruff>=0.8", "mypy>=1.13", "types-PyYAML", "matplotlib>=3.8"],
}
EXTRAS["all"] = sorted({r for name in ("train", "rollout", "control", "data", "telemetry", "gguf") for r in EXTRAS[name]})

setup(
    name="megatron-rl",
    version="0.1.0",
    description="Reinforcement learning of large Mixture-of-Experts language models on Megatron-Core and SGLang",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_rl", "megatron_rl.*"]),
    package_data={"megatron_rl": ["config/tables/*.json", "py.typed"]},
    install_requires=["numpy>=1.26", "pyyaml>=6"],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["megatron-rl=megatron_rl.cli.main:main"]},
)
