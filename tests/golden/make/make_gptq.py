"""GPTQ in its second checkpoint format, by gptqmodel's whole pipeline: python make_gptq.py [check]

A process of its own makes the case, since gptqmodel changes transformers' classes. `check` compares dequantise.py with
gptqmodel's own dequantiser.
"""

import os
import shutil
import subprocess
import sys

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")

import torch

from dequantise import dequantised
from quantised import BASES, SCRATCH, base_model, folder, make_case
from shared import OUT, generator

NAME = "gptq_v2_int4_asym_g32"


def make():
    from gptqmodel import GPTQModel, QuantizeConfig

    base, place = SCRATCH / "plain", folder(NAME)
    base_model("plain").save_pretrained(base)
    seed, vocab, *_ = BASES["plain"]
    ids = torch.randint(3, vocab - 8, (24, 96), generator=generator(seed + 9)).tolist()
    own = QuantizeConfig(bits=4, group_size=32, sym=False, desc_act=False, act_group_aware=False, format="gptq_v2",
                         offload_to_disk=False)
    model = GPTQModel.load(str(base), own, device="cpu", dtype=torch.bfloat16)
    model.quantize([dict(input_ids=row, attention_mask=[1] * 96) for row in ids], batch_size=1)
    model.save(str(place))
    for file in place.iterdir():
        if file.suffix == ".safetensors":
            shutil.move(file, place / "model.safetensors")
        elif file.name != "config.json":
            file.unlink()


def check():
    from gptqmodel import BACKEND, GPTQModel

    place = OUT / "golden-quant" / NAME
    loaded = GPTQModel.load(str(place), device="cpu", backend=BACKEND.GPTQ_TORCH, dtype=torch.float16)
    weights = {name: weight for name, weight in dequantised(place).items() if name.endswith("_proj.weight")}
    for name, weight in weights.items():
        module = loaded.model.get_submodule(name.removesuffix(".weight"))
        module.scales = module.scales.float()
        assert torch.equal(module.dequantize_weight().T.float(), weight), name
    print(f"{len(weights)} matrices equal")


if __name__ == "__main__":
    if sys.argv[1:] == ["case"]:
        place = OUT / "golden-quant" / NAME
        make_case(place, "plain", dequantised(place))
    elif sys.argv[1:] == ["check"]:
        check()
    else:
        make()
        subprocess.run([sys.executable, __file__, "case"], check=True)
