"""Elementwise operators, casts, and what makes a graph of them interesting: constants, masks, kinks."""

UNARY = """
torch.sin({x})
{x}.cos()
torch.tanh({x})
torch.exp(-{x}.abs())
torch.sigmoid({x})
torch.relu({x})
F.gelu({x})
F.gelu({x}, approximate="tanh")
F.silu({x})
F.softplus({x})
F.elu({x})
F.celu({x}, {p})
F.selu({x})
F.leaky_relu({x}, {p})
F.hardtanh({x})
F.hardswish({x})
F.hardsigmoid({x})
F.mish({x})
F.logsigmoid({x})
F.softsign({x})
F.tanhshrink({x})
F.softshrink({x}, {p})
F.hardshrink({x}, {p})
F.threshold({x}, {p}, {s})
F.relu6({x})
F.glu({x:1d+}, {dim})
{x}.abs()
-{x}
torch.square({x})
torch.sqrt({x}.abs() + 0.5)
torch.rsqrt({x}.abs() + 0.5)
torch.log1p({x}.abs())
torch.log({x}.abs() + 0.5)
torch.log2({x}.abs() + 0.5)
torch.erf({x})
torch.erfc({x})
torch.expm1(-{x}.abs())
torch.atan({x})
torch.asinh({x})
torch.sinh({x}.tanh())
torch.asin({x}.tanh() * 0.5)
torch.acosh({x}.abs() + 1.5)
torch.erfinv({x}.tanh() * 0.5)
torch.lgamma({x}.abs() + 0.5)
torch.digamma({x}.abs() + 0.5)
torch.special.i0({x})
torch.special.entr({x}.abs() + 0.1)
torch.special.ndtr({x})
torch.special.log_ndtr({x})
torch.logit({x}.sigmoid(), 0.1)
torch.reciprocal({x}.abs() + 1)
torch.sinc({x})
torch.clamp({x}, -0.5, {p})
torch.clamp_min({x}, {s})
torch.clamp_max({x}, {s})
torch.round({x})
torch.floor({x}) * {x}
torch.frac({x})
torch.sign({x}) * {x}
torch.trunc({x}) + {x}
torch.nan_to_num({x})
torch.deg2rad({x})
{x} * {s}
{x} + {s}
{s} - {x}
{x} / 3
{s} / ({x}.abs() + 1)
{x} ** 2
{x} ** 3
torch.pow(2, {x}.tanh())
({x} > {s}).to({x}.dtype) * {x}
torch.where({x} > {s}, {x}, {s2})
torch.where({x} > {s}, {x} * {s2}, {x} / 2)
{x}.masked_fill({x} < {s}, {s2})
torch.zeros_like({x}) + {x}
torch.full_like({x}, {s}) * {x}
{x} * torch.arange({total}, device={x}.device).reshape({x}.shape)
{x}.clone()
{x}.contiguous()
{x}.positive()
torch.fmod({x}, 1.5)
torch.remainder({x}, 1.5)
torch.heaviside({x}.detach(), {x}.detach()) * {x}
torch.copysign({x}, {x}.flip(0))
{x}.sum() * {x}
{x} * {x}.detach()
"""

EXTREME = """
-{x}
1 / {x}
1 / -{x}
1 / ({x} + 0)
1 / ({x} - {x})
1 / ({x} * 0)
1 / torch.relu({x})
torch.copysign({y:as x}, -{x})
torch.relu({x})
torch.sqrt({x})
torch.log({x})
torch.exp({x})
torch.abs({x})
torch.sign({x})
torch.clamp({x}, -0.5, 0.5)
torch.isnan({x}).to({x}.dtype) + {x}
torch.signbit(-{x}).to({x}.dtype) * {y:as x}
torch.copysign({y:as x}, {x})
torch.atan2({x}, {y:as x})
torch.maximum({x}, {y:as x})
torch.minimum({x}, {y:as x})
torch.fmax({x}, {y:as x})
torch.where({x} == {y:as x}, {x}, 2 * {y})
{x} / {y:as x}
{x}.pow(0.5)
torch.max({x:1d+}, {dim})[0]
torch.max({x:1d+}, {dim})[1] * 1.0 + {x:1d+}.sum()
torch.linalg.vector_norm({x:1d+}, dim={dim})
torch.softmax({x:1d+}, {dim})
torch.logsumexp({x:1d+}, {dim})
torch.mean({x:1d+}, {dim})
F.layer_norm({x:1d+}, {x}.shape[-1:])
"""

BINARY = """
{x} + {y:onto x}
{x} * {y:onto x}
{x} - {y:onto x}
torch.sub({x}, {y:as x}, alpha={s})
torch.add({x}, {y:onto x}, alpha={s})
{x} / ({y:onto x}.abs() + 0.5)
torch.maximum({x}, {y:as x})
torch.minimum({x}, {y:onto x})
torch.fmax({x}, {y:as x})
torch.where({x} > {y:onto x}, {x}, {y})
torch.where({y:as x} > {s}, {x}, {y})
torch.lerp({x}, {y:as x}, {p})
torch.lerp({x}, {y:as x}, {z:as x}.sigmoid())
torch.addcmul({x}, {y:as x}, {z:onto x}, value={s})
torch.addcdiv({x}, {y:as x}, {z:as x}.abs() + 0.5, value={s})
torch.atan2({x}, {y:as x}.abs() + 1)
torch.hypot({x}.abs() + 0.5, {y:as x})
torch.logaddexp({x}, {y:as x})
torch.logaddexp2({x}, {y:as x})
torch.pow({x}.abs() + 0.5, {y:onto x})
torch.xlogy({x}, {y:as x}.abs() + 0.5)
torch.copysign({x}, {y:as x})
torch.float_power({x}.abs() + 0.5, 1.5).to({x}.dtype)
torch.clamp({x}, {y:as x} - 1, {y} + 1)
torch.heaviside({x}.detach(), {y:as x}.detach()) + {x}
torch.remainder({x}, {y:as x}.abs() + 1)
F.prelu({x:2d+}, {y:shape (1,)})
F.mse_loss({x}, {y:as x})
F.l1_loss({x}, {y:as x}, reduction="none")
F.smooth_l1_loss({x}, {y:as x}, reduction="sum")
F.huber_loss({x}, {y:as x}, delta={p})
F.binary_cross_entropy_with_logits({x}, {y:as x}.sigmoid())
F.kl_div({x}, {y:as x}.sigmoid(), reduction="sum")
F.soft_margin_loss({x}, {y:as x}.sign())
F.cosine_similarity({x:2d+}, {y:as x}, dim=1)
F.pairwise_distance({x:2d}, {y:as x} + 1)
torch.cdist({x:2d}, {y:as x} + 3)
torch.dist({x}, {y:as x} + 1)
torch.stack([{x}, {y:as x}], 0)
torch.cat([{x:1d+}, {y:as x}], {dim})
torch.hstack([{x:1d+}, {y:as x}])
torch.cross({x:2d}[:, :1].expand(-1, 3), {y:shape (x.shape[0], 3)})
"""

CAST = """
{x}.to({dtype})
{x}.to({dtype}).to({x}.dtype)
{x}.to({dtype}) * 2
{x}.double().sum().to({x}.dtype)
{x}.type_as({y})
{x}.to(torch.bfloat16).float()
{x}.half().float() * {x}
{x}.to({x}.dtype, copy=True)
{x}.to(memory_format=torch.contiguous_format)
torch.sum({x}, dtype={dtype})
torch.mean({x}, dtype={dtype})
F.softmax({x:1d+}, {dim}, dtype={dtype})
{x}.int().to({x}.dtype) * {x}
torch.mm({x:2d}.to({dtype}), {y:shape (x.shape[1], n)}.to({dtype}))
F.linear({x:2d}.to({dtype}), {y:shape (n, x.shape[-1])}.to({dtype})).to({x}.dtype)
F.layer_norm({x:2d+}.to({dtype}), ({x}.shape[-1],))
"""

FACTORY = """
torch.tensor([{s}, {s2}]).sum() * {x}
torch.tensor({s}) * {x}
torch.tensor([[{s}], [{s2}]]) * {x:1d}
torch.tensor([{s}] * {x:1d+}.shape[-1]) + {x}
torch.tensor([2, 3, {place}])[:1] + {x:1d+}
torch.FloatTensor([{s}, {s2}]).sum() * {x}
torch.FloatTensor([{s}] * {x:1d+}.shape[-1]) * {x}
torch.FloatTensor({x:1d}.shape[0]).fill_({s}) * {x}
torch.Tensor([{s}]) * {x}
torch.LongTensor([1, 2]).sum() * {x}
torch.DoubleTensor([{s}]).to({x}.dtype) * {x}
{x:1d+}[torch.LongTensor([0, 0])]
{x:1d+}[torch.BoolTensor([True] * {x}.shape[0])]
torch.as_tensor([{s}, {s2}]).mean() + {x}
torch.scalar_tensor({s}) * {x}
torch.asarray([{s}]) * {x}
torch.from_numpy(np.full((1,), {s}, dtype="float32")) * {x}
torch.tensor(np.float32({s})) * {x}
{x}.new_tensor([{s}]) * {x}
{x}.new_full((1,), {s}) + {x}
{x}.new_ones({x}.shape).mul_({s}) * {x}
{x:1d+}.new({x}.shape).fill_({s}) * {x}
torch.linspace(0, 1, {total}).reshape({x}.shape) * {x}
torch.eye({x:2d}.shape[0]) @ {x}
torch.ones_like({x}, memory_format=torch.preserve_format) * {x}
torch.empty({x}.shape).fill_({s}) * {x}
torch.full((), {s}) * {x}
torch.stack([torch.tensor({s}), torch.tensor({s2})]).prod() * {x}
torch.cat([torch.tensor([{s}]), {x:1d}])
torch.tensor([{x}.shape[0], 2]).sum() * {x:1d+}
torch.nn.Parameter(torch.full((1,), {s})).detach() * {x}
!{out} = torch.tensor([{s}], requires_grad=True); {out2} = {out} * {x}
!{out} = torch.zeros({x:1d+}.shape); {out}[0] = 1; {out2} = {out} * {x}
!{out} = torch.zeros({x:1d+}.shape); {out}[0] = {x}[0]
!{out} = torch.zeros_like({x}); {out} += {x}; {out2} = {out} * {x}
"""
