"""A serving answer as one page with pictures, in the frame of a training plan's."""

from typing import Any

from shardlm.plan.report.html import page
from shardlm.plan.report.pictures import laid
from shardlm.plan.serving.report import pictures, tables


def to_html(answer: dict[str, Any]) -> str:
    """The page of data.to_json's structure."""
    plan, cluster = answer["plans"][0], answer["cluster"]
    found = answer["placement"]
    shown = [make(answer) for make in tables.SHOWN]
    return page(
        "serving.html.jinja",
        title=f"{answer['model']} served by {plan['num_gpus']} x {cluster['gpu']}",
        kind="Serving plan",
        name=answer["model"],
        headline=tables.headline(answer),
        plan=plan,
        facts=tables.facts(answer),
        limit=tables.limit(answer),
        refusals=tables.refusals(answer),
        ranking=tables.plans(answer),
        memory=pictures.memory(answer),
        decode=pictures.decode(answer),
        mesh=laid(found, cluster) if found["axes"] else None,
        tables={table.key: table for table in shown if table},
        start=answer["start"],
        words=tables.words(answer),
    )
