"""The clock and the energy counter, by the method of `benches/ops/harness`: see there for the why.

A graph of runs between two events, each run on other buffers over more than three times the L2 cache; the median over the
graph's launches and the distance between the quartiles; power between two steps of NVML's counter while the card is busy.
"""

import math
import time
from typing import NamedTuple

import torch

# The figures of benches/ops/harness/timing.rs.
WARM_SECONDS = 0.3
SECONDS = 0.1
LAUNCHES = (8, 24)
GRAPH_SECONDS = 1e-3
MAX_ROUNDS = 64
CALLS = 50
ENERGY_SECONDS = 0.5
MAX_ENERGY_LAUNCHES = 900
SHORTEST_READING = 0.1


class Timing(NamedTuple):
    """Microseconds of one run; the joules of one where they were measured."""

    median_us: float
    spread_us: float
    samples: int
    joules: float | None = None
    # The median of a single call between two events; none on the CPU.
    call_us: float | None = None
    # Not empty if the runs could not be recorded: the times hold launch gaps then.
    note: str = ""


def hurry():
    """The figures of a sweep: hundreds of cases in a row, which keep the card warm."""
    global WARM_SECONDS, SECONDS, LAUNCHES, CALLS
    WARM_SECONDS, SECONDS, LAUNCHES, CALLS = 0.02, 0.02, (4, 12), 0


def summary(samples):
    """Median and distance between the quartiles of some microseconds."""
    samples = sorted(samples)

    def at(share):
        return samples[round(share * (len(samples) - 1))]

    return Timing(at(0.5), at(0.75) - at(0.25), len(samples))


def num_sets(device, work_bytes):
    """Sets of buffers that go over three times the L2 cache; one on the CPU."""
    if device.type == "cpu":
        return 1
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return min(max(math.ceil(3 * l2_bytes / max(work_bytes, 1)), 2), 256)


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_runs(device, runs, meter=None):
    """Times `runs`, one callable for each set of buffers."""
    if device.type == "cpu":
        return _time_on_cpu(runs[0])
    # Libraries make their handles and choices in the first calls, not while a graph is recorded.
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(2):
            runs[0]()
    torch.cuda.current_stream(device).wait_stream(side)
    synchronize(device)
    started = time.perf_counter()
    for run in runs:
        run()
    synchronize(device)
    once = time.perf_counter() - started
    rounds = min(max(math.ceil(GRAPH_SECONDS / once), 1), MAX_ROUNDS)
    # Outputs are kept, so that every set has its own, as ours do.
    kept = [None] * len(runs)

    def all_runs():
        for _ in range(rounds):
            for index, run in enumerate(runs):
                kept[index] = run()

    note = ""
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_runs()
        launch = graph.replay
    except RuntimeError as error:
        synchronize(device)
        launch, note = all_runs, f"not recorded: {_first_line(error)}"
    count = rounds * len(runs)
    _elapsed_ms(launch)
    started = time.perf_counter()
    graph_ms = _elapsed_ms(launch)
    while time.perf_counter() - started < WARM_SECONDS:
        graph_ms = _elapsed_ms(launch)
    launches = int(min(max(SECONDS / (graph_ms * 1e-3), LAUNCHES[0]), LAUNCHES[1]))
    timing = summary([_elapsed_ms(launch) * 1e3 / count for _ in range(launches)])
    joules = None
    if meter is not None:
        watts = _watts(device, meter, launch, timing.median_us * 1e-6 * count)
        joules = None if watts is None else watts * timing.median_us * 1e-6
    call_us = _call_us(device, runs) if CALLS > 0 else None
    return timing._replace(joules=joules, call_us=call_us, note=note)


def _call_us(device, runs):
    samples = []
    for call in range(CALLS):
        synchronize(device)
        samples.append(_elapsed_ms(runs[call % len(runs)]) * 1e3)
    return summary(samples).median_us


def _elapsed_ms(launch):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    launch()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _watts(device, meter, launch, graph_s):
    launches = min(max(math.ceil(ENERGY_SECONDS / graph_s), 1), MAX_ENERGY_LAUNCHES)
    reading = meter.begin()
    started = time.perf_counter()
    for index in range(launches):
        launch()
        if index % 16 == 0:
            reading.poll()
    while time.perf_counter() - started < 0.95 * launches * graph_s:
        reading.poll()
        time.sleep(1e-3)
    synchronize(device)
    return reading.watts()


def _time_on_cpu(run):
    run()
    samples = []
    for _ in range(3):
        started = time.perf_counter()
        run()
        samples.append((time.perf_counter() - started) * 1e6)
    return summary(samples)


def time_calls(call, calls, meter=None):
    """Times `call(index)` by the wall clock, `calls` times but for the first two; each must end with the device idle."""
    samples = []
    for index in range(calls):
        started = time.perf_counter()
        call(index)
        samples.append((time.perf_counter() - started) * 1e6)
    timing = summary(samples[2:])
    if meter is None:
        return timing
    reading, started, more = meter.begin(), time.perf_counter(), 0
    while time.perf_counter() - started < ENERGY_SECONDS:
        call(calls + more)
        reading.poll()
        more += 1
    watts = reading.watts()
    call_s = (time.perf_counter() - started) / more
    return timing._replace(joules=None if watts is None else watts * call_s)


def _first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class Meter:
    """The energy counter of one card."""

    def __init__(self, device):
        """Raises what goes wrong if the card has no readable counter."""
        import pynvml

        if device.type != "cuda":
            raise RuntimeError("the CPU has no counter")
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self.pynvml, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self.millijoules()

    def millijoules(self):
        return self.pynvml.nvmlDeviceGetTotalEnergyConsumption(self.handle)

    def begin(self):
        return Reading(self)


class Reading:
    """A measurement under way: the first and the last step of the counter that were seen."""

    def __init__(self, meter):
        self.meter, self.first, self.last = meter, None, None
        self.seen = meter.millijoules()

    def poll(self):
        now = self.meter.millijoules()
        if now != self.seen:
            self.seen = now
            self.last = (time.perf_counter(), now)
            self.first = self.first or self.last

    def watts(self):
        """Power between the two; none if they are too close to say."""
        if self.first is None or self.last[0] - self.first[0] < SHORTEST_READING:
            return None
        return (self.last[1] - self.first[1]) * 1e-3 / (self.last[0] - self.first[0])
