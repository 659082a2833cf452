"""A small quantised GGUF file against transformers' own reader, tensor by tensor and bit by bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from megatron_rl.checkpoint.gguf_reader import GgufSource, gguf_name
from megatron_rl.checkpoint.hf_export import hf_tensor_shapes, write_model
from megatron_rl.checkpoint.hf_folder import CheckpointError, FolderSource
from megatron_rl.checkpoint.hf_shards import import_params
from megatron_rl.model_families.registry import load_dims
from megatron_rl.types.layout import ParallelLayout

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 96, 6, 2, 160, 2
WORDS = ["<pad>", "<s>", "</s>", "a", "b", "c", "Ġ", "ab", "Ġc"]


def write_gguf(path, *, tied=True, architecture="llama", scaled=False):
    rng = np.random.default_rng(7)
    head_dim = HIDDEN // HEADS
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(head_dim)
    if scaled:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_merges(["a b", "Ġ c"])
    writer.add_token_types([3, 3, 3] + [1] * (len(WORDS) - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")

    def add(name, *shape):
        values = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
            return
        kind = gguf.GGMLQuantizationType.Q8_0 if "embd" in name else gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(WORDS), HIDDEN)
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm.weight", HIDDEN)
        add(f"blk.{layer}.ffn_norm.weight", HIDDEN)
        add(f"blk.{layer}.attn_q.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.attn_k.weight", KV_HEADS * head_dim, HIDDEN)
        add(f"blk.{layer}.attn_v.weight", KV_HEADS * head_dim, HIDDEN)
        add(f"blk.{layer}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.ffn_gate.weight", FFN, HIDDEN)
        add(f"blk.{layer}.ffn_up.weight", FFN, HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN, FFN)
    add("output_norm.weight", HIDDEN)
    if not tied:
        add("output.weight", len(WORDS), HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_tensors_and_dims_equal_those_of_transformers(tmp_path, tied):
    source = GgufSource(write_gguf(tmp_path / "tiny.gguf", tied=tied))
    dims = source.dims
    assert (dims.num_layers, dims.hidden_size, dims.num_heads, dims.num_kv_heads, dims.head_dim) == (2, 96, 6, 2, 16)
    assert (dims.vocab_size, dims.ffn_size, dims.norm_epsilon, dims.rope_theta) == (9, 160, 1e-5, 5000.0)
    assert (dims.tied_embeddings, dims.bos_token_id, dims.eos_token_id) == (tied, 1, 2)
    with torch.device("meta"):
        config = transformers.LlamaConfig(**source.family.hf_from_dims(dims))
        model = transformers.LlamaForCausalLM(config)
    theirs = load_gguf_checkpoint(str(tmp_path / "tiny.gguf"), return_tensors=True, model_to_load=model)["tensors"]
    shapes = dict(hf_tensor_shapes(source.family, dims))
    assert shapes.keys() == theirs.keys()
    for name, shape in shapes.items():
        assert torch.equal(source.whole(name, shape), theirs[name].float()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_written_folder_is_a_whole_model(tmp_path, dtype):
    source = GgufSource(write_gguf(tmp_path / "tiny.gguf"))
    shapes = list(hf_tensor_shapes(source.family, source.dims))
    tensors = [(name, source.whole(name, shape).to(dtype)) for name, shape in shapes]
    write_model(tmp_path / "hf", source.family, source.dims, tensors, dtype, write_extras=source.save_tokenizer)
    family, dims = load_dims(tmp_path / "hf")
    assert (family, dims) == (source.family, source.dims)
    assert FolderSource(tmp_path / "hf").widest_dtype() is dtype
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=dtype)
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors)
    options = {"spec": "local", "vocab_multiple": 1, "dtype": torch.float32}
    layout = ParallelLayout(tp=2)
    for rank in range(2):
        direct = import_params(source, family, dims, layout, rank, **options)
        through_folder = import_params(FolderSource(tmp_path / "hf"), family, dims, layout, rank, **options)
        for name, tensor in through_folder[0].items():
            assert torch.equal(tensor, direct[0][name].to(dtype).float()), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    assert tokenizer("ab c")["input_ids"][-2:] == [7, 8]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"
    assert tokenizer.eos_token_id == 2


def test_what_cannot_be_read_is_one_line(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere.gguf: not found"):
        GgufSource(tmp_path / "nowhere.gguf")
    (tmp_path / "text.gguf").write_text("not a model at all, only words")
    with pytest.raises(CheckpointError, match=r"text.gguf: cut short or not a GGUF file"):
        GgufSource(tmp_path / "text.gguf")
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:-500])
    with pytest.raises(CheckpointError, match=r"cut.gguf: cut short or not a GGUF file"):
        GgufSource(tmp_path / "cut.gguf")
    with pytest.raises(CheckpointError, match=r"architecture 'gpt2' is not supported; supported: llama"):
        GgufSource(write_gguf(tmp_path / "gpt2.gguf", architecture="gpt2"))
    with pytest.raises(CheckpointError, match=r"scaled RoPE is not supported"):
        GgufSource(write_gguf(tmp_path / "scaled.gguf", scaled=True))
    source = GgufSource(tmp_path / "whole.gguf")
    with pytest.raises(CheckpointError, match=r"'output.weight' \('lm_head.weight'\) is missing"):
        source.whole("lm_head.weight", (9, 96))
    with pytest.raises(CheckpointError, match=r"'output_norm.weight' has shape \(96,\), expected \(95,\)"):
        source.whole("model.norm.weight", (95,))
    with pytest.raises(CheckpointError, match=r"'model.layers.0.mlp.gate.weight' has no GGUF counterpart"):
        gguf_name("model.layers.0.mlp.gate.weight")
