"""Which bytes of which files are in flight, so that a write never meets another transfer on the same bytes."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from ds_nvme.errors import OverlapError

FileId = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Region:
    """Bytes `[start, stop)` of a file (device and inode) that a transfer reads or writes."""

    file: FileId
    path: str
    start: int
    stop: int
    write: bool


class Regions:
    """The regions in flight. One for the whole process, since handles share files. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_file: dict[FileId, list[Region]] = {}

    def enter(self, region: Region) -> None:
        """Note a transfer that begins.

        Raises:
            OverlapError: it would write what another reads or writes, or read what another writes.
        """
        with self._lock:
            present = self._by_file.setdefault(region.file, [])
            for other in present:
                if (region.write or other.write) and region.start < other.stop and other.start < region.stop:
                    raise OverlapError(
                        f"bytes that are written take part in no other transfer: a {_name(region)} of "
                        f"[{region.start}, {region.stop}) of {region.path} was asked for while a {_name(other)} of "
                        f"[{other.start}, {other.stop}) is in flight; wait for it first"
                    )
            present.append(region)

    def leave(self, region: Region) -> None:
        """Note a transfer's end."""
        with self._lock:
            present = self._by_file[region.file]
            present.remove(region)
            if not present:
                del self._by_file[region.file]


def _name(region: Region) -> str:
    return "write" if region.write else "read"


IN_FLIGHT = Regions()
"""All transfers of this process."""
