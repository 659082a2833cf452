"""One model in the three forms that are held against each other: transformers, Megatron on one rank, the engine's layout."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import transformers

from megatron_rl.checkpoint.hf_folder import RandomSource, write_folder
from megatron_rl.checkpoint.hf_shards import export_params, import_params
from megatron_rl.config.sections import OptimizerSection, TrainerSection
from megatron_rl.layout.intervals import matrix_shape
from megatron_rl.model_families.declaration import ModelDims, ModelFamily
from megatron_rl.model_families.shards import engine_boxes, engine_shapes
from megatron_rl.platforms.platform import Platform
from megatron_rl.trainer.parallel import destroy_distributed, destroy_model_parallel, init_distributed, init_model_parallel
from megatron_rl.trainer.policy import PolicyTrainer
from megatron_rl.types.layout import ParallelLayout
from megatron_rl.types.training import TrainSample

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ONE_RANK = ParallelLayout()
VOCAB_MULTIPLE = 64
WEIGHT_SEED, DATA_SEED = 3, 11


class SpreadSource(RandomSource):
    """Random weights that bf16 holds exactly, so that both dtypes run one model; norm gains differ from 1."""

    def __init__(self, dims: ModelDims) -> None:
        super().__init__(WEIGHT_SEED, dims.num_layers, std=dims.hidden_size**-0.5)

    def _draw(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = super()._draw(name, shape)
        if len(shape) == 1:
            generator = torch.Generator().manual_seed(sum(name.encode()))
            tensor = tensor + 0.2 * torch.randn(shape, generator=generator)
        return tensor.bfloat16().float()


def hf_tensors(family: ModelFamily, dims: ModelDims, source: RandomSource) -> dict[str, torch.Tensor]:
    """All Hugging Face tensors of a model."""
    tensors = {}
    for rule in family.rules_for(dims):
        for layer in range(dims.num_layers if rule.is_layered else 1):
            for expert in range(dims.num_experts if rule.is_expert else 1):
                for template in rule.hf_names:
                    name = template.format(layer=layer, expert=expert)
                    tensors[name] = source.whole(name, family.shape_of(template, dims))
    return tensors


def exported_tensors(trainer: PolicyTrainer, family: ModelFamily) -> dict[str, torch.Tensor]:
    """The trainer's weights as Hugging Face tensors, on the host."""
    spec = "te" if trainer.uses_transformer_engine else "local"
    shapes = {
        template.format(layer=layer, expert=expert): family.shape_of(template, trainer.dims)
        for rule in family.rules_for(trainer.dims)
        for template in rule.hf_names
        for layer in range(trainer.dims.num_layers if rule.is_layered else 1)
        for expert in range(trainer.dims.num_experts if rule.is_expert else 1)
    }
    tensors: dict[str, torch.Tensor] = {}
    chunks = trainer.chunk_parameters()
    for name, box, values in export_params(chunks, family, trainer.dims, ONE_RANK, 0, spec=spec, vocab_multiple=1):
        whole = tensors.setdefault(name, torch.zeros(shapes[name], dtype=values.dtype))
        rows = slice(box.global_row, box.global_row + box.num_rows)
        whole.view(matrix_shape(shapes[name]))[rows, box.global_col : box.global_col + box.num_cols] = values.cpu()
    return tensors


def engine_params(
    family: ModelFamily, dims: ModelDims, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, tp: int, tp_rank: int
) -> dict[str, torch.Tensor]:
    """One engine rank's parameters, cut from whole Hugging Face tensors without the resharding plan."""
    shapes = engine_shapes(family, dims, tp, VOCAB_MULTIPLE)
    params = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    for rule in family.rules_for(dims):
        for layer in range(dims.num_layers if rule.is_layered else 1):
            if rule.engine_name is None:
                continue
            param = params[rule.engine_name.format(layer=layer)]
            matrix = param.view(matrix_shape(tuple(param.shape)))
            for expert in range(dims.num_experts if rule.is_expert else 1):
                first = expert * (len(matrix) // dims.num_experts) if rule.is_expert else 0
                for component, template in enumerate(rule.hf_names):
                    whole = tensors[template.format(layer=layer, expert=expert)]
                    whole = whole.reshape(matrix_shape(tuple(whole.shape)))
                    for box in engine_boxes(family, rule, component, dims, tp, tp_rank, VOCAB_MULTIPLE):
                        rows = slice(box.global_row, box.global_row + box.num_rows)
                        part = whole[rows, box.global_col : box.global_col + box.num_cols]
                        row, col = first + box.local_row, box.local_col
                        matrix[row : row + box.num_rows, col : col + box.num_cols] = part.to(dtype)
    return params


def draw_samples(dims: ModelDims, lengths: Sequence[int]) -> list[TrainSample]:
    """Random sequences; the first third of each is its prompt."""
    rng = np.random.default_rng(DATA_SEED)
    samples = []
    for number, length in enumerate(lengths):
        mask = np.arange(length) >= max(1, length // 3)
        samples.append(
            TrainSample(
                sample_id=str(number),
                group_id=str(number // 2),
                token_ids_L=rng.integers(0, dims.vocab_size, length),
                loss_mask_L=mask,
                rollout_logprobs_L=np.where(mask, -np.log(dims.vocab_size), 0.0).astype(np.float32),
                versions_L=np.where(mask, 0, -1).astype(np.int32),
                reward=0.0,
                advantage=float(rng.normal()),
                is_correct=False,
                is_truncated=False,
            )
        )
    return samples


def transformers_logprobs(
    family: ModelFamily, dims: ModelDims, dtype: str, samples: Sequence[TrainSample], device: torch.device
) -> list[np.ndarray]:
    """Token-aligned float32 log-probs of each sequence, one by one; 0 for first tokens."""
    with tempfile.TemporaryDirectory() as folder:
        tensors = hf_tensors(family, dims, SpreadSource(dims))
        write_folder(Path(folder, "model"), family.hf_from_dims(dims), [tensors])
        model = transformers.AutoModelForCausalLM.from_pretrained(
            Path(folder, "model"), dtype=DTYPES[dtype], attn_implementation="eager", experts_implementation="eager"
        )
    model = model.to(device).eval()
    results = []
    with torch.no_grad():
        for sample in samples:
            tokens = torch.from_numpy(sample.token_ids_L).to(device)
            logprobs = torch.log_softmax(model(tokens[None]).logits[0].float(), dim=-1)
            picked = logprobs[:-1].gather(1, tokens[1:, None])[:, 0]
            results.append(np.concatenate(([0.0], picked.cpu().numpy())).astype(np.float32))
    return results


@contextmanager
def process_group(platform: Platform) -> Iterator[None]:
    """A world of one rank for the length of a check."""
    platform.prepare_megatron()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    init_distributed(platform, rank=0, world_size=1, master_address="127.0.0.1", master_port=port, timeout_s=60)
    try:
        yield
    finally:
        destroy_distributed()


@contextmanager
def one_rank_policy(
    platform: Platform, family: ModelFamily, dims: ModelDims, dtype: str, section: TrainerSection, *, load: bool = True
) -> Iterator[PolicyTrainer]:
    """A policy on one rank: with the weights of `SpreadSource`, or as Megatron draws them."""
    init_model_parallel(ONE_RANK, seed=1)
    try:
        trainer = PolicyTrainer(dims, dtype, section, ONE_RANK, platform, seed=1)
        if load:
            spec = "te" if trainer.uses_transformer_engine else "local"
            source = SpreadSource(dims)
            trainer.load_parameters(
                import_params(source, family, dims, ONE_RANK, 0, spec=spec, vocab_multiple=1, dtype=torch.float32)
            )
        yield trainer
    finally:
        destroy_model_parallel()


def section(learning_rate: float = 1e-3, **choices: object) -> TrainerSection:
    """The trainer's settings for a check: local layers and torch's optimizer unless asked otherwise."""
    chosen = {"layer_spec": "local", "fused_optimizer": "torch", "logprob_chunk_tokens": 1024, **choices}
    return TrainerSection(optimizer=OptimizerSection(learning_rate=learning_rate), **chosen)


def max_difference(left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(left, right, strict=True))


def token_differences(left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> np.ndarray:
    """Of all tokens but the first of each sequence, which has no log-prob."""
    return np.concatenate([np.abs(a - b)[1:] for a, b in zip(left, right, strict=True)])


