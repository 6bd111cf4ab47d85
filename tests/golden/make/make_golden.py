"""Golden checkpoints of further shapes and architectures: random weights that bf16 holds, saved by transformers.

    python make_golden.py [NAME ...]
"""

import shutil
import sys

import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from shared import OUT, fill, greedy, logits, prompts, relative, save

TOKENS = 20
COMMON = dict(vocab_size=256, hidden_size=64, intermediate_size=96, bos_token_id=0, eos_token_id=1)
DEFAULT = dict(rope_type="default", rope_theta=1e6)
LLAMA3 = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
# Seeds: of those tried (seeds.py), one whose greedy tokens differ and are chosen by a margin.
MODELS = {
    "qwen3_heads128": (1080, Qwen3ForCausalLM, Qwen3Config(
        num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=128, tie_word_embeddings=True,
        max_position_embeddings=4096, rope_parameters=DEFAULT, **COMMON)),
    "llama": (2032, LlamaForCausalLM, LlamaConfig(
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False,
        max_position_embeddings=512, rope_parameters=LLAMA3, rms_norm_eps=1e-5, **COMMON)),
    # Heads of another size than hidden_size / num_attention_heads, as Mistral-Nemo has.
    "mistral": (3038, MistralForCausalLM, MistralConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=32, tie_word_embeddings=False,
        max_position_embeddings=4096, rope_parameters=DEFAULT, sliding_window=None, rms_norm_eps=1e-5, **COMMON)),
    "qwen2": (4028, Qwen2ForCausalLM, Qwen2Config(
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
        max_position_embeddings=4096, rope_parameters=DEFAULT, **COMMON)),
}


def model(name, seed=None):
    """In f32, and the seed."""
    own, kind, config = MODELS[name]
    config._attn_implementation = "eager"
    return fill(kind(config).float().eval(), seed or own), seed or own


@torch.no_grad()
def make(name):
    folder = OUT / "golden" / name
    shutil.rmtree(folder, ignore_errors=True)
    whole, seed = model(name)
    ids = prompts(COMMON["vocab_size"], TOKENS, seed)
    made = whole(input_ids=ids, use_cache=False, output_hidden_states=True)
    case = {f"hidden.{layer}": hidden for layer, hidden in enumerate(made.hidden_states)}
    case |= {"input_ids": ids.to(torch.int32), "logits": made.logits}
    case["greedy"], margins = greedy(whole, ids)
    rounded = whole.to(torch.bfloat16)
    rounded.save_pretrained(folder)
    case["logits_bf16_hf"] = logits(rounded, ids)
    save(case, folder)
    noise = relative(case["logits_bf16_hf"], case["logits"])
    kinds = len(set(case["greedy"].tolist()))
    print(f"{name}: bf16 {noise:.4f}, logit std {made.logits.std():.3f}, margin {margins.min():.4f}, {kinds} ids")


if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS:
        make(name)
