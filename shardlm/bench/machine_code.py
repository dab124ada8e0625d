"""What becomes of a program's kernels on a GPU, compiled without one: registers, what is spilled of them, blocks that a
multiprocessor has room for, and the instructions of the loop that the time goes to. XLA writes PTX; NVIDIA's ptxas,
which jax[cuda13] brings, assembles it, and nvdisasm (nvidia-cuda-nvdisasm), where there is one, shows what it made.

These are figures of the program and not of a clock: they bound how fast a kernel may be and never say how fast it is.
"""

import collections
import dataclasses
import importlib.util
import math
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from shardlm import hardware
from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.ops.cudnn_heads import traced_for
from shardlm.topology import CHIPS, topology

REGISTERS = 65_536  # of a multiprocessor, given to warps in 256
MOST_THREADS, MOST_BLOCKS, RESERVED = 2048, 32, 1024  # of one; bytes of shared memory of a block that CUDA keeps
SCHEDULERS = 4  # of one: each issues one instruction of a warp in a clock
WARP = 32
THUNK = re.compile(
    r"kCustomKernel \[.*?\] (\S+) grid: \[([\d, ]+)\] threads: \[([\d, ]+)\]\s+shared_memory: (\d+) bytes"
)
USED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads\s+ptxas info\s+: Used (\d+) registers")
KINDS: Mapping[str, str] = {
    "tensor cores": r"HGMMA|HMMA|IMMA|QGMMA|mma\.|wgmma\.mma",
    "read 16 bytes, ahead": r"LDGSTS.*\.128|UTMALDG|cp\.async\.cg|cp\.async\.bulk",
    "read fewer, ahead": r"LDGSTS|cp\.async\.ca",
    "read 16 bytes": r"LDG.*\.128|ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64",
    "read fewer": r"LDG(?!DEPBAR)|ld\.global",
    "spilled": r"LDL|STL|ld\.local|st\.local",
    "barriers": r"BAR|bar\.sync|barrier",
}
"""Of instructions, SASS's and PTX's, by the first that fits."""


@dataclasses.dataclass(frozen=True)
class Code:
    """One kernel.

    grid       blocks, in three dimensions
    threads    of a block, and its shared memory
    registers  of a thread; `spilled`: bytes of them that are written to memory and read again. None without ptxas
    loop       instructions of the innermost loop with products, or else of the longest, by kind, all as "all"; {}: none
    source     what `loop` was counted in: sass or ptx
    """

    name: str
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int
    registers: int | None
    spilled: int | None
    loop: Mapping[str, int]
    source: str

    def blocks(self, gpu: str) -> int | None:
        """That fit on one multiprocessor at the same time."""
        if self.registers is None:
            return None
        of_warp = -(-self.registers * WARP // 256) * 256
        by_registers = REGISTERS // (of_warp * -(-self.threads // WARP))
        by_memory = CHIPS[hardware.named(gpu).name].shared_bytes_per_core // (self.shared_bytes + RESERVED)
        return min(by_registers, by_memory, MOST_THREADS // self.threads, MOST_BLOCKS)

    def filled(self, gpu: str) -> float:
        """Blocks of the grid for each multiprocessor."""
        return math.prod(self.grid) / CHIPS[hardware.named(gpu).name].cores

    def per_byte(self, nbytes: float) -> float:
        """Instructions of a warp for each of the bytes that a block reads in one turn of its loop."""
        return self.loop["all"] * (self.threads / WARP) / nbytes


def left_per_byte(gpu: str) -> float:
    """The same that a multiprocessor can issue while it reads a byte, all of them at the memory's full rate."""
    found = hardware.named(gpu)
    chip = CHIPS[found.name]
    return SCHEDULERS * chip.cores * chip.clock_ghz * 1e9 / found.hbm_bytes_per_second


def tool(name: str) -> str:
    """The path of ptxas or nvdisasm, from the packages that jax uses or else from PATH; "" without it."""
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or () if spec else ():
        for file in pathlib.Path(place).glob(f"*/bin/{name}"):
            if os.access(file, os.X_OK):
                return str(file)
    return shutil.which(name) or ""


def kernels(run: Callable[..., Any], inputs: Callable[[], Sequence[Any]], gpu: str) -> list[Code]:
    """The kernels of `run`, compiled for one such GPU, in their order. `inputs` gives arguments, or what stands for
    them, under a mesh of that GPU. Raises ShardlmError where nothing can be compiled for it."""
    mesh = MeshSpec().build(topology(gpu, 1, 1))
    whole = NamedSharding(mesh, jax.P())
    with tempfile.TemporaryDirectory() as folder, jax.set_mesh(mesh), traced_for(mesh.devices.flat[0]):
        held = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), inputs())
        options = {"xla_dump_to": folder}
        if jax.__version_info__ >= (0, 11):  # which writes PTX for this alone; of ".*" LLVM's text and a trace of the
            options |= {"xla_dump_emitter_re": "ptx"}  # stack too, 90 s for 1 where llvm-symbolizer is installed
        options |= {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
        jax.jit(run).lower(*held).compile(compiler_options=options)  # as they run, whatever this process's flags are
        return list(_read(pathlib.Path(folder), gpu))


def _read(folder: pathlib.Path, gpu: str) -> Iterator[Code]:
    files = {name: file for file in folder.glob("*.ptx") for name in re.findall(r"\.entry (\S+)\(", file.read_text())}
    sequence = list(folder.glob("*thunk_sequence.txt"))
    if not sequence or not files:
        raise ShardlmError(f"XLA wrote no kernels of this program: it has {sorted(p.name for p in folder.iterdir())}")
    for name, grid, threads, shared in THUNK.findall(sequence[0].read_text()):
        counts = [tuple(map(int, text.split(","))) for text in (grid, threads)]
        ptx = files[name]
        used, assembled = _assembled(ptx, name)
        loop, source = _loop(_of_sass(assembled, name)), "sass"
        if not loop:
            loop, source = _loop(_of_ptx(ptx.read_text(), name)), "ptx"
        yield Code(name, counts[0], math.prod(counts[1]), int(shared), *used, loop, source)


def _assembled(ptx: pathlib.Path, name: str) -> tuple[tuple[int | None, int | None], pathlib.Path | None]:
    """((registers, bytes spilled), what ptxas made). Raises ShardlmError for PTX that it refuses."""
    ptxas = tool("ptxas")
    if not ptxas:
        return (None, None), None
    target = re.search(r"\.target (\w+)", ptx.read_text())
    made = ptx.with_suffix(".cubin")
    done = subprocess.run([ptxas, "-v", f"-arch={target[1]}", ptx, "-o", made], capture_output=True, text=True)
    said = done.stderr.partition(f"entry function '{name}'")[2]
    found = USED.search(said)
    if done.returncode or not found:
        raise ShardlmError(f"{ptxas} made nothing of {name}: {done.stderr[-2000:]}")
    stores, loads, registers = map(int, found.groups())
    return (registers, stores + loads), made


def _of_sass(made: pathlib.Path | None, name: str) -> str:
    """The kernel's text: labels `.L_x_0:`, and instructions."""
    nvdisasm = tool("nvdisasm")
    if made is None or not nvdisasm:
        return ""
    text = subprocess.run([nvdisasm, "-c", made], capture_output=True, text=True, check=True).stdout
    own = text.partition(f"\n.text.{name}:\n")[2].partition("\n//----")[0]
    return re.sub(r"/\*[0-9a-f]+\*/", "", own)


def _of_ptx(text: str, name: str) -> str:
    return text.partition(f".entry {name}(")[2].partition("\n}\n")[0]


def _loop(text: str) -> dict[str, int]:
    instructions, labels, loops = [], {}, []
    for line in re.sub(r"//.*", "", text).splitlines():
        line = line.strip().strip("{} \t")
        if label := re.match(r"(\.?[$\w]+):", line):
            labels[label[1]] = len(instructions)
            continue
        for one in filter(None, map(str.strip, line.split(";"))):
            found = re.match(r"(?:@!?%?\w+\s+)?([A-Za-z][\w.]*)\s*(.*)", one)
            if not found or one.startswith("."):
                continue
            instructions.append(found[1])
            target = re.search(r"(\.L_\w+|\$L\w+)", found[2])
            if found[1].lower().startswith("bra") and target and target[1] in labels:
                loops.append(instructions[labels[target[1]] :])  # one that leads to itself alone ends a kernel
    products = [loop for loop in loops if any(_kind(one) == "tensor cores" for one in loop)]
    chosen = min(products, key=len) if products else max((one for one in loops if len(one) > 1), key=len, default=[])
    counted = collections.Counter(filter(None, map(_kind, chosen)))
    return {"all": len(chosen), **counted} if chosen else {}


def _kind(instruction: str) -> str | None:
    return next((kind for kind, form in KINDS.items() if re.match(form, instruction)), None)
