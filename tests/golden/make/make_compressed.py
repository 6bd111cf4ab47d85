"""compressed-tensors checkpoints by llm-compressor, and fp8 per tensor by transformers' own op.

    python make_compressed.py [NAME ...]
"""

import sys

import torch
from safetensors.torch import save_file
from transformers import Qwen3ForCausalLM

from dequantise import dequantised
from quantised import BASES, SCRATCH, base_model, folder, is_quantised, make_case
from shared import fp8_rows, generator

W4A16_G32 = dict(group_0=dict(targets=["Linear"], weights=dict(
    num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)))
# Today's preset W8A16 has groups of 128; this is one scale for a row.
W8A16 = dict(group_0=dict(targets=["Linear"], weights=dict(
    num_bits=8, type="int", symmetric=True, strategy="channel")))


def from_disk(base):
    """As the tools want a model: one that knows where it comes from."""
    place = SCRATCH / base
    base_model(base).save_pretrained(place)
    return Qwen3ForCausalLM.from_pretrained(place, dtype=torch.bfloat16)


def compressed(name, rows=None, calibrated=False, **scheme):
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    place, model, more = folder(name), from_disk("plain"), {}
    if calibrated:
        seed, vocab, *_ = BASES["plain"]
        ids = torch.randint(3, vocab - 8, (16, 64), generator=generator(seed + 9)).tolist()
        rows_of = [dict(input_ids=row, attention_mask=[1] * 64) for row in ids]
        more = dict(dataset=Dataset.from_list(rows_of), max_seq_length=64, num_calibration_samples=16,
                    processor=PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0})), pad_token="a"))
    oneshot(model=model, recipe=QuantizationModifier(ignore=["lm_head"], **scheme), **more)
    model.save_pretrained(place, save_compressed=True)
    for file in place.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()
    make_case(place, "plain", dequantised(place), rows)


def fp8_tensor(name):
    """One scale for a matrix, `weight_block_size` null. The op gives it as [1, 1]; published files have a scalar."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    place, model = folder(name), base_model("plain")
    own = FineGrainedFP8Config(weight_block_size=None, modules_to_not_convert=["lm_head"])
    quantise = Fp8Quantize(type("Quantizer", (), {"quantization_config": own}))
    tensors = {}
    for key, weight in model.state_dict().items():
        if is_quantised(key):
            made = quantise.convert({key: weight})
            tensors |= {key: value.reshape(()) if value.numel() == 1 else value for key, value in made.items()}
        elif key != "lm_head.weight":
            tensors[key] = weight.clone()
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures, model.config.dtype = ["Qwen3ForCausalLM"], torch.bfloat16
    model.config.quantization_config = own.to_dict()
    model.config.save_pretrained(place)
    make_case(place, "plain", dequantised(place), fp8_rows)


ALL = {
    "fp8_tensor": lambda name: fp8_tensor(name),
    "ct_fp8_tensor": lambda name: compressed(name, calibrated=True, targets="Linear", scheme="FP8"),
    "ct_fp8_channel": lambda name: compressed(name, fp8_rows, targets="Linear", scheme="FP8_DYNAMIC"),
    "ct_w4a16_g32": lambda name: compressed(name, config_groups=W4A16_G32),
    "ct_w8a16": lambda name: compressed(name, config_groups=W8A16),
}

if __name__ == "__main__":
    for name in sys.argv[1:] or ALL:
        ALL[name](name)
