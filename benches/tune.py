"""Writes what the tiles of Hopper's products take, from a sweep: `host/src/ops/matmul/tuned.rs`.

    cargo bench --bench ops -- --energy off --sweep matmul --json ours.jsonl
    python3 benches/tune.py ours.jsonl --record benches/record/h200/DATE.md > host/src/ops/matmul/tuned.rs

A sweep times every kernel that can do a shape. The time of a launch is modelled as

    waves · (steps · (step + full · fullness + row · rows) + wave + wave_row · rows) + once

with the waves of its tiles or clusters, how full these are, the steps of k of a block, and for swapped tiles the rows of
a in each. The factors of each tile are those of the least relative squares, none below 0, in which a shape counts more
where the tile is nearly the best. `select` takes the tile of the least time.
"""

import argparse
import json
import math
import re

SMS = {"NVIDIA H200": 132, "NVIDIA H100 80GB HBM3": 132}
FEWEST_ROWS = 65
# A tile's time counts by its share of the best one's to this power: what is far from being chosen may be modelled worse.
NEARNESS = 4


def tile_of(entry):
    """Kind, rows, columns and cluster of the 16-bit kernels of Hopper, by their names."""
    name = entry.split("__")[1] if entry.startswith("matmul_bf16__") and entry.endswith("__sm90a") else ""
    if found := re.fullmatch(r"swap(\d+)n(\d+)k(\d)", name):
        return ("Swapped", *map(int, found.groups()))
    if found := re.fullmatch(r"m64n(\d+)k(\d)", name):
        return ("Split", 64, *map(int, found.groups()))
    if name == "m64n64c4":
        return ("SharesA", 64, 64, 4)
    if found := re.fullmatch(r"n(\d+)(c2)?", name):
        return ("Wgmma", 128, int(found[1]), 2 if found[2] else 1)
    return None


def terms(tile, m, n, k, sms):
    """What the factors of a tile are multiplied by."""
    kind, bm, bn, cluster = tile
    if kind == "Swapped":
        tiles = math.ceil(m / bn) * math.ceil(n / bm)
        rows = math.ceil(math.ceil(m / math.ceil(m / bn)) / 8) * 8
    elif kind == "SharesA":
        tiles, rows = math.ceil(m / bm) * math.ceil(n / (bn * cluster)), 0
    elif kind == "Wgmma":
        tiles, rows = math.ceil(m / (bm * cluster)) * math.ceil(n / bn), 0
    else:
        tiles, rows = math.ceil(m / bm) * math.ceil(n / bn), 0
    at_a_time = (sms - sms // 11 if cluster > 2 else sms) // cluster
    waves, steps = math.ceil(tiles / at_a_time), math.ceil(k / 64)
    if kind in ("Swapped", "Split"):
        steps = math.ceil(steps / cluster)
    fullness = tiles / at_a_time / waves
    return [waves * steps, waves * steps * fullness, waves * steps * rows, waves, waves * rows, 1]


def least_squares(rows, weights):
    """Factors, none below 0, of the least weighted squares of `row · factors − 1`."""
    size = len(rows[0])
    square = [[sum(w * row[i] * row[j] for row, w in zip(rows, weights)) for j in range(size)] for i in range(size)]
    right = [sum(w * row[i] for row, w in zip(rows, weights)) for i in range(size)]
    factors = [0.0] * size
    for _ in range(4000):
        for i in range(size):
            if square[i][i] > 0:
                rest = right[i] - sum(square[i][j] * factors[j] for j in range(size) if j != i)
                factors[i] = max(0.0, rest / square[i][i])
    return factors


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", help="what the sweep has written")
    parser.add_argument("--record", required=True, help="the record of the run")
    options = parser.parse_args()
    run, rows, cases = None, {}, []
    for line in open(options.results):
        line = json.loads(line)
        if line["kind"] == "run":
            run = line
        if line["kind"] != "case" or not line.get("others"):
            continue
        m, n, k = (line["shape"][key] for key in "mnk")
        of_kernels = {**line["others"], line["kernel"]: line["us"]}
        times = {tile: us for entry, us in of_kernels.items() if (tile := tile_of(entry))}
        if m < FEWEST_ROWS:
            continue
        for tile, us in times.items():
            of_tile = rows.setdefault(tile, ([], []))
            of_tile[0].append([term / us for term in terms(tile, m, n, k, SMS[run["device"]])])
            of_tile[1].append((min(times.values()) / us) ** NEARNESS)
        cases.append(((m, n, k), times))
    factors = {tile: least_squares(*of_tile) for tile, of_tile in rows.items()}
    regrets = []
    for (m, n, k), times in cases:
        def model(tile):
            of_case = terms(tile, m, n, k, SMS[run["device"]])
            return sum(factor * term for factor, term in zip(factors[tile], of_case))

        regrets.append(math.log(times[min(times, key=model)] / min(times.values())))
    behind = math.exp(sum(regrets) / len(regrets))
    print("//! What the tiles of Hopper's 16-bit products take: written by `benches/tune.py`, not by hand.")
    print("//!")
    print(f"//! From {len(cases)} shapes on an {run['device']}, where the tile of the least modelled time took {behind:.3f} of the")
    print(f"//! best one's in the mean: `{options.record}`.")
    print()
    print("use super::tuning::{Kind, Tuned};")
    print()
    print("pub(super) const TUNED: &[Tuned] = &[")
    for (kind, bm, bn, cluster), values in sorted(factors.items()):
        numbers = ", ".join(f"{value:.5f}" for value in values)
        print(f"    Tuned::new((Kind::{kind}, {bm}, {bn}, {cluster}), [{numbers}]),")
    print("];")


main()
