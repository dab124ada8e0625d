"""Shows devices, hosts, links and a mesh over them, and measures latency and bandwidth of its collectives.

python -m launch.topology --mesh=fsdp=4,tensor=2 --png=bandwidth.png
python -m launch.topology --mesh=data=2,fsdp=4 --axes=fsdp,data+fsdp --collectives=all-gather --sizes=64K,32M
python -m launch.topology --cpu_devices=8 --mesh=tensor=8 --nomeasure
python -m launch.topology --profile=machine.json      # also matmuls and memory: what a planner reads
"""

import functools
import json
import os
import pathlib

from absl import flags

from launch.flags import cluster, run
from shardlm.errors import ShardlmError
from shardlm.files import write_atomically

_MESH = flags.DEFINE_list("mesh", ["fsdp=-1"], "Sizes of axes, as fsdp=4,tensor=2; one may be -1, for the rest.")
_AXES = flags.DEFINE_list("axes", [], "Axes to measure, as fsdp,data+fsdp; by default each that is larger than 1.")
_COLLECTIVES = flags.DEFINE_list("collectives", [], "Those to measure; by default all that shardlm's programs use.")
_SIZES = flags.DEFINE_list("sizes", [], "Bytes, as 4096,64K,32M: of the larger side of a collective on one device.")
_MEASURE = flags.DEFINE_bool("measure", True, "Measure the collectives; --nomeasure only shows.")
_OUTPUT = flags.DEFINE_string("output", None, "File for all points and fitted lines as JSON.")
_PNG = flags.DEFINE_string("png", None, "File for a picture of the bandwidths.")
_PROFILE = flags.DEFINE_string("profile", None, "File for the machine's profile; measures matmuls and memory too.")
_CPU_DEVICES = flags.DEFINE_integer("cpu_devices", 0, "Use so many virtual CPU devices; 0: the real ones.")


def main() -> int:
    from launch.devices import use_cpu_devices
    from shardlm.distributed import detect, explicit, joined

    use_cpu_devices(_CPU_DEVICES.value)
    with joined(explicit(**cluster()) or detect(os.environ)):
        show()
    return 0


def show() -> None:
    import jax

    from shardlm.mesh import MeshSpec
    from shardlm.network import layout, report, survey
    from shardlm.network.collectives import parse_sizes
    from shardlm.network.links import read_links
    from shardlm.network.profile import save_profile

    kinds, spec = survey.chosen_kinds(_COLLECTIVES.value), MeshSpec.parse(_MESH.value)
    sizes = parse_sizes(_SIZES.value, jax.default_backend())
    try:
        mesh = spec.build()
    except ShardlmError as error:
        if jax.default_backend() != "cpu" or _CPU_DEVICES.value:
            raise
        raise ShardlmError(f"{error}; --cpu_devices=N makes N virtual ones of this machine's processor") from None
    laid = layout.layout_of(mesh)
    over = layout.chosen_axes(_AXES.value, laid) if _MEASURE.value else []
    if _PNG.value and not over:
        raise ShardlmError(
            "--png: nothing is measured that it could show; leave it out, or --nomeasure, or give --mesh"
        )
    links, why = read_links()
    first = jax.process_index() == 0
    say = functools.partial(print, flush=True) if first else lambda text: None
    shown = (layout.format_devices(laid), report.format_links(links) if links else why, layout.format_mesh(laid))
    say("\n\n".join(shown))
    rows = []
    for row in survey.survey(mesh, laid, links, over=over, kinds=kinds, sizes=sizes):
        say(f"{'' if rows else chr(10) + report.HEAD + chr(10)}{report.format_row(row)}")
        rows.append(row)
    rates, missing = survey.rates(rows, laid)
    if rates:
        say(f"\nlatency + bytes / bandwidth, fitted\n{report.format_rates(rates)}")
    if missing:
        say("\n".join(("", *missing)))
    if first and _OUTPUT.value:
        text = json.dumps(survey.as_json(laid, rows, rates), indent=1)
        write_atomically(pathlib.Path(_OUTPUT.value), text.encode() + b"\n")
    if first and _PNG.value:
        report.plot(rows, f"{len(laid.places)} x {laid.places[0].kind}", _PNG.value)
    if first and _PROFILE.value:
        profile = survey.machine_profile(mesh, laid, links, rates, lambda rate: say(report.format_rate(rate)))
        save_profile(profile, _PROFILE.value)


if __name__ == "__main__":
    run(main, needs_config=False, processes=True)
