"""The accepted path through a prefix tree, found on the device."""

from __future__ import annotations

import mlx.core as mx

from kernels_metal.checks import check_array, check_range
from kernels_metal.factory import Kernel, Launch, launch
from kernels_metal.operation import ROWS, Draw, Operation, case_of

MAX_NODES = 1024
KERNEL = Kernel("tree_walk", inputs=("choices", "tokens", "parents"), outputs=("result",))


def tree_walk(choices: mx.array, tokens: mx.array, parents: mx.array) -> mx.array:
    """Follow the target's choices from the root, as far as children carry them.

    choices: [N] the target's token after each node. tokens: [N] of each node. parents: [N] node
    ids, below the node's own, -1 for the root, node 0. All int32 or uint32, N up to 1024.
    Returns int32 [N + 2]: the nodes on the path, the target's token after them (the next anchor),
    then the path, root first, and -1. Of siblings with the same token the first counts.
    Raises ValueError for other shapes and dtypes.
    """
    check_arguments(choices, tokens, parents)
    nodes = choices.shape[0]
    plan = Launch(
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=((nodes + 2,),),
        output_dtypes=(mx.int32,),
    )
    return launch(KERNEL, [a.view(mx.int32) for a in (choices, tokens, parents)], plan)[0]


def tree_walk_reference(choices: mx.array, tokens: mx.array, parents: mx.array) -> mx.array:
    """As `tree_walk`, by pointer doubling: a node is on the path when all its ancestors match."""
    nodes = choices.shape[0]
    node = mx.arange(nodes)
    choices, tokens = choices.astype(mx.int32), tokens.astype(mx.int32)
    above = mx.maximum(parents.view(mx.int32), 0)
    same = (above[:, None] == above) & (tokens[:, None] == tokens)
    repeated = mx.any(same & (node[:, None] > node) & (node > 0), axis=1)
    on_path = (node == 0) | ((tokens == choices[above]) & ~repeated)
    for _ in range(max(nodes - 1, 1).bit_length()):
        on_path = on_path & on_path[above]
        above = above[above]
    length = on_path.sum().astype(mx.int32)
    last = mx.where(on_path, node, 0).max()
    ordered = mx.sort(mx.where(on_path, node, nodes))
    path = mx.where(ordered < nodes, ordered, -1).astype(mx.int32)
    return mx.concatenate([length[None], choices[last][None], path])


def check_arguments(choices: mx.array, tokens: mx.array, parents: mx.array) -> None:
    """Raise ValueError for arguments the kernel does not take."""
    dtypes = (mx.int32, mx.uint32)
    check_array("choices", choices, (None,), dtypes)
    check_range("the number of nodes", choices.shape[0], 1, MAX_NODES)
    for name, array in (("tokens", tokens), ("parents", parents)):
        check_array(name, array, choices.shape, dtypes)


def _arguments(draw: Draw) -> tuple[mx.array, ...]:
    """A tree that the choices often follow; or whose nodes have up to `branches` children."""
    nodes = draw.size("nodes", (*ROWS, 128, 1000))
    if branches := draw.given.get("branches"):
        tokens = [node % branches for node in range(nodes)]
        parents = [(node + branches - 1) // branches - 1 for node in range(nodes)]
        return mx.ones(nodes, mx.int32), mx.array(tokens), mx.array(parents)
    tokens = [draw.rng.randrange(3) for _ in range(nodes)]
    parents = draw.parents(nodes)
    choices = [draw.rng.randrange(3) for _ in range(nodes)]
    for node in range(1, nodes):
        if draw.rng.random() < 0.8:
            choices[parents[node]] = tokens[node]
    return mx.array(choices), mx.array(tokens), mx.array(parents)


TREE_WALK = Operation(
    name="tree_walk",
    kernel=tree_walk,
    reference=tree_walk_reference,
    check=check_arguments,
    case=lambda *arrays: case_of(arrays[0].shape[0], (), arrays),
    kernels=(KERNEL,),
    arguments=_arguments,
    defaults={"nodes": 64, "branches": 3},
)
