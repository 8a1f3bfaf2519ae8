"""The peer of `gpu_llm`: a Llama in PyTorch as a user would write it for speed, through torch.compile.

    python -m benchmarks.torch_llama 8b --batch 1

Linear layers of q, k and v in one, gate and up in one, a static KV cache, `reduce-overhead` (CUDA graphs), coordinate
descent tuning. bf16, random weights, greedy. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu_llm import MODELS

EPS = 1e-5


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, d: int, wide: int) -> None:
        super().__init__()
        self.shape = (heads, kv_heads, d)
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * d, bias=False)
        self.o = nn.Linear(heads * d, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * wide, bias=False)
        self.down = nn.Linear(wide, hidden, bias=False)
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(hidden)) for _ in range(2))

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], kv: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        (heads, kv_heads, d), (batch, tokens, hidden) = self.shape, x.shape
        qkv = self.qkv(F.rms_norm(x, (hidden,), self.norms[0], EPS)).view(batch, tokens, -1, d).transpose(1, 2)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
        kv[0][:, :, positions], kv[1][:, :, positions] = rotate(k, *rope), v
        y = F.scaled_dot_product_attention(rotate(q, *rope), kv[0], kv[1], attn_mask=mask, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, tokens, -1))
        gate, up = self.gate_up(F.rms_norm(x, (hidden,), self.norms[1], EPS)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


class Llama(nn.Module):
    def __init__(self, config: dict, batch: int, context: int) -> None:
        super().__init__()
        hidden, heads, kv_heads = (config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
        d, layers, vocab = config["head_dim"], config["num_hidden_layers"], config["vocab_size"]
        self.embed, self.head = nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab, bias=False)
        self.blocks = nn.ModuleList(
            Block(hidden, heads, kv_heads, d, config["intermediate_size"]) for _ in range(layers)
        )
        self.norm = nn.Parameter(torch.ones(hidden))
        angles = torch.outer(
            torch.arange(context).float(), config["rope_theta"] ** (-torch.arange(0, d, 2).float() / d)
        )
        self.register_buffer("angles", torch.cat([angles, angles], -1))
        self.register_buffer("causal", torch.ones(context, context, dtype=torch.bool).tril())
        for n in range(layers):
            self.register_buffer(f"kv{n}", torch.zeros(2, batch, kv_heads, context, d))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x, angles = self.embed(ids), self.angles[positions]
        rope = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        mask = self.causal[None, None, positions]
        for n, block in enumerate(self.blocks):
            x = block(x, rope, getattr(self, f"kv{n}"), positions, mask)
        return self.head(F.rms_norm(x[:, -1], (x.shape[-1],), self.norm, EPS)).argmax(-1, keepdim=True)


@torch.inference_mode()
def measure(name: str, batch: int, context: int) -> dict:
    """Milliseconds of a decode step at `context` tokens, and of a prompt of as many."""
    torch.set_default_dtype(torch.bfloat16)
    torch._inductor.config.coordinate_descent_tuning = True
    with torch.device("cuda"):
        model = Llama(MODELS[name], batch, 2 * context)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.02)
    begin = time.perf_counter()
    decode = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    prefill = torch.compile(model, fullgraph=True, dynamic=False)
    ids = torch.randint(0, MODELS[name]["vocab_size"], (batch, context), device="cuda")
    at = torch.arange(2 * context, device="cuda")
    token = prefill(ids, at[:context]).clone()
    for n in range(4):
        token = decode(token, at[context + n : context + n + 1]).clone()
    torch.cuda.synchronize()
    compiled = time.perf_counter() - begin
    steps = [_elapsed(lambda n=n: decode(token, at[context + n % 64 : context + n % 64 + 1])) for n in range(200)]
    prompts = [_elapsed(lambda: prefill(ids, at[:context])) for _ in range(7)]
    return {"model": name, "peer": "torch.compile", "batch": batch, "context": context, "ms": round(statistics.median(steps), 4),
            "prefill_ms": round(statistics.median(prompts), 3), "compile_s": round(compiled, 1)}  # fmt: skip


def _elapsed(work: object) -> float:
    """Milliseconds between events around it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()  # type: ignore[operator]
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=512)
    options = parser.parse_args()
    print(json.dumps(measure(options.model, options.batch, options.context)), flush=True)


if __name__ == "__main__":
    main()
