"""Any mlx-lm model as a target: tree positions, tree masks and auxiliary hidden states.

Three hooks make a model verify a tree, none of them specific to a family. Its caches are ours, so
positions, masks and storage are (see `block.py` and `cache.py`); its rope modules accept one
position per row; and the decoder layers that a drafter reads keep their outputs. Where Metal
kernels are used, attention and quantised layers ask for them first (see `hooks.py`). What is kept
of the passes of recurrent layers is in `recurrent.py`, how they follow a tree in `mixers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate, chain
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from dflash_mlx.core.errors import DFlashError
from dflash_mlx.core.prompt import Prompt
from dflash_mlx.system.blas import threads
from dflash_mlx.verifier.block import Block, Forest
from dflash_mlx.verifier.fusion import made_for
from dflash_mlx.verifier.hooks import (
    Hooks,
    KernelHooks,
    attending_itself,
    rotate_by_row,
    route,
    through,
)
from dflash_mlx.verifier.mixers import TREE_MIXERS, Products
from dflash_mlx.verifier.routing import Kernels
from dflash_mlx.verifier.sequence import Rows, SequenceCache, new_sequence
from kernels_metal.cascade_attention import CASCADE_ATTENTION
from kernels_metal.dispatch import Mode

_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embeddings")
_HEADS = ("lm_head", "embed_out")
SAME = 0.1  # standard deviations of logits that rounding can change; other rows change more
# They use the cache's offset for more than rope, as one number for the whole pass.
ONE_OFFSET = ("afm7", "gpt2", "gpt_bigcode", "llama4", "llama4_text", "ministral3", "mistral4")
_ONE_OFFSET_ROPES = ("DynamicNTKScalingRoPE",)
_ALL = slice(None)
ASKED = 8  # rows of the pass by which kernels are tried before there is anything to decode
CHAINS = "use --method dflash or --method ngram, which draft chains"


class Target:
    """A language model that can verify chains, and with most families prefix trees.

    model: an mlx-lm model. context_length: the most tokens a sequence may have. name: on screen.
    Raises DFlashError for layers that no draft can be taken back from.
    """

    sees = False  # whether prompts may have pictures, see `vision/`

    def __init__(self, model: Any, context_length: int, name: str) -> None:
        self.model = model
        self.context_length = context_length
        self.name = name
        self._tapped: set[int] = set()
        self._outputs: dict[int, mx.array] = {}
        ropes = (module.get("rope") for module in model.modules())
        self._ropes = [rope for rope in ropes if isinstance(rope, nn.Module)]
        self._turns_rows = False
        self._threads = threads()
        self.pass_times: Any = None  # measured when a budget needs them, see `pass_times.py`
        self.was_timed = False  # by this program
        self.drift: list[float] = []  # of real passes from these, see `pass_times.noticed`
        self.noise: Any = None  # measured when near-ties are decided again, see `exact.py`
        self.kv_bits: int | None = None  # of caches made from now on, see `cache.py`
        self.kernels = Kernels(name, self.parameters)
        route(model)
        self._attends_itself = attending_itself(model)
        self.is_recurrent = self.new_cache().is_recurrent
        self._mixers: frozenset[str] = frozenset()
        self._products: Products | None = None
        if self.is_recurrent:
            from dflash_mlx.verifier.recurrent import hook_mixers  # needs mlx-lm: it takes seconds

            self._mixers, self._products = hook_mixers(model, name, self.kernels)
        self._asked: slice | mx.array = _ALL  # the rows that the head multiplies
        self._drafters: list[nn.Module] = []  # see `add_drafter`
        self._kernel_hooks, self._hooks = KernelHooks(self.kernels), Hooks()
        self._hook()

    def _hook(self) -> None:
        for head, name in self._heads:
            self._hooks.replace(head, name, self._on_rows(getattr(type(head), name)))
        if self._products is not None:
            self._products.hook(self._hooks)
        for i in self._tapped:
            self._tap(i)

    def _tap(self, i: int) -> None:
        layer = self.model.layers[i]
        keep = partial(self._keep_output, i)
        kept = through(keep, type(layer).__call__)
        self._hooks.replace(layer, "__call__", kept, made_for(layer))

    def _on_rows(self, method: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def product(module: Any, x: mx.array) -> mx.array:
            return method(module, x if self._asked is _ALL else x[..., self._asked, :])

        return product

    @property
    def num_layers(self) -> int:
        return len(self.model.layers)

    @property
    def dtype(self) -> mx.Dtype:
        return self.embedding()(mx.array([0])).dtype  # type: ignore[no-any-return]

    def parameters(self) -> list[tuple[str, mx.array]]:
        return tree_flatten(self.model.parameters())  # type: ignore[return-value]

    def new_cache(self) -> SequenceCache:
        return new_sequence(self.model, self.name, self.kernels, self.kv_bits)

    def use_kernels(self, mode: Mode) -> None:
        """Switch this model's Metal kernels: auto, on or off, as it is at first.

        Caches that exist follow at once. What was measured with other kernels is forgotten. Raises
        ValueError for another mode.
        """
        self.kernels.switch(mode)
        self._hooks.remove()
        self._kernel_hooks.remove()
        self._kernel_hooks = KernelHooks(self.kernels)
        if mode != "off":
            self._kernel_hooks.add(self.model)
            for network in self._drafters if self.kernels.may_run else ():
                self._kernel_hooks.add_products(network)
            if family := self._attends_itself:
                reason = f"{family} computes the attention of some layers itself"
                self.kernels.note(f"{CASCADE_ATTENTION.name} in the target", reason)
        self._hook()
        self.pass_times = self.noise = None
        self.was_timed = False
        if self.kernels.trials is not None:  # what a pass asks of kernels is tried from now on
            Target.forward(self, mx.zeros(ASKED, mx.int32), Target.new_cache(self), Block(ASKED))

    def add_drafter(self, network: nn.Module) -> None:
        """Let the products of a draft network, or of a part of one, ask this model's kernels."""
        self._drafters.append(network)
        if self.kernels.may_run:
            self._kernel_hooks.add_products(network)

    def widen(self, dtype: mx.Dtype) -> None:
        """Cast what is float16, whose numbers do not fit."""
        self.model.set_dtype(dtype, lambda kind: kind == mx.float16)
        mx.eval(self.model.parameters())

    def tap(self, layers: tuple[int, ...]) -> None:
        """Keep the outputs of these decoder layers (0-based) in every pass from now on."""
        for i in set(layers) - self._tapped:
            self._tap(i)
        self._tapped.update(layers)

    def forward(
        self,
        tokens: mx.array,
        cache: SequenceCache,
        block: Block,
        aux_layers: tuple[int, ...] = (),
        embeddings: mx.array | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        """One pass over the rows of `block`, whose keys and values go behind the committed ones.

        tokens: [N]. embeddings: [N, d] in their place, where not all are text. Returns logits [N,
        V], [1, V] of a block's last row where that is all it asks for, and features [N,
        len(aux_layers) * d] (None without): the states after these layers, side by side. Nothing is
        evaluated here. DFlashError for a tree that no recurrent layer here can follow.
        """
        if block.tree is not None and self.is_recurrent and not self.takes_trees:
            self.check_trees()
        if not block.is_run:
            self._turn_rows()
        cache.begin(block)
        given = {} if embeddings is None else {"input_embeddings": embeddings[None]}
        last = slice(-1, None) if block.last_only else _ALL
        logits = self._logits(tokens, cache.layers, last, given)
        if block.last_only:
            logits = logits[-1:]
        if not aux_layers:
            return logits, None
        return logits, self._features(aux_layers)

    def embed(self, prompt: Prompt, first: int, last: int) -> mx.array | None:
        """The `embeddings` of a pass over these places of a prompt, None where all are text."""
        return prompt.embed(self.embedding(), first, last)

    def forward_all(
        self, sequences: Sequence[Rows], aux_layers: tuple[int, ...] = ()
    ) -> list[tuple[mx.array, mx.array | None]]:
        """As `forward` for each sequence, in one pass where the model can take them together."""
        only_text = all(rows.embeddings is None for rows in sequences)
        if len(sequences) == 1 or not self.joins or not only_text:
            return [self.forward(*rows[:3], aux_layers, *rows[3:]) for rows in sequences]
        return self._together(sequences, aux_layers)

    def _together(
        self, sequences: Sequence[Rows], aux_layers: tuple[int, ...]
    ) -> list[tuple[mx.array, mx.array | None]]:
        self._turn_rows()
        forest = Forest([(each.cache, each.block) for each in sequences])
        asked = [
            range(part.stop - 1 if rows.block.last_only else part.start, part.stop)
            for rows, part in zip(sequences, forest.parts, strict=True)
        ]
        rows = mx.array([*chain.from_iterable(asked)])
        tokens = mx.concatenate([each.tokens for each in sequences])
        some = rows if rows.size < tokens.size else _ALL
        logits = self._logits(tokens, forest.layers, some, {})
        if logits.shape[0] != rows.size:
            logits = logits[rows]
        ends = [*accumulate(map(len, asked))]
        of_each = mx.split(logits, ends[:-1])
        features: list[Any] = [None] * len(sequences)
        if aux_layers:
            features = forest.split(self._features(aux_layers), axis=0)
        return list(zip(of_each, features, strict=True))

    def _logits(
        self, tokens: mx.array, layers: Any, rows: slice | mx.array, given: dict[str, Any]
    ) -> mx.array:
        """Of these rows alone, where the head is a module of its own, else of all."""
        self._threads.tick()
        self._outputs.clear()
        self._asked = rows
        segments = self._kernel_hooks.segments
        segments.begin(layers)
        try:
            logits: mx.array = self.model(tokens[None], cache=layers, **given)[0]
            segments.settle()
        finally:
            self._asked = _ALL
            segments.end()
        return logits

    def _turn_rows(self) -> None:
        """Let ropes take a position for each row; passes over chains alone go without the hook."""
        if not self._turns_rows:
            for rope in self._ropes:
                rotate_by_row(rope)
            self._turns_rows = True

    def _features(self, aux_layers: tuple[int, ...]) -> mx.array:
        outputs = (self._outputs[i] for i in aux_layers)
        # gemma3n has several streams of states, the first of which goes on to the head.
        rows = [each[0] if each.ndim == 3 else each[0, 0] for each in outputs]
        return mx.concatenate(rows, axis=-1)

    @cached_property
    def joins(self) -> bool:
        """Whether a pass can be over rows of several sequences, which is tried once."""
        if not self.takes_trees or self._attends_itself:
            return False
        sequences = []
        for before, rows in ((5, 3), (2, 1)):
            cache = self.new_cache()
            self.forward(mx.arange(before), cache, Block(before))
            cache.commit(range(before))
            sequences.append(Rows(mx.arange(rows), cache, Block(rows)))
        alone = [self.forward(*rows[:3])[0] for rows in sequences]
        try:
            together = self._together(sequences, ())
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):  # asks for more
            return False
        pairs = zip(alone, together, strict=True)
        return all(bool(mx.all(mx.abs(a - b) <= SAME * mx.std(a))) for a, (b, _) in pairs)

    @cached_property
    def takes_trees(self) -> bool:
        try:
            self.check_trees()
        except DFlashError:
            return False
        return True

    def check_trees(self) -> None:
        """Raise DFlashError for a model whose rows cannot each follow a path of their own."""
        kind = type(self.model).__module__.rpartition(".")[2]
        ropes = {base.__name__ for m in self.model.modules() for base in type(m).__mro__}
        has_positions = bool(self._ropes) or self.is_recurrent
        if unknown := sorted(self._mixers - TREE_MIXERS):
            why = f"has recurrent layers ({', '.join(unknown)}) that were never tried on branches"
        elif not has_positions or kind in ONE_OFFSET or not ropes.isdisjoint(_ONE_OFFSET_ROPES):
            why = "computes with one position for all rows of a pass"
        else:
            return
        raise DFlashError(f"{self.name} ({kind}) {why}, so it cannot verify trees", CHAINS)

    def embedding(self) -> Any:
        return self._embedding

    @cached_property
    def _embedding(self) -> Any:
        for name, module in self._named:
            if name in _EMBEDDINGS:
                return module
        what = f"{self.name} has no module called {' or '.join(_EMBEDDINGS)}"
        raise DFlashError(what, "use --method none, or a model of another family")

    @property
    def _named(self) -> list[tuple[str, nn.Module]]:
        """All modules, by the last parts of their names."""
        return [(name.rpartition(".")[2], m) for name, m in self.model.named_modules()]

    def head(self) -> Callable[[mx.array], mx.array]:
        """The map from final hidden states [..., d] to logits [..., V], shared by the drafter."""
        module = self._head_module
        if module is not self.embedding():
            return module  # type: ignore[no-any-return]
        return lambda states: module.as_linear(states)  # as it is then: hooks come and go

    def head_of(self, ids: mx.array) -> nn.Module:
        """The head for the tokens `ids` [v] alone; DFlashError for one that is no matrix."""
        module = self._head_module
        part: nn.Module
        if isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            how: dict[str, Any] = {"bits": module.bits, "mode": module.mode}
            part = nn.QuantizedLinear(128, 1, bias=False, group_size=module.group_size, **how)
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            part = nn.Linear(1, 1, bias=False)
        else:
            problem = f"the head of {self.name} is a {type(module).__name__}, which has no rows"
            raise DFlashError(problem, "leave out --draft-vocabulary")
        names = ("weight", "scales", "biases", "bias")
        rows = {name: module[name][ids] for name in names if module.get(name) is not None}
        mx.eval(rows)  # here, since other threads may use them
        for name, array in rows.items():
            part[name] = array
        return part

    @cached_property
    def _head_module(self) -> Any:
        """The embedding where the two are tied."""
        found = [module for name, module in self._named if name in _HEADS]
        return found[0] if found else self.embedding()

    @cached_property
    def _heads(self) -> list[tuple[nn.Module, str]]:
        """What may give the model its logits, and by which method; others compute every row's."""
        methods = dict.fromkeys(_HEADS, "__call__") | dict.fromkeys(_EMBEDDINGS, "as_linear")
        found = ((module, methods.get(name, "")) for name, module in self._named)
        return [(module, method) for module, method in found if method and hasattr(module, method)]

    def _keep_output(
        self, i: int, layer: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        output = forward(layer, *args, **kwargs)
        self._outputs[i] = output[0] if isinstance(output, tuple) else output
        return output
