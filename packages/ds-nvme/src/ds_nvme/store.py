"""Named tensors in a folder, or striped over folders on several drives."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path as FilePath
from typing import Any
from urllib.parse import quote

from ds_nvme.errors import BudgetError, ClosedHandleError, InvalidBufferError, NvmeError
from ds_nvme.files import Path
from ds_nvme.gathered import Gathered
from ds_nvme.handle import AioHandle
from ds_nvme.like import Kind, kind_of
from ds_nvme.memory import Memory
from ds_nvme.operation import Operation
from ds_nvme.view import View

_INDEX = "ds-nvme-store.json"
_STRIPE = 4096
"""Stripes begin at multiples of this many bytes, so that all of them move without a copy."""
_SMALLEST_STRIPE = 1 << 20
"""A tensor is spread over so many drives that each holds at least this many bytes."""


@dataclass(frozen=True)
class Entry:
    """What is known of a stored tensor.

    Args:
        kind: what `get` makes of it.
        nbytes: its size.
        first: number of the folder that holds its first stripe; the following ones hold the next.
        file: name of its files.
    """

    kind: Kind
    nbytes: int
    first: int
    file: str


class TensorStore:
    """Keeps tensors in files, by name. Use it as a context manager, or `close()` it.

    Operations on one name happen in the order they were asked for; on different names they overlap. Stored tensors
    outlive the store where it was closed (or `flush` was called) after the last change; a process that died in
    between leaves a store that opens empty, never half-written tensors.

    Args:
        folders: one, or one on each drive; created where they don't exist. A store has its folders for itself.
        budget_bytes: most bytes to keep in files. Default: what the drives hold.
        handle_options: of the `AioHandle` for each folder, as `AioConfig(...).model_dump()` gives them.
    """

    def __init__(
        self,
        folders: Path | Sequence[Path],
        *,
        budget_bytes: int | None = None,
        handle_options: dict[str, Any] | None = None,
    ) -> None:
        listed = [folders] if isinstance(folders, (str, os.PathLike)) else list(folders)
        if not listed:
            raise ValueError("a store has one folder or more: got none")
        self._folders = [FilePath(folder) for folder in listed]
        self._budget = budget_bytes
        for folder in self._folders:
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        # The only lock that I/O threads take: whoever holds the other may be waiting for them.
        self._count_lock = threading.Lock()
        self._entries: dict[str, Entry] = self._load()
        self._used = sum(entry.nbytes for entry in self._entries.values())
        self._turn = 0
        self._under_way: dict[str, Gathered[Any]] = {}  # the last transfer of each name
        self._fetched: dict[str, Gathered[Any]] = {}  # prefetched, not yet taken
        self._closed = False
        self._handles = [AioHandle(**(handle_options or {})) for _ in self._folders]

    def put(self, name: str, tensor: Any) -> Gathered[None]:
        """Begin to store a tensor, in place of one of that name. It must not change before the transfer ends.

        Args:
            name: any text.
            tensor: contiguous: numpy array, torch tensor on any device, or buffer.

        Raises:
            InvalidBufferError, NoSpaceError, ClosedHandleError.
            BudgetError: it doesn't fit into `budget_bytes`.
        """
        view = View(tensor, writable=False)
        nbytes = view.nbytes
        view.release()
        with self._lock:
            self._begin(name)
            before = self._entries.get(name)
            used = self._used + nbytes - (before.nbytes if before else 0)
            if self._budget is not None and used > self._budget:
                raise BudgetError(
                    f"a store keeps within its budget: with {name!r} of {nbytes} bytes it would hold {used} of "
                    f"{self._budget}; delete something or raise budget_bytes"
                )
            self._forget_index()
            if before is not None and before.nbytes == nbytes:
                entry = replace(before, kind=kind_of(tensor))  # written in place: the files' blocks are there
            else:
                self._remove(name)
                self._turn += 1
                entry = Entry(kind_of(tensor), nbytes, self._turn % len(self._folders), _file_name(name))
                self._count(nbytes)
            self._entries[name] = entry
            operations = self._transfer(entry, tensor, write=True)
            return self._note(name, Gathered(operations, None, lambda well: None if well else self._lose(name, entry)))

    def get(self, name: str, out: Any = None) -> Gathered[Any]:
        """Begin to fetch a tensor.

        Args:
            name: of a stored tensor.
            out: contiguous memory of the tensor's size to fetch into; it is the result then. Default: new memory,
                of the kind, dtype and shape that was put, on the CPU; from `prefetch` where that was called.

        Raises:
            KeyError: nothing of that name is stored.
            InvalidBufferError: `out` has another size.
        """
        with self._lock:
            if out is None and (fetched := self._fetched.pop(name, None)) is not None:
                return fetched
            self._begin(name)
            entry = self.entry(name)
            target = out
            if out is None:
                memory = Memory(entry.nbytes)
                target = memory.buffer[: entry.nbytes]
                out = entry.kind.shape(memory, entry.nbytes)
            else:
                view = View(out, writable=True)
                given = view.nbytes
                view.release()
                if given != entry.nbytes:
                    raise InvalidBufferError(
                        f"out has the stored tensor's size: {name!r} has {entry.nbytes} bytes, out has {given}"
                    )
            return self._note(name, Gathered(self._transfer(entry, target, write=False), out))

    def prefetch(self, name: str) -> None:
        """Begin to fetch a tensor into memory that the next `get` without `out` hands over. Once is enough."""
        with self._lock:
            if name not in self._fetched:
                self._fetched[name] = self.get(name)

    def delete(self, name: str) -> None:
        """Remove a tensor and its files; waits for its transfers.

        Raises:
            KeyError: nothing of that name is stored.
        """
        with self._lock:
            self._begin(name)
            self.entry(name)
            self._forget_index()
            self._remove(name)

    def entry(self, name: str) -> Entry:
        """What is known of a stored tensor.

        Raises:
            KeyError: nothing of that name is stored.
        """
        try:
            return self._entries[name]
        except KeyError:
            raise KeyError(f"a tensor is put before it is used: the store has none of the name {name!r}") from None

    def flush(self) -> None:
        """Wait for all transfers and write the index: from now on a new store on these folders has the tensors."""
        with self._lock:
            for name in list(self._under_way):
                self._settle(name)
            target = self._folders[0] / _INDEX
            draft = target.with_suffix(".draft")
            entries = {name: asdict(entry) for name, entry in self._entries.items()}
            with open(draft, "w") as file:
                json.dump({"folders": len(self._folders), "tensors": entries}, file)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(target)

    def close(self) -> None:
        """Flush, and close the handles. Further calls do nothing."""
        with self._lock:
            if not self._closed:
                self.flush()
                self._closed = True
                for handle in self._handles:
                    handle.close()

    @property
    def nbytes(self) -> int:
        """Bytes stored."""
        return self._used

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def __enter__(self) -> TensorStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- how

    def _transfer(self, entry: Entry, tensor: Any, *, write: bool) -> list[Operation]:
        # A flat byte view to cut stripes from; it keeps the tensor alive.
        whole = entry.kind.flatten(tensor)
        return [
            (self._handles[number].start_write if write else self._handles[number].start_read)(whole[start:stop], path)
            for number, path, start, stop in self._stripes(entry)
        ]

    def _stripes(self, entry: Entry) -> Iterator[tuple[int, FilePath, int, int]]:
        """Folder, file and byte range of each stripe."""
        count = max(min(len(self._folders), entry.nbytes // _SMALLEST_STRIPE), 1)
        width = -(-entry.nbytes // (count * _STRIPE)) * _STRIPE
        for index in range(count):
            number = (entry.first + index) % len(self._folders)
            start, stop = (min(at * width, entry.nbytes) for at in (index, index + 1))
            yield number, self._folders[number] / entry.file, start, stop

    def _begin(self, name: str) -> None:
        """Before something new happens to a name: what was under way has ended, what was fetched is out of date."""
        if self._closed:
            raise ClosedHandleError("a store is open: this one was closed; make a new one")
        self._fetched.pop(name, None)
        self._settle(name)

    def _settle(self, name: str) -> None:
        transfer = self._under_way.pop(name, None)
        if transfer is not None:
            transfer.wait()

    def _note(self, name: str, transfer: Gathered[Any]) -> Gathered[Any]:
        self._under_way[name] = transfer
        return transfer

    def _lose(self, name: str, entry: Entry) -> None:
        """A put has failed: there is no such tensor. Called by an I/O thread."""
        if self._entries.get(name) is entry:
            del self._entries[name]
            self._count(-entry.nbytes)

    def _remove(self, name: str) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._count(-entry.nbytes)
            for _, path, _, _ in self._stripes(entry):
                path.unlink(missing_ok=True)

    def _count(self, nbytes: int) -> None:
        with self._count_lock:
            self._used += nbytes

    def _forget_index(self) -> None:
        (self._folders[0] / _INDEX).unlink(missing_ok=True)

    def _load(self) -> dict[str, Entry]:
        try:
            text = (self._folders[0] / _INDEX).read_text()
        except FileNotFoundError:
            return {}
        index = json.loads(text)
        if index["folders"] != len(self._folders):
            raise NvmeError(
                f"a store is opened with the folders it was made with: it has {index['folders']}, got "
                f"{len(self._folders)}"
            )
        return {
            name: Entry(Kind(**{**fields["kind"], "dims": tuple(fields["kind"]["dims"])}), *list(fields.values())[1:])
            for name, fields in index["tensors"].items()
        }


def _file_name(name: str) -> str:
    """A name for the files of a tensor: different for different tensors, and one that every filesystem takes."""
    quoted = quote(name, safe="")
    if 0 < len(quoted) <= 200:
        return f"{quoted}.tensor"
    return f"#{hashlib.sha256(name.encode()).hexdigest()}.tensor"  # no quoted name holds a #
