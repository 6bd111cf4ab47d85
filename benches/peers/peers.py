"""Times what a user of PyTorch would call, at the cases that `cargo bench --bench ops -- --list` gives.

Results go to standard output as a table and to `--json` as one JSON object per line, told apart by `kind`: `run` says
what was there, `peak` a peak matrix rate, `peer` a peer's time at a case, `missing` why a peer has none. What is missing is
no failure, PyTorch itself included; a case list that cannot be read is.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

# The sizes that --tiny leaves, by their names in the cases.
TINY = {
    "rows": 24, "cols": 256, "tokens": 24, "m": 24, "n": 64, "k": 256, "vocab": 500, "batch": 2, "seq_q": 20,
    "seq_kv": 20, "experts": 4, "src_stride": 256, "dst_stride": 256, "prompt": 12, "steps": 6,
}  # fmt: skip
TINY_CONFIG = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100,
}  # fmt: skip


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("filters", nargs="*", help="only cases whose name contains one of these texts")
    parser.add_argument("--cases", type=Path, help="the list of cases, one JSON object per line")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--peaks", action="store_true", help="only the peak matrix rates")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--energy", default="anchors", choices=["off", "anchors", "all"])
    parser.add_argument("--no-compile", action="store_true", help="without what inductor compiles")
    parser.add_argument(
        "--workers", type=int, default=0, help="processes that compile first, into inductor's cache"
    )
    parser.add_argument("--limit", type=float, default=1e6, help="seconds after which no peer is begun")
    parser.add_argument(
        "--tiny", action="store_true", help="small sizes: tests this script, says nothing of speed"
    )
    parser.add_argument(
        "--sweep", action="store_true", help="times quickly: the cases are hundreds of a grid, in a row"
    )
    parser.add_argument("--shard", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.peaks and options.cases is None:
        parser.error("--cases FILE is needed: see `cargo bench --bench ops -- --list`")
    return options


def read_cases(path, filters):
    """The cases that are wanted: anchors first, then whole models, so that a time limit meets what matters least."""
    cases = []
    for line in path.read_text().splitlines():
        if line.strip():
            case = json.loads(line)
            if case["kind"] == "case" and (not filters or any(text in case["name"] for text in filters)):
                cases.append(case)
    return sorted(cases, key=lambda case: (not is_anchor(case), case["op"] != "model"))


def is_anchor(case):
    return " anchor" in case["name"]


def shrink(cases):
    """Small cases, each of them once."""
    small = {}
    for case in cases:
        shape = {key: min(size, TINY[key]) if key in TINY else size for key, size in case["shape"].items()}
        if case["op"] in ("copy", "matmul_i8"):
            shape["rows" if "rows" in shape else "m"] = 32
        if "config" in shape:
            shape["config"] = shape["config"] | TINY_CONFIG
        small.setdefault(json.dumps([case["op"], shape]), case | {"shape": shape, "bytes": 1 << 16})
    return list(small.values())


class Writer:
    def __init__(self, path):
        self.path = path
        if path is not None:
            path.write_text("")

    def write(self, kind, **values):
        # Each line at once, so that a run that is cut short leaves what it has.
        if self.path is not None:
            with self.path.open("a") as file:
                print(json.dumps({"kind": kind} | values), file=file)


def first_line(error):
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def describe(torch, device):
    versions = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    for package in ("triton", "transformers"):
        try:
            versions[package] = __import__(package).__version__
        except Exception as error:  # whatever an import can raise, it is not there
            versions[package] = None
            print(f"{package} is missing: {first_line(error)}")
    if device.type == "cuda":
        versions["device"] = torch.cuda.get_device_name(device)
    return versions


def peaks(torch, device, size, writer):
    """The best product of `size`³ of each type that the tensor cores have."""
    import operators
    import timing

    for dtype, op in [("bf16", "matmul"), ("i8", "matmul_i8"), ("f8e4m3", "matmul_fp8")]:
        try:
            shape = {"m": size, "n": size, "k": size}
            operator = operators.OPERATORS[op]({"dtype": dtype}, shape)
            peer = operator.peers[0]
            inputs = operator.inputs(torch.Generator(device).manual_seed(1))
            result = timing.time_runs(device, [lambda peer=peer, inputs=inputs: peer.run(*inputs)])
        except Exception as error:  # a rate that cannot be measured is no failure
            print(f"no peak rate of {dtype}: {first_line(error)}")
            continue
        rate = 2 * size**3 / result.median_us * 1e-6
        by = f"{peer.name} of {size}³"
        print(f"{dtype}: {rate:.1f} TFLOP/s by {by}")
        writer.write("peak", dtype=dtype, tflop_per_s=rate, by=by)


class Bench:
    def __init__(self, options, torch, device, writer, started):
        import timing

        self.options, self.torch, self.device, self.writer = options, torch, device, writer
        self.meter = None
        if options.energy != "off" and not options.shard:
            try:
                self.meter = timing.Meter(device)
            except Exception as error:  # NVML has many ways not to be there
                print(f"energy is not measured: {first_line(error)}")
        self.started, self.models = started, None
        self.counts = {"timed": 0, "missing": 0}

    def compile(self, function):
        # Each case anew: what is remembered of earlier shapes would make this one's sizes variables.
        self.torch._dynamo.reset()
        return self.torch.compile(function, dynamic=False)

    def wants_energy(self, case):
        energy = self.options.energy
        return energy == "all" or (energy == "anchors" and (case["op"] == "model" or is_anchor(case)))

    def attempt(self, case, name, time_it):
        """Times one peer; whatever goes wrong is reported, and the next goes on."""
        try:
            if time.monotonic() - self.started > self.options.limit:
                raise TimeoutError(f"the limit of {self.options.limit:.0f} s was reached before")
            result = time_it()
        except Exception as error:  # see above
            self.counts["missing"] += 1
            print(f"{case['name']:<52} {name}: missing, {first_line(error)}")
            self.writer.write("missing", name=case["name"], peer=name, reason=first_line(error))
            return
        if result is None:
            return
        self.counts["timed"] += 1
        call = "-" if result.call_us is None else f"{result.call_us:.2f}"
        millijoules = "-" if result.joules is None else f"{result.joules * 1e3:.3f}"
        print(
            f"{case['name']:<52} {result.median_us:>10.2f} {result.spread_us:>7.2f} {call:>8} {millijoules:>8}"
            f"  {name}{' (' + result.note + ')' if result.note else ''}"
        )
        keys = ("name", "op", "model", "phase", "dtype", "shape", "bytes", "flops")
        self.writer.write(
            "peer",
            peer=name,
            us=result.median_us,
            spread_us=result.spread_us,
            samples=result.samples,
            call_us=result.call_us,
            joules=result.joules,
            note=result.note,
            **{key: case[key] for key in keys},
        )

    def run(self, case):
        if case["op"] == "model":
            self.run_model(case)
        else:
            self.run_operator(case)

    def run_model(self, case):
        if "weight" in case["shape"]:
            import operators

            self.attempt(case, "any", self.raiser(operators.Missing("no peer of a quantised model is written")))
            return
        if self.models is None:
            import models

            compile = None if self.options.no_compile else self.compile
            self.models = models.Models(self.device, compile, self.meter)
        self.models.meter = self.meter if self.wants_energy(case) else None
        for name, time_it in self.models.peers(case):
            if not self.options.shard or "compiled" in name:
                self.attempt(case, name, time_it)

    def run_operator(self, case):
        import operators
        import timing

        make = operators.OPERATORS.get(case["op"])
        if make is None:
            self.attempt(case, "any", self.raiser(operators.Missing(f"no peer of {case['op']} is written")))
            return
        try:
            operator = make(case, case["shape"])
        except operators.Missing as error:
            self.attempt(case, "any", self.raiser(error))
            return
        meter = self.meter if self.wants_energy(case) else None
        sets = []
        for peer in operator.peers:
            if peer.is_compiled and self.options.no_compile:
                continue
            if self.options.shard and not peer.is_compiled:
                continue

            def time_it(peer=peer):
                function = self.compile(peer.run) if peer.is_compiled else peer.run
                while len(sets) < (1 if self.options.shard else timing.num_sets(self.device, case["bytes"])):
                    sets.append(operator.inputs(self.torch.Generator(self.device).manual_seed(len(sets))))
                result = function(*sets[0])
                timing.synchronize(self.device)
                if self.options.shard:
                    return None
                error = operator.error(sets[0], peer.finish(result))
                if error > operators.BOUND:
                    raise ArithmeticError(f"wrong result: relative L2 error {error:.2e}")
                del result
                return timing.time_runs(
                    self.device, [lambda inputs=inputs: function(*inputs) for inputs in sets], meter
                )

            self.attempt(case, peer.name, time_it)

    @staticmethod
    def raiser(error):
        def time_it():
            raise error

        return time_it


def compile_first(options, started):
    """Runs what inductor compiles once in several processes, so that this one finds it in inductor's cache."""
    command = [sys.executable, __file__, *options.filters, "--cases", str(options.cases)]
    command += ["--device", options.device, "--energy", "off", "--limit", str(options.limit)]
    command += ["--tiny"] if options.tiny else []
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [*command, "--shard", f"{index}/{options.workers}"],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for index in range(options.workers)
    ]
    num_failed = 0
    for worker in workers:
        try:
            # Half of the time is for timing.
            num_failed += worker.wait(max(started + options.limit / 2 - time.monotonic(), 1)) != 0
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
            num_failed += 1
    note = f", of which {num_failed} did not end well" if num_failed else ""
    print(f"compiled in {time.monotonic() - started:.0f} s by {options.workers} processes{note}")


def main(arguments):
    started = time.monotonic()
    options = parse(arguments)
    try:
        cases = [] if options.peaks else read_cases(options.cases, options.filters)
        writer = Writer(options.json)
    except (OSError, ValueError, LookupError, TypeError) as error:
        print(f"peers: the list of cases or the results' file: {first_line(error)}", file=sys.stderr)
        return 2
    try:
        import torch

        device = torch.device(options.device)
        if device.type == "cuda":
            device = torch.device("cuda", device.index or 0)
            # Fails here rather than at every case if there is no card.
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)
    except Exception as error:  # without PyTorch there is nothing to compare with, and nothing wrong
        print(f"no peers: {first_line(error)}")
        writer.write("run", source="peers", missing=first_line(error))
        return 0
    if options.shard:
        index, count = map(int, options.shard.split("/"))
        cases = cases[index::count]
    elif options.workers > 0 and not (options.peaks or options.no_compile):
        compile_first(options, started)
    if options.tiny:
        cases = shrink(cases)
    versions = describe(torch, device)
    print("; ".join(f"{name} {version}" for name, version in versions.items()))
    writer.write("run", source="peers", **versions)
    if options.peaks:
        peaks(torch, device, 256 if options.tiny else 8192, writer)
        return 0
    if options.sweep:
        import timing

        timing.hurry()
    bench = Bench(options, torch, device, writer, started)
    for case in cases:
        bench.run(case)
        if options.shard:
            # Others work on this card at the same time.
            torch.cuda.empty_cache()
    print(f"{bench.counts['timed']} timed, {bench.counts['missing']} missing")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
