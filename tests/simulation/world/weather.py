"""The faults of one run as dice: who asks learns whether it is struck now. When the weather clears, only latency is left."""

import random

from tests.simulation.world.plan import Plan


class Weather:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.dice = random.Random(f"weather/{plan.seed}")
        self.clear = False
        self.store_away = False
        self.disk_full = False
        self.power_cuts = 0

    def strikes(self, kind: str) -> bool:
        strength = self.plan.strength(kind)
        return bool(strength) and not self.clear and self.dice.random() < strength

    def latency_s(self) -> float:
        return self.dice.uniform(0.0002, 0.006)

    def border_death(self) -> str:
        """Whether the process that asks dies at this very border: before its request has left, before it is carried out, or after."""
        if not self.strikes("border_kill"):
            return ""
        return self.dice.choice(("unsent", "before", "after"))
