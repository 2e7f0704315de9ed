"""Many drawn calls, one after the other, down to the smallest that fails."""

import dataclasses

import hypothesis
from hypothesis import strategies as st

from .calls import Call
from .properties import Seen, check


@dataclasses.dataclass
class Outcome:
    """How many calls were checked, what was seen, and the smallest failing call if any."""

    examples: int
    seen: Seen
    call: Call | None = None
    error: Exception | None = None

    def report(self) -> str:
        """The failure and a program that repeats it."""
        assert self.call is not None
        error = f"{type(self.error).__name__}: {self.error}"
        return f"{error}\n\n{self.call.pasteable()}"


def run(
    strategy: st.SearchStrategy[Call],
    examples: int,
    seed: int | None = None,
    shrink: bool = True,
) -> Outcome:
    """Check ``examples`` calls: the same each time without a ``seed``, others with another."""
    outcome = Outcome(0, Seen())

    def example(call: Call) -> None:
        outcome.examples += 1
        try:
            outcome.seen += check(**call.build())
        except Exception as error:
            outcome.call, outcome.error = call, error
            raise

    phases = [hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if shrink else [])]
    settings = hypothesis.settings(
        phases=phases,
        max_examples=examples,
        deadline=None,
        derandomize=seed is None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )
    test = settings(hypothesis.given(strategy)(example))
    try:
        (test if seed is None else hypothesis.seed(seed)(test))()
    except Exception as error:
        if outcome.call is None:
            raise
        outcome.error = outcome.error or error
    return outcome
