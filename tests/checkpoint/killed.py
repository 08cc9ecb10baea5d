"""A process that saves and kills itself: `python -m tests.checkpoint.killed ROOT HOW`.

HOW is `at N` (die before the N-th storage operation of the second save), `replace N` (the same where that save is of
the step that is there already), or `loop` (save until killed from outside, a line on stdout after each).
"""

import os
import signal
import sys
from pathlib import Path

import torch

from shardlab.checkpoint import AsyncSaver, Contents, Saver, checkpoints
from shardlab.checkpoint.storage import LocalStorage, Reader, Writer
from shardlab.state.fragment import MASTER
from tests.checkpoint.support import whole_fragments


class DyingStorage(LocalStorage):
    """Counts what changes the disk, and dies before the one it is told."""

    def __init__(self) -> None:
        self.count = 0
        self.last = -1

    def tick(self) -> None:
        self.count += 1
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def make_directory(self, directory: Path) -> None:
        self.tick()
        super().make_directory(directory)

    def create(self, path: Path) -> Writer:
        self.tick()
        return DyingWriter(self, super().create(path))

    def open(self, path: Path) -> Reader:
        self.tick()
        return super().open(path)

    def rename(self, source: Path, target: Path) -> None:
        self.tick()
        super().rename(source, target)

    def sync_directory(self, directory: Path) -> None:
        self.tick()
        super().sync_directory(directory)

    def delete(self, path: Path) -> None:
        self.tick()
        if self.is_directory(path):
            for file in list(path.iterdir()):  # it may die with a half of them gone
                self.tick()
                file.unlink()
        super().delete(path)


class DyingWriter:
    def __init__(self, storage: DyingStorage, writer: Writer):
        self._storage = storage
        self._writer = writer

    def write(self, data: memoryview | bytes) -> None:
        self._storage.tick()
        self._writer.write(memoryview(data)[: len(data) // 2])
        self._storage.tick()
        self._writer.write(memoryview(data)[len(data) // 2 :])

    def sync(self) -> None:
        self._storage.tick()
        self._writer.sync()

    def close(self) -> None:
        self._writer.close()


def state(step: int, size: int = 100) -> dict[tuple[str, str], torch.Tensor]:
    return {(f"w{n}", MASTER): torch.full((size,), float(step)) for n in range(3)}


def main(root: Path, how: str, at: str = "") -> None:
    storage = DyingStorage()
    if how == "loop":
        with AsyncSaver(Saver(root, keep=1, storage=storage, file_bytes=1 << 20)) as background:
            step = checkpoints(root)[-1].step if checkpoints(root) else 0
            while True:
                step += 1
                background.save(Contents(step=step), whole_fragments(state(step, 200_000)))
                print(step, flush=True)
    saver = Saver(root, keep=1, storage=storage, file_bytes=500)
    if not checkpoints(root):
        saver.save(Contents(step=1), whole_fragments(state(1)))
    storage.count, storage.last = 0, int(at or -1)
    again = how == "replace"
    saver.save(Contents(step=1 if again else 2), whole_fragments(state(1 if again else 2)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
