"""An experiment's drivers: looked up and pinned."""

from __future__ import annotations

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import Root
from autorl_hpc.files.store import verify_model
from autorl_hpc.records.driver import NO_DRIVER, DriverScience
from autorl_hpc.records.experiment import ExperimentSpec


def driver_sciences(root: Root, spec: ExperimentSpec) -> dict[str, DriverScience]:
    """What answers behind each driver of the matrix.

    Raises:
        AutorlError: a model to be served is not staged, or was changed.
    """
    found = {}
    for name in spec.matrix.driver:
        if name != NO_DRIVER:
            driver = spec.drivers[name]
            found[name] = driver.science(_model_hash(root, name, driver.model) if driver.kind == "vllm" else None)
    return found


def _model_hash(root: Root, driver: str, model: str) -> str:
    field = f"field `drivers.{driver}.model`"
    try:
        manifest = verify_model(root, model)
    except AutorlError as error:
        raise AutorlError(
            f"{field}: {error.what}",
            where=error.where,
            fault=error.fault,
            next_step=error.next_step,
            exit_code=error.exit_code,
        ) from None
    if manifest.content_hash is None:
        raise AutorlError(
            f"{field}: model {model} was staged without a content hash",
            where=root.model(model),
            next_step=f"run: autorl-hpc stage {model} --again",
        )
    return manifest.content_hash
