"""What the ranks write: read from their pipes, passed on, kept for the report, copied to files.

Nothing here blocks and there are no threads: the supervisor's loop says when a descriptor is ready. So a
reader that pauses the launcher's output pauses the ranks (as a pipe would), and not the supervision.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import stat
from collections import deque
from typing import BinaryIO

TAIL_LINES = 20
"""Number of a rank's last lines that are kept for the report."""
_TAIL_LINE_BYTES = 2000
_HELD_BYTES = 64 * 1024
_QUEUE_BYTES = 1024 * 1024
_READ_BYTES = 64 * 1024
_ESCAPES = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")


class Sink:
    """One of the launcher's own outputs, with a queue in front.

    The descriptor is shared with whoever started us, so it must not be made non-blocking. Instead no
    more is written than it takes without blocking once `poll` calls it writable.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.error: OSError | None = None
        """Why nothing can be written any more. From then on everything is dropped."""
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._at_line_start = True
        try:
            regular = stat.S_ISREG(os.fstat(fd).st_mode)
        except OSError as error:  # closed before we came
            regular, self.error = False, error
        self._chunk_bytes = _READ_BYTES if regular else select.PIPE_BUF

    @property
    def pending(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._queue)

    @property
    def has_room(self) -> bool:
        """Whether the queue is short enough to read more."""
        return self._queued_bytes < _QUEUE_BYTES

    def write(self, data: bytes) -> None:
        """Queues bytes."""
        if data and self.error is None:
            self._queue.append(data)
            self._queued_bytes += len(data)
            self._at_line_start = data.endswith((b"\n", b"\r"))

    def write_line(self, line: bytes) -> None:
        """Queues a line of its own, without its end, even where a rank has left one unfinished."""
        self.write((b"" if self._at_line_start else b"\n") + line + b"\n")

    def push(self) -> None:
        """Writes one chunk. Call it when `poll` says that `fd` is writable."""
        data = self._queue.popleft()
        try:
            written = os.write(self.fd, data[: self._chunk_bytes])
        except BlockingIOError:
            written = 0
        except OSError as error:
            self.error = error
            self._queue.clear()
            self._queued_bytes = 0
            return
        self._queued_bytes -= written
        if written < len(data):
            self._queue.appendleft(data[written:])

    @property
    def reader_left(self) -> bool:
        """Whether whoever read this output has closed it."""
        return self.error is not None and self.error.errno == errno.EPIPE


class Tail:
    """The last lines that one rank wrote, its two streams together."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=TAIL_LINES)

    def add(self, line: bytes) -> None:
        """Adds a line, without its end."""
        # Of a progress bar, which goes back to the line's start again and again, what was seen last.
        seen = line.rstrip(b"\r").rpartition(b"\r")[2]
        self._lines.append(_ESCAPES.sub(b"", seen)[:_TAIL_LINE_BYTES])

    def lines(self) -> list[bytes]:
        """The lines, oldest first."""
        return list(self._lines)


class RankStream:
    """The launcher's end of one pipe from a rank.

    Args:
        fd: the reading end. Owned from here on.
        sink: where the bytes go on to.
        tail: where the rank's last lines are kept.
        log: file that receives the bytes too; None: none. Owned from here on.
        whole_lines: pass lines on whole, so that those of several ranks do not mix: an unfinished line is
            held until it ends, is 64 KiB long or the stream ends (it is then ended). False: pass on every
            byte at once, and nothing but those.
    """

    def __init__(self, fd: int, sink: Sink, tail: Tail, log: BinaryIO | None = None, whole_lines: bool = True) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.sink = sink
        self.log_error: OSError | None = None
        """Why the log could not be written; nothing more is."""
        self._tail = tail
        self._log = log
        self._whole_lines = whole_lines
        self._held = b""  # begun and not yet passed on
        self._tail_held = b""  # begun and not yet in the tail

    def pull(self) -> bool:
        """Reads once. Returns False when the stream has ended; it is then closed."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return True
        if not data:
            self.close()
            return False
        self._feed(data)
        return True

    def drain(self) -> None:
        """Reads what dead ranks have left in the pipe, and closes it.

        Not until its end: a process that has made itself a daemon may hold it open for ever. What the
        rank wrote is in the pipe, and no pipe holds more than a megabyte.
        """
        left = 1024 * 1024
        with contextlib.suppress(BlockingIOError):
            while left > 0 and (data := os.read(self.fd, _READ_BYTES)):
                self._feed(data)
                left -= len(data)
        self.close()

    def close(self) -> None:
        """Passes on what was held and closes the pipe and the log."""
        if self._tail_held:
            self._tail.add(self._tail_held)
        if self._held:
            # A line that its rank never ended would run into the next rank's.
            self.sink.write(self._held + b"\n")
        self._held = self._tail_held = b""
        os.close(self.fd)
        if self._log is not None:
            self._log.close()

    def _feed(self, data: bytes) -> None:
        if self._log is not None and self.log_error is None:
            try:
                self._log.write(data)
            except OSError as error:  # a full disk must not end the training
                self.log_error = error
        self._keep(data)
        if not self._whole_lines:
            self.sink.write(data)
            return
        # Either end of line counts: a progress bar only ever writes \r.
        data = self._held + data
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - cut >= _HELD_BYTES:
            cut = len(data)
        self.sink.write(data[:cut])
        self._held = data[cut:]

    def _keep(self, data: bytes) -> None:
        *lines, held = (self._tail_held + data).split(b"\n")
        for line in lines[-TAIL_LINES:]:
            self._tail.add(line)
        if len(held) > _HELD_BYTES:
            held = held[-_HELD_BYTES:]
        self._tail_held = held
