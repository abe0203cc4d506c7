"""A layer of the decoder: attention and feed-forward blocks, with their norms."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from realrl.families.registry import find_layer_options
from realrl.families.shape import Activation, Mixture, ModelShape
from realrl.families.tensors import Parameter
from realrl.layout.shard import Shard
from realrl.model.arithmetic.autograd import apply_function
from realrl.model.arithmetic.elementwise import activate, add_one, add_rms_norm, rms_norm
from realrl.model.arithmetic.grouped import Groups, gather_weighed, sum_copies
from realrl.model.attention import split_heads
from realrl.model.attention_rule import AttentionRule
from realrl.model.expert_parallel import Dispatch
from realrl.model.group import Group, gather_rows, reduce_scatter
from realrl.model.matrices import Matrices
from realrl.model.rotary import apply_rotary_emb
from realrl.model.routing import Routing
from realrl.model.tensor_parallel import TensorParallel


@dataclass(frozen=True, eq=False)
class ExpertBlock:
    """A layer's experts and their router. A tensor-parallel rank holds a part of the units of each expert; with
    expert parallelism, a rank holds some experts whole."""

    router: Tensor
    """Matrix of the router. [E, H]"""
    gate_up: Tensor
    """Gate and up matrices of the experts, stacked. [E * 2 * units, H]"""
    down: Tensor
    """Down matrices of the experts, stacked. [E * H, units]"""
    mixture: Mixture
    activation: Activation
    layer: int
    """Index of the layer in its pipeline stage."""
    group: Group
    """Ranks that divide the experts; a single rank without expert parallelism."""
    router_bias: Tensor | None = None
    """[E]"""
    correction: Tensor | None = None
    """Numbers whose sum over the second dim is added to scores to choose experts. [E, EXACT_PARTS]"""
    gate_up_bias: Tensor | None = None
    """Biases of gate and up of the experts. [E * 2 * units]"""
    down_bias: Tensor | None = None
    """Biases of the experts' outputs. [E * H]"""
    adds_down_bias: bool = True
    """Whether this rank adds `down_bias`. Ranks that cut experts sum their outputs, so only one of them may do
    it."""

    @property
    def divided(self) -> bool:
        """Whether ranks divide the experts, so that a token's outputs come from several ranks."""
        return self.group.size > 1

    def run(self, x: Tensor, matrices: Matrices, routing: Routing) -> Tensor:
        """Compute the weighted sum of each token's experts, over this rank's units. x: [T, H] -> [T, H]"""
        scores = self._score(matrices.multiply(x, self.router, self.router_bias))
        weights, experts = self._choose(scores, routing)
        return self._apply((x, weights), Groups.of(experts, self.mixture.experts), matrices)

    def dispatch(
        self, x: Tensor, matrices: Matrices, routing: Routing, tp: TensorParallel, *, overlaps: bool
    ) -> Dispatch:
        """Choose the experts of tokens, and prepare to send the tokens to the ranks of their experts. TP ranks
        divide the tokens.

        x: [T, H], or with sequence parallelism this rank's rows. `overlaps`: see `Dispatch`
        """
        own, first = tp.own, 0 if tp.divides_rows else tp.own.start
        mine = x[first : first + own.stop - own.start]
        if tp.divides_rows:
            scores = tp.gather_parts(self._score(matrices.multiply(mine, self.router, self.router_bias)))
        else:
            scores = self._score(matrices.multiply(x, self.router, self.router_bias))
        # Every TP rank chooses for all tokens, because records and balance losses need the choices of all tokens.
        weights, experts = self._choose(scores, routing)
        return Dispatch.of(
            mine, weights[own], experts[own], self.mixture.experts, self.group, overlaps=overlaps
        )

    def run_dispatched(self, dispatch: Dispatch, matrices: Matrices) -> None:
        """Compute this rank's experts for the tokens that have been sent, and start to send the outputs back."""
        dispatch.send_back(self._apply(dispatch, dispatch.arriving, matrices))

    def run_gathered(self, x: Tensor, matrices: Matrices, routing: Routing, tp: TensorParallel) -> Tensor:
        """Compute the weighted sum of each token's experts, which are on several ranks, for a few tokens without
        gradient. Each rank gathers the tokens of all ranks, which have equal numbers of them, and computes its own
        experts for them. So, unlike with `dispatch`, shapes do not depend on the choice of experts.

        x: [T, H] -> the sums of this rank's tokens [T, H]; all other rows are zero
        """
        weights, experts = self._choose(
            self._score(matrices.multiply(x, self.router, self.router_bias)), routing
        )
        rows = -(-len(x) // tp.group.size)
        padding = (0, 0, 0, rows * tp.group.size - len(x))
        first = tp.group.index * rows
        mine = [F.pad(values, padding)[first : first + rows] for values in (x, weights, experts.int())]
        tokens, weights, numbers = gather_rows(mine, self.group)
        count = self.mixture.experts // self.group.size
        numbers = numbers.long() - self.group.index * count
        # Copies for the experts of other ranks come last, and belong to no group.
        numbers = torch.where((numbers >= 0) & (numbers < count), numbers, count)
        groups = Groups.of(numbers, count, has_others=True)
        sums = self._apply((tokens, weights), groups, matrices)
        own = sums.new_empty(rows, sums.shape[1])
        reduce_scatter(own, sums, self.group)
        return F.pad(own, (0, 0, first, rows * tp.group.size - first - rows))[: len(x)]

    def _choose(self, scores: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """Choose experts of tokens, and weigh them. [T, E] -> weights and experts, [T, k] each"""
        mixture, preferences = self.mixture, self._prefer(scores.detach())
        scores, experts = routing.route(self.layer, scores, preferences, mixture.per_token)
        weights = scores.gather(1, experts)
        if mixture.normalised:
            weights = weights / weights.sum(1, keepdim=True)
        if mixture.scale != 1:
            weights = weights * mixture.scale
        if self.correction is not None:
            weights = apply_function(_AddZeroGradient, weights, self.correction)
        return weights, experts

    def _prefer(self, scores: Tensor) -> Tensor:
        """Compute the numbers by which experts are chosen, from their scores. [T, E] -> [T, E]"""
        mixture = self.mixture
        if self.correction is not None:
            scores = scores + self.correction.detach().float().sum(1)
        if mixture.groups == 1:
            return scores
        by_group = scores.view(len(scores), mixture.groups, -1)
        best = by_group.topk(2, dim=2).values.sum(2).topk(mixture.groups_per_token, dim=1).indices
        left_out = torch.ones(by_group.shape[:2], dtype=torch.bool, device=scores.device)
        left_out.scatter_(1, best, False)
        return by_group.masked_fill(left_out[:, :, None], -torch.inf).flatten(1)

    def _apply(self, tokens: tuple[Tensor, Tensor] | Dispatch, groups: Groups, matrices: Matrices) -> Tensor:
        """Compute the weighted sum of each token's experts. `groups` has the rows of this rank's experts. `tokens`
        are [T, H] with weights [T, k], or come from other ranks. -> [T, H]"""
        # `del` frees rows as soon as possible, because there are several for each token.
        mixture = self.mixture
        x, weights = tokens.receive() if isinstance(tokens, Dispatch) else tokens
        del tokens
        weights = weights.flatten().index_select(0, groups.order)
        if mixture.weighed == "inputs":
            rows = gather_weighed(x, weights, groups)
            gate_up = matrices.multiply_groups(rows, self.gate_up, groups)
            del rows
        else:
            gate_up = matrices.multiply_groups(x, self.gate_up, groups, of_tokens=True)
        del x
        if self.gate_up_bias is not None:
            gate_up = matrices.add_biases(gate_up, self.gate_up_bias, torch.ones_like(weights), groups)
        inner = activate(gate_up, self.activation, gated=True)
        del gate_up
        if mixture.weighed == "outputs":
            # Rows are weighted before the last product, because its output has more columns than most experts have
            # units.
            inner = inner * weights.to(inner.dtype)[:, None]
        rows = matrices.multiply_groups(inner, self.down, groups)
        del inner
        if self.down_bias is not None:
            if not self.adds_down_bias:
                # A rank that adds nothing computes a gradient too, because hooks wait for it.
                weights = torch.zeros_like(weights)
            elif mixture.weighed == "inputs":
                weights = torch.ones_like(weights)
            rows = matrices.add_biases(rows, self.down_bias, weights, groups)
        if groups.has_others:
            rows = groups.clear_others(rows)
        return sum_copies(rows, groups)

    def _score(self, logits: Tensor) -> Tensor:
        """Score the experts of tokens. [T, E] -> [T, E] float32"""
        if self.mixture.scores == "softmax":
            return logits.float().softmax(1)
        # torch vectorises most of a row and computes the remaining elements one by one. The two methods differ in
        # the last bits of float64. Rounding to float32 hides the difference, so the scores of a row do not depend
        # on its place.
        return logits.double().sigmoid().float()


class _AddZeroGradient(Function):
    """Identity that gives a parameter a gradient of 0, because hooks wait for the gradients of all parameters."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, parameter: Tensor) -> Tensor:
        ctx.shape = parameter.shape
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        return grad, grad.new_zeros(ctx.shape) if ctx.needs_input_grad[1] else None


RotaryTables = tuple[Tensor, Tensor] | None
"""Cosines and sines of a layer's rotation, [T, D / 2] each; None if the layer's heads are not rotated."""


class Norm:
    """Norm of a model's layers: RMSNorm or LayerNorm."""

    def __init__(self, shape: ModelShape) -> None:
        options = find_layer_options(shape)
        self._is_rms, self._offset = options.norm == "rms", options.norm_offset
        self._eps = shape.norm_eps

    def normalize(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Normalize rows. x: [..., H], weight: [H], bias: [H] if the family has one -> [..., H]"""
        if self._is_rms:
            return rms_norm(x, add_one(weight) if self._offset else weight, self._eps)
        return F.layer_norm(x, weight.shape, weight, bias, self._eps)

    def normalize_plainly(self, x: Tensor, ones: Tensor) -> Tensor:
        """Divide rows by their root mean square, without the family's weight. x: [..., H], ones: [H]"""
        return rms_norm(x, ones, self._eps)

    def add(self, x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add to the residual stream, and normalize the sum. x, delta: [N, H] -> sum and norm, [N, H] each"""
        if self._is_rms:
            return add_rms_norm(x, delta, add_one(weight) if self._offset else weight, self._eps)
        total = x + delta
        return total, self.normalize(total, weight, bias)

    def normalize_together(
        self, heads: Tensor, weight: Tensor, shares: Tensor, total: int, group: Group
    ) -> Tensor:
        """Normalize all heads of a token as one row, across the tensor-parallel ranks.

        heads: [T, n, D], this rank's heads; weight: [n * D]; shares: [n], 1 / the number of ranks that hold a head;
        total: elements of a row over all ranks -> [T, n * D]
        """
        weight = add_one(weight) if self._offset else weight
        return apply_function(_NormalizeTogether, heads, weight, shares, total, self._eps, group)


class _NormalizeTogether(Function):
    """RMS norm of rows whose heads are divided among ranks; several ranks may hold the same head."""

    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, weight: Tensor, shares: Tensor, total: int, eps: float, group: Group
    ) -> Tensor:
        wide = heads.float()
        squares = (wide.square().sum(2) * shares).sum(1, keepdim=True)
        scale = torch.rsqrt(group.sum(squares) / total + eps)
        ctx.save_for_backward(heads, weight, shares, scale)
        ctx.total, ctx.group = total, group
        return (wide.flatten(1) * scale * weight.float()).to(heads.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        heads, weight, shares, scale = ctx.saved_tensors
        unit = heads.float().flatten(1) * scale
        upstream = grad.float() * weight.float()
        # Ranks that hold the same head each have a part of its gradient. Together they must subtract its mean
        # once, so each subtracts its share.
        mean = ctx.group.sum((upstream * unit).sum(1, keepdim=True)) / ctx.total
        each = shares.repeat_interleave(heads.shape[2])
        grad_heads = ((upstream - unit * mean * each) * scale).to(heads.dtype).view(heads.shape)
        return grad_heads, (grad.float() * unit).sum(0), None, None, None, None


class Layer(nn.Module):
    """Attention and feed-forward blocks, each added to the residual stream, with norms before or after them."""

    def __init__(
        self,
        shard: Shard,
        number: int,
        parameter: Callable[[Parameter], nn.Parameter | None],
        expert_group: Group,
    ) -> None:
        """`number` is the index of the layer in the whole model. `parameter` returns None for parameters that the
        family lacks. Ranks of `expert_group` divide the experts."""
        super().__init__()

        def require(name: Parameter) -> nn.Parameter:
            tensor = parameter(name)
            assert tensor is not None, f"every layer has {name}"
            return tensor

        options = find_layer_options(shard.shape)
        self._heads = len(shard.queries)
        self._kv_heads = len(shard.keys)
        self._window = shard.shape.window if number in shard.shape.windowed_layers else None
        self._cap = options.attention_cap
        self._norm = Norm(shard.shape)
        self._activation, self._gated = options.activation, options.gated
        self._parallel, self._residual_scale = options.parallel_blocks, options.residual_scale
        self._norms_all = options.qk_norm == "all"
        self._widths = shard.shape.heads * shard.shape.head_dim, shard.shape.kv_heads * shard.shape.head_dim
        self.attention_norm = parameter("attention_norm")
        self.attention_norm_bias = parameter("attention_norm_bias")
        self.qkv = require("qkv")
        self.qkv_bias = parameter("qkv_bias")
        self.q_norm = parameter("q_norm")
        self.k_norm = parameter("k_norm")
        self.sinks = parameter("sinks")
        self._ones: Tensor | None = None
        """Ones, which serve as the weight of the norm of rotated heads. This norm has no parameter."""
        if options.qk_norm == "rotated" and number not in shard.shape.unrotated_layers:
            self._ones = torch.ones(shard.shape.head_dim, device=self.qkv.device)
        if self._norms_all:
            device = self.qkv.device
            self._query_shares = torch.ones(self._heads, device=device)
            self._key_shares = torch.tensor([1 / count for count in shard.key_holders], device=device)
        self.out = require("out")
        self.out_bias = parameter("out_bias")
        self.attention_post_norm = parameter("attention_post_norm")
        self.attention_post_norm_bias = parameter("attention_post_norm_bias")
        self.mlp_norm = parameter("mlp_norm")
        self.mlp_norm_bias = parameter("mlp_norm_bias")
        mixture = shard.shape.mixture_of(number)
        feed_forward = require if mixture is None or mixture.shared else parameter
        self.gate_up = feed_forward("gate_up")
        self.gate_up_bias = parameter("gate_up_bias")
        self.down = feed_forward("down")
        self.down_bias = parameter("down_bias")
        self._experts: ExpertBlock | None = None
        if mixture is not None:
            self.router = require("router")
            self.router_bias = parameter("router_bias")
            self.router_correction = parameter("router_correction")
            self.experts_gate_up, self.experts_down = require("experts_gate_up"), require("experts_down")
            self.experts_gate_up_bias = parameter("experts_gate_up_bias")
            self.experts_down_bias = parameter("experts_down_bias")
            self._experts = ExpertBlock(
                self.router,
                self.experts_gate_up,
                self.experts_down,
                mixture,
                self._activation,
                shard.layers.index(number),
                expert_group,
                router_bias=self.router_bias,
                correction=self.router_correction,
                gate_up_bias=self.experts_gate_up_bias,
                down_bias=self.experts_down_bias,
                adds_down_bias=shard.tp_index == 0 or shard.ep > 1,
            )
        self.mlp_post_norm = parameter("mlp_post_norm")
        self.mlp_post_norm_bias = parameter("mlp_post_norm_bias")

    @property
    def rule(self) -> AttentionRule:
        return AttentionRule(self._window, self._cap, self.sinks)

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """Weight matrices that multiply every token. The matrices of experts are not among them."""
        own = self.qkv, self.out, self.gate_up, self.down
        return tuple(weight for weight in own if weight is not None)

    @property
    def stacks(self) -> tuple[Tensor, ...]:
        """Weights of experts. Each tensor stacks one matrix per expert along the rows."""
        return () if self._experts is None else (self._experts.gate_up, self._experts.down)

    def forward(
        self,
        x: Tensor,
        tables: RotaryTables,
        attend: Callable[[Tensor, AttentionRule], Tensor],
        tp: TensorParallel,
        matrices: Matrices,
        routing: Routing,
    ) -> Tensor:
        """Apply the layer. x: [T, H] -> [T, H]; with sequence parallelism, each rank has some of the rows."""
        # `del` frees each intermediate result as soon as the next one is computed.
        block = self._attend(x, tables, attend, tp, matrices)
        if self._parallel:
            normed, x = self._enter(x, self.mlp_norm, self.mlp_norm_bias), x + block
        elif self.mlp_norm is not None:
            x, normed = self._norm.add(x, block, self.mlp_norm, self.mlp_norm_bias)
        else:
            normed = x = x + block
        del block
        experts, has_block = self._experts, self.gate_up is not None
        routed, dispatch = None, None
        if experts is not None and experts.divided and tp.divides_rows:
            dispatch = experts.dispatch(normed, matrices, routing, tp, overlaps=has_block)
        if dispatch is None or has_block:
            # Rows are gathered before tokens are sent. If both groups are the same ranks, they have one
            # communicator, in which messages queue.
            normed = tp.copy_to_region(normed)
        if experts is not None and dispatch is None:
            if not experts.divided:
                routed = experts.run(normed, matrices, routing)
            elif matrices.gathers_tokens:
                routed = experts.run_gathered(normed, matrices, routing, tp)
            else:
                dispatch = experts.dispatch(normed, matrices, routing, tp, overlaps=has_block)
        if dispatch is not None:
            dispatch.send()
        # If a layer has experts and a block for all tokens, each half of the block hides an exchange.
        if self.gate_up is not None:
            gate_up = matrices.multiply(normed, self.gate_up, self.gate_up_bias)
            del normed
            inner = activate(gate_up, self._activation, gated=self._gated)
            del gate_up
        else:
            del normed
        if experts is not None and dispatch is not None:
            experts.run_dispatched(dispatch, matrices)
        if self.down is not None:
            block = matrices.multiply(inner, self.down, None)
            del inner
        if dispatch is not None:
            routed = tp.place_own(dispatch.receive_back())
        # With sequence parallelism, outputs of `dispatch` are complete. Each rank has those of its own rows.
        complete = dispatch is not None and tp.divides_rows
        if routed is None:
            block = tp.reduce_from_region(block)
        elif not has_block:
            block = routed if complete else tp.reduce_from_region(routed)
        elif complete:
            block = tp.reduce_from_region(block) + routed
        else:
            block = tp.reduce_from_region(block + routed)
        del routed
        return x + self._finish(block, self.down_bias, self.mlp_post_norm, self.mlp_post_norm_bias)

    def _attend(
        self,
        x: Tensor,
        tables: RotaryTables,
        attend: Callable[[Tensor, AttentionRule], Tensor],
        tp: TensorParallel,
        matrices: Matrices,
    ) -> Tensor:
        """Apply the attention block, without its sum with the residual stream."""
        attended = attend(self.compute_qkv(x, tables, tp, matrices), self.rule)
        block = tp.reduce_from_region(matrices.multiply(attended, self.out, None))
        del attended
        return self._finish(block, self.out_bias, self.attention_post_norm, self.attention_post_norm_bias)

    def compute_qkv(self, x: Tensor, tables: RotaryTables, tp: TensorParallel, matrices: Matrices) -> Tensor:
        """Compute queries, keys and values; normalize heads if the family does, and rotate queries and keys.

        -> [T, (heads + 2 kv_heads) * D]
        """
        normed = self._enter(x, self.attention_norm, self.attention_norm_bias)
        qkv = matrices.multiply(tp.copy_to_region(normed), self.qkv, self.qkv_bias)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = split_heads(qkv, self._heads, self._kv_heads)
            if self._norms_all:
                together = self._norm.normalize_together
                q = together(q, self.q_norm, self._query_shares, self._widths[0], tp.group)
                k = together(k, self.k_norm, self._key_shares, self._widths[1], tp.group)
                qkv = torch.cat((q, k, v.flatten(1)), 1)
            else:
                q = self._norm.normalize(q, self.q_norm)
                k = self._norm.normalize(k, self.k_norm)
                qkv = torch.cat((q, k, v), 1).view(len(qkv), -1)
        if tables is None:
            return qkv
        rotated = self._heads + self._kv_heads
        qkv = apply_rotary_emb(qkv, *tables, rotated)
        if self._ones is None:
            return qkv
        heads = qkv.view(len(qkv), -1, len(self._ones))
        normed = self._norm.normalize_plainly(heads[:, :rotated], self._ones)
        return torch.cat((normed, heads[:, rotated:]), 1).view(len(qkv), -1)

    def _enter(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Normalize the input of a block, if the family does."""
        return x if weight is None else self._norm.normalize(x, weight, bias)

    def _finish(
        self, block: Tensor, bias: Tensor | None, norm: Tensor | None, norm_bias: Tensor | None
    ) -> Tensor:
        """Add the bias to a block's output, then normalize and scale it. TP ranks have already summed the output.

        If the bias were added before this sum, every rank would add it.
        """
        if bias is not None:
            block = block + bias
        if norm is not None:
            block = self._norm.normalize(block, norm, norm_bias)
        return block if self._residual_scale == 1 else block * self._residual_scale
