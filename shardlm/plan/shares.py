"""What the time of a step goes to, in few words: computing, what it waits for on the links of each axis, and the
pipeline's bubble. For tables and reasons; cost.py has the details."""

from shardlm.plan.plan import Plan
from shardlm.plan.search import settings

COMPUTING, BUBBLE = "computing", "pipeline bubble"


def shares(plan: Plan) -> dict[str, float]:
    """Fractions of a step, the largest first. Computing includes what collectives beside it slow it down by."""
    cost = plan.cost
    parts: dict[str, float] = {COMPUTING: cost.step_seconds - cost.exposed_seconds - cost.bubble_seconds}
    for one in cost.comms:
        name = f"{'+'.join(one.sent.axes)} communication"
        parts[name] = parts.get(name, 0.0) + one.exposed_seconds
    parts[BUBBLE] = cost.bubble_seconds
    found = {name: seconds / cost.step_seconds for name, seconds in parts.items() if seconds > 0}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def limited_by(plan: Plan) -> str:
    """The largest of them, with its share of a step."""
    name, share = next(iter(shares(plan).items()))
    return f"{name} {share:.0%}"


def described(plan: Plan) -> str:
    """Mesh and settings of a plan, axes of size 1 left out."""
    chosen = settings(plan.config)
    axes = [f"{name.removeprefix('mesh.')}={n}" for name, n in chosen.items() if name.startswith("mesh.") and n > 1]
    rest = {name.partition(".")[2] or name: v for name, v in chosen.items() if not name.startswith("mesh.")}
    rules = rest.pop("rules")
    offload = [f"{name} offloaded" for name in ("optimizer", "params") if rest.pop(name, False)]
    words = [f"{name}={value}" for name, value in rest.items() if (name, value) != ("accumulation", 1)]
    return " ".join([*(axes or ["one GPU"]), rules, *words, *offload])
