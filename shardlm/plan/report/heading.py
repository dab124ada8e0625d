"""What a configuration file that the planner writes says of itself."""

import shlex
from typing import Any

from shardlm.plan.report import sentences


def heading(answer: dict[str, Any], file: str) -> str:
    """Command, hardware and what was found of the first plan, each figure with its word."""
    plan = answer["plans"][0]
    told = sentences.headline(answer)
    lines = [f"The plan of {answer['config']}." if answer["config"] else "A plan.", ""]
    lines += [
        f"python -m launch.train --config={shlex.quote(file)}",
        "",
        *(f"{line};" for line in told[:-1]),
        f"{told[-1]}.",
    ]
    lines.append(f"{plan['mesh_text']}, {plan['status']}:")
    for fact in sentences.facts(plan, answer["run"]):
        beside = f" ({fact.beside})" if fact.beside else ""
        lines.append(f"  {fact.what}: {fact.said}, {fact.basis}{beside}")
    return "\n".join([*lines, "Nothing was run."])
