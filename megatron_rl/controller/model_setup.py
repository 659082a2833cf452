"""Which model a run trains: its family, its dims and where its first weights come from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megatron_rl.checkpoint.hf_folder import FolderSource, RandomSource, TensorSource
from megatron_rl.config.algorithm_sections import ReferenceSection
from megatron_rl.config.sections import ModelSection
from megatron_rl.model_families.declaration import ModelDims, ModelFamily
from megatron_rl.model_families.hf_config import UnsupportedModelError
from megatron_rl.model_families.registry import get_family, load_dims

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """What every trainer rank and engine must agree on. Plain data: it travels to the actors."""

    family_name: str
    dims: ModelDims
    path: str | None
    seed: int
    vocab_multiple: int

    @property
    def family(self) -> ModelFamily:
        return get_family(self.family_name)

    def source(self) -> TensorSource:
        """Whole tensors of the first weights: a Hugging Face folder, or a random start that every rank draws alike."""
        return RandomSource(self.seed, self.dims.num_layers) if self.path is None else FolderSource(self.path)


def reference_model(section: ReferenceSection, policy: ModelSetup) -> ModelSetup:
    """The reference's model: the policy's, or the teacher's."""
    if section.path is None:
        return policy
    family, dims = load_dims(section.path)
    return replace(policy, family_name=family.name, dims=dims, path=section.path)


def build_model_setup(section: ModelSection, seed: int, tokenizer_vocab_size: int) -> ModelSetup:
    """Raises UnsupportedModelError in one line when the model cannot be served or is too small for the tokenizer."""
    if section.path is not None:
        family, dims = load_dims(section.path)
        if section.family not in (None, family.name):
            raise UnsupportedModelError(f"model.family: '{section.family}' but {section.path} is a '{family.name}'")
    else:
        if section.family is None:
            raise UnsupportedModelError("model.family: needed for a random start (model.path is not set)")
        family = get_family(section.family)
        dims = family.dims_from_hf({"vocab_size": tokenizer_vocab_size, **section.dims})
    if dims.vocab_size < tokenizer_vocab_size:
        raise UnsupportedModelError(
            f"model: vocabulary of {dims.vocab_size} is smaller than the tokenizer's {tokenizer_vocab_size}; "
            "set model.dims.vocab_size or another data.tokenizer"
        )
    return ModelSetup(family.name, dims, section.path, seed, section.vocab_multiple)
