"""The model that is trained and the one that samples: loaded, kept equal, saved, and taken up again.

Copied into `code/` of a workspace and used from there; nothing here is part of the suite itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import machine
from sampler import Sampler
from sampler_rows import ROWS, RowSampler, open_rows
from sampler_vllm import VllmSampler, open_vllm, vllm_is_there
from words import Words, ends_of

SWITCH = "EXPERT_SAMPLER"
"""Variable: `rows`, `vllm` or `transformers` in place of the first of these that suits."""
WEIGHT_DECAY = 0.0
BETAS = (0.9, 0.95)


class Policy:
    """A model under accelerate with its optimiser, and a sampler with the same weights.

    Args:
        samples: whether a sampler is needed: for RL, and wherever the model plays.
        supervised: the learning rate is that of supervised training; else RL's.
        rows: conversations that are under way at a time.
    """

    def __init__(
        self,
        folder: Path,
        recipe: Mapping[str, Any],
        *,
        lora: bool,
        samples: bool = True,
        supervised: bool = False,
        rows: int = ROWS,
    ) -> None:
        import torch
        from accelerate import Accelerator
        from accelerate.utils import set_seed

        set_seed(machine.seed())
        self.folder, self.lora = folder, lora
        model, tokenizer = machine.load(folder, lora=lora)
        self.small = machine.is_small(model)
        gpu = torch.cuda.is_available()
        half = gpu and not self.small
        sharded = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"  # which chooses the device itself
        self.accelerator = Accelerator(cpu=not gpu and not sharded, mixed_precision="bf16" if half else "no")
        self.accelerator.print(
            f"{self.accelerator.distributed_type}, {self.accelerator.num_processes} processes", flush=True
        )
        if self.accelerator.state.deepspeed_plugin is not None:
            self.accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
        self.rate = machine.rates(model, lora=lora)[int(not supervised)]
        self.limit = int(model.config.max_position_embeddings)
        model.config.use_cache = False
        if machine.count(model) > machine.CHECKPOINTED_PARAMETERS:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.words = Words(tokenizer, ends_of(model), recipe.get("stop") or [])
        if lora:
            from peft import get_peft_model

            model = get_peft_model(model, machine.lora_config())
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        fused = gpu and not sharded
        optimizer = torch.optim.AdamW(trained, lr=self.rate, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=fused)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.sampler = self._sampler(int(recipe["max_new_tokens"]), gpu, rows) if samples else None
        if samples and not isinstance(self.sampler, (VllmSampler, RowSampler)):  # which have just read them
            self.hand_over()

    def _sampler(self, new_tokens: int, gpu: bool, rows: int) -> Any:
        """By rows; vLLM's; or a copy, in bfloat16 where there is a GPU; or, on a CPU or with a toy, the trained model itself, unless its
        weights are spread over processes: these don't sample in step."""
        import torch

        half = gpu and not self.small
        wanted = os.environ.get(SWITCH, "")
        little = machine.count(self.model) < machine.CHECKPOINTED_PARAMETERS
        plain = self.accelerator.unwrap_model(self.model)
        whole = self.accelerator.state.deepspeed_plugin is None and not self.lora
        if whole and (wanted == "rows" or (not wanted and half and little)):
            by_rows = open_rows(plain, self.words, max_new_tokens=new_tokens, rows=rows, half=half)
            if by_rows is not None:
                return by_rows
        if wanted in ("", "vllm", "rows") and vllm_is_there() and not self.small:
            sampler = open_vllm(
                self.folder, self.words, max_new_tokens=new_tokens, max_tokens=self.limit, seed=machine.seed()
            )
            if sampler is not None:
                return sampler
        if not half and self.accelerator.state.deepspeed_plugin is None:
            return Sampler(plain, self.words, max_new_tokens=new_tokens)
        from transformers import AutoModelForCausalLM

        dtype = torch.bfloat16 if half else torch.float32
        plugin = self.accelerator.state.deepspeed_plugin
        with contextlib.nullcontext() if plugin is None else _loaded_whole(plugin):
            copy = AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype).to(self.accelerator.device)
        return Sampler(copy.requires_grad_(False), self.words, max_new_tokens=new_tokens)

    def hand_over(self) -> None:
        """Gives the trained weights to the sampler. All processes call it."""
        if self.sampler is None:
            return
        import torch

        if isinstance(self.sampler, RowSampler):
            self.sampler.take(self._weights())
            return
        if isinstance(self.sampler, VllmSampler):
            place = self.folder.resolve().parent / ".sampler"
            if self.accelerator.is_main_process:
                place.mkdir(exist_ok=True)
            self.save(place / "weights")
            self.sampler.update(place / "weights")
            return
        if self.sampler.model is self.accelerator.unwrap_model(self.model):
            return
        targets = dict(self.sampler.model.named_parameters())
        with torch.no_grad():
            for name, value in self._weights():
                targets[name].copy_(value)

    def _weights(self) -> Iterator[tuple[str, Any]]:
        """Each weight by its name in the plain model, gathered where ZeRO-3 has taken it apart, with its adapter added."""
        plain = self.accelerator.unwrap_model(self.model)
        if not self.lora:
            for name, parameter in plain.named_parameters():
                with _whole(parameter):
                    yield name, parameter
            return
        from peft.tuners.lora import LoraLayer

        layers = {name: module for name, module in plain.named_modules() if isinstance(module, LoraLayer)}
        for name, parameter in plain.get_base_model().named_parameters():
            if "lora_" in name:
                continue
            holder = f"base_model.model.{name.removesuffix('.weight').removesuffix('.base_layer')}"
            delta = layers[holder].get_delta_weight("default") if holder in layers and name.endswith("weight") else 0.0
            yield name.replace(".base_layer", ""), parameter.float() + delta

    def save(self, out: Path) -> None:
        """Writes a checkpoint that can be submitted. All processes call it."""
        machine.save(self.accelerator, self.model, self.folder, out, lora=self.lora)

    def keep(self, folder: Path, progress: Mapping[str, Any], number: int) -> None:
        """Writes weights, optimiser, random states and progress; the newest whole one is found again. All processes call it."""
        partial, target = folder / "partial", folder / f"{number:06d}"
        if self.accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(partial))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            (partial / "progress.json").write_text(json.dumps(progress), encoding="ascii")
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
            for older in folder.glob("[0-9]*"):
                if older != target:
                    shutil.rmtree(older, ignore_errors=True)

    def take_up(self, folder: Path) -> dict[str, Any] | None:
        """Loads the newest state that was kept, and returns its progress; None where there is none."""
        found = sorted(folder.glob("[0-9]*/progress.json"))
        if not found:
            return None
        self.accelerator.load_state(str(found[-1].parent))
        self.hand_over()
        progress: dict[str, Any] = json.loads(found[-1].read_text(encoding="ascii"))
        self.accelerator.print(f"going on from iteration {progress['iteration']}", flush=True)
        return progress


def _whole(parameter: Any) -> Any:
    """A context in which a parameter is whole."""
    if not hasattr(parameter, "ds_id"):
        return contextlib.nullcontext()
    import deepspeed  # type: ignore[import-not-found,unused-ignore]

    return deepspeed.zero.GatheredParameters([parameter])


@contextlib.contextmanager
def _loaded_whole(plugin: Any) -> Iterator[None]:
    """Models that are loaded meanwhile stay whole: under ZeRO-3 transformers takes each of them apart while it knows of a plugin's
    configuration. `zero3_init_context_manager` of accelerate leaves that one in place where `zero3_init_flag` is off."""
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        plugin.dschf = None
        plugin.set_deepspeed_weakref()
