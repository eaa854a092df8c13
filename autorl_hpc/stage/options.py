"""The options of `autorl-hpc stage`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Names = Annotated[
    list[str] | None,
    typer.Argument(
        help="Tasks, base models and environments: arithmetic, gsm8k, tiny, ORG/MODEL[@REVISION], env:NAME.",
        show_default=False,
    ),
]
Source = Annotated[
    Path | None,
    typer.Option(
        "--from",
        help="Folder (of a task DIR/TASK, if there is one), wheel, image or bundle with the source files, instead of a download.",
    ),
]
Bundle = Annotated[
    Path | None,
    typer.Option("--bundle", help="Pack what is named into this file (.tar.zst, .tar.gz, .tar), for --from elsewhere."),
]
Requirements = Annotated[Path | None, typer.Option("--requirements", help="What env:NAME is made of, as pip reads it.")]
Again = Annotated[bool, typer.Option("--again", help="Stage anew what is staged already.")]
KeepSources = Annotated[bool, typer.Option("--keep-sources", help="Keep what was downloaded, for another staging.")]
