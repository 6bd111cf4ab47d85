"""What the generators of quantised folders share: base models, and the case beside a checkpoint."""

import shutil
import tempfile
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from shared import OUT, fill, greedy, logits, prompts, relative, save, with_rows

TOKENS = 16
SCRATCH = Path(tempfile.gettempdir()) / "golden-bases"
K_PROJ = "model.layers.0.self_attn.k_proj.weight"
# Seed, vocabulary, width, layers.
BASES = {
    "plain": (5006, 112, 64, 2),
    "gguf": (6045, 288, 64, 2),
    "gguf_wide": (7023, 288, 256, 1),
}


def config(base):
    _, vocab, hidden, layers = BASES[base]
    return Qwen3Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, tie_word_embeddings=True, max_position_embeddings=4096, bos_token_id=0,
        eos_token_id=1, rope_parameters=dict(rope_type="default", rope_theta=1e6))


def base_model(base, seed=None, dtype=torch.bfloat16):
    return fill(Qwen3ForCausalLM(config(base)).to(dtype).eval(), seed or BASES[base][0])


def is_quantised(name):
    return name.endswith("_proj.weight")


def folder(name):
    place = OUT / "golden-quant" / name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    return place


def of_weights(config, weights):
    """transformers' model in f32 of these weights, eager."""
    config = type(config)(**{key: value for key, value in config.to_dict().items()
                             if key not in ("quantization_config", "dtype", "architectures", "model_type")})
    config._attn_implementation = "eager"
    model = Qwen3ForCausalLM(config).float().eval()
    weights = {name: value.float() for name, value in weights.items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model


def make_case(place, base, weights, rows=None, dequantised=(K_PROJ,)):
    """`weights`: dequantised, by their names. `rows`: what becomes of the inputs of projections."""
    seed, vocab, *_ = BASES[base]
    ids = prompts(vocab, TOKENS, seed)
    model = of_weights(config(base), weights)
    case = {"input_ids": ids.to(torch.int32), "logits": logits(model, ids)}
    case["greedy"], case["greedy_margin"] = greedy(model, ids)
    case |= {f"dequant.{name}": weights[name].float() for name in dequantised}
    before = logits(base_model(base, dtype=torch.float32), ids)
    text = f"{place.name}: {relative(case['logits'], before):.4f} from unquantised, logit std " \
           f"{case['logits'].std():.3f}, margin {case['greedy_margin'].min():.5f}, {len(set(case['greedy'].tolist()))} ids"
    if rows:
        model = with_rows(model, rows)
        case["logits_act"] = logits(model, ids)
        case["greedy_act"], case["greedy_act_margin"] = greedy(model, ids)
        text += f", act {relative(case['logits_act'], case['logits']):.4f}, margin {case['greedy_act_margin'].min():.5f}"
    save(case, place)
    size = sum(file.stat().st_size for file in place.iterdir())
    print(f"{text}, {size} bytes", flush=True)
