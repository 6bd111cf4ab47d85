"""Looks for seeds whose greedy tokens differ and are chosen by a margin: python seeds.py COUNT [NAME ...]

NAME: a model of make_golden.py, or a base of quantised.py (before it is quantised).
"""

import sys

import torch

import make_golden
import quantised
from shared import greedy, prompts

count, *names = sys.argv[1:]
for name in names or [*make_golden.MODELS, *quantised.BASES]:
    if name in quantised.BASES:
        first, vocab, *_ = quantised.BASES[name]
        tokens, model = quantised.TOKENS, lambda seed: quantised.base_model(name, seed, torch.float32)
    else:
        first, vocab, tokens = make_golden.MODELS[name][0], make_golden.COMMON["vocab_size"], make_golden.TOKENS
        model = lambda seed: make_golden.model(name, seed)[0]
    found, first = [], first // 1000 * 1000
    for seed in range(first, first + int(count)):
        chosen, margins = greedy(model(seed), prompts(vocab, tokens, seed))
        found.append((float(margins.min()), len(set(chosen.tolist())), seed))
    print(name, [row for row in sorted(found, reverse=True) if row[1] >= 8][:5], flush=True)
