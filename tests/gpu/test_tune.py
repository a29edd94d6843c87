"""Low-bit products under measured configurations: every one that the kernels have gives the
product, and what they do not have is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fastinfer import _library, ops, tuning
from fastinfer.tuning import Config, Entry, Problem
from tests import reference
from tests.helpers import assert_accurate, assert_bit_equal

pytestmark = pytest.mark.skipif(
    "int4_gemm" not in _library.cuda_ops() or _library.FORCED,
    reason="needs the hand-written kernels",
)
PROBLEMS = [
    Problem(4, 8, 1024, 4096, 128),
    Problem(4, 16, 1000, 4096, 32),
    Problem(4, 200, 1024, 4096, 128),
    Problem(4, 200, 1000, 4096, 64),
    Problem(2, 64, 512, 2048, 128),
    Problem(3, 4, 512, 2048, 128),
    Problem(8, 300, 512, 2048, 128),
]


@dataclass
class Product:
    problem: Problem
    x: Tensor
    weight: tuple[Tensor, Tensor, Tensor]

    def __call__(self) -> Tensor:
        run = getattr(ops, self.problem.op)
        result: Tensor = run(self.x, *self.weight, group_size=self.problem.group_size)
        return result

    def reference(self, dtype: torch.dtype = torch.float64) -> Tensor:
        bits, group = self.problem.bits, self.problem.group_size
        return reference.low_bit_gemm(bits, self.x, *self.weight, group_size=group, dtype=dtype)


def product(problem: Problem) -> Product:
    bits, m, n, k = problem.bits, problem.m, problem.n, problem.k
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, device="cuda")
    groups = (-(-k // problem.group_size), n)
    scales = (torch.rand(groups, device="cuda") + 0.5).bfloat16()
    zeros = torch.randint(0, 2**bits, groups, device="cuda").bfloat16()
    x = torch.randn(m, k, device="cuda").bfloat16()
    return Product(problem, x, (ops.pack_codes(codes, bits), scales, zeros))


@pytest.fixture
def device() -> Iterator[str]:
    name = torch.cuda.get_device_name()
    tuning.set_table(name, ())
    yield name
    tuning.set_table(name, ())
    tuning.load()


def configs(problem: Problem) -> list[Config]:
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return tuning.configs(problem, sms)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_every_configuration_gives_the_product(device: str, problem: Problem) -> None:
    run = product(problem)
    expected, baseline = run.reference(), run.reference(torch.bfloat16)
    different = 0
    default, *others = configs(problem)
    before = run()
    for config in others:
        assert tuning.set_table(device, [Entry(problem, config, 1.0, 2.0)]) == 1
        result = run()
        assert_accurate(result, expected, baseline, what=f"{config} rather than {default}")
        different += not torch.equal(result, before)
    assert different or not others, "the table was not asked"


def test_an_unknown_configuration_is_ignored(device: str) -> None:
    problem = PROBLEMS[0]
    run = product(problem)
    before = run()
    for numbers in ((0, 5, 16, 1, 0), (0, 4, 16, 3, 0), (1, 64, 1, 0, 1)):
        assert tuning.set_table(device, [Entry(problem, Config(numbers), 1.0, 2.0)]) == 0
        assert_bit_equal(run(), before)


def test_a_table_of_another_device_is_not_asked(device: str) -> None:
    problem = PROBLEMS[0]
    run = product(problem)
    before = run()
    for config in configs(problem):
        tuning.set_table("another device", [Entry(problem, config, 1.0, 2.0)])
        assert_bit_equal(run(), before)
    tuning.set_table("another device", ())


def test_the_tuner_measures(device: str) -> None:
    from fastinfer import tuner

    problems = tuner.groups([(1024, 2048)], [1, 16, 100], 4, 128)
    found = tuner.find_device("int4_gemm")
    assert found.name == device
    for together in problems:
        decision = tuner.decide(together, found.sms, lambda p: tuner.open_gpu_bench(p, found))
        assert decision is not None and 0 < decision.us <= decision.default_us < 1e4
        assert not decision.wrong
