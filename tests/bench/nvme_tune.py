"""Does a minute of ds_nvme_tune find what the whole grid finds?

    .venv/bin/python tests/bench/nvme_tune.py --folder /mnt/nvme

Searches within the budget; measures the same space whole, in passes, every combination once a pass and in an order
shuffled anew, and takes the one with the best median; then measures both winners in turn. Takes about 4 minutes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from ds_nvme.drives import Drives
from ds_nvme.options import Candidate
from ds_nvme.tune import Space, tune

SPACE = Space(block_size=(128 << 10, 512 << 10, 1 << 20, 4 << 20), queue_depth=(4, 32, 128))


def in_turn(
    drives: Drives, candidates: list[Candidate], passes: int, seconds: float
) -> dict[Candidate, list[list[float]]]:
    """Write and read rates of each candidate."""
    rates: dict[Candidate, list[list[float]]] = {each: [[], []] for each in candidates}
    for _ in range(passes):
        for each in random.sample(candidates, len(candidates)):
            for index, write in enumerate((True, False)):
                rates[each][index].append(drives.measure(each, write, seconds))
    return rates


def score(rates: list[list[float]]) -> float:
    """Bytes a second of writing and reading the same amount."""
    return statistics.harmonic_mean([statistics.median(each) for each in rates])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="/tmp", help="on the drive to measure (default: /tmp)")
    parser.add_argument("--engines", nargs="+", default=["libaio", "io_uring"])
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of the search")
    parser.add_argument("--passes", type=int, default=3, help="over the grid")
    parser.add_argument("--seconds", type=float, default=0.2, help="of a measurement in the grid")
    arguments = parser.parse_args()
    space = Space(**{**vars(SPACE), "engine": tuple(arguments.engines)})
    found = tune(arguments.folder, space=space, budget=arguments.budget)
    print(
        f"search: {len(found.trials)} combinations, {found.seconds:.0f} s: {found.best.candidate}; {found.confidence()}"
    )
    with Drives(arguments.folder, 400 << 20) as drives:
        begin = time.monotonic()
        grid = in_turn(drives, space.candidates(), arguments.passes, arguments.seconds)
        best = max(grid, key=lambda each: score(grid[each]))
        print(f"grid: {len(grid)} combinations, {time.monotonic() - begin:.0f} s: {best}")
        ranked = sorted(grid, key=lambda each: -score(grid[each]))
        print(f"the search's is number {1 + ranked.index(found.best.candidate)} of the grid", end=", ")
        print(f"at {score(grid[found.best.candidate]) / score(grid[best]):.3f} of its best")
        both = in_turn(drives, list(dict.fromkeys([best, found.best.candidate])), 12, 0.5)
        pairs = [[statistics.harmonic_mean(pair) for pair in zip(*both[each])] for each in (found.best.candidate, best)]
        ratios = sorted(one / other for one, other in zip(*pairs))
        print(f"in turn: search / grid {score(both[found.best.candidate]) / score(both[best]):.3f}", end=" ")
        print(f"(pairs: median {statistics.median(ratios):.3f}, {ratios[1]:.3f} to {ratios[-2]:.3f})")


if __name__ == "__main__":
    main()
