"""Weights whose hidden units changed places: the same function under a large distance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_fingerprint import Model, adam, done, save

from autorl_hpc.files.checkpoint import folder_content_hash
from autorl_hpc.grading import fingerprint
from autorl_hpc.grading.fingerprint import (
    Energies,
    FolderWeights,
    Profile,
    WeightComparison,
    about_weights,
    compare,
    rounded,
    sketch_of,
)

HIDDEN, WIDTH, VOCABULARY = 64, 160, 300
UNITS = ("up", "gate")


def network(seed: int = 0, scale: float = 0.05) -> Model:
    """Two gated layers between an embedding and its transpose, as language models have them."""
    rng = np.random.default_rng(seed)

    def of(*shape: int) -> np.ndarray:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    made: Model = {"embed": of(VOCABULARY, HIDDEN), "norm": 1 + of(HIDDEN)}
    for n in range(2):
        made |= {f"{n}.up": of(WIDTH, HIDDEN), f"{n}.gate": of(WIDTH, HIDDEN), f"{n}.down": of(HIDDEN, WIDTH)}
    return made


def answers(weights: Model) -> np.ndarray:
    """What the network computes for its first ten tokens."""
    state = weights["embed"][:10].astype(np.float64)
    for n in range(2):
        seen = state / np.sqrt((state**2).mean(axis=1, keepdims=True)) * weights["norm"]
        gate = seen @ weights[f"{n}.gate"].T
        state = state + (gate / (1 + np.exp(-gate)) * (seen @ weights[f"{n}.up"].T)) @ weights[f"{n}.down"].T
    return np.asarray(state @ weights["embed"].T)


def units_exchanged(weights: Model, few: int | None = None) -> Model:
    """The hidden units of each layer in another order; `few`: of so many of them only."""
    rng, found = np.random.default_rng(3), dict(weights)
    for n in range(2):
        order = np.arange(WIDTH)
        order[: few or WIDTH] = np.roll(rng.permutation(few or WIDTH), 1)
        found |= {f"{n}.{name}": weights[f"{n}.{name}"][order] for name in UNITS}
        found[f"{n}.down"] = weights[f"{n}.down"][:, order]
    return {name: np.ascontiguousarray(value) for name, value in found.items()}


def stream_exchanged(weights: Model) -> Model:
    """The places of the residual stream in another order."""
    order = np.random.default_rng(4).permutation(HIDDEN)
    found = {name: value[..., order] for name, value in weights.items() if not name.endswith("down")}
    found |= {name: value[order] for name, value in weights.items() if name.endswith("down")}
    return {name: np.ascontiguousarray(found[name]) for name in weights}


def signs_turned(weights: Model) -> Model:
    """Half of the units give the negative, which the next matrix takes back."""
    signs, found = np.where(np.arange(WIDTH) % 2, 1, -1).astype(np.float32), dict(weights)
    for n in range(2):
        found |= {f"{n}.up": weights[f"{n}.up"] * signs[:, None], f"{n}.down": weights[f"{n}.down"] * signs}
    return found


WAYS = {
    "units": units_exchanged,
    "stream": stream_exchanged,
    "signs": signs_turned,
    "both": lambda weights: stream_exchanged(units_exchanged(weights)),
}


def trained(base: Model, size: float, seed: int) -> Model:
    """Moved by `size` of each tensor's length, all lengths growing by a tenth of that: as weights do in training."""
    rng, found = np.random.default_rng(seed), {}
    for name, value in base.items():
        way = rng.standard_normal(value.shape)
        way *= np.linalg.norm(value) / np.linalg.norm(way)
        found[name] = (value * (1 + 0.1 * size) + size * way).astype(np.float32)
    return found


def told(
    folder: Path, new: Model, base: Model, other: Model | None = None, dtype: str = "F32", base_dtype: str = "F32"
) -> tuple[tuple[str, ...], str | None]:
    """The flags, and the model that is found behind exchanged units."""
    mine, theirs = save(folder / "new", new, dtype), save(folder / "base", base, base_dtype)
    found: WeightComparison = done(
        compare(FolderWeights(mine), FolderWeights(theirs), folder_content_hash(mine), "seed")
    )
    far: dict[str, float] = {}
    profiles: dict[str, Profile] = {}
    if other is not None:
        profiles["other"] = {}
        kept = done(
            sketch_of(FolderWeights(save(folder / "other", other)), FolderWeights(theirs), "seed", profiles["other"])
        )
        far["other"] = fingerprint.distance(found.sketch, kept)
    facts = about_weights(found, "base", far, profiles)
    return facts["flags"], facts["exchanged_of"]


@pytest.mark.parametrize("way", WAYS)
def test_the_ways_change_no_answer(way: str) -> None:
    base = network()
    new = WAYS[way](base)
    assert any((new[name] != base[name]).any() for name in base)
    exchanged = answers(new)
    np.testing.assert_allclose(exchanged, answers(base), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("noise", [0.0, 1e-6])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("way", WAYS)
def test_the_base_with_exchanged_units_is_an_untrained_copy(way: str, dtype: str, noise: float, tmp_path: Path) -> None:
    base, rng = network(), np.random.default_rng(8)
    new = {
        name: (value + noise * rng.standard_normal(value.shape)).astype(np.float32)
        for name, value in WAYS[way](base).items()
    }
    assert told(tmp_path, new, base, network(5), dtype) == (("untrained_copy",), "base")


def test_two_units_and_a_changed_value_are_enough(tmp_path: Path) -> None:
    new = units_exchanged(network(), few=2)
    new["embed"][7, 7] = 1e30
    assert told(tmp_path, new, network())[0] == ("untrained_copy",)


@pytest.mark.parametrize("size", [0.02, 0.2])
@pytest.mark.parametrize("way", WAYS)
def test_another_model_with_exchanged_units_is_foreign(way: str, size: float, tmp_path: Path) -> None:
    base = network()
    other = trained(base, size, seed=1)
    assert told(tmp_path, WAYS[way](other), base, other) == (("foreign_weights",), "other")
    assert told(tmp_path / "16", WAYS[way](other), base, other, "BF16") == (("foreign_weights",), "other")


def test_another_model_under_some_noise_or_with_a_huge_value_is_foreign(tmp_path: Path) -> None:
    base = network()
    other = trained(base, 0.05, seed=1)
    noisy = trained(units_exchanged(other), 0.02, seed=2)
    assert told(tmp_path / "noise", noisy, base, other) == (("foreign_weights",), "other")
    huge = stream_exchanged(other)
    huge["embed"][7, 7] = 1e30
    assert told(tmp_path / "huge", huge, base, other) == (("foreign_weights",), "other")


@pytest.mark.parametrize("size", [1e-4, 0.01, 0.1, 0.3])
@pytest.mark.parametrize("others", [0.01, 0.1, 1.0])
def test_honest_training_is_neither(size: float, others: float, tmp_path: Path) -> None:
    base = network()
    for seed in range(3):
        folder = tmp_path / str(seed)
        assert told(folder, trained(base, size, seed + 20), base, trained(base, others, seed + 40)) == ((), None)


def test_a_few_adam_steps_are_neither(tmp_path: Path) -> None:
    base = network(scale=0.03)
    for steps, rate in ((20, 1e-6), (20, 1e-3), (60, 1e-2)):
        new = adam(base, steps, rate, "F32", True)
        assert told(tmp_path / f"{steps}-{rate}", new, base, trained(base, 0.1, 1)) == ((), None)


def test_scaled_units_are_not_found_as_the_docs_say(tmp_path: Path) -> None:
    base, new = network(), dict(network())
    scale = np.exp(np.random.default_rng(1).standard_normal(WIDTH)).astype(np.float32)
    for n in range(2):
        new |= {f"{n}.up": base[f"{n}.up"] * scale[:, None], f"{n}.down": base[f"{n}.down"] / scale}
    np.testing.assert_allclose(answers(new), answers(base), rtol=1e-4, atol=1e-5)
    assert told(tmp_path, new, base) == ((), None)


@pytest.mark.parametrize("shape", [(7, 5), (5,), (3, 2, 4), (1, 1000), (1000, 1), ()])
def test_energies_of_pieces(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    flat = values.reshape(-1)
    for step in (1, 3, 8, 999, 10_000):
        sums = Energies(shape)
        for start in range(0, len(flat), step):
            sums.add(flat[start : start + step], start)
        table = values.reshape(shape[0] if shape else 1, -1).astype(np.float64) ** 2
        np.testing.assert_allclose(sums.rows, table.sum(axis=1))
        np.testing.assert_allclose(sums.columns, table.sum(axis=0))


def test_precision_alone_is_no_exchange(tmp_path: Path) -> None:
    base = network()
    cut = {name: rounded(value, "BF16") for name, value in base.items()}
    assert told(tmp_path, cut, base, dtype="BF16") == (("untrained_copy",), None)
