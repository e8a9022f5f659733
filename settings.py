"""settings.py: every setting of the program in one flat dataclass, and the command line made from it.

    python rlep.py train --help          # the options of a command, with unit and default

To add an option, add a line to Settings and use `s.name`; help, parsing, checks of kind, config.json and resume follow.
"""
import dataclasses
import difflib
import importlib.util
import math
from dataclasses import dataclass, field

from data import InputError

ANY = -math.inf


def option(default, commands: str, group: str, text: str, low: float = ANY, high: float = math.inf, choices: tuple = ()):
    """A field of Settings: default, the commands that use it (t rain, c ollect, e val), group, help, allowed values."""
    return field(default=default, metadata=dict(commands=commands, group=group, help=text, low=low, high=high, choices=choices))


@dataclass
class Settings:
    """Defaults are the paper's for Qwen2.5-Math-7B where it names them; run_small.sh passes smaller ones."""

    model: str = option("", "tce", "model", "folder or hub name of a causal LM, an adapter folder, or a run folder (its newest checkpoint)")
    lora_rank: int = option(0, "t", "model", "rank of LoRA adapters on every matrix but the head; 0 trains all weights", 0)
    lora_alpha: int = option(32, "t", "model", "LoRA scale: the update is alpha / rank * B A", 1)
    load_4bit: bool = option(False, "tce", "model", "QLoRA: the frozen base in 4 bits (NF4, bitsandbytes), with --lora_rank or an adapter")
    device: str = option("auto", "tce", "model", "where to compute", choices=("auto", "cpu", "cuda"))
    dtype: str = option("auto", "tce", "model", "of activations (auto: bfloat16 on a GPU); weights that train are float32", choices=("auto", "float32", "bfloat16"))
    activation_checkpointing: bool = option(False, "t", "model", "recompute activations in the backward pass: less memory, a third more time")

    data: str = option("", "tce", "data", "questions: jsonl, parquet or hub names, several joined by commas (layouts: data.py)")
    eval_data: str = option("", "t", "data", "held-out questions for evaluation during training")
    max_questions: int = option(0, "tce", "data", "use only the first this many questions of --data; 0 uses all", 0)
    prompt_limit: int = option(1024, "tce", "data", "tokens; questions with a longer prompt are left out and counted", 1)
    response_limit: int = option(3072, "tce", "data", "tokens; a rollout is cut there, a longer stored answer is not replayed", 1)

    questions: int = option(512, "t", "rollout", "P: questions per step", 1)
    rollouts: int = option(16, "t", "rollout", "G: fresh rollouts per question; 0 is supervised fine-tuning on the pool alone", 0)
    temperature: float = option(1.0, "tce", "rollout", "of sampling, and of the log-probs in the loss; 0 is greedy (not in train)", 0)
    top_p: float = option(1.0, "tce", "rollout", "nucleus sampling: the likeliest ids up to this probability (not in train)", 1e-9, 1)
    dynamic_sampling: bool = option(False, "t", "rollout", "DAPO: sample on until P groups have fresh rollouts both right and wrong")
    dynamic_tries: int = option(10, "t", "rollout", "batches of P questions to try per step under dynamic sampling", 1)
    sampler: str = option("auto", "tce", "rollout", "where answers come from (auto: vLLM where it is installed and takes the model, else plain PyTorch)", choices=("auto", "torch", "vllm"))
    sampler_rows: int = option(256, "tce", "rollout", "responses decoded at a time", 1)
    gpu_memory_fraction: float = option(0.4, "tce", "rollout", "of the GPU's memory, for vLLM's weights and KV cache while it samples", 0.01, 0.99)
    push: str = option("merged", "tce", "rollout", "what vLLM gets of LoRA each step: weights with it merged in, or the adapter to apply", choices=("merged", "adapter"))

    pool: str = option("", "tc", "replay", "JSONL file of verified answers: train draws from it, collect fills it")
    replay: int = option(0, "t", "replay", "M: stored answers added to each question's group; 0 is the GRPO baseline", 0)
    replay_repeats: bool = option(False, "t", "replay", "fill up to M with repeats where a question has fewer distinct answers")
    replay_select: str = option("random", "t", "replay", "which of a question's answers", choices=("random", "shortest", "likeliest", "unlikeliest"))
    replay_hard: float = option(1.0, "t", "replay", "replay only where at most this share of the fresh rollouts is right; 1 is everywhere", 0, 1)
    replay_rate: float = option(1.0, "t", "replay", "replay only questions of which at most this share of the collected samples was right; 1 is everywhere", 0, 1)
    replay_baseline: str = option("shared", "t", "replay", "whose rewards make a group's mean and std: all rows' (the paper), or the fresh ones' alone", choices=("shared", "fresh"))
    replay_failures: int = option(0, "t", "replay", "stored wrong answers added as well (negative replay; collect with --keep_failures)", 0)

    grow_pool: bool = option(False, "t", "replay", "append the right fresh answers of this run to --pool, to be replayed from the next step on")
    grow_age: int = option(0, "t", "replay", "steps after which an answer that this run appended is no longer replayed; 0 is never", 0)

    overlong_buffer: int = option(512, "t", "reward", "tokens before response_limit over which the penalty grows; 0 is off", 0)
    overlong_factor: float = option(1.0, "t", "reward", "penalty at response_limit", 0)
    advantage_std: bool = option(True, "t", "reward", "divide advantages by the group's std; false is Dr. GRPO")
    verify_workers: int = option(2, "tce", "reward", "processes that verify answers", 1)
    verify_seconds: float = option(1.0, "tce", "reward", "time limit of one verification; an answer over it counts as wrong", 1e-3)

    mini_batch: int = option(64, "t", "loss", "questions per optimizer update", 1)
    clip_low: float = option(0.2, "t", "loss", "eps_low: ratios are clipped below 1 - this", 0, 1)
    clip_high: float = option(0.28, "t", "loss", "eps_high: ratios are clipped above 1 + this", 0)
    dual_clip: float = option(10.0, "t", "loss", "c: with a negative advantage a token's loss is at most c |A|", 1)
    is_correction: str = option("auto", "t", "loss", "of the gap between sampler and trainer, on fresh answers (auto: token with vLLM, else none; the paper has none)", choices=("auto", "none", "token", "sequence"))
    is_cap: float = option(2.0, "t", "loss", "token: largest weight trainer / sampler probability; sequence: answers off by more than this factor are left out", 1)
    kl_coef: float = option(0.0, "t", "loss", "weight of a KL penalty to --model (k3 estimator); 0 is off", 0)

    lr: float = option(1e-6, "t", "optimizer", "AdamW learning rate after warm-up", 0)
    warmup: int = option(10, "t", "optimizer", "steps of linear warm-up", 0)
    weight_decay: float = option(0.1, "t", "optimizer", "AdamW weight decay", 0)
    beta1: float = option(0.9, "t", "optimizer", "AdamW beta1", 0, 0.9999)
    beta2: float = option(0.999, "t", "optimizer", "AdamW beta2", 0, 0.99999)
    optimizer_8bit: bool = option(False, "t", "optimizer", "AdamW with its moments in 8 bits (bitsandbytes; paged to host memory on a GPU)")
    grad_clip: float = option(1.0, "t", "optimizer", "largest norm of the gradient", 1e-9)
    micro_tokens: int = option(32768, "t", "optimizer", "tokens of a micro-batch, each prompt in it counted once; lower it when memory runs out", 1)

    steps: int = option(400, "t", "run", "rollout steps", 1)
    eval_every: int = option(5, "t", "run", "steps between evaluations", 1)
    eval_samples: int = option(4, "t", "run", "samples per held-out question during training", 1)
    save_every: int = option(20, "t", "run", "steps between checkpoints", 1)
    keep: int = option(2, "t", "run", "newest checkpoints kept; 0 keeps all", 0)
    samples: int = option(32, "ce", "run", "K: samples per question", 1)
    min_correct: int = option(2, "c", "run", "questions with fewer correct samples stay out of the pool", 1)
    keep_failures: bool = option(False, "c", "run", "store wrong answers too, for --replay_failures")
    phase_minutes: float = option(0.0, "tce", "run", "time limit of loading, of sampling, of an update...: beyond it the run ends and names the phase; 0 is none", 0)
    profile: bool = option(False, "t", "run", "record the second step: a trace in the run folder (large if answers are long), and its ten largest costs")
    log: str = option("", "t", "run", "also send the metrics there (pip install it first); metrics.jsonl is written in any case", choices=("", "wandb", "tensorboard"))
    seed: int = option(0, "tce", "run", "of data order, sampling and replay draws", 0)
    out: str = option("", "te", "run", "run folder")
    overwrite: bool = option(False, "te", "run", "delete what --out holds from an earlier run and start again")

    gpus: int = option(8, "p", "plan", "GPUs of one node", 1)
    gpu_memory: float = option(80.0, "p", "plan", "GiB of each", 0.001)
    gpu_tflops: float = option(989.0, "p", "plan", "TFLOP/s of each in bfloat16 (H100: 989, A100: 312)", 0.001)
    mfu: float = option(0.4, "p", "plan", "share of that which training reaches; to be measured, the default is a guess", 0.001, 1)
    sampler_speed: int = option(4000, "p", "plan", "tokens per second that one GPU samples; to be measured, the default is a guess", 1)
    mean_length: int = option(1000, "p", "plan", "tokens of a response on average", 1)


COMMANDS = {"train": "train a policy with GRPO, or with RLEP when --replay is given",
            "collect": "sample answers to every question and store the verified ones in the pool",
            "eval": "avg@k, maj@k and pass@k per data set",
            "plan": "memory and time of a training run, told without a GPU and without weights"}
DEFAULTS = {"train": {}, "collect": {"samples": 64, "temperature": 0.7, "top_p": 0.95}, "eval": {}, "plan": {"model": "Qwen/Qwen2.5-Math-7B"}}  # the paper's
REQUIRED = {"train": ("model", "data", "out"), "collect": ("model", "data", "pool"), "eval": ("model", "data"), "plan": ("model",)}


def fields_of(command: str) -> dict[str, dataclasses.Field]:
    """The fields that the command uses, by name. A plan is for a training run: it takes train's."""
    letters = {"plan": "pt"}.get(command, command[0])
    return {f.name: f for f in dataclasses.fields(Settings) if set(letters) & set(f.metadata["commands"])}


def help_text(command: str) -> str:
    """Every option of the command with its default, by group."""
    lines = [f"python rlep.py {command} --name=value ...    {COMMANDS[command]}"]
    defaults, group = dataclasses.asdict(Settings()) | DEFAULTS[command], None
    for name, f in fields_of(command).items():
        if f.metadata["group"] != group:
            group = f.metadata["group"]
            lines.append(f"\n{group}:")
        value = str(defaults[name]).lower() if f.type is bool else defaults[name]
        choices = f": {', '.join(f.metadata['choices'])}" if f.metadata["choices"] else ""
        lines.append(f"  --{name:<24} {f.metadata['help']}{choices} [{'required' if name in REQUIRED[command] else value or 'none' if value == '' else value}]")
    return "\n".join(lines)


def parse_value(name: str, kind: type, text: str):
    """The option's text as int, float, bool or str; raises InputError that tells what was expected."""
    try:
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        value = kind(text)
        if kind is float and not math.isfinite(value):
            raise ValueError
        return value
    except (ValueError, KeyError):
        wanted = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
        raise InputError(f"--{name}={text}: expected {wanted}") from None


def parse(command: str, args: list[str]) -> Settings:
    """Command line to Settings; of an option given twice the last one counts. An option that only other commands use is
    noted and ignored, so that a script can hand the same ones to every phase. Raises InputError for anything else."""
    known, every = fields_of(command), {f.name for f in dataclasses.fields(Settings)}
    values = {}
    for arg in args:
        name, equals, text = arg.removeprefix("--").partition("=")
        if not arg.startswith("--") or not name:
            raise InputError(f"{arg!r}: options are written --name=value; see python rlep.py {command} --help")
        if name not in every:
            near = difflib.get_close_matches(name, known, 1, 0.0)
            raise InputError(f"--{name}: unknown option; the nearest is --{near[0]}")
        if name not in known:
            print(f"note: --{name} has no effect on {command}")
            continue
        if not equals and known[name].type is not bool:
            raise InputError(f"--{name}: needs a value, as in --{name}={known[name].default or '...'}")
        values[name] = parse_value(name, known[name].type, text if equals else "true")
    s = Settings(**DEFAULTS[command] | values)
    check(command, s)
    return s


def check(command: str, s: Settings) -> None:
    """Raise InputError for the first setting that makes no sense, and say what would."""
    for name, f in fields_of(command).items():
        value, low, high, choices = getattr(s, name), f.metadata["low"], f.metadata["high"], f.metadata["choices"]
        if name in REQUIRED[command] and not value:
            raise InputError(f"--{name} is required; see python rlep.py {command} --help")
        if choices and value not in choices:
            raise InputError(f"--{name}={value}: must be one of {', '.join(choices)}")
        if f.type in (int, float) and not low <= value <= high:
            raise InputError(f"--{name}={value}: must be at least {low:g}" + (f" and at most {high:g}" if high < math.inf else ""))
    if command != "train":
        return
    if s.log and not importlib.util.find_spec(s.log):
        raise InputError(f"--log={s.log}: is not installed; pip install {s.log}, or leave --log out")
    replay = s.replay + s.replay_failures
    if s.temperature == 0 or s.top_p < 1:
        raise InputError("train needs --temperature above 0 and --top_p=1: the loss scores the full distribution")
    if replay and not s.pool:
        raise InputError(f"--replay={s.replay}: needs --pool=pool.jsonl; python rlep.py collect makes one")
    if s.pool and not replay:
        raise InputError("--pool is given but --replay is 0: add --replay=2, or leave --pool out for the baseline")
    if s.rollouts == 0 and (not s.replay or s.dynamic_sampling):
        raise InputError("--rollouts=0 trains on the pool alone: it needs --replay above 0 and no --dynamic_sampling")
    if s.mini_batch > s.questions:
        raise InputError(f"--mini_batch={s.mini_batch}: larger than --questions={s.questions}")
    if s.overlong_buffer > s.response_limit:
        raise InputError(f"--overlong_buffer={s.overlong_buffer}: larger than --response_limit={s.response_limit}")
