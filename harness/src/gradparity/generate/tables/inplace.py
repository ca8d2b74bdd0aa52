"""Changes in place: of a tensor, through views of it, at indices, of metadata, and without autograd's knowing."""

INPLACE = """
!{x:leafless}.add_({y:onto x})
!{x:leafless}.add_({s})
!{x:leafless}.mul_({y:onto x})
!{x:leafless}.mul_({s})
!{x:leafless}.sub_({y:as x}, alpha={p})
!{x:leafless}.copy_({y:onto x})
!{x:leafless}.zero_()
!{x:leafless}.fill_({s})
!{x:leafless}.relu_()
!{x:leafless}.sigmoid_()
!{x:leafless}.tanh_()
!{x:leafless}.sin_()
!{x:leafless}.neg_()
!{x:leafless}.clamp_(-1, {p})
!{x:leafless}.masked_fill_({x} > {s}, {s2})
!{x:leafless}.lerp_({y:as x}, {p})
!{x:leafless}.addcmul_({y:as x}, {z:as x}, value={s})
!{x:leafless}.add_({x})
!{x:1d+ leafless}.add_({x}.flip(0))
!{x:1d+ leafless}.copy_({x}.flip(0))
!{x} += {s}
!{x} = {x} * {s}
!{x:1d+ leafless}[{place}] = {s}
!{x:1d+ leafless}[{start}:{stop}] = {s}
!{x:1d+ leafless}[{start}:{stop}] = {y:as x}[{start}:{stop}]
!{x:1d+ leafless}[{slices}] = {s}
!{x:1d+ leafless}[{slices}] *= {s}
!{x:1d+ leafless}[{index}] = {s}
!{x:1d+ leafless}[{x} > {s}] = {s2}
!{x:1d+ leafless}[1:] = {x}[:-1].clone()
!{x:1d+ leafless}.index_add_({dim}, {index}, torch.index_select({y:as x}, {dim}, {index}))
!{x:1d+ leafless}.index_copy_({dim}, torch.tensor([0]), torch.index_select({y:as x}, {dim}, torch.tensor([0])))
!{x:1d+ leafless}.index_fill_({dim}, {index}, {s})
!{x:1d+ leafless}.index_put_(({index},), {y:as x}[{index}] * {s}, accumulate={flag})
!{x:2d leafless}.scatter_(0, torch.zeros_like({x}, dtype=torch.int64)[:1], {y:as x})
!{x:2d leafless}.scatter_add_(1, torch.zeros_like({x}, dtype=torch.int64), {y:as x})
!{x:2d leafless}.fill_diagonal_({s})
!{x:1d+ leafless}.cumsum_({dim})
!torch.relu_({x:leafless})
!F.relu({x:leafless}, inplace=True)
!torch._foreach_add_([{x:leafless}, {y:leafless}], {s})
!torch._foreach_mul_([{x:leafless}], {s})
"""

THROUGH_VIEW = """
!{x:1d+ leafless}.view(-1).add_({s})
!{x:1d+ leafless}.view(-1)[0].mul_({s})
!{x:2d leafless}.t().mul_({s})
!{x:2d leafless}.t().add_({y:as x}.t())
!{x:2d leafless}.diagonal().fill_({s})
!{x:2d leafless}.diagonal().add_({x}.diagonal())
!{x:1d+ leafless}.select({dim}, {place}).mul_({s})
!{x:1d+ leafless}.narrow({dim}, {cut}).zero_()
!{x:1d+ leafless}[{slices}].mul_({s})
!{x:1d+ leafless}.unfold({dim}, {unfold}).zero_()
!{x:1d+ leafless}.unfold({dim}, 1, {step}).add_({s})
!{x:1d+ leafless}.unfold({dim}, 1, {step}).mul_({x}.unfold({dim}, 1, {step}))
!{x:1d+ leafless}.as_strided({strided}).zero_()
!{x:1d+ leafless}.unsqueeze(0).copy_({y:as x}.unsqueeze(0))
!{x:2d+ leafless}.transpose(0, 1)[0].fill_({s})
!{x:1d+ leafless}.detach().add_({s})
!{x:1d+}.data.mul_({s})
!{x:1d+ leafless}.chunk(2, {dim})[0].mul_({s})
!{x:1d+ leafless}.split(1, {dim})[-1].zero_()
!{x:2d+ leafless}.unbind(0)[0].add_({s})
!{out} = {x:1d+ leafless}.view(-1); {out}.mul_({s})
!{out} = {x:1d+ leafless}[1:]; {out}.add_({s})
!{out} = {x:1d+ leafless}.unfold({dim}, 1, {step}); {out}.add_({out})
!{out} = {x:2d leafless}.t(); {x}.mul_({s})
!{out} = {x:1d+ leafless}[::2]; {out}.zero_(); {out2} = {out} + 1
"""

METADATA = """
!{x:2d leafless}.t_()
!{x:2d+ leafless}.transpose_(0, 1)
!{x:leafless}.unsqueeze_(0)
!{x:leafless}.squeeze_()
!{x:nograd}.requires_grad_()
!{out} = {x:nograd}.view(-1); {out}.requires_grad_()
!{out} = ({x} * 2).detach().requires_grad_()
!{x:leafless}.detach_()
!{x:nograd}.set_({y:nograd})
!{out} = torch.empty_like({x}); torch.mul({x}.detach(), {s}, out={out})
"""
