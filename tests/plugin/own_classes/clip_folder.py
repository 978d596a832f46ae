"""A dataset as users write one: map-style, of the files of a folder."""

import json
import random
from pathlib import Path

import av
import torch
from torch.utils.data import Dataset


class ClipFolder(Dataset):
    def __init__(self, root: str, num_frames: int = 16, transform=None):
        self.root, self.num_frames, self.transform = Path(root), num_frames, transform
        self.rows = json.loads((self.root / "rows.json").read_text())

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, idx):
        row = self.rows[idx]
        with av.open(str(self.root / row["file"])) as container:
            frames = [torch.from_numpy(f.to_ndarray(format="rgb24")) for f in container.decode(video=0)]
        start = random.randint(0, len(frames) - self.num_frames)
        video = torch.stack(frames[start : start + self.num_frames]).permute(3, 0, 1, 2)
        video = video.float() / 127.5 - 1
        sample = {"video": video, "path": row["file"]}
        sample["text"] = row["caption"]
        return sample
