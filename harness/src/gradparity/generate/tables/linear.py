"""Matrix products, convolutions, pooling, linear algebra, losses with classes, attention.

FlexAttention has no backward on the CPU, so its operands are detached.
"""

LINEAR = """
{x:2d} @ {y:shape (x.shape[-1], n)}
{x:3d} @ {y:shape (x.shape[-1], n)}
{x:3d} @ {y:shape (x.shape[0], x.shape[-1], n)}
{x:2d}.t() @ {x}
{x:2d} @ {x}.mT
torch.mv({x:2d}, {y:shape (x.shape[-1],)})
torch.dot({x:1d}, {y:as x})
torch.vdot({x:1d}, {y:as x})
torch.outer({x:1d}, {y:1d})
torch.bmm({x:3d}, {y:shape (x.shape[0], x.shape[2], n)})
torch.baddbmm({z:shape (x.shape[0], 1, 1)}, {x:3d}, {y:shape (x.shape[0], x.shape[2], 2)}, beta={s}, alpha={s2})
torch.addmm({z:shape (3,)}, {x:2d}, {y:shape (x.shape[-1], 3)}, beta={s}, alpha={s2})
torch.addmv({z:shape (x.shape[0],)}, {x:2d}, {y:shape (x.shape[-1],)})
torch.addbmm({z:shape (x.shape[1], 2)}, {x:3d}, {y:shape (x.shape[0], x.shape[2], 2)})
torch.addr({x:2d}, {y:shape (x.shape[0],)}, {z:shape (x.shape[1],)})
F.linear({x:1d+}, {y:shape (n, x.shape[-1])})
F.linear({x:1d+}, {y:shape (3, x.shape[-1])}, {z:shape (3,)})
F.linear({x:1d+}, {y:shape (3, x.shape[-1])}, {z:shape (3,)}).relu()
F.linear(F.linear({x:2d}, {y:shape (x.shape[-1], x.shape[-1])}).tanh(), {y})
{x:2d} @ {y:shape (x.shape[-1], x.shape[-1])} + {x}.tanh() @ {y}.mT
F.bilinear({x:2d}, {y:as x}, {z:shape (2, x.shape[-1], x.shape[-1])})
torch.einsum("ij,jk->ik", {x:2d}, {y:shape (x.shape[-1], n)})
torch.einsum("ij,ij->i", {x:2d}, {y:as x})
torch.einsum("bij,bkj->bik", {x:3d}, {y:as x})
torch.einsum("...i,...i->...", {x:1d+}, {y:as x})
torch.einsum("ii->i", {x:2d square})
torch.tensordot({x:2d+}, {y:shape (x.shape[-1], 2)}, 1)
torch.kron({x:2d}[:2, :2], {y:2d}[:2, :2])
torch.chain_matmul({x:2d}, {y:shape (x.shape[-1], 2)}, {z:shape (2, 3)})
torch.inner({x:1d+}, {y:as x})
torch.matmul({x:1d}, {y:shape (x.shape[0], n)})
F.embedding(torch.tensor([0, 1, 0]), {x:2d})
F.embedding({index}, {x:2d}, padding_idx=0)
F.embedding_bag({index}.unsqueeze(0), {x:2d}, mode="sum")
F.cross_entropy({x:2d}, torch.arange({x}.shape[0]) % {x}.shape[1])
F.cross_entropy({x:2d}, torch.arange({x}.shape[0]) % {x}.shape[1], label_smoothing=0.1, reduction="sum")
F.nll_loss({x:2d}.log_softmax(1), torch.arange({x}.shape[0]) % {x}.shape[1], ignore_index=1)
F.multi_margin_loss({x:2d}, torch.arange({x}.shape[0]) % {x}.shape[1])
F.cosine_embedding_loss({x:2d}, {y:as x} + 1, torch.ones({x}.shape[0]))
F.gaussian_nll_loss({x}, {y:as x}, {z:as x}.abs() + 0.5)
"""

SOLVE = """
torch.linalg.inv({x:2d square} + 5 * torch.eye({x}.shape[-1]))
torch.linalg.det({x:2d square} + 2 * torch.eye({x}.shape[-1]))
torch.linalg.slogdet({x:2d square} @ {x}.mT + torch.eye({x}.shape[-1]))[1]
torch.linalg.solve({x:2d square} + 5 * torch.eye({x}.shape[-1]), {y:shape (x.shape[-1], 2)})
torch.linalg.solve_triangular({x:2d square}.tril() + 5 * torch.eye({x}.shape[-1]), {y:shape (x.shape[-1], 2)}, upper=False)
torch.linalg.cholesky({x:2d square} @ {x}.mT + torch.eye({x}.shape[-1]))
torch.linalg.qr({x:2d} + torch.eye({x}.shape[0], {x}.shape[1]))[1]
torch.linalg.svdvals({x:2d})
torch.linalg.eigvalsh({x:2d square} + {x}.mT)
torch.linalg.pinv({x:2d} + torch.eye({x}.shape[0], {x}.shape[1]))
torch.linalg.matrix_exp({x:2d square}.tanh())
torch.linalg.matrix_norm({x:2d})
torch.linalg.matrix_norm({x:2d}, "nuc")
torch.linalg.matrix_power({x:2d square}.tanh(), 3)
torch.linalg.lstsq({x:2d square} + 5 * torch.eye({x}.shape[-1]), {y:shape (x.shape[-1], 2)})[0]
torch.linalg.multi_dot([{x:2d}, {y:shape (x.shape[-1], 2)}, {z:shape (2, 2)}])
torch.linalg.cross({x:2d}[:, :1].expand(-1, 3), {y:shape (x.shape[0], 3)})
torch.linalg.householder_product({x:2d square}.tril() * 0.1, {y:shape (x.shape[-1],)})
torch.cholesky_solve({y:shape (x.shape[-1], 2)}, {x:2d square}.tril() * 0.1 + torch.eye({x}.shape[-1]))
"""

CONVOLUTION = """
F.conv1d({x:3d}, {y:shape (2, x.shape[1], 1)})
F.conv1d({x:3d}, {y:shape (2, x.shape[1], 2)}, {z:shape (2,)}, stride={step}, padding=1)
F.conv1d({x:3d}, {y:shape (x.shape[1], 1, 3)}, padding="same", groups={x}.shape[1])
F.conv2d({x:4d}, {y:shape (2, x.shape[1], 1, 1)})
F.conv2d({x:4d}, {y:shape (2, x.shape[1], 3, 3)}, {z:shape (2,)}, padding=1)
F.conv2d({x:4d}, {y:shape (2, x.shape[1], 2, 2)}, stride={step}, padding=1, dilation=2)
F.conv2d({x:4d}.contiguous(memory_format=torch.channels_last), {y:shape (2, x.shape[1], 3, 3)}, padding=1)
F.conv2d({x:4d}, {y:shape (x.shape[1], 1, 3, 3)}, padding=1, groups={x}.shape[1])
F.conv_transpose1d({x:3d}, {y:shape (x.shape[1], 2, 2)}, stride={step})
F.conv_transpose2d({x:4d}, {y:shape (x.shape[1], 2, 2, 2)}, {z:shape (2,)}, stride=2, output_padding=1)
F.conv2d({x:4d}, {y:shape (2, x.shape[1], 3, 3)}, {z:shape (2,)}, padding=1).relu().mean((2, 3))
F.avg_pool1d({x:3d}, 2, 1)
F.avg_pool2d({x:4d}, 2, stride={step}, padding=1, count_include_pad={flag})
F.max_pool1d({x:3d}, 2)
F.max_pool2d({x:4d}, 2, 1, ceil_mode={flag})
F.max_pool2d({x:4d}, 3, {step}, 1)
F.lp_pool2d({x:4d}.abs() + 0.1, 2, 2)
F.adaptive_avg_pool1d({x:3d}, 2)
F.adaptive_avg_pool2d({x:4d}, (2, 1))
F.adaptive_max_pool2d({x:4d}, 2)
F.unfold({x:4d}, 2)
F.fold(F.unfold({x:4d}, 1), {x}.shape[2:], 1)
F.interpolate({x:3d}, scale_factor=2)
F.interpolate({x:4d}, scale_factor=2, mode="bilinear")
F.interpolate({x:4d}, size=(3, 5), mode="bicubic", align_corners=True)
F.interpolate({x:4d}, size=(2, 2), mode="area")
F.interpolate({x:4d}, scale_factor=1.5, mode="nearest-exact")
F.grid_sample({x:4d}, {y:shape (x.shape[0], 2, 2, 2)}.tanh(), align_corners={flag})
F.pixel_shuffle({x:4d}.repeat(1, 4, 1, 1), 2)
F.pixel_unshuffle({x:4d}.repeat(1, 1, 2, 2), 2)
F.channel_shuffle({x:4d}.repeat(1, 2, 1, 1), 2)
"""

ATTENTION = """
F.scaled_dot_product_attention({x:3d}, {y:as x}, {z:as x})
F.scaled_dot_product_attention({x:4d}, {y:as x}, {z:as x})
F.scaled_dot_product_attention({x:4d}, {y:as x}, {z:as x}, is_causal=True)
F.scaled_dot_product_attention({x:3d}, {y:as x}, {z:as x}, scale={p})
F.scaled_dot_product_attention({x:3d}, {y:as x}, {z:as x}, attn_mask={w:shape (x.shape[-2], x.shape[-2])})
F.scaled_dot_product_attention({x:3d}, {y:as x}, {z:as x}, torch.ones({x}.shape[-2], {x}.shape[-2], dtype=torch.bool).tril())
F.scaled_dot_product_attention({x:4d}.transpose(1, 2), {y:as x}.transpose(1, 2), {z:as x}.transpose(1, 2))
torch.softmax({x:3d} @ {y:as x}.mT / {x}.shape[-1] ** 0.5, -1) @ {z:as x}
torch.softmax(({x:4d} @ {y:as x}.transpose(-2, -1)) * {p} + {w:shape (x.shape[-2], x.shape[-2])}, -1) @ {z:as x}
torch.softmax(({x:3d} @ {x}.mT).masked_fill(torch.ones({x}.shape[-2], {x}.shape[-2]).triu(1).bool(), -1e4), -1) @ {x}
flex_attention({x:4d}.detach(), {y:as x}.detach(), {z:as x}.detach())
flex_attention({x:4d}.detach(), {y:as x}.detach(), {z:as x}.detach(), score_mod=lambda s, b, h, q, k: s * {p} + (q - k))
flex_attention({x:4d}.detach(), {y:as x}.detach(), {z:as x}.detach(), score_mod=lambda s, b, h, q, k: s + {w:shape (x.shape[1],)}.detach()[h])
flex_attention({x:4d}.detach(), {y:as x}.detach(), {z:as x}.detach(), score_mod=lambda s, b, h, q, k: s + {w:shape (x.shape[-2], x.shape[-2])}.detach()[q, k])
flex_attention({x:4d}.detach(), {y:as x}.detach()[:, :, 1:], {z:as x}.detach()[:, :, 1:], score_mod=lambda s, b, h, q, k: torch.tanh(s))
F.multi_head_attention_forward({x:3d}, {x}, {x}, {x}.shape[-1], 1, {y:shape (3 * x.shape[-1], x.shape[-1])}, None, None, None, False, 0.0, {z:shape (x.shape[-1], x.shape[-1])}, None)[0]
"""
