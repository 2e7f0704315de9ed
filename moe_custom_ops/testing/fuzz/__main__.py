"""python -m moe_custom_ops.testing.fuzz: check many drawn calls of every op, and report."""

import argparse
import random
import sys
import time
from collections.abc import Sequence

from .mutations import INVALID
from .properties import DEVICE, HAS_KERNELS, INTERPRETED, Seen
from .running import Outcome, run
from .strategies import VALID

# Of the calls of an op, so many are invalid.
INVALID_SHARE = 4
CHUNK = 500


def _chunks(total: int) -> list[int]:
    return [min(CHUNK, total - done) for done in range(0, total, CHUNK)]


def _fuzz(op: str, examples: int, seeds: random.Random) -> Outcome:
    """Up to the first failure of this op."""
    invalid = examples // INVALID_SHARE
    whole = Outcome(0, Seen())
    for strategy, total in ((VALID[op], examples - invalid), (INVALID[op], invalid)):
        for count in _chunks(total):
            seed, started = seeds.randrange(2**32), time.perf_counter()
            outcome = run(strategy, count, seed)
            whole.examples += outcome.examples
            whole.seen += outcome.seen
            took = time.perf_counter() - started
            kind = "valid" if strategy is VALID[op] else "invalid"
            print(f"{op}: {whole.examples} of {examples}, {kind}, seed {seed}, {took:.1f} s")
            sys.stdout.flush()
            if outcome.call is not None:
                whole.call, whole.error = outcome.call, outcome.error
                return whole
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m moe_custom_ops.testing.fuzz")
    parser.add_argument("--examples", type=int, default=100_000, help="calls of all ops together")
    parser.add_argument("--seed", type=int, help="of a run to repeat; drawn and printed if absent")
    parser.add_argument("--ops", nargs="+", choices=sorted(VALID), default=list(VALID))
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    where = "kernels under the interpreter" if INTERPRETED else f"kernels on {DEVICE}"
    print(f"seed {seed}, {where if HAS_KERNELS else 'plain PyTorch on cpu'}")
    started, counts, seen, failures = time.perf_counter(), {}, Seen(), 0
    for i, op in enumerate(options.ops):
        share, more = divmod(options.examples, len(options.ops))
        outcome = _fuzz(op, share + (i < more), random.Random(f"{seed} {op}"))
        counts[op] = outcome.examples
        seen += outcome.seen
        if outcome.call is not None:
            failures += 1
            print(f"\n{op} failed: {outcome.report()}")
    took = time.perf_counter() - started
    each = ", ".join(f"{op} {count}" for op, count in counts.items())
    print(f"{sum(counts.values())} calls in {took:.0f} s, {failures} ops failed: {each}")
    print(
        f"launches {seen.launches}; results and gradients compared with a formula {seen.compared}, "
        f"{seen.blunt} of them too small for their budget to tell from zero"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
