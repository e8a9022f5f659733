"""attention.py: the tokens of a micro-batch packed end to end, and the attention that goes with it. Used by model.py and
sampler.py.

No padding, and no prompt twice: in the trainer a prompt is computed once for all rows that continue it (pack, attention over
packed tokens); in the sampler its keys and values are kept once, beside each row's own (Prefix, GrowingLayer). The layers
are transformers' own; this is the attention function that they call.

Legend: B rows, S packed tokens, T tokens of a response, L tokens of the longest prompt, U prompts.
"""
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


@dataclass
class Packed:
    """The tokens of a micro-batch laid end to end: every distinct prompt once, then of each response all but its last token,
    which predicts nothing. S tokens in all."""

    ids: torch.Tensor  # (S,)
    positions: torch.Tensor  # (S,): of the token in its own row
    prompts: list[tuple[int, int]]  # first and last + 1 token of each prompt
    buckets: list[tuple]  # (prompt, first, last + 1, rows, longest, slots): responses to one prompt, of about one length, for attention
    before: list[list[int]]  # of each row, where the tokens stand that predict its response


def pack(prompts: list[list[int]], responses: list[list[int]], device) -> tuple[Packed, list[int]]:
    """Pack B prompts and responses; also returns the order in which the responses lie."""
    number: dict[tuple, int] = {}
    which = [number.setdefault(tuple(p), len(number)) for p in prompts]
    ids, positions, spans = [], [], []
    for prompt in number:
        spans.append((len(ids), len(ids) + len(prompt)))
        ids += prompt
        positions += range(len(prompt))
    order, before, buckets = sorted(range(len(prompts)), key=lambda i: (which[i], len(responses[i]))), [[]] * len(prompts), []
    for i in order:
        start, length, past = len(ids), max(len(responses[i]) - 1, 0), len(prompts[i])
        before[i] = [spans[which[i]][1] - 1, *range(start, start + length)]
        ids += responses[i][:length]
        positions += range(past, past + length)
        if not length:
            continue
        if not buckets or buckets[-1][0] != which[i] or length > 1.3 * buckets[-1][1][0] + 8:
            buckets.append((which[i], [], start))
        buckets[-1][1].append(length)
    done = []
    for prompt, lengths, start in buckets:  # padded to the bucket's longest row, row b's token t has the slot b * longest + t
        slots = None if min(lengths) == max(lengths) else torch.tensor(
            [b * max(lengths) + t for b, length in enumerate(lengths) for t in range(length)], device=device)
        done.append((prompt, start, start + sum(lengths), len(lengths), max(lengths), slots))
    return Packed(torch.tensor(ids, device=device), torch.tensor(positions, device=device), spans, done, before), order


def micro_batches(prompts: list[list[int]], responses: list[list[int]], token_budget: int, ways: int = 1) -> list[list[int]]:
    """Indices of B rows in groups of at most token_budget tokens, each distinct prompt of a group counted once; a longer row
    goes alone. Rows of a prompt stay together. The gradient does not depend on the grouping.

    The number of groups is a multiple of `ways`, the ranks that take turns with them: of about equal size, the neighbours of like
    size, so that the ranks finish each turn together. Where there are fewer rows, some are empty.
    """
    first = {}
    for i, prompt in enumerate(prompts):
        first.setdefault(tuple(prompt), i)
    order = sorted(range(len(prompts)), key=lambda i: (first[tuple(prompts[i])], len(responses[i]), i))

    def size(group):
        return sum(len(responses[i]) for i in group) + sum(map(len, {tuple(prompts[i]) for i in group}))

    if ways > 1:
        weights = [len(responses[i]) + 1 + (not n or prompts[order[n - 1]] != prompts[i]) * len(prompts[i]) for n, i in enumerate(order)]
        count = ways * -(-size(order) // (token_budget * ways))
        while True:
            groups = list(filter(None, cut(order, weights, count)))
            if all(size(group) <= token_budget or len(group) == 1 for group in groups):
                return [[]] * (-len(groups) % ways) + sorted(groups, key=size)
            count += ways * -(-count // (8 * ways))  # an eighth more: a prompt over the budget leaves each of its rows alone, soon
    groups, group, used = [], [], 0
    for i in order:
        new = not group or prompts[group[-1]] != prompts[i]
        if group and used + len(responses[i]) + new * len(prompts[i]) > token_budget:
            groups.append(group)
            group, used, new = [], 0, True
        group.append(i)
        used += len(responses[i]) + new * len(prompts[i])
    return groups + [group] if group else groups


def cut(items: list, weights: list[int], count: int) -> list[list]:
    """The items in `count` runs of about equal weight; runs may be empty. An item goes where its middle lies."""
    runs, total, before = [[] for _ in range(count)], sum(weights), 0
    for item, weight in zip(items, weights):
        runs[(2 * before + weight) * count // (2 * total)].append(item)
        before += weight
    return runs


# ------------------------------------------------------------------------------------------------------ packed tokens


def attention(module, query, key, value, attention_mask, scaling=None, packed=None, prefix=None, **kwargs):
    """The attention of every policy, registered with transformers: packed tokens in the trainer, one new token a row in the
    sampler, anything else as transformers itself does it. query (B, heads, T, D), key and value (B, kv_heads, T, D)."""
    window = kwargs.get("sliding_window")
    if packed is not None:
        return packed_attention(query[0], key[0], value[0], packed, scaling, window)[None], None
    if prefix is not None:
        return decode_attention(query[:, :, 0], key, value, prefix, module.layer_idx, scaling, window)[:, None], None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


AttentionInterface.register("rlep", attention)
AttentionMaskInterface.register("rlep", sdpa_mask)


def packed_attention(query, key, value, packed: Packed, scaling, window: int | None) -> torch.Tensor:
    """query (heads, S, D), key and value (kv_heads, S, D) of packed tokens. A prompt attends to itself, a response to its
    prompt and itself. Returns (S, heads, D)."""
    def attend(q, k, v, past):  # (B, heads, T, D), (B, kv_heads, past + T, D): causal, the last query sees all keys
        length = q.shape[2]
        if window and past + length > window:
            mask = torch.ones(length, past + length, dtype=torch.bool, device=q.device).tril(past).triu(past - window + 1)
        elif q.device.type == "cuda":
            mask = causal_lower_right(length, past + length)  # in the kernel
        else:
            mask = torch.ones(length, past + length, dtype=torch.bool, device=q.device).tril(past) if past else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=len(query) != len(key))

    out = []
    for start, end in packed.prompts:
        q, k, v = (x[None, :, start:end] for x in (query, key, value))
        out.append(attend(q, k, v, 0)[0].transpose(0, 1))
    for prompt, start, end, rows, length, slots in packed.buckets:
        def rows_of(x):  # (heads, S, D) -> (rows, heads, T, D), short rows padded with zeros that no real query sees
            x = x[:, start:end].transpose(0, 1)
            if slots is not None:
                x = x.new_zeros(rows * length, *x.shape[1:]).index_copy(0, slots, x)
            return x.unflatten(0, (rows, -1)).transpose(1, 2)

        first, last = packed.prompts[prompt]
        k, v = (torch.cat([x[None, :, first:last].expand(rows, -1, -1, -1), rows_of(x)], 2) for x in (key, value))
        y = attend(rows_of(query), k, v, last - first).transpose(1, 2).flatten(0, 1)  # (rows * T, heads, D)
        out.append(y if slots is None else y.index_select(0, slots))
    return torch.cat(out)


# -------------------------------------------------------------------------------------------------- one new token a row


class GrowingLayer(DynamicLayer):
    """Keys and values of one layer in a buffer with room to grow: a DynamicLayer copies all of them for each new token."""

    room = 0  # tokens that fit the buffers

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.keys, self.values = self._append(self.keys, key_states), self._append(self.values, value_states)
        self.room = self.keys.stride(1) // self.keys.stride(2)
        return self.keys, self.values

    def _append(self, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """old (B, heads, L, D), a view of the start of its buffer, and new (B, heads, l, D) as a view of L + l tokens."""
        length = old.shape[2] + new.shape[2]
        if length > self.room:
            buffer = new.new_empty(*new.shape[:2], max(2 * length, 64), new.shape[3])
            buffer[:, :, :old.shape[2]] = old
        else:
            buffer = old.as_strided((*old.shape[:2], self.room, old.shape[3]), old.stride())
        buffer[:, :, old.shape[2]:length] = new
        return buffer[:, :, :length]

    def batch_select_indices(self, indices):
        super().batch_select_indices(indices)
        self.room = 0  # what was selected is a tensor of its own


class Prefix:
    """Keys and values of U prompts, kept once for all rows that continue them: the sampler's cache holds a row's own tokens."""

    def __init__(self, layers: list[tuple[torch.Tensor, torch.Tensor]], prompts: list[tuple[int, int]], which: torch.Tensor):
        """layers: keys and values (kv_heads, S, D) of packed prompts, layer by layer; which: the prompt of each row, (B,)."""
        self.lengths = torch.tensor([end - start for start, end in prompts], device=which.device)  # (U,)
        starts = torch.tensor([start for start, _ in prompts], device=which.device)
        index = starts[:, None] + torch.arange(int(self.lengths.max()), device=which.device).clamp(max=self.lengths[:, None] - 1)  # (U, L)
        self.layers = [tuple(x[:, index].transpose(0, 1).contiguous() for x in layer) for layer in layers]  # (U, kv_heads, L, D)
        self.keep(which)

    def keep(self, which: torch.Tensor) -> None:
        """Go on with the rows whose prompts are `which` (B,), in order; prompts that no row has any more are dropped. Rows of a prompt
        that do not lie together count as rows of two."""
        prompts, number, counts = torch.unique_consecutive(which, return_inverse=True, return_counts=True)
        if prompts.tolist() != list(range(len(self.lengths))):
            self.lengths, self.layers = self.lengths[prompts], [tuple(x[prompts] for x in layer) for layer in self.layers]
        self.which, self.group = number, int(counts.max())  # rows of the largest group
        self.slots = number * self.group + torch.arange(len(which), device=which.device) - (counts.cumsum(0) - counts)[number]
        position = torch.arange(self.layers[0][0].shape[2], device=which.device)
        self.mask = (position < self.lengths[:, None])[number]  # (B, L)

    def product(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x (B, heads, K) times its prompt's y (U, kv_heads, K, N), one product for the rows of a prompt. Returns (B, heads, N)."""
        prompts, kv_heads = y.shape[:2]
        grouped = x.new_zeros(prompts * self.group, *x.shape[1:]).index_copy(0, self.slots, x)
        grouped = grouped.view(prompts, self.group, kv_heads, -1, x.shape[2]).transpose(1, 2).reshape(prompts * kv_heads, -1, x.shape[2])
        out = torch.bmm(grouped, y.flatten(0, 1)).view(prompts, kv_heads, self.group, -1, y.shape[3])
        return out.transpose(1, 2).reshape(prompts * self.group, x.shape[1], -1).index_select(0, self.slots)


def decode_attention(query, key, value, prefix: Prefix, layer: int, scaling, window: int | None) -> torch.Tensor:
    """Attention of one new token: query (B, heads, D), key and value (B, kv_heads, T, D) of the row's own tokens, after those
    of its prompt. Batched products straight on the caches: transformers' own would copy keys and values for each head of a
    group. Returns (B, heads, D)."""
    rows, kv_heads, length, size = key.shape
    keys, values = prefix.layers[layer]
    past = prefix.product(query, keys.transpose(2, 3))  # (B, heads, L)
    own = torch.bmm(query.reshape(rows * kv_heads, -1, size), key.flatten(0, 1).transpose(1, 2)).view(rows, -1, length)  # (B, heads, T)
    mask, width = prefix.mask[:, None], past.shape[2]
    if window:  # the new token sees the last `window` tokens, itself included
        mask = mask & (torch.arange(width, device=key.device) > prefix.lengths[prefix.which][:, None, None] + length - 1 - window)
        own[..., :max(length - window, 0)] = float("-inf")
    scores = torch.cat([past.masked_fill(~mask, float("-inf")), own], -1) * (size ** -0.5 if scaling is None else scaling)
    weights = scores.softmax(-1).to(value.dtype)
    own = torch.bmm(weights[..., width:].reshape(rows * kv_heads, -1, length), value.flatten(0, 1)).view(rows, -1, size)
    return prefix.product(weights[..., :width], values) + own
