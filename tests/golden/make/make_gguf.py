"""GGUF files: metadata, Q4_0, Q5_1, F16 and BF16 by the package gguf, Q5_K by ggml's own C code (libggml-python).

    GGUF_VOCABULARY=FILE python make_gguf.py [NAME ...]

FILE: a GGUF file with 288 tokens, whose vocabulary these get too: golden-quant/gguf_q4_1/model.gguf.
"""

import ctypes
import json
import os
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize

from quantised import base_model, config, folder, make_case

TYPES = gguf.GGMLQuantizationType
# Base, type of the matrices, and of those whose rows are no multiple of its block: what llama.cpp takes then.
FILES = {
    "gguf_q4_0": ("gguf", TYPES.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
    "gguf_q5_1": ("gguf", TYPES.Q5_1, gguf.LlamaFileType.MOSTLY_Q5_1),
    "gguf_q5_k": ("gguf_wide", TYPES.Q5_K, gguf.LlamaFileType.MOSTLY_Q5_K_S),
    "gguf_f16": ("gguf", TYPES.F16, gguf.LlamaFileType.MOSTLY_F16),
    "gguf_bf16": ("gguf", TYPES.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}
FALLBACK = {TYPES.Q5_K: TYPES.Q5_1}


def ggml():
    import libggml

    return ctypes.CDLL(str(Path(libggml.__file__).parent / "lib64" / "libggml-base.so"))


def by_ggml(matrix, kind):
    """Blocks of a matrix, as llama.cpp makes them without an importance matrix."""
    library, (n, k) = ggml(), matrix.shape
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3,
                                            ctypes.c_void_p]
    matrix = np.ascontiguousarray(matrix)
    blocks = np.zeros((n, gguf.quant_shape_to_byte_shape((n, k), kind)[1]), np.uint8)
    size = library.ggml_quantize_chunk(int(kind), matrix.ctypes.data, blocks.ctypes.data, 0, n, k, None)
    assert size == blocks.nbytes
    return blocks


def from_ggml(blocks, kind, elements):
    """Dequantised by ggml's C code."""
    name = f"dequantize_row_{kind.name.replace('_K', '_k').lower().replace('_k', '_K')}"
    function, values = getattr(ggml(), name), np.zeros(elements, np.float32)
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    blocks = np.ascontiguousarray(blocks)
    function(blocks.ctypes.data, values.ctypes.data, elements)
    return values


def add_vocabulary(writer):
    """Every field of the tokenizer, of another file."""
    for field in gguf.GGUFReader(os.environ["GGUF_VOCABULARY"]).fields.values():
        if field.name.startswith("tokenizer."):
            kind = field.types[0]
            writer.add_key_value(field.name, field.contents(), kind, field.types[1] if len(field.types) > 1 else None)


def write(path, base, kind, file_type):
    """Gives transformers' names of the tensors."""
    own, writer = config(base), gguf.GGUFWriter(path, "qwen3")
    writer.add_name(path.parent.name)
    writer.add_file_type(file_type)
    writer.add_block_count(own.num_hidden_layers)
    writer.add_context_length(own.max_position_embeddings)
    writer.add_embedding_length(own.hidden_size)
    writer.add_feed_forward_length(own.intermediate_size)
    writer.add_head_count(own.num_attention_heads)
    writer.add_head_count_kv(own.num_key_value_heads)
    writer.add_key_length(own.head_dim)
    writer.add_value_length(own.head_dim)
    writer.add_rope_freq_base(own.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(own.rms_norm_eps)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_vocabulary(writer)
    names, known = {}, gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, own.num_hidden_layers)
    for name, weight in base_model(base).state_dict().items():
        if name == "lm_head.weight":
            continue
        mine, weight = known.get_name(name, try_suffixes=(".weight",)), weight.float().numpy()
        names[mine] = name
        whole = weight.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        to = TYPES.F32 if weight.ndim == 1 else kind if whole else FALLBACK[kind]
        writer.add_tensor(mine, by_ggml(weight, to) if to == TYPES.Q5_K else quantize(weight, to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return names


def read(path, names):
    """The weights in f32 by gguf, after ggml has said the same, and the tensors' types."""
    weights, types = {}, {}
    for tensor in gguf.GGUFReader(path).tensors:
        kind, values = tensor.tensor_type, dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        types[tensor.name] = kind.name
        if kind not in (TYPES.F32, TYPES.F16, TYPES.BF16):
            assert np.array_equal(from_ggml(tensor.data, kind, values.size), values.reshape(-1)), tensor.name
        weights[names[tensor.name]] = torch.from_numpy(values.reshape(tensor.shape[::-1].tolist()).copy())
    return weights, types


if __name__ == "__main__":
    for name in sys.argv[1:] or FILES:
        base, kind, file_type = FILES[name]
        place = folder(name)
        names = write(place / "model.gguf", base, kind, file_type)
        weights, types = read(place / "model.gguf", names)
        (place / "tensors.json").write_text(json.dumps({"tensor_types": types, "hf_names": names}, indent=1))
        print(name, {mine: type for mine, type in types.items() if type != "F32"})
        make_case(place, base, weights)
