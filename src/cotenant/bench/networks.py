"""Neural networks of the benchmarks, written in plain torch so that no model library is needed. Weights are random."""

from __future__ import annotations

from typing import Any


def resnet50(torch: Any, classes: int = 1000) -> Any:
    """Return ResNet-50 (He et al. 2015), with the stride in the 3x3 convolution: 25.6 M weights, 4.1 GFLOP for one
    224x224 image.
    """
    nn = torch.nn

    def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[Any]:
        layer = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
        return [layer, nn.BatchNorm2d(outputs)]

    class Bottleneck(nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self, inputs: int, width: int, stride: int) -> None:
            super().__init__()
            outputs = 4 * width
            self.body = nn.Sequential(
                *convolution(inputs, width, 1),
                nn.ReLU(inplace=True),
                *convolution(width, width, 3, stride),
                nn.ReLU(inplace=True),
                *convolution(width, outputs, 1),
            )
            same = stride == 1 and inputs == outputs
            self.shortcut = nn.Identity() if same else nn.Sequential(*convolution(inputs, outputs, 1, stride))

        def forward(self, x: Any) -> Any:
            return torch.relu(self.body(x) + self.shortcut(x))

    layers = [*convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, stride if block == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def transformer(torch: Any, *, width: int = 768, layers: int = 6, heads: int = 12, words: int = 8192) -> Any:
    """Return a small language model of encoder layers; maps token ids to logits."""
    nn = torch.nn
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, activation="gelu")
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(words, width), encoder, nn.Linear(width, words))


def training_step(torch: Any, kind: str, batch: int) -> Any:
    """Return a function that runs one training step of `train-resnet50` or `train-transformer` on the GPU with bf16
    autocast. `batch` counts images of 224x224, or sequences of 256 tokens.
    """
    torch.backends.cudnn.benchmark = True
    if kind == "train-resnet50":
        net = resnet50(torch).cuda().to(memory_format=torch.channels_last)
        inputs = torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
        targets = torch.randint(0, 1000, (batch,), device="cuda")
    else:
        net = transformer(torch).cuda()
        inputs = torch.randint(0, 8192, (batch, 256), device="cuda")
        targets = torch.randint(0, 8192, (batch * 256,), device="cuda")
    optimiser = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(net(inputs).float().flatten(0, -2), targets)
        loss.backward()
        optimiser.step()

    return step
