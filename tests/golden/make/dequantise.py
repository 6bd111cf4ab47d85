"""The weights of a quantised folder as f32, from its files alone: value × scale in f32, by numpy."""

import json

import numpy as np
import torch
from safetensors.torch import load_file

PARTS = ("weight_scale_inv", "weight_scale", "weight_packed", "weight_shape", "input_scale", "activation_scale",
         "qweight", "qzeros", "scales", "g_idx")


def e4m3(codes):
    """Of bytes."""
    codes = codes.astype(np.int64)
    exponent, fraction = codes >> 3 & 15, codes & 7
    value = np.where(exponent == 0, fraction / 512, (1 + fraction / 8) * np.exp2(exponent - 7.0))
    return np.where(codes >> 7, -value, value).astype(np.float32)


def fields(words, bits, axis):
    """Unsigned integers in words along an axis, the lowest bits first."""
    words = np.moveaxis(words.numpy().view(np.uint32), axis, -1)
    split = words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32) & np.uint32(2**bits - 1)
    return np.moveaxis(split.reshape(*words.shape[:-1], -1), -1, axis).astype(np.int32)


def of_bytes(weight, scale):
    assert weight.dtype == torch.float8_e4m3fn
    values, scale = e4m3(weight.view(torch.uint8).numpy()), scale.float().numpy()
    assert scale.size == 1 or scale.shape == (values.shape[0], 1), scale.shape
    return values * (scale.reshape(()) if scale.size == 1 else scale)


def of_packed(words, shape, scale, bits):
    n, k = shape.tolist()
    values = fields(words, bits, 1)[:, :k] - 2 ** (bits - 1)
    scale = scale.float().numpy()
    assert values.shape == (n, k) and k % scale.shape[1] == 0
    return values.astype(np.float32) * np.repeat(scale, k // scale.shape[1], 1)


def of_gptq_v2(words, zeros, scales, order, bits):
    """Zero points as they are, without the minus one of version 1."""
    values, zeros, order = fields(words, bits, 0), fields(zeros, bits, 1), order.numpy()
    return ((values - zeros[order]).astype(np.float32) * scales.float().numpy()[order]).T.copy()


def dequantised(folder):
    own = json.loads((folder / "config.json").read_text())["quantization_config"]
    stored, weights = load_file(folder / "model.safetensors"), {}
    for key, value in stored.items():
        module, _, part = key.rpartition(".")
        of = lambda name: stored[f"{module}.{name}"]
        if own["quant_method"] == "gptq" and part == "qweight":
            assert own["checkpoint_format"] == "gptq_v2"
            made = of_gptq_v2(value, of("qzeros"), of("scales"), of("g_idx"), own["bits"])
        elif part == "weight_packed":
            bits = own["config_groups"]["group_0"]["weights"]["num_bits"]
            made = of_packed(value, of("weight_shape"), of("weight_scale"), bits)
        elif part == "weight" and value.element_size() == 1:
            made = of_bytes(value, stored.get(f"{module}.weight_scale_inv", stored.get(f"{module}.weight_scale")))
        elif part in PARTS or key == "lm_head.weight":
            continue
        else:
            made = value.float().numpy()
        weights[f"{module}.weight"] = torch.from_numpy(np.ascontiguousarray(made))
    return weights
