"""A broken run in words: the seed, the kinds of fault, the last events, and the one command that replays it."""

from tests.simulation.world.plan import Plan, draw
from tests.simulation.world.world import Verdict, simulate


def left_out(plan: Plan) -> list[str]:
    """Kinds of fault that the seed draws and this plan leaves out."""
    return sorted(set(draw(plan.seed, family=plan.family).kinds) - set(plan.kinds))


def report(verdict: Verdict) -> str:
    plan = verdict.plan
    flags = f" --family {plan.family}" if plan.family else ""
    flags += "".join(f" --without {kind}" for kind in left_out(plan))
    return "\n".join(
        [
            f"seed {plan.seed} broke a promise at {verdict.virtual_s:.3f} s: {verdict.broken}",
            f"kinds of fault: {', '.join(plan.kinds) or 'none'}",
            *verdict.last,
            f"replay: python -m tests.simulation.world {plan.seed}{flags}",
        ]
    )


def shrink(verdict: Verdict) -> Verdict:
    """Leave out one kind of fault after another as long as a promise is still broken."""
    for kind in verdict.plan.kinds:
        without = frozenset(left_out(verdict.plan)) | {kind}
        smaller = simulate(draw(verdict.plan.seed, without, verdict.plan.family))
        if smaller.broken is not None:
            verdict = smaller
    return verdict
