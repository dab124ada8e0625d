"""An answer as one page with pictures that asks nothing of a network: style and script are part of it."""

import functools
import pathlib
from typing import Any

import jinja2

from shardlm.plan.report import pictures, tables
from shardlm.plan.report.figures import gib

# Whatever a page may contain, a browser loads nothing for it.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)


def to_html(answer: dict[str, Any]) -> str:
    """The page of data.to_json's structure."""
    first = answer["first"]
    plan = answer["plans"][0] if first else answer["shortfall"]
    shown = [tables.memory(plan), tables.search(answer)]
    if first:
        shown += [tables.step(plan), tables.communication(first), tables.bill(first)]
        shown.append(tables.compute(first, plan["step_seconds"]))
        if plan["compiled_step"]:
            shown.append(tables.compared(plan))
    if answer["sweep"]:
        shown.append(tables.sweep(answer))
    return _template().render(
        answer=answer,
        policy=POLICY,
        headline=tables.headline(answer),
        plan=plan,
        facts=tables.facts(plan, answer["run"]),
        ranking=tables.plans(answer) if answer["plans"] else None,
        changes=tables.changes(answer) if answer["changes"] else None,
        memory=pictures.memory(answer),
        steps=pictures.steps(answer) if first else None,
        stages=pictures.stages(answer),
        mesh=pictures.mesh(answer),
        sweep=pictures.sweep(answer),
        tables={table.key: table for table in shown},
        words=tables.words(answer),
    )


@functools.cache
def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(pathlib.Path(__file__).parent)
    options = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = jinja2.Environment(loader=loader, autoescape=True, **options)
    environment.filters["gib"] = gib
    return environment.get_template("page.html.jinja")
