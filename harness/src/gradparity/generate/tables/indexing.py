"""Indexing and scattering: at edges, with repeated places, into expanded and into size-1 targets."""

INDEX = """
torch.index_select({x:1d+}, {dim}, {index})
{x:1d+}[{index}]
{x:1d+}[{index}.unsqueeze(0)]
{x:2d+}[:, torch.tensor([0, 0])]
{x:2d+}[{index}, torch.zeros_like({index})]
{x:1d+}[{x} > {s}].sum()
{x:1d+}[{place}]
torch.gather({x:1d}, 0, {index})
torch.gather({x:2d}, 1, torch.zeros({x}.shape[0], 2, dtype=torch.int64))
torch.take({x:1d+}, torch.tensor([0, 0, 1]))
torch.take_along_dim({x:1d+}, torch.argsort({x}, {dim}), {dim})
torch.masked_select({x:1d+}, {x} > {s}).sum()
torch.nonzero({x}.detach()).sum().to({x}.dtype) * {x}
torch.where({x:1d+}.detach() > {s})[0].sum().to({x}.dtype) * {x}
torch.searchsorted(torch.arange(4.0), {x}.detach()).to({x}.dtype) * {x}
torch.bucketize({x}.detach(), torch.arange(3.0)).to({x}.dtype) * {x}
F.one_hot({index}, 9).to({x:1d+}.dtype).sum() * {x}
"""

SCATTER = """
torch.slice_scatter({x:1d+}, {y:as x}.narrow({dim}, {start}, {stop} - {start}), {dim}, {start}, {stop})
torch.slice_scatter({x:1d+}, {x}.narrow({dim}, {start}, {stop} - {start}) * {s}, {dim}, {start}, {stop})
torch.slice_scatter({x:1d+}.expand({x}.shape), {y:as x}[{start}:{stop}], 0, {start}, {stop})
torch.select_scatter({x:1d+}, {y:as x}.select({dim}, 0), {dim}, {place})
torch.diagonal_scatter({x:2d}, {y:as x}.diagonal({k}), {k})
torch.diagonal_scatter({x:2d}, {x}.diagonal() * {s})
torch.as_strided_scatter({x:1d}, {y:as x}[:1], (1,), (1,), 0)
torch.index_add({x:1d+}, {dim}, {index}, torch.index_select({y:as x}, {dim}, {index}))
torch.index_add({x:1d+}, {dim}, {index}, torch.index_select({x}, {dim}, {index}), alpha={s})
torch.index_copy({x:1d+}, {dim}, torch.tensor([0]), torch.index_select({y:as x}, {dim}, torch.tensor([0])))
torch.index_fill({x:1d+}, {dim}, {index}, {s})
torch.index_reduce({x:1d+}, {dim}, {index}, torch.index_select({y:as x}, {dim}, {index}), "mean")
torch.scatter({x:1d}, 0, {index}, {s})
torch.scatter({x:2d}, 1, torch.zeros_like({x}, dtype=torch.int64)[:, :1], {y:as x})
torch.scatter_add({x:1d}, 0, {index}, {index}.to({x}.dtype))
torch.scatter_add({x:2d}, 0, torch.zeros_like({x}, dtype=torch.int64), {y:as x})
torch.scatter_reduce({x:2d}, 1, torch.zeros_like({x}, dtype=torch.int64), {y:as x}, {reduce})
torch.scatter_reduce({x:1d}, 0, {index}, {index}.to({x}.dtype), {reduce}, include_self={flag})
torch.index_put({x:1d+}, ({index},), {x}.detach()[0])
torch.index_put({x:1d+}, ({index},), {x}[{index}] * {s}, accumulate=True)
torch.index_put({x:2d}, ({index}, torch.zeros_like({index})), torch.tensor({s}, dtype={x}.dtype), accumulate={flag})
torch.masked_scatter({x:1d+}, {x} > {s}, {y:as x})
torch.put({x:1d+}, torch.tensor([0]), {y:as x}.reshape(-1)[:1])
torch.zeros_like({x:1d+}).index_add({dim}, torch.arange({x}.shape[{dim}]), {x})
torch.zeros(1, {x:2d}.shape[1]).scatter_add(0, torch.zeros_like({x}, dtype=torch.int64), {x})[{index} * 0]
torch.zeros(1, {x:2d}.shape[1]).expand({x}.shape).index_add(0, torch.arange({x}.shape[0]), {x})
torch.zeros(1, {x:2d}.shape[1]).expand({x}.shape).index_put(({index},), {x}[{index}], accumulate={flag})
{x:2d}[:1].expand({x}.shape).index_copy(0, {index}[:1], {y:as x}[:1])
{x:2d}[:1].expand({x}.shape).index_fill(0, {index}, {s})
{x:2d}[:1].expand({x}.shape).slice_scatter({y:as x}[:1], 0, 0, 1)
torch.zeros({x:1d+}.shape).scatter_reduce(0, torch.zeros_like({x}, dtype=torch.int64), {x}, "amax")
"""
