"""The pictures of a serving page as numbers, as plan/report/pictures.py has those of training."""

from typing import Any

from shardlm.plan.report.figures import figure, gib
from shardlm.plan.report.pictures import BARS, Point, memory_bar, plot

Data = dict[str, Any]
LOOKS = {"weights": "c0", "pages": "c2", "memories": "c3", "slots": "c4", "temporaries": "c1"}
PROGRAM = {"arguments": "rests", "temporaries": "besides"}


def memory(answer: Data) -> Data:
    """A bar of each plan's memory by kind, one more as the fullest of its programs has it, and what jax may take."""
    drawn = answer["plans"][:BARS] + [plan for plan in answer["plans"][BARS:] if plan["compiled"]]
    bars = []
    for plan in drawn:
        held = plan["estimated"]["memory"]
        bars.append((plan, "estimated", [(kind, look, held[f"{kind}_bytes"]) for kind, look in LOOKS.items()]))
        if plan["compiled"]:
            fullest = max(plan["compiled"], key=lambda program: program["total_bytes"])
            bars.append((plan, "compiled", [(kind, look, fullest[f"{kind}_bytes"]) for kind, look in PROGRAM.items()]))
    limit = drawn[0]["estimated"]["memory_limit_bytes"]
    widest = max([limit, *(sum(part[2] for part in parts) for *_, parts in bars)]) * 1.02
    legend = [{"name": kind, "look": look} for kind, look in LOOKS.items()]
    if any(plan["compiled"] for plan in drawn):
        legend += [{"name": f"{kind}, compiled", "look": look} for kind, look in PROGRAM.items()]
    return {
        "legend": legend,
        "limit": {"at": limit / widest, "text": f"{gib(limit)} GiB that jax may take"},
        "bars": [
            {"label": f"#{plan['rank']} {plan['replica_text']}", "rules": _gpus(plan["gpus_per_replica"])}
            | memory_bar(basis, parts, limit, widest)
            for plan, basis, parts in bars
        ],
    }


def _gpus(count: int) -> str:
    return "1 GPU a replica" if count == 1 else f"{count} GPUs a replica"


def decode(answer: Data) -> Data:
    """Tokens/s of a replica of the first plan against requests at once, and the bandwidth bound above it."""
    points = []
    for step in answer["plans"][0]["estimated"]["decode"]:
        rate, bound = step["tokens_per_second"], step["bandwidth_bound_tokens_per_second"]
        said = f"{step['batch']} requests: {figure(rate)} tokens/s, {step['share_of_bandwidth_bound']:.0%} of the bound"
        points.append(Point(step["batch"], rate, bound, said))
    return plot(points)
