"""In processes of their own, since the replaced kernel stays: the numbers of fp32 products rounded once, also in gradients."""

import subprocess
import sys

import pytest

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

KEPT_SCRIPT = """
import torch
from megatron_rl.platforms.cpu_bf16 import enable_fp32_products_of_bf16, keep_widened
torch.manual_seed(0)
inner, cols = 33, 17
dense, experts = (torch.randn(*sizes, inner, dtype=torch.bfloat16) for sizes in ((cols,), (3, cols)))
bias, other = torch.randn(inner, dtype=torch.bfloat16), torch.randn(cols, inner)
x = torch.randn(5, inner, dtype=torch.bfloat16)
linear = torch.nn.functional.linear
def check(weight, was):
    torch.testing.assert_close(linear(x, weight).float(), x.float() @ was.float().T, rtol=2**-7, atol=2**-7)
enable_fp32_products_of_bf16()
keep_widened([dense, experts, bias, other])
before = dense.clone(), experts.clone()
for weight, was in zip((dense, *experts), (before[0], *before[1])):
    check(weight, was)
dense.mul_(3), experts[1].mul_(-2)
check(dense, before[0]), check(experts[1], before[1][1])  # kept, as promised
check(dense[:5], dense[:5])  # another matrix at the same address
keep_widened([dense, experts])
check(dense, dense), check(experts[1], experts[1])
torch.testing.assert_close(linear(x.float(), other), x.float() @ other.T)
print("equal")
"""


@pytest.mark.parametrize("script", [SCRIPT, KEPT_SCRIPT], ids=["plain", "kept"])
def test_bf16_products_equal_fp32_ones_rounded_once(script: str):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "equal\n", done.stderr
    assert "overrid" not in done.stderr.lower()
