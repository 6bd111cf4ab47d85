"""Writes variants.json: what transformers makes of one-key changes of the golden checkpoints beside it.

    python tests/golden/variants/make.py          # transformers 5.17.0, torch on a CPU, safetensors

Every entry of VARIANTS is a golden checkpoint with its config.json (or its tensors) changed in one place. The script writes
what transformers says: the logits of the last token, twelve of them, or its error. `ours` says what this library does where
it does otherwise by decision, and why: a refusal (`refused`: words of the message) or another result.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
GOLDEN = HERE.parent
# Long enough for windows, without the ids that stand for images.
LONG = [(i * 37 + 5) % 370 for i in range(24)]
SHORT = [5, 9, 100, 7, 3]
# Of the last token's logits.
PLACES = [0, 1, 2, 31, 64, 100, 150, 200, 250, 300, 350, 383]


def v(base, name, set=None, remove=None, **more):
    return {"base": base, "name": name, "set": set or {}, "remove": remove or [], **more}


def rope(base, name, parameters, top=None, prefix="", **more):
    """Without rope_parameters: as files of before transformers 5 have it."""
    set = {prefix + "rope_scaling": parameters, **{prefix + key: value for key, value in (top or {}).items()}}
    return v(base, name, set, [prefix + "rope_parameters"], **more)


THETA = {"rope_theta": 1e6}
YARN = {"rope_type": "yarn", "factor": 4.0}
VARIANTS = [
    # --- qwen3
    v("qwen3", "as it is"),
    v("qwen3", "theta at the top", {"rope_theta": 1e4}, ["rope_parameters"]),
    v("qwen3", "theta in rope_parameters", {"rope_parameters.rope_theta": 1e4}),
    v("qwen3", "theta twice", {"rope_theta": 1e4}),
    v("qwen3", "no theta", {}, ["rope_parameters"]),
    v("qwen3", "empty rope_scaling beside rope_parameters", {"rope_scaling": {}}),
    v("qwen3", "empty rope_scaling beside theta", {"rope_scaling": {}, "rope_theta": 1e4}, ["rope_parameters"]),
    v("qwen3", "null rope_scaling", {"rope_scaling": None}),
    v("qwen3", "null rope_parameters", {"rope_parameters": None, "rope_theta": 1e4}),
    rope("qwen3", "linear", {"rope_type": "linear", "factor": 4.0}, THETA),
    rope("qwen3", "linear by its old key", {"type": "linear", "factor": 4.0}, THETA),
    rope("qwen3", "linear without a factor", {"rope_type": "linear"}, THETA, ours={"refused": "rope_scaling.factor"}),
    rope("qwen3", "linear with factor null", {"rope_type": "linear", "factor": None}, THETA,
         ours={"refused": "rope_scaling.factor"}),
    rope("qwen3", "yarn", YARN, THETA),
    rope("qwen3", "yarn over rope_parameters", YARN, THETA, keep=True),
    rope("qwen3", "yarn with its original length at the top", YARN,
         {**THETA, "original_max_position_embeddings": 1024}, ids=SHORT),
    rope("qwen3", "yarn with its original length at the top and theta in rope_parameters", YARN,
         {"original_max_position_embeddings": 1024}, ids=SHORT, keep=True),
    rope("qwen3", "yarn with its original length inside and at the top",
         {**YARN, "original_max_position_embeddings": 64}, {**THETA, "original_max_position_embeddings": 1024}),
    rope("qwen3", "yarn with its original length inside", {**YARN, "original_max_position_embeddings": 64}, THETA),
    rope("qwen3", "yarn with a whole number written as a float",
         {**YARN, "original_max_position_embeddings": 1024.0}, THETA),
    rope("qwen3", "yarn with factor null", {**YARN, "factor": None, "original_max_position_embeddings": 1024}, THETA),
    rope("qwen3", "yarn not truncated", {**YARN, "truncate": False, "original_max_position_embeddings": 64}, THETA),
    rope("qwen3", "yarn with truncate null", {**YARN, "truncate": None, "original_max_position_embeddings": 64}, THETA),
    rope("qwen3", "yarn with betas", {**YARN, "beta_fast": 8, "beta_slow": 2, "original_max_position_embeddings": 64},
         THETA),
    rope("qwen3", "yarn with a beta null", {**YARN, "beta_fast": None, "original_max_position_embeddings": 64}, THETA),
    rope("qwen3", "yarn with a beta of 0", {**YARN, "beta_fast": 0, "original_max_position_embeddings": 64}, THETA),
    rope("qwen3", "yarn with its attention factor", {**YARN, "attention_factor": 1.5}, THETA),
    rope("qwen3", "yarn with both mscales", {**YARN, "mscale": 2.0, "mscale_all_dim": 1.0}, THETA),
    rope("qwen3", "yarn with one mscale", {**YARN, "mscale": 2.0}, THETA),
    rope("qwen3", "dynamic", {"rope_type": "dynamic", "factor": 4.0}, THETA,
         ours={"refused": "dynamic is not supported", "why": "not built"}),
    rope("qwen3", "llama3", {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                             "original_max_position_embeddings": 64}, THETA),
    rope("qwen3", "llama3 with its original length at the top",
         {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
         {**THETA, "original_max_position_embeddings": 1024}),
    v("qwen3", "part of a head rotated", {"partial_rotary_factor": 0.5}, unread=["partial_rotary_factor"]),
    v("qwen3", "part of a head rotated, inside", {"rope_parameters.partial_rotary_factor": 0.5},
      unread=["rope_parameters.partial_rotary_factor"]),
    rope("qwen3", "part of a head rotated, linear", {"rope_type": "linear", "factor": 4.0},
         {**THETA, "partial_rotary_factor": 0.5}, ours={"refused": "partial_rotary_factor"}),
    v("qwen3", "window", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}, ["layer_types"]),
    v("qwen3", "window by layer_types", {"use_sliding_window": True, "sliding_window": 6,
      "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    v("qwen3", "window that is not used", {"sliding_window": 6, "max_window_layers": 0}, ["layer_types"]),
    v("qwen3", "layer_types of windows without one",
      {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, ours={
          "refused": "layer_types with sliding_attention needs",
          "why": "a file that contradicts itself"}),
    v("qwen3", "eps", {"rms_norm_eps": 0.1}),
    v("qwen3", "activation gelu", {"hidden_act": "gelu"}),
    v("qwen3", "activation gelu_pytorch_tanh", {"hidden_act": "gelu_pytorch_tanh"}),
    v("qwen3", "activation gelu_new", {"hidden_act": "gelu_new"}),
    v("qwen3", "activation relu", {"hidden_act": "relu"},
      ours={"refused": "hidden_act: relu is not supported", "why": "not built"}),
    v("qwen3", "fewer layers", {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, unused=11),
    v("qwen3", "fewer layers than layer_types", {"num_hidden_layers": 2},
      ours={"refused": "layer_types must have num_hidden_layers entries"}),
    v("qwen3", "end of text -1", {"eos_token_id": -1}),
    v("qwen3", "end of text as a string", {"eos_token_id": "1"}, ours={"refused": "eos_token_id"}),
    v("qwen3", "end of text a list with -1", {"eos_token_id": [1, -1]}),
    v("qwen3", "a size as a float", {"num_hidden_layers": 3.0},
      ours={"like": "as it is", "why": "a whole number is one, however it is written"}),
    v("qwen3", "biases that the file lacks", {"attention_bias": True},
      ours={"refused": "q_proj.bias: missing", "why": "transformers draws missing tensors at random"}),
    v("qwen3", "head_dim null", {"head_dim": None}, ours={"refused": "head_dim"}),
    v("qwen3", "a key that nobody knows", {"some_future_key": 3}, unread=["some_future_key"]),
    v("qwen3", "not causal", {"is_causal": False},
      ours={"refused": "is_causal", "why": "attention to later tokens is not built"}),
    v("qwen3", "quantised", {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
      ours={"refused": "quantization_config.quant_method: bitsandbytes is not supported", "why": "not built"},
      skip="depends on the machine"),
    v("qwen3", "NaN in a key without effect", {"initializer_range": float("nan")}),
    v("qwen3", "Infinity in a key without effect", {"some_limits": [0.0, float("inf"), -float("inf")]},
      unread=["some_limits"]),
    v("qwen3", "Infinity in a key with effect", {"rope_parameters.rope_theta": float("inf")},
      ours={"refused": 'rope_parameters.rope_theta: expected a number above 1, got "Infinity"',
            "why": "no model is made so"}),
    v("qwen3", "another head beside a tied one", {}, tensors="head", ids=SHORT),
    v("qwen3", "the same head beside a tied one", {}, tensors="same head"),
    v("qwen3", "a head of its own", {"tie_word_embeddings": False}, tensors="head", ids=SHORT),
    v("qwen3", "no head", {"tie_word_embeddings": False},
      ours={"refused": "lm_head.weight: missing", "why": "transformers draws missing tensors at random"}),
    v("qwen3", "tied to the head", {}, tensors="only head"),
    v("qwen3", "a tensor too many", {}, tensors="extra", unused=1),
    # --- as embeddings models are published: no prefix, no head
    v("qwen3", "names without a prefix", {"architectures": ["Qwen3Model"]}, tensors="no prefix"),
    v("qwen3_moe", "names without a prefix", {}, tensors="no prefix"),
    v("qwen3_next", "names without a prefix", {}, tensors="no prefix"),
    v("glm4_moe_lite", "names without a prefix", {}, tensors="no prefix"),
    v("qwen3_vl", "names without a prefix", {}, tensors="no prefix", image=True),
    # --- qwen3_moe
    v("qwen3_moe", "as it is"),
    v("qwen3_moe", "weights as they are", {"norm_topk_prob": False}),
    v("qwen3_moe", "norm_topk_prob left out", {}, ["norm_topk_prob"]),
    v("qwen3_moe", "more experts of a token", {"num_experts_per_tok": 3}),
    v("qwen3_moe", "num_experts instead", {"num_experts": 8}, ["num_local_experts"]),
    v("qwen3_moe", "windows in all layers", {"use_sliding_window": True, "sliding_window": 6}),
    v("qwen3_moe", "another head beside a tied one", {"tie_word_embeddings": True}, tensors="head"),
    v("qwen3_moe", "theta at the top", {"rope_theta": 1e4}, ["rope_parameters"]),
    v("qwen3_moe", "empty rope_scaling", {"rope_scaling": {}}),
    rope("qwen3_moe", "yarn", YARN, {"rope_theta": 1e7, "original_max_position_embeddings": 64}),
    v("qwen3_moe", "part of a head rotated", {"partial_rotary_factor": 0.5}, unread=["partial_rotary_factor"]),
    v("qwen3_moe", "activation gelu", {"hidden_act": "gelu"}),
    v("qwen3_moe", "shared expert that the type lacks", {"shared_expert_intermediate_size": 64},
      unread=["shared_expert_intermediate_size"]),
    # --- qwen3_next
    v("qwen3_next", "as it is"),
    v("qwen3_next", "more of a head rotated", {"rope_parameters.partial_rotary_factor": 0.5}),
    v("qwen3_next", "more of a head rotated, at the top only", {"partial_rotary_factor": 0.5,
      "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"}}),
    v("qwen3_next", "partial_rotary_factor left out", {"rope_parameters": {"rope_theta": 1e7}},
      ["partial_rotary_factor"]),
    v("qwen3_next", "theta at the top", {"rope_theta": 1e4, "rope_scaling": None}, ["rope_parameters"]),
    v("qwen3_next", "layers by their interval", {"full_attention_interval": 4}, ["layer_types"]),
    v("qwen3_next", "weights as they are", {"norm_topk_prob": False}),
    v("qwen3_next", "eps", {"rms_norm_eps": 0.1}),
    v("qwen3_next", "window", {"use_sliding_window": True, "sliding_window": 6},
      unread=["sliding_window", "use_sliding_window"]),
    v("qwen3_next", "another head beside a tied one", {"tie_word_embeddings": True}, tensors="head"),
    v("qwen3_next", "the block for drafting", {}, tensors="mtp", unused=1),
    # --- glm4_moe_lite
    v("glm4_moe_lite", "as it is"),
    v("glm4_moe_lite", "scale", {"routed_scaling_factor": 1.0}),
    v("glm4_moe_lite", "weights as they are", {"norm_topk_prob": False}),
    v("glm4_moe_lite", "halves of a head are pairs", {"rope_interleave": False}),
    v("glm4_moe_lite", "groups", {"n_group": 4, "topk_group": 2}),
    v("glm4_moe_lite", "first_k_dense_replace", {"first_k_dense_replace": 1, "scoring_func": "softmax",
      "topk_method": "greedy"}, unread=["scoring_func", "topk_method"]),
    v("glm4_moe_lite", "experts by default in all layers but the first", {}, ["mlp_layer_types"]),
    v("glm4_moe_lite", "num_local_experts instead", {"num_local_experts": 8}, ["n_routed_experts"]),
    v("glm4_moe_lite", "head_dim as rotated", {"head_dim": 16}),
    v("glm4_moe_lite", "head_dim of its own", {"head_dim": 24}, ours={"refused": "head_dim"}),
    v("glm4_moe_lite", "fewer key and value heads", {"num_key_value_heads": 2},
      ours={"refused": "num_key_value_heads"}),
    v("glm4_moe_lite", "eps", {"rms_norm_eps": 0.1}),
    v("glm4_moe_lite", "part of a head rotated", {"partial_rotary_factor": 0.5},
      ours={"refused": "partial_rotary_factor must leave all"}),
    rope("glm4_moe_lite", "yarn with mscale_all_dim",
         {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64}, THETA),
    rope("glm4_moe_lite", "yarn with factor null and mscale_all_dim",
         {**YARN, "factor": None, "mscale_all_dim": 1.0, "original_max_position_embeddings": 50688}, THETA,
         ours={"refused": "rope_scaling.factor"}),
    rope("glm4_moe_lite", "linear with mscale_all_dim", {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0},
         THETA),
    v("glm4_moe_lite", "another head beside a tied one", {"tie_word_embeddings": True}, tensors="head"),
    # --- qwen3_vl, text
    v("qwen3_vl", "as it is"),
    v("qwen3_vl", "text: window", {"text_config.use_sliding_window": True, "text_config.sliding_window": 6,
      "text_config.max_window_layers": 0}, unread=["text_config.sliding_window", "text_config.use_sliding_window"]),
    v("qwen3_vl", "text: theta at the top", {"text_config.rope_theta": 1e4}, ["text_config.rope_parameters"],
      ours={"refused": "mrope_section", "why": "the default sections do not fit this head; transformers cuts them"}),
    v("qwen3_vl", "text: theta at the top, sections in rope_scaling",
      {"text_config.rope_theta": 1e4, "text_config.rope_scaling": {"mrope_section": [6, 5, 5], "rope_type": "default"}},
      ["text_config.rope_parameters"], image=True),
    v("qwen3_vl", "text: empty rope_scaling", {"text_config.rope_scaling": {}}, image=True),
    v("qwen3_vl", "text: eps", {"text_config.rms_norm_eps": 0.1}),
    v("qwen3_vl", "text: activation gelu", {"text_config.hidden_act": "gelu"}),
    v("qwen3_vl", "text: tied there only", {"text_config.tie_word_embeddings": True},
      unread=["text_config.tie_word_embeddings"]),
    v("qwen3_vl", "tied", {"tie_word_embeddings": True}, tensors="headless"),
    v("qwen3_vl", "another head beside a tied one", {"tie_word_embeddings": True}),
    v("qwen3_vl", "text: part of a head rotated", {"text_config.partial_rotary_factor": 0.5},
      unread=["text_config.partial_rotary_factor"]),
    # --- qwen3_vl, vision
    v("qwen3_vl", "vision: as it is", image=True),
    v("qwen3_vl", "vision: sections", {"text_config.rope_parameters.mrope_section": [12, 2, 2]}, image=True),
    v("qwen3_vl", "vision: sections in a row", {"text_config.rope_parameters.mrope_interleaved": False}, image=True,
      ours={"like": "vision: as it is", "why": "transformers does not read mrope_interleaved either"}),
    v("qwen3_vl", "vision: activation", {"vision_config.hidden_act": "gelu"}, image=True),
    v("qwen3_vl", "vision: activation silu", {"vision_config.hidden_act": "silu"}, image=True),
    v("qwen3_vl", "vision: other blocks", {"vision_config.deepstack_visual_indexes": [1, 2]}, image=True),
    v("qwen3_vl", "vision: blocks in falling order", {"vision_config.deepstack_visual_indexes": [1, 0]}, image=True,
      ours={"refused": "must ascend", "why": "which merger is whose would be a guess"}),
    v("qwen3_vl", "vision: fewer blocks", {"vision_config.depth": 2}, image=True, unused=12),
    v("qwen3_vl", "vision: heads by the other name", {"vision_config.num_attention_heads": 3},
      ["vision_config.num_heads"], image=True),
    v("qwen3_vl", "vision: theta", {"vision_config.rope_parameters.rope_theta": 100.0}, image=True),
    v("qwen3_vl", "vision: no rope_parameters", {}, ["vision_config.rope_parameters"], image=True),
    v("qwen3_vl", "vision: other token", {"image_token_id": 378}, image=True, ours={"refused": "ids"}),
]


def changed(config, variant):
    for path in variant["remove"]:
        if variant.get("keep"):
            continue
        *parents, key = path.split(".")
        inner = config
        for parent in parents:
            inner = inner[parent]
        inner.pop(key)
    for path, value in variant["set"].items():
        *parents, key = path.split(".")
        inner = config
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[key] = value
    return config


def head(rows, cols):
    i, j = torch.arange(rows)[:, None], torch.arange(cols)[None]
    return ((i * 31 + j * 17) % 101 - 50).to(torch.float32) / 500


def with_tensors(tensors, what):
    embedding = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    if what == "head":
        tensors["lm_head.weight"] = head(*tensors[embedding].shape)
    elif what == "same head":
        tensors["lm_head.weight"] = tensors[embedding].clone()
    elif what == "only head":
        tensors["lm_head.weight"] = tensors.pop(embedding)
    elif what == "headless":
        tensors.pop("lm_head.weight")
    elif what == "extra":
        tensors["model.layers.0.self_attn.surplus.weight"] = torch.zeros(2, 2)
    elif what == "mtp":
        tensors["mtp.norm.weight"] = torch.zeros(2)
    elif what == "no prefix":
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    elif what is not None:
        sys.exit(f"unknown tensors {what!r}")
    return tensors


def class_of(base):
    return {
        "qwen3": transformers.Qwen3ForCausalLM,
        "qwen3_moe": transformers.Qwen3MoeForCausalLM,
        "qwen3_next": transformers.Qwen3NextForCausalLM,
        "glm4_moe_lite": transformers.Glm4MoeLiteForCausalLM,
        "qwen3_vl": transformers.Qwen3VLForConditionalGeneration,
    }[base]


def row(variant):
    """The token whose logits are compared: the last one, or the last one of the image."""
    if not variant.get("image"):
        return -1
    with safe_open(GOLDEN / variant["base"] / "case.safetensors", "pt") as case:
        return int((case.get_tensor("input_ids")[0] == 379).nonzero()[-1])


def run(folder, variant):
    model, info = class_of(variant["base"]).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if info["missing_keys"]:
        raise ValueError("missing: " + ", ".join(sorted(info["missing_keys"])[:2]))
    model.eval()
    more = {}
    ids = torch.tensor([variant.get("ids", LONG)])
    if variant.get("image"):
        with safe_open(GOLDEN / variant["base"] / "case.safetensors", "pt") as case:
            ids = case.get_tensor("input_ids")[:1].long()
            more = {
                "pixel_values": case.get_tensor("pixel_values"),
                "image_grid_thw": case.get_tensor("image_grid_thw").long(),
                "mm_token_type_ids": case.get_tensor("mm_token_type_ids")[:1].long(),
            }
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, **more).logits[0, row(variant)]
    return [float(f"{value:.7g}") for value in logits[PLACES].tolist()]


def main():
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    table, plain = [], {}
    for variant in VARIANTS:
        base = GOLDEN / variant["base"]
        config = changed(json.loads((base / "config.json").read_text()), variant)
        entry = {key: value for key, value in variant.items() if value and key not in ("skip", "ours")}
        if variant.get("image"):
            entry["row"] = row(variant)
        else:
            entry.setdefault("ids", LONG)
        try:
            json.dumps(entry, allow_nan=False)
        except ValueError:
            # NaN and Infinity are not JSON: the file's text then.
            entry.pop("set")
            entry["text"] = json.dumps(config)
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            (folder / "config.json").write_text(json.dumps(config))
            shutil.copy(base / "generation_config.json", folder)
            tensors = with_tensors(load_file(base / "model.safetensors"), variant.get("tensors"))
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors",
                      metadata={"format": "pt"})
            if "skip" in variant:
                entry["transformers"] = {"skipped": variant["skip"]}
            else:
                try:
                    entry["transformers"] = {"logits": run(folder, variant)}
                except Exception as error:
                    message = " ".join(f"{type(error).__name__}: {error}".split()).replace(str(folder), "")
                    entry["transformers"] = {"error": message[:160]}
        if "ours" in variant:
            entry["ours"] = variant["ours"]
        table.append(entry)
        # What the change does, for who reads along.
        kind = (variant["base"], bool(variant.get("image")), str(entry.get("ids")))
        logits = entry["transformers"].get("logits")
        first = plain.setdefault(kind, logits)
        effect = "-" if logits is None or first is None else f"{max(abs(a - b) for a, b in zip(logits, first)):.2g}"
        print(variant["base"], "|", variant["name"], "|", effect, "|", entry["transformers"].get("error", ""), flush=True)
    header = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0], "places": PLACES}
    lines = ",\n".join("  " + json.dumps(entry, allow_nan=False) for entry in table)
    (HERE / "variants.json").write_text(json.dumps(header)[:-1] + ', "variants": [\n' + lines + "\n]}\n")


if __name__ == "__main__":
    main()
