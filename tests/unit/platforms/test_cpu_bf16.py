"""In a process of its own, since the replaced kernel stays: same numbers as fp32 products rounded once, gradients included."""

import subprocess
import sys

SCRIPT = """
import torch
from megatron_rl.platforms.cpu_bf16 import enable_fp32_products_of_bf16
torch.manual_seed(0)
rows, inner, cols = 24, 33, 17
x = torch.randn(2, rows, inner, dtype=torch.bfloat16, requires_grad=True)
w = torch.randn(cols, inner, dtype=torch.bfloat16, requires_grad=True)
g = torch.randn(2, rows, cols, dtype=torch.bfloat16)
single = torch.randn(5, inner, dtype=torch.float64) @ torch.randn(inner, 3, dtype=torch.float64)
assert enable_fp32_products_of_bf16() is enable_fp32_products_of_bf16()
y = torch.nn.functional.linear(x, w)
y.backward(g)
assert torch.equal(y, (x.float().flatten(0, 1) @ w.float().T).bfloat16().view_as(y))
assert torch.equal(x.grad, (g.float().flatten(0, 1) @ w.float()).bfloat16().view_as(x))
expected = g.float().flatten(0, 1).T @ x.float().flatten(0, 1)
torch.testing.assert_close(w.grad.float(), expected.bfloat16().float(), rtol=2**-7, atol=1e-6)
a, b = torch.randn(3, inner), torch.randn(inner, 7)
assert torch.allclose(a @ b, torch.einsum("ij,jk->ik", a.double(), b.double()).float(), atol=1e-4)
few = torch.randn(2, inner, dtype=torch.bfloat16)
torch.testing.assert_close((few @ w.detach().T).float(), few.float() @ w.detach().float().T, rtol=2**-7, atol=2**-7)
print("equal")
"""


def test_bf16_products_equal_fp32_ones_rounded_once():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "equal\n", done.stderr
    assert "overrid" not in done.stderr.lower()
