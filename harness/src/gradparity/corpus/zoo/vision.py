"""Models of timm and torchvision: classification, detection, segmentation, video, optical flow.

In: one row each: how the library is asked for the model, and the shape of an image. Out: recipes.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from gradparity.corpus.zoo.recipe import Recipe, Trained, trained
from gradparity.probe import Probe

CLASSES = 4

#: name in timm: side of an image
TIMM = {
    "resnet18": 32, "resnet26d": 32, "efficientnet_b0": 32, "mobilenetv3_small_050": 32, "convnext_atto": 32,
    "regnetx_002": 32, "vit_tiny_patch16_224": 32, "deit_tiny_patch16_224": 32, "swin_tiny_patch4_window7_224": 56,
    "mixer_s32_224": 32, "densenet121": 32, "ghostnet_050": 32, "levit_128s": 32, "edgenext_xx_small": 32,
}  # fmt: skip
SIZED = ("vit", "deit", "swin", "mixer", "levit")

#: name in torchvision.models: shape of one example
CLASSIFIERS = {
    "resnet18": (3, 32, 32), "mobilenet_v2": (3, 32, 32), "shufflenet_v2_x0_5": (3, 32, 32),
    "googlenet": (3, 64, 64), "squeezenet1_1": (3, 64, 64), "vgg11_bn": (3, 32, 32), "swin_t": (3, 32, 32),
    "maxvit_t": (3, 224, 224), "video.r3d_18": (3, 4, 32, 32), "video.mc3_18": (3, 4, 32, 32),
}  # fmt: skip
SEGMENTERS = ("segmentation.fcn_resnet50", "segmentation.deeplabv3_mobilenet_v3_large")
DETECTORS = ("detection.fasterrcnn_mobilenet_v3_large_320_fpn", "detection.ssdlite320_mobilenet_v3_large")


def _timm(name: str, side: int, p: Probe) -> Trained:
    sizes = {"img_size": side} if name.startswith(SIZED) else {}
    model = importlib.import_module("timm").create_model(name, num_classes=CLASSES, **sizes)
    return Trained(model, _labelled(p, (3, side, side)), _classify)


def _torchvision(name: str) -> Any:
    made: Any = importlib.import_module("torchvision.models")
    for part in name.split("."):
        made = getattr(made, part)
    return made


def _classifier(name: str, shape: tuple[int, ...], p: Probe) -> Trained:
    more = {"aux_logits": False, "init_weights": True} if name == "googlenet" else {}
    model = _torchvision(name)(weights=None, num_classes=CLASSES, **more)
    return Trained(model, _labelled(p, shape), _classify)


def _labelled(p: Probe, shape: tuple[int, ...]) -> list[Any]:
    return [(p.randn(2, *shape), p.randint(CLASSES, 2)) for _ in range(2)]


def _classify(model: Any, batch: Any) -> torch.Tensor:
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


def _segmenter(name: str, p: Probe) -> Trained:
    model = _torchvision(name)(weights=None, weights_backbone=None, num_classes=CLASSES)
    batches = [(p.randn(2, 3, 32, 32), p.randint(CLASSES, 2, 32, 32)) for _ in range(2)]
    return Trained(model, batches, _segment)


def _segment(model: Any, batch: Any) -> torch.Tensor:
    images, labels = batch
    return functional.cross_entropy(model(images)["out"], labels)


def _detector(name: str, p: Probe) -> Trained:
    model = _torchvision(name)(weights=None, weights_backbone=None, num_classes=CLASSES)
    boxes = p.tensor([[4.0, 4.0, 40.0, 40.0], [10.0, 12.0, 50.0, 60.0]])
    target = {"boxes": boxes, "labels": p.tensor([1, 2])}
    return Trained(model, [(p.rand(3, 64, 64), target)], _detect)


def _detect(model: Any, batch: Any) -> torch.Tensor:
    image, target = batch
    losses = model([image], [{key: value.clone() for key, value in target.items()}])
    total: torch.Tensor = sum(losses.values())
    return total


def _flow(p: Probe) -> Trained:
    model = _torchvision("optical_flow.raft_small")(weights=None)
    pair = (p.randn(1, 3, 128, 128), p.randn(1, 3, 128, 128), p.randn(1, 2, 128, 128))
    return Trained(model, [pair], _follow)


def _follow(model: Any, batch: Any) -> torch.Tensor:
    first, second, flow = batch
    total: torch.Tensor = sum(
        (guess - flow).abs().mean() for guess in model(first, second, num_flow_updates=2)
    )
    return total


VISION: dict[str, Recipe] = {
    **{f"timm/{name}": trained("timm", partial(_timm, name, side)) for name, side in TIMM.items()},
    **{
        f"torchvision/{name}": trained("torchvision", partial(_classifier, name, shape))
        for name, shape in CLASSIFIERS.items()
    },
    **{f"torchvision/{name}": trained("torchvision", partial(_segmenter, name)) for name in SEGMENTERS},
    **{f"torchvision/{name}": trained("torchvision", partial(_detector, name)) for name in DETECTORS},
    "torchvision/optical_flow.raft_small": trained("torchvision", _flow),
}
