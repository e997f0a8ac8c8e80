"""The models of `model_families.py` in plain torch: images, detectors, state spaces, recurrences, recommenders, graphs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.families.models import BN, HW, IMAGE, TEXT, WORDS, Family, ids, image


class SqueezeExcite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, 8, 1), nn.Conv2d(8, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class Inverted(nn.Module):
    """An inverted residual of MobileNetV3 (arXiv:1905.02244)."""

    def __init__(self, width: int, out: int, stride: int, wide: int) -> None:
        super().__init__()
        self.same = width == out and stride == 1
        self.body = nn.Sequential(
            nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish(),
            nn.Conv2d(wide, wide, 5, stride, 2, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.Hardswish(),
            SqueezeExcite(wide), nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return x + found if self.same else found


def mobilenetv3() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.Hardswish(), Inverted(16, 24, 2, 48), Inverted(24, 24, 1, 64),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 32), nn.Hardswish(), nn.Linear(32, 7),
    )  # fmt: skip


class UNet(nn.Module):
    """A U-Net of two levels, which resizes by factor 2 in a mode, or to the size of the skipped tensor."""

    def __init__(self, mode: str, by_size: bool = False) -> None:
        super().__init__()
        self.mode, self.by_size = mode, by_size
        block = lambda a, b: nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU())
        self.first, self.second, self.deep = block(3, 8), block(8, 16), block(16, 16)
        self.up2, self.up1, self.head = block(32, 8), block(16, 8), nn.Conv2d(8, 2, 1)

    def grow(self, x: Tensor, skip: Tensor) -> Tensor:
        corners = False if self.mode == "bilinear" else None
        if self.by_size:
            return F.interpolate(x, size=skip.shape[2:], mode=self.mode, align_corners=corners)
        return F.interpolate(x, scale_factor=2.0, mode=self.mode, align_corners=corners)

    def forward(self, x: Tensor) -> Tensor:
        a = self.first(x)
        b = self.second(F.max_pool2d(a, 2))
        c = self.deep(F.max_pool2d(b, 2))
        b = self.up2(torch.cat((self.grow(c, b), b), 1))
        return self.head(self.up1(torch.cat((self.grow(b, a), a), 1)))


class SelectiveState(nn.Module):
    """A diagonal linear recurrence h[t] = a[t] h[t-1] + b[t], by cumulative sums of logarithms or by a scan."""

    def __init__(self, scan: bool) -> None:
        super().__init__()
        self.embed, self.rate, self.value = nn.Embedding(WORDS, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.out, self.scan = nn.Linear(32, WORDS), scan

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        decay, value = -F.softplus(self.rate(x)), self.value(x)
        if self.scan:
            step = lambda h, ab: (h * ab[0].exp() + ab[1], h * ab[0].exp() + ab[1])
            from torch._higher_order_ops.scan import scan

            _, states = scan(step, x.new_zeros(x.shape[0], 32), (decay, value), dim=1)
        else:
            total = decay.cumsum(1) / 8
            states = (value * (-total).exp()).cumsum(1) * total.exp()
        return self.out(states)


class Recommender(nn.Module):
    """DLRM (arXiv:1906.00091): bags of embeddings, pairwise products, layers; bags as rows, or as offsets into one list."""

    def __init__(self, offsets: bool) -> None:
        super().__init__()
        self.table, self.offsets = nn.EmbeddingBag(WORDS, 16, mode="sum"), offsets
        self.tables = nn.ModuleList([nn.EmbeddingBag(WORDS, 16, mode="mean") for _ in range(2)])
        self.dense, self.top = nn.Linear(13, 16), nn.Linear(16 + 6, 1)

    def forward(self, dense: Tensor, bags: Tensor, at: Tensor) -> Tensor:
        first = F.relu(self.dense(dense))
        found = [self.table(bags, at) if self.offsets else self.table(bags)]
        found += [t(bags, at) if self.offsets else t(bags) for t in self.tables]
        features = torch.stack([first, *found], 1)
        products = features @ features.transpose(1, 2)
        i, j = torch.tril_indices(4, 4, -1)
        return torch.sigmoid(self.top(torch.cat((first, products[:, i, j]), 1)))


def clicks(offsets: bool) -> Family:
    def inputs(g: torch.Generator, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        b, n = shape
        bags = torch.randint(0, WORDS, (b * n,) if offsets else (b, n), generator=g)
        return torch.randn(b, 13, generator=g), bags, torch.arange(b) * n

    dims = ({0: "b"}, {0: "k"} if offsets else {0: "b", 1: "n"}, {0: "b"})
    return Family(lambda: Recommender(offsets), inputs, dims, TEXT)


class Graph(nn.Module):
    """Two layers of message passing with the mean over incoming edges, by scatter_add or index_add."""

    def __init__(self, scatter: bool) -> None:
        super().__init__()
        self.scatter = scatter
        self.own = nn.ModuleList([nn.Linear(12, 32), nn.Linear(32, 5)])
        self.other = nn.ModuleList([nn.Linear(12, 32, bias=False), nn.Linear(32, 5, bias=False)])

    def total(self, messages: Tensor, to: Tensor, like: Tensor) -> Tensor:
        zero = torch.zeros(like.shape[0], messages.shape[1])
        if self.scatter:
            return zero.scatter_add(0, to[:, None].expand(-1, messages.shape[1]), messages)
        return zero.index_add(0, to, messages)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        start, end = edges[0], edges[1]
        count = self.total(torch.ones(edges.shape[1], 1), end, x).clamp(min=1)
        for own, other in zip(self.own, self.other):
            x = F.relu(own(x) + other(self.total(x[start], end, x) / count))
        return x


def graph(scatter: bool) -> Family:
    inputs = lambda g, s: (torch.randn(s[0] * 3, 12, generator=g), torch.randint(0, s[0] * 3, (2, s[1]), generator=g))
    return Family(lambda: Graph(scatter), inputs, ({0: "nodes"}, {1: "edges"}), TEXT)


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 32)
        self.body = getattr(nn, kind)(32, 16, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(32, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.body(self.embed(tokens))[0])


def recurrent(kind: str) -> Family:
    """The length is static: torch.export unrolls a recurrence at the length of the example."""
    return Family(lambda: Recurrent(kind), lambda g, s: (ids(g, s[0], 7),), ({0: "b"},), ((2,), (1,), (3,), (5,)))


class Yolo(nn.Module):
    """A detector's head: boxes from distributions over distances, scores, and a way to choose among them."""

    def __init__(self, choose: str) -> None:
        super().__init__()
        self.choose = choose
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, 4, 1), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.SiLU()
        )
        self.box, self.score = nn.Conv2d(16, 4 * 8, 1), nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        f = self.body(x)
        b, _, h, w = f.shape
        far = self.box(f).view(b, 4, 8, h * w).softmax(2)
        distances = (far * torch.arange(8.0)[None, None, :, None]).sum(2)
        ys, xs = torch.meshgrid(torch.arange(h) + 0.5, torch.arange(w) + 0.5, indexing="ij")
        centre = torch.stack((xs, ys)).reshape(1, 2, h * w)
        boxes = (torch.cat((centre - distances[:, :2], centre + distances[:, 2:]), 1) * 8).transpose(1, 2)
        scores = self.score(f).view(b, 5, h * w).sigmoid().transpose(1, 2)
        if self.choose == "none":
            return boxes, scores
        best, label = scores.max(2)
        if self.choose == "threshold":
            kept = best > 0.5
            return torch.where(kept[..., None], boxes, 0.0), torch.where(kept, label, -1)
        if self.choose == "topk":
            top, at = best.topk(20, 1)
            return top, boxes.gather(1, at[..., None].expand(-1, -1, 4)), label.gather(1, at)
        return self.suppressed(boxes, best, label)

    def suppressed(self, boxes: Tensor, best: Tensor, label: Tensor) -> tuple[Tensor, ...]:
        """Matrix suppression (arXiv:2003.10152) of the best 20: scores decay by the overlap with better boxes."""
        top, at = best.topk(20, 1)
        found = boxes.gather(1, at[..., None].expand(-1, -1, 4))
        low = torch.maximum(found[:, :, None, :2], found[:, None, :, :2])
        high = torch.minimum(found[:, :, None, 2:], found[:, None, :, 2:])
        inside = (high - low).clamp(min=0).prod(-1)
        area = (found[..., 2:] - found[..., :2]).prod(-1)
        overlap = inside / (area[:, :, None] + area[:, None, :] - inside)
        worst = overlap.tril(-1).amax(-1)
        return top * (1 - worst), found, label.gather(1, at)


def detector(choose: str) -> Family:
    return Family(lambda: Yolo(choose), image, (HW,), IMAGE)


def unet(mode: str, by_size: bool = False) -> Family:
    quarters = ((2, 64, 96), (1, 32, 32), (3, 68, 100), (1, 128, 160))
    sizes = HW if by_size else {0: "b", 2: "4*h", 3: "4*w"}
    least = 8 if by_size else 4
    shapes = IMAGE if by_size else quarters
    return Family(lambda: UNet(mode, by_size), image, (sizes,), shapes, {"h": least, "w": least})


PLAIN: dict[str, Family] = {
    "mobilenetv3": Family(mobilenetv3, image, (HW,), IMAGE),
    "unet_nearest": unet("nearest"),
    "unet_bilinear": unet("bilinear"),
    "unet_size": unet("bilinear", True),
    "ssm_cumsum": Family(lambda: SelectiveState(False), lambda g, s: (ids(g, *s),), (BN,), TEXT),
    "ssm_scan": Family(lambda: SelectiveState(True), lambda g, s: (ids(g, *s),), (BN,), TEXT),
    "dlrm_bags": clicks(False),
    "dlrm_offsets": clicks(True),
    "gnn_scatter_add": graph(True),
    "gnn_index_add": graph(False),
    "lstm": recurrent("LSTM"),
    "gru": recurrent("GRU"),
    "yolo_topk": detector("topk"),
    "yolo_thresh": detector("threshold"),
    "yolo_nms": detector("suppress"),
}
