"""Observe a training from inside its Python process: trainers, optimizer steps, generation, data, checkpoints, crashes.

Hooks are set once the program itself has imported a library; an error of a hook is swallowed and told as a `note`. Facts are JSON
lines in $AUTORL_OBSERVED/<pid>-<start>.jsonl; docs/file-protocol.md lists them. Standard library alone, Python 3.8 or later.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import resource
import sys
import time
import traceback
import weakref
from functools import partial
from operator import length_hint
from types import SimpleNamespace
from typing import Any

Watch = Any  # a generator function that sees a call: it begins with (args, kwargs), and is sent the result
MOST_LINES, MOST_KEYS, MOST_CHARS = 4000, 300, 400  # of a process, of a fact, of a text
LAZY = ("seed", "rows", "loaded", "memory")  # not told of a process that does nothing else, such as a loader of data
HASHED_BYTES = 32 << 20
# A block ends with as many events as all before it, or after 5 s and 12 % of the time so far. Norms take 0.5 % of the time.
EVERY_S, GROWTH, NORM_PAUSE = 5.0, 0.12, 200
TEXTS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
NOT_DATA = ("config.json", "index.json", "tokenizer", "_tokens", "vocab.json", "template", "_state", "/.", "-packages/")
WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
NOT_WEIGHTS = ("optimizer", "scheduler", "rng_state", "training_args", "scaler", "_states")
PATHS = ("pretrained_model_name_or_path", "model_id", "model", "model_path", "save_directory", "filename", "f")
# If a trainer has more settings than MOST_KEYS, those whose names begin like this are written first.
FIRST = ("algorithm", "data.", "actor_rollout_ref.actor.", "optim", "trainer.")
SETTINGS = ["max_epochs", "max_steps", "accumulate_grad_batches", "precision", "gradient_clip_val", "num_devices"]
SETTINGS += [
    "mixed_precision",
    "gradient_accumulation_steps",
    "num_processes",
    "distributed_type",
]  # Lightning's, accelerate's


class Block:
    """Events that are told together, so that 10^6 of them are some dozen lines: optimizer steps, generation."""

    def __init__(self, what: str, **facts: Any) -> None:
        self.what, self.facts, self.total, self.count = what, facts, 0, 0
        self.sums: dict[str, int] = {}
        self.next_count, self.next_s, self.next_norm_s = 1, 0.0, 0.0
        self.optimizer = self.rate = None  # type: Any

    def add(self, now: float, sums: dict[str, int], first: dict[str, Any], last: dict[str, Any]) -> None:
        """Count an event; facts of a block's first and last one."""
        if not self.count:
            self.facts.update(first, from_s=now)
            self.next_s = now + max(EVERY_S, GROWTH * (now - here.began_s))
        self.facts.update(last, to_s=now)
        self.count += 1
        self.sums.update((name, self.sums.get(name, 0) + value) for name, value in sums.items())
        if self.count >= self.next_count or now >= self.next_s:
            self.end()

    def end(self) -> None:
        if self.count:
            self.total += self.count
            here.tell(self.what, **self.facts, **self.sums)
            self.count, self.next_count, self.sums = 0, max(1, self.total), {}

    def measure(self, gradients: list[Any], now: float) -> None:
        """Keep the norm of a step's gradient. The next one is measured when this has taken 0.5 % of the time."""
        torch: Any = sys.modules["torch"]
        whole = all(type(each) is torch.Tensor and not each.is_sparse for each in gradients)
        if gradients and whole and not (gradients[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            with torch.no_grad():  # of sharded tensors several processes would have to take part
                norm = sum(float(each) ** 2 for each in torch._foreach_norm(gradients)) ** 0.5
            norms = [*self.facts["norms"], norm]
            self.facts.update(norm=norm, norms=[min(norms), max(norms)])
        self.next_norm_s = now + NORM_PAUSE * (time.time() - now)


class ThisProcess:
    """What is known of this process; a fork begins anew."""

    def begin(self) -> None:
        self.file, self.lines, self.began_s, self.next_log_s = -1, 0, time.time(), 0.0
        self.steps = self.depth = self.training = 0
        self.waiting: list[tuple[float, str, Any]] = []
        self.told: dict[Any, int] = {}
        self.blocks: dict[Any, Any] = {}
        self.opened: dict[str, bool] = {}
        self.newest = self.last_log = None  # type: Any

    def tell(self, what: str, **facts: Any) -> None:
        """Write one fact; a lazy one waits for another one."""
        self.waiting = [*self.waiting[:40], (time.time(), what, small(facts))]
        if self.file < 0 and what in LAZY:
            return
        if self.file < 0:
            self.open()
        waiting, self.waiting, name = self.waiting, [], reach(sys.modules.get("__main__"), "__spec__.name")
        program = f"-m {name}" if name else str((getattr(sys, "argv", None) or [""])[0])
        for at_s, kind, told in waiting[: MOST_LINES - self.lines]:
            self.lines += 1
            last = {"what": "note", "facts": {"text": "no more is told of this process"}}
            fact = {"what": kind, "facts": told} if self.lines < MOST_LINES else last
            fact = {"pid": os.getpid(), "program": program[:200], "at_s": round(at_s, 6), **fact}
            text = json.dumps(fact, separators=(",", ":"))
            os.write(self.file, text.encode() + b"\n")

    def open(self) -> None:
        folder, get = os.environ["AUTORL_OBSERVED"], os.environ.get
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"{os.getpid()}-{self.began_s:.6f}.jsonl")
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        rank, size = (int(each) if each.isdigit() else None for each in (get("RANK", ""), get("WORLD_SIZE", "")))
        start = {"argv": getattr(sys, "orig_argv", sys.argv), "rank": rank, "world_size": size, "parent": os.getppid()}
        self.waiting.insert(0, (self.began_s, "start", small(start)))
        if getattr(sys.modules.get("multiprocessing.process"), "parent_process", lambda: None)() is not None:
            sys.modules["multiprocessing.util"].Finalize(None, self.end, exitpriority=-100)  # it ends by os._exit

    def once(self, key: Any, most: int = 1) -> bool:
        self.told[key] = self.told.get(key, 0) + 1
        return self.told[key] <= most

    def count_step(self, optimizer: Any) -> None:
        self.steps += 1
        block: Any = self.blocks.get(id(optimizer))
        now, rate = time.time(), optimizer.param_groups[0].get("lr")
        known, gradients = block is not None and block.optimizer() is optimizer, []
        if not known or now >= block.next_norm_s:
            weights = [each for group in optimizer.param_groups for each in group["params"]]
            gradients = [each.grad for each in weights if each.grad is not None]
        if not known:
            if self.once("optimizer", 20):
                self.end_blocks()  # one that is gone may have had the same id
                device, count = str(gradients[0].device) if gradients else "", sum(each.numel() for each in gradients)
                name = dotted(type(optimizer))
                self.newest = Block("steps", optimizer=name, parameters=count, device=device)
                self.tell_opened()
            else:  # a program may make one for each step
                self.blocks = {key: each for key, each in self.blocks.items() if each is not self.newest}
            block = self.blocks[id(optimizer)] = self.newest
            block.optimizer = weakref.ref(optimizer)  # a hold on it would keep a model in memory
        if not block.count:
            block.rate = rate
            block.facts.update(norm=None, norms=[])
        if now >= block.next_norm_s:
            block.measure(gradients, now)
        block.add(now, {"count": 1}, {"first": self.steps}, {"last": self.steps, "rates": [block.rate, rate]})

    def end_blocks(self) -> None:
        for block in list(self.blocks.values()):
            block.end()

    def tell_log(self) -> None:
        found, self.last_log = self.last_log, None
        if found is not None:
            self.tell("log", **{**figures(found), "by": found["by"]})

    def on_open(self, event: str, args: Any) -> None:
        """Note the data files that the program opens to read them; an audit hook."""
        wanted = type(args[0]) is str and args[0].endswith(TEXTS) and args[1] in ("r", "rb", "rt")
        if wanted and len(self.opened) < 100 and not any(part in args[0] for part in NOT_DATA):
            self.opened.setdefault(os.path.abspath(args[0]), False)

    def tell_opened(self) -> None:
        for path in list(self.opened):
            safely(self.tell_rows, path)

    def tell_rows(self, path: str, rows: Any = None) -> None:
        is_file, digest = os.path.isfile(path), None
        path = os.path.abspath(path) if is_file else path
        if self.opened.get(path):
            return
        self.opened[path] = True
        if is_file and os.path.getsize(path) <= HASHED_BYTES:
            with open(path, "rb") as file:
                data = file.read()
            digest = hashlib.sha256(data).hexdigest()
            if rows is None and path.endswith((".jsonl", ".csv", ".tsv")):
                rows = len(data.rstrip(b"\n").split(b"\n")) if data else 0
        self.tell("rows", path=path, rows=rows, sha256=digest)

    def tell_crash(self) -> None:
        error = getattr(sys, "last_value", None)
        if error is not None:
            places = traceback.extract_tb(error.__traceback__)
            own = [each for each in places if not each.filename.startswith((sys.prefix, sys.base_prefix, "<frozen"))]
            where = next((f"{each.filename}:{each.lineno}" for each in (own or places[:1])[-1:]), None)
            lines = [each.strip() for each in str(error).splitlines() if any(map(str.isalnum, each))]
            self.tell("crashed", type=type(error).__name__, message=lines[-1] if lines else "", where=where)

    def tell_memory(self) -> None:
        cuda, used = reach(sys.modules.get("torch"), "cuda"), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak = cuda.max_memory_allocated() if cuda is not None and cuda.is_initialized() else None
        self.tell("memory", gpu_peak_bytes=peak, rss_peak_bytes=used * 1024)

    def end(self) -> None:
        for each in (self.tell_log, self.end_blocks, self.tell_crash, self.tell_memory):
            safely(each)


here = ThisProcess()
here.begin()
end = here.end


def small(value: Any, depth: int = 0) -> Any:
    """Return a small JSON value; of a tensor with one number, that number."""
    value = value.item() if getattr(value, "shape", None) == () else value
    if isinstance(value, dict) and depth < 3:
        return {str(key)[:100]: small(each, depth + 1) for key, each in list(value.items())[:MOST_KEYS]}
    if isinstance(value, (list, tuple)) and depth < 3:
        return [small(each, depth + 1) for each in value[:50]]
    plain = value is None or (isinstance(value, (bool, int, float)) and abs(value) < 1 << 63)
    return value if plain else str(value)[:MOST_CHARS]


def figures(logs: Any) -> dict[str, Any]:
    found = small(dict(logs), 2)  # nested ones are texts
    return {k: v for k, v in found.items() if type(v) in (int, float) or v in ("nan", "inf", "-inf")}


def safely(function: Any, *args: Any) -> Any:
    """Call it, and tell its error instead of raising it."""
    try:
        return function(*args)
    except StopIteration:
        return None
    except Exception as error:
        try:
            if here.once("note", 5):
                here.tell("note", text=f"observer: {type(error).__name__}: {error}")
        except Exception:
            here.lines = MOST_LINES  # there is no way to write
        return None


def around(owner: Any, name: str, watch: Watch) -> None:
    """Let `watch` see the calls of owner.name, which keeps its name, signature and place: it pickles and shows its source."""
    raw = vars(owner).get(name)
    original = getattr(raw, "__func__", raw)
    if not callable(original) or hasattr(original, "_autorl_observed"):
        return

    @functools.wraps(original)
    def observed(*args: Any, **kwargs: Any) -> Any:
        skip = here.depth > here.training and watch not in ALWAYS  # a save writes by another library's save
        seen = iter(()) if skip else watch(args, kwargs)
        safely(next, seen)
        here.depth += 1
        try:
            result = original(*args, **kwargs)
        except BaseException:
            safely(getattr(seen, "close", bool))
            raise
        finally:
            here.depth -= 1
        if not skip:
            safely(seen.send, result)
            safely(seen.close)
        return result

    @functools.wraps(original)
    async def observed_stream(*args: Any, **kwargs: Any) -> Any:
        seen, stream = watch(args, kwargs), original(*args, **kwargs)
        safely(next, seen)
        try:
            async for item in stream:
                safely(seen.send, item)
                yield item
        finally:
            await stream.aclose()

    made: Any = observed_stream if inspect.isasyncgenfunction(original) else observed
    made._autorl_observed = True
    setattr(owner, name, type(raw)(made) if isinstance(raw, (classmethod, staticmethod)) else made)


def argument(args: Any, kwargs: Any, place: int, *names: str) -> Any:
    """Return the argument at `place`, or by one of these names; None if it was not given."""
    return args[place] if len(args) > place else next((kwargs[name] for name in names if name in kwargs), None)


def reach(value: Any, *paths: str) -> Any:
    """Return the first of these attributes (`a.b.c`) that is not None."""
    found = (functools.reduce(lambda each, name: getattr(each, name, None), path.split("."), value) for path in paths)
    return next((each for each in found if each is not None), None)


def dotted(kind: type) -> str:
    module, name = kind.__module__, kind.__qualname__
    if module.rpartition(".")[2] == name.lstrip("_") and "Unsloth" in name:
        return "unsloth." + name.lstrip("_")[len("Unsloth") :]  # its copy of a trainer of trl, in a module of its own
    return f"{(module == '__main__' and reach(sys.modules[module], '__spec__.name')) or module}.{name}"


def model_name(model: Any) -> Any:
    """Return the name or path that a model was loaded from; None if it doesn't say."""
    name = reach(model, "name_or_path", "config._name_or_path", "module.name_or_path", "module.config._name_or_path")
    return name if isinstance(name, str) and name else None


def generation(look: Any, args: Any, kwargs: Any) -> Any:
    """See generation. `look` returns (library, model, sampled, prompts, tokens in, tokens out so far)."""
    before, calls = 0, 1
    while True:
        by, model, sampled, prompts, tokens_in, made = look(args, kwargs, (yield))
        new = Block("generated", by=by, model=model, sampled=sampled)
        sums = {"calls": calls, "prompts": calls * prompts, "tokens_in": calls * tokens_in}
        sums["tokens_out"], before, calls = max(0, made - before), made, 0
        here.blocks.setdefault((by, model, sampled), new).add(time.time(), sums, {"steps_before": here.steps}, {})


def by_transformers(args: Any, kwargs: Any, result: Any) -> Any:
    given = argument(args, kwargs, 1, "inputs", "input_ids", "inputs_embeds")
    rows, length = tuple(given.shape[:2]) if given is not None else (1, 0)
    made = tuple(getattr(result, "sequences", result).shape[:2])
    repeated = 0 if "inputs_embeds" in kwargs or reach(args[0], "config.is_encoder_decoder") else length
    sampled = kwargs.get("do_sample", reach(argument(args, kwargs, 2, "generation_config"), "do_sample"))
    sampled = reach(args[0], "generation_config.do_sample") if sampled is None else sampled
    return "transformers", model_name(args[0]), sampled, rows, rows * length, made[0] * max(0, made[1] - repeated)


def by_engine(args: Any, kwargs: Any, result: Any) -> Any:
    """Look at vLLM's results, which are objects, and SGLang's, which are dictionaries."""
    given = reach(argument(args, kwargs, 1, "obj"), "sampling_params") or argument(args, kwargs, 2, "sampling_params")
    given = given[0] if isinstance(given, list) and given else given
    heat = given.get("temperature") if isinstance(given, dict) else getattr(given, "temperature", None)
    results = result if isinstance(result, list) else [result]
    told = [each["meta_info"] for each in results if isinstance(each, dict) and "meta_info" in each]
    counts = [(each.get("prompt_tokens", 0), each.get("completion_tokens", 0)) for each in told]
    for each in results if not counts else ():
        if hasattr(each, "outputs"):
            counts.append((len(each.prompt_token_ids or ()), sum(len(one.token_ids) for one in each.outputs)))
    library = type(args[0]).__module__.partition(".")[0]
    model = reach(args[0], "model_config.model", "llm_engine.model_config.model", "server_args.model_path")
    sampled, tokens = None if heat is None else heat > 0, [sum(each[place] for each in counts) for place in (0, 1)]
    return (library, model, sampled, len(counts), *tokens)


def flat(owner: Any, module: Any = None) -> dict[str, Any]:
    """Return the settings of a trainer, nested ones as `a.b`; those of Lightning's are its own and its module's."""
    own = {each: getattr(owner, each, None) for each in SETTINGS}
    found: dict[str, Any] = {}
    waiting = [("", reach(owner, "args", "config", "strategy.args") or own, 0)]
    waiting.append(("", reach(module, "hparams") or {}, 0))
    while waiting:
        prefix, settings, depth = waiting.pop()
        for name, given in (settings if hasattr(settings, "items") else vars(settings)).items():
            value = getattr(given, "value", None)
            value = value if isinstance(value, str) else given  # an enumeration
            if isinstance(value, (bool, int, float, str)):
                found[f"{prefix}{name}"] = value
            elif depth < 6 and (hasattr(value, "items") or "Namespace" in type(value).__name__):
                waiting.append((f"{prefix}{name}.", value, depth + 1))
    return dict(sorted(found.items(), key=lambda item: not item[0].startswith(FIRST)))


def training(args: Any, kwargs: Any) -> Any:
    """See a trainer's `train` or `fit`; of a method that is called again and again, the first calls."""
    trainer, before, steps_before, inside = args[0], here.training, here.steps, ("in", id(args[0]))
    is_first, here.training = here.once(inside), here.depth + 1  # a subclass's method calls its parent's
    try:
        data = reach(trainer, "train_dataset", "train_dataloader.dataset")
        data = reach(argument(args, kwargs, 2, "train_dataloaders"), "dataset") if data is None else data
        module = argument(args, kwargs, 1, "model")
        model = model_name(reach(trainer, "model") or module)
        name, *bases = map(dotted, type(trainer).__mro__[:13])
        facts = {"name": name, "bases": bases, "model": model, "rows": safely(length_hint, data) or None}
        if is_first and here.once(("began", name), 20):
            here.tell("trainer", phase="began", arguments=safely(flat, trainer, module), **facts)
            here.tell_opened()
        yield
        if is_first and here.once(("ended", name), 20):
            steps, history = reach(trainer, "state.global_step", "global_step"), reach(trainer, "state.log_history")
            last = figures(history[-1] if history else reach(trainer, "callback_metrics") or {})
            steps = steps if isinstance(steps, int) else here.steps - steps_before
            here.end_blocks()
            here.tell("trainer", phase="ended", steps=steps, last=last, **facts)
    finally:
        here.training = before
        if is_first:
            here.told.pop(inside, None)


def recipe(args: Any, kwargs: Any) -> Any:
    """See the settings of a recipe of torchtune, a program of its own."""
    name, settings = argument(args, kwargs, 0, "recipe_name"), SimpleNamespace(args=argument(args, kwargs, 1, "cfg"))
    here.tell("trainer", phase="began", name=f"recipes.{name}", bases=[], arguments=safely(flat, settings))
    yield


def prepared(args: Any, kwargs: Any) -> Any:
    """See an own loop that uses accelerate; trainers use it too."""
    yield
    if any(hasattr(each, "param_groups") for each in args) and not here.training and here.once("accelerate", 5):
        model = next((model_name(each) for each in args[1:] if hasattr(each, "named_parameters")), None)
        rows = next((length_hint(each.dataset) or None for each in args[1:] if hasattr(each, "dataset")), None)
        name, settings = dotted(type(args[0])), safely(flat, args[0])
        here.tell("trainer", phase="began", name=name, bases=[], arguments=settings, model=model, rows=rows)


def logs(figures_at: int, step_at: int, args: Any, kwargs: Any) -> Any:
    """See logging: the first twenty lines, then one a while, and the last one."""
    found = argument(args, kwargs, figures_at, "logs", "data", "payload", "values", "logs_dict", "tag")
    single, counted = isinstance(found, str), reach(args[0], "state.global_step")
    found = {found: argument(args, kwargs, figures_at + 1, "scalar_value")} if single else found
    yield
    step, now = argument(args, kwargs, step_at, "step", "global_step"), time.time()
    by = "tensorboard" if single else None if counted is None else "transformers"
    found = {**found, "step": step if isinstance(step, int) else counted, "by": by}
    if single and here.last_log and here.last_log["step"] == step:  # each figure of a step comes by itself
        here.last_log.update(found)
        return
    here.last_log = here.last_log if single else found
    if here.once("log", 20) or now >= here.next_log_s:
        here.next_log_s = now + max(1.0, 0.02 * (now - here.began_s))
        here.tell_log()
    here.last_log = found if single else here.last_log


def data_loaded(args: Any, kwargs: Any) -> Any:
    path = argument(args, kwargs, int(bool(args) and isinstance(args[0], type)), "path", "path_or_paths")
    result = yield
    files = kwargs.get("data_files") or path
    files = next(iter(files.values())) if isinstance(files, dict) else files
    rows = safely(length_hint, next(iter(result.values())) if isinstance(result, dict) else result) or None
    for each in (files if isinstance(files, list) else [files])[:8]:
        here.tell_rows(str(each), rows)


def kept(what: str, place: int, whole: bool, args: Any, kwargs: Any) -> Any:
    """See loading or saving: of a model, or of a file of weights."""
    given = argument(args, kwargs, place, *PATHS)
    result = yield
    path = os.fspath(given) if isinstance(given, (str, os.PathLike)) else ""
    path = os.path.abspath(path) if os.path.exists(path) else path
    name = os.path.basename(path)
    if not whole and (not name.endswith(WEIGHTS) or any(each in name for each in NOT_WEIGHTS)):
        return
    model: Any = (args[0] if what == "saved" or result is None else result) if whole else None
    model = model[0] if isinstance(model, tuple) else model
    facts: dict[str, Any] = {"path": path, "class": dotted(type(model)) if whole else None}
    if what == "saved":
        facts.update(origin=model_name(model), steps=here.steps)
    else:
        facts["parameters"] = sum(e.numel() for e in model.parameters()) if hasattr(model, "parameters") else None
    if here.once(what, 100):
        here.tell(what, **facts)


def adapted(args: Any, kwargs: Any) -> Any:
    yield
    config = argument(args, kwargs, 2, "peft_config")
    if hasattr(config, "lora_alpha") and here.once("lora", 10):
        targets = sorted(config.target_modules) if isinstance(config.target_modules, set) else config.target_modules
        here.tell("lora", r=config.r, alpha=config.lora_alpha, dropout=config.lora_dropout, targets=targets)


def seeded(args: Any, kwargs: Any) -> Any:
    value = argument(args, kwargs, 0, "seed")
    if isinstance(value, int) and here.once(("seed", value)) and here.once("seed", 5):
        here.tell("seed", value=value)
    yield


OPTIMIZERS = "torch.optim.optimizer"
TRAINING = {"transformers": "train", "trl": "train step", "openrlhf": "fit ppo_train", "verl": "fit"}
TRAINING.update(lightning="fit", pytorch_lightning="fit")
"""Methods of classes with `Trainer` in their names, in modules with `trainer` in theirs."""

ALWAYS = (adapted, seeded, training)  # also inside other observed calls
HOOKS = [
    (partial(generation, by_transformers), "transformers.generation.utils:GenerationMixin.generate"),
    (partial(generation, by_engine), "vllm.entrypoints.llm:LLM.generate vllm.entrypoints.llm:LLM.chat"),
    (partial(generation, by_engine), "vllm.v1.engine.async_llm:AsyncLLM.generate sglang.srt.entrypoints.engine:Engine.generate"),
    (partial(generation, by_engine), "sglang.srt.managers.tokenizer_manager:TokenizerManager.generate_request"),
    (partial(kept, "loaded", 0, False), "safetensors.torch:load_file torch.serialization:load"),
    (partial(kept, "loaded", 1, True), "transformers.modeling_utils:PreTrainedModel.from_pretrained vllm.entrypoints.llm:LLM.__init__"),
    (partial(kept, "loaded", 2, True), "peft.peft_model:PeftModel.from_pretrained"),
    (partial(kept, "loaded", 9, True), "sglang.srt.entrypoints.engine:Engine.__init__"),
    (partial(kept, "saved", 1, True), "transformers.modeling_utils:PreTrainedModel.save_pretrained peft.peft_model:PeftModel.save_pretrained"),
    (partial(kept, "saved", 1, False), "safetensors.torch:save_file torch.serialization:save"),
    (partial(kept, "saved", 1, False), "lightning.pytorch.trainer.trainer:Trainer.save_checkpoint"),
    (partial(kept, "saved", 1, False), "pytorch_lightning.trainer.trainer:Trainer.save_checkpoint"),
    (partial(logs, 1, 2), "transformers.trainer:Trainer.log accelerate.accelerator:Accelerator.log verl.utils.tracking:Tracking.log"),
    (partial(logs, 1, 2), "torchtune.training.metric_logging:DiskLogger.log_dict wandb.sdk.wandb_run:Run.log"),
    (partial(logs, 1, 2), "torchtune.training.metric_logging:StdoutLogger.log_dict"),
    (partial(logs, 1, 3), "torch.utils.tensorboard.writer:SummaryWriter.add_scalar"),
    (partial(logs, 2, 1), "openrlhf.utils.logging_utils:WandbLogger.log_train openrlhf.utils.logging_utils:TensorboardLogger.log_train"),
    (adapted, "peft.peft_model:PeftModel.__init__"),
    (prepared, "accelerate.accelerator:Accelerator.prepare"),
    (data_loaded, "datasets.load:load_dataset datasets.arrow_dataset:Dataset.from_json"),
    (data_loaded, "datasets.arrow_dataset:Dataset.from_csv datasets.arrow_dataset:Dataset.from_parquet"),
    (recipe, "torchtune.config._utils:log_config"),
    (seeded, "torch.random:manual_seed"),
]  # fmt: skip
PLACES: Any = [(watch, *place.split(":")) for watch, places in HOOKS for place in places.split()]


class HookingFinder:
    """Finder that lets the ordinary finders find a module, and hooks it once it has run."""

    left = {module for _, module, _ in PLACES} | {OPTIMIZERS}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.left and ("trainer" not in name or name.partition(".")[0] not in TRAINING):
            return None
        self.left.discard(name)
        found = (each.find_spec(name, path, target) for each in list(sys.meta_path) if each is not self)
        spec = next((each for each in found if each is not None), None)
        loader: Any = getattr(spec, "loader", None)
        if hasattr(loader, "exec_module"):
            safely(setattr, loader, "exec_module", partial(self.run, loader, loader.exec_module))
        return spec

    def run(self, loader: Any, exec_module: Any, module: Any) -> None:
        vars(loader).pop("exec_module", None)
        exec_module(module)
        safely(self.hook, module, module.__name__)

    def hook(self, module: Any, name: str) -> None:
        """Set the hooks of a module that has run."""
        if name == OPTIMIZERS:
            compiling = getattr(sys.modules.get("torch.compiler"), "is_compiling", bool)
            sys.addaudithook(lambda event, args: safely(here.on_open, event, args) if event == "open" else None)
            count = lambda optimizer, args, kwargs: None if compiling() else safely(here.count_step, optimizer)  # noqa: E731
            module.register_optimizer_step_post_hook(count)
        for watch, where, place in PLACES:
            kind, _, function = place.rpartition(".")
            owner = getattr(module, kind, None) if kind else module
            if where == name and owner is not None:
                around(owner, function, watch)
        for each in list(vars(module).values()) if "trainer" in name and name.partition(".")[0] in TRAINING else ():
            if isinstance(each, type) and each.__module__ == name and "Trainer" in each.__name__:
                for method in TRAINING[name.partition(".")[0]].split():
                    around(each, method, training)


def start(*wanted: Any) -> Any:
    """Put the observer's finder first, and let it find the first module."""
    sys.meta_path.insert(0, HookingFinder())
    os.register_at_fork(after_in_child=here.begin)
    return sys.meta_path[0].find_spec(*wanted)
