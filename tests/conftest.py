"""What all tests share: a fixed seed for each test, and the backends that ops are tested on."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

# What was measured on this machine is nothing to the tests: a folder that is not there.
os.environ["FASTINFER_TUNED"] = os.path.join(os.path.dirname(__file__), "no_tuned_files")


@dataclass(frozen=True)
class Backend:
    """One implementation of the ops: where its tensors live, and how it is called."""

    name: str
    device: str
    ops: ModuleType  # the Python wrappers
    library: Any  # torch's op namespace: overload packets, by name

    @property
    def reads_contents(self) -> bool:
        """Whether indices and settings are checked: a GPU would have to wait to read them."""
        return self.name == "cpu"

    @property
    def interpreted(self) -> bool:
        """Whether kernels run in Triton's interpreter, where sizes must be small."""
        return self.name == "triton" and self.device == "cpu"

    def skip_if_enormous_scores_are_wrong(self) -> None:
        """On a GPU, Triton's attention takes scale and base in one multiply-add: what was rounded
        off the base stays in the exponent, which shows where scores, in base 2, exceed 2^22.
        """
        if self.name == "triton" and not self.interpreted:
            pytest.skip("a known fault of Triton's attention: scores beyond 2^22")


INTERPRETED_CASES = 3  # of a test


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where op tests run: cpu or cuda")


def backend_name(device: str) -> str:
    """Which backend this run of the tests is about."""
    if os.environ.get("FASTINFER_BACKEND") == "triton":
        return "triton"
    return device


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        name = backend_name(metafunc.config.getoption("--device"))
        metafunc.parametrize("backend", [name], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Triton's interpreter is slow: it gets a sample of each test's cases, evenly spaced."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = set()
    for group in cases.values():
        step = max(1, -(-len(group) // INTERPRETED_CASES))
        kept.update(group[::step])
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """What the ops run on: FASTINFER_BACKEND and --device choose, for the whole run."""
    import fastinfer.ops

    device = request.config.getoption("--device")
    yield Backend(request.param, device, fastinfer.ops, torch.ops.fastinfer)
    # What large pools took goes back: tests may share the GPU with those of other processes.
    if device == "cuda" and torch.cuda.memory_reserved() > 1 << 31:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Each test draws the same random numbers, whatever ran before it."""
    torch.manual_seed(20260725)
