"""Every folder from its files alone: the same logits and tokens by transformers. python verify.py [NAME ...]

Of quantised folders twice: weights dequantised by dequantise.py (GGUF: by the package gguf), and, where transformers
reads the format, by transformers itself from a copy whose scales are f32, since it multiplies in their type.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

from dequantise import dequantised
from quantised import of_weights
from shared import OUT, fp8_rows, greedy, logits, relative, with_rows


def loaded(folder, **more):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **more).eval()


def check(model, case, suffix=""):
    """The error of the logits; the same greedy tokens."""
    ids, want = case["input_ids"].long(), case[f"greedy{suffix}"]
    assert all(value.isfinite().all() for value in case.values())
    chosen, _ = greedy(model, ids, len(want))
    assert torch.equal(chosen, want), (chosen, want)
    return relative(logits(model, ids), case[f"logits{suffix}"])


def by_transformers(folder):
    """Its own dequantisation, where it has one."""
    own = json.loads((folder / "config.json").read_text())["quantization_config"]
    more = {"compressed-tensors": lambda: CompressedTensorsConfig(dequantize=True),
            "fp8": lambda: FineGrainedFP8Config(weight_block_size=own["weight_block_size"], dequantize=True)}
    if own["quant_method"] not in more:
        return None
    with tempfile.TemporaryDirectory() as place:
        stored = load_file(folder / "model.safetensors")
        stored = {key: value.float() if "_scale" in key else value for key, value in stored.items()}
        save_file(stored, Path(place) / "model.safetensors", metadata={"format": "pt"})
        whole = json.loads((folder / "config.json").read_text())
        for group in whole["quantization_config"].get("config_groups", {}).values():
            # Or compressed-tensors quantises rows even after it has dequantised the weights.
            group["input_activations"] = None
        (Path(place) / "config.json").write_text(json.dumps(whole))
        return loaded(place, quantization_config=more[own["quant_method"]]()).float()


def golden(folder, case):
    model = loaded(folder)
    with torch.no_grad():
        made = model(input_ids=case["input_ids"].long(), use_cache=False, output_hidden_states=True).hidden_states
    errors = [relative(hidden, case[f"hidden.{layer}"]) for layer, hidden in enumerate(made)]
    rounded = relative(logits(model.to(torch.bfloat16), case["input_ids"].long()), case["logits_bf16_hf"])
    return check(loaded(folder), case), f"hidden {max(errors):.1e}, bf16 {rounded:.1e}"


def quantised(folder, case):
    if (folder / "model.gguf").exists():
        import make_gguf
        from quantised import config

        names = json.loads((folder / "tensors.json").read_text())["hf_names"]
        weights, _ = make_gguf.read(folder / "model.gguf", names)
        own = config(make_gguf.FILES[folder.name][0])
        # With the sizes given: of qwen3 it does not read that of a head from the file.
        theirs = loaded(folder, gguf_file="model.gguf", config=own)
    else:
        weights, own, theirs = dequantised(folder), AutoConfig.from_pretrained(folder), by_transformers(folder)
    for name, value in case.items():
        assert not name.startswith("dequant.") or torch.equal(weights[name.removeprefix("dequant.")], value)
    error, text = check(of_weights(own, weights), case), ""
    if "logits_act" in case:
        text += f"act {check(with_rows(of_weights(own, weights), fp8_rows), case, '_act'):.1e}, "
    return error, text + ("" if theirs is None else f"by transformers {check(theirs, case):.1e}")


for folder in sorted(OUT.glob("golden*/*/case.safetensors")):
    folder = folder.parent
    if folder.name in (sys.argv[1:] or [folder.name]):
        case = load_file(folder / "case.safetensors")
        error, text = (golden if folder.parent.name == "golden" else quantised)(folder, case)
        margin = f", margin {case['greedy_margin'].min():.4f}" if "greedy_margin" in case else ""
        kinds, size = len(set(case["greedy"].tolist())), sum(file.stat().st_size for file in folder.iterdir())
        print(f"{folder.name}: {size} bytes, error {error:.1e}, {text}{margin}, {kinds} ids", flush=True)
        assert error <= 1e-6
