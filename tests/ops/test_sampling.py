"""sample against the reference, brute force and exact distributions."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import reference
from tests.conftest import Backend
from tests.helpers import (
    DTYPES,
    STRIDED,
    assert_bit_equal,
    chi_square_p_value,
    dtype_name,
    far_apart,
    guarded,
)

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)

# A score is a logit plus noise, both of which a kernel may hold in float32.
SCORE_TOLERANCE = 2e-5


def settings(
    batch: int, device: str, *, temperature: float = 1.0, seed: int = 0, **filters: float
) -> dict[str, Tensor]:
    """The per-row arguments of `batch` rows that differ in their seed and position only."""
    rows: dict[str, Tensor] = {
        "temperature": torch.full((batch,), temperature),
        "seeds": torch.arange(batch) + seed,
        "positions": torch.arange(batch) * 3 + 1,
    }
    for name, value in filters.items():
        rows[name] = torch.full(
            (batch,), value, dtype=torch.int32 if name == "top_k" else torch.float32
        )
    return {name: row.to(device) for name, row in rows.items()}


def mixed_settings(batch: int, device: str) -> dict[str, Tensor]:
    """Rows of every kind: greedy or not, filtered or not, with any seed and position."""
    pick = torch.randint
    rows = {
        "temperature": torch.tensor([0.0, 0.5, 1.0, 2.0])[pick(0, 4, (batch,))],
        "top_k": torch.tensor([-1, 0, 1, 5, 40, 10**6], dtype=torch.int32)[pick(0, 6, (batch,))],
        "top_p": torch.tensor([0.1, 0.7, 0.95, 1.0])[pick(0, 4, (batch,))],
        "min_p": torch.tensor([0.0, 0.02, 0.5, 1.0])[pick(0, 4, (batch,))],
        "seeds": pick(-(2**62), 2**62, (batch,)),
        "positions": pick(0, 2**40, (batch,)),
    }
    return {name: row.to(device) for name, row in rows.items()}


def few(backend: Backend, rows: int, interpreted: int) -> int:
    """So many rows; in the interpreter, where each takes a tenth of a second, some."""
    return interpreted if backend.interpreted else rows


def check(actual: tuple[Tensor, Tensor], logits: Tensor, rows: dict[str, Tensor]) -> None:
    """The token is the reference's, or one whose score ties with it within float32 noise."""
    token_ids, valid = (x.cpu() for x in actual)
    expected = reference.sample(logits, **rows)
    assert token_ids.dtype == torch.int64 and valid.dtype == torch.bool
    assert torch.equal(valid, expected.valid)
    assert ((token_ids >= 0) & (token_ids < logits.shape[1])).all()
    picked = expected.scores.gather(1, token_ids[:, None])[:, 0]
    best = expected.scores.amax(-1)
    off = (token_ids != expected.token_ids) & ~(picked >= best - SCORE_TOLERANCE * (1 + best.abs()))
    assert not off.any(), (
        f"rows {off.nonzero().flatten().tolist()}: got {token_ids[off].tolist()},"
        f" expected {expected.token_ids[off].tolist()}, score gap {(best - picked)[off].tolist()}"
    )


# --------------------------------------------------------------------------------------- greedy


@by_dtype
@pytest.mark.parametrize("vocab", [1, 2, 7, 64, 1000, 32000, 151936])
@pytest.mark.parametrize("temperature", [None, 0.0])
def test_greedy_is_the_largest_logit(
    backend: Backend, dtype: torch.dtype, vocab: int, temperature: float | None
) -> None:
    logits = torch.randn(3, vocab, device=backend.device).to(dtype)
    rows = {} if temperature is None else {"temperature": torch.zeros(3, device=backend.device)}
    token_ids, valid = backend.ops.sample(logits, **rows)
    lowest = [(row == row.max()).nonzero()[0].item() for row in logits]
    assert token_ids.tolist() == lowest and valid.all()


@by_dtype
@pytest.mark.parametrize("vocab", [9, 64, 1000, 40000])
def test_greedy_ties_go_to_the_lowest_index(
    backend: Backend, dtype: torch.dtype, vocab: int
) -> None:
    for first, second in (
        (0, vocab - 1),
        (vocab // 2, vocab // 2 + 1),
        (3, 8),
        (vocab - 2, vocab - 1),
    ):
        logits = torch.zeros(2, vocab, device=backend.device).to(dtype) - 1
        logits[:, [first, second]] = 2.0
        assert backend.ops.sample(logits)[0].tolist() == [first] * 2
    equal = torch.full((2, vocab), -3.5, device=backend.device).to(dtype)
    assert backend.ops.sample(equal)[0].tolist() == [0, 0]


def test_negative_zero_ties_with_zero(backend: Backend) -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0]], device=backend.device)
    assert backend.ops.sample(logits)[0].tolist() == [1, 1]


def test_greedy_rows_ignore_the_filters(backend: Backend) -> None:
    logits = torch.randn(6, 50, device=backend.device)
    rows = settings(6, backend.device, temperature=0.0, top_k=3, top_p=0.01, min_p=1.0)
    assert torch.equal(backend.ops.sample(logits, **rows)[0], logits.argmax(-1))


def test_greedy_needs_no_seed(backend: Backend) -> None:
    logits = torch.randn(4, 50, device=backend.device)
    zero = torch.zeros(4, device=backend.device)
    assert torch.equal(backend.ops.sample(logits, zero)[0], logits.argmax(-1))


# ------------------------------------------------------------------------------------- sampling


@by_dtype
@pytest.mark.parametrize("vocab", [1, 2, 5, 63, 64, 1000, 32001])
def test_mixed_rows_equal_the_reference(backend: Backend, dtype: torch.dtype, vocab: int) -> None:
    batch = few(backend, 64, 8) if vocab < 2000 else few(backend, 24, 5)
    logits = (torch.randn(batch, vocab, device=backend.device) * 3).to(dtype)
    rows = mixed_settings(batch, backend.device)
    check(backend.ops.sample(logits, **rows), logits, rows)


def test_tokens_are_nearly_always_exactly_the_reference_ones(backend: Backend) -> None:
    """The tolerance of `check` is for ties only: here are few enough draws to have none."""
    batch = few(backend, 512, 16)
    logits = torch.randn(batch, 100, device=backend.device)
    rows = settings(batch, backend.device, top_k=50, top_p=0.9)
    ours = backend.ops.sample(logits, **rows)[0].cpu()
    assert torch.equal(ours, reference.sample(logits, **rows).token_ids)


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 1}, {"top_k": 7}, {"top_k": 64}, {"top_k": 65}, {"top_k": -3},
        {"top_k": 2**31 - 1},
        {"top_p": 1e-6}, {"top_p": 0.3}, {"top_p": 0.999}, {"top_p": 1.0}, {"top_p": 1.5},
        {"min_p": 0.0}, {"min_p": 0.1}, {"min_p": 1.0},
        {"top_k": 10, "top_p": 0.5}, {"top_p": 0.5, "min_p": 0.3},
        {"top_k": 5, "top_p": 0.8, "min_p": 0.05},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("ties", [False, True])
def test_filters_equal_the_reference(
    backend: Backend, filters: dict[str, float], ties: bool
) -> None:
    batch = few(backend, 64, 4)
    logits = torch.randn(batch, 64, device=backend.device) * 2
    logits = logits.round() if ties else logits
    rows = settings(batch, backend.device, temperature=1.5, **filters)
    check(backend.ops.sample(logits, **rows), logits, rows)


def test_every_kept_token_is_drawn_and_no_other(backend: Backend) -> None:
    """Over many seeds exactly the brute-force candidates appear."""
    row = torch.tensor([1.0, 0.5, 0.5, 0.0, -0.5, 0.5, 1.0, -2.0])
    probabilities = torch.softmax(row.double(), 0)
    cases: list[tuple[dict[str, float], set[int]]] = [
        ({"top_k": 3}, {0, 6, 1, 2, 5}),  # the third largest ties with two more
        ({"top_k": 2}, {0, 6}),
        ({"top_p": float(probabilities[[0, 6]].sum()) - 1e-3}, {0, 6}),
        ({"top_p": float(probabilities[[0, 6]].sum()) + 1e-3}, {0, 6, 1, 2, 5}),
        ({"min_p": math.exp(-0.5) - 1e-3}, {0, 6, 1, 2, 5}),
        ({"min_p": math.exp(-0.5) + 1e-3}, {0, 6}),
        # The mass is that of the survivors of top_k: 2 e / (2 e + 3 e^0.5) = 0.524.
        ({"top_k": 5, "top_p": 0.53}, {0, 6, 1, 2, 5}),
        ({"top_k": 5, "top_p": 0.51}, {0, 6}),
    ]
    draws = few(backend, 3000, 3)
    logits = row.expand(draws, 8).to(backend.device)
    for filters, kept in cases:
        token_ids, _ = backend.ops.sample(logits, **settings(draws, backend.device, **filters))
        drawn = set(token_ids.tolist())
        assert drawn <= kept and (backend.interpreted or drawn == kept), filters


@pytest.mark.parametrize("vary", ["seeds", "positions"])
@pytest.mark.parametrize(
    ("temperature", "filters"),
    [(1.0, {}), (0.7, {"top_p": 0.9}), (1.6, {"top_k": 6}), (1.0, {"min_p": 0.1})],
)
def test_draws_follow_the_distribution(
    backend: Backend, vary: str, temperature: float, filters: dict[str, float]
) -> None:
    """Chi-square of 1e5 draws, each with its own seed or its own position."""
    draws, vocab = few(backend, 100_000, 8), 16
    row = torch.randn(vocab)
    rows = settings(draws, backend.device, temperature=temperature, **filters)
    fixed = "positions" if vary == "seeds" else "seeds"
    rows[vary] = torch.arange(draws, device=backend.device)
    rows[fixed] = torch.full((draws,), 12345, device=backend.device)
    token_ids, valid = backend.ops.sample(row.to(backend.device).expand(draws, vocab), **rows)
    assert valid.all()
    scaled = row.double() / rows["temperature"][0].item()
    keep = reference.kept_tokens(
        scaled, int(filters.get("top_k", 0)), filters.get("top_p", 1.0), filters.get("min_p", 0.0)
    )
    exact = torch.softmax(torch.where(keep, scaled, -torch.inf), 0)
    counts = torch.bincount(token_ids.cpu(), minlength=vocab)
    assert chi_square_p_value(counts, exact) > 1e-4


def test_consecutive_positions_and_seeds_are_independent(backend: Backend) -> None:
    """Pairs of neighbours are uniform over all pairs, along positions and along seeds."""
    draws, vocab = few(backend, 60_000, 20), 5
    logits = torch.zeros(1, vocab, device=backend.device).expand(draws, vocab)
    for vary in ("seeds", "positions"):
        rows = settings(draws, backend.device)
        rows["seeds"].zero_()
        rows["positions"].zero_()
        rows[vary] = torch.arange(draws, device=backend.device)
        token_ids = backend.ops.sample(logits, **rows)[0].cpu()
        pairs = token_ids[0::2] * vocab + token_ids[1::2]
        counts = torch.bincount(pairs, minlength=vocab**2)
        assert chi_square_p_value(counts, torch.full((vocab**2,), 1 / vocab**2)) > 1e-4


def test_seed_and_position_use_all_their_bits(backend: Backend) -> None:
    bits = [0, 1, 15, 31, 32, 33, 62, 63] if backend.interpreted else range(64)
    values = torch.tensor([1 << i if i < 63 else -(2**63) for i in bits], device=backend.device)
    logits = torch.zeros(len(values), 1000, device=backend.device)
    for name in ("seeds", "positions"):
        rows = settings(len(values), backend.device)
        rows["seeds"].zero_()
        rows["positions"].zero_()
        rows[name] = values
        token_ids = backend.ops.sample(logits, **rows)[0]
        assert len(set(token_ids.tolist())) > 0.75 * len(values), name
        check((token_ids, torch.ones(len(values), dtype=torch.bool)), logits, rows)


def test_a_uniform_next_to_one_gives_finite_noise(backend: Backend) -> None:
    """Here r is 9 below 2^32: rounded to float32, u would be 1 and the noise infinite, not 20."""
    position, token = 987588, 60
    word = reference.random_words(torch.tensor([7]), torch.tensor([position]), 64)[0, token]
    assert word == 2**32 - 9
    logits = torch.zeros(2, 64, device=backend.device)
    logits[0, token], logits[1, token] = -30.0, -8.0
    rows = settings(2, backend.device)
    rows["seeds"].fill_(7)
    rows["positions"].fill_(position)
    token_ids, valid = backend.ops.sample(logits, **rows)
    assert valid.all()
    assert token_ids[0] != token, "an improbable token is drawn whatever its logit"
    assert token_ids[1] == token
    check((token_ids, valid), logits, rows)


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-20, 1e-38])
def test_tiny_temperature_draws_a_largest_logit(backend: Backend, temperature: float) -> None:
    """logits / temperature may pass the float32 range."""
    batch = few(backend, 32, 3)
    logits = torch.randn(batch, 100, device=backend.device) * 4
    rows = settings(batch, backend.device, temperature=temperature)
    token_ids, valid = backend.ops.sample(logits, **rows)
    assert valid.all() and torch.equal(token_ids, logits.argmax(-1))
    filtered = {**rows, **settings(batch, backend.device, top_k=50, top_p=0.9, min_p=0.1)}
    filtered["temperature"] = rows["temperature"]
    assert torch.equal(backend.ops.sample(logits, **filtered)[0], logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e3, 1e30])
def test_huge_temperature_draws_evenly(backend: Backend, temperature: float) -> None:
    draws = few(backend, 20000, 40)
    logits = (torch.randn(1, 8, device=backend.device) * 1e-1).expand(draws, 8)
    token_ids, _ = backend.ops.sample(
        logits, **settings(draws, backend.device, temperature=temperature)
    )
    counts = torch.bincount(token_ids.cpu(), minlength=8)
    assert chi_square_p_value(counts, torch.full((8,), 0.125)) > 1e-4


# --------------------------------------------------------------------------------- reproducible


@by_dtype
@pytest.mark.parametrize("vocab", [100, 5000])
def test_a_row_does_not_depend_on_the_batch(
    backend: Backend, dtype: torch.dtype, vocab: int
) -> None:
    """R31: one seeded row alone, and as row i of a batch of 2..256, gives the same token."""
    batch = few(backend, 256, 4)
    logits = (torch.randn(batch, vocab, device=backend.device) * 2).to(dtype)
    rows = mixed_settings(batch, backend.device)
    whole = backend.ops.sample(logits, **rows)
    picks = [[0], [3, 1]]
    if not backend.interpreted:
        picks += [[255], [17], [3, 200], [*range(5, 22)], [*range(64)], [*range(255, -1, -1)]]
    for picked in picks:
        part = {name: row[picked] for name, row in rows.items()}
        token_ids, valid = backend.ops.sample(logits[picked], **part)
        assert_bit_equal(token_ids, whole[0][picked])
        assert_bit_equal(valid, whole[1][picked])
    again = backend.ops.sample(logits, **rows)
    assert_bit_equal(again[0], whole[0])


def test_a_filter_that_is_off_changes_nothing(backend: Backend) -> None:
    batch = few(backend, 200, 6)
    logits = torch.randn(batch, 77, device=backend.device)
    rows = settings(batch, backend.device)
    expected = backend.ops.sample(logits, **rows)[0]
    for name, off in (
        ("top_k", 0),
        ("top_k", 77),
        ("top_k", 10**9),
        ("top_p", 1.0),
        ("min_p", 0.0),
    ):
        ours = backend.ops.sample(logits, **settings(batch, backend.device, **{name: off}))[0]
        assert_bit_equal(ours, expected, name)


@by_dtype
@pytest.mark.parametrize("layout", ["column_slice", "misaligned"])
def test_strided_logits_equal_contiguous(backend: Backend, dtype: torch.dtype, layout: str) -> None:
    """R08: logits as the first columns of a padded vocabulary, the padding being NaN."""
    batch = few(backend, 32, 6)
    logits = torch.randn(batch, 77, device=backend.device).to(dtype)
    rows = mixed_settings(batch, backend.device)
    ours = backend.ops.sample(STRIDED[layout](logits), **rows)
    expected = backend.ops.sample(logits, **rows)
    assert_bit_equal(ours[0], expected[0])
    assert_bit_equal(ours[1], expected[1])


def test_row_offset_beyond_32_bits(backend: Backend) -> None:
    """R06."""
    logits = torch.randn(3, 64, device=backend.device).to(torch.bfloat16)
    rows = settings(3, backend.device)
    ours = backend.ops.sample(far_apart(logits, 2**30 + 8), **rows)
    assert_bit_equal(ours[0], backend.ops.sample(logits, **rows)[0])


def test_overloads_are_equal_and_fill_out(backend: Backend) -> None:
    batch = few(backend, 16, 5)
    logits = torch.randn(batch, 50, device=backend.device)
    rows = mixed_settings(batch, backend.device)
    logits[3, 4] = math.nan
    before = logits.clone()
    packet = backend.library.sample
    token_ids = guarded((batch,), torch.int64, backend.device)
    valid = torch.zeros(batch + 2, dtype=torch.bool, device=backend.device)
    valid[[0, -1]] = True
    assert packet.out(logits, **rows, token_ids=token_ids.view, valid=valid[1:-1]) is None
    token_ids.assert_untouched_around()
    assert valid[0] and valid[-1]
    for result in (packet.default(logits, **rows), backend.ops.sample(logits, **rows)):
        assert_bit_equal(result[0], token_ids.view)
        assert_bit_equal(result[1], valid[1:-1])
    assert valid[1:-1].sum() == batch - 1
    assert_bit_equal(logits, before, "logits")


def test_no_rows(backend: Backend) -> None:
    """R24."""
    logits = torch.empty(0, 50, device=backend.device)
    for rows in ({}, settings(0, backend.device, top_k=3, top_p=0.5, min_p=0.1)):
        token_ids, valid = backend.ops.sample(logits, **rows)
        assert token_ids.shape == (0,) and valid.shape == (0,)
        assert token_ids.dtype == torch.int64 and valid.dtype == torch.bool


# ----------------------------------------------------------------------------- degenerate rows


def both_ways(backend: Backend, logits: Tensor, **filters: float) -> list[tuple[Tensor, Tensor]]:
    """Greedy, sampled, and sampled with filters."""
    batch = logits.shape[0]
    return [
        backend.ops.sample(logits),
        backend.ops.sample(logits, **settings(batch, backend.device)),
        backend.ops.sample(
            logits, **settings(batch, backend.device, top_k=4, top_p=0.9, min_p=0.01)
        ),
    ]


@by_dtype
def test_nan_rows_are_marked_and_stay_in_the_vocabulary(
    backend: Backend, dtype: torch.dtype
) -> None:
    """R30: all NaN, some NaN, and good rows between them."""
    logits = torch.randn(5, 40, device=backend.device).to(dtype)
    logits[1] = math.nan
    logits[3, [0, 7, 39]] = math.nan
    largest = logits[3].nan_to_num(nan=-math.inf).argmax().item()
    clean = logits[[0, 2, 4]]
    for token_ids, valid in both_ways(backend, logits):
        assert valid.tolist() == [True, False, True, False, True]
        assert token_ids[1] == 0 and token_ids[3] == largest
    assert torch.equal(both_ways(backend, logits)[0][0][[0, 2, 4]], both_ways(backend, clean)[0][0])
    rows = settings(5, backend.device)
    good = {name: row[[0, 2, 4]] for name, row in rows.items()}
    assert_bit_equal(
        backend.ops.sample(logits, **rows)[0][[0, 2, 4]], backend.ops.sample(clean, **good)[0]
    )


@by_dtype
def test_rows_of_minus_infinity_are_marked(backend: Backend, dtype: torch.dtype) -> None:
    logits = torch.full((2, 40), -math.inf, device=backend.device).to(dtype)
    logits[1, 9] = -5.0
    for token_ids, valid in both_ways(backend, logits):
        assert valid.tolist() == [False, True]
        assert token_ids.tolist() == [0, 9]


@by_dtype
def test_nan_beside_minus_infinity(backend: Backend, dtype: torch.dtype) -> None:
    logits = torch.full((1, 20), -math.inf, device=backend.device).to(dtype)
    logits[0, 0] = math.nan
    for token_ids, valid in both_ways(backend, logits):
        assert not valid[0] and 0 <= token_ids[0] < 20


@by_dtype
def test_masked_tokens_are_never_drawn(backend: Backend, dtype: torch.dtype) -> None:
    draws = few(backend, 2000, 5)
    logits = torch.full((draws, 30), -math.inf, device=backend.device).to(dtype)
    logits[:, [4, 17, 29]] = torch.tensor([0.0, -1.0, 0.5], device=backend.device).to(dtype)
    for filters in ({}, {"top_k": 10}, {"top_p": 0.99}, {"min_p": 0.01}):
        token_ids, valid = backend.ops.sample(logits, **settings(draws, backend.device, **filters))
        drawn = set(token_ids.tolist())
        assert valid.all() and drawn <= {4, 17, 29}
        assert backend.interpreted or len(drawn) == 3


@by_dtype
def test_one_hot_rows(backend: Backend, dtype: torch.dtype) -> None:
    """R30."""
    logits = torch.full((3, 40), -1e4, device=backend.device).to(dtype)
    hot = [0, 21, 39]
    logits[range(3), hot] = 1e4
    for token_ids, valid in both_ways(backend, logits):
        assert valid.all() and token_ids.tolist() == hot


@by_dtype
def test_only_plus_infinity_is_a_candidate(backend: Backend, dtype: torch.dtype) -> None:
    logits = torch.randn(50, 40, device=backend.device).to(dtype)
    logits[:, [8, 31]] = math.inf
    for token_ids, valid in both_ways(backend, logits):
        assert valid.all() and set(token_ids.tolist()) <= {8, 31}
    assert backend.ops.sample(logits)[0].tolist() == [8] * 50


@pytest.mark.parametrize("top_k", [41, 10**9])
def test_top_k_above_the_vocabulary(backend: Backend, top_k: int) -> None:
    """R30."""
    batch = few(backend, 64, 6)
    logits = torch.randn(batch, 40, device=backend.device)
    rows = settings(batch, backend.device, top_k=top_k)
    token_ids, valid = backend.ops.sample(logits, **rows)
    assert valid.all() and ((token_ids >= 0) & (token_ids < 40)).all()
    check((token_ids, valid), logits, rows)


def test_one_token_vocabulary(backend: Backend) -> None:
    logits = torch.tensor([[3.0], [math.nan], [-math.inf], [math.inf]], device=backend.device)
    for token_ids, valid in both_ways(backend, logits):
        assert token_ids.tolist() == [0] * 4
        assert valid.tolist() == [True, False, False, True]


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0), ("temperature", math.nan), ("top_p", 0.0), ("top_p", -0.5),
        ("top_p", math.nan), ("min_p", -0.1), ("min_p", 1.1), ("min_p", math.nan),
    ],
)  # fmt: skip
def test_senseless_settings_are_refused(backend: Backend, name: str, value: float) -> None:
    if not backend.reads_contents:
        pytest.skip("settings are read on the device, unchecked")
    rows: dict[str, Any] = settings(3, "cpu", top_p=0.9, min_p=0.1)
    rows[name][1] = value
    with pytest.raises(ValueError, match=rf"sample.*{name}"):
        backend.ops.sample(torch.randn(3, 9), **rows)


@pytest.mark.parametrize("name", ["seeds", "positions"])
def test_sampling_without_seeds_or_positions_is_refused(backend: Backend, name: str) -> None:
    if not backend.reads_contents:
        pytest.skip("whether a row needs a seed is read on the device, unchecked")
    rows: dict[str, Any] = settings(3, backend.device)
    del rows[name]
    with pytest.raises(ValueError, match=rf"sample.*{name}"):
        backend.ops.sample(torch.randn(3, 9, device=backend.device), **rows)


def test_an_empty_vocabulary_is_refused(backend: Backend) -> None:
    with pytest.raises(ValueError, match=r"sample.*logits"):
        backend.ops.sample(torch.empty(2, 0, device=backend.device))
