"""Three updates with hand-made rows, on however many ranks there are; the first one stores what came of it. Run by test_ranks.py.

    torchrun --nproc_per_node=2 tests/updates.py MODELS OUT [DEVICE]
"""
import dataclasses
import os
import random
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch

import model as M
import ranks
import rlep
from settings import Settings

CASES = {"tied": "tied", "one row": "untied", "lora": "tied"}  # the second with a KL term, the third with checkpointing


def make_groups(case, seed=0):
    """Uneven groups of uneven lengths, one of them dead; in the first mini-batch of "one row" a single row alone trains."""
    rng, groups = random.Random(seed), []
    for q in range(6):
        rows = [rlep.Row([rng.randrange(4, 40) for _ in range(rng.choice((1, 3, 9, 30)))] + [1], 0.0, False, "stop", i > 3, advantage=rng.uniform(-2, 2))
                for i in range(rng.randrange(2, 6))]
        if q == 1 or (case == "one row" and q < 3):
            rows = [dataclasses.replace(row, advantage=0.5 if case == "one row" and q == i == 0 else 0.0) for i, row in enumerate(rows)]
        groups.append(rlep.Group({"prompt_ids": [rng.randrange(4, 40) for _ in range(rng.randrange(1, 9))]}, rows))
    return groups


def case_results(case, models, device="cpu"):
    """Of three steps of two updates each: sums, first gradients, weights at the end."""
    s = Settings(mini_batch=3, micro_tokens=70, kl_coef=0.05 if case == "one row" else 0.0)
    policy = M.load_policy(os.path.join(models, CASES[case]), device=device, lora_rank=4 if case == "lora" else 0,
                           activation_checkpointing=case == "lora")
    reference = M.load_policy(os.path.join(models, CASES[case]), device=device, train=False) if s.kl_coef else None
    if case == "lora":  # B starts at zero, and a gradient of zero shows nothing
        torch.manual_seed(1)
        for p in policy.parameters():
            value = (torch.randn(p.shape) * 0.05).to(p.device)
            p.data.copy_(M.distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None) if isinstance(p, M.DTensor) else value)
    optimizer = M.make_optimizer(policy, 1e-4, 0.1, 0.9, 0.999)
    assert all(p.dtype == torch.float32 for p in policy.parameters())
    out, step = {"sums": [], "gradients": []}, M.optimizer_step

    def watched(policy, optimizer, max_norm):
        out["gradients"].append(torch.cat([M.whole(p.grad).flatten() for p in policy.parameters()]))
        return step(policy, optimizer, max_norm)

    rlep.optimizer_step = watched
    for i in range(3):
        groups = make_groups(case, i)
        rlep.score_old(policy, s, groups)
        out["sums"].append(dict(rlep.update(policy, optimizer, s, groups, reference)))
        out.setdefault("old", []).append(torch.cat([row.old_logprobs for g in groups for row in g.rows]))
    out["weights"] = torch.cat([M.whole(p.detach()).flatten() for p in policy.parameters()])
    if not policy.lora:
        inner, head = policy.model.get_input_embeddings().weight, policy.head.weight
        assert (head is inner) == (CASES[case] == "tied")
    return out


def main(models, out, device="cpu"):
    ranks.start(device, 0)
    results = {}
    for ranks.PER_NODE in sorted({ranks.PER_NODE, ranks.RANKS}):  # on several nodes: as it is there, then as if it were one
        results[", ".join(ranks.mesh(device).mesh_dim_names)] = {case: case_results(case, models, device) for case in CASES}
    if ranks.FIRST:
        torch.save(results, out)
    ranks.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
