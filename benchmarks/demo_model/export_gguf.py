"""The trained weights as a GGUF file of architecture ``qwen35``, matrices in q8_0."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from benchmarks.demo_model.model import Config
from benchmarks.demo_model.optim import LEAST_ROWS
from benchmarks.demo_model.tokenizer import SPECIAL, token_texts

Q8_0 = gguf.GGMLQuantizationType.Q8_0


def is_quantized(name: str, shape: tuple[int, ...]) -> bool:
    """Large matrices; norms, convolutions and the few rows of alpha and beta stay float32."""
    return len(shape) == 2 and shape[0] >= LEAST_ROWS and "conv1d" not in name


def write(
    path: Path, config: Config, weights: Mapping[str, Tensor], merges: list[tuple[str, str]], *, name: str,
    description: str, licence: str,
) -> None:  # fmt: skip
    """Write the file."""
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_name(name)
    writer.add_description(description)
    writer.add_license(licence)
    writer.add_languages(["en"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    _add_sizes(writer, config)
    _add_vocabulary(writer, merges)
    for key, weight in weights.items():
        values = weight.detach().float().cpu().numpy()
        if key.endswith("ssm_a_log"):
            writer.add_tensor(key.removesuffix("_log"), -np.exp(values))
        elif is_quantized(key, values.shape):
            writer.add_tensor(key, gguf.quants.quantize(values, Q8_0), raw_dtype=Q8_0)
        else:
            writer.add_tensor(key, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: gguf.GGUFWriter, c: Config) -> None:
    pairs = c.rotated // 2
    writer.add_block_count(c.layers + 1)
    writer.add_context_length(c.context)
    writer.add_embedding_length(c.embd)
    writer.add_feed_forward_length(c.ffn)
    writer.add_head_count(c.heads)
    writer.add_head_count_kv(c.kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.eps)
    writer.add_rope_dimension_count(c.rotated)
    # Pair i belongs to section i % 3: the sections must reach every pair.
    writer.add_rope_dimension_sections([(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0])
    writer.add_rope_freq_base(c.rope_base)
    writer.add_ssm_conv_kernel(c.conv_taps)
    writer.add_ssm_state_size(c.ssm_state)
    writer.add_ssm_group_count(c.ssm_k_heads)
    writer.add_ssm_time_step_rank(c.ssm_v_heads)
    writer.add_ssm_inner_size(c.inner)
    writer.add_uint32("qwen35.full_attention_interval", c.interval)
    writer.add_uint32("qwen35.nextn_predict_layers", 1)
    writer.add_vocab_size(c.vocab)


def _add_vocabulary(writer: gguf.GGUFWriter, merges: list[tuple[str, str]]) -> None:
    texts = token_texts(merges)
    plain = len(texts) - len(SPECIAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(texts)
    writer.add_token_types([gguf.TokenType.NORMAL] * plain + [gguf.TokenType.CONTROL] * len(SPECIAL))
    writer.add_token_merges([f"{left} {right}" for left, right in merges])
    writer.add_eos_token_id(texts.index(SPECIAL[0]))
    writer.add_pad_token_id(texts.index(SPECIAL[0]))
    writer.add_add_bos_token(False)


def read(path: Path) -> tuple[Config, dict[str, Tensor]]:
    """The sizes in a file that ``write`` wrote, and its weights as float32."""
    reader = gguf.GGUFReader(path)

    def key(name: str) -> Any:
        return reader.fields[f"qwen35.{name}"].contents()

    config = Config(
        vocab=key("vocab_size"), embd=key("embedding_length"), ffn=key("feed_forward_length"),
        layers=key("block_count") - 1, interval=key("full_attention_interval"), heads=key("attention.head_count"),
        kv_heads=key("attention.head_count_kv"), head_dim=key("attention.key_length"),
        rotated=key("rope.dimension_count"), rope_base=key("rope.freq_base"), ssm_k_heads=key("ssm.group_count"),
        ssm_v_heads=key("ssm.time_step_rank"), ssm_state=key("ssm.state_size"), conv_taps=key("ssm.conv_kernel"),
        eps=key("attention.layer_norm_rms_epsilon"), context=key("context_length"),
    )  # fmt: skip
    weights = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if tensor.name.endswith("ssm_a"):
            weights[tensor.name + "_log"] = torch.from_numpy(np.log(-values))
        else:
            weights[tensor.name] = torch.from_numpy(values)
    return config, weights
