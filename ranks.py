"""ranks.py: several processes ("ranks") started by torchrun, one per GPU. Used by model.py, sampler.py and rlep.py.

    torchrun --nproc_per_node=8 rlep.py train ...                                    # one node
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_endpoint=HOST:29500 ... rlep.py    # on each node; --out on a shared disk

Every rank samples and verifies its share of the questions; then all exchange their answers, which are small (token ids and
a few floats), so that every rank holds the same groups, computes the same advantages and replay draws, and takes its share
of the rows for scoring and updates. The loop reads as if there were one process. With one process nothing here does anything.

Also the watch over a run: phase() names what is going on, for the time limit and for the hint after a crash.
"""
import collections
import datetime
import faulthandler
import os
import sys
import threading
import time
import traceback

import torch
import torch.distributed as dist

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
PER_NODE = int(os.environ.get("LOCAL_WORLD_SIZE", RANKS))
FIRST = RANK == 0  # the rank that prints and writes


def start(device: str, phase_minutes: float) -> None:
    """Join the other ranks; only the first one prints. The phase "load" begins."""
    phase("load", phase_minutes)
    if RANKS == 1 or dist.is_initialized():
        return
    cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # waiting for the others must outlast the longest phase: the time limit of phase() is the one that cuts, and names it
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo",
                            timeout=datetime.timedelta(minutes=phase_minutes + 5 if phase_minutes else 60 * 24 * 7))
    if not FIRST:
        sys.stdout = open(os.devnull, "w")


def stop() -> None:
    """Leave together: no rank goes while another still needs it."""
    phase("end")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def mesh(device_type: str):
    """The ranks as a device mesh for FSDP2: one axis on one node; on several, replicas across nodes, shards within."""
    if RANKS == PER_NODE:
        return dist.init_device_mesh(device_type, (RANKS,), mesh_dim_names=("shard",))
    return dist.init_device_mesh(device_type, (RANKS // PER_NODE, PER_NODE), mesh_dim_names=("replicate", "shard"))


def gather(mine) -> list:
    """What each rank brought, in the order of ranks. Every rank must call it."""
    if RANKS == 1:
        return [mine]
    everyone = [None] * RANKS
    dist.all_gather_object(everyone, mine)
    return everyone


def share(items: list) -> list:
    """This rank's share of a list that all ranks have: every RANKS-th item."""
    return items[RANK::RANKS]


def merge(mine: list) -> list:
    """The whole list again, in its order, from every rank's results for its share()."""
    parts = gather(mine)
    whole = [None] * sum(map(len, parts))
    for rank, part in enumerate(parts):
        whole[rank::RANKS] = part
    return whole


def first(function, *args):
    """The first rank runs function(*args); every rank gets the result."""
    box = [function(*args) if FIRST else None]
    if RANKS > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def add(sums: dict) -> dict[str, float]:
    """The sums of each name over the ranks; a name that is missing is 0."""
    total = collections.defaultdict(float)
    for part in gather(dict(sums)):
        for name, value in part.items():
            total[name] += value
    return total


# ------------------------------------------------------------------------------------------------- watching over the run

_now, _limit = "start", None


def phase(name: str, minutes: float = 0) -> None:
    """From here on this process is at `name`; if that takes longer than `minutes`, it ends (0: no limit)."""
    global _now, _limit
    if _limit is not None:
        _limit.cancel()
    _now, _limit = name, None
    if minutes:
        _limit = threading.Timer(minutes * 60, _cut, (name, minutes))
        _limit.daemon = True
        _limit.start()


def _cut(name: str, minutes: float) -> None:
    try:
        with os.fdopen(os.memfd_create("where"), "w+b") as f:  # one write: the ranks' tracebacks would run into each other; no disk, it may be full
            f.write(f"error: rank {RANK}: {name} took longer than --phase_minutes={minutes:g}; where it stood is told below. If it only "
                    "needs more time, raise the limit; the same command continues\n".encode())
            f.flush()
            faulthandler.dump_traceback(f, all_threads=True)
            f.seek(0)
            os.write(2, f.read())
        time.sleep(5 if RANKS > 1 else 0)  # the limits of the other ranks end about now: each tells where it stood, the stuck one too
    finally:
        os._exit(3)  # the main thread may be stuck in a call that no exception reaches


SAMPLING = "--sampler_rows, --gpu_memory_fraction or --response_limit"
OUT_OF_MEMORY = {"load": "--gpu_memory_fraction (or add --lora_rank, more GPUs)", "sample": SAMPLING, "evaluate": SAMPLING,
                 "score": "--micro_tokens", "update": "--micro_tokens (or add --activation_checkpointing, --lora_rank, more GPUs)"}


def hint(error: BaseException) -> str:
    """What to do about a crash, in one line."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error):
        return f"out of memory in {_now}: lower {OUT_OF_MEMORY.get(_now, '--micro_tokens')}; python rlep.py plan tells what fits"
    return f"failed in {_now}; complete checkpoints are left as they were, and the same command continues from the newest"


def report_crash(kind, error, trace) -> None:
    """sys.excepthook: the traceback, the hint, and out at once, so that torchrun takes the other ranks down."""
    # __stderr__: torch.distributed puts a hook around this one, with a buffer that is lost on the quick exit
    traceback.print_exception(kind, error, trace, file=sys.__stderr__)
    print(f"error: rank {RANK}: {hint(error)}", file=sys.__stderr__, flush=True)
    if RANKS > 1:
        os._exit(1)  # an ordinary exit would wait for ranks that wait for this one


def refuse(error: Exception) -> None:
    """End with bad input's exit code 2 and one line. What every rank finds is told once: the first one is quicker."""
    if not FIRST:
        time.sleep(3)
    print(f"error: {error}" if FIRST else f"error: rank {RANK}: {error}", file=sys.stderr, flush=True)
    sys.exit(2) if RANKS == 1 else os._exit(2)
