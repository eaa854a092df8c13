"""Drivers of an experiment at launch: look them up, pin them, check and write their keys, estimate their cost."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autorl_hpc.agents import load_agent
from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files import reading, store
from autorl_hpc.files.frozen_records import read_experiment
from autorl_hpc.files.layout import ExperimentDir, Root
from autorl_hpc.files.store import verify_model
from autorl_hpc.records.cluster import ClusterProfile
from autorl_hpc.records.driver import NO_DRIVER, DriverScience, DriverSpec, serve_options
from autorl_hpc.records.experiment import ExperimentSpec


def used(spec: ExperimentSpec) -> dict[str, DriverSpec]:
    """Return the drivers that the matrix names."""
    return {name: spec.drivers[name] for name in spec.matrix.driver if name != NO_DRIVER}


def served(spec: ExperimentSpec) -> Sequence[str]:
    """Return the names of the used drivers that one of our jobs serves (kind `vllm`)."""
    return [name for name, driver in used(spec).items() if driver.kind == "vllm"]


def driver_sciences(root: Root, spec: ExperimentSpec) -> dict[str, DriverScience]:
    """Return the pinned facts of each driver of the matrix. Raises AutorlError: a model is not staged, or was changed."""
    return {
        name: driver.science(model_hash(root, driver.model, f"drivers.{name}.model") if driver.kind == "vllm" else None)
        for name, driver in used(spec).items()
    }


def model_hash(root: Root, name: str, field: str, kind: str = "model") -> str:
    """Return the content hash of a staged model, whose files are checked. Raises AutorlError: not staged, or changed."""
    try:
        manifest = verify_model(root, name)
    except AutorlError as error:
        raise error.of_field(field) from None
    if manifest.content_hash is None:
        what = f"field `{field}`: {kind} {name} was staged without a content hash"
        raise AutorlError(what, where=root.model(name), next_step=f"run: autorl-hpc stage {name} --again")
    return manifest.content_hash


def check_drivers(spec: ExperimentSpec, experiment: ExperimentDir, profile: ClusterProfile | None, where: Path) -> None:
    """Check that keys exist and are private, and that GPUs suffice. No error shows a key. `profile`: None here. Raises AutorlError."""
    for name, driver in used(spec).items():
        if driver.kind == "vllm":
            _check_gpus(name, driver, profile, where)
        elif driver.key_variable is not None and driver.key_variable in os.environ:
            _key_in_variable(name, driver.key_variable, where)
        elif (path := store.key_path(experiment, name, driver)) is not None:
            field, advice = f"drivers.{name}.key_file", "correct it"
            try:
                store.read_key(path)
                continue
            except AutorlError as error:
                what, advice = f"{error.what} ({error.where})", error.next_step or advice
            if driver.key_variable is not None:  # and no earlier launch had it
                field, what = f"drivers.{name}.key_variable", f"${driver.key_variable} is not set"
                advice = f"export {driver.key_variable}=..., then launch again; or use `key_file`"
            what = f"field `{field}`: {what}"
            raise AutorlError(what, where=where, next_step=advice, exit_code=Exit.ENVIRONMENT)


def check_agents_secrets(spec: ExperimentSpec, frozen: Path | None, where: Path) -> None:
    """Raise AutorlError if an agent's `secrets` name a driver's key. `frozen`: the code whose agents run; None: as they are now."""
    variables = {driver.key_variable: name for name, driver in spec.drivers.items() if driver.key_variable is not None}
    folders = None if frozen is None else [frozen / "templates" / "agents"]
    for loaded in (load_agent(agent, folders) for agent in spec.matrix.agent):
        for taken in (variable for variable in loaded.file.secrets if variable in variables):
            what = f"agent {loaded.name} would get the key of driver `{variables[taken]}`: its `secrets` name {taken}"
            advice = f"take {taken} out of its `secrets`: agents find a token of their run in such variables; or give "
            advice += f"the driver another `key_variable`, or a `key_file` ({where})"
            raise AutorlError(what, where=loaded.folder, next_step=advice)


def _key_in_variable(name: str, variable: str, where: Path) -> str:
    try:
        return store.checked_key(os.environ[variable].encode(errors="replace"), f"${variable}")
    except AutorlError as error:
        raise error.of_field(f"drivers.{name}.key_variable", where) from None


def gpus_of(driver: DriverSpec, profile: ClusterProfile | None) -> int:
    """Return the number of GPUs of the driver's job. On this machine all jobs share its GPUs."""
    return driver.gpus or 0 if profile is None else profile.driver.resources(driver.resources).gpus or 0


def _check_gpus(name: str, driver: DriverSpec, profile: ClusterProfile | None, where: Path) -> None:
    gpus, options = gpus_of(driver, profile), serve_options(driver.args)
    needed = driver.tensor_parallel or max(1, gpus)
    for key in ("pipeline-parallel-size", "data-parallel-size"):  # of `vllm serve`: they multiply the GPUs
        value = options.get(key) or "1"
        needed *= int(value) if value.isdigit() else 1
    if gpus and needed > gpus:
        what = f"field `drivers.{name}.tensor_parallel`: the server would need {needed} GPUs, its job has {gpus}"
        advice = f"give `drivers.{name}.gpus: {needed}`, or less parallelism"
        raise AutorlError(what, where=where, next_step=advice)


def lay_keys(spec: ExperimentSpec, experiment: ExperimentDir, where: Path) -> None:
    """Write `drivers/<name>.key`: random for servers of ours, from variables that jobs don't get. Raises AutorlError, OSError."""
    for name, driver in used(spec).items():
        path = experiment.driver_key(name)
        if driver.kind == "vllm":
            if not path.exists():  # a running driver uses the existing key
                store.write_key(path, store.new_key())
        elif driver.key_variable is not None and driver.key_variable in os.environ:
            store.write_key(path, _key_in_variable(name, driver.key_variable, where))


def drop_keys(experiment: ExperimentDir) -> None:
    """Remove the driver keys of an experiment that is over; a launch writes them again."""
    if not set(read_experiment(experiment).runs) <= set(reading.list_names(experiment.finished)):
        return
    for path in experiment.drivers.glob("*.key"):
        path.unlink(missing_ok=True)


def facts(
    spec: ExperimentSpec, profile: ClusterProfile | None, runs: Mapping[str, int], hours: float
) -> list[dict[str, Any]]:
    """Return what drivers may cost, for a dry run. `runs`: by driver; `hours`: for which one is served."""
    found, tokens = [], spec.budget.tokens
    for name, driver in used(spec).items():
        count, gpus = runs.get(name, 0), gpus_of(driver, profile) if driver.kind == "vllm" else None
        limits = [spec.budget.cost_usd, None if tokens is None else driver.dearest_usd(tokens)]
        each = min((limit for limit in limits if limit is not None), default=None)
        row = {"name": name, "kind": driver.kind, "model": driver.model, "runs": count, "priced": driver.fully_priced}
        row["cost_usd_at_most"] = None if each is None else round(each * count, 2)
        row["tokens_at_most"] = None if tokens is None else tokens * count
        row |= {"gpus": gpus, "gpu_hours": None if gpus is None else round(gpus * hours, 2)}
        found.append(row)
    return found


def notes(spec: ExperimentSpec) -> list[str]:
    """Return notes for people on settings that are allowed but may be mistakes."""
    found = []
    for name, driver in used(spec).items():
        if driver.url is not None and VERSIONED.search(driver.url) is None:
            where = f"requests go to {driver.url}/chat/completions and the like"
            found.append(f"driver {name}: note: its url ends without a version such as `/v1`; {where}")
        if driver.kind == "api" and (driver.key_file or driver.key_variable) and spec.sandbox.level in ("auto", "none"):
            when = "at sandbox level none" if spec.sandbox.level == "none" else "on a node where no sandbox level works"
            what = "an agent can read the file with its key, and use it past gateway and budgets"
            found.append(f"driver {name}: WARNING: {when} {what} (demand a level: `sandbox.level`)")
    mixed = NO_DRIVER in spec.matrix.driver and bool(used(spec))
    if mixed and spec.sandbox.network is None and spec.sandbox.level != "none":
        what = "runs with a driver have the network `driver`, those without it `none`, and no leaderboard compares over two"
        found.append(f"drivers: note: {what} networks; `sandbox: {{network: driver}}` gives all of them the same")
    return found


VERSIONED = re.compile(r"/(v\d+\w*|openai)$")  # how the addresses of known APIs end


def lines(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rows of `facts` as lines for people."""
    told = []
    for row in found:
        parts = []
        if row["tokens_at_most"] is not None:
            parts.append(f"at most {row['tokens_at_most']:,} tokens")
        if row["cost_usd_at_most"] is not None:
            parts.append(f"costs at most {row['cost_usd_at_most']:,.2f} US dollars")
        elif row["kind"] == "api" and not row["priced"]:
            parts.append("cost unknown: it needs both prices (`price_in`, `price_out`)")
        elif row["kind"] == "api":
            parts.append("cost without a limit: set `budget.cost_usd` or `budget.tokens`")
        if row["gpus"] is not None:
            gpus = f"{row['gpus']} GPU{'' if row['gpus'] == 1 else 's'}"
            parts.append(f"its job has {gpus}, about {row['gpu_hours']} GPU-hours while agents run")
        told.append(f"driver {row['name']} ({row['kind']}, {row['model']}), {row['runs']} runs: {'; '.join(parts)}")
    return told
