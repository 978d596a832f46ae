"""A one-file plugin for tests: a video reader that never comes back from some clips, or refuses them."""

import ctypes
from dataclasses import dataclass

from mm_core import Component, hookimpl
from mm_core.builtin.configs.data import PyAVConfig
from mm_core.data import PyAVReader
from mm_core.errors import DataError


@dataclass(frozen=True)
class HangingConfig(PyAVConfig):
    clips: tuple[str, ...] = ()  # the names of their files
    refuses: bool = False  # refuses them instead


@hookimpl
def mm_video_readers():
    target = "hanging_reader:Hanging"
    return [Component(name="hanging", target=target, config="hanging_reader:HangingConfig")]


class Hanging:
    def __init__(self, clips, refuses, max_pixels):
        self.clips, self.refuses, self.reader = clips, refuses, PyAVReader(max_pixels)

    def probe(self, path):
        return self.reader.probe(path)

    def read(self, path, seconds):
        if path.name in self.clips and self.refuses:
            raise DataError("it is refused", where=str(path))
        if path.name in self.clips:
            ctypes.PyDLL(None).sleep(3600)  # one call of C that keeps the GIL: no thread can run
        return self.reader.read(path, seconds)
