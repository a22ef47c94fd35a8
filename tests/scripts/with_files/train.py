"""argparse, a configuration and a module beside the script, checkpoints in the working folder."""

import argparse
import hashlib
import json
import logging
from pathlib import Path

import torch
from network import Tagger
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("seed", type=int, nargs="?", default=0)
parser.add_argument("--out", default="checkpoint.pt")
parser.add_argument("-v", "--verbose", action="store_true")


def main():
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING)
    config = json.loads(Path(__file__).with_name("config.json").read_text())
    torch.manual_seed(args.seed)
    tagger = Tagger(config["width"])
    optim = torch.optim.Adam(tagger.parameters(), lr=config["rate"])
    losses = []
    for step in range(config["steps"]):
        bits = torch.randint(0, 2, (32, 6))
        loss = F.cross_entropy(tagger(bits).transpose(1, 2), bits.cumsum(1) % 2)
        optim.zero_grad()
        loss.backward()
        optim.step()
        losses.append(loss.item())
        if step % 20 == 0:
            logging.info("step %d: %.4f", step, loss)
    torch.save({"model": tagger.state_dict(), "optimizer": optim.state_dict()}, args.out)
    digest = hashlib.sha256()
    for value in torch.load(args.out)["model"].values():
        digest.update(value.numpy().tobytes())
    print("digest", digest.hexdigest(), "metric", sum(losses[-10:]) / 10)


if __name__ == "__main__":
    main()
