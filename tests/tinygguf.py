"""GGUF files made on the spot from tiny random models, as the published converter makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip(
    "llama_cpp", reason="llama-cpp-python is not installed: pip install 'outrider[llamacpp]'"
)
gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'outrider[torch]'")

WIDE: Final = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
"""Sizes in whole blocks of 32 numbers, which quantised weights need."""
_FILE_TYPE: Final = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32}
_LAYER: Final = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_REST: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 3, 4, 5, 6
"""GGUF's token types."""


def write(path: Path, model: Any, *, kind: str = "Q8_0", words: Any = None, **changes: Any) -> Path:
    """`kind`: of the matrices; `words`: a tokenizer of words.trained, else a plain list of ids;
    `changes`: further metadata, by key with its type's method: {"key": ("add_uint32", 3)}."""
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_file_type(_FILE_TYPE[kind])
    _add_words(writer, config.vocab_size, words)
    for key, (method, value) in changes.items():
        getattr(writer, method)(key.replace("__", "."), value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if config.model_type == "llama" and "self_attn.q_proj" in name:
            values = _interleaved(values, config.num_attention_heads)
        if config.model_type == "llama" and "self_attn.k_proj" in name:
            values = _interleaved(values, config.num_key_value_heads)
        _add_tensor(writer, _name(name), values, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _name(name: str) -> str:
    if name in _REST:
        return _REST[name]
    _, _, layer, *middle, ending = name.split(".")
    return f"blk.{layer}.{_LAYER['.'.join(middle)]}.{ending}"


def _add_tensor(writer: Any, name: str, values: npt.NDArray[np.float32], kind: str) -> None:
    if values.ndim == 1 or kind == "F32":
        writer.add_tensor(name, values)
        return
    wanted = gguf.GGMLQuantizationType[kind]
    packed = gguf.quants.quantize(values, wanted)
    writer.add_tensor(name, packed, raw_dtype=wanted)


def _interleaved(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """The rows of a head in the order of the family's own code: rotary pairs side by side."""
    rows, columns = values.shape
    halves = values.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


def _add_words(writer: Any, size: int, words: Any) -> None:
    if words is None:
        tokens, types, merges = [f"t{i}" for i in range(size)], [_NORMAL] * size, ["t 0"]
        writer.add_tokenizer_model("gpt2")
        writer.add_eos_token_id(1)
    else:
        tokens, types, merges = _listed(writer, size, words)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if merges:
        writer.add_token_merges(merges)
        writer.add_tokenizer_pre("gpt-2")


def _listed(writer: Any, size: int, words: Any) -> tuple[list[str], list[int], list[str]]:
    import json

    added = words.added_tokens_decoder
    tokens = words.convert_ids_to_tokens(range(len(words)))
    state = json.loads(words.backend_tokenizer.to_str())
    bytewise = state["decoder"]["type"] == "ByteLevel"
    types = []
    for i, token in enumerate(list(tokens)):
        if i in added:
            tokens[i] = added[i].content
            types.append(_CONTROL if added[i].special else _USER_DEFINED)
        else:
            types.append(_BYTE if not bytewise and token.startswith("<0x") else _NORMAL)
    tokens += [f"[PAD{i}]" for i in range(len(tokens), size)]
    types += [_UNUSED] * (size - len(types))
    writer.add_tokenizer_model("gpt2" if bytewise else "llama")
    writer.add_bos_token_id(words.bos_token_id)
    writer.add_eos_token_id(words.eos_token_id)
    if bytewise:
        writer.add_add_bos_token(False)
        return tokens, types, [" ".join(pair) for pair in state["model"]["merges"]]
    writer.add_add_space_prefix(True)
    # SentencePiece prefers what was merged first: the order of the ids.
    writer.add_token_scores([-float(i) for i in range(size)])
    return tokens, types, []
