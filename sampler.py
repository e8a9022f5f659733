"""sampler.py: where responses come from. One small surface, used by train, collect and eval:

    push()      take over the policy's weights
    wake()      claim the sampler's memory     \  around generate(), so that sampler and trainer can
    sleep()     free it                        /   take turns on one GPU
    generate()  prompts of token ids -> n Samples each
    close()     end it

Legend: P prompts, B rows decoded together, V vocabulary, H hidden size.
"""
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import DynamicCache

from model import Policy, logits


@dataclass
class Sample:
    """One response as sampled."""

    ids: list[int]  # stop id included
    finish_reason: str  # "stop": ended by a stop id; "length": cut at the limit
    logprobs: list[float]  # of each id under the distribution it was drawn from


class TorchSampler:
    """The plain PyTorch sampler. It shares the trainer's weights, so push, wake and sleep have nothing to do.

    rows: how many responses are decoded at a time.
    """

    name = "torch"

    def __init__(self, policy: Policy, rows: int = 256):
        self.policy, self.rows = policy, rows

    def push(self) -> None: ...
    def wake(self) -> None: ...
    def sleep(self) -> None: ...
    def close(self) -> None: ...

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], n: int, seeds: list[int], *, max_tokens: int, temperature: float,
                 top_p: float = 1.0, progress: str | None = None) -> list[list[Sample]]:
        """n samples of each of P prompts (token ids). seeds: one integer per prompt, far apart (derive_seed).

        temperature 0 is greedy. Sample i of a prompt draws from its own stream, keyed by (seed, i): it does not depend
        on the other prompts, on n, or on the batch. progress: label of a progress bar, None for no bar.
        """
        was_training = self.policy.model.training
        self.policy.model.eval()  # checkpointing of activations, active in train mode, would switch the KV cache off
        done: dict[tuple[int, int], Sample] = {}
        jobs = [(p, i) for p in sorted(range(len(prompts)), key=lambda p: len(prompts[p])) for i in range(n)]
        bar = tqdm(total=len(jobs), desc=progress, unit="answer", leave=False, disable=None if progress else True)
        for start in range(0, len(jobs), self.rows):
            batch = jobs[start:start + self.rows]
            samples = self._decode([prompts[p] for p, _ in batch], [(seeds[p], i) for p, i in batch], max_tokens,
                                   temperature, top_p)
            done.update(zip(batch, samples))
            bar.update(len(batch))
        bar.close()
        self.policy.model.train(was_training)
        return [[done[p, i] for i in range(n)] for p in range(len(prompts))]

    def _decode(self, prompts, keys, max_tokens, temperature, top_p) -> list[Sample]:
        """Decode one batch with a KV cache; equal neighbouring prompts are computed once, finished rows are dropped."""
        policy, device = self.policy, self.policy.device
        unique = [i for i, p in enumerate(prompts) if i == 0 or p != prompts[i - 1]]
        repeats = torch.tensor([b - a for a, b in zip(unique, unique[1:] + [len(prompts)])], device=device)
        width = max(map(len, prompts))
        input_ids = torch.tensor([[0] * (width - len(prompts[i])) + prompts[i] for i in unique], device=device)
        # padded on the left, so that all rows decode at the same position
        mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in unique], device=device)
        padded = not bool(mask.all())
        cache = DynamicCache()
        position = (mask.cumsum(-1) - 1).clamp(min=0)
        with policy.autocast():
            hidden = policy.decoder(input_ids=input_ids, attention_mask=mask if padded else None, position_ids=position,
                                    past_key_values=cache, use_cache=True).last_hidden_state[:, -1]  # (P, H)
        index = torch.arange(len(unique), device=device).repeat_interleave(repeats)  # row -> its prompt
        cache.batch_select_indices(index)
        hidden, mask, position = hidden[index], mask[index], position[index, -1:]
        draws = None
        if temperature > 0:
            draws = torch.tensor(np.stack([np.random.Generator(np.random.Philox(key=[seed, i])).random(max_tokens)
                                           for seed, i in keys]), device=device)  # (B, max_tokens) uniform
        active = torch.arange(len(prompts), device=device)  # the rows still in the batch
        out_ids = torch.zeros(len(prompts), max_tokens, dtype=torch.long, device=device)
        out_logprobs = torch.zeros(len(prompts), max_tokens, device=device)
        length = torch.full((len(prompts),), max_tokens, device=device)
        stopped = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        stops = torch.tensor(policy.stop_ids, device=device)
        for t in range(max_tokens):
            with policy.autocast():
                z = logits(policy, hidden, temperature or 1.0)  # (B, V)
            ids, logprobs = draw(z, draws[active, t] if draws is not None else None, top_p)
            out_ids[active, t], out_logprobs[active, t] = ids, logprobs
            ended = torch.isin(ids, stops)
            ended &= ~stopped[active]  # rows that wait to be dropped go on producing tokens that nobody reads
            length[active[ended]] = t + 1
            stopped[active[ended]] = True
            keep = (~stopped[active]).nonzero()[:, 0]
            if len(keep) == 0 or t + 1 == max_tokens:
                break
            if len(keep) < 0.9 * len(active):  # compacting copies the cache: not for every single row
                cache.batch_select_indices(keep)
                active, ids, mask, position = active[keep], ids[keep], mask[keep], position[keep]
            position = position + 1
            mask = F.pad(mask, (0, 1), value=1)
            with policy.autocast():
                hidden = policy.decoder(input_ids=ids[:, None], attention_mask=mask if padded else None,
                                        position_ids=position, past_key_values=cache,
                                        use_cache=True).last_hidden_state[:, -1]
        return [Sample(ids[:n], "stop" if s else "length", lp[:n]) for ids, lp, n, s in zip(
            out_ids.tolist(), out_logprobs.tolist(), length.tolist(), stopped.tolist())]


def draw(z: torch.Tensor, uniform: torch.Tensor | None, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw ids (B,) from logits z (B, V) by inverting the cumulative distribution at uniform (B,); None takes the best.

    With top_p < 1 only the smallest set of ids whose probability reaches top_p is left, renormalised. Returns the ids
    and their log-probs (B,) under the distribution drawn from; greedy ids carry their log-prob at temperature 1.
    """
    logprobs = z.log_softmax(-1)  # (B, V)
    if uniform is None:
        best = logprobs.max(-1)
        return best.indices, best.values
    if top_p < 1:
        ordered, order = logprobs.sort(-1, descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()  # probability of the ids ahead
        drop = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logprobs = logprobs.masked_fill(drop, float("-inf")).log_softmax(-1)
    cumulative = logprobs.double().exp().cumsum(-1)  # float64: 152k probabilities of float32 do not add up to 1
    goal = uniform[:, None] * cumulative[:, -1:]
    # first id whose cumulative probability exceeds the goal; an id of probability zero never does
    ids = torch.searchsorted(cumulative, goal, right=True)[:, 0].clamp(max=z.shape[-1] - 1)
    return ids, logprobs.gather(-1, ids[:, None])[:, 0]
