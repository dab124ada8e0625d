"""An answer as plain text."""

from typing import Any

from shardlm.plan.report import sentences, tables
from shardlm.plan.report.figures import called, figure, gib
from shardlm.plan.report.laid_out import show, wrapped

BILL_ROWS, FRAMES = 12, 2
REASONS = 3


def to_text(answer: dict[str, Any]) -> str:
    """What `launch.plan` prints, of data.to_json's structure."""
    head = [answer["config"]] if answer["config"] else []
    blocks = ["\n".join(map(wrapped, [*head, *sentences.headline(answer)]))]
    if answer["first"]:
        blocks += [show(tables.plans(answer)), *_refusals(answer), *_first(answer)]
        blocks += [wrapped(sentences.images(answer["images"]))] if answer["images"] else []
    else:
        blocks += _nothing_fits(answer)
    if answer["sweep"]:
        blocks.append(show(tables.sweep(answer)))
    if answer["unverified"]:
        blocks.append(wrapped(f"Nothing was verified: {answer['unverified']}"))
    blocks += [show(tables.search(answer, REASONS)), "\n".join(map(wrapped, sentences.words(answer)))]
    return called("\n\n".join(blocks) + "\n", answer["cluster"]["device"])


def _first(answer: dict[str, Any]) -> list[str]:
    plan, first = answer["plans"][0], answer["first"]
    facts = sentences.facts(plan, answer["run"])
    wide, figures, basis = (max(len(getattr(fact, name)) for fact in facts) for name in ("what", "said", "basis"))
    took = f" (compiled in {figure(plan['compile_seconds'])} s)" if plan["compile_seconds"] else ""
    lines = [f"The first: {plan['mesh_text']}, {plan['status']}{took}"]
    for fact in facts:
        beside = f"  ({fact.beside})" if fact.beside else ""
        lines.append(f"  {fact.what:<{wide}}  {fact.said:>{figures}}  {fact.basis:<{basis}}{beside}".rstrip())
    lines.append(wrapped(f"  Limited by {plan['limited_by']} ({plan['basis']})."))
    if first["stages"]:
        lines.append(wrapped(f"  Pipeline, {sentences.pipeline(first)}"))
    if answer["run"]["price_source"]:
        lines.append(wrapped(f"  The price: {answer['run']['price_source']}."))
    shown = [
        tables.memory(plan),
        tables.step(plan),
        *([tables.compared(plan)] if plan["compiled_step"] else []),
        tables.communication(first),
        tables.compiled_communication(first),
        tables.compute(first, plan["estimated"]["step_seconds"]),
        tables.bill(first, BILL_ROWS, FRAMES),
    ]
    return ["\n".join(lines), *(show(table) for table in shown if table)]


def _refusals(answer: dict[str, Any]) -> list[str]:
    said = sentences.refusals(answer)
    return ["\n".join(map(wrapped, said))] if said else []


def _nothing_fits(answer: dict[str, Any]) -> list[str]:
    plan = answer["shortfall"]
    said = (
        f"Nothing fits. What needs least is {sentences.settings(plan)}: "
        f"{gib(plan[plan['basis']]['memory_bytes'])} GiB a GPU ({plan['basis']}), {gib(plan['over_bytes'])} GiB more "
        f"than the {gib(plan['memory']['limit_bytes'])} of one {answer['cluster']['gpu']}."
    )
    remedy = sentences.change(answer) or "No single change that was tried makes it fit."
    listed = [show(tables.changes(answer))] if answer["changes"] else []
    return [wrapped(said), wrapped(remedy), *_refusals(answer), *listed, show(tables.memory(plan))]
