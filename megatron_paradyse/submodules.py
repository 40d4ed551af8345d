"""Megatron's transformer layer and MLP, each able to run the strategy of a plan.

The parameters are Megatron's own. Where the plan says megatron_ts, Megatron's own forward runs;
elsewhere a strategy reaches the same parameters.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import SimpleNamespace

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.autograd import Function

from megatron_paradyse.microbatch_params import PlannedMicrobatch
from megatron_paradyse.parameters import (
    add_from_the_start,
    announce_use,
    bias_of,
    normalised,
    of_strategy,
)
from megatron_paradyse.plan import MEGATRON_TS
from megatron_paradyse.shapes import mlp_shape, only_megatrons_mlp
from megatron_paradyse.strategies import base_name, get_strategy, offloads, recomputes
from megatron_paradyse.strategies.contract import MlpWeights
from megatron_paradyse.strategies.host import kept_on_host
from megatron_paradyse.strategies.second_run import (
    has_values,
    is_second_run,
    second_run,
    with_values_of,
    without_values,
)
from megatron_paradyse.strategies.tiled_mlp import goes_in_tiles, mlp_in_tiles

HALVES = ("attention", "mlp")


class SwitchableLayer(TransformerLayer):
    """A transformer layer whose attention and MLP run what the microbatch's plan names.

    A choice with +recompute keeps only the input of its half of the layer, the norm included; both
    halves with +recompute keep only the input of the layer. With +offload that input waits in host
    memory; that of a layer does if its attention's choice says so. Whatever runs again in the
    backward takes its plan from its own microbatch, so later plans do not matter.
    """

    recompute_mlp: bool
    megatron_recomputes = False  # the whole layer, by --recompute-granularity full

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._always_recomputes_mlp = self.recompute_mlp  # Megatron's --recompute-modules mlp:
        self.recompute_mlp = False  # it would run the MLP again without its plan
        add_from_the_start(self)

    @property
    def plan_number(self) -> int:
        """In plans: layer_number, unless prediction.py says otherwise."""
        return self.self_attention.plan_number

    def forward(self, *args, **kwargs):
        planned = kwargs.get("packed_seq_params")
        if not isinstance(planned, PlannedMicrobatch):
            self._switch_mlp(MEGATRON_TS)
            return super().forward(*args, **kwargs)
        assert not args, "Megatron's blocks call their layers by keyword"
        hidden = kwargs.pop("hidden_states")
        if all(self._recomputes(planned, half) for half in HALVES):
            hidden = self._recomputed(
                lambda x: self._mlp_half(kwargs, self._attention_half(kwargs, x)),
                hidden,
                offload=self._offloads(planned, "attention"),
            )
        else:
            for half in HALVES:
                hidden = self.run_half(half, hidden, kwargs)
        return hidden, kwargs.get("context")

    def run_half(self, half: str, hidden, kwargs):
        """hidden [s/p, b, h] through "attention" or "mlp", its norm and residual included.

        kwargs are those of forward, less hidden_states.
        """
        run = functools.partial(getattr(self, f"_{half}_half"), kwargs)
        planned = kwargs["packed_seq_params"]
        if not self._recomputes(planned, half):
            return run(hidden)
        return self._recomputed(run, hidden, offload=self._offloads(planned, half))

    def _recomputed(self, run, hidden, *, offload: bool):
        """run(hidden), keeping only hidden; Megatron's checkpoint restores the random states.

        offload: hidden waits in host memory, and nothing is kept on the device.
        """
        if not hidden.requires_grad and self._may_learn():
            hidden = hidden.detach().requires_grad_()  # else the checkpoint's output has no graph
        run = _RunAgain(run)
        with kept_on_host(hidden) if offload else contextlib.nullcontext():
            output = tensor_parallel.checkpoint(run, False, hidden)
        run.again = True
        return output

    def _may_learn(self) -> bool:
        """Whether some parameter, a hook's too, may need a gradient."""
        return any(x.requires_grad for x in self.parameters()) or any(
            map(_is_hooked, self.modules())
        )

    def _recomputes(self, planned: PlannedMicrobatch, half: str) -> bool:
        if not torch.is_grad_enabled() or self.megatron_recomputes:
            return False  # Megatron runs the whole layer again anyway
        if half == "mlp" and self._always_recomputes_mlp:
            return True
        return recomputes(getattr(planned.plan[self.plan_number], half))

    def _offloads(self, planned: PlannedMicrobatch, half: str) -> bool:
        """Whether the input of a half that recomputes, or of the layer, waits in host memory."""
        return offloads(getattr(planned.plan[self.plan_number], half))

    def _attention_half(self, kwargs, hidden):
        return self._forward_attention(hidden, **kwargs)[0]

    def _mlp_half(self, kwargs, hidden):
        planned = kwargs["packed_seq_params"]
        name = planned.plan[self.plan_number].mlp
        in_tiles = self._always_recomputes_mlp or recomputes(name) or not self.training
        self._switch_mlp(name, in_tiles=in_tiles)
        let_go = _notes_let_go(self.mlp)
        if getattr(self.mlp, "moe_layer_recompute", False) and hidden.requires_grad:
            hidden.register_hook(let_go)  # Megatron runs the experts again in the backward
        output = self._forward_mlp(
            hidden,
            kwargs.get("inference_context"),
            padding_mask=kwargs.get("padding_mask"),
            packed_seq_params=planned,
        )
        let_go()
        return output

    def _forward_post_mlp(self, mlp_output_with_bias, residual):
        """Dropout, then the residual, on what is laid out alike in both runs.

        PyTorch deals a GPU's random numbers to elements by their layout, and a second run must drop
        what the first one dropped. The MLP's values are not read in it: the residual's will do.
        """
        output, bias = mlp_output_with_bias
        drops = self.training and self.hidden_dropout > 0.0
        if drops and is_second_run() and not has_values(output) and output.dtype == residual.dtype:
            output = with_values_of(output, residual)
        return super()._forward_post_mlp((output, bias), residual)

    def _switch_mlp(self, name: str, *, in_tiles: bool = False) -> None:
        if isinstance(self.mlp, SwitchableMLP):
            self.mlp.strategy, self.mlp.in_tiles = base_name(name), in_tiles


def _notes_let_go(mlp: torch.nn.Module) -> Callable[..., None]:
    """Lets go, when called, of the tensors that the dispatcher of experts has noted since now.

    They would stay until the layer's next forward, and with the probabilities their graph: in it,
    once the layer has run again, its input and the gradient of that.
    """
    notes = vars(getattr(mlp, "token_dispatcher", None) or SimpleNamespace())
    before = dict(notes)

    def let_go(*_) -> None:
        for name, value in list(notes.items()):
            if isinstance(value, Tensor) and value is not before.get(name):
                notes[name] = before.get(name)

    return let_go


class _RunAgain:
    """A function of one tensor to one whose output has no values when it runs again.

    The checkpoint holds what its second run returns until the backward through it has ended, and
    asks it for nothing but its graph, shape and dtype. The MLP is the last to run, and what follows
    it, dropout and the residual, needs no values in its backward: so the MLP need not make any.
    """

    def __init__(self, function):
        self.function, self.again = function, False

    def __call__(self, x: Tensor) -> Tensor:
        if not self.again:
            return self.function(x)
        with second_run():
            return _WithoutValues.apply(self.function(x))


class _WithoutValues(Function):
    """Of the shape and dtype of x, in no memory; its gradient is that of x."""

    @staticmethod
    def forward(ctx, x):
        return without_values(x, x.shape)

    @staticmethod
    def backward(ctx, grad):
        return grad


class SwitchableMLP(MLP):
    """An MLP that runs the strategy that its layer was given for this microbatch.

    in_tiles: in tiles of the sequence, if that is long enough: what runs again in the backward
    goes so, and an evaluation. Not where a strategy cannot compute its activation, or its linears
    gather their weights themselves.
    """

    strategy = MEGATRON_TS
    in_tiles = False

    def forward(self, hidden_states, per_token_scale=None, **kwargs):
        whole = only_megatrons_mlp(self.config) or self.config.gtp_weight_remat_size > 1
        tiled = self.in_tiles and not whole and goes_in_tiles(hidden_states)
        if self.strategy == MEGATRON_TS and not tiled:
            return super().forward(hidden_states, per_token_scale, **kwargs)
        announce_use(self.linear_fc1, self.linear_fc2)
        weights = MlpWeights(
            fc1=of_strategy(self.linear_fc1.weight, self.config),
            fc2=of_strategy(self.linear_fc2.weight, self.config),
            fc1_bias=bias_of(self.linear_fc1),
        )
        strategy = get_strategy(self.strategy)
        with second_run(read=True) if _is_hooked(self) else contextlib.nullcontext():
            out = (mlp_in_tiles(strategy) if tiled else strategy.mlp)(
                normalised(hidden_states, self.linear_fc1, self.config),
                weights,
                mlp_shape(self.config),
                self.tp_group,
            )
        return out, bias_of(self.linear_fc2)


def _is_hooked(module: torch.nn.Module) -> bool:
    """Whether something of another's reads what the module's own forward returns."""
    of_all = torch.nn.modules.module._global_forward_hooks
    return bool(module._forward_hooks or of_all or "forward" in vars(module))
