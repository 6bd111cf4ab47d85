"""Times PyTorch's sums over the ranks of a group, by the method of `benches/group.rs`: NCCL, and symmetric memory.

A process is a rank. Each way is checked at each size, for a call and for a recorded graph of them, and then timed: two
launches of the graph, of which the first brings the ranks together and the second lies between two events; the median of
the slowest rank's. Multicast stays off, as on machines that do not give it.
"""

import argparse
import json
import os
import statistics
from pathlib import Path

os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

# The figures of benches/group.rs.
CALLS = 20
SAMPLES = 21
WARM_BYTES = 4 << 30
MAX_WARM = 200


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--min-bytes", type=int, default=1 << 10)
    parser.add_argument("--max-bytes", type=int, default=256 << 20)
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--port", type=int, default=29517)
    return parser.parse_args()


def ways(len_, device):
    """Name, tensor and call of each way; a call that is missing is the reason why."""
    found = []
    x = torch.zeros(len_, dtype=torch.bfloat16, device=device)
    found.append(("nccl", x, lambda: dist.all_reduce(x)))
    try:
        import torch.distributed._symmetric_memory as symm_mem

        group = dist.group.WORLD.group_name
        y = symm_mem.empty(len_, dtype=torch.bfloat16, device=device)
        symm_mem.rendezvous(y, group)
        one, two = torch.ops.symm_mem.one_shot_all_reduce, torch.ops.symm_mem.two_shot_all_reduce_
        found.append(("symm one-shot", y, lambda: y.copy_(one(y, "sum", group))))
        found.append(("symm two-shot", y, lambda: two(y, "sum", group)))
    except (ImportError, AttributeError, RuntimeError) as error:
        found.append(("symm", None, str(error).splitlines()[0]))
    return found


def values(len_, rank, device):
    return ((torch.arange(len_, device=device) % 13) + rank).to(torch.bfloat16)


def expected(len_, size, calls, device):
    total = sum(values(len_, rank, device).float() for rank in range(size)).to(torch.bfloat16)
    for _ in range(calls - 1):
        total = sum(total.float() for _ in range(size)).to(torch.bfloat16)
    return total


def time_way(x, call, rank, size, device):
    len_ = x.numel()
    x.copy_(values(len_, rank, device))
    call()
    torch.cuda.synchronize()
    if not torch.equal(x, expected(len_, size, 1, device)):
        raise RuntimeError("a wrong sum")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    x.copy_(values(len_, rank, device))
    dist.barrier()
    graph.replay()
    torch.cuda.synchronize()
    if not torch.allclose(x.float(), expected(len_, size, CALLS, device).float(), rtol=0.02 * CALLS):
        raise RuntimeError("a wrong sum of a graph")
    x.zero_()
    dist.barrier()
    for _ in range(min(max(WARM_BYTES // (CALLS * 2 * len_), 2), MAX_WARM)):
        graph.replay()
    samples = []
    for _ in range(SAMPLES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / CALLS)
    slowest = torch.tensor(samples, device=device, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return sorted(slowest.tolist())


def run(rank, options):
    size, device = options.ranks, torch.device("cuda", rank)
    torch.cuda.set_device(device)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port))
    dist.init_process_group("nccl", rank=rank, world_size=size, device_id=device)
    lines = []
    if rank == 0:
        print(f"{size} ranks on {torch.cuda.get_device_name()}, bf16, torch {torch.__version__}", flush=True)
        print(f"{'bytes':>10}  {'way':<14} {'µs':>10} {'±':>8} {'GB/s bus':>8}", flush=True)
    num_bytes = options.min_bytes
    while num_bytes <= options.max_bytes:
        for name, x, call in ways(num_bytes // 2, device):
            if x is None:
                if rank == 0:
                    print(f"{num_bytes:>10}  {name:<14} {call}", flush=True)
                continue
            samples = time_way(x, call, rank, size, device)
            us = statistics.median(samples)
            spread = samples[round(0.75 * (SAMPLES - 1))] - samples[round(0.25 * (SAMPLES - 1))]
            bus = 2 * (size - 1) / size * num_bytes / us * 1e-3
            if rank == 0:
                print(f"{num_bytes:>10}  {name:<14} {us:>10.2f} {spread:>8.2f} {bus:>8.1f}", flush=True)
                lines.append({
                    "kind": "all_reduce", "way": name, "ranks": size, "card": torch.cuda.get_device_name(),
                    "bytes": num_bytes, "us": us, "spread_us": spread, "bus_gb_s": bus,
                })  # fmt: skip
        num_bytes *= 2
    if rank == 0 and options.json is not None:
        options.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    options = parse()
    torch.multiprocessing.spawn(run, args=(options,), nprocs=options.ranks)
