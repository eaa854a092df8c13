"""Llama's forward pass over a cache that stays: each conversation has a row of it and goes on where it was.

The weights are a copy of a transformers model's, in what sampling computes in; only decoders without biases and with plain
rotary positions are taken. On a GPU a step is one CUDA graph: the processor has other things to do than to launch 600 kernels
for some tokens. Copied into `code/` of a workspace and used from there; nothing here is part of the suite itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

WIDTH, WIDE = 512, 2048
"""Columns that the cache grows by, on a processor and on a GPU: each width has graphs of its own there, and attention reads no more than a
row holds."""
STEPS = (32, 64, 128, 256)
"""Rows of a step that is one graph, or all of them: those that answer nothing cost nothing."""
CHUNKS = ((256, 16), (1024, 64), (4096, 64))
"""New tokens of some prompts that are one graph, and these prompts; what is longer is computed without."""


class Layer(NamedTuple):
    """One layer's weights."""

    before: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    after: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def unlike(config: Any) -> str | None:
    """Why a model is none that is computed here; None if it is one."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if config.model_type != "llama":
        return f"a {config.model_type}"
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        return "it has biases"
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        return "its positions are scaled"
    return None if config.hidden_act == "silu" else f"its activation is {config.hidden_act}"


class Decoder:
    """Weights, cache and what is under way in each row, all on the device.

    Attributes:
        width: columns of the cache.
        active: rows that are answering, bool, [rows + 1]: behind them is nobody's row, for what graphs are filled up with.
        counts: tokens answered, [rows + 1].
        said, logps: these tokens and their log-probabilities, [rows + 1, most].
    """

    def __init__(self, model: Any, rows: int, most: int, dtype: torch.dtype, ending: torch.Tensor) -> None:
        self.config, self.rows, self.most = model.config, rows, most
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, dtype
        config = self.config
        self.heads = config.num_attention_heads
        self.shared = getattr(config, "num_key_value_heads", None) or self.heads
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self._targets: dict[str, torch.Tensor] = {}
        self._layers = [self._layer(number) for number in range(config.num_hidden_layers)]
        self._embedding = self._new("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._norm = self._new("model.norm.weight", config.hidden_size)
        tied = bool(config.tie_word_embeddings)
        self._head = self._embedding if tied else self._new("lm_head.weight", config.vocab_size, config.hidden_size)
        self._frequencies = model.model.rotary_emb.inv_freq.float().to(self.device)
        self.graphs = self.device.type == "cuda"
        self.flash = self.graphs and dtype == torch.bfloat16
        self._captured: dict[tuple[Any, ...], tuple[Any, list[torch.Tensor]]] = {}
        self.width = 0
        self._keys = self._values = torch.zeros(0)
        self._ending = ending.to(self.device)
        lines = rows + 1
        self._bounds = torch.arange(lines + 1, dtype=torch.int32, device=self.device)
        self._tokens = torch.zeros(lines, dtype=torch.long, device=self.device)
        self._places = torch.zeros(lines, dtype=torch.long, device=self.device)
        self._draws = torch.zeros(lines, most, device=self.device)
        self.active = torch.zeros(lines, dtype=torch.bool, device=self.device)
        self.counts = torch.zeros(lines, dtype=torch.long, device=self.device)
        self.said = torch.zeros(lines, most, dtype=torch.long, device=self.device)
        self.logps = torch.zeros(lines, most, device=self.device)

    @property
    def bytes_a_token(self) -> int:
        """Of a row's cache."""
        return 2 * len(self._layers) * self.shared * self.dim * self.dtype.itemsize

    def take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Other weights, by their names in the transformers model. What is cached was computed by the old ones.

        Raises:
            ValueError: some are missing.
        """
        missing = set(self._targets)
        with torch.no_grad():
            for name, weight in weights:
                if name in self._targets:
                    self._targets[name].copy_(weight)
                    missing.discard(name)
        if missing:
            raise ValueError(f"no weights for {', '.join(sorted(missing)[:3])}")

    def widen(self, width: int) -> None:
        """Makes the cache at least so wide; what is in it stays.

        Raises:
            torch.OutOfMemoryError: there is no room for it; all is as before.
        """
        step = WIDE if self.graphs else WIDTH
        wanted = -(-width // step) * step
        if wanted <= self.width:
            return
        shape = (len(self._layers), self.rows + 1, wanted, self.shared, self.dim)
        keys, values = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        if self.width:
            keys[:, :, : self.width], values[:, :, : self.width] = self._keys, self._values
        self._captured.clear()
        self._keys, self._values, self.width = keys, values, wanted

    def copy(self, source: int, target: int, length: int) -> None:
        """A row's beginning to another row."""
        for cache in (self._keys, self._values):
            cache[:, target, :length] = cache[:, source, :length]

    @torch.no_grad()
    def extend(self, rows: Sequence[int], starts: Sequence[int], tokens: Sequence[np.ndarray]) -> None:
        """Computes keys and values of some rows' next tokens, which stand behind column `starts` of each."""
        most, number = CHUNKS[-1]
        chunk: list[int] = []
        total = 0
        for n in range(len(rows)):
            if chunk and (len(chunk) == number or total + len(tokens[n]) > most):
                self._extend(chunk, rows, starts, tokens)
                chunk, total = [], 0
            chunk.append(n)
            total += len(tokens[n])
        if chunk:
            self._extend(chunk, rows, starts, tokens)

    @torch.no_grad()
    def ask(self, rows: Sequence[int], lasts: Sequence[int], places: Sequence[int], draws: np.ndarray) -> None:
        """These rows answer from now on: the last token of each prompt, its column, and uniform numbers [n, most]."""
        where, tokens, columns = self._up(np.asarray([rows, lasts, places], np.int64))
        self._tokens[where], self._places[where], self._draws[where] = tokens, columns, self._up(draws)
        self.counts[where], self.active[where] = 0, True

    def told(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """`active`, `counts`, `said` and `logps` on the processor, by one copy: it waits for the device."""
        parts = (self.active[:, None], self.counts[:, None], self.said, self.logps)
        every = torch.cat([part[: self.rows].double() for part in parts], 1).cpu().numpy()
        said = every[:, 2 : 2 + self.most].astype(np.int32)
        return every[:, 0] > 0, every[:, 1].astype(np.int32), said, every[:, 2 + self.most :].astype(np.float32)

    def _up(self, array: np.ndarray) -> torch.Tensor:
        """An array on the device; what the device has to do before is not waited for."""
        made = torch.from_numpy(array)
        cuda = self.device.type == "cuda"
        return made.pin_memory().to(self.device, non_blocking=True) if cuda else made.to(self.device)

    @torch.no_grad()
    def step(self, temperature: float, rows: Sequence[int]) -> None:
        """One token in each of these rows that is answering. It stops at an end token, or when `most` are said."""
        number = next((size for size in STEPS if self.graphs and len(rows) <= size < self.rows), len(rows))
        number = self.rows if self.graphs and number not in STEPS else number
        where = np.full(number, self.rows)
        where[: len(rows)] = rows
        given = [self._up(where)]
        self._run(("step", temperature, self.width, number), lambda where: self._step(temperature, where), given)

    def _step(self, temperature: float, where: torch.Tensor) -> None:
        places, on = self._places[where], self.active[where]
        starts = torch.cat([where, where[:1]]).int() * self.width
        bounds = self._bounds[: len(where) + 1]
        hidden = self._forward(self._tokens[where], places, where, bounds, starts, (places + 1).int(), 1)
        logps = torch.log_softmax((hidden @ self._head.T).float() / (temperature or 1.0), -1)
        count = self.counts[where].clamp(max=self.most - 1)
        if temperature == 0:
            token = logps.argmax(-1)
        else:
            cumulated = logps.exp().cumsum(-1)
            wanted = self._draws[where, count][:, None] * cumulated[:, -1:]
            token = torch.searchsorted(cumulated, wanted, right=True).squeeze(1).clamp(max=logps.shape[-1] - 1)
        logp = logps.gather(1, token[:, None]).squeeze(1)
        said = self.counts[where] + on
        self.said[where, count] = torch.where(on, token, self.said[where, count])
        self.logps[where, count] = torch.where(on, logp, self.logps[where, count])
        self.counts[where] = said
        self._tokens[where] = torch.where(on, token, self._tokens[where])
        self._places[where] = (places + on).clamp(max=self.width - 1)
        self.active[where] = on & ~self._ending[token] & (said < self.most)

    def _extend(
        self, chunk: Sequence[int], rows: Sequence[int], starts: Sequence[int], tokens: Sequence[np.ndarray]
    ) -> None:
        total = sum(len(tokens[n]) for n in chunk)
        size, number = next(
            (each for each in CHUNKS if self.graphs and total <= each[0] and len(chunk) <= each[1]), (total, len(chunk))
        )
        ids, places, lines = np.zeros(size, np.int64), np.zeros(size, np.int64), np.full(size, self.rows)
        bounds, first, used = (
            np.full(number + 1, total, np.int32),
            np.zeros(number + 1, np.int32),
            np.zeros(number, np.int32),
        )
        at = 0
        for line, n in enumerate(chunk):
            end = at + len(tokens[n])
            ids[at:end], places[at:end], lines[at:end] = tokens[n], np.arange(starts[n], starts[n] + end - at), rows[n]
            bounds[line], first[line], used[line] = at, rows[n] * self.width, starts[n] + end - at
            at = end
        given = [self._up(each) for each in (ids, places, lines, bounds, first, used)]
        if (size, number) in CHUNKS:
            self._run(("extend", size, number, self.width), lambda *held: self._forward(*held, size), given)
        else:
            self._forward(*given, max(len(tokens[n]) for n in chunk))

    def _run(self, key: tuple[Any, ...], work: Callable[..., Any], given: list[torch.Tensor]) -> None:
        """Does the work, by its graph where there is one; the first time without, then it is captured."""
        if not self.graphs:
            work(*given)
            return
        if key in self._captured:
            graph, held = self._captured[key]
            for target, value in zip(held, given, strict=True):
                target.copy_(value)
            graph.replay()
            return
        work(*given)
        torch.cuda.synchronize()
        held = [value.clone() for value in given]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                work(*held)
        except RuntimeError as error:
            print(f"no CUDA graphs: {str(error)[:300]}", flush=True)
            self.graphs = False
            self._captured.clear()
            return
        self._captured[key] = (graph, held)

    def _forward(
        self,
        ids: torch.Tensor,
        places: torch.Tensor,
        lines: torch.Tensor,
        bounds: torch.Tensor,
        starts: torch.Tensor,
        used: torch.Tensor,
        longest: int,
    ) -> torch.Tensor:
        """Hidden states of tokens [t] of some rows, one after the other, which look at all columns up to their own; their keys and values go
        into the cache.

        Args:
            places, lines: each token's column and row.
            bounds: where each row's tokens begin, and their end, [n + 1].
            starts: where each of these rows begins in the cache, [n + 1]; of the last one nothing is read.
            used: columns of each of these rows, its new tokens among them, [n].
            longest: tokens of a row, at most.
        """
        angles = places[:, None].float() * self._frequencies
        angles = torch.cat((angles, angles), -1)[:, None]
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        eps, size, both = self.config.rms_norm_eps, (self.config.hidden_size,), self.heads + self.shared
        hidden = functional.embedding(ids, self._embedding)
        for layer, keys, values in zip(self._layers, self._keys, self._values, strict=True):
            normed = functional.rms_norm(hidden, size, layer.before, eps)
            made = functional.linear(normed, layer.qkv).view(len(ids), -1, self.dim)
            one, other = made[:, :both].chunk(2, -1)
            turned = made[:, :both] * cos + torch.cat((-other, one), -1) * sin
            keys[lines, places], values[lines, places] = turned[:, self.heads :], made[:, both:]
            look = self._flash if self.flash else self._look
            seen = look(turned[:, : self.heads], keys, values, bounds, starts, used, longest)
            hidden = hidden + functional.linear(seen.reshape(len(ids), -1), layer.out)
            normed = functional.rms_norm(hidden, size, layer.after, eps)
            gate, up = functional.linear(normed, layer.gate_up).chunk(2, -1)
            hidden = hidden + functional.linear(functional.silu(gate) * up, layer.down)
        return functional.rms_norm(hidden, size, self._norm, eps)

    def _flash(self, query: Any, keys: Any, values: Any, bounds: Any, starts: Any, used: Any, longest: int) -> Any:
        """FlashAttention where the rows lie: what a row doesn't hold is not read."""
        flat = (each.view(-1, self.shared, self.dim) for each in (keys, values))
        return torch.ops.aten._flash_attention_forward(
            query.contiguous(), *flat, bounds, starts, longest, self.width, 0.0, longest > 1, False, seqused_k=used
        )[0]

    def _look(self, query: Any, keys: Any, values: Any, bounds: Any, starts: Any, used: Any, longest: int) -> Any:
        """The same, row by row."""
        del longest
        seen = torch.zeros_like(query)
        ends = bounds.tolist()
        for first, last, start, number in zip(ends, ends[1:], starts.tolist(), used.tolist(), strict=False):
            if first == last:
                continue
            own, *known = (
                each.transpose(0, 1)[None]
                for each in (query[first:last], *(cache[start // self.width, :number] for cache in (keys, values)))
            )
            mask = torch.ones(last - first, number, dtype=torch.bool, device=self.device).tril(number - last + first)
            found = functional.scaled_dot_product_attention(own, *known, attn_mask=mask, enable_gqa=True)
            seen[first:last] = found[0].transpose(0, 1)
        return seen

    def _layer(self, number: int) -> Layer:
        size, inner, name = self.config.hidden_size, self.config.intermediate_size, f"model.layers.{number}."
        own, shared = self.heads * self.dim, self.shared * self.dim
        qkv = self._new("", own + 2 * shared, size)
        gate_up = self._new("", 2 * inner, size)
        parts = zip(("q", "k", "v"), qkv.split([own, shared, shared]), strict=True)
        self._targets |= {f"{name}self_attn.{each}_proj.weight": target for each, target in parts}
        parts = zip(("gate", "up"), gate_up.split(inner), strict=True)
        self._targets |= {f"{name}mlp.{each}_proj.weight": target for each, target in parts}
        return Layer(
            self._new(f"{name}input_layernorm.weight", size),
            qkv,
            self._new(f"{name}self_attn.o_proj.weight", size, own),
            self._new(f"{name}post_attention_layernorm.weight", size),
            gate_up,
            self._new(f"{name}mlp.down_proj.weight", size, inner),
        )

    def _new(self, name: str, *shape: int) -> torch.Tensor:
        made = torch.zeros(shape, dtype=self.dtype, device=self.device)
        if name:
            self._targets[name] = made
        return made
