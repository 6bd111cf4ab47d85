"""What a user of PyTorch would call instead of each operator.

Each function takes a case and returns an [`Operator`]: how to make the inputs, what a sample of the result must be, and the
peers. A peer gets the inputs and returns its result. Sizes come from the case, never from here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i8": torch.int8}
# The most that a sample's relative L2 error may be: what bf16 explains, or f16 in the fast form of GELU.
BOUND = 2e-2


class Missing(Exception):
    """This machine or version of PyTorch has not got what the peer needs."""


@dataclass
class Peer:
    name: str
    run: Callable
    # Compiled by inductor before it is run.
    is_compiled: bool = False
    # From the peer's own result to what `Operator.sample` expects.
    finish: Callable = lambda result: result


@dataclass
class Operator:
    # One set of inputs, from a generator.
    inputs: Callable
    # What the sample of the result must be, from the inputs, in f32.
    expected: Callable
    peers: list[Peer] = field(default_factory=list)
    # The part of a result that is checked.
    sample: Callable = lambda result: result[:1]

    def error(self, inputs, result):
        """Relative L2 error of the sample, infinite for what is not finite or of another shape."""
        got, want = self.sample(result).double(), self.expected(*inputs).double()
        if got.shape != want.shape or not torch.isfinite(got).all():
            return float("inf")
        return ((got - want).norm() / want.norm().clamp_min(1e-30)).item()


def normal(generator, *shape, dtype):
    if dtype == torch.int8:
        values = torch.randn(*shape, generator=generator, device=generator.device) * 32
        return values.round_().clamp_(-127, 127).to(dtype)
    return torch.randn(*shape, generator=generator, device=generator.device, dtype=dtype)


def attention(case, shape):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    dtype, causal = DTYPES[case["dtype"]], shape["mask"] == "causal"
    batch, seq_q, seq_kv, dim = shape["batch"], shape["seq_q"], shape["seq_kv"], shape["head_dim"]
    dim_v, is_latent = shape.get("head_dim_v", dim), shape.get("is_latent", False)
    heads_q, heads_kv = shape["heads_q"], shape["heads_kv"]
    groups = heads_q // heads_kv
    soft_cap, has_sinks, block = shape.get("soft_cap"), shape.get("has_sinks", False), shape.get("block_size")

    if shape.get("page_size"):
        return paged_attention(case, shape)
    if shape.get("is_fp8"):
        return fp8_attention(case, shape)

    def inputs(generator):
        # As ours: [batch, tokens, heads, dim]; the views are what F.scaled_dot_product_attention takes.
        q = normal(generator, batch, seq_q, heads_q, dim, dtype=dtype)
        k = normal(generator, batch, seq_kv, heads_kv, dim, dtype=dtype)
        v = k[..., :dim_v] if is_latent else normal(generator, batch, seq_kv, heads_kv, dim_v, dtype=dtype)
        return [tensor.transpose(1, 2) for tensor in (q, k, v)]

    def expected(q, k, v):
        # The first head of the last query, which sees every key.
        q, k, v = q[0, 0, -1:].float(), k[0, 0].float(), v[0, 0].float()
        scores = q @ k.T * dim**-0.5
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if block:
            keys = torch.arange(seq_kv, device=k.device)
            scores = scores.masked_fill(((seq_q - 1) // block + 3 * (keys // block)) % 10 != 0, -torch.inf)
        if has_sinks:
            # The first head's is 0.
            return (torch.softmax(F.pad(scores, (0, 1)), -1)[:, :-1]) @ v
        return torch.softmax(scores, -1) @ v

    def through(backend):
        def run(q, k, v):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    q, k, v, is_causal=causal and seq_q > 1, enable_gqa=groups > 1
                )

        return run

    def folded(backend):
        # With one query for each head, those that share keys can be the queries of one head.
        def run(q, k, v):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q.view(batch, heads_kv, groups, dim), k, v)

        return run

    if is_latent:
        # No fused backend has heads of 576: this is what is left of a user's choices in PyTorch alone.
        def products(q, k, v):
            scores = torch.matmul(q.reshape(batch, heads_kv, groups * seq_q, dim), k.transpose(2, 3))
            weights = torch.softmax(scores.float() * dim**-0.5, -1).to(dtype)
            return torch.matmul(weights, v).reshape(batch, heads_q, seq_q, dim_v)

        peers = [
            Peer("matmul, softmax, matmul", products),
            Peer("inductor", products, is_compiled=True),
        ]
        return Operator(inputs, expected, peers, sample=lambda result: result[0, 0, -1:])

    if shape.get("is_biased"):

        def with_bias(generator):
            return [*inputs(generator), normal(generator, 1, 1, seq_q, seq_kv, dtype=dtype)]

        def biased(q, k, v, bias):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=groups > 1)

        def expected_biased(q, k, v, bias):
            scores = q[0, 0, -1:].float() @ k[0, 0].float().T * dim**-0.5 + bias[0, 0, -1:].float()
            return torch.softmax(scores, -1) @ v[0, 0].float()

        peers = [Peer("SDPA", biased)]
        return Operator(with_bias, expected_biased, peers, sample=lambda result: result[0, 0, -1:])

    if soft_cap or has_sinks or block:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def cap(score, *_):
            return soft_cap * torch.tanh(score / soft_cap)

        def seen(_, head, query, key):
            if block:
                return (head + query // block + 3 * (key // block)) % 10 == 0
            return key <= query + seq_kv - seq_q

        made = {}

        def with_mask(generator):
            device = generator.device
            made["mask"] = create_block_mask(seen, None, heads_q if block else None, seq_q, seq_kv, device=device)
            made["sinks"] = torch.arange(heads_q, device=device)[:, None] / 8
            return inputs(generator)

        def flex(q, k, v):
            options = {"score_mod": cap if soft_cap else None, "block_mask": made["mask"], "enable_gqa": groups > 1}
            if not has_sinks:
                return flex_attention(q, k, v, **options)
            out, lse = flex_attention(q, k, v, return_lse=True, **options)
            return (out * torch.sigmoid(lse - made["sinks"])[..., None]).to(dtype)

        peers = [Peer("flex_attention", flex, is_compiled=True)]
        return Operator(with_mask, expected, peers, sample=lambda result: result[0, 0, -1:])

    if causal and 1 < seq_q < seq_kv:
        # Queries that begin inside the cache: `is_causal` of SDPA is for those that begin with it.
        from torch.nn.attention.bias import causal_lower_right

        def lower_right(q, k, v):
            mask = causal_lower_right(seq_q, seq_kv)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=groups > 1)

        def flash(q, k, v):
            return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]

        peers = [Peer("SDPA, causal_lower_right", lower_right), Peer("flash, causal", flash)]
        return Operator(inputs, expected, peers, sample=lambda result: result[0, 0, -1:])

    backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    peers = [Peer(f"SDPA {name}", through(backend)) for name, backend in backends.items()]
    if seq_q == 1 and groups > 1:

        def unfold(result):
            return result.reshape(batch, heads_q, 1, dim_v)

        peers += [
            Peer(f"SDPA {name}, heads folded", folded(backend), finish=unfold)
            for name, backend in backends.items()
        ]
    return Operator(inputs, expected, peers, sample=lambda result: result[0, 0, -1:])


def paged_attention(case, shape):
    # PyTorch alone has no kernel that follows a table: the pages are gathered first.
    from torch.nn.attention import SDPBackend, sdpa_kernel

    dtype, page_size = DTYPES[case["dtype"]], shape["page_size"]
    batch, seq_q, seq_kv, dim = shape["batch"], shape["seq_q"], shape["seq_kv"], shape["head_dim"]
    heads_q, heads_kv = shape["heads_q"], shape["heads_kv"]
    pages = seq_kv // page_size
    if seq_q != 1:
        raise Missing("no peer is written for prompts over pages")

    def inputs(generator):
        q = normal(generator, batch, 1, heads_q, dim, dtype=dtype).transpose(1, 2)
        k, v = (normal(generator, batch * pages, page_size, heads_kv, dim, dtype=dtype) for _ in range(2))
        # The sequences got their pages in turns.
        table = torch.arange(pages * batch, device=q.device).reshape(pages, batch).T.contiguous()
        return [q, k, v, table]

    def gathered(pool, table):
        return pool[table].view(batch, seq_kv, heads_kv, dim).transpose(1, 2)

    def expected(q, k, v, table):
        q = q[0, 0].float()
        k, v = (gathered(pool, table)[0, 0].float() for pool in (k, v))
        return torch.softmax(q @ k.T * dim**-0.5, -1) @ v

    def through(backend):
        def run(q, k, v, table):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    q, gathered(k, table), gathered(v, table), enable_gqa=heads_q > heads_kv
                )

        return run

    backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    peers = [Peer(f"gather, SDPA {name}", through(backend)) for name, backend in backends.items()]
    return Operator(inputs, expected, peers, sample=lambda result: result[0, 0, -1:])


def fp8_attention(case, shape):
    # PyTorch alone has no kernel for q in bf16 and keys in fp8: these are widened first.
    from torch.nn.attention import SDPBackend, sdpa_kernel

    dtype, causal = DTYPES[case["dtype"]], shape["mask"] == "causal"
    batch, seq_q, seq_kv, dim = shape["batch"], shape["seq_q"], shape["seq_kv"], shape["head_dim"]
    heads_q, heads_kv = shape["heads_q"], shape["heads_kv"]
    if causal and 1 < seq_q < seq_kv:
        raise Missing("no peer is written for queries that begin inside the cache")

    def inputs(generator):
        q = normal(generator, batch, seq_q, heads_q, dim, dtype=dtype)
        k, v = (
            normal(generator, batch, seq_kv, heads_kv, dim, dtype=dtype).to(torch.float8_e4m3fn) for _ in range(2)
        )
        scale = torch.full((heads_kv, 1, 1), 0.5, device=q.device, dtype=dtype)
        return [tensor.transpose(1, 2) for tensor in (q, k, v)] + [scale]

    def expected(q, k, v, scale):
        # The first head of the last query, which sees every key.
        q, k, v = q[0, 0, -1:].float(), k[0, 0].float() * scale[0].float(), v[0, 0].float() * scale[0].float()
        return torch.softmax(q @ k.T * dim**-0.5, -1) @ v

    def through(backend):
        def run(q, k, v, scale):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    q, k.to(dtype) * scale, v.to(dtype) * scale, is_causal=causal and seq_q > 1,
                    enable_gqa=heads_q > heads_kv,
                )

        return run

    backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    peers = [Peer(f"widen, SDPA {name}", through(backend)) for name, backend in backends.items()]
    return Operator(inputs, expected, peers, sample=lambda result: result[0, 0, -1:])


def attention_merge(case, shape):
    dtype, tokens, heads, dim = DTYPES[case["dtype"]], shape["tokens"], shape["heads"], shape["dim"]

    def inputs(generator):
        parts = [normal(generator, tokens, heads, dim, dtype=dtype) for _ in range(2)]
        lses = [normal(generator, heads, tokens, dtype=torch.float32) for _ in range(2)]
        return *parts, *lses

    def run(a, b, a_lse, b_lse):
        weights = torch.softmax(torch.stack([a_lse, b_lse]), 0).transpose(1, 2)[..., None]
        return (weights[0] * a + weights[1] * b).to(dtype)

    def expected(a, b, a_lse, b_lse):
        weights = torch.softmax(torch.stack([a_lse[:, :1], b_lse[:, :1]]), 0).transpose(1, 2)[..., None]
        return (weights[0] * a[:1].float() + weights[1] * b[:1].float())[0]

    return Operator(inputs, expected, both(run, "softmax and sum"), sample=lambda result: result[0])


def causal_conv1d(case, shape):
    dtype, tokens, sequences = DTYPES[case["dtype"]], shape["tokens"], shape["sequences"]
    channels, width = shape["channels"], shape["width"]

    def inputs(generator):
        x = normal(generator, sequences, tokens, channels, dtype=dtype)
        weight = normal(generator, channels, width, dtype=dtype)
        return x, weight, normal(generator, sequences, channels, width - 1, dtype=dtype)

    def run(x, weight, state):
        window = torch.cat([state, x.transpose(1, 2)], -1)
        out = F.silu(F.conv1d(window, weight[:, None], groups=channels))
        return out.transpose(1, 2), window[..., tokens:].contiguous()

    def expected(x, weight, state):
        window = torch.cat([state[0].float(), x[0, :1].float().T], -1)
        return F.silu((window * weight.float()).sum(-1))[None]

    return Operator(inputs, expected, both(run, "F.conv1d"), sample=lambda result: result[0][0, :1])


def copy(case, shape):
    rows, cols = shape["rows"], shape["cols"]
    src_type, dst_type = DTYPES[shape["src"]], DTYPES[shape["dst"]]

    def inputs(generator):
        src = normal(generator, rows, shape["src_stride"], dtype=src_type)[:, :cols]
        dst = torch.zeros(rows, shape["dst_stride"], dtype=dst_type, device=generator.device)[:, :cols]
        return src, dst

    def run(src, dst):
        return dst.copy_(src)

    def expected(src, dst):
        return src[:1].to(dst_type).float()

    return Operator(inputs, expected, both(run, "Tensor.copy_"))


def decoder_layers(case, shape):
    dtype, eps, keys, dim = DTYPES[case["dtype"]], shape["eps"], shape["keys"], 128
    (hidden, inner), (heads_q, heads_kv) = shape["sizes"], shape["heads"]
    per_layer = 10

    def inputs(generator):
        def matrix(rows, cols):
            return normal(generator, rows, cols, dtype=dtype) / cols**0.5

        tensors = []
        for _ in range(shape["layers"]):
            tensors += [matrix((heads_q + 2 * heads_kv) * dim, hidden), matrix(hidden, heads_q * dim)]
            tensors += [matrix(2 * inner, hidden), matrix(hidden, inner)]
            tensors += [normal(generator, size, dtype=dtype) for size in (hidden, hidden, dim, dim)]
            tensors += [normal(generator, keys, heads_kv, dim, dtype=dtype) for _ in range(2)]
        half = torch.arange(dim // 2, device=generator.device, dtype=torch.float64)
        angle = (keys - 1) * 1e6 ** (-2 * half / dim)
        return normal(generator, 1, hidden, dtype=dtype), angle.cos().float(), angle.sin().float(), *tensors

    def rotate(x, cos, sin):
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    def run(x, cos, sin, *tensors):
        for first in range(0, len(tensors), per_layer):
            layer = tensors[first : first + per_layer]
            qkv, o, gate_up, down, input_norm, post_norm, q_norm, k_norm, k, v = layer
            rows = (F.rms_norm(x, (hidden,), input_norm, eps) @ qkv.T).view(-1, dim)
            query, key, value = rows.split([heads_q, heads_kv, heads_kv])
            query = rotate(F.rms_norm(query, (dim,), q_norm, eps), cos, sin)
            k[-1] = rotate(F.rms_norm(key, (dim,), k_norm, eps), cos, sin)
            v[-1] = value
            heads = (query[None, :, None], k.transpose(0, 1)[None], v.transpose(0, 1)[None])
            attended = F.scaled_dot_product_attention(*heads, enable_gqa=True)
            x = x + attended.reshape(1, -1) @ o.T
            gate, up = (F.rms_norm(x, (hidden,), post_norm, eps) @ gate_up.T).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ down.T
        return x

    def expected(*inputs):
        return run(*(tensor.float() for tensor in inputs))

    return Operator(inputs, expected, both(run, "torch eager"))


def embedding(case, shape):
    dtype, vocab = DTYPES[case["dtype"]], shape["vocab"]
    tables = {}

    def inputs(generator):
        # One table for all sets, as ours.
        if "table" not in tables:
            tables["table"] = normal(generator, vocab, shape["cols"], dtype=dtype)
        ids = torch.randint(
            vocab, (shape["tokens"],), generator=generator, device=generator.device, dtype=torch.int32
        )
        return ids, tables["table"]

    return Operator(
        inputs, lambda ids, table: table[ids[:1].long()].float(), [Peer("F.embedding", F.embedding)]
    )


def embedding_bag(case, shape):
    dtype, vocab, cols = DTYPES[case["dtype"]], shape["vocab"], shape["cols"]
    sizes, tables = (shape["tokens"], shape["bag"]), {}

    def inputs(generator):
        # One table for all sets, as ours.
        if "table" not in tables:
            tables["table"] = normal(generator, vocab, cols, dtype=dtype)
        ids = torch.randint(vocab, sizes, generator=generator, device=generator.device, dtype=torch.int32)
        weights = torch.rand(sizes, generator=generator, device=generator.device)
        return normal(generator, sizes[0], cols, dtype=dtype), ids, weights, tables["table"]

    def gathered(x, ids, weights, table):
        return (x + (table[ids.long()].float() * weights[..., None]).sum(1)).to(dtype)

    def bag(x, ids, weights, table):
        return x + F.embedding_bag(ids, table, per_sample_weights=weights.to(dtype), mode="sum")

    def expected(x, ids, weights, table):
        return x[:1].float() + (table[ids[:1].long()].float() * weights[:1, :, None]).sum(1)

    return Operator(inputs, expected, [*both(gathered, "torch eager"), Peer("F.embedding_bag", bag)])


def glu(case, shape):
    dtype = DTYPES[case["dtype"]]
    activation = {
        "silu": F.silu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "gelu_erf": F.gelu,
        "sigmoid": torch.sigmoid,
    }[shape["activation"]]

    def inputs(generator):
        tensors = 2 if shape.get("up", True) else 1
        return [normal(generator, shape["rows"], shape["cols"], dtype=dtype) for _ in range(tensors)]

    def run(gate, up=None):
        return activation(gate) if up is None else activation(gate) * up

    def expected(gate, up=None):
        return run(gate[:1].float(), None if up is None else up[:1].float())

    return Operator(inputs, expected, both(run, "torch eager"))


def gated_delta(case, shape):
    dtype, tokens, sequences = DTYPES[case["dtype"]], shape["tokens"], shape["sequences"]
    heads_k, heads_v, dim_k, dim_v = (shape[name] for name in ("heads_k", "heads_v", "dim_k", "dim_v"))
    chunk = 64
    if tokens > 1 and tokens % chunk:
        raise Missing("no peer is written for a prompt that is no whole number of chunks")

    def inputs(generator):
        def draw(*sizes, dtype=dtype):
            return normal(generator, sequences, *sizes, dtype=dtype)

        q, k = (draw(tokens, heads_k, dim_k) for _ in range(2))
        b, a = (draw(tokens, heads_v) for _ in range(2))
        a_log, dt_bias = (normal(generator, heads_v, dtype=torch.float32) for _ in range(2))
        state = draw(heads_v, dim_k, dim_v, dtype=torch.float32)
        return q, k, draw(tokens, heads_v, dim_v), b, a, a_log, dt_bias, state

    def prepare(q, k, v, b, a, a_log, dt_bias):
        """Heads before tokens, in f32, with norms and gates."""

        def unit(x):
            x = x.float()
            x = x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)
            return x.repeat_interleave(heads_v // heads_k, 2).transpose(1, 2)

        log_decay = -a_log.exp() * F.softplus(a.float() + dt_bias)
        gates = [gate.transpose(1, 2) for gate in (b.float().sigmoid(), log_decay)]
        return unit(q) * dim_k**-0.5, unit(k), v.float().transpose(1, 2), *gates

    def step(q, k, v, beta, log_decay, state):
        """One token."""
        state = state * log_decay.exp()[..., None, None]
        change = beta[..., None] * (v - torch.einsum("shk,shkv->shv", k, state))
        state = state + k[..., None] * change[..., None, :]
        return torch.einsum("shk,shkv->shv", q, state), state

    def run(*tensors):
        *tensors, state = tensors
        tensors = prepare(*tensors)
        if tokens == 1:
            out, state = step(*(tensor[:, :, 0] for tensor in tensors), state)
            return out[:, None].to(dtype), state
        q, k, v, beta, log_decay = (tensor.unflatten(2, (-1, chunk)) for tensor in tensors)
        gamma = log_decay.cumsum(-1)
        decay = (gamma[..., :, None] - gamma[..., None, :]).tril().exp().tril()
        weighted = k * beta[..., None]
        lower = (weighted @ k.mT * decay).tril(-1)
        right = torch.cat([v * beta[..., None], weighted * gamma.exp()[..., None]], -1)
        solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
        values, weights = solved.split([dim_v, dim_k], -1)
        scores = q @ k.mT * decay
        outs = []
        for i in range(tokens // chunk):
            new = values[:, :, i] - weights[:, :, i] @ state
            outs.append(q[:, :, i] * gamma[:, :, i].exp()[..., None] @ state + scores[:, :, i] @ new)
            end = gamma[:, :, i, -1:]
            kept = k[:, :, i] * (end - gamma[:, :, i]).exp()[..., None]
            state = state * end.exp()[..., None] + kept.mT @ new
        return torch.cat(outs, 2).transpose(1, 2).to(dtype), state

    def expected(*tensors):
        *tensors, state = tensors
        out, _ = step(*(tensor[:1, :, 0] for tensor in prepare(*tensors)), state[:1])
        return out[:, 0]

    return Operator(inputs, expected, both(run, "torch eager"), sample=lambda result: result[0][:1, 0, 0])


def grouped_matmul(case, shape):
    dtype, experts, m = DTYPES[case["dtype"]], shape["experts"], shape["m"]
    fan_out, weights = shape["fan_out"], {}
    used = min(m, experts)
    step = experts // used

    def inputs(generator):
        device = generator.device
        # One set of weights for all sets, as ours.
        if "w" not in weights:
            weights["w"] = normal(generator, experts, shape["n"], shape["k"], dtype=dtype)
        x = normal(generator, m // max(fan_out, 1), shape["k"], dtype=dtype)
        # As many experts as there are rows for, with as many rows each; others for each set.
        first = torch.randint(step, (), generator=generator, device=device)
        expert = torch.arange(experts, device=device)
        rank = ((expert - first).div(step, rounding_mode="floor") + 1).clamp(0, used)
        # Backwards, so that the order matters.
        order = torch.arange(m - 1, -1, -1, device=device)
        return x, weights["w"], (m * rank // used).to(torch.int32), order

    def rows(x, order):
        return x[order // fan_out] if fan_out else x

    def run(x, w, ends, order):
        return torch._grouped_mm(rows(x, order), w.transpose(-2, -1), offs=ends)

    def expected(x, w, ends, order):
        expert = (ends <= 0).sum()
        return rows(x, order[:1])[:1].float() @ w[expert].float().T

    return Operator(inputs, expected, [Peer("torch._grouped_mm", run)])


def kv_append(case, shape):
    dtype, tokens = DTYPES[case["dtype"]], shape["tokens"]
    sizes = (tokens, shape["heads"], shape["head_dim"])

    def inputs(generator):
        k, v = (normal(generator, *sizes, dtype=dtype) for _ in range(2))
        caches = [torch.zeros(sizes, dtype=dtype, device=generator.device) for _ in range(2)]
        # Backwards, so that the slots matter.
        slots = torch.arange(tokens - 1, -1, -1, device=generator.device)
        return k, v, slots, *caches

    def run(k, v, slots, k_cache, v_cache):
        k_cache.index_copy_(0, slots, k)
        v_cache.index_copy_(0, slots, v)
        return v_cache

    def by_triton(*tensors):
        import kernels

        return kernels.append(*tensors)

    return Operator(
        inputs,
        lambda k, v, slots, k_cache, v_cache: v[:1].float(),
        [*both(run, "Tensor.index_copy_"), Peer("Triton", by_triton)],
        sample=lambda v_cache: v_cache[-1:],
    )


def latent_append(case, shape):
    dtype, eps, tokens = DTYPES[case["dtype"]], shape["eps"], shape["tokens"]
    heads, latent, rotary, first = shape["heads"], shape["latent"], shape["rope"], 5
    half = rotary // 2

    def inputs(generator):
        device = generator.device
        q = normal(generator, tokens, heads, rotary, dtype=dtype)
        x = normal(generator, tokens, latent + rotary, dtype=dtype)
        weight = normal(generator, latent, dtype=dtype)
        positions = torch.arange(first, first + tokens, device=device)
        frequency = 1e6 ** (-torch.arange(half, device=device, dtype=torch.float64) / half)
        angles = torch.arange(first + tokens, device=device, dtype=torch.float64)[:, None] * frequency
        cache = torch.zeros(tokens, latent + rotary, dtype=dtype, device=device)
        # Backwards, so that the slots matter.
        slots = torch.arange(tokens - 1, -1, -1, device=device)
        return q, x, weight, positions, angles.cos().float(), angles.sin().float(), slots, cache

    def rotate(x, cos, sin):
        a, b = x[..., 0::2].float(), x[..., 1::2].float()
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(dtype)

    def run(q, x, weight, positions, cos, sin, slots, cache):
        cos, sin = cos[positions], sin[positions]
        normed = F.rms_norm(x[:, :latent], (latent,), weight, eps)
        cache.index_copy_(0, slots, torch.cat([normed, rotate(x[:, latent:], cos, sin)], -1))
        return rotate(q, cos[:, None], sin[:, None]), cache

    def expected(q, x, weight, positions, cos, sin, slots, cache):
        # The first token, by complex numbers, unlike `run`.
        row = x[0].double()
        normed = row[:latent] * torch.rsqrt(row[:latent].pow(2).mean() + eps) * weight.double()
        angle = torch.complex(cos[first].double(), sin[first].double())

        def turned(part):
            pairs = torch.view_as_complex(part.double().reshape(half, 2).contiguous())
            return torch.view_as_real(pairs * angle).flatten()

        return torch.cat([turned(q[0, 0]), normed, turned(row[latent:])]).float()

    def sample(result):
        q, cache = result
        return torch.cat([q[0, 0], cache[-1]])

    return Operator(inputs, expected, both(run, "torch eager"), sample=sample)


def layernorm(case, shape):
    dtype, eps, cols = DTYPES[case["dtype"]], shape["eps"], shape["cols"]
    adds = shape["residual"] == "add"

    def inputs(generator):
        x = [normal(generator, shape["rows"], cols, dtype=dtype) for _ in range(2 if adds else 1)]
        return normal(generator, cols, dtype=dtype), normal(generator, cols, dtype=dtype), *x

    def run(weight, bias, x, residual=None):
        total = x if residual is None else x + residual
        out = F.layer_norm(total, (cols,), weight, bias, eps)
        return out if residual is None else (out, total)

    def expected(weight, bias, x, residual=None):
        total = (x[:1] if residual is None else x[:1] + residual[:1]).float()
        return F.layer_norm(total, (cols,), weight.float(), bias.float(), eps)

    sample = (lambda result: result[0][:1]) if adds else (lambda result: result[:1])
    return Operator(inputs, expected, both(run, "F.layer_norm"), sample=sample)


def matmul(case, shape):
    dtype, batch = DTYPES[case["dtype"]], shape.get("batch", 1)
    if "weight" in shape:
        return _matmul_packed(case, shape)
    if batch > 1:

        def inputs(generator):
            x = normal(generator, batch, shape["m"], shape["k"], dtype=dtype)
            w = normal(generator, batch, shape["n"], shape["k"], dtype=dtype)
            return x, w.mul_(shape["k"] ** -0.5).transpose(1, 2)

        return Operator(
            inputs,
            lambda x, w: x[0, :1].float() @ w[0].float(),
            [Peer("torch.bmm (cuBLAS)", torch.bmm)],
            sample=lambda result: result[0, :1],
        )
    if "activation" in shape:
        return _matmul_activation(shape, dtype)
    peer = Peer("F.linear (cuBLAS, tf32)", _linear_tf32) if shape.get("tf32") else Peer("F.linear (cuBLAS)", F.linear)
    return Operator(
        lambda generator: _linear_inputs(generator, shape, dtype),
        lambda x, w: x[:1].float() @ w.float().T,
        [peer],
    )


def _matmul_packed(case, shape):
    """A weight that is quantised: `weight` is its layout as Rust prints it."""
    layout = shape["weight"]
    if "Int4" in layout and "group: 128" in layout:
        return matmul_i4(case, {**shape, "group": 128})
    if "E4m3" in layout and shape["m"] % 16 == 0:
        # Scaled by tensor, which asks less of it than scales of blocks or rows.
        return matmul_fp8(case, shape)
    raise Missing(f"no peer of {layout} is written")


def _linear_tf32(x, w):
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return F.linear(x, w)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def _matmul_activation(shape, dtype):
    activation = {
        "silu": F.silu,
        "gelu_erf": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }[shape["activation"]]
    n, gated = shape["n"], shape["gated"]

    def act(product):
        if not gated:
            return activation(product)
        gate, up = product.split(n, dim=-1)
        return activation(gate) * up

    def run(x, w, bias):
        return act(F.linear(x, w))

    def inputs(generator):
        x, w = _linear_inputs(generator, {**shape, "n": 2 * n if gated else n}, dtype)
        return x, w, torch.zeros(n, dtype=dtype, device=generator.device)

    peers = both(run, "F.linear (cuBLAS) and eager")
    if shape["activation"].startswith("gelu") and not gated:
        # cuBLASLt's epilogue computes the tanh form, which is close enough to pass for the other here.
        peers.append(
            Peer("_addmm_activation", lambda x, w, b: torch._addmm_activation(b, x, w.t(), use_gelu=True))
        )
    return Operator(inputs, lambda x, w, bias: act(x[:1].float() @ w.float().T), peers)


def _linear_inputs(generator, shape, dtype):
    x = normal(generator, shape["m"], shape["k"], dtype=dtype)
    # Scaled like trained weights, so that f16 does not overflow.
    return x, normal(generator, shape["n"], shape["k"], dtype=dtype).mul_(shape["k"] ** -0.5)


def matmul_fp8(case, shape):
    def inputs(generator):
        x, w = _linear_inputs(generator, shape, torch.bfloat16)
        one = torch.ones((), device=generator.device)
        return x.to(torch.float8_e4m3fn), (w * 16).to(torch.float8_e4m3fn), one, one / 16

    def run(x, w, x_scale, w_scale):
        return torch._scaled_mm(
            x, w.t(), scale_a=x_scale, scale_b=w_scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    def expected(x, w, x_scale, w_scale):
        return x[:1].float() @ w.float().T * w_scale

    return Operator(inputs, expected, [Peer("torch._scaled_mm", run)])


def matmul_i4(case, shape):
    dtype, n, k, group = DTYPES[case["dtype"]], shape["n"], shape["k"], shape["group"]

    def inputs(generator):
        device = generator.device
        x = normal(generator, shape["m"], k, dtype=dtype)
        q = torch.randint(16, (n, k), generator=generator, device=device, dtype=torch.int32)
        scale = torch.rand(k // group, n, generator=generator, device=device).add_(0.5).mul_(0.01)
        zero = normal(generator, k // group, n, dtype=torch.float32).mul_(0.01)
        scale_zero = torch.stack([scale, zero], -1).to(dtype)
        if device.type == "cpu":
            packed = torch._convert_weight_to_int4pack_for_cpu(q, 1)
        else:
            pairs = (q[:, ::2] << 4 | q[:, 1::2]).to(torch.uint8)
            packed = torch._convert_weight_to_int4pack(pairs, 8)
        weight = (q.float().view(n, -1, group) - 8) * scale_zero[..., 0].T[..., None].float()
        weight += scale_zero[..., 1].T[..., None].float()
        # The first outputs' weights, for the check.
        return x, packed, scale_zero, weight.view(n, k)[:64].clone()

    def run(x, packed, scale_zero, weight):
        if x.device.type == "cpu":
            return torch._weight_int4pack_mm_for_cpu(x, packed, group, scale_zero)
        return torch._weight_int4pack_mm(x, packed, group, scale_zero)

    def expected(x, packed, scale_zero, weight):
        return x[:1].float() @ weight.T

    peers = [Peer("torch._weight_int4pack_mm", run)]
    return Operator(inputs, expected, peers, sample=lambda result: result[:1, :64])


def matmul_i8(case, shape):
    m, n, k = shape["m"], shape["n"], shape["k"]
    # torch._int_mm takes 17 rows or more.
    rows = m if m > 16 else 32

    def inputs(generator):
        a, b = normal(generator, rows, k, dtype=torch.int8), normal(generator, n, k, dtype=torch.int8)
        a_scale = normal(generator, rows, dtype=torch.float32).abs_()
        b_scale = normal(generator, n, dtype=torch.float32).abs_()
        return a, b, a_scale, b_scale

    def product(a, b, a_scale, b_scale):
        return torch._int_mm(a, b.t())

    def scaled(a, b, a_scale, b_scale):
        return (torch._int_mm(a, b.t()) * a_scale[:, None] * b_scale).to(torch.bfloat16)

    def expected(a, b, a_scale, b_scale):
        return a[:1].float() @ b.float().T * a_scale[0] * b_scale

    operator = Operator(inputs, expected, [])
    padded = "" if rows == m else f", {m} rows padded to {rows}"
    # Its result lacks the scales; they are applied for the check.
    scales = {}

    def remember(generator):
        result = inputs(generator)
        scales.setdefault("a", result[2])
        scales.setdefault("b", result[3])
        return result

    operator.inputs = remember
    operator.peers = [
        Peer(
            f"torch._int_mm without scales{padded}",
            product,
            finish=lambda result: result * scales["a"][:, None] * scales["b"],
        ),
        Peer(f"torch._int_mm and inductor{padded}", scaled, is_compiled=True),
    ]
    return operator


def moe_combine(case, shape):
    dtype, tokens, top_k, cols = DTYPES[case["dtype"]], shape["tokens"], shape["top_k"], shape["cols"]
    has_shared, has_gate = shape["shared"] != "none", shape["shared"] == "gated"

    def inputs(generator):
        y = normal(generator, tokens * top_k, cols, dtype=dtype)
        weights = normal(generator, tokens, top_k, dtype=torch.float32)
        # Backwards, so that the positions matter.
        positions = torch.arange(tokens * top_k - 1, -1, -1, device=generator.device).view(tokens, top_k)
        shared = normal(generator, tokens, cols, dtype=dtype) if has_shared else None
        gate = normal(generator, tokens, 1, dtype=torch.float32) if has_gate else None
        return y, weights, positions, shared, gate

    def run(y, weights, positions, shared, gate):
        out = (y[positions].float() * weights[..., None]).sum(1)
        if shared is not None:
            out = out + (shared if gate is None else torch.sigmoid(gate) * shared)
        return out.to(dtype)

    def expected(y, weights, positions, shared, gate):
        first = [None if tensor is None else tensor[:1] for tensor in (weights, positions, shared, gate)]
        return run(y, *first).float()

    return Operator(inputs, expected, both(run, "torch eager"))


def fused_moe(case, shape):
    dtype, tokens, top_k, experts = DTYPES[case["dtype"]], shape["tokens"], shape["top_k"], shape["experts"]
    hidden, inner, has_shared = shape["hidden"], shape["inner"], shape["shared"]
    if "weight" in shape:
        raise Missing("no peer of packed experts is written")

    def inputs(generator):
        x = normal(generator, tokens, hidden, dtype=dtype)
        # Experts of a token differ.
        ids = torch.stack(
            [torch.randperm(experts, generator=generator, device=generator.device)[:top_k] for _ in range(tokens)]
        )
        weights = normal(generator, tokens, top_k, dtype=torch.float32)
        gate_up = normal(generator, experts, 2 * inner, hidden, dtype=dtype)
        down = normal(generator, experts, hidden, inner, dtype=dtype)
        shared = [normal(generator, 2 * inner, hidden, dtype=dtype), normal(generator, hidden, inner, dtype=dtype)]
        return x, ids, weights, gate_up, down, shared if has_shared else None

    def run(x, ids, weights, gate_up, down, shared):
        # The rows of each pair by its own expert's weights.
        gates = torch.einsum("th,tjih->tji", x, gate_up[ids])
        activated = F.silu(gates[..., :inner]) * gates[..., inner:]
        out = (torch.einsum("tji,tjhi->tjh", activated, down[ids]).float() * weights[..., None]).sum(1)
        if shared is not None:
            gates = F.linear(x, shared[0])
            out = out + F.linear(F.silu(gates[:, :inner]) * gates[:, inner:], shared[1])
        return out.to(dtype)

    def expected(x, ids, weights, gate_up, down, shared):
        shared = None if shared is None else [tensor.float() for tensor in shared]
        x, weights = x[:1].float(), weights[:1]
        # The first token's experts alone, in f32.
        own = ids[0]
        numbers = torch.arange(top_k, device=ids.device)[None]
        return run(x, numbers, weights, gate_up[own].float(), down[own].float(), shared).float()

    return Operator(inputs, expected, both(run, "torch eager"))


def moe_permute(case, shape):
    tokens, top_k, experts = shape["tokens"], shape["top_k"], shape["experts"]

    def inputs(generator):
        device = generator.device
        return [
            torch.randint(experts, (tokens, top_k), generator=generator, device=device, dtype=torch.int32)
        ]

    def run(ids):
        ids = ids.flatten()
        expert, order = ids.sort(stable=True)
        bounds = torch.arange(experts + 1, device=ids.device, dtype=ids.dtype)
        positions = torch.empty_like(order)
        positions[order] = torch.arange(order.numel(), device=ids.device)
        return torch.searchsorted(expert, bounds), order, positions

    def expected(ids):
        counts = torch.bincount(ids.flatten(), minlength=experts).cumsum(0)
        return F.pad(counts, (1, 0)).float()

    return Operator(inputs, expected, both(run, "Tensor.sort"), sample=lambda result: result[0].float())


def moe_router(case, shape):
    dtype, tokens, experts, top_k = DTYPES[case["dtype"]], shape["tokens"], shape["experts"], shape["top_k"]
    is_sigmoid = shape["score"] == "sigmoid"

    def inputs(generator):
        bias = normal(generator, experts, dtype=torch.float32)
        return normal(generator, tokens, experts, dtype=dtype), bias

    def run(logits, bias):
        logits = logits.float()
        if is_sigmoid:
            scores = logits.sigmoid()
            ids = (scores + bias).topk(top_k, sorted=True).indices
            weights = scores.gather(-1, ids)
        else:
            weights, ids = logits.softmax(-1).topk(top_k, sorted=True)
        return ids, weights / weights.sum(-1, keepdim=True) * shape["scale"]

    def expected(logits, bias):
        # The weights alone, since equal logits may be chosen in any order.
        return run(logits[:1], bias)[1]

    return Operator(inputs, expected, both(run, "topk and eager"), sample=lambda result: result[1][:1])


def permute_columns(case, shape):
    """Columns in another order, as one indexes them."""
    dtype, cols = DTYPES[case["dtype"]], shape["cols"]

    def run(x, order):
        return x.index_select(-1, order)

    def inputs(generator):
        order = torch.randperm(cols, generator=generator, device=generator.device)
        return [normal(generator, shape["rows"], cols, dtype=dtype), order]

    def expected(x, order):
        return x[:1][:, order].float()

    return Operator(inputs, expected, both(run, "torch eager"), sample=lambda out: out[:1])


def quantize_rows(case, shape):
    dtype = DTYPES[case["dtype"]]

    def run(x):
        largest = x.float().abs().amax(-1, keepdim=True)
        q = (x.float() * (127 / largest)).round().clamp(-127, 127).to(torch.int8)
        return q, largest / 127

    def expected(x):
        q, scale = run(x[:1])
        return q.float() * scale

    return Operator(
        lambda generator: [normal(generator, shape["rows"], shape["cols"], dtype=dtype)],
        expected,
        both(run, "torch eager"),
        sample=lambda result: result[0][:1].float() * result[1][:1],
    )


def quantize_weight(case, shape):
    """Absolute maxima by group or block, as a user of PyTorch would quantise a weight: integers alone have codes there."""
    dtype, rows, k = DTYPES[case["dtype"]], shape["rows"], shape["k"]
    group, block = shape["group"] or k, shape["block"]
    largest, is_integer = {"int4": (7.5, True), "int8": (127.0, True), "e4m3": (448.0, False), "e2m1": (6.0, False)}[
        shape["codes"]
    ]

    def scaled(x):
        blocks = x.float().view(x.shape[0] // min(block, x.shape[0]), -1, k // group, group)
        scale = blocks.abs().amax((1, 3), keepdim=True) / largest
        return blocks / scale, scale

    def run(x):
        values, scale = scaled(x)
        if is_integer:
            return values.round().clamp(-8 if largest < 8 else -127, 7 if largest < 8 else 127).to(torch.int8), scale
        return values.to(torch.float8_e4m3fn), scale

    def expected(x):
        return run(x)[0].float().reshape(rows, k)[0]

    return Operator(
        lambda generator: [normal(generator, rows, k, dtype=dtype)],
        expected,
        both(run, "torch eager"),
        sample=lambda result: result[0].float().reshape(rows, k)[0],
    )


def qk_norm_rope(case, shape):
    dtype, eps, tokens, dim = DTYPES[case["dtype"]], shape["eps"], shape["tokens"], shape["head_dim"]
    heads = [shape["heads_q"], shape["heads_kv"], shape["heads_kv"]]
    rotary, half, first = shape["rotary_dim"], shape["rotary_dim"] // 2, 5
    offset = 1 if shape["zero_centred"] else 0

    def inputs(generator):
        device = generator.device
        qkv = normal(generator, tokens, sum(heads), dim, dtype=dtype)
        weight = normal(generator, dim, dtype=dtype)
        positions = torch.arange(first, first + tokens, device=device)
        frequency = 1e6 ** (-torch.arange(half, device=device, dtype=torch.float64) / half)
        angles = torch.arange(first + tokens, device=device, dtype=torch.float64)[:, None] * frequency
        caches = [torch.zeros(tokens, shape["heads_kv"], dim, dtype=dtype, device=device) for _ in range(2)]
        # Backwards, so that the slots matter.
        slots = torch.arange(tokens - 1, -1, -1, device=device)
        return qkv, weight, positions, angles.cos().float(), angles.sin().float(), slots, *caches

    def norm(x, weight):
        if not offset:
            return F.rms_norm(x, (dim,), weight, eps)
        inverse = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
        return (x.float() * inverse * (offset + weight.float())).to(dtype)

    def rotate(x, cos, sin):
        a, b = x[..., :rotary].float().split(half, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(dtype)
        return torch.cat([turned, x[..., rotary:]], -1) if rotary < dim else turned

    def run(qkv, weight, positions, cos, sin, slots, k_cache, v_cache):
        q, k, v = qkv.split(heads, 1)
        cos, sin = cos[positions][:, None], sin[positions][:, None]
        q, k = (rotate(norm(x, weight), cos, sin) for x in (q, k))
        k_cache.index_copy_(0, slots, k)
        v_cache.index_copy_(0, slots, v)
        return q, k_cache

    def expected(qkv, weight, positions, cos, sin, slots, k_cache, v_cache):
        # The first token's first query head and key head, by complex numbers, unlike `run`.
        x = qkv[0, [0, heads[0]]].double()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight.double() + offset)
        pairs = torch.complex(*x[:, :rotary].split(half, -1))
        pairs = pairs * torch.complex(cos[first].double(), sin[first].double())
        return torch.cat([pairs.real, pairs.imag, x[:, rotary:]], -1).float()

    def sample(result):
        q, k_cache = result
        return torch.stack([q[0, 0], k_cache[-1, 0]])

    return Operator(inputs, expected, both(run, "torch eager"), sample=sample)


def rmsnorm(case, shape):
    dtype, eps, cols = DTYPES[case["dtype"]], shape["eps"], shape["cols"]
    adds, offset = shape["residual"] == "add", {"plain": 0, "zero_centred": 1}[shape["weight"]]
    gated = shape["gate"] == "silu"

    def inputs(generator):
        x = [normal(generator, shape["rows"], cols, dtype=dtype) for _ in range(1 + adds + gated)]
        return normal(generator, cols, dtype=dtype), *x

    def run_gated(weight, x, gate):
        return F.rms_norm(x, (cols,), weight, eps) * F.silu(gate)

    def expected_gated(weight, x, gate):
        return F.rms_norm(x[:1].float(), (cols,), weight.float(), eps) * F.silu(gate[:1].float())

    if gated:
        return Operator(inputs, expected_gated, both(run_gated, "F.rms_norm and F.silu"))

    def run(weight, x, residual=None):
        total = x if residual is None else x + residual
        if offset:
            # As the published zero-centred norms compute it.
            inverse = torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + eps)
            out = (total.float() * inverse * (offset + weight.float())).to(dtype)
        else:
            out = F.rms_norm(total, (cols,), weight, eps)
        return out if residual is None else (out, total)

    def expected(weight, x, residual=None):
        total = x[:1] if residual is None else x[:1] + residual[:1]
        total = total.float()
        return total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps) * (weight.float() + offset)

    sample = (lambda result: result[0][:1]) if adds else (lambda result: result[:1])
    return Operator(inputs, expected, both(run, "F.rms_norm"), sample=sample)


def rope(case, shape):
    dtype, tokens, rotary = DTYPES[case["dtype"]], shape["tokens"], shape["rotary_dim"]
    interleaved, first, half = shape["style"] == "interleaved", 5, shape["rotary_dim"] // 2

    def inputs(generator):
        device = generator.device
        x = normal(generator, tokens, shape["heads"], shape["head_dim"], dtype=dtype)
        positions = torch.arange(first, first + tokens, device=device)
        frequency = 1e6 ** (-torch.arange(half, device=device, dtype=torch.float64) / half)
        angles = torch.arange(first + tokens, device=device, dtype=torch.float64)[:, None] * frequency
        return x, positions, angles.cos().float(), angles.sin().float()

    def run(x, positions, cos, sin):
        cos, sin = cos[positions][:, None], sin[positions][:, None]
        turned, rest = x[..., :rotary].float(), x[..., rotary:]
        a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.split(half, -1)
        pairs = a * cos - b * sin, a * sin + b * cos
        turned = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
        return torch.cat([turned.to(dtype), rest], -1) if rest.shape[-1] else turned.to(dtype)

    def expected(x, positions, cos, sin):
        # By complex numbers, unlike `run`.
        row = x[0, 0].double()
        turned = row[:rotary].view(half, 2) if interleaved else row[:rotary].view(2, half).T
        angle = torch.complex(cos[first].double(), sin[first].double())
        turned = torch.view_as_real(torch.view_as_complex(turned.contiguous()) * angle)
        turned = turned.flatten() if interleaved else turned.T.flatten()
        return torch.cat([turned, row[rotary:]]).float()

    return Operator(inputs, expected, both(run, "torch eager"), sample=lambda result: result[0, 0])


def sampling(case, shape):
    dtype, vocab = DTYPES[case["dtype"]], shape["vocab"]
    temperature, top_k, top_p = shape["temperature"], shape["top_k"], shape["top_p"]

    history_len, top = shape.get("history", 0), shape.get("logprobs")
    # Parameters of each row, as tensors; they go to the device with the first logits.
    each = [torch.tensor(column) for column in zip(*((t, k or vocab, p) for t, k, p in shape.get("each", [])))]

    def inputs(generator):
        logits = normal(generator, shape["rows"], vocab, dtype=dtype)
        if not history_len:
            return [logits]
        ids = torch.randint(vocab, (shape["rows"], history_len), generator=generator, device=logits.device)
        return [logits, ids]

    def greedy(logits):
        return logits.argmax(-1)

    def draw(probabilities):
        # Draws by an exponential race, as serving engines do: torch.multinomial waits for the host.
        return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1, keepdim=True)

    def mixed(logits):
        each[:] = [column.to(logits.device) for column in each]
        temperature, top_k, top_p = (column[:, None] for column in each)
        logits, order = (logits.float() / temperature).sort(descending=True)
        logits = logits.masked_fill(torch.arange(vocab, device=logits.device) >= top_k, -torch.inf)
        probabilities = logits.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= top_p, 0)
        return order.gather(-1, draw(probabilities)).squeeze(-1)

    def penalised(logits, history):
        # The first half is the prompt.
        counts = torch.zeros_like(logits, dtype=torch.int32)
        generated = history[:, history_len // 2 :]
        counts.scatter_add_(-1, generated, torch.ones_like(generated, dtype=torch.int32))
        seen = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, history, True)
        logits = logits.float()
        penalty = shape["repetition"]
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        logits = logits - shape["frequency"] * counts - shape["presence"] * (counts > 0)
        return random(logits)

    def random(logits):
        logits, order = logits.float() / temperature, None
        if top_k:
            logits, order = logits.topk(top_k)
        elif top_p < 1:
            logits, order = logits.sort(descending=True)
        probabilities = logits.softmax(-1)
        if top_p < 1:
            before = probabilities.cumsum(-1) - probabilities
            probabilities = probabilities.masked_fill(before >= top_p, 0)
        choice = draw(probabilities)
        return (choice if order is None else order.gather(-1, choice)).squeeze(-1)

    if top is not None:
        return Operator(
            inputs,
            lambda logits: logits.float().log_softmax(-1).amax(-1),
            both(lambda logits: logits.float().log_softmax(-1).topk(top), "log_softmax and topk"),
            sample=lambda result: result[0][:, 0],
        )
    if temperature == 0:
        # The value, since several logits may be the largest.
        return Operator(
            inputs,
            lambda logits: logits.float().amax(-1),
            both(lambda logits: (logits, greedy(logits)), "Tensor.argmax"),
            sample=lambda result: result[0].gather(-1, result[1][:, None]).squeeze(-1).float(),
        )
    # A random token can only be checked to be one.
    how = "topk and eager" if top_k else "sort and eager" if top_p < 1 or each else "torch eager"
    return Operator(
        inputs,
        lambda logits, *history: torch.ones(shape["rows"], device=logits.device),
        both(mixed if each else penalised if history_len else random, how),
        sample=lambda ids: ((ids >= 0) & (ids < vocab)).float(),
    )


def scatter_rows(case, shape):
    dtype, rows, num_rows, cols = DTYPES[case["dtype"]], shape["rows"], shape["num_rows"], shape["cols"]
    adds = shape["store"] == "add"

    def inputs(generator):
        x, out = normal(generator, rows, cols, dtype=dtype), normal(generator, num_rows, cols, dtype=dtype)
        # Backwards from the last row, as ours.
        return x, torch.arange(num_rows - 1, num_rows - 1 - rows, -1, device=generator.device), out

    def run(x, ids, out):
        # A sum out of place, which can be checked however often it ran before.
        return out.index_add(0, ids, x) if adds else out.index_copy_(0, ids, x)

    def expected(x, ids, out):
        return x[:1].float() + out[-1:].float() if adds else x[:1].float()

    name = "Tensor.index_add" if adds else "Tensor.index_copy_"
    return Operator(inputs, expected, both(run, name), sample=lambda out: out[-1:])


def transpose(case, shape):
    dtype = DTYPES[case["dtype"]]

    def run(x):
        return x.transpose(1, 2).contiguous()

    return Operator(
        lambda generator: [normal(generator, shape["batch"], shape["rows"], shape["cols"], dtype=dtype)],
        lambda x: x[0, :, 0].float(),
        both(run, "Tensor.contiguous"),
        sample=lambda result: result[0, 0],
    )


def both(run, name):
    """The same code as PyTorch runs it, and as inductor compiles it."""
    return [Peer(name, run), Peer("inductor", run, is_compiled=True)]


OPERATORS = {
    function.__name__: function
    for function in (
        attention,
        attention_merge,
        causal_conv1d,
        copy,
        decoder_layers,
        embedding,
        embedding_bag,
        fused_moe,
        gated_delta,
        glu,
        grouped_matmul,
        kv_append,
        latent_append,
        layernorm,
        matmul,
        matmul_fp8,
        matmul_i4,
        matmul_i8,
        moe_combine,
        moe_permute,
        moe_router,
        permute_columns,
        qk_norm_rope,
        quantize_rows,
        quantize_weight,
        rmsnorm,
        rope,
        sampling,
        scatter_rows,
        transpose,
    )
}
