"""Megatron's f, g and their sequence-parallel forms, as autograd Functions over `torch.distributed`."""

import torch
import torch.distributed as dist


def _summed(x, group):
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def _gathered(x, dim, group):
    pieces = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, x.contiguous(), group=group)
    return torch.cat(pieces, dim=dim)


def _own(x, dim, group):
    return x.chunk(dist.get_world_size(group), dim=dim)[dist.get_rank(group)].contiguous()


def _reduce_scattered(x, group):
    size = dist.get_world_size(group)
    out = x.new_empty(x.shape[0] // size, *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _summed(grad, ctx.group), None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return _summed(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return _gathered(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return _own(grad, ctx.dim, ctx.group), None, None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return _own(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return _gathered(grad, ctx.dim, ctx.group), None, None


class GatherSequence(torch.autograd.Function):
    """For consumers that differ per rank: the gradient is summed and scattered."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _gathered(x, 0, group)

    @staticmethod
    def backward(ctx, grad):
        return _reduce_scattered(grad, ctx.group), None


class ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _reduce_scattered(x, group)

    @staticmethod
    def backward(ctx, grad):
        return _gathered(grad, 0, ctx.group), None


class Exchange(torch.autograd.Function):
    """All-to-all of equal blocks: splits dim `out`, puts the ranks' blocks together along dim `into`."""

    @staticmethod
    def forward(ctx, x, out, into, group):
        ctx.dims, ctx.group = (out, into), group
        return _exchanged(x, out, into, group)

    @staticmethod
    def backward(ctx, grad):
        out, into = ctx.dims
        return _exchanged(grad, into, out, ctx.group), None, None, None


def _exchanged(x, out, into, group):
    sent = [piece.contiguous() for piece in x.chunk(dist.get_world_size(group), dim=out)]
    got = [torch.empty_like(piece) for piece in sent]
    sent, got = torch.stack(sent), torch.stack(got)
    dist.all_to_all_single(got, sent, group=group)
    return torch.cat(list(got), dim=into)
