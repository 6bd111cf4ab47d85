"""Whether transformers reads what `examples/quantise.rs` writes, as we do.

    check_saved.py MODEL [SCHEME ...]

Quantises MODEL by each scheme, lets transformers (with compressed-tensors) load the result and dequantise it, and
compares its logits in f32 with those that `generate` computes from the same files. Needs torch, transformers and
compressed-tensors, and both programs built: `cargo build --example quantise --package generate`.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

PROGRAMS = Path(__file__).parent.parent.parent / "target" / "debug"
IDS = [5, 9, 100, 7, 3]


def check(model: Path, scheme: str) -> float:
    """The error of transformers' logits relative to ours."""
    with tempfile.TemporaryDirectory() as place:
        saved, logits = Path(place) / scheme, Path(place) / "logits.safetensors"
        subprocess.run([PROGRAMS / "examples" / "quantise", model, scheme, saved], check=True, capture_output=True)
        ids = ",".join(map(str, IDS))
        command = [PROGRAMS / "generate", "--model", saved, "--device", "cpu", "--dtype", "f32", "--ids", ids]
        command += ["--max-new-tokens", "1", "--dump-logits", logits]
        subprocess.run(command, check=True, capture_output=True)
        ours = next(iter(load_file(logits).values())).reshape(len(IDS), -1)
        config = CompressedTensorsConfig(run_compressed=False)
        theirs = AutoModelForCausalLM.from_pretrained(saved, quantization_config=config, dtype=torch.float32)
        with torch.no_grad():
            theirs = theirs(torch.tensor([IDS])).logits[0]
        return float((theirs - ours).norm() / ours.norm())


def main() -> None:
    model, *schemes = sys.argv[1:]
    for scheme in schemes or ["int8", "int4", "fp8", "fp8-channel", "mxfp4", "nvfp4"]:
        error = check(Path(model), scheme)
        print(f"{scheme:12} {error:.2e}", flush=True)
        # transformers multiplies in the type of the scales, which may be bfloat16.
        assert error < 5e-3, f"{scheme}: transformers reads other values"


if __name__ == "__main__":
    main()
