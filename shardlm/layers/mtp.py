"""Multi-token prediction (DeepSeek V3, https://arxiv.org/abs/2412.19437, section 2.2): modules behind a decoder, the
k-th of which predicts the token k + 1 places on. Embedding and output head are the decoder's (models/transformer.py);
the loss is train/mtp.py's."""

import dataclasses

import jax
from flax import nnx

from shardlm.layers.block import Block, BlockConfig
from shardlm.layers.context import Context, Pages
from shardlm.layers.lora import LoraConfig
from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params, normal, project
from shardlm.layers.stack import rematerialised


@dataclasses.dataclass(frozen=True)
class MtpConfig:
    """depth modules, each with one block. normed: a module gives to the next what the head takes, after the norm
    (Qwen3-Next, https://github.com/vllm-project/vllm/blob/main/vllm/model_executor/models/qwen3_next_mtp.py)."""

    block: BlockConfig
    depth: int = 1
    normed: bool = False

    def parameters_per_token(self, embed_dim: int) -> int:
        """Weights of one module that take part in a matmul for each token, without the head."""
        block = self.block.parameters_per_token(embed_dim)
        return block + 2 * embed_dim**2


class Mtp(nnx.Module):
    """All modules, every parameter stacked [depth, ...]: norms "embed_norm", "hidden_norm" and, before the head,
    "norm"; "from_embedding" and "from_hidden" (D, D), the halves of the paper's matrix M (eq. 21); and "block". Only
    the decoder has adapters."""

    def __init__(self, config: MtpConfig, embed_dim: int, out_scale: float, norm: NormConfig, params: Params):
        D, self.normed = embed_dim, config.normed
        params = dataclasses.replace(params, stack=(config.depth,), lora=LoraConfig(), place="mtp.")
        self.embed_norm, self.hidden_norm, self.norm = (Norm(norm, D, params) for _ in range(3))
        for name in ("from_embedding", "from_hidden"):
            params.projection(self, name, (D, D), ("embed", "norm"), normal((2 * D) ** -0.5))
        self.block = Block(config.block, D, out_scale, norm, params)

    def __call__(
        self,
        depth: int,
        hidden: jax.Array,
        embedded: jax.Array,
        positions: jax.Array,
        ctx: Context,
        pages: Pages | None,
        layer: int,
        execution: Execution,
    ) -> tuple[jax.Array, Pages | None, dict[str, jax.Array]]:
        """Module `depth`, from 0, at `layer` of the pages, under the remat policy where there are none. hidden [B, T,
        D] is what is made of each token and embedded [B, T, D] the token depth + 1 places on. Returns (hidden for the
        next module and, through `head_norm`, for the head; pages; the block's auxiliary values)."""

        def module(one, hidden, embedded, pages):
            one = nnx.merge(graph, one)
            x = project("btd,de->bte", one.embed_norm(embedded, execution), one, "from_embedding", execution)
            x = x + project("btd,de->bte", one.hidden_norm(hidden, execution), one, "from_hidden", execution)
            x, pages, aux = one.block(x, positions, ctx, pages, layer, execution)
            return one.norm(x, execution) if self.normed else x, pages, aux

        graph, stacked = nnx.split(self)
        # Outside a scan only a barrier keeps XLA from merging the recomputation with the forward pass.
        run = module if pages is not None else rematerialised(module, execution.remat, stacked, prevent_cse=True)
        return run(jax.tree.map(lambda a: a[depth], stacked), hidden, embedded, pages)

    def head_norm(self, depth: int, hidden: jax.Array, execution: Execution) -> jax.Array:
        """hidden [B, T, D] of module `depth` -> what the head takes."""
        if self.normed:
            return hidden
        graph, stacked = nnx.split(self.norm)
        return nnx.merge(graph, jax.tree.map(lambda a: a[depth], stacked))(hidden, execution)
