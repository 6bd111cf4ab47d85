"""Counts what bf16 costs in GLM-4.7-Flash, step by step: does a step round once too often?

    python tests/golden/roundings.py [--seeds 9]      # transformers 5.17.0, torch on a CPU

For each seed a small model of the architecture with random weights (rounded to bf16) and 48 random tokens. Relative L2
errors of all logits against the same model in f32, and how many tokens have other experts than there:

- `theirs`: transformers' own model in bf16, eager attention;
- `prompts`, `decode`: this library's steps in f32, rounded to bf16 where a kernel stores bf16 (the residual stream,
  norms, products, weights of attention as tensor cores take them), with keys and values of all heads as prompts have
  them, and with queries in the latent space as decode steps have them;
- each as it comes, and with the experts that f32 takes.

The steps in f32 without roundings are compared with transformers in f32 first.
"""

import argparse

import torch
import torch.nn.functional as F
import transformers
from transformers.models.glm4_moe_lite import Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM, modeling_glm4_moe_lite

TOKENS, TOP_K = 48, 4
SIZES = dict(
    vocab_size=1024, hidden_size=512, intermediate_size=1024, moe_intermediate_size=256, num_hidden_layers=3,
    mlp_layer_types=["dense", "sparse", "sparse"], num_attention_heads=8, num_key_value_heads=8, q_lora_rank=192,
    kv_lora_rank=128, qk_nope_head_dim=48, qk_rope_head_dim=16, v_head_dim=64, n_routed_experts=64,
    num_experts_per_tok=TOP_K, n_shared_experts=1, n_group=1, topk_group=1, norm_topk_prob=True,
    routed_scaling_factor=1.8, rms_norm_eps=1e-5, rope_interleave=True, max_position_embeddings=4096,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6}, initializer_range=0.02, tie_word_embeddings=False,
    attention_bias=False, hidden_act="silu", pad_token_id=None,
)


class Routes:
    """The experts of each mixture in turn: those that were taken, or, if some are given, those instead."""

    def __init__(self, given=None):
        self.taken, self.given = [], given

    def choose(self, scores, bias):
        own = torch.topk(scores + bias, TOP_K, dim=-1).indices
        self.taken.append(own.sort(-1).values)
        return own if self.given is None else self.given[len(self.taken) - 1]


def weights_of(scores, ids, config):
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor


def theirs(model, ids, routes):
    """Logits of transformers' model, with its routers' choices by `routes`."""

    def forward(router, hidden):
        hidden = hidden.view(-1, router.hidden_dim)
        logits = F.linear(hidden.float(), router.weight.float())
        scores = logits.sigmoid()
        chosen = routes.choose(scores, router.e_score_correction_bias)
        return logits, weights_of(scores, chosen, model.config), chosen

    router = modeling_glm4_moe_lite.Glm4MoeLiteTopkRouter
    kept, router.forward = router.forward, forward
    try:
        return model(input_ids=ids[None], use_cache=False).logits[0].float()
    finally:
        router.forward = kept


def bf16(x):
    return x.bfloat16().float()


def ours(model, ids, routes, form, r=bf16):
    """Logits by this library's steps: `r` is what storing does. `model` is in f32."""
    config = model.config
    heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    latent, value = config.kv_lora_rank, config.v_head_dim
    places = torch.arange(len(ids))
    angles = places[:, None] / 1e6 ** (torch.arange(0, rope, 2) / rope)
    cos, sin = angles.cos(), angles.sin()
    mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)

    def norm(x, layer):
        """In f32, rounded once."""
        return r(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + layer.variance_epsilon) * layer.weight)

    def rotate(x):
        """Rows [tokens, heads, rope] of pairs; products see only that q's and k's are in the same order."""
        x1, x2, c, s = x[..., 0::2], x[..., 1::2], cos[:, None], sin[:, None]
        return r(torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], -1))

    def weighted(scores, values):
        """Weights as tensor cores take them; their sum is of the unrounded ones."""
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return r(torch.einsum("hij,hjd->hid", r(weights), values) / weights.sum(-1, keepdim=True))

    def attend(a, x):
        q_a, row = r(a.q_a_proj(x)), r(a.kv_a_proj_with_mqa(x))
        q = r(a.q_b_proj(norm(q_a, a.q_a_layernorm))).view(-1, heads, nope + rope)
        q_nope, q_rope = q[..., :nope], rotate(q[..., nope:])
        row, k_rope = norm(row[:, :latent], a.kv_a_layernorm), rotate(row[:, None, latent:])[:, 0]
        k_b, v_b = a.kv_b_proj.weight.view(heads, nope + value, latent).split([nope, value], 1)
        turned = torch.einsum("ihd,jd->hij", q_rope, k_rope)
        if form == "prompts":
            keys, values = r(torch.einsum("jl,hnl->hjn", row, k_b)), r(torch.einsum("jl,hvl->hjv", row, v_b))
            scores = torch.einsum("ihn,hjn->hij", q_nope, keys) + turned
            out = weighted(scores * a.scaling + mask, values)
        else:
            queries = r(torch.einsum("ihn,hnl->hil", q_nope, k_b))
            scores = torch.einsum("hil,jl->hij", queries, row) + turned
            rows = weighted(scores * a.scaling + mask, row.expand(heads, -1, -1))
            out = r(torch.einsum("hil,hvl->hiv", rows, v_b))
        return r(a.o_proj(out.transpose(0, 1).flatten(1)))

    def mlp(m, x):
        """Gate and up are one product, which is rounded with the activation."""
        return r(m.down_proj(r(F.silu(m.gate_proj(x)) * m.up_proj(x))))

    def mixture(m, x):
        scores = F.linear(x, m.gate.weight).sigmoid()
        chosen = routes.choose(scores, m.gate.e_score_correction_bias)
        weights = weights_of(scores, chosen, config)
        out = mlp(m.shared_experts, x)
        for place in range(TOP_K):
            experts = chosen[:, place]
            gate, up = r(torch.einsum("ti,toi->to", x, m.experts.gate_up_proj[experts])).chunk(2, -1)
            down = m.experts.down_proj[experts]
            out = out + weights[:, place, None] * r(torch.einsum("ti,toi->to", r(F.silu(gate) * up), down))
        return r(out)

    stream = model.model.embed_tokens.weight[ids]
    for layer in model.model.layers:
        stream = r(stream + attend(layer.self_attn, norm(stream, layer.input_layernorm)))
        x = norm(stream, layer.post_attention_layernorm)
        stream = r(stream + (mixture(layer.mlp, x) if hasattr(layer.mlp, "gate") else mlp(layer.mlp, x)))
    return model.lm_head(norm(stream, model.model.norm))


def off(got, want):
    return float((got - want).norm() / want.norm())


def main():
    parser = argparse.ArgumentParser(description="What bf16 costs in GLM-4.7-Flash.")
    parser.add_argument("--seeds", type=int, default=9)
    seeds = parser.parse_args().seeds
    transformers.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    config = Glm4MoeLiteConfig(**SIZES)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    found = {}
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = Glm4MoeLiteForCausalLM(config).eval()
        for name, tensor in list(model.named_parameters()):
            tensor.data = bf16(torch.randn(tensor.shape) * 0.02 + (1.0 if "norm" in name else 0.0))
        ids = torch.randint(SIZES["vocab_size"], (TOKENS,))
        exact = Routes()
        want = theirs(model, ids, exact)
        for form in ["prompts", "decode"]:
            error = off(ours(model, ids, Routes(), form, lambda x: x), want)
            assert error < 1e-5, f"{form} in f32 is off by {error:.2e}"
        half = Glm4MoeLiteForCausalLM(config).eval()
        half.load_state_dict(model.state_dict())
        half = half.bfloat16()
        for name, run in [
            ("theirs", lambda routes: theirs(half, ids, routes)),
            ("prompts", lambda routes: ours(model, ids, routes, "prompts")),
            ("decode", lambda routes: ours(model, ids, routes, "decode")),
        ]:
            free = Routes()
            error = off(run(free), want)
            others = [(own != theirs).any(-1) for own, theirs in zip(free.taken, exact.taken)]
            changed = int(torch.stack(others).any(0).sum())
            fixed = off(run(Routes(exact.taken)), want)
            found.setdefault(name, []).append((error, changed, fixed))
            text = f"{error:.4f}, {changed} tokens of other experts; with f32's {fixed:.4f}"
            print(f"seed {seed} {name:8} {text}", flush=True)
    print()
    for name, rows in found.items():
        errors, changed, fixed = zip(*rows)
        print(f"{name:8} {min(errors):.4f} to {max(errors):.4f}, {min(changed)} to {max(changed)} tokens; "
              f"with f32's experts {min(fixed):.4f} to {max(fixed):.4f}")
    fixed = {name: [row[2] for row in rows] for name, rows in found.items()}
    closer = sum(max(here) < there for *here, there in zip(fixed["prompts"], fixed["decode"], fixed["theirs"]))
    print(f"with f32's experts ours are the closer in {closer} of {seeds} seeds")


if __name__ == "__main__":
    main()
