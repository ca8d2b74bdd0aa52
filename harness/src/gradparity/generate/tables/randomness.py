"""Random numbers, so that the mask of the forward shows in gradients, and complex numbers."""

RANDOM = """
F.dropout({x}, {p})
F.dropout({x}, {p}) * {s}
F.dropout({x:2d}.t(), {p})
F.dropout({x}, {p}, training=False)
F.dropout(torch.softmax({x:2d+}, -1), {p}) @ {x}.mT
F.dropout1d({x:3d}, {p})
F.dropout2d({x:4d}, {p})
F.alpha_dropout({x}, {p}, training=True)
F.feature_alpha_dropout({x:2d+}, {p}, training=True)
torch.native_dropout({x}, {p}, True)[0]
F.dropout({x}.sin().cos(), {p}) * 1.0
torch.rand_like({x}) * {x}
torch.randn_like({x}) + {x}
torch.bernoulli(torch.full_like({x}, {p})) * {x}
torch.bernoulli({x}.sigmoid()) * {x}
torch.rand({x}.shape) * {x}
torch.randn({x}.shape) * {x}
torch.randint(3, {x}.shape) * {x}
(torch.rand_like({x}) > {p}) * {x}
torch.normal({x}, 1.0)
torch.randperm(5).sum() * {x}
{x}[torch.randperm({x:1d+}.shape[0])]
F.rrelu({x}, training=True)
F.gumbel_softmax({x:1d+}, dim={dim})
torch.empty_like({x}).uniform_() * {x}
torch.empty_like({x}).exponential_() * {x}
torch.poisson({x}.abs()) + {x}
F.scaled_dot_product_attention({x:3d}, {y:as x}, {z:as x}, dropout_p={p})
F.fractional_max_pool2d({x:4d}, 2, output_size=1)
"""

COMPLEX = """
torch.complex({x}, {y:as x})
torch.view_as_complex(torch.stack([{x}, {y:as x}], -1))
torch.polar({x}.abs() + 0.1, {y:as x})
{x:complex} * {y:as x}
{x:complex} + {y:as x}
{x:complex} / ({y:as x} + 3)
{x:complex} * (1 + 2j)
{x:complex}.conj()
{x:complex}.conj() * {x}
{x:complex}.abs()
{x:complex}.angle()
{x:complex}.real
{x:complex}.imag * 2
torch.view_as_real({x:complex})
torch.view_as_real({x:complex} * 2)
{x:complex}.exp()
{x:complex}.sin()
{x:complex}.tanh()
{x:complex} ** 2
torch.sgn({x:complex})
torch.reciprocal({x:complex} + 3)
{x:complex}.sum()
{x:complex}.mean()
{x:2d complex} @ {y:shape (x.shape[-1], 2)}
{x:2d complex}.mH @ {x}
{x:2d complex}.t()
torch.linalg.pinv({x:2d complex})
torch.linalg.pinv({x:2d complex}).abs().pow(2)
torch.linalg.inv({x:2d complex square} + 5 * torch.eye({x}.shape[-1]))
torch.linalg.svdvals({x:2d complex})
torch.linalg.solve({x:2d complex square} + 5 * torch.eye({x}.shape[-1]), {y:shape (x.shape[-1], 2)})
torch.linalg.det({x:2d complex square} + 2 * torch.eye({x}.shape[-1]))
torch.linalg.norm({x:2d complex})
torch.linalg.matrix_exp({x:2d complex square} * 0.1)
torch.linalg.eigvalsh({x:2d complex square} + {x}.mH)
torch.linalg.qr({x:2d complex square} + 3 * torch.eye({x}.shape[-1]))[1].abs()
torch.linalg.cholesky({x:2d complex square} @ {x}.mH + torch.eye({x}.shape[-1]))
torch.fft.fft({x:1d+}, dim={dim})
torch.fft.ifft({x:1d+ complex}, dim={dim})
torch.fft.rfft({x:1d+}, dim={dim})
torch.fft.irfft({x:1d+ complex}, dim={dim})
torch.fft.fft2({x:2d+})
torch.fft.hfft({x:1d+ complex}, dim={dim})
torch.fft.fftshift({x:1d+})
torch.stft({x:1d}, 4, 2, window=torch.ones(4), return_complex=True)
{x:1d+ complex}.cumsum({dim})
torch.where({x:complex}.abs() > {p}, {x}, {x} * 2)
!{x:complex leafless}.mul_(2)
!{x:complex leafless}.add_(1j)
{x:complex}.conj().resolve_conj()
{x:complex}.conj().imag
torch.vdot({x:1d complex}, {y:as x})
F.conv1d({x:3d complex}, {y:shape (2, x.shape[1], 1)})
torch.roll({x:1d+ complex}, 1, {dim})
torch.cat([{x:1d+ complex}, {x}.conj()], {dim})
{x:1d+ complex}[{slices}]
{x:complex}.detach()
"""
