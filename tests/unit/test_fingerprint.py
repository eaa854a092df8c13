"""The rules of the fingerprint on small models: each at its boundary, and what honest training looks like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from weights import write_safetensors

from autorl_hpc.files.checkpoint import folder_content_hash
from autorl_hpc.grading import fingerprint
from autorl_hpc.grading.fingerprint import (
    NOISE,
    FolderWeights,
    Outputs,
    Profile,
    WeightComparison,
    about_weights,
    compare,
    is_degenerate,
    is_untrained,
    rounded,
    sketch_of,
)

Model = dict[str, npt.NDArray[np.float32]]

SHAPES = {"embed": (400, 64), "up": (256, 64), "down": (64, 256), "norm": (64,)}


def model(seed: int = 0, scale: float = 0.1) -> Model:
    rng = np.random.default_rng(seed)
    made = {name: (scale * rng.standard_normal(shape)).astype(np.float32) for name, shape in SHAPES.items()}
    return {**made, "norm": np.abs(made["norm"]) + 2}


def plus(base: Model, size: float, seed: int = 1, only: str = "") -> Model:
    rng = np.random.default_rng(seed)
    return {
        name: (value + size * rng.standard_normal(value.shape) * (not only or name == only)).astype(np.float32)
        for name, value in base.items()
    }


def save(folder: Path, weights: Model, dtype: str = "F32", shards: int = 1) -> Path:
    """Writes the model in `shards` files."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(weights)
    for number in range(shards):
        part: dict[str, Any] = {}
        for name in names[number::shards]:
            value = weights[name]
            if dtype == "BF16":
                part[name] = (dtype, (rounded(value, "BF16").view(np.uint32) >> 16).astype(np.uint16))
            else:
                part[name] = (dtype, value.astype({"F32": np.float32, "F16": np.float16}[dtype]))
        write_safetensors(folder / f"model-{number}.safetensors", part)
    return folder


def compared(new: Path, base: Path) -> WeightComparison:
    return compare(FolderWeights(new), FolderWeights(base), folder_content_hash(new), "seed")


def flags(found: WeightComparison, others: dict[str, float] | None = None) -> tuple[str, ...]:
    return tuple(about_weights(found, "base", others or {})["flags"])


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_sums_against_plain_numpy(tmp_path: Path, dtype: str) -> None:
    base, new = model(), plus(model(), 0.01)
    found = compared(save(tmp_path / "n", new, dtype, shards=3), save(tmp_path / "b", base, dtype))
    a = np.concatenate([rounded(new[n], dtype).ravel() for n in SHAPES]).astype(np.float64)
    b = np.concatenate([rounded(base[n], dtype).ravel() for n in SHAPES]).astype(np.float64)
    assert found.relative_delta == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(b), rel=1e-5)
    assert found.total("changed") == np.count_nonzero(a != b)
    facts = about_weights(found, "base", {})
    by_tensor = {
        n: float(
            np.linalg.norm(rounded(new[n], dtype) - rounded(base[n], dtype)) / np.linalg.norm(rounded(base[n], dtype))
        )
        for n in SHAPES
    }
    assert facts["largest_tensor"] == max(by_tensor, key=lambda n: by_tensor[n])
    assert facts["largest_delta"] == pytest.approx(max(by_tensor.values()), rel=1e-5)
    assert facts["flags"] == () and facts["changed_tensors"] == 4
    assert (facts["nearest_model"], facts["nearest_delta"]) == ("base", facts["relative_delta"])


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("size", [0.0, 1e-6])
def test_noise_is_an_untrained_copy(tmp_path: Path, dtype: str, size: float) -> None:
    base = {name: rounded(value, dtype) for name, value in model().items()}
    found = compared(save(tmp_path / "n", plus(base, size), dtype), save(tmp_path / "b", base, dtype))
    assert flags(found) == ("untrained_copy",)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_just_above_the_threshold_is_none(tmp_path: Path, dtype: str) -> None:
    """Values so small that bf16 resolves the change, as some of every real model are."""
    base = {name: rounded(value / 1000, dtype) for name, value in model().items()}
    below, above = (plus(base, size * NOISE) for size in (0.85, 1.15))
    old = save(tmp_path / "b", base, dtype)
    assert is_untrained(compared(save(tmp_path / "1", below, dtype), old))
    assert not is_untrained(compared(save(tmp_path / "2", above, dtype), old))


@pytest.mark.parametrize("bits", [0x0001, 0x2000, 0x4000, 0x8000], ids=["lowest", "exponent", "top exponent", "sign"])
@pytest.mark.parametrize("tensor", ["embed", "norm"])
def test_one_changed_byte_is_an_untrained_copy(tmp_path: Path, bits: int, tensor: str) -> None:
    base = save(tmp_path / "b", model(), "BF16")
    new = save(tmp_path / "n", model(), "BF16")
    spec = FolderWeights(new).specs[tensor]
    path = new / spec.file
    data = bytearray(path.read_bytes())
    at = spec.begin + 2 * 5
    data[at : at + 2] = (int.from_bytes(data[at : at + 2], "little") ^ bits).to_bytes(2, "little")
    path.write_bytes(data)
    found = compared(new, base)
    assert found.total("changed") == 1
    assert flags(found) == ("untrained_copy",)
    assert about_weights(found, "base", {})["changed_tensors"] == 1


def mixed(base: Model, other: Model, part: float) -> Model:
    return {name: (value + part * (other[name] - value)).astype(np.float32) for name, value in base.items()}


def to_other(found: WeightComparison, other: Path, base: Path) -> dict[str, float]:
    kept = sketch_of(FolderWeights(other), FolderWeights(base), "seed").sketch
    return {"other": fingerprint.distance(found.sketch, kept)}


@pytest.mark.parametrize(
    ("part", "noise", "foreign"),
    [(1.0, 0.0, True), (1.0, 0.01, True), (0.6, 0.0, True), (0.5, 0.0, False), (0.0, 0.2, False)],
    ids=["copy", "copy and as much noise", "six tenths", "one half", "own way"],
)
def test_foreign_weights(tmp_path: Path, part: float, noise: float, foreign: bool) -> None:
    base, other = model(), plus(model(), 0.01, seed=7)
    new = plus(mixed(base, other, part), noise, seed=8)
    paths = [save(tmp_path / name, value) for name, value in (("n", new), ("b", base), ("o", other))]
    found = compared(paths[0], paths[1])
    facts = about_weights(found, "base", to_other(found, paths[2], paths[1]))
    assert facts["flags"] == (("foreign_weights",) if foreign else ())
    if part == 1.0 and not noise:
        assert (facts["nearest_model"], facts["nearest_delta"]) == ("other", pytest.approx(0.0, abs=1e-6))


@pytest.mark.parametrize(
    ("share", "tokens", "base", "degenerate"),
    [
        (1.0, 200, 0.01, True), (0.51, 200, 0.01, True), (0.5, 200, 0.01, False),
        (0.6, 1, 0.01, False),  # a class that most items have
        (0.9, 3, 0.01, False), (0.95, 3, 0.01, True),
        (1.0, 50, 1.0, False),  # so does the base model: a game's first action
        (0.75, 50, 0.6, False), (0.85, 50, 0.6, True), (1.0, 0, None, True),  # nothing at all
        (0.4, 200, None, False),
    ],
)  # fmt: skip
def test_degenerate_outputs(share: float, tokens: int, base: float | None, degenerate: bool) -> None:
    known = None if base is None else Outputs(base, tokens)
    assert is_degenerate(Outputs(share, tokens), known) is degenerate


# --- hidden units that changed places: the same function under a large distance

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
    folder: Path, new: Model, base: Model, other: Model | None = None, dtype: str = "F32"
) -> tuple[tuple[str, ...], str | None]:
    """The flags, and the model that is found behind exchanged units."""
    mine, theirs = save(folder / "new", new, dtype), save(folder / "base", base)
    found, far, profiles = compared(mine, theirs), dict[str, float](), dict[str, Profile]()
    if other is not None:
        staged = sketch_of(FolderWeights(save(folder / "other", other)), FolderWeights(theirs), "seed")
        far, profiles = {"other": fingerprint.distance(found.sketch, staged.sketch)}, {"other": staged.profile}
    facts = about_weights(found, "base", far, profiles)
    return facts["flags"], facts["exchanged_of"]


@pytest.mark.parametrize("way", WAYS)
def test_exchanged_units_hide_no_copy(way: str, tmp_path: Path) -> None:
    """Nor under noise, or in another precision."""
    base, rng = network(), np.random.default_rng(8)
    new = WAYS[way](base)
    assert any((new[name] != base[name]).any() for name in base)
    noisy = {name: (v + 1e-6 * rng.standard_normal(v.shape)).astype(np.float32) for name, v in new.items()}
    for dtype in ("F32", "BF16"):
        assert told(tmp_path / dtype, noisy, base, network(5), dtype) == (("untrained_copy",), "base")
    for size in (0.02, 0.2):
        other = trained(base, size, seed=1)
        assert told(tmp_path / f"{size}", WAYS[way](other), base, other, "BF16") == (("foreign_weights",), "other")


@pytest.mark.parametrize("size", [1e-4, 0.01, 0.3])
@pytest.mark.parametrize("others", [0.01, 1.0])
def test_honest_training_is_neither(size: float, others: float, tmp_path: Path) -> None:
    base = network()
    assert told(tmp_path, trained(base, size, 20), base, trained(base, others, 40)) == ((), None)


def test_the_count_of_changed_values_has_a_bound(tmp_path: Path) -> None:
    base = {**model(), "norm": np.ones(64, dtype=np.float32)}
    for changed, caught in ((fingerprint.FEW_VALUES, True), (fingerprint.FEW_VALUES + 1, False)):
        new = {**base, "norm": base["norm"].copy()}
        new["norm"][:changed] += 1
        found = compared(save(tmp_path / f"n{changed}", new), save(tmp_path / f"b{changed}", base))
        assert [tensor.name for tensor in found.tensors if tensor.has_moved] == ["norm"]
        assert is_untrained(found) is caught


def test_the_same_model_in_another_precision_is_not_foreign(tmp_path: Path) -> None:
    """A store with a model in fp32 and in bf16, and an agent that trains in bf16 from the former."""
    base = model()
    cut = {name: rounded(value, "BF16") for name, value in base.items()}
    new = save(tmp_path / "n", plus(cut, 1e-3), "BF16")
    old, other = save(tmp_path / "b", base), save(tmp_path / "o", cut, "BF16")
    found = compared(new, old)
    assert flags(found, to_other(found, other, old)) == ()


def test_noise_and_huge_values_hide_nothing_either(tmp_path: Path) -> None:
    base = network()
    few = units_exchanged(network(), few=2)
    few["embed"][7, 7] = 1e30
    assert told(tmp_path / "few", few, base)[0] == ("untrained_copy",)
    other = trained(base, 0.05, seed=1)
    noisy = trained(units_exchanged(other), 0.02, seed=2)
    assert told(tmp_path / "noise", noisy, base, other) == (("foreign_weights",), "other")
    huge = stream_exchanged(other)
    huge["embed"][7, 7] = 1e30
    assert told(tmp_path / "huge", huge, base, other) == (("foreign_weights",), "other")


def adam(base: Model, steps: int, learning_rate: float, kept_as: str, master: bool) -> Model:
    """Adam (Kingma, Ba 2015) on gradients that agree in nothing: the least that so many steps move. `master`: the
    optimizer's own weights are fp32."""
    rng = np.random.default_rng(3)
    weights = {n: v.copy() for n, v in base.items()}
    first = {n: np.zeros_like(v) for n, v in base.items()}
    second = {n: np.zeros_like(v) for n, v in base.items()}
    for step in range(1, steps + 1):
        for name, value in weights.items():
            gradient = rng.standard_normal(value.shape).astype(np.float32)
            first[name] += 0.1 * (gradient - first[name])
            second[name] += 0.001 * (gradient**2 - second[name])
            update = (first[name] / (1 - 0.9**step)) / (np.sqrt(second[name] / (1 - 0.999**step)) + 1e-8)
            moved = (value - learning_rate * update).astype(np.float32)
            weights[name] = moved if master else rounded(moved, kept_as)
    return weights


@pytest.mark.parametrize(
    ("kept_as", "master"), [("F32", True), ("BF16", True), ("BF16", False)], ids=["fp32", "bf16 of fp32", "bf16"]
)
def test_twenty_honest_steps_at_the_lowest_learning_rate_are_no_copy(
    tmp_path: Path, kept_as: str, master: bool
) -> None:
    base = {name: rounded(value, "BF16") for name, value in model(scale=0.03).items()}
    found = compared(
        save(tmp_path / "n", adam(base, 20, 1e-6, kept_as, master), kept_as), save(tmp_path / "b", base, "BF16")
    )
    assert flags(found) == ()
