"""An answer as one page with pictures that asks nothing of a network: style and script are part of it."""

import functools
import pathlib
from typing import Any

import jinja2

from shardlm.plan.report import pictures, sentences, tables
from shardlm.plan.report.figures import called, gib

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
        shown.append(tables.compute(first, plan["estimated"]["step_seconds"]))
        if plan["compiled_step"]:
            shown += [tables.compared(plan), tables.compiled_communication(first)]
    if answer["sweep"]:
        shown.append(tables.sweep(answer))
    cluster, name = answer["cluster"], answer["config"] or "Plan"
    told = page(
        "page.html.jinja",
        title=f"{name} on {cluster['num_gpus']} x {cluster['gpu']}",
        kind="Training plan",
        name=name,
        answer=answer,
        headline=sentences.headline(answer),
        plan=plan,
        facts=sentences.facts(plan, answer["run"]),
        ranking=tables.plans(answer) if answer["plans"] else None,
        changes=tables.changes(answer) if answer["changes"] else None,
        remedy=sentences.change(answer),
        settings=sentences.settings(plan),
        refusals=sentences.refusals(answer),
        images=sentences.images(answer["images"]) if answer["images"] else "",
        memory=pictures.memory(answer),
        steps=pictures.steps(answer) if first else None,
        stages=pictures.stages(answer),
        mesh=pictures.mesh(answer),
        sweep=pictures.sweep(answer),
        tables={table.key: table for table in shown},
        words=sentences.words(answer),
    )
    return called(told, cluster["device"])


def page(template: str, **values: Any) -> str:
    """One of this folder's templates, with these values."""
    return _environment().get_template(template).render(policy=POLICY, **values)


@functools.cache
def _environment() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(pathlib.Path(__file__).parent)
    options = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = jinja2.Environment(loader=loader, autoescape=True, **options)
    environment.filters["gib"] = gib
    return environment
