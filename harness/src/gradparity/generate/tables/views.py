"""Views of every kind, gapped and overlapping ones too, copies in another layout, and operators that move data."""

VIEW = """
{x}.view(-1)
{x}.view({shape})
{x}.reshape({shape})
{x:2d}.t()
{x:2d+}.mT
{x:2d+}.transpose({dim}, {dim1})
{x:2d+}.permute({order})
{x}.squeeze()
{x:1d+}.squeeze({dim})
{x:1d+}.unsqueeze({dim})
{x}.unsqueeze(0)
{x:1d+}.expand({many})
{x:1d+}.flatten()
{x:2d+}.flatten(0, 1)
{x:1d+}.unflatten({dim}, (1, -1))
{x:1d+}.narrow({dim}, {cut})
{x:1d+}.select({dim}, {place})
{x:1d+}[{slices}]
{x:1d+}[{slices}]
{x:1d+}[1:]
{x:1d+}[::2]
{x:2d+}[:, 0]
{x:2d}.diagonal({k})
{x:2d+}.diagonal(0, {dim}, {dim1})
{x:1d+}.unfold({dim}, {unfold})
{x:1d+}.as_strided({strided})
torch.as_strided({x:1d+}, {strided})
!{out}, {out2} = {x:1d+}.split({split}, {dim})
!{out}, {out2} = {x:1d+}.chunk(2, {dim})
!{out}, *_ = {x:1d+}.unbind({dim})
!{out}, {out2} = {x:1d+}.tensor_split(2, {dim})
{x:2d+}.movedim({dim}, {dim1})
{x:2d+}.swapaxes(0, 1)
{x}.view_as({x})
{x}.expand_as({x})
torch.broadcast_to({x:1d+}, {many})
{x}.alias() if hasattr({x}, "alias") else {x}.view_as({x})
{x:1d+}.ravel()
torch.atleast_2d({x})
{x:1d+}.view({x}.shape)
{x:2d+}.adjoint()
{x:2d+}.mT.mT
{x}.detach()
{x}.data
"""

RELAID = """
{x:2d+}.mT.contiguous()
{x:2d+}.transpose({dim}, {dim1}).contiguous()
{x:2d+}.permute({order}).contiguous()
{x:2d+}.permute({order}).clone()
{x:2d+}.permute({order}).clone(memory_format=torch.contiguous_format)
{x:2d+}.permute({order}).flatten()
{x:2d+}.mT.reshape({shape})
{x:2d+}.movedim({dim}, {dim1}).to(memory_format=torch.contiguous_format)
{x:4d}.contiguous(memory_format=torch.channels_last)
{x:1d+}.flip({dim}).contiguous()
{x:1d+}[::2].contiguous()
{x:1d+}.expand({many}).contiguous()
{x:1d+}.expand({many}).clone()
{x:1d+}.unfold({dim}, {unfold}).contiguous()
{x:1d+}.as_strided({strided}).contiguous()
{x:1d+}.narrow({dim}, {cut}).contiguous()
"""

MOVE = """
{x:1d+}.repeat(2, *[1] * ({x}.ndim - 1))
{x:1d+}.repeat({many})
torch.tile({x}, (2,))
{x:1d+}.repeat_interleave(2, {dim})
torch.roll({x:1d+}, {k}, {dim})
torch.flip({x:1d+}, ({dim},))
torch.rot90({x:2d+}, {k})
torch.fliplr({x:2d+})
F.pad({x:1d+}, (1, 0))
F.pad({x:1d+}, (0, 2), value={s})
F.pad({x:3d}, (1, 1), mode="reflect")
F.pad({x:3d}, (1, 1), mode="replicate")
F.pad({x:3d}, (1, 1), mode="circular")
F.pad({x:1d+}, (-1, 0))
F.pad({x:1d+}, (0, 0))
torch.cat([{x:1d+}, {x}], {dim})
torch.cat([{x:1d+}, {x}.detach(), {x} * {s}], {dim})
torch.stack([{x}, {x} * {s}], -1)
torch.tril({x:2d+}, {k})
torch.triu({x:2d+})
torch.diag({x:1d})
torch.diag_embed({x:1d+})
torch.block_diag({x:2d}, {x})
torch.cartesian_prod({x:1d}, {x})
torch.meshgrid({x:1d}, {x}, indexing="ij")[0]
torch.vander({x:1d}.tanh(), 3)
torch.combinations({x:1d})
torch.unbind({x:1d+}, {dim})[-1]
torch.cat({x:1d+}.split(1, {dim}), {dim})
torch.cat([{x:1d+}.narrow({dim}, 0, 1), {x}], {dim})
{x:1d+}.new_zeros({x}.shape) + {x}
{x:2d+}.transpose(0, 1).contiguous()
{x:4d}.contiguous(memory_format=torch.channels_last)
torch.constant_pad_nd({x:1d+}, (1, 1), {s})
torch.view_copy({x}, (-1,))
torch.expand_copy({x:1d+}, {many})
torch.unfold_copy({x:1d+}, {dim}, {unfold})
torch.diagonal_copy({x:2d})
torch.as_strided_copy({x:1d+}, {strided})
"""

FORMAT = """
{x:4d}.contiguous(memory_format=torch.channels_last)
{x:4d}.to(memory_format=torch.channels_last)
{x:4d}.clone(memory_format=torch.channels_last) * 2
{x:4d}.clone(memory_format=torch.preserve_format)
{x:4d}.contiguous(memory_format=torch.channels_last).contiguous()
{x:4d}.to(torch.float64, memory_format=torch.channels_last).float()
torch.empty_like({x:4d}, memory_format=torch.channels_last).copy_({x})
torch.zeros_like({x:4d}, memory_format=torch.channels_last) + {x}
{x:4d}.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) * {s}
{x:4d}.permute(0, 2, 3, 1).reshape(-1, {x}.shape[1])
{x:4d}.permute(0, 2, 3, 1).contiguous().view(-1)
{x:4d}.is_contiguous(memory_format=torch.channels_last) * {x} + {x}
torch.cat([{x:4d}.contiguous(memory_format=torch.channels_last), {x}], 1)
F.conv2d({x:4d}.contiguous(memory_format=torch.channels_last), {y:shape (2, x.shape[1], 1, 1)})
F.conv2d({x:4d}, {y:shape (2, x.shape[1], 1, 1)}.contiguous(memory_format=torch.channels_last))
F.interpolate({x:4d}, scale_factor=2.0)
F.pixel_shuffle(torch.cat([{x:4d}] * 4, 1), 2)
F.adaptive_avg_pool2d({x:4d}.contiguous(memory_format=torch.channels_last), 1)
F.batch_norm({x:4d}.contiguous(memory_format=torch.channels_last), None, None, training=True)
F.group_norm({x:4d}.contiguous(memory_format=torch.channels_last), 1)
torch.channel_shuffle({x:4d}, 1)
!{x:4d leafless} = {x}.contiguous(memory_format=torch.channels_last); {out} = {x}.flatten(1)
"""
