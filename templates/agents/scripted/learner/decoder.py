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
from torch.nn.attention import SDPBackend, sdpa_kernel

WIDTH = 512
"""Columns that the cache grows by: each width has graphs of its own."""
CHUNKS = ((32, 64), (8, 256))
"""Rows and new tokens of a chunk of prompts that is one graph; what is longer is computed without."""
LONG_TOKENS = 4096
"""New tokens of such a longer chunk, at most, but for a single prompt."""

KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""That take a mask of any form, and plan nothing while a graph is captured."""


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
        width: columns of the cache; the last one is nobody's.
        active: rows that are answering, bool, [rows].
        counts: tokens answered, [rows].
        said, logps: these tokens and their log-probabilities, [rows, most].
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
        self._captured: dict[tuple[Any, ...], tuple[Any, list[torch.Tensor]]] = {}
        self.width = 0
        self._keys = self._values = torch.zeros(0)
        self._ending = ending.to(self.device)
        self._all = torch.arange(rows, device=self.device)
        self._tokens = torch.zeros(rows, dtype=torch.long, device=self.device)
        self._places = torch.zeros(rows, dtype=torch.long, device=self.device)
        self._draws = torch.zeros(rows, most, device=self.device)
        self.active = torch.zeros(rows, dtype=torch.bool, device=self.device)
        self.counts = torch.zeros(rows, dtype=torch.long, device=self.device)
        self.said = torch.zeros(rows, most, dtype=torch.long, device=self.device)
        self.logps = torch.zeros(rows, most, device=self.device)

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
        wanted = -(-width // WIDTH) * WIDTH
        if wanted <= self.width:
            return
        shape = (len(self._layers), self.rows, self.shared, wanted, self.dim)
        keys, values = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        if self.width:
            keys[:, :, :, : self.width], values[:, :, :, : self.width] = self._keys, self._values
        self._captured.clear()
        self._keys, self._values, self.width = keys, values, wanted

    def copy(self, source: int, target: int, length: int) -> None:
        """A row's beginning to another row."""
        for cache in (self._keys, self._values):
            cache[:, target, :, :length] = cache[:, source, :, :length]

    @torch.no_grad()
    def extend(self, rows: Sequence[int], starts: Sequence[int], tokens: Sequence[np.ndarray]) -> None:
        """Computes keys and values of some rows' next tokens, which stand behind column `starts` of each."""
        order = sorted(range(len(rows)), key=lambda n: len(tokens[n]))
        chunk: list[int] = []
        for n in order:
            if chunk and not self._fits(len(chunk) + 1, len(tokens[n])):
                self._extend(chunk, rows, starts, tokens)
                chunk = []
            chunk.append(n)
        if chunk:
            self._extend(chunk, rows, starts, tokens)

    @torch.no_grad()
    def ask(self, rows: Sequence[int], lasts: Sequence[int], places: Sequence[int], draws: torch.Tensor) -> None:
        """These rows answer from now on: the last token of each prompt, its column, and uniform numbers [n, most]."""
        where = torch.tensor(rows, device=self.device)
        self._tokens[where] = torch.tensor(lasts, device=self.device)
        self._places[where] = torch.tensor(places, device=self.device)
        self._draws[where] = draws.to(self.device)
        self.counts[where], self.active[where] = 0, True

    def told(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """`active`, `counts`, `said` and `logps` on the processor, by one copy: it waits for the device."""
        parts = (self.active[:, None], self.counts[:, None], self.said, self.logps)
        every = torch.cat([part.double() for part in parts], 1).cpu().numpy()
        said = every[:, 2 : 2 + self.most].astype(np.int32)
        return every[:, 0] > 0, every[:, 1].astype(np.int32), said, every[:, 2 + self.most :].astype(np.float32)

    @torch.no_grad()
    def step(self, temperature: float) -> None:
        """One token in each row that is answering. It stops at an end token, or when `most` are said."""
        self._run(("step", temperature, self.width), lambda: self._step(temperature), [])

    def _step(self, temperature: float) -> None:
        hidden = self._forward(self._tokens[:, None], self._places[:, None], None)
        logps = torch.log_softmax((hidden[:, 0] @ self._head.T).float() / (temperature or 1.0), -1)
        count = self.counts.clamp(max=self.most - 1)[:, None]
        if temperature == 0:
            token = logps.argmax(-1)
        else:
            cumulated = logps.exp().cumsum(-1)
            wanted = self._draws.gather(1, count) * cumulated[:, -1:]
            token = torch.searchsorted(cumulated, wanted, right=True).squeeze(1).clamp(max=logps.shape[-1] - 1)
        logp = logps.gather(1, token[:, None])
        on = self.active[:, None]
        self.said.scatter_(1, count, torch.where(on, token[:, None], self.said.gather(1, count)))
        self.logps.scatter_(1, count, torch.where(on, logp, self.logps.gather(1, count)))
        self.counts += self.active
        self._tokens.copy_(torch.where(self.active, token, self._tokens))
        self._places.copy_((self._places + self.active).clamp(max=self.width - 1))
        self.active &= ~self._ending[token] & (self.counts < self.most)

    def _fits(self, rows: int, tokens: int) -> bool:
        return any(rows <= most and tokens <= width for most, width in CHUNKS) or rows * tokens <= LONG_TOKENS

    def _extend(
        self, chunk: Sequence[int], rows: Sequence[int], starts: Sequence[int], tokens: Sequence[np.ndarray]
    ) -> None:
        longest = max(len(tokens[n]) for n in chunk)
        number, width = next(
            ((most, width) for most, width in CHUNKS if self.graphs and len(chunk) <= most and longest <= width),
            (len(chunk), longest),
        )
        ids = np.zeros((number, width), np.int64)
        places = np.full((number, width), self.width - 1)  # nobody's column
        where = np.full(number, rows[chunk[0]])
        for line, n in enumerate(chunk):
            ids[line, : len(tokens[n])] = tokens[n]
            places[line, : len(tokens[n])] = np.arange(starts[n], starts[n] + len(tokens[n]))
            where[line] = rows[n]
        given = [torch.from_numpy(each).to(self.device) for each in (ids, places, where)]
        if (number, width) in CHUNKS:
            self._run(("extend", number, width, self.width), self._forward, given)
        else:
            self._forward(*given)

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

    def _forward(self, ids: torch.Tensor, places: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """Hidden states of tokens [n, t] in columns `places` of `rows` (None: all of them in order), which look at all columns up
        to their own; their keys and values go into the cache."""
        number, length = ids.shape
        where = self._all if rows is None else rows
        looks = torch.arange(self.width, device=self.device) <= places[:, :, None]
        group = self.heads // self.shared
        mask = torch.zeros(looks.shape, dtype=self.dtype, device=self.device).masked_fill_(~looks, -torch.inf)
        mask = mask.repeat(1, group, 1)[:, None]
        angles = places[:, :, None].float() * self._frequencies
        angles = torch.cat((angles, angles), -1)[:, :, None]
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        eps, size = self.config.rms_norm_eps, (self.config.hidden_size,)
        hidden = functional.embedding(ids, self._embedding)
        for layer, keys, values in zip(self._layers, self._keys, self._values, strict=True):
            normed = functional.rms_norm(hidden, size, layer.before, eps)
            made = functional.linear(normed, layer.qkv).view(number, length, -1, self.dim)
            turned = made[:, :, : self.heads + self.shared]
            one, other = turned.chunk(2, -1)
            turned = turned * cos + torch.cat((-other, one), -1) * sin
            query, key = turned[:, :, : self.heads], turned[:, :, self.heads :]
            keys[where[:, None], :, places] = key
            values[where[:, None], :, places] = made[:, :, self.heads + self.shared :]
            known = (keys, values) if rows is None else (keys.index_select(0, rows), values.index_select(0, rows))
            query = query.view(number, length, self.shared, group, self.dim).permute(0, 2, 3, 1, 4)
            query = query.reshape(number, self.shared, group * length, self.dim)  # heads with the same keys together
            with sdpa_kernel(KERNELS):
                seen = functional.scaled_dot_product_attention(query, *known, attn_mask=mask)
            seen = seen.view(number, self.shared, group, length, self.dim).permute(0, 3, 1, 2, 4)
            hidden = hidden + functional.linear(seen.reshape(number, length, -1), layer.out)
            normed = functional.rms_norm(hidden, size, layer.after, eps)
            gate, up = functional.linear(normed, layer.gate_up).chunk(2, -1)
            hidden = hidden + functional.linear(functional.silu(gate) * up, layer.down)
        return functional.rms_norm(hidden, size, self._norm, eps)

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
