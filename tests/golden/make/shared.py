"""What all generators share: seeded weights that bf16 holds, prompts, and what transformers makes of a model."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "2")

import math
from pathlib import Path

import torch
from safetensors.torch import save_file

torch.set_num_threads(2)

# Results: OUT/golden and OUT/golden-quant.
OUT = Path(os.environ.get("GOLDEN_OUT", Path(__file__).resolve().parent.parent))


def generator(seed):
    return torch.Generator().manual_seed(seed)


def matrix(shape, seeded):
    """Rows, groups of 32 columns and means differ, so that a wrong scale, group or zero point shows."""
    n, k = shape
    columns = torch.exp(0.5 * torch.randn(math.ceil(k / 32), generator=seeded)).repeat_interleave(32)[:k]
    weight = torch.randn(n, k, generator=seeded) * torch.exp(0.35 * torch.randn(n, 1, generator=seeded))
    weight = weight * columns / columns.pow(2).mean().sqrt() + 0.15 * torch.randn(n, 1, generator=seeded)
    return weight / math.sqrt(k)


def fill(model, seed):
    """Every parameter of a model random and rounded to bf16, in the order of its names."""
    seeded = generator(seed)
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            shape = parameter.shape
            if name.endswith("norm.weight"):
                value = 1 + 0.2 * torch.randn(shape, generator=seeded)
            elif name.endswith("bias"):
                value = 0.3 * torch.randn(shape, generator=seeded)
            elif name.endswith("embed_tokens.weight"):
                # Small under a tied head, which would repeat the last token otherwise.
                value = (0.1 if tied else 1.0) * torch.randn(shape, generator=seeded)
            elif name == "lm_head.weight":
                value = 2 * torch.randn(shape, generator=seeded) / math.sqrt(shape[1])
            else:
                value = matrix(shape, seeded)
            parameter.copy_(value.to(torch.bfloat16))
    return model


def prompts(vocab, tokens, seed):
    return torch.randint(3, vocab - 8, (2, tokens), generator=generator(seed + 5000))


@torch.no_grad()
def greedy(model, ids, steps=24):
    """The continuation of the first prompt without a cache, and the best logit minus the second of each step."""
    ids, chosen, margins = ids[:1], [], []
    for _ in range(steps):
        values, places = model(input_ids=ids, use_cache=False).logits[0, -1].topk(2)
        chosen.append(int(places[0]))
        margins.append(float(values[0] - values[1]))
        ids = torch.cat([ids, places[None, :1]], 1)
    return torch.tensor(chosen, dtype=torch.int32), torch.tensor(margins, dtype=torch.float32)


@torch.no_grad()
def logits(model, ids):
    return model(input_ids=ids, use_cache=False).logits.float()


def relative(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


def save(case, folder):
    save_file({name: value.contiguous() for name, value in case.items()}, folder / "case.safetensors")


# Rows of 8 bits: a scale for each token, everything in f32.
def int8_rows(rows):
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return torch.clamp(torch.round(rows / scale), -128, 127) * scale


def fp8_rows(rows):
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (rows / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def with_rows(model, round_rows):
    """The same model, the input of every projection quantised and dequantised before."""
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda module, inputs: (round_rows(inputs[0]), *inputs[1:]))
    return model
