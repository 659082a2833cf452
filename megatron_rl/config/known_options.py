"""The option names of Megatron's dataclasses and of SGLang's server, from small tables beside this file.

`launch/generate_config_tables.py` writes the tables from the installed releases; a test compares the two.
A table holds `{"source", "version", "options": {name: {"type", "default"}}, "not_yaml": {name: type}}`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from megatron_rl.config.errors import did_you_mean
from megatron_rl.config.provenance import Problem
from megatron_rl.config.rollout_sections import SglangSection
from megatron_rl.config.sections import MegatronSection

TABLES = Path(__file__).parent / "tables"

_LAYOUT = "trainer.layout"
_OPTIMIZER = "trainer.optimizer"
_MODEL = "model.dims"

# Options that follow from our own keys: option -> the key to set instead; "" where no key decides it.
OWNED_BY_US: Mapping[str, Mapping[str, str]] = {
    "transformer": {
        "tensor_model_parallel_size": f"{_LAYOUT}.tp",
        "pipeline_model_parallel_size": f"{_LAYOUT}.pp",
        "virtual_pipeline_model_parallel_size": f"{_LAYOUT}.virtual_pp",
        "context_parallel_size": f"{_LAYOUT}.cp",
        "expert_model_parallel_size": f"{_LAYOUT}.ep",
        "expert_tensor_parallel_size": f"{_LAYOUT}.etp",
        "pipeline_model_parallel_layout": f"{_LAYOUT}.layers_per_chunk",
        "num_layers_in_first_pipeline_stage": f"{_LAYOUT}.layers_per_chunk",
        "num_layers_in_last_pipeline_stage": f"{_LAYOUT}.layers_per_chunk",
        "account_for_embedding_in_pipeline_split": f"{_LAYOUT}.layers_per_chunk",
        "account_for_loss_in_pipeline_split": f"{_LAYOUT}.layers_per_chunk",
        "sequence_parallel": f"{_LAYOUT}.tp (sequence parallelism follows it)",
        "num_layers": f"{_MODEL}.num_hidden_layers",
        "hidden_size": f"{_MODEL}.hidden_size",
        "num_attention_heads": f"{_MODEL}.num_attention_heads",
        "num_query_groups": f"{_MODEL}.num_key_value_heads",
        "kv_channels": f"{_MODEL}.head_dim",
        "ffn_hidden_size": f"{_MODEL}.intermediate_size",
        "num_moe_experts": f"{_MODEL}.num_experts",
        "moe_router_topk": f"{_MODEL}.num_experts_per_tok",
        "moe_ffn_hidden_size": f"{_MODEL}.moe_intermediate_size",
        "layernorm_epsilon": f"{_MODEL}.rms_norm_eps",
        "moe_aux_loss_coeff": "trainer.moe_aux_loss_coefficient",
        "moe_router_bias_update_rate": "trainer.moe_expert_bias_update_rate",
        "moe_router_enable_expert_bias": "trainer.moe_expert_bias_update_rate",
        "recompute_granularity": "trainer.recompute",
        "normalization": "model.family",
        "gated_linear_unit": "model.family",
        "activation_func": "model.family",
        "add_bias_linear": "model.family",
        "add_qkv_bias": "model.family",
        "qk_layernorm": "model.family",
        "moe_router_pre_softmax": f"{_MODEL}.norm_topk_prob",
        "variable_seq_lengths": "",
        "bf16": "model.dtype",
        "fp16": "model.dtype",
        "params_dtype": "model.dtype",
        "pipeline_dtype": "model.dtype",
        "transformer_impl": "trainer.layer_spec",
        "calculate_per_token_loss": "algorithm.aggregation",
    },
    "optimizer": {
        "optimizer": f"{_OPTIMIZER}.kind",
        "lr": f"{_OPTIMIZER}.learning_rate",
        "min_lr": f"{_OPTIMIZER}.min_learning_rate",
        "weight_decay": f"{_OPTIMIZER}.weight_decay",
        "adam_beta1": f"{_OPTIMIZER}.beta1",
        "adam_beta2": f"{_OPTIMIZER}.beta2",
        "adam_eps": f"{_OPTIMIZER}.epsilon",
        "clip_grad": f"{_OPTIMIZER}.clip_grad",
        "use_distributed_optimizer": f"{_OPTIMIZER}.distributed",
        "bf16": "model.dtype",
        "fp16": "model.dtype",
        "params_dtype": "model.dtype",
    },
    "ddp": {
        "use_distributed_optimizer": f"{_OPTIMIZER}.distributed",
    },
    "server_args": {
        "model_path": "model.path",
        "tokenizer_path": "data.tokenizer.path",
        "tp_size": "rollout.sglang.tp_size",
        "ep_size": "rollout.sglang.ep_size",
        "attn_dp_size": "rollout.sglang.attn_dp_size",
        "enable_dp_attention": "rollout.sglang.attn_dp_size",
        "dp_size": "rollout.num_engines",
        "nnodes": "rollout.sglang.num_nodes",
        "node_rank": "rollout.sglang.num_nodes",
        "dist_init_addr": "rollout.sglang.num_nodes (the address is chosen per run)",
        "api_key": "rollout.sglang.key_file (keys are made per run)",
        "admin_api_key": "rollout.sglang.key_file (keys are made per run)",
        "host": "rollout.sglang.urls (a started engine listens on an address of its node that is chosen per run)",
        "port": "rollout.sglang.urls (a started engine takes a free port)",
        "dtype": "model.dtype",
        "custom_weight_loader": "sync.transport (the weight sync brings its own loader)",
        "max_running_requests": "rollout.sglang.num_concurrent",
        "device": "cluster.gpus_per_engine_rank (0: the CPU)",
        "skip_tokenizer_init": "",
        "weight_version": "",
    },
}

TABLE_FILES: Mapping[str, str] = {
    "transformer": "megatron_transformer.json",
    "optimizer": "megatron_optimizer.json",
    "ddp": "megatron_ddp.json",
    "server_args": "sglang_server_args.json",
}


@cache
def load_table(name: str) -> Mapping[str, Any]:
    """The table of `name`, a key of TABLE_FILES."""
    table: Mapping[str, Any] = json.loads((TABLES / TABLE_FILES[name]).read_text(encoding="utf-8"))
    return table


def check_known_options(megatron: MegatronSection, sglang: SglangSection) -> Iterator[Problem]:
    """One problem per option that is unknown, of the wrong type, or owned by a key of ours."""
    for name in ("transformer", "optimizer", "ddp"):
        yield from check_options(name, getattr(megatron, name), f"trainer.megatron.{name}")
    yield from check_options("server_args", sglang.server_args, "rollout.sglang.server_args")


def check_options(name: str, given: Mapping[str, Any], prefix: str) -> Iterator[Problem]:
    """`given` against the table `name`; `prefix` is the key path of `given`."""
    if not given:
        return
    table, owned = load_table(name), OWNED_BY_US[name]
    source = f"{table['source']} {table['version']}"
    for option, value in given.items():
        path = f"{prefix}.{option}"
        if option in owned:
            yield path, f"is derived; set {owned[option]} instead" if owned[option] else "is derived; remove it"
        elif option in table["not_yaml"]:
            yield path, f"has type {table['not_yaml'][option]} in {source}, which YAML cannot express"
        elif option not in table["options"]:
            near = did_you_mean(path, [f"{prefix}.{known}" for known in table["options"] if known not in owned])
            yield path, f"not an option of {source}" + (near if near.startswith("; did you mean") else "")
        elif not accepts(table["options"][option]["type"], value):
            yield path, f"expected {table['options'][option]['type']} ({source}), got {value!r}"


def accepts(type_text: str, value: Any) -> bool:
    """Whether a YAML value can be one of the type that `type_text` (Python source) names; unknown names accept all."""
    return _accepts(ast.parse(type_text, mode="eval").body, value)


def _accepts(node: ast.expr, value: Any) -> bool:
    if isinstance(node, ast.BinOp):
        return _accepts(node.left, value) or _accepts(node.right, value)
    if isinstance(node, ast.Constant):
        return value is None if node.value is None else True
    if isinstance(node, ast.Subscript):
        name = ast.unparse(node.value).rpartition(".")[2]
        args = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if name == "Optional":
            return value is None or _accepts(args[0], value)
        if name == "Union":
            return any(_accepts(arg, value) for arg in args)
        if name == "Literal":
            return value in [ast.literal_eval(arg) for arg in args]
        return _is_a(name, value)
    return _is_a(ast.unparse(node).rpartition(".")[2], value)


def _is_a(name: str, value: Any) -> bool:
    if name in ("bool", "int", "str"):
        return type(value).__name__ == name
    if name == "float":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if name.lower() in ("list", "tuple", "sequence"):
        return isinstance(value, list)
    if name.lower() in ("dict", "mapping"):
        return isinstance(value, dict)
    return True
