"""LightlyTrain's half of `bench_lightly_train.py`, for an interpreter that has lightly-train and nothing of this project.

Reads a job as JSON from the standard input; prints images a second of its steps, without start and end, and writes the student's weights.
"""

import json
import sys
import time

import lightly_train
import timm
import torch
from lightly_train._models.timm import timm as wrapper
from safetensors.torch import load_file, save_file


def main() -> None:
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    teacher, student = (timm.create_model(job[one]["architecture"], num_classes=0) for one in ("teacher", "student"))
    teacher.load_state_dict(load_file(job["teacher"]["weights"]))
    student.load_state_dict(load_file(job["student"]["weights"]))
    # Of timm's EfficientNets LightlyTrain 0.18 takes a map of 320 channels for the 1,280 of their last layer, and fails.
    wrapper._get_forward_features_fn = lambda model: wrapper._forward_features
    began, ask = [], teacher.forward_features
    teacher.forward_features = lambda images: (began.append(time.perf_counter()), ask(images))[1]
    lightly_train.pretrain(
        out=job["output"],
        data=job["photos"],
        model=student,
        method="distillation",
        method_args={"teacher": teacher},
        epochs=job["epochs"],
        batch_size=job["batch_size"],
        num_workers=0,
        accelerator="cpu",
        devices=1,
        precision="32-true",
        seed=job["seed"],
        transform_args={
            "image_size": (job["size"], job["size"]),
            "normalize": {"mean": job["mean"], "std": job["std"]},
        },
        overwrite=True,
    )
    seconds = (began[-1] - began[1]) / (len(began) - 2)
    save_file({name: value.contiguous() for name, value in student.state_dict().items()}, job["trained"])
    print(json.dumps({"steps": len(began), "images_per_second": job["batch_size"] / seconds}))


if __name__ == "__main__":
    main()
