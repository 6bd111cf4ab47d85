"""Whole models through transformers: the prompt, and decode steps from a static cache in one CUDA graph."""

import torch
from timing import synchronize, time_calls


def load(config, device):
    """The model with random weights, in bf16."""
    import transformers

    config = dict(config)
    config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(default)
    return model.eval()


class Models:
    """The cases of one model at a time: loading it takes longer than timing it."""

    def __init__(self, device, compile, meter):
        self.device, self.compile, self.meter = device, compile, meter
        self.config, self.model = None, None

    def peers(self, case):
        """Name and a function that times it, for each peer of a case."""
        time = self.prefill if "prefill" in case["phase"] else self.decode
        if self.compile is not None:
            yield "transformers compiled, one CUDA graph", lambda: time(case, self.compile)
        yield "transformers eager, one CUDA graph", lambda: time(case, None)

    def forward(self, case, compile):
        config = case["shape"]["config"]
        if self.config != config:
            self.config = self.model = None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self.model, self.config = load(config, self.device), config
        torch._dynamo.reset()
        return self.model if compile is None else compile(self.model.forward)

    def prompted(self, shape, room):
        """The prompts' tokens, the next ones, and a cache with room for more that has read the prompts: texts as in ours."""
        import transformers

        batch, length = shape["batch"], shape["prompt"] + 1
        ids = torch.arange(batch * length, device=self.device).view(batch, length)
        ids = (ids * 2_654_435_761 & 0xFFFF_FFFF) % self.config["vocab_size"]
        ids, following = ids[:, :-1], ids[:, -1:]
        cache = transformers.StaticCache(config=self.model.config, max_cache_len=shape["prompt"] + room)
        # Not compiled: this call makes the cache's tensors.
        self.model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        return ids, following, cache

    def recorded(self, step):
        """The step as a graph, where there are graphs."""
        if self.device.type != "cuda":
            return step
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream(self.device).wait_stream(side)
        synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    @torch.inference_mode()
    def prefill(self, case, compile):
        forward = self.forward(case, compile)
        ids, _, cache = self.prompted(case["shape"], 0)

        def step():
            rewind(cache, 0)
            return forward(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits

        run = self.recorded(step)

        def call(_):
            run()
            synchronize(self.device)

        return time_calls(call, 8, self.meter)

    @torch.inference_mode()
    def decode(self, case, compile):
        forward = self.forward(case, compile)
        shape = case["shape"]
        steps = shape["steps"]
        # Room for the steps before those that are timed.
        _, ids, cache = self.prompted(shape, steps + 8)
        ids = ids.clone()

        def step():
            logits = forward(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
            ids.copy_(logits[:, -1].argmax(-1, keepdim=True))

        run = self.recorded(step)

        def call(index):
            if index % steps == 0:
                rewind(cache, shape["prompt"])
            run()
            # The tokens come to the host, as ours do.
            ids.tolist()

        return time_calls(call, steps, self.meter)


def rewind(cache, length):
    """Forgets the tokens from `length` on."""
    for layer in cache.layers:
        layer.cumulative_length.fill_(length)
