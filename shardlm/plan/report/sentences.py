"""What is said of an answer beside its tables, made from its plain data (data.py): the figures of a plan, what
would make it fit, what the words mean."""

import dataclasses
from typing import Any

from shardlm.plan.columns import rounded
from shardlm.plan.report.figures import days, dollars, duration, figure, gib, large, milliseconds, percent
from shardlm.plan.report.tables import was_compiled

Data = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Fact:
    """A figure of one plan; `beside` is the other one where the plan goes by its program, with its word."""

    what: str
    said: str
    basis: str
    beside: str = ""


def images(found: Data) -> str:
    """What images of each row have of the first plan."""
    height, width = found["size"]
    learned = f", training it {gib(found['learned_bytes'])} GiB more" if found["learned_bytes"] else ""
    return (
        f"With {found['per_row']:g} images of {height} x {width} pixels (height x width) in each row, "
        f"{found['tokens_each']:,} tokens each: their encoder takes {gib(found['encoder_bytes'])} GiB a GPU{learned} "
        f"and {duration(found['encoder_seconds'])} s of a step, and its vectors {gib(found['vector_bytes'])} GiB "
        "(estimated). All of it is in the figures above; preparing images on the host is not counted."
    )


def facts(plan: Data, run: Data) -> list[Fact]:
    """What a plan comes to, by its program where there is one."""
    price = run["dollars_per_gpu_hour"]
    shown = [
        ("step", "step_seconds", lambda x: f"{duration(x)} s"),
        ("tokens/s", "tokens_per_second", figure),
        ("MFU", "mfu", percent),
        ("memory of a GPU", "memory_bytes", lambda x: f"{gib(x)} GiB"),
        (f"{large(run['tokens'])} tokens", "days", days),
        (f"at ${rounded(price, 2)} a GPU-hour", "dollars", dollars),
    ]
    told, other = plan[plan["basis"]], plan["estimated"] if plan["basis"] == "compiled" else None
    return [
        Fact(what, show(told[key]), plan["basis"], f"{show(other[key])} estimated" if other else "")
        for what, key, show in shown
        if told[key] is not None
    ]


def refusals(answer: Data) -> list[str]:
    """Plans and changes whose programs do not fit or that have none, in a sentence each."""
    rows = [(f"#{p['rank']} {p['mesh_text']}", p["why"]) for p in answer["plans"]]
    rows += [(f"{c['change']} with {c['mesh_text']}", c["why"]) for c in answer["changes"]]
    return [f"{what} was refused: {why}" for what, why in rows if why]


def settings(plan: Data) -> str:
    """Its mesh, and what goes with it."""
    away = "".join(f", the {name} in the host's memory" for name in plan["offload"])
    products = "" if plan["matmul"] == "dtype" else f", matmul={plan['matmul']}"
    loop = "" if plan["unroll"] else ", no loop over layers (unroll=0)"
    held = "" if plan["moments"] == "float32" else f", moments in {plan['moments']}"
    return f"{plan['mesh_text']}, rules={plan['rules']}, remat={plan['remat']}{loop}{products}{held}{away}"


def change(answer: Data) -> str:
    """The first change, in a sentence, and how many GPUs it needs without one; "" where there is none that was not
    refused."""
    given = [one for one in answer["changes"] if one["status"] != "refused"]
    if not given:
        return ""
    found = given[0]
    told = found[found["basis"]]
    where = f"{found['mesh_text']} on {found['num_gpus']:,} x {found['gpu']}"
    needs = f"{gib(told['memory_bytes'])} of {gib(found['memory']['limit_bytes'])} GiB a GPU ({found['basis']})"
    how = found["change"] if found["change"].startswith("without ") else f"with {found['change']}"
    said = f"It fits {how} ({found['status']}): {where}, {needs}."
    more = next((one for one in given[1:] if one["num_gpus"] != answer["cluster"]["num_gpus"]), None)
    least = more and f" As it is, it needs at least {more['num_gpus']:,} x {more['gpu']} ({more['status']})."
    return said + (least or "")


def pipeline(first: Data) -> str:
    """What the stages do, in a sentence; "" without a pipeline."""
    found = first["stages"]
    if not found:
        return ""
    rounds = f", {found['rounds']} rounds" if found["rounds"] > 1 else ""
    idle = first["bubble_seconds"]
    step = max(sum(span["seconds"] for span in row["spans"]) for row in found["rows"])
    whole = " Weights rest whole on every stage: their embedding does not divide over them."
    return (
        f"{found['schedule']}{rounds}: {found['microbatches']} microbatches through {len(found['rows'])} stages; "
        f"{percent(found['idle_share'])} of the stages' ticks are idle, {milliseconds(idle)} ms or "
        f"{percent(idle / step)} of the step (estimated)." + whole * found["weights_rest_whole"]
    )


def headline(answer: Data) -> tuple[str, ...]:
    """(the cluster, the run, that it has few rows where it does, what the command line says of it where it does) in a
    line each. On 256 GPUs, Llama 3 70B makes 2.9 times as many tokens/s of 256 rows as of 16 (estimated)."""
    cluster, run = answer["cluster"], answer["run"]
    hosts = f"{cluster['num_hosts']:,} host{'s' if cluster['num_hosts'] > 1 else ''} of {cluster['gpus_per_host']}"
    inside, network = cluster["inside_bytes_per_second"], cluster["network_bytes_per_second"]
    links = [f"{cluster['inside_link']} {figure(inside / 1e9)} GB/s"] * (inside > 0)  # none was measured of one device
    links += [f"network ({cluster['fabric']}) {figure(network / 1e9)} GB/s"] * (cluster["num_hosts"] > 1)
    reach = f"; {', '.join(links)} a GPU and direction" if links else ""
    first = f"{cluster['num_gpus']:,} x {cluster['gpu']} in {hosts}{reach}"
    adapters = f" and {large(run['adapter_parameters'])} in adapters" if run["adapter_parameters"] else ""
    second = (
        f"{large(run['parameters'])} parameters{adapters}; {run['global_batch']:,} rows of {run['seq_len']:,} = "
        f"{large(run['tokens_per_step'])} tokens a step; {run['precision']}, {run['optimizer']}"
    )
    lines = [first, second]
    if run["global_batch"] < cluster["num_gpus"]:
        lines.append(
            f"{run['global_batch']:,} rows are fewer than the GPUs, so that several share each; with "
            f"--config.train.global_batch={cluster['num_gpus']} there is one for each, which may be much faster"
        )
    given = ", ".join(f"{path}={value}" for path, value in answer["overrides"].items())
    return tuple([*lines, f"With {given}"] if given else lines)


def words(answer: Data) -> list[str]:
    """What the words mean, as far as they are used."""
    said = ["estimated: by formulas; nothing was run.", *(f"{one}." for one in answer["cluster"]["measured"])]
    rows = [*answer["plans"], *answer["changes"]]
    if was_compiled(answer):
        said.append(
            "compiled: read from the program that XLA made for these GPUs; its times are those of its kernels and "
            "collectives as they are scheduled, at the rates of the formulas. Nothing was run."
        )
        if any(plan["status"] == "verified" for plan in rows):
            said.append("verified: the program was compiled, and fits.")
    if any(plan["status"] == "refused" for plan in rows):
        said.append("refused: the program does not fit, or there is none.")
    return said
