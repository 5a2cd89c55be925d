"""Models of the usual shapes with random weights, written in plain torch, for serving benchmarks.

Convolutional networks take (batch, 3, 224, 224), transformers (batch, 128) tokens or the same pictures. Layer counts
and widths are those of the models' papers, so times and memory are realistic; the answers mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

TOKENS = 128


def conv(i: int, o: int, k: int = 3, stride: int = 1, groups: int = 1, act: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(i, o, k, stride, k // 2, groups=groups, bias=False), nn.BatchNorm2d(o)]
    return nn.Sequential(*layers, *([nn.ReLU(inplace=True)] if act else []))


class Bottleneck(nn.Module):
    def __init__(self, i: int, width: int, stride: int) -> None:
        super().__init__()
        o = width * 4
        self.body = nn.Sequential(conv(i, width, 1), conv(width, width, 3, stride), conv(width, o, 1, act=False))
        self.skip = nn.Identity() if i == o and stride == 1 else conv(i, o, 1, stride, act=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def head(features: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, 1000))


def resnet(blocks: Sequence[int]) -> nn.Module:
    layers: list[nn.Module] = [conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    width_in = 64
    for stage, count in enumerate(blocks):
        for n in range(count):
            layers.append(Bottleneck(width_in, 64 << stage, 2 if stage and n == 0 else 1))
            width_in = (64 << stage) * 4
    return nn.Sequential(*layers, head(width_in))


def vgg16() -> nn.Module:
    layers: list[nn.Module] = []
    i = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(i, width, 3, 1, 1), nn.ReLU(inplace=True)]
            i = width
        layers.append(nn.MaxPool2d(2))
    dense = [nn.Linear(25088, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, nn.Flatten(), *dense)


class Inverted(nn.Module):
    def __init__(self, i: int, o: int, stride: int, expand: int) -> None:
        super().__init__()
        wide = i * expand
        first = [] if expand == 1 else [conv(i, wide, 1)]
        self.body = nn.Sequential(*first, conv(wide, wide, 3, stride, groups=wide), conv(wide, o, 1, act=False))
        self.add = stride == 1 and i == o

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.add else self.body(x)


def mobilenet_v2() -> nn.Module:
    layers: list[nn.Module] = [conv(3, 32, 3, 2)]
    i = 32
    for t, c, n, s in ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
                       (6, 320, 1, 1)):  # fmt: skip
        for k in range(n):
            layers.append(Inverted(i, c, s if k == 0 else 1, t))
            i = c
    return nn.Sequential(*layers, conv(i, 1280, 1), head(1280))


class Dense(nn.Module):
    def __init__(self, i: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(i), nn.ReLU(), nn.Conv2d(i, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth), nn.ReLU(), nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, self.body(x)), 1)


def densenet121() -> nn.Module:
    layers: list[nn.Module] = [conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    i = 64
    for stage, count in enumerate((6, 12, 24, 16)):
        for _ in range(count):
            layers.append(Dense(i, 32))
            i += 32
        if stage < 3:
            layers += [nn.BatchNorm2d(i), nn.ReLU(), nn.Conv2d(i, i // 2, 1, bias=False), nn.AvgPool2d(2)]
            i //= 2
    return nn.Sequential(*layers, nn.BatchNorm2d(i), nn.ReLU(), head(i))


class Block(nn.Module):
    """A transformer layer with normalisation before attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(a.transpose(1, 2).reshape(b, n, w))
        return x + self.mlp(self.norm2(x))


class Bert(nn.Module):
    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12, words: int = 30522) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.zeros(TOKENS, width))
        self.body = nn.Sequential(*(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.words(tokens) + self.places)[:, 0])


class Vit(nn.Module):
    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12, patch: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first, self.places = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(197, width))
        self.body = nn.Sequential(*(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(x.shape[0], -1, -1), x), 1) + self.places
        return self.head(self.body(x)[:, 0])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet50": lambda: resnet((3, 4, 6, 3)),
    "resnet101": lambda: resnet((3, 4, 23, 3)),
    "vgg16": vgg16,
    "mobilenet_v2": mobilenet_v2,
    "densenet121": densenet121,
    "vit_b16": Vit,
    "bert_base": Bert,
    "bert_large": lambda: Bert(1024, 24, 16),
}


def make(name: str, device: str) -> nn.Module:
    """A loaded model, in half precision on a GPU."""
    with torch.device(device):
        model = MODELS[name]().eval().requires_grad_(False)
    return model.half().to(memory_format=torch.channels_last) if device == "cuda" else model


def make_input(name: str, batch: int, device: str, pinned: bool = False) -> torch.Tensor:
    if name.startswith("bert"):
        x = torch.randint(0, 30522, (batch, TOKENS))
    else:
        x = torch.rand(batch, 3, 224, 224, dtype=torch.float16 if device == "cuda" or pinned else torch.float32)
        x = x.contiguous(memory_format=torch.channels_last)
    return x.pin_memory() if pinned else x.to(device)
