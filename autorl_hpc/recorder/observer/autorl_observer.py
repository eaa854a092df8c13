"""Observe a training from inside its Python process: trainers, optimizer steps, generation, data, checkpoints, crashes.

Hooks are set once the program itself has imported a library; an error of a hook is swallowed and told as a `note`. Facts are JSON
lines in $AUTORL_OBSERVED/<pid>-<start>.jsonl; docs/file-protocol.md lists them. For every Python from 3.8, with the standard
library alone, since it runs in the agent's environment.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import time
import weakref
from typing import Any

Watch = Any
"""A generator function that sees a call: it begins with (args, kwargs), and is sent the result."""

MOST_LINES, MOST_KEYS, MOST_CHARS = 4000, 200, 400  # of a process, of a fact, of a text
LAZY = ("seed", "rows", "loaded", "memory")  # not told of a process that does nothing else, such as a loader of data
EVERY_S, GROWTH = (
    5.0,
    0.12,
)  # a block ends with as many events as all before it, or after 5 s and 12 % of the time so far
HASHED_BYTES = 32 << 20
NORMED_NUMBERS = {"cpu": 1 << 24, "cuda": 1 << 33}  # trained numbers up to which a block's last gradient is measured

# --- what is known of this process, and its file


class ThisProcess:
    """This process; a fork begins with a new one."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.file, self.lines, self.began_s = -1, 0, time.time()
        self.steps = self.depth = self.training = 0
        self.waiting: list[dict[str, Any]] = []
        self.told: dict[Any, int] = {}
        self.blocks: dict[Any, Any] = {}
        self.opened: dict[str, bool] = {}
        self.next_log_s = 0.0
        self.newest: Any = None
        self.last_log: dict[str, Any] | None = None


here = ThisProcess()


def small(value: Any, depth: int = 0) -> Any:
    """Return a small JSON value."""
    if isinstance(value, dict) and depth < 3:
        return {str(key)[:100]: small(each, depth + 1) for key, each in list(value.items())[:MOST_KEYS]}
    if isinstance(value, (list, tuple)) and depth < 3:
        return [small(each, depth + 1) for each in value[:50]]
    plain = value is None or (isinstance(value, (bool, int, float)) and abs(value) < 1 << 63)
    return value if plain else str(value)[:MOST_CHARS]


def tell(what: str, **facts: Any) -> None:
    """Write one fact; a lazy one waits for another one."""
    line = {"at_s": round(time.time(), 6), "what": what, "facts": small(facts)}
    if here.file < 0 and what in LAZY:
        here.waiting = [*here.waiting[:40], line]
        return
    if here.file < 0:
        folder = os.environ["AUTORL_OBSERVED"]
        os.makedirs(folder, exist_ok=True)
        name = os.path.join(folder, "%d-%.6f.jsonl" % (os.getpid(), here.began_s))  # noqa: UP031
        here.file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        ranks = [os.environ.get(each, "") for each in ("RANK", "WORLD_SIZE")]
        rank, size = (int(each) if each.isdigit() else None for each in ranks)
        argv = list(getattr(sys, "orig_argv", sys.argv))
        start = small({"argv": argv, "rank": rank, "world_size": size, "parent": os.getppid()})
        here.waiting.insert(0, {"at_s": round(here.began_s, 6), "what": "start", "facts": start})
        if getattr(sys.modules.get("multiprocessing.process"), "parent_process", lambda: None)() is not None:
            sys.modules["multiprocessing.util"].Finalize(None, end, exitpriority=-100)  # it ends by os._exit
    lines, here.waiting = [*here.waiting, line], []
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = "-m " + spec.name if spec is not None else (getattr(sys, "argv", None) or [""])[0]
    for each in lines[: MOST_LINES - here.lines]:
        here.lines += 1
        if here.lines == MOST_LINES:
            each = {**line, "what": "note", "facts": {"text": "no more is told of this process"}}  # noqa: PLW2901
        text = json.dumps({"pid": os.getpid(), "program": str(program)[:200], **each}, separators=(",", ":"))
        os.write(here.file, text.encode() + b"\n")


def once(key: Any, most: int = 1) -> bool:
    """Return whether this was asked fewer than `most` times."""
    here.told[key] = here.told.get(key, 0) + 1
    return here.told[key] <= most


def safely(function: Any, *args: Any) -> Any:
    """Call it, and tell its error instead of raising it."""
    try:
        return function(*args)
    except StopIteration:
        return None
    except Exception as error:
        try:
            if once("note", 5):
                tell("note", text=f"observer: {type(error).__name__}: {error}")
        except Exception:
            here.lines = MOST_LINES  # there is no way to write
        return None


# --- wrapping: the wrapped function keeps its name, signature and place, so it pickles and shows its source as before


def around(owner: Any, name: str, watch: Watch) -> None:
    """Let `watch`, a generator function, see the calls of owner.name: begun with (args, kwargs), it is sent the result."""
    raw = vars(owner).get(name)
    original = getattr(raw, "__func__", raw)
    if not callable(original) or hasattr(original, "_autorl_observed"):
        return

    @functools.wraps(original)
    def observed(*args: Any, **kwargs: Any) -> Any:
        seen, process = watch(args, kwargs), here
        safely(next, seen)
        process.depth += 1
        try:
            result = original(*args, **kwargs)
        except BaseException:
            safely(seen.close)
            raise
        finally:
            process.depth -= 1
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


def outermost(watch: Watch) -> Watch:
    """Skip calls inside other observed calls: a save writes by another library's save."""
    return lambda args, kwargs: watch(args, kwargs) if here.depth <= here.training else (_ for _ in ())


def argument(args: Any, kwargs: Any, place: int, *names: str) -> Any:
    """Return the argument at `place`, or by one of these names; None if it was not given."""
    return args[place] if len(args) > place else next((kwargs[name] for name in names if name in kwargs), None)


def reach(value: Any, *paths: str) -> Any:
    """Return the first of these attributes (`a.b.c`) that is not None."""
    for path in paths:
        found = functools.reduce(lambda each, name: getattr(each, name, None), path.split("."), value)
        if found is not None:
            return found
    return None


def dotted(kind: type) -> str:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None) if kind.__module__ == "__main__" else None
    return f"{kind.__module__ if spec is None else spec.name}.{kind.__qualname__}"


# --- blocks of events, so that 10^6 of them are some dozen lines: optimizer steps and generation


class Block:
    """Events that are told together."""

    def __init__(self, what: str, **facts: Any) -> None:
        self.what, self.facts, self.total, self.count, self.last_s = what, facts, 0, 0, 0.0
        self.sums: dict[str, int] = {}
        self.next_count, self.next_s = 1, 0.0

    def add(self, sums: dict[str, int], **first: Any) -> None:
        """Count an event; `first`: facts of a block's first one."""
        self.last_s = now = time.time()
        if not self.count:
            self.facts.update(first, from_s=now)
            self.next_s = now + max(EVERY_S, GROWTH * (now - here.began_s))
        self.count += 1
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0) + value
        if self.count >= self.next_count or now >= self.next_s:
            self.end()

    def end(self, **facts: Any) -> None:
        """Tell it, and begin the next."""
        self.total += self.count
        tell(self.what, **{**self.facts, "to_s": self.last_s, **self.sums, **facts})
        self.count, self.next_count, self.sums = 0, max(1, self.total), {}


class Steps(Block):
    """The steps of one optimizer. Its gradients are there when a step ends, and mostly not when the program ends."""

    def __init__(self, optimizer: Any) -> None:
        # No hold on it, which would keep a model in memory that the program has done with.
        self.optimizer, self.rate, self.last = weakref.ref(optimizer), None, 0
        trained = self.gradients()
        device, count = str(trained[0].device) if trained else "", sum(each.numel() for each in trained)
        Block.__init__(self, "steps", optimizer=dotted(type(optimizer)), parameters=count, device=device)

    def gradients(self) -> list[Any]:
        groups = reach(self.optimizer(), "param_groups") or ()
        return [each.grad for group in groups for each in group["params"] if each.grad is not None]

    def end(self, **facts: Any) -> None:
        torch, gradients, norm = sys.modules["torch"], self.gradients(), None
        small_enough = 0 < self.facts["parameters"] <= NORMED_NUMBERS.get(self.facts["device"].partition(":")[0], 0)
        if gradients and small_enough and all(type(each) is torch.Tensor and not each.is_sparse for each in gradients):
            with torch.no_grad():  # of sharded tensors several processes would have to take part
                norm = sum(float(each) ** 2 for each in torch._foreach_norm(gradients)) ** 0.5
        rates = [None if each is None else float(each) for each in (self.facts.pop("rate"), self.rate)]
        Block.end(self, last=self.last, rates=rates, norm=norm)


def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """See one step of any optimizer; torch calls it."""
    if not getattr(sys.modules.get("torch.compiler"), "is_compiling", bool)():
        safely(count_step, optimizer)


def count_step(optimizer: Any) -> None:
    here.steps += 1
    block: Any = here.blocks.get(id(optimizer))
    if block is None or block.optimizer() is not optimizer:
        if once("optimizer", 20):
            end_blocks()  # one that is gone may have had the same id
            here.newest = Steps(optimizer)
            tell_opened()
        else:  # a program may make one for each step
            here.blocks = {key: each for key, each in here.blocks.items() if each is not here.newest}
        block = here.blocks[id(optimizer)] = here.newest
        block.optimizer = weakref.ref(optimizer)
    block.last, block.rate = here.steps, optimizer.param_groups[0].get("lr")
    block.add({"count": 1}, first=here.steps, rate=block.rate)


def generation(look: Any) -> Watch:
    """Return a watch over generation. `look` returns (library, model, sampled, prompts, tokens in, tokens out so far)."""

    def watch(args: Any, kwargs: Any) -> Any:
        before, calls = 0, 1
        while True:
            by, model, sampled, prompts, tokens_in, made = look(args, kwargs, (yield))
            block = Block("generated", by=by, model=model, sampled=sampled)
            sums = {"calls": calls, "prompts": calls * prompts, "tokens_in": calls * tokens_in}
            sums["tokens_out"], before, calls = max(0, made - before), made, 0
            here.blocks.setdefault((by, model, sampled), block).add(sums, steps_before=here.steps)

    return outermost(watch)


def heat(given: Any) -> Any:
    """Return whether these sampling parameters sample; None if they don't say."""
    given = given[0] if isinstance(given, list) and given else given
    found = given.get("temperature") if isinstance(given, dict) else getattr(given, "temperature", None)
    return None if found is None else found > 0


@generation
def by_transformers(args: Any, kwargs: Any, result: Any) -> Any:
    given = argument(args, kwargs, 1, "inputs", "input_ids", "inputs_embeds")
    rows, length = tuple(given.shape[:2]) if given is not None else (1, 0)
    made = tuple(getattr(result, "sequences", result).shape[:2])
    repeated = 0 if "inputs_embeds" in kwargs or reach(args[0], "config.is_encoder_decoder") else length
    sampled = kwargs.get("do_sample", reach(argument(args, kwargs, 2, "generation_config"), "do_sample"))
    sampled = reach(args[0], "generation_config.do_sample") if sampled is None else sampled
    return "transformers", model_name(args[0]), sampled, rows, rows * length, made[0] * max(0, made[1] - repeated)


@generation
def by_vllm(args: Any, kwargs: Any, result: Any) -> Any:
    results = result if isinstance(result, list) else [result]
    tokens = [len(each.token_ids) for one in results for each in one.outputs]
    model = reach(args[0], "model_config.model", "llm_engine.model_config.model")
    sampled = heat(argument(args, kwargs, 2, "sampling_params"))
    return "vllm", model, sampled, len(results), sum(len(each.prompt_token_ids or ()) for each in results), sum(tokens)


@generation
def by_sglang(args: Any, kwargs: Any, result: Any) -> Any:
    given = reach(argument(args, kwargs, 1, "obj"), "sampling_params") or argument(args, kwargs, 2, "sampling_params")
    told = [each["meta_info"] for each in (result if isinstance(result, list) else [result]) if "meta_info" in each]
    tokens = [sum(each.get(name, 0) for each in told) for name in ("prompt_tokens", "completion_tokens")]
    return ("sglang", reach(args[0], "server_args.model_path"), heat(given), len(told), *tokens)


# --- trainers and their logs

FIT = dict.fromkeys(("verl", "lightning", "pytorch_lightning"), ("fit",))
TRAINING = {"transformers": ("train",), "trl": ("train", "step"), "openrlhf": ("fit", "ppo_train"), **FIT}
"""Methods of classes with `Trainer` in their names, in modules with `trainer` in theirs."""

USUAL = """learning_rate max_steps num_train_epochs per_device_train_batch_size gradient_accumulation_steps lr_scheduler_type
warmup_steps warmup_ratio weight_decay optim seed max_grad_norm bf16 fp16"""  # told even if they were not set
FIRST = ("algorithm", "data.", "actor_rollout_ref.actor.", "optim", "trainer.")  # of more settings than are told
OF_LIGHTNING = ("max_epochs", "max_steps", "accumulate_grad_batches", "precision", "gradient_clip_val", "num_devices")
OF_ACCELERATE = ("mixed_precision", "gradient_accumulation_steps", "num_processes", "distributed_type")


def model_name(model: Any) -> Any:
    """Return the name or path that a model was loaded from; None if it doesn't say."""
    name = reach(model, "name_or_path", "config._name_or_path", "module.name_or_path", "module.config._name_or_path")
    return name if isinstance(name, str) and name else None


def rows_in(data: Any) -> Any:
    return len(data) if hasattr(data, "__len__") else None


def flat(settings: Any, prefix: str = "", depth: int = 0) -> dict[str, Any]:
    """Return the scalars of nested settings by dotted names."""
    found = {}
    for name, given in (settings if hasattr(settings, "items") else vars(settings)).items():
        value = given.value if isinstance(getattr(given, "value", None), str) else given  # an enumeration
        if isinstance(value, (bool, int, float, str)):
            found[f"{prefix}{name}"] = value
        elif depth < 6 and (hasattr(value, "items") or "Namespace" in type(value).__name__):
            found.update(flat(value, f"{prefix}{name}.", depth + 1))
    return found


def arguments_of(trainer: Any) -> dict[str, Any]:
    """Return the settings: of transformers' those that were set or that a subclass added, else all scalars."""
    settings = reach(trainer, "args", "config", "_autorl_config", "strategy.args")
    if settings is None:
        module = reach(trainer, "lightning_module.hparams") or {}
        return {**flat({name: getattr(trainer, name, None) for name in OF_LIGHTNING}), **flat(module)}
    found: dict[str, Any] = flat(settings)
    kinds: Any = type(settings).__mro__
    names = [kind.__name__ for kind in kinds]
    if "TrainingArguments" in names:
        place = names.index("TrainingArguments")
        plain = {name: field.default for name, field in kinds[place].__dataclass_fields__.items()}
        own = set(USUAL.split()).union(*(vars(kind).get("__annotations__", ()) for kind in kinds[:place]))
        found = {k: v for k, v in found.items() if k[0] != "_" and (k in own or v != plain.get(k, v))}
    return dict(sorted(found.items(), key=lambda item: not item[0].startswith(FIRST)))


def training(args: Any, kwargs: Any) -> Any:
    """See a trainer's `train` or `fit`; of a method that is called again and again, the first calls."""
    trainer, before, steps_before, inside = args[0], here.training, here.steps, ("in", id(args[0]))
    is_first, here.training = once(inside), here.depth + 1  # a subclass's method calls its parent's
    try:
        name = dotted(type(trainer))
        facts = {"name": name, "bases": [dotted(each) for each in type(trainer).__mro__[1:-1]][:12]}
        data = reach(trainer, "train_dataset", "train_dataloader.dataset")
        data = reach(argument(args, kwargs, 2, "train_dataloaders"), "dataset") if data is None else data
        model = model_name(reach(trainer, "model") or argument(args, kwargs, 1, "model"))
        facts.update(model=model, rows=safely(rows_in, data))
        if is_first and once(("began", name), 20):
            tell("trainer", phase="began", arguments=safely(arguments_of, trainer), **facts)
            tell_opened()
        yield
        if is_first and once(("ended", name), 20):
            steps, history = reach(trainer, "state.global_step", "global_step"), reach(trainer, "state.log_history")
            last = figures(history[-1] if history else reach(trainer, "callback_metrics") or {})
            steps = steps if isinstance(steps, int) else here.steps - steps_before
            end_blocks()
            tell("trainer", phase="ended", steps=steps, last=last, **facts)
    finally:
        here.training = before
        if is_first:
            here.told.pop(inside, None)


def configured(args: Any, kwargs: Any) -> Any:
    args[0]._autorl_config = argument(args, kwargs, 1, "cfg")
    yield


def hook_recipes(module: Any) -> None:
    """Hook torchtune's recipes: programs of their own, whose class derives from this interface."""
    before = module.FTRecipeInterface.__init_subclass__.__func__

    def hooked(cls: Any, *args: Any, **kwargs: Any) -> None:
        before(cls, *args, **kwargs)
        for name, watch in (("__init__", configured), ("train", training)):
            safely(around, cls, name, watch)

    module.FTRecipeInterface.__init_subclass__ = classmethod(hooked)


@outermost
def prepared(args: Any, kwargs: Any) -> Any:
    """See an own loop that uses accelerate; trainers use it too."""
    yield
    if any(hasattr(each, "param_groups") for each in args) and not here.training and once("accelerate", 5):
        model = next((model_name(each) for each in args[1:] if hasattr(each, "named_parameters")), None)
        rows = next((rows_in(each.dataset) for each in args[1:] if hasattr(each, "dataset")), None)
        settings = {name: str(getattr(args[0], name, None)) for name in OF_ACCELERATE}
        name = dotted(type(args[0]))
        tell("trainer", phase="began", name=name, bases=[], arguments=settings, model=model, rows=rows)


def figures(logs: Any) -> dict[str, Any]:
    """Return the figures of a log line by name."""
    items = list(dict(logs).items())[:120]
    plain = [(str(key)[:100], each.item() if getattr(each, "shape", None) == () else each) for key, each in items]
    return {key: each for key, each in plain if isinstance(each, (int, float)) and not isinstance(each, bool)}


def logs(figures_at: int, step_at: int) -> Watch:
    """Return a watch over logging: the first twenty lines, then one a while, and the last one."""

    def watch(args: Any, kwargs: Any) -> Any:
        found = argument(args, kwargs, figures_at, "logs", "data", "payload", "values", "logs_dict", "tag")
        found = {found: argument(args, kwargs, figures_at + 1, "scalar_value")} if isinstance(found, str) else found
        yield
        step = argument(args, kwargs, step_at, "step", "global_step")
        step, now = step if isinstance(step, int) else reach(args[0], "state.global_step"), time.time()
        here.last_log = {**found, "step": step}
        if once("log", 20) or now >= here.next_log_s:
            here.next_log_s = now + max(1.0, 0.02 * (now - here.began_s))
            tell_log()

    return outermost(watch)


def tell_log() -> None:
    found, here.last_log = here.last_log, None
    if found is not None:
        tell("log", **figures(found))


# --- data, models, seeds

TEXTS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
NOT_DATA = (
    "config.json",
    "index.json",
    "tokenizer",
    "_tokens",
    "vocab.json",
    "template",
    "_state",
    "/.",
    "/site-packages/",
)
PATHS = ("pretrained_model_name_or_path", "model_id", "model", "model_path", "save_directory", "filename", "f")
WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
NOT_WEIGHTS = ("optimizer", "scheduler", "rng_state", "training_args", "scaler", "_states")


def tell_rows(path: str, rows: Any = None) -> None:
    """Tell a file of rows, or a data set by name."""
    path = os.path.abspath(path) if os.path.isfile(path) else path
    if here.opened.get(path):
        return
    here.opened[path], digest = True, None
    if os.path.isfile(path) and os.path.getsize(path) <= HASHED_BYTES:
        import hashlib

        with open(path, "rb") as file:
            data = file.read()
        digest = hashlib.sha256(data).hexdigest()
        if rows is None and path.endswith((".jsonl", ".csv", ".tsv")):
            rows = data.count(b"\n") + (data[-1:] not in (b"\n", b""))
    tell("rows", path=path, rows=rows, sha256=digest)


def on_open(args: Any) -> None:
    """Note the data files that the program opens to read them."""
    wanted = type(args[0]) is str and args[0].endswith(TEXTS) and args[1] in ("r", "rb", "rt")
    if wanted and len(here.opened) < 100 and not any(part in args[0] for part in NOT_DATA):
        here.opened.setdefault(os.path.abspath(args[0]), False)


def tell_opened() -> None:
    """Tell the files that were opened before training began."""
    for path in list(here.opened):
        safely(tell_rows, path)


@outermost
def data_loaded(args: Any, kwargs: Any) -> Any:
    path = argument(args, kwargs, int(bool(args) and isinstance(args[0], type)), "path", "path_or_paths")
    result = yield
    files = kwargs.get("data_files") or path
    files = next(iter(files.values())) if isinstance(files, dict) else files
    rows = safely(rows_in, next(iter(result.values())) if isinstance(result, dict) else result)
    for each in (files if isinstance(files, list) else [files])[:8]:
        tell_rows(str(each), rows)


def kept(what: str, place: int, whole: bool = True) -> Watch:
    """Return a watch over loading or saving: of a model, or of a file of weights."""

    def watch(args: Any, kwargs: Any) -> Any:
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
        if once(what, 100):
            tell(what, **facts)

    return outermost(watch)


def adapted(args: Any, kwargs: Any) -> Any:
    yield
    config = argument(args, kwargs, 2, "peft_config")
    if hasattr(config, "lora_alpha") and once("lora", 10):
        targets = sorted(config.target_modules) if isinstance(config.target_modules, set) else config.target_modules
        tell("lora", r=config.r, alpha=config.lora_alpha, dropout=config.lora_dropout, targets=targets)


def seeded(args: Any, kwargs: Any) -> Any:
    value = argument(args, kwargs, 0, "seed")
    if isinstance(value, int) and once(("seed", value)) and once("seed", 5):
        tell("seed", value=value)
    yield


# --- which names are watched


def hook_optimizers(module: Any) -> None:
    sys.addaudithook(lambda event, args: safely(on_open, args) if event == "open" else None)
    module.register_optimizer_step_post_hook(after_step)


SPECIAL = {"torch.optim.optimizer": hook_optimizers, "torchtune.recipe_interfaces": hook_recipes}
SAVE, SAVE_FILE, LOAD_FILE, LOG = kept("saved", 1), kept("saved", 1, False), kept("loaded", 0, False), logs(1, 2)
HOOKS: dict[str, dict[str, Watch]] = {
    "transformers.generation.utils:GenerationMixin": {"generate": by_transformers},
    "transformers.modeling_utils:PreTrainedModel": {"from_pretrained": kept("loaded", 1), "save_pretrained": SAVE},
    "transformers.trainer:Trainer": {"log": LOG},
    "peft.peft_model:PeftModel": {"__init__": adapted, "from_pretrained": kept("loaded", 2), "save_pretrained": SAVE},
    "accelerate.accelerator:Accelerator": {"prepare": prepared, "log": LOG},
    "datasets.load:": {"load_dataset": data_loaded},
    "datasets.arrow_dataset:Dataset": dict.fromkeys(("from_json", "from_csv", "from_parquet"), data_loaded),
    "safetensors.torch:": {"save_file": SAVE_FILE, "load_file": LOAD_FILE},
    "torch.serialization:": {"save": SAVE_FILE, "load": LOAD_FILE},
    "torch.random:": {"manual_seed": seeded},
    "torch.utils.tensorboard.writer:SummaryWriter": {"add_scalar": logs(1, 3)},
    "vllm.entrypoints.llm:LLM": {"__init__": kept("loaded", 1), "generate": by_vllm, "chat": by_vllm},
    "vllm.v1.engine.async_llm:AsyncLLM": {"generate": by_vllm},
    "sglang.srt.entrypoints.engine:Engine": {"__init__": kept("loaded", 9), "generate": by_sglang},
    "sglang.srt.managers.tokenizer_manager:TokenizerManager": {"generate_request": by_sglang},
    "lightning.pytorch.trainer.trainer:Trainer": {"save_checkpoint": SAVE_FILE},
    "pytorch_lightning.trainer.trainer:Trainer": {"save_checkpoint": SAVE_FILE},
    "verl.utils.tracking:Tracking": {"log": LOG},
    "openrlhf.utils.logging_utils:WandbLogger": {"log_train": logs(2, 1)},
    "openrlhf.utils.logging_utils:TensorboardLogger": {"log_train": logs(2, 1)},
    "torchtune.training.metric_logging:DiskLogger": {"log_dict": LOG},
    "torchtune.training.metric_logging:StdoutLogger": {"log_dict": LOG},
    "wandb.sdk.wandb_run:Run": {"log": LOG},
}


def is_trainers(name: str) -> bool:
    return "trainer" in name and name.partition(".")[0] in TRAINING


def hook(module: Any) -> None:
    """Set the hooks of a module that has run."""
    name = module.__name__
    if name in SPECIAL:
        SPECIAL[name](module)
    for place, functions in HOOKS.items():
        where, _, kind = place.partition(":")
        owner = getattr(module, kind, None) if kind else module
        for function, watch in functions.items() if where == name and owner is not None else ():
            around(owner, function, watch)
    for each in list(vars(module).values()) if is_trainers(name) else ():
        if isinstance(each, type) and each.__module__ == name and "Trainer" in each.__name__:
            for method in TRAINING[name.partition(".")[0]]:
                around(each, method, training)


class HookingFinder:
    """Finder that lets the ordinary finders find a module, and hooks it once it has run."""

    def __init__(self) -> None:
        self.left = {place.partition(":")[0] for place in HOOKS} | set(SPECIAL)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.left and not is_trainers(name):
            return None
        self.left.discard(name)
        found = (each.find_spec(name, path, target) for each in list(sys.meta_path) if each is not self)
        spec = next((each for each in found if each is not None), None)
        safely(self.watch, spec)
        return spec

    def watch(self, spec: Any) -> None:
        if spec is None or spec.loader is None:
            return
        loader, run = spec.loader, spec.loader.exec_module

        def exec_module(module: Any) -> None:
            vars(loader).pop("exec_module", None)
            run(module)
            safely(hook, module)

        loader.exec_module = exec_module


# --- begin and end


def start(*wanted: Any) -> Any:
    """Put the observer's finder first, and let it find the first module."""
    finder: Any = HookingFinder()
    sys.meta_path.insert(0, finder)
    os.register_at_fork(after_in_child=here.begin)
    return finder.find_spec(*wanted)


def end_blocks() -> None:
    for block in list(here.blocks.values()):
        if block.count:
            block.end()


def tell_crash() -> None:
    error = getattr(sys, "last_value", None)
    place, where = getattr(error, "__traceback__", None), None
    while place is not None:
        file = place.tb_frame.f_code.co_filename
        if where is None or not file.startswith((sys.prefix, sys.base_prefix, "<frozen")):
            where = f"{file}:{place.tb_lineno}"
        place = place.tb_next
    if error is not None:
        lines = [each.strip() for each in str(error).splitlines() if any(map(str.isalnum, each))]
        tell("crashed", type=type(error).__name__, message=lines[-1] if lines else "", where=where)


def tell_memory() -> None:
    if here.file >= 0:
        import resource

        cuda, used = reach(sys.modules.get("torch"), "cuda"), resource.getrusage(resource.RUSAGE_SELF)
        peak = cuda.max_memory_allocated() if cuda is not None and cuda.is_initialized() else None
        tell("memory", gpu_peak_bytes=peak, rss_peak_bytes=used.ru_maxrss * 1024)


def end() -> None:
    """Tell what is left, when the process ends."""
    for each in (tell_log, end_blocks, tell_crash, tell_memory):
        safely(each)
