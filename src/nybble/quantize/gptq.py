"""GPTQ: round one input channel at a time and let the channels not yet rounded absorb the error (arXiv 2210.17323).

Pure functions of a weight and its input's second moment; nothing here runs a model. The one idea: what matters is not the
weight's error E but the output's, tr(E H E^T) with H the mean of x x^T over the calibration inputs.

Beyond the paper: groups are static (scales chosen from the original weight before any error is fed back), so that
activation order never scatters a group; damping grows by itself until H factors; and after the greedy pass `refine`
sweeps the channels again, each code set to its optimum given all others (QuantEase, arXiv 2309.01885), with the scales
refitted in closed form in between.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nybble.formats.numerics import FLOAT8, reciprocal
from nybble.formats.qtensor import QTensor, cut, dequantize, expand
from nybble.formats.spec import Num, Spec
from nybble.quantize.rtn import absmax_scale, check_spec, mse_scale, settle, with_scale

LARGEST_DAMPING = 1.0
ROWS = 4096  # of a weight that are widened to fp64 at a time


def outer(a: Tensor, b: Tensor) -> Tensor:
    """a^T b, fp32 [M, K] each -> fp32 [K, K]. On a GPU the factors enter as TF32: exact for 16-bit inputs and int8 codes, else
    within 2^-11, far below the damping, at eight times the speed; sums are fp32."""
    if not a.is_cuda:
        return a.t() @ b
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return a.t() @ b
    finally:
        torch.set_float32_matmul_precision(before)


def output_error(weight: Tensor, q: QTensor, moment: Tensor) -> float:
    """Relative squared error of the layer's output: tr(E H E^T) / tr(W H W^T), E = dequantize(q) - W."""
    wrong = total = torch.zeros((), dtype=torch.float64, device=weight.device)
    for start in range(0, weight.shape[0], ROWS):
        wide = weight[start : start + ROWS].to(moment.dtype)
        error = dequantize(cut(q, 0, start, min(start + ROWS, weight.shape[0])), torch.float64).to(moment.dtype) - wide
        wrong, total = wrong + ((error @ moment) * error).sum(), total + ((wide @ moment) * wide).sum()
    return float(wrong / total.clamp_min(1e-30))


def damped(moment: Tensor, damping: float, name: str) -> tuple[Tensor, Tensor]:
    """(H + damping, the lower Cholesky factor of it with both axes reversed), both fp64 [K, K].

    A dead input channel gets the others' mean on its diagonal: it is then rounded to nearest and shares no error.
    Raises ValueError naming the layer when H is not finite or does not factor at any damping up to 1.
    """
    if not torch.isfinite(moment).all():
        raise ValueError(f"{name}: its calibration inputs hold NaN or infinity (an overflow in a layer before it, or a damaged "
                         "checkpoint)")
    h = moment.double().clone()
    diagonal = h.diagonal()
    mean = float(diagonal.sum() / (diagonal > 0).sum().clamp_min(1)) or 1.0
    diagonal[diagonal <= 0] = mean
    while damping <= LARGEST_DAMPING:
        trial = h.clone()
        trial.diagonal().add_(damping * mean)
        factor, info = torch.linalg.cholesky_ex(trial.flip(0, 1))
        if not int(info):
            return trial, factor
        damping = max(damping, 1e-4) * 10
    raise ValueError(f"{name}: its Hessian does not factor even at damping {LARGEST_DAMPING}: use more calibration text")


def follow(weight: Tensor, moment: Tensor, cross: Tensor, damping: float, name: str) -> Tensor:
    """The weight that makes up for what the quantized layers before it did to its inputs (QEP, arXiv 2504.09629).

    weight [N, K]; moment [K, K] of the inputs x as they arrive; cross [K, K], the mean of (c - x) x^T with c the inputs as
    they should be. -> W + W cross (H + damping)^-1, the damped least-squares solution of W c = W' x, fp32.
    """
    reversed_factor = damped(moment, damping, name)[1]
    turn = torch.cholesky_solve(cross.double().t().flip(0), reversed_factor).flip(0).t()
    turn.diagonal().add_(1.0)
    return torch.cat([(rows.double() @ turn).float() for rows in weight.split(ROWS)])


def quantize_gptq(weight: Tensor, moment: Tensor, spec: Spec, scale_dtype: torch.dtype = torch.float16,
                  name: str = "this layer", *, damping: float = 0.01, act_order: bool = True, mse: bool = True, sweeps: int = 0,
                  block: int = 128) -> QTensor:
    """float [N, K] weight, [K, K] mean of x x^T -> QTensor of `spec` (symmetric, per channel or contiguous groups).

    damping: share of the mean diagonal added to H, grown tenfold as long as H does not factor. act_order: heaviest input
    channels first. mse: search the scales, weighted by H's diagonal, instead of absmax / qmax. sweeps: refinement passes after
    the greedy one. block: channels whose error is fed back to the rest in one product.

    Runs on the weight's device. Rows are independent: linears that share an input may be stacked. Raises ValueError (with
    `name`) for values that are not finite, a Hessian that does not factor, and specs that do not fit.
    """
    check_spec(spec)
    if not torch.isfinite(weight).all():
        raise ValueError(f"{name}: the weight holds NaN or infinity")
    wide = weight.float()
    k = wide.shape[1]
    order = torch.arange(k, device=wide.device)
    if act_order:
        order = moment.diagonal().argsort(descending=True, stable=True)
    h, factor = damped(moment[order][:, order], damping, name)
    # H^-1 = U^T U with U = R^-1 upper, where H = R R^T and R is the reversed H's Cholesky factor reversed back.
    identity = torch.eye(k, dtype=h.dtype, device=h.device)
    upper = torch.linalg.solve_triangular(factor.flip(0, 1), identity, upper=True).float()
    diagonal = moment.diagonal().float()
    plain = replace(spec, over=None)
    scale = mse_scale(wide, plain, scale_dtype, diagonal) if mse else absmax_scale(wide, plain, scale_dtype)
    scale = settle(scale, spec, scale_dtype)
    turned = wide[:, order].t().contiguous()
    codes, h = torch.empty_like(turned), h.float().contiguous()
    _descend(turned.clone(), codes, _per_channel(scale, wide.shape, order), upper.contiguous(), spec, block, False)
    for _ in range(sweeps):
        scale = refit_scale(turned.t(), codes.t(), scale, spec, order, h, scale_dtype)
        wanted = _per_channel(scale, wide.shape, order)
        _descend(h @ (turned - codes * wanted), codes, wanted, h, spec, block, True)
    back = torch.empty_like(order)
    back[order] = torch.arange(k, device=order.device)
    return with_scale(spec, codes.t()[:, back].to(FLOAT8.get(spec.num.name, torch.int8)).contiguous(), scale, scale_dtype)


def _per_channel(scale: Tensor, shape: tuple[int, int], order: Tensor) -> Tensor:
    """Scales [N, G] -> one per weight, transposed and in rounding order: [K, N]."""
    return expand(scale, shape)[:, order].t().contiguous()


def one_block(state: Tensor, codes: Tensor, scale: Tensor, matrix: Tensor, start: int, stop: int, num: Num,
              sweep: bool) -> Tensor:
    """Round channels [start, stop), each seeing what the ones before it in the block did. All [K, N] fp32: channels are rows.

    Greedy: state is the weight with the errors so far fed back, matrix the upper factor of H^-1. Sweep: state is how the loss
    pulls each quantized value up, matrix is H, and `codes` are moved to their optimum given the rest. Writes `codes`; of
    `state` the block's rows are consumed. -> [stop - start, N]: what the channels after the block still have to be told.
    """
    if state.is_cuda:
        from nybble.quantize.gptq_triton import one_block as compiled

        return compiled(state, codes, scale, matrix, start, stop, num, sweep)
    moved = torch.empty_like(state[start:stop])
    inverse = reciprocal(scale[start:stop])
    for j in range(start, stop):
        out, old = moved[j - start], codes[j].clone() if sweep else None
        if old is None:
            torch.mul(state[j], inverse[j - start], out=codes[j])
        else:
            torch.addcmul(old, state[j], inverse[j - start], value=1.0 / float(matrix[j, j]), out=codes[j])
        codes[j].clamp_(num.qmin, num.qmax)
        codes[j] = codes[j].round_() if num.kind == "int" else codes[j].to(FLOAT8[num.name])
        if old is None:
            torch.addcmul(state[j], codes[j], scale[j], value=-1.0, out=out)
            out.div_(matrix[j, j])
        else:
            torch.sub(codes[j], old, out=out).mul_(scale[j])
        state[j + 1 : stop].addr_(matrix[j, j + 1 : stop], out, alpha=-1.0)
    return moved


def _descend(state: Tensor, codes: Tensor, scale: Tensor, matrix: Tensor, spec: Spec, block: int, sweep: bool) -> None:
    """One pass of `one_block` over all channels; `state` is consumed, `codes` are written."""
    k = state.shape[0]
    for start in range(0, k, block):
        stop = min(start + block, k)
        moved = one_block(state, codes, scale, matrix, start, stop, spec.num, sweep)
        state[stop:].addmm_(matrix[start:stop, stop:].t(), moved, alpha=-1.0)


def refit_scale(weight: Tensor, codes: Tensor, scale: Tensor, spec: Spec, order: Tensor, h: Tensor,
                scale_dtype: torch.dtype) -> Tensor:
    """The scales that minimize tr(E H E^T) for given codes: a least-squares problem of one unknown per group and row.

    weight, codes [N, K] in rounding `order`, h [K, K] likewise; scale [N, G] -> [N, G]. Rows whose solution is not positive
    or not finite (too few codes in a group) keep the scale they had.
    """
    groups = scale.shape[1]
    if groups == 1:
        projected = codes @ h
        fitted = ((projected * weight).sum(1) / (projected * codes).sum(1).clamp_min(1e-30))[:, None]
    else:
        width = weight.shape[1] // groups
        member = torch.nn.functional.one_hot(order // width, groups).to(h.dtype)  # [K, G]
        target = torch.einsum("nk,kg->ng", codes * (weight @ h), member)
        normal = torch.empty(weight.shape[0], groups, groups, dtype=h.dtype, device=h.device)
        for g in range(groups):
            mine = (order // width) == g
            normal[:, g] = (codes * (codes[:, mine] @ h[mine])) @ member
        ridge = normal.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-30) * 1e-5
        normal = normal + ridge[:, None, None] * torch.eye(groups, dtype=h.dtype, device=h.device)
        fitted = torch.linalg.solve_ex(normal, target)[0]
    usable = torch.isfinite(fitted) & (fitted > 0.5 * scale) & (fitted < 2.0 * scale)
    return torch.where(usable.all(1, keepdim=True), settle(fitted, spec, scale_dtype), scale)

