"""How tokens reach their experts, by where a mesh's devices lie."""

import pytest

from shardlm.mesh import MeshSpec
from shardlm.ops.expert_dispatch import choose, near


@pytest.mark.parametrize(
    ("mesh", "joined", "gathered"),
    [
        (MeshSpec(fsdp=4, expert=8), 8, True),
        (MeshSpec(data=2, fsdp=4, expert=4, tensor=2), 8, True),
        (MeshSpec(data=4, expert=8), 8, False),  # nor several at once
        (MeshSpec(fsdp=2, expert=8), 8, False),
        (MeshSpec(fsdp=4, expert=2, context=2), 4, True),
        (MeshSpec(fsdp=4, pipeline=2, expert=2, context=2), 4, False),  # stages wait for what layers exchange
        (MeshSpec(fsdp=4, expert=2), 8, False),  # one host: no weights come over a network
        (MeshSpec(expert=8), 8, False),
        (MeshSpec(fsdp=4, expert=8), 4, False),  # over two hosts
        (MeshSpec(fsdp=4, expert=8, context=2), 8, False),  # devices of one expert axis lie two apart
        (MeshSpec(fsdp=8, expert=3), 8, False),  # some of its groups over two hosts
        (MeshSpec(fsdp=4, expert=8), 1, False),  # over PCIe, and on CPUs
        (MeshSpec(fsdp=32), 8, False),
    ],
    ids=str,
)
def test_tokens_are_gathered_inside_a_host_of_several(mesh, joined, gathered):
    assert near(mesh, joined) is gathered


def test_the_exchange_that_is_chosen():
    assert choose(1, 2) == choose(1, 2, near=True) == "local"
    assert choose(8, 2, split=False) == choose(8, 2, split=False, near=True) == "everywhere"
    assert choose(2, 2) == choose(8, 2, near=True) == choose(8, 8) == "gather"
    assert choose(8, 2) == choose(16, 8) == "all_to_all"
