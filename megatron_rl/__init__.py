"""Reinforcement learning of large Mixture-of-Experts language models on Megatron-Core and SGLang."""

__version__ = "0.1.0"
