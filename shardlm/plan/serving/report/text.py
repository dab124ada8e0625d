"""A serving answer as plain text."""

from typing import Any

from shardlm.plan.report.laid_out import WIDTH, show, wrapped
from shardlm.plan.serving.report import tables
from shardlm.plan.serving.report.start import shown


def to_text(answer: dict[str, Any]) -> str:
    """What `launch.plan --serve` prints, of data.to_json's structure."""
    plan, facts = answer["plans"][0], tables.facts(answer)
    what, said = (max(len(getattr(fact, name)) for fact in facts) for name in ("what", "said"))
    lines = [f"The first: {plan['mesh_text']}, {plan['status']}"]
    lines += [f"  {fact.what:<{what}}  {fact.said:>{said}}  {fact.basis}" for fact in facts]
    lines.append(wrapped(f"  Limited by {tables.limit(answer)}."))
    found = [make(answer) for make in tables.SHOWN]
    blocks = [
        "\n".join(map(wrapped, tables.headline(answer))),
        show(tables.plans(answer)),
        "\n".join(map(wrapped, tables.refusals(answer))),
        "\n".join(lines),
        *(show(table) for table in found if table),
        "\n".join(["Start it", *(shown(one, WIDTH) for one in answer["start"])]),
        "\n".join(map(wrapped, tables.words(answer))),
    ]
    return "\n\n".join(filter(None, blocks)) + "\n"
