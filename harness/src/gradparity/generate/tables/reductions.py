"""Reductions, scans, sorting, softmax and norms. `_weight_norm` of an empty tensor ends the process, and so
does one whose second tensor is too short: hence the `reshape`."""

SUM = """
{x}.sum()
{x}.mean()
torch.sum({x:1d+}, {dim})
torch.sum({x:1d+}, {dim}, keepdim=True)
torch.sum({x:1d+}, {dims})
torch.mean({x:1d+}, {dims}, keepdim={flag})
torch.nansum({x:1d+}, {dim})
torch.nanmean({x:1d+}, {dim})
torch.linalg.vector_norm({x:1d+}, 1, {dim})
torch.cumsum({x:1d+}, {dim})
torch.logcumsumexp({x:1d+}, {dim})
torch.trapezoid({x:1d+}, dim={dim})
torch.trace({x:2d})
{x:1d+} - {x}.mean({dim}, keepdim=True)
{x:1d+} / ({x}.abs().sum({dim}, keepdim=True) + 1)
"""

REDUCTION = """
torch.prod({x:1d+}.sigmoid(), {dim})
torch.var({x:1d+}, {dim})
torch.var({x:1d+}, {dims}, unbiased=False, keepdim={flag})
torch.std({x:1d+}, {dim}, correction=0) + 1
torch.var_mean({x:1d+}, {dim}, correction=0)[1]
torch.amax({x:1d+}, {dims})
torch.amin({x:1d+}, {dim}, keepdim=True)
torch.aminmax({x:1d+}, dim={dim})[0]
torch.max({x:1d+}, {dim})[0]
torch.min({x:1d+}, {dim}, keepdim=True)[0]
{x}.max()
torch.median({x:1d+}, {dim})[0]
torch.nanmedian({x})
torch.mode({x:1d+}, {dim})[0]
torch.kthvalue({x:1d+}, 1, {dim})[0]
torch.logsumexp({x:1d+}, {dims})
torch.linalg.vector_norm({x:1d+}, 2, {dims})
torch.linalg.vector_norm({x:1d+}, float("inf"))
torch.linalg.vector_norm({x:1d+}, 0) * {x}
torch.norm({x:1d+}, p=3, dim={dim})
torch.cumprod({x:1d+}.sigmoid(), {dim})
torch.cummax({x:1d+}, {dim})[0]
torch.cummin({x:1d+}, {dim})[0]
torch.sort({x:1d+}, {dim})[0]
torch.sort({x:1d+}, dim={dim}, descending=True, stable=True)[0]
torch.topk({x:1d+}, 1, {dim})[0]
torch.msort({x:1d+})
torch.gather({x:1d+}, {dim}, torch.argsort({x}, {dim}))
torch.softmax({x:1d+}, {dim})
torch.log_softmax({x:1d+}, {dim})
F.softmin({x:1d+}, {dim})
F.normalize({x:1d+}, dim={dim})
F.normalize({x:1d+}, p=1, dim={dim})
torch.renorm({x:2d+}, 2, {dim}, 1.0)
torch.diff({x:1d+}, dim={dim})
torch.cov({x:2d})
torch.corrcoef({x:2d} + torch.eye({x}.shape[0], {x}.shape[1]))
torch.quantile({x:1d+}.float(), 0.5, {dim})
torch.histc({x}.detach(), 4)
torch.count_nonzero({x}).to({x}.dtype) * {x}
torch.argmax({x:1d+}, {dim}).to({x}.dtype).sum() * {x}
torch.all({x} > {s}).to({x}.dtype) * {x}
torch.sum({x} > {s}) * {x}
torch.logsumexp({x:1d+}, {dim}) - torch.amax({x}, {dim})
"""

NORM = """
F.layer_norm({x:1d+}, ({x}.shape[-1],))
F.layer_norm({x:1d+}, ({x}.shape[-1],), {y:shape (x.shape[-1],)}, {z:shape (x.shape[-1],)})
F.layer_norm({x:2d+}, {x}.shape[-2:], eps=0.1)
F.rms_norm({x:1d+}, ({x}.shape[-1],), {y:shape (x.shape[-1],)})
F.rms_norm({x:2d+}, ({x}.shape[-1],))
F.group_norm({x:3d+}, 1)
F.group_norm({x:2d+}, {x}.shape[1], {y:shape (x.shape[1],)}, {z:shape (x.shape[1],)}, eps=0.1)
F.group_norm({x:4d}, 2)
F.batch_norm({x:2d+}, None, None, training=True, eps=0.1)
F.batch_norm({x:2d+}, torch.zeros({x}.shape[1]), torch.ones({x}.shape[1]), {y:shape (x.shape[1],)}, None, True)
F.batch_norm({x:2d+}, torch.zeros({x}.shape[1]), torch.ones({x}.shape[1]), training=False)
F.instance_norm({x:3d+}, eps=0.1)
F.local_response_norm({x:3d+}, 2)
torch._weight_norm({x:2d+ filled}, {y:shape (x.shape[0],) + (1,) * (x.ndim - 1)}.reshape({x}.shape[0], *[1] * ({x}.ndim - 1)), 0)
torch.native_layer_norm({x:1d+}, ({x}.shape[-1],), None, None, 1e-5)[0]
torch.native_group_norm({x:3d}, None, None, {x}.shape[0], {x}.shape[1], {x}.shape[2], 1, 0.1)[0]
"""
